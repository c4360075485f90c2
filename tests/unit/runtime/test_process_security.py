"""Hardening of a process that holds witnesses, before anything else."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD_SCRIPT = """
import ctypes, os, resource
from helper.runtime.process_security import harden_process
failures = harden_process()
dumpable = ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)
print(failures, resource.getrlimit(resource.RLIMIT_CORE), dumpable, oct(os.umask(0)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="`dumpable` is specific to Linux")
def test_harden_process_disables_core_files_and_debugger() -> None:
    completed = subprocess.run([sys.executable, "-c", CHILD_SCRIPT], capture_output=True, check=True, text=True)
    assert completed.stdout.strip() == "[] (0, 0) 0 0o77"
