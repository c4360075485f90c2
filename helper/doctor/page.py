"""Whether the page's files are those that were built: a page of two versions works for nobody."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Final

from helper.doctor.result import CheckResult, fail, ok, warn

SUMS: Final = "SHA256SUMS"
"""What the build writes beside its files: `sha256sum -c` reads it."""
_SHOWN: Final = 3


def look_at_page(folder: Path, *, enabled: bool) -> CheckResult:
    """A line about the page in this folder."""
    if not enabled:
        return ok("page", "it is not served ([ui] enable)")
    try:
        sums = read_sums((folder / SUMS).read_text("utf-8"))
    except FileNotFoundError:
        if not (folder / "index.html").is_file():
            advice = "Name the directory that it was built into in [ui] dist_path, or leave that empty."
            return fail("page", f"there is none in {folder}", advice)
        return warn("page", f"{folder} has no {SUMS} to compare it with", "Build it with `make ui`, which writes it.")
    except (OSError, ValueError) as error:
        return fail("page", f"{folder / SUMS} cannot be read: {error}", "Install the helper again.")
    changed = [name for name, expected in sums.items() if _sum(folder / name) != expected]
    strange = _strange(folder, set(sums))
    if changed or strange:
        text = "; ".join(
            f"{what}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
            for what, names in (("not as they were built", changed), ("not of this build", strange))
            if names
        )
        advice = "Install the helper again, or build the page again with `make ui`: see who has changed it."
        return fail("page", text, advice, changed=changed, strange=strange)
    return ok("page", f"{len(sums)} files are as they were built", files=len(sums))


def read_sums(text: str) -> dict[str, str]:
    """Hashes by file name, from lines as sha256sum writes them.

    Raises:
        ValueError: a line is none of these, or names a file elsewhere.
    """
    found = {}
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64 or ".." in Path(name).parts or Path(name).is_absolute():
            raise ValueError("it is not a list of hashes")
        found[name] = digest
    return found


def _sum(path: Path) -> str | None:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _strange(folder: Path, known: set[str]) -> list[str]:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return sorted(files - known - {SUMS})
