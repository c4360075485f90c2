"""What keeps a process that holds witnesses from leaving them behind: no core file, no debugger of another user."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from typing import Any

PR_GET_DUMPABLE = 3
"""prctl(2) option: whether the process may be dumped, 1 for yes."""
PR_SET_DUMPABLE = 4
"""prctl(2) option: 0 makes the process not dumpable and its /proc entries root's."""


def harden_process() -> list[str]:
    """Forbid core files, make the process undumpable and new files private; call first in every process.

    Returns:
        What could not be done, one sentence each (empty where all of it holds); never raises.
    """
    failures = []
    os.umask(0o077)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    except (OSError, ValueError) as error:
        failures.append(f"core files could not be forbidden: {error}")
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            failures.append(f"the process stays dumpable: errno {ctypes.get_errno()}")
    return failures


def process_facts() -> dict[str, Any]:
    """What this process may leave behind, and may open, for operators; plain JSON values.

    `core_bytes` is the limit of a core file (-1: none), `dumpable` whether one may be made at all (None where that
    cannot be told), `open_files` the limits of open files, soft and hard (-1: none).
    """
    dumpable = None
    if sys.platform == "linux":
        dumpable = ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1
    return {
        "pid": os.getpid(),
        "core_bytes": resource.getrlimit(resource.RLIMIT_CORE)[0],
        "dumpable": dumpable,
        "open_files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    }
