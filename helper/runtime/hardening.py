"""Process hardening: disables core dumps and debugging of processes that hold witnesses."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from dataclasses import dataclass

PR_GET_DUMPABLE = 3
"""prctl(2) option: returns 1 if the process is dumpable."""
PR_SET_DUMPABLE = 4
"""prctl(2) option: 0 makes the process not dumpable and gives its /proc entries to root."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Resource limits of a process.

    Attributes:
        pid: its process id.
        core_bytes: size limit of core dumps (-1: unlimited).
        dumpable: whether the process is dumpable, None if unknown.
        open_files: soft and hard limits of open files (-1: unlimited).
    """

    pid: int
    core_bytes: int
    dumpable: bool | None
    open_files: list[int]


def harden_process() -> list[str]:
    """Disable core dumps and debugging, and make new files private. Call this first in every process.

    Returns:
        One message for each measure that failed; empty on success. Never raises.
    """
    failures = []
    os.umask(0o077)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError) as error:
        failures.append(f"core dumps could not be disabled: {error}")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            failures.append(f"the process could not be made non-dumpable: errno {ctypes.get_errno()}")
    return failures


def get_process_limits() -> ProcessLimits:
    """Return limits of this process for operators."""
    dumpable = None
    if sys.platform == "linux":
        dumpable = ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    return ProcessLimits(
        pid=os.getpid(),
        core_bytes=resource.getrlimit(resource.RLIMIT_CORE)[0],
        dumpable=dumpable,
        open_files=list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    )
