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

from helper.config.sections import Config
from helper.observability.log_config import ALLOWED_FIELDS
from tests.deploy.installation import API, SERVICE, SHARES_PER_VOTE, STATE, Installation
from tests.deploy.machine import BootedMachine
from tests.support.release import ROOT

pytestmark = pytest.mark.timeout(1200)

CLIENT = Path(__file__).with_name("request_client.py")
API_PATH = "/shielded-vote/v1"
ADDRESS = "127.0.0.1:8090"
UNIT_FILE = ROOT / "deploy" / "systemd" / "svote-helper.service"
MAX_EXPOSURE = 1.5
MAX_NICE = 19
PRIORITIES = {"debug": "7", "info": "6", "warning": "4", "error": "3", "critical": "2"}
RESTARTS = 3
ONION_SOCKET = "/run/svote-helper/wallets.sock"
CURL_COULD_NOT_CONNECT = 7
DISK_SIZE = "1g"
"""Size of a disk that `doctor` considers sufficient."""
KILL_AT_FORBIDDEN_CALL = "[Service]\nSystemCallErrorNumber=\nSystemCallFilter=~io_uring_setup:EPERM\n"
"""Except for io_uring_setup: libuv tries it, and works without it."""


@contextmanager
def send_requests(running: Installation, address: str) -> Iterator[dict[str, Any]]:
    """Send requests over new connections during the block. The result is filled in at its end."""
    running.machine.write("/srv/client.py", CLIENT.read_text())
    command = [*running.machine.prefix, "python3", "/srv/client.py", address, API_PATH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        result: dict[str, Any] = {}
        try:
            yield result
        finally:
            process.terminate()
            result |= json.loads(process.stdout.read())


def find_provers(machine: BootedMachine, pid: int) -> list[int]:
    """Return the process ids of the provers of a service."""
    return [int(number) for number in machine.sh(f"pgrep --parent {pid} --full prover_worker").split()]


def read_status(machine: BootedMachine, pid: int) -> dict[str, str]:
    lines = machine.read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_unit_confines_service(shared: Installation) -> None:
    machine = shared.machine
    pid = shared.main_pid()
    prover = find_provers(machine, pid)[0]
    user = machine.sh("id -u svote-helper").strip()
    for process in (pid, prover):
        status = read_status(machine, process)
        assert status["Uid"].split() == [user] * 4
        assert (status["NoNewPrivs"], status["Seccomp"], status["Umask"]) == ("1", "2", "0077")
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
        limits = machine.read(f"/proc/{process}/limits")
        assert re.search(r"Max core file size +0 +0 ", limits)
        assert re.search(r"Max open files +\d+ +8192 ", limits)
    nice, prover_nice = (int(machine.sh(f"ps -o nice= -p {process}")) for process in (pid, prover))
    assert prover_nice == min(nice + Config().prover.nice, MAX_NICE)
    view = f"nsenter --target={pid} --mount --setuid={user} --setgid={user}"
    writable = machine.sh(f"{view} sh -c 'find / -xdev -writable ! -type l 2>/dev/null; true'").split()
    assert {path for path in writable if not path.startswith(STATE)} == {"/tmp", "/var/tmp"}
    for path in ("/etc/svote-helper/helper.toml", "/proc/meminfo", "/proc/1", "/dev/kmsg"):
        assert machine.run(*view.split(), "test", "-r", path, check=False).returncode == 1, path
    credential = f"/run/credentials/{SERVICE}.service/helper.toml"
    assert machine.sh(f"stat -c '%U %a' {credential}").split() == [SERVICE, "400"]
    assert machine.sh(f"stat -c '%U %a' {STATE}").split() == [SERVICE, "700"]


def test_exposure_in_booted_system_is_low(shared: Installation) -> None:
    security = shared.machine.sh(f"systemd-analyze security --no-pager {SERVICE}.service")
    (exposure,) = re.findall(r"Overall exposure level for \S+: (\d+\.\d+) OK", security)
    assert float(exposure) <= MAX_EXPOSURE, security


def test_vote_needs_no_forbidden_system_call(shared: Installation) -> None:
    """A forbidden system call ends the process here, instead of failing with EPERM, which libraries may ignore."""
    before = shared.count_confirmed()
    with shared.override(KILL_AT_FORBIDDEN_CALL):
        shared.vote(shared.create_round())
        shared.wait_for_confirmed(before + SHARES_PER_VOTE)
        assert shared.machine.properties(SERVICE, "NRestarts")["NRestarts"] == "0"
        invocation = shared.machine.properties(SERVICE, "InvocationID")["InvocationID"]
        journal = shared.machine.run("journalctl", "--no-pager", f"_SYSTEMD_INVOCATION_ID={invocation}").stdout
        assert journal.count("prover_ready") == 1, "the prover was not replaced"
    assert shared.machine.properties(SERVICE, "Result")["Result"] == "success"


def test_forbidden_system_call_ends_process(shared: Installation) -> None:
    """Control of the test before: with the same filter, such a call does end a process."""
    shipped = [line for line in UNIT_FILE.read_text().splitlines() if line.startswith("SystemCall")]
    python = "/opt/svote-helper/bin/python -c"
    for name, call, results in (
        ("permitted", "pipe()", {"success"}),
        ("forbidden", "memfd_create('x')", {"signal", "core-dump"}),
    ):
        command = f'ExecStart={python} "import os; os.{call}"'
        lines = ["[Service]", "Type=oneshot", *shipped, *KILL_AT_FORBIDDEN_CALL.splitlines()[1:], command, ""]
        unit = f"/etc/systemd/system/{name}.service"
        shared.machine.write(unit, "\n".join(lines))
        try:
            shared.machine.sh(f"systemctl daemon-reload; systemctl start {name} || true")
            assert shared.machine.properties(name, "Result")["Result"] in results
        finally:
            shared.machine.sh(f"rm {unit}; systemctl reset-failed {name} || true; systemctl daemon-reload")


def test_node_is_found_by_name(shared: Installation) -> None:
    """getaddrinfo() works without AF_NETLINK."""
    machine = shared.machine
    machine.sh("cp -p /etc/svote-helper/helper.toml /srv && echo '127.0.0.1 node.example' >> /etc/hosts")
    machine.sh("sed -i 's|http://127.0.0.1:11317|http://node.example:11317|' /etc/svote-helper/helper.toml")
    try:
        machine.run("systemctl", "restart", SERVICE)
        machine.wait_until(f"journalctl -u {SERVICE} -o cat | grep -q 'node.example:11317.*node_fresh'")
    finally:
        machine.sh("mv /srv/helper.toml /etc/svote-helper/ && sed -i '/ node.example$/d' /etc/hosts")
        machine.run("systemctl", "restart", SERVICE)


def test_watchdog_restarts_stopped_service(shared: Installation) -> None:
    machine = shared.machine
    with shared.override("[Service]\nWatchdogSec=10\n"):
        pid = shared.main_pid()
        provers = find_provers(machine, pid)
        assert provers
        machine.run("kill", "-STOP", str(pid))
        machine.wait_until(f"systemctl show {SERVICE} -p NRestarts --value | grep -qx 1", timeout=30)
        for process in (pid, *provers):
            assert machine.run("test", "-e", f"/proc/{process}", check=False).returncode == 1
        shared.wait_until_ready()
        assert "Watchdog timeout" in shared.read_journal("--output=short")


def test_killed_prover_is_replaced_without_restart(shared: Installation) -> None:
    shared.wait_until_ready()
    machine, pid = shared.machine, shared.main_pid()
    prover = find_provers(machine, pid)[0]
    machine.run("kill", "-KILL", str(prover))
    machine.wait_until(f"pgrep --parent {pid} | grep -qvx {prover}")
    shared.wait_until_ready()
    assert shared.main_pid() == pid


def test_journal_entry_has_priority_and_listed_fields(shared: Installation) -> None:
    machine = shared.machine
    options = [f"--since=@{machine.sh('date +%s.%N').strip()}", f"--identifier={SERVICE}"]
    machine.run("systemctl", "restart", SERVICE)
    shared.wait_until_ready()
    machine.run("kill", "-KILL", str(find_provers(machine, shared.main_pid())[0]))
    machine.sh("sed -i 's/^endpoints = /endpoint = /' /etc/svote-helper/helper.toml")
    try:
        machine.run("systemctl", "restart", SERVICE, check=False)
        errors = shared.read_journal(*options, "--priority=err", "--output=cat")
        assert "chain.endpoint: unknown key" in errors
        assert "config validate" in errors, "the advice"
    finally:
        machine.sh("sed -i 's/^endpoint = /endpoints = /' /etc/svote-helper/helper.toml")
        machine.run("systemctl", "restart", SERVICE)
    lines = shared.read_journal(*options, "--output=json").splitlines()
    levels: set[str] = set()
    for entry in map(json.loads, lines):
        assert entry["_UID"] == machine.sh("id -u svote-helper").strip()
        if entry["MESSAGE"].startswith("{"):
            fields = json.loads(entry["MESSAGE"])
            assert fields.keys() <= ALLOWED_FIELDS
            assert "dropped" not in fields, fields
            assert entry["PRIORITY"] == PRIORITIES[fields["level"]], entry
            levels.add(fields["level"])
    assert {"info", "warning"} <= levels, "the prover was killed"


def test_token_credential_is_used(shared: Installation) -> None:
    machine = shared.machine
    machine.sh("umask 077 && openssl rand -hex 16 > /etc/svote-helper/operator-token")
    machine.sh("cp -p /etc/svote-helper/helper.toml /srv && sed -i '/^token = /d' /etc/svote-helper/helper.toml")
    (line,) = re.findall(r"^#(LoadCredential=operator-token:.*)$", UNIT_FILE.read_text(), re.MULTILINE)
    # The event stream of operators does not end: its headers are enough.
    events = f"curl -sS -m 2 -o /dev/null -w '%{{http_code}}' http://{ADDRESS}{API_PATH}/events"
    try:
        with shared.override(f"[Service]\n{line}\n"):
            assert machine.sh(f"{events} -H 'Authorization: Bearer wrong'") == "401"
            right = f'{events} -H "Authorization: Bearer $(cat /etc/svote-helper/operator-token)"'
            assert machine.sh(f"{right} 2>/dev/null || true") == "200"
    finally:
        machine.sh("mv /srv/helper.toml /etc/svote-helper/ && rm /etc/svote-helper/operator-token")
        machine.run("systemctl", "restart", SERVICE)


def test_restart_under_load_refuses_no_connection(running: Installation) -> None:
    machine = running.machine
    round_id = running.create_round()
    with send_requests(running, ADDRESS) as without_socket:
        machine.run("systemctl", "restart", SERVICE)
        running.wait_until_ready()
    assert without_socket["outcomes"].get("ConnectionRefusedError", 0) > 0, "the client notices a refused connection"
    running.run_blocks("unit", kinds=["socket"])
    running.wait_until_ready()
    with send_requests(running, ADDRESS) as with_socket:
        for _ in range(RESTARTS):
            machine.run("systemctl", "restart", SERVICE)
            running.vote(round_id)
        running.wait_for_confirmed(RESTARTS * SHARES_PER_VOTE)
    errors = {name: count for name, count in with_socket["outcomes"].items() if not name.isdecimal()}
    assert errors == {}, with_socket
    assert with_socket["outcomes"]["200"] > 10, with_socket


def test_first_connection_starts_service(running: Installation) -> None:
    machine = running.machine
    running.run_blocks("unit", kinds=["socket"])
    machine.run("systemctl", "stop", SERVICE)
    assert machine.properties(SERVICE, "ActiveState")["ActiveState"] == "inactive"
    machine.sh(f"curl -sS {API}/status")
    assert machine.properties(SERVICE, "ActiveState")["ActiveState"] == "active"


def test_full_disk_survives_restart(running: Installation) -> None:
    machine = running.machine
    machine.run("systemctl", "stop", SERVICE)
    machine.sh(f"cp -a {STATE} /srv/state && mount -t tmpfs -o size={DISK_SIZE},mode=700 tmpfs {STATE}")
    machine.sh(f"cp -a /srv/state/. {STATE}/ && chown {SERVICE}: {STATE} && rm -r /srv/state")
    machine.run("systemctl", "start", SERVICE)
    running.wait_until_ready()
    running.vote(running.create_round(), spread=30)
    machine.sh(f"dd if=/dev/zero of={STATE}/ballast bs=64k status=none || true")
    machine.run("systemctl", "restart", SERVICE)
    machine.wait_until("svote-helper doctor --skip-proof | grep -q '^fail  disk space'")
    assert machine.properties(SERVICE, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    machine.run("rm", f"{STATE}/ballast")
    running.wait_for_confirmed(SHARES_PER_VOTE)
    assert machine.properties(SERVICE, "ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}


def test_onion_socket_is_accessible_only_to_tor_and_service(running: Installation) -> None:
    machine = running.machine
    running.run_blocks("helper", kinds=["onion"])
    running.wait_until_ready()
    assert machine.sh(f"stat -c '%U %G %a' {ONION_SOCKET}").split() == [SERVICE, "debian-tor", "660"]
    assert machine.sh("ss -Hltn 'sport = :8090'") == "", "no TCP port"
    curl = f"curl -sS -o /dev/null -w %{{http_code}} --unix-socket {ONION_SOCKET} http://helper{API_PATH}/status"
    tor = machine.run("setpriv", "--reuid=debian-tor", "--regid=debian-tor", "--clear-groups", *curl.split())
    assert tor.stdout == "200"
    other = machine.run("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", *curl.split(), check=False)
    assert other.returncode == CURL_COULD_NOT_CONNECT, other.stdout
    with send_requests(running, ONION_SOCKET) as outcomes:
        machine.run("systemctl", "restart", SERVICE)
        running.wait_until_ready()
    assert set(outcomes["outcomes"]) <= {"200", "400", "503"}, outcomes
    machine.run("systemctl", "stop", "svote-helper-onion.socket", SERVICE)
    assert machine.run("test", "-e", ONION_SOCKET, check=False).returncode == 1
