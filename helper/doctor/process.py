"""What the process may leave behind and may open: core files, open files, memory. Pure, but for reading /proc."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from helper.doctor.result import CheckResult, fail, ok, warn

CORE_PATTERN: Final = Path("/proc/sys/kernel/core_pattern")
MEMORY: Final = Path("/proc/meminfo")
PROVER_BYTES: Final = 128 << 20
"""What one prover with both circuits' keys takes: 65 MB measured for one circuit."""


def judge_cores(facts: Mapping[str, Any], core_pattern: str | None, *, whose: str) -> CheckResult:
    """Whether witnesses can get into a core file.

    Args:
        facts: `helper.runtime.hardening.process_facts`.
        core_pattern: where the kernel puts core files; None where that cannot be read.
        whose: the process that these facts are of.
    """
    core, dumpable = facts["core_bytes"], facts["dumpable"]
    told = {"core_bytes": core, "dumpable": dumpable, "core_pattern": core_pattern}
    if core == 0 and dumpable is not True:
        return ok("core files", f"{whose} leaves none: limit 0, not dumpable", **told)
    where = ""
    if core_pattern:
        where = ", which the kernel hands to a program" if core_pattern.startswith("|") else f" ({core_pattern})"
    why = "is dumpable" if dumpable else f"has a core limit of {core}"
    return fail(
        "core files",
        f"{whose} {why}: a crash would write witnesses into a core file{where}",
        "Run it under the unit file that comes along (LimitCORE=0), and not under a debugger.",
        **told,
    )


def judge_open_files(limits: list[int], needed: int, *, raised: bool) -> CheckResult:
    """Whether enough connections can be open.

    Args:
        limits: soft and hard, -1 for none.
        needed: files that it opens at most.
        raised: whether the soft limit is what it is after the service has raised it.
    """
    soft, hard = limits
    usable = soft if raised else hard
    told = {"soft": soft, "hard": hard, "needed": needed}
    if usable in range(needed):
        return warn(
            "open files",
            f"the limit is {usable}, {needed} are needed for all connections",
            f"Set LimitNOFILE={needed} in the unit (or `ulimit -Hn {needed}`) and restart: wallets are told to come"
            " again when connections run out.",
            **told,
        )
    return ok("open files", f"the limit is {'none' if usable < 0 else usable}, {needed} are needed", **told)


def judge_memory(available: int | None, slots: int, *, running: bool) -> CheckResult:
    """Whether the provers have room.

    Args:
        available: bytes that the kernel says can be had; None where it does not say.
        slots: provers.
        running: whether they have it already.
    """
    needed = slots * PROVER_BYTES
    told = {"available_bytes": available, "provers": slots}
    if available is None:
        return ok("memory", "this system does not say how much is free", **told)
    free = f"{available >> 20} MB free"
    if running:
        return ok("memory", f"{free}, {slots} provers have theirs", **told)
    if available < needed:
        return warn(
            "memory",
            f"{free}, {slots} provers may need {needed >> 20} MB",
            "Lower [helper] max_concurrent_proofs, or free memory: the kernel kills provers that it has no room for.",
            **told,
        )
    return ok("memory", f"{free}, {slots} provers may need {needed >> 20} MB", **told)


def available_memory(text: str) -> int | None:
    """MemAvailable of /proc/meminfo, in bytes."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0]) * 1024
    return None


def read_text(path: Path) -> str | None:
    """A small file of the kernel's, None where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
