"""Checks limits of the process: core files, open files, memory. Pure, except for reading /proc."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from helper.doctor.result import CheckResult, fail, ok, warn
from helper.runtime.hardening import ProcessLimits

CORE_PATTERN: Final = Path("/proc/sys/kernel/core_pattern")
MEMORY_INFO: Final = Path("/proc/meminfo")
PROVER_BYTES: Final = 128 << 20
"""Bytes of memory of one prover with the keys of both circuits; 65 MB were measured for one circuit."""


def judge_cores(limits: ProcessLimits, core_pattern: str | None, *, process_name: str) -> CheckResult:
    """Check that witnesses cannot get into a core file.

    Args:
        limits: `helper.runtime.hardening.get_process_limits`.
        core_pattern: where the kernel writes core files; None if unknown.
        process_name: the process, for the message.
    """
    core, dumpable = limits["core_bytes"], limits["dumpable"]
    measured = {"core_bytes": core, "dumpable": dumpable, "core_pattern": core_pattern}
    if core == 0 and dumpable is not True:
        return ok("core files", f"{process_name} writes none: limit 0, not dumpable", **measured)
    where = ""
    if core_pattern:
        where = ", which the kernel pipes to a program" if core_pattern.startswith("|") else f" ({core_pattern})"
    why = "is dumpable" if dumpable else f"has a core limit of {core}"
    return fail(
        "core files",
        f"{process_name} {why}: a crash would write witnesses into a core file{where}",
        "Run it with the supplied systemd unit (LimitCORE=0), and not in a debugger.",
        **measured,
    )


def judge_open_files(limits: list[int], needed: int, *, raised: bool) -> CheckResult:
    """Check that enough files can be open for all connections.

    Args:
        limits: soft and hard limit, -1 for unlimited.
        needed: maximum number of open files.
        raised: whether the service has already raised the soft limit.
    """
    soft, hard = limits
    usable = soft if raised else hard
    measured = {"soft": soft, "hard": hard, "needed": needed}
    if usable in range(needed):
        return warn(
            "open files",
            f"the limit is {usable}, {needed} are needed for all connections",
            f"Set LimitNOFILE={needed} in the unit (or `ulimit -Hn {needed}`) and restart: wallets are"
            " refused with 503 when connections run out.",
            **measured,
        )
    return ok("open files", f"the limit is {'unlimited' if usable < 0 else usable}, {needed} are needed", **measured)


def judge_memory(available: int | None, slots: int, *, running: bool) -> CheckResult:
    """Check that there is enough memory for the provers.

    Args:
        available: available bytes according to the kernel; None if unknown.
        slots: number of provers.
        running: whether the provers already run.
    """
    needed = slots * PROVER_BYTES
    measured = {"available_bytes": available, "provers": slots}
    if available is None:
        return ok("memory", "available memory is unknown on this system", **measured)
    free = f"{available >> 20} MB free"
    if running:
        return ok("memory", f"{free}, {slots} provers are running", **measured)
    if available < needed:
        return warn(
            "memory",
            f"{free}, {slots} provers may need {needed >> 20} MB",
            "Lower [helper] max_concurrent_proofs, or free memory: the kernel kills provers when memory runs out.",
            **measured,
        )
    return ok("memory", f"{free}, {slots} provers may need {needed >> 20} MB", **measured)


def parse_available_memory(text: str) -> int | None:
    """Parse MemAvailable of /proc/meminfo; returns bytes."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable" and value.split()[:1] and value.split()[0].isdecimal():
            return int(value.split()[0]) * 1024
    return None


def read_text(path: Path) -> str | None:
    """Read a small file of the kernel; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
