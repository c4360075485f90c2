"""Observes processes: files opened for writing, core limits and core files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

_OPEN_CALL = re.compile(
    r'(?:openat|open|creat|memfd_create)\((?:AT_FDCWD, |\d+, )?"([^"]*)"(?:\.\.\.)?, ?([^)]*)\) = (\d+)'
)
_WRITE_FLAGS = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TMPFILE|MFD_|0[0-7]{3}$")


class OpenedFiles:
    """Records files that processes open for writing, with strace or by polling."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.paths: set[str] = set()
        self.uses_strace = False
        self._pids = pids

    @contextlib.asynccontextmanager
    async def watch(self, trace: Path) -> AsyncIterator[None]:
        tracer = await self._attach_strace(trace)
        self.uses_strace = tracer is not None
        looking = asyncio.create_task(self._poll_open_files())
        try:
            yield
        finally:
            looking.cancel()
            if tracer is not None:
                tracer.terminate()
                await asyncio.to_thread(tracer.wait)
                for path, flags, _ in _OPEN_CALL.findall(trace.read_text(errors="replace")):
                    if _WRITE_FLAGS.search(flags):
                        self.paths.add(path)

    async def _attach_strace(self, trace: Path) -> subprocess.Popen[bytes] | None:
        program = shutil.which("strace")
        if program is None:
            return None
        pids = [part for pid in self._pids for part in ("-p", str(pid))]
        calls = "trace=open,openat,creat,memfd_create"
        command = [program, "-f", "-qq", "-s", "4096", "-e", calls, "-e", "signal=none", "-o", str(trace), *pids]
        tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while tracer.poll() is None:
            if all(_is_traced(pid) for pid in self._pids):
                return tracer
            await asyncio.sleep(0.02)
        return None  # strace is not permitted here

    async def _poll_open_files(self) -> None:
        """Poll the open files 20 times per second; once per second with strace, which records the rest."""
        while True:
            for pid in self._pids:
                for link in Path(f"/proc/{pid}/fd").glob("*"):
                    with contextlib.suppress(OSError):
                        target = str(link.readlink())
                        if target.startswith("/") and link.lstat().st_mode & 0o200:
                            self.paths.add(target)
            await asyncio.sleep(1.0 if self.uses_strace else 0.05)


def _is_traced(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    return "TracerPid:\t0\n" not in status


def read_core_limits(pids: Iterable[int]) -> set[str]:
    """Return the soft and hard core file limits of these processes."""
    limits = set()
    for pid in pids:
        (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line]
        limits.update(line.split()[4:6])
    return limits


def abort_process(pid: int) -> None:
    """Abort a process after lifting its core file limit, if permitted."""
    with contextlib.suppress(PermissionError):
        resource.prlimit(pid, resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    os.kill(pid, signal.SIGABRT)


def proc_owners(pids: Iterable[int]) -> set[int]:
    """Return the owners of these processes' /proc entries: root for processes that are not dumpable."""
    return {Path(f"/proc/{pid}").stat().st_uid for pid in pids}


def wait_for_core_dump(pid: int) -> bool:
    """Wait until a child process exits, without reaping it; return whether it left a core file."""
    result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return result is not None and result.si_code == os.CLD_DUMPED


def find_core_files(directories: Iterable[Path], since: float) -> list[Path]:
    """Return core files created in these directories since a time (Unix seconds)."""
    paths = {path for directory in directories for path in directory.glob("*core*") if path.is_file()}
    return [path for path in paths if path.stat().st_mtime >= since and path.name.split(".")[0] == "core"]


@contextlib.contextmanager
def start_unhardened_process(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process without hardening for comparison; remove its directory afterwards."""
    directory.mkdir()
    code = "import time; print(flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=directory, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        with child.stdout:
            child.stdout.readline()
            yield child
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(directory)


def reset_peak_memory(pid: int) -> None:
    """Let `peak_memory_mb` count from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory_mb(pid: int) -> float:
    """Return the peak resident memory of a process since the last reset, in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))) / 1000


def unsent_mb(pid: int, port: int) -> float:
    """Return the bytes in the kernel's send buffers of a process's connections at a port, in MB."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4][:8], 16) for row in rows if row[1].endswith(f":{port:04X}")) / 1e6


def open_files(pid: int) -> int:
    """Return the number of open files and sockets of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
