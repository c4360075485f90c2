"""The shipped unit in a system that systemd has booted: what it forbids, and how it starts, stops and recovers."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.installation import DIST, SERVICE, STATE, Installation
from tests.deploy.machine import BootedMachine

pytestmark = pytest.mark.timeout(600)

CLIENT = Path(__file__).with_name("request_client.py")
API_PATH = "/shielded-vote/v1"
SHARES_PER_VOTE = 16


@contextmanager
def send_requests(running: Installation, address: str) -> Iterator[dict[str, Any]]:
    """Send requests over new connections during the block. The result is filled in at its end."""
    running.machine.write(f"{STATE}.client.py", CLIENT.read_text())
    command = [*running.machine.prefix, "python3", f"{STATE}.client.py", address, API_PATH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        result: dict[str, Any] = {}
        try:
            yield result
        finally:
            process.terminate()
            result |= json.loads(process.stdout.read())


def read_status(machine: BootedMachine, pid: int) -> dict[str, str]:
    lines = machine.read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_unit_confines_service(running: Installation) -> None:
    machine = running.machine
    pid = running.main_pid()
    (prover, *_) = machine.sh(f"pgrep --parent {pid}").split()
    user = machine.sh("id -u svote-helper").strip()
    for process in (pid, int(prover)):
        status = read_status(machine, process)
        assert status["Uid"].split() == [user] * 4
        assert (status["NoNewPrivs"], status["Seccomp"], status["Umask"]) == ("1", "2", "0077")
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        limits = machine.read(f"/proc/{process}/limits")
        assert re.search(r"Max core file size +0 +0 ", limits)
        assert re.search(r"Max open files +\d+ +8192 ", limits)
    print(machine.sh(f"ps -eo pid,ppid,ni,user:14,args"))
    print(machine.sh("systemctl status svote-helper --no-pager -l"))
    print(machine.journal(SERVICE))
