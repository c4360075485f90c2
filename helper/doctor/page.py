"""Checks the files of the page against the hashes of their build."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from helper.doctor.result import CheckResult, fail, ok, warn
from helper.runtime.release_files import hash_file, read_sums

SUMS_FILE: Final = "SHA256SUMS"
"""File of hashes that the build writes, in the format of `sha256sum -c`."""
_SHOWN: Final = 3


def check_page(directory: Path, *, enabled: bool) -> CheckResult:
    """Check the page in this directory."""
    if not enabled:
        return ok("page", "not served: [ui] enable is false")
    try:
        sums = read_sums((directory / SUMS_FILE).read_text("utf-8"))
    except FileNotFoundError:
        if not (directory / "index.html").is_file():
            advice = "Set [ui] dist_path to the directory of the build, or leave it empty."
            return fail("page", f"no page in {directory}", advice)
        return warn(
            "page", f"{directory} has no {SUMS_FILE} to compare with", "Build it with `make ui`, which writes it."
        )
    except (OSError, ValueError) as error:
        return fail("page", f"{directory / SUMS_FILE} cannot be read: {error}", "Reinstall the helper.")
    changed = [name for name, expected in sums.items() if hash_file(directory / name) != expected]
    extra = _extra_files(directory, set(sums))
    if changed or extra:
        text = "; ".join(
            f"{what}: {', '.join(names[:_SHOWN])}{' …' if len(names) > _SHOWN else ''}"
            for what, names in (("changed since the build", changed), ("not part of the build", extra))
            if names
        )
        advice = "Reinstall the helper, or rebuild the page with `make ui`. Find out what changed the files."
        return fail("page", text, advice, changed=changed, strange=extra)
    return ok("page", f"{len(sums)} files match the build", files=len(sums))


def _extra_files(directory: Path, listed_files: set[str]) -> list[str]:
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return sorted(files - listed_files - {SUMS_FILE})
