"""What keeps a process that holds witnesses from leaving them behind: no core file, no debugger of another user."""

from __future__ import annotations

import ctypes
import os
import resource
import sys

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
