"""Traces a service's system calls with strace, and kills it at a chosen call."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

WRITE_CALLS = ("pwrite64", "fdatasync", "fsync", "ftruncate")
"""Calls with which SQLite, the lock file and the erasure of pages change files."""
SEND_CALLS = ("write", "writev", "sendto", "sendmsg")
"""Calls that send bytes over a socket."""
MAX_STRING_BYTES = 20_000
"""Maximum bytes of a buffer in the trace, more than a page or a response."""

_LINE = re.compile(r"^(\d+) +(.*)$")
_CALL = re.compile(r"^(\w+)\((?:\d+<([^>]*)>)?")
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>")
_HEX = re.compile(r"\\x([0-9a-f]{2})")


def is_strace_installed() -> bool:
    return shutil.which("strace") is not None


# The tracer is a grandchild (-D), so that the started process is the service itself.
_STRACE = ("strace", "-D", "-f")


def kill_command(call: str, number: int) -> Sequence[str]:
    """Return the command prefix that kills a program at a thread's n-th call of this name.

    It does not use --seccomp-bpf, although that is faster: no signal is injected then.
    """
    inject = f"inject={call}:signal=SIGKILL:when={number}"
    return (*_STRACE, "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)


def trace_command(trace: Path) -> Sequence[str]:
    """Return the command prefix that writes a program's calls to a file, buffers in hexadecimal."""
    calls = ",".join((*WRITE_CALLS, *SEND_CALLS))
    return (
        *_STRACE,
        "--seccomp-bpf",
        "-y",
        "-q",
        "-xx",
        "-s",
        str(MAX_STRING_BYTES),
        "-o",
        str(trace),
        "-e",
        f"trace={calls}",
    )


@dataclass(frozen=True, slots=True)
class SystemCall:
    """A system call.

    Attributes:
        began_at, ended_at: line numbers of the trace: a call that ended before another began had completed by then.
        pid: id of the thread.
        file: target of its descriptor, a path or `socket:[…]`.
        data: the bytes of its buffers, concatenated.
    """

    name: str
    began_at: int
    ended_at: int
    pid: int
    file: str
    data: bytes


async def read_calls(trace: Path, pid: int) -> list[SystemCall]:
    """Return all calls of a service after its trace shows its end."""
    ended = re.compile(rf"^{pid} +\+\+\+ ", re.MULTILINE)
    async with asyncio.timeout(30):
        while not ended.search(text := trace.read_text(errors="replace")):
            await asyncio.sleep(0.05)
    return parse_trace(text)


def parse_trace(text: str) -> list[SystemCall]:
    """Return the calls of a trace by their start; unfinished calls are omitted."""
    unfinished: dict[int, tuple[int, str]] = {}
    calls: list[SystemCall] = []
    for number, line in enumerate(text.splitlines()):
        split = _LINE.match(line)
        if split is None:
            continue
        pid, rest = int(split[1]), split[2]
        if rest.endswith("<unfinished ...>"):
            unfinished[pid] = number, rest
            continue
        start = number
        if _RESUMED.match(rest):
            start, first = unfinished.pop(pid, (number, ""))
            rest = first + rest
        if call := _CALL.match(rest):
            file = _HEX.sub(lambda match: chr(int(match[1], 16)), call[2] or "")
            data = bytes(int(digits, 16) for digits in _HEX.findall(rest[call.end() :]))
            calls.append(SystemCall(call[1], start, number, pid, file, data))
    return sorted(calls, key=lambda call: call.began_at)


def kill_points(traced_calls: Sequence[SystemCall], database: str) -> list[tuple[str, int]]:
    """Return every point for `kill_command` at which a service changes its files, and a few more.

    Calls are counted by thread, as strace counts them.
    """
    own = [call for call in traced_calls if call.name in WRITE_CALLS and database in call.file]
    writer = Counter(call.pid for call in own).most_common(1)[0][0]
    times = Counter(call.name for call in traced_calls if call.pid == writer and call.name in WRITE_CALLS)
    return [(name, number) for name in WRITE_CALLS for number in range(1, times[name] + 1)]
