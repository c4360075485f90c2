"""Checks file modes, listen addresses, the accept queue, and process limits (core files, open files, memory)."""

from __future__ import annotations

import re
import socket
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from helper.core.load_forecast import PROVER_BYTES
from helper.doctor import CheckResult, fail, ok, warn
from helper.runtime.process_security import ProcessLimits

DATABASE_SUFFIXES: Final = ("", "-wal", "-shm", ".lock")
"""Suffixes of the files of a database."""
_OTHER_USERS_MODE: Final = stat.S_IRWXG | stat.S_IRWXO
CORE_PATTERN: Final = Path("/proc/sys/kernel/core_pattern")
MEMORY_INFO: Final = Path("/proc/meminfo")
ACCEPT_QUEUE_LIMIT: Final = Path("/proc/sys/net/core/somaxconn")


# ---------------------------------------------------------------- files and addresses


def check_modes(databases: Iterable[Path], secrets: Iterable[Path]) -> list[CheckResult]:
    """Return a warning for each file or directory that other users can access, else one `ok`. Files may be missing."""
    private = [*(Path(f"{database}{part}") for database in databases for part in DATABASE_SUFFIXES), *secrets]
    existing = {path: stat.S_IMODE(mode) for path in private if (mode := _read_mode(path)) is not None}
    results = [_accessible_result(path, mode) for path, mode in existing.items() if mode & _OTHER_USERS_MODE]
    for directory in {path.absolute().parent for path in existing}:
        mode = stat.S_IMODE(_read_mode(directory) or 0)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            advice = f"chmod o-w {directory}"
            results.append(warn("file modes", f"every user can create files in {directory} ({oct(mode)})", advice))
    return results or [
        ok("file modes", f"{len(existing)} private files are accessible only to their owner", files=len(existing))
    ]


def _accessible_result(path: Path, mode: int) -> CheckResult:
    text = f"other users can access {path} ({oct(mode)[2:]})"
    return warn("file modes", text, f"chmod 600 {path}", path=str(path), mode=oct(mode)[2:])


def _read_mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError:
        return None


def check_address(listener_name: str, host: str, port: int, setting: str) -> CheckResult:
    """Check that an address is free, by binding it without listening. `setting` is its section of the settings."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    if not addresses:
        advice = f"Set {setting} host to an address of this machine."
        return fail("address", f"{host} is not an address of this machine", advice, host=host, port=port)
    family, _, _, _, address = addresses[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            advice = (
                f"Set {setting} host and port to a free address, or stop the program that uses it: see `ss -ltnp`."
                " If that is systemd, svote-helper.socket keeps the port for the helper."
            )
            return fail(
                "address",
                f"{listener_name} cannot listen on {host}:{port}: {error.strerror}",
                advice,
                host=host,
                port=port,
            )
    return ok("address", f"{listener_name} can listen on {host}:{port}", host=host, port=port)


def check_socket(path: Path) -> CheckResult:
    """Check that the wallet API can listen on a socket. One that exists may be that of the service manager."""
    if path.is_symlink() or (path.exists() and not path.is_socket()):
        return fail("address", f"the wallet API cannot listen on {path}: it is not a socket", f"Move {path} away.")
    if not path.parent.is_dir():
        advice = "Enable svote-helper-onion.socket, which creates it, or create it for the helper's user."
        return fail("address", f"the wallet API cannot listen on {path}: no directory {path.parent}", advice)
    return ok("address", f"the wallet API can listen on {path}", path=str(path))


# ---------------------------------------------------------------- limits of the process


def evaluate_cores(limits: ProcessLimits, core_pattern: str | None, *, process_name: str) -> CheckResult:
    """Check that witnesses cannot get into a core file."""
    core, dumpable = limits.core_bytes, limits.dumpable
    measured = {"core_bytes": core, "dumpable": dumpable, "core_pattern": core_pattern}
    if core == 0 and dumpable is not True:
        return ok("core files", f"{process_name} writes none: limit 0, not dumpable", **measured)
    where = ""
    if core_pattern:
        where = " (piped to a program by the kernel)" if core_pattern.startswith("|") else f" ({core_pattern})"
    why = "is dumpable" if dumpable else f"has a core limit of {core}"
    return fail(
        "core files",
        f"{process_name} {why}: a crash would write witnesses into a core file{where}",
        "Run it with the supplied systemd unit (LimitCORE=0), and not in a debugger.",
        **measured,
    )


def evaluate_open_files(limits: list[int], needed: int, *, raised: bool) -> CheckResult:
    """Check that enough files can be open for all connections.

    `limits` are soft and hard, -1 for unlimited. `raised` is whether the service has already raised the soft one.
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


def evaluate_accept_queue(limit: int | None, needed: int) -> CheckResult:
    """Check that the kernel's accept queue is long enough for the listen backlog of the service."""
    measured = {"limit": limit, "needed": needed}
    if limit is None:
        return ok("accept queue", "the kernel's limit is unknown on this system", **measured)
    if limit < needed:
        return warn(
            "accept queue",
            f"the kernel queues at most {limit} connections, {needed} are needed when many wallets connect at once",
            f"sysctl -w net.core.somaxconn={needed}, also in /etc/sysctl.d/, and restart the helper.",
            **measured,
        )
    return ok("accept queue", f"the kernel queues at most {limit} connections, {needed} are needed", **measured)


def evaluate_memory(available: int | None, slots: int, *, running: bool) -> CheckResult:
    """Check that there is enough memory for the provers, unless they already run."""
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


def read_number(path: Path, name: str = "") -> int | None:
    """Return the number with which a file of the kernel begins, or its line with this name; None if there is none."""
    match = re.search(rf"^{name}\s*([0-9]+)", read_text(path) or "", re.MULTILINE)
    return int(match[1]) if match else None


def read_text(path: Path) -> str | None:
    """Read a small file of the kernel; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
