"""The files in deploy/: systemd verifies the units, and names match the code.

The container files are only parsed here; `tests/deploy/test_containers.py` runs them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from devnet.clients.client_wallet import MAX_POSTS
from helper.cli.main import COMMANDS
from helper.config.loader import load
from helper.config.sections import ROLES, Config
from helper.config.settings_file import CREDENTIALS, ENV_FILE, FILE_CREDENTIALS
from helper.runtime.systemd import WALLETS_SOCKET_NAME
from helper.server.listening import GROUP_MODE, STOP_GRACE_SECONDS
from helper.store.postgres.connection import create_connection_settings
from helper.store.sqlite.opening import MOUNTS_FILE

REPO_ROOT = Path(__file__).parents[2]
SYSTEMD = REPO_ROOT / "deploy" / "systemd"
CONTAINER = REPO_ROOT / "deploy" / "container"
ANALYZE = [path for path in (shutil.which("systemd-analyze"),) if path]
MAX_EXPOSURE = 1.5
URL = "postgresql://helper@/helper?host=/var/run/postgresql"
"""Database URL of the compose profile."""


MAIN_MB = 400
"""Memory of the service itself: 110 MB with a million pending shares, and bodies and connections at their limits."""
PROVER_MB = 110
"""Peak of a prover with the keys of both circuits."""
PROVERS = 5
SMALLEST_MACHINE_MB = 2048
"""docs/operations.md, Install."""


def megabytes(size: str) -> int:
    """A size of systemd (1G, 1536M) or compose (1536m) in units of 2^20 bytes."""
    return int(size[:-1]) * {"m": 1, "g": 1024}[size[-1].lower()]


def read_settings(name: str) -> dict[str, str]:
    """Every key of a unit file; the last value of a repeated key."""
    lines = (SYSTEMD / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


@pytest.mark.rule("N29")
def test_proxy_examples_offer_http_2() -> None:
    nginx, caddy = (SYSTEMD.parent / name for name in ("nginx/svote-helper.conf", "caddy/Caddyfile"))
    assert re.search(r"^\s*listen 443 ssl http2\b", nginx.read_text(), re.MULTILINE)
    assert re.search(r"^\s*protocols h1 h2$", caddy.read_text(), re.MULTILINE), "HTTP/3 allows 0-RTT"
    assert re.search(r"^\s*ssl_early_data off;$", nginx.read_text(), re.MULTILINE)


@pytest.mark.parametrize("tool", ANALYZE)
def test_systemd_units_verify_with_low_exposure(tool: str, tmp_path: Path) -> None:
    for name in ("svote-helper.service", "svote-helper.socket", "svote-helper-onion.socket"):
        text = (SYSTEMD / name).read_text().replace("/opt/svote-helper/bin/", f"{sys.prefix}/bin/")
        (tmp_path / name).write_text(text)
    files = [str(path) for path in tmp_path.iterdir()]
    verified = subprocess.run([tool, "verify", *files], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stdout, verified.stderr) == (0, "", "")
    service = str(tmp_path / "svote-helper.service")
    judged = subprocess.run([tool, "security", "--offline=true", service], capture_output=True, text=True, check=False)
    (level,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", judged.stdout)
    assert float(level) <= MAX_EXPOSURE


@pytest.mark.parametrize("tool", [path for path in (shutil.which("systemd-sysusers"),) if path])
def test_sysusers_file_is_accepted(tool: str) -> None:
    file = str(SYSTEMD / "svote-helper.sysusers")
    completed = subprocess.run([tool, "--dry-run", file], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr


def test_unit_matches_service() -> None:
    service = read_settings("svote-helper.service")
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) >= 10
    assert int(service["TimeoutStopSec"]) > 2 * STOP_GRACE_SECONDS
    assert (service["LimitCORE"], service["MemorySwapMax"], service["UMask"]) == ("0", "0", "0077")
    assert MAIN_MB + PROVERS * PROVER_MB <= megabytes(service["MemoryHigh"]) < megabytes(service["MemoryMax"])
    assert megabytes(service["MemoryMax"]) <= SMALLEST_MACHINE_MB * 3 / 4
    assert (service["ProtectSystem"], service["NoNewPrivileges"]) == ("strict", "yes")
    assert service["ProcSubset"] == "pid"
    assert MOUNTS_FILE.is_relative_to("/proc/self"), "the rest is hidden"
    assert service["Environment"] == f"{ENV_FILE}=%d/helper.toml"
    command = service["ExecStart"].split()
    assert command == ["/opt/svote-helper/bin/svote-helper", "serve"]
    offered = re.findall(r"LoadCredential=([a-z0-9-]+):", (SYSTEMD / "svote-helper.service").read_text())
    assert set(offered) == {*CREDENTIALS.values(), *FILE_CREDENTIALS.values()}
    assert f"u {service['User']} " in (SYSTEMD / "svote-helper.sysusers").read_text()


def test_socket_unit_matches_service_listeners() -> None:
    socket = read_settings("svote-helper.socket")
    assert socket["FileDescriptorName"] == WALLETS_SOCKET_NAME
    assert socket["ListenStream"] == f"{Config().helper.host}:{Config().helper.port}"


def test_onion_socket_unit_matches_torrc_and_service() -> None:
    unit, torrc = read_settings("svote-helper-onion.socket"), (SYSTEMD.parent / "tor" / "torrc").read_text()
    assert unit["FileDescriptorName"] == WALLETS_SOCKET_NAME
    assert unit["Service"] == "svote-helper.service"
    assert unit["Conflicts"] == "svote-helper.socket"
    assert int(unit["SocketMode"], 8) == GROUP_MODE
    assert f"HiddenServicePort 80 unix:{unit['ListenStream']}\n" in torrc
    (streams,) = re.findall(r"^HiddenServiceMaxStreams (\d+)$", torrc, re.MULTILINE)
    assert int(streams) >= 2 * MAX_POSTS, "streams that are closing count too"
    assert f"\nSocksPort {Config().server.tor_socks} " in torrc


@pytest.mark.parametrize("tool", [path for path in (shutil.which("tor"),) if path])
def test_torrc_and_its_single_onion_variant_are_accepted(tool: str, tmp_path: Path) -> None:
    hidden = (SYSTEMD.parent / "tor" / "torrc").read_text()
    single = re.sub(r"^#(HiddenService)", r"\1", hidden, flags=re.MULTILINE)
    single = re.sub(r"^SocksPort .*$", "SocksPort 0", single, flags=re.MULTILINE)
    for text in (hidden, single):
        file = tmp_path / "torrc"
        file.write_text(text)
        command = [tool, "--verify-config", "-f", str(file), "--DataDirectory", str(tmp_path / "data"), "--hush"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)
        assert completed.returncode == 0, completed.stdout


UP = 'up{job="svote-helper"}'
STARTED = 'process_start_time_seconds{job="svote-helper"}'
EXPIRED = 'helper_expired_total{job="svote-helper"}'
SENT, CONFIRMED = 'helper_shares{state="broadcast", instance="%s"}', 'helper_confirmed_total{instance="%s"}'
SLACK, LEFT = 'helper_round_slack_seconds{instance="%s"}', 'helper_round_left_seconds{instance="%s"}'
HOSTS = {'helper_sends{instance="a"}': "1x60", 'helper_sends{instance="b"}': "0x60"}
"""Two hosts with one queue."""


@pytest.mark.parametrize("tool", [path for path in (shutil.which("promtool"),) if path])
@pytest.mark.parametrize(
    ("series", "minute", "firing"),
    [
        ({'up{job="helper"}': "1x60"}, 10, {"NotScraped": 1}),
        ({STARTED: " ".join(f"{60 * start}x3" for start in range(0, 60, 4))}, 30, {"Restarts": 1}),
        ({STARTED: f"0x20 {60 * 20}x40"}, 30, {}),
        ({"helper_ready": "1x60", "helper_rounds_active": "0x10"}, 9, {}),
        ({"helper_ready": "1x60", "helper_rounds_active": "0x10 stale"}, 20, {"QueueUnread": 1}),
        (
            {
                **dict.fromkeys(("helper_round_slack_seconds", "helper_backlog_slack_seconds"), "590x60"),
                "helper_round_left_seconds": "599x60",
            },
            20,
            {},
        ),
        ({"helper_round_slack_seconds": "900x60", "helper_round_left_seconds": "7200x60"}, 20, {"BacklogTight": 1}),
        (
            {SLACK % "a": "-9x60", SLACK % "b": "-9x60", LEFT % "a": "600x60", LEFT % "b": "600x60"},
            20,
            {"BacklogTooLarge": 2, "BacklogTight": 2},
        ),
        ({SLACK % "a": "-9x60", SLACK % "b": "-9x60", LEFT % "a": "600x60", LEFT % "b": "600x60", **HOSTS}, 20, {}),
        ({SENT % "a": "1x60", CONFIRMED % "a": "7x60"}, 25, {"NothingConfirmed": 1}),
        (
            {SENT % "a": "1x60", SENT % "b": "1x60", CONFIRMED % "a": "0+1x60", CONFIRMED % "b": "7x60"},
            25,
            {"NothingConfirmed": 1},
        ),
        ({SENT % "a": "1x60", SENT % "b": "1x60", CONFIRMED % "a": "0+1x60", CONFIRMED % "b": "7x60", **HOSTS}, 25, {}),
        (
            {SENT % "a": "1x60", SENT % "b": "1x60", CONFIRMED % "a": "7x60", CONFIRMED % "b": "7x60", **HOSTS},
            25,
            {"NothingConfirmed": 2},
        ),
        ({EXPIRED: "0x9 _x110 16x60", STARTED: f"0x9 _x110 {60 * 119}x60"}, 130, {"SharesExpired": 1}),
        ({EXPIRED: "16x200", STARTED: "0x200"}, 130, {}),
        ({"helper_archive_fails": "1x5 0x60"}, 3, {}),
        ({"helper_archive_fails": "0x5 1x70"}, 70, {"ArchiveFails": 1}),
    ],
)
def test_alerts_fire_only_for_their_fault(
    tool: str, tmp_path: Path, series: dict[str, str], minute: int, firing: dict[str, int]
) -> None:
    """The numbers are samples of each minute."""
    with_up = series if any(name.startswith("up{") for name in series) else {UP: "1x200", **series}
    query = {
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "eval_time": f"{minute}m",
        "exp_samples": [
            {"labels": f'{{alertname="SvoteHelper{name}"}}', "value": number} for name, number in firing.items()
        ],
    }
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in with_up.items()],
        "promql_expr_test": [query],
    }
    rules = SYSTEMD.parent / "prometheus" / "alerts.yaml"
    file = tmp_path / "case.yaml"
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": [case]}))
    completed = subprocess.run([tool, "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_container_runs_unprivileged_with_healthcheck() -> None:
    text = re.sub(r"\\\n", " ", (CONTAINER / "Containerfile").read_text())
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    instructions: dict[str, list[str]] = {}
    for instruction, rest in lines:
        instructions.setdefault(instruction, []).append(rest)
    known = [
        "ARG",
        "FROM",
        "RUN",
        "WORKDIR",
        "COPY",
        "ENV",
        "USER",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    ]
    assert set(instructions) == set(known)
    assert instructions["USER"] == ["10001:10001"]
    assert [json.loads(rest) for rest in instructions["ENTRYPOINT"] + instructions["CMD"]] == [
        ["svote-helper"],
        ["serve"],
    ]
    check = json.loads(instructions["HEALTHCHECK"][0].partition("CMD ")[2])
    assert check == ["svote-helper", "healthcheck"]
    assert {"serve", "healthcheck", "devnet"} <= set(COMMANDS)
    (environment,) = instructions["ENV"]
    settings = dict(pair.split("=", 1) for pair in environment.split() if pair.startswith("SVOTE_HELPER_"))
    assert load(None, settings).config.helper.db_path == "/var/lib/svote-helper/queue.db"


def test_base_images_are_pinned_by_digest() -> None:
    containerfile, cluster = ((CONTAINER / name).read_text() for name in ("Containerfile", "compose.cluster.yaml"))
    images = re.findall(r"^ARG \w+_IMAGE=(\S+)$", containerfile, re.MULTILINE)
    images += re.findall(r"image: \$\{POSTGRES_IMAGE:-(\S+)\}$", cluster, re.MULTILINE)
    assert len(images) == 3
    for image in images:
        assert re.fullmatch(r"docker\.io/library/(python|rust|postgres):[\w.-]+@sha256:[0-9a-f]{64}", image)


def test_compose_cluster_has_role_profiles_with_minimal_secrets(tmp_path: Path) -> None:
    compose: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.cluster.yaml").read_text())
    services = compose["services"]
    assert services.keys() - {"database"} == ROLES.keys() - {"all"}
    assert {name: service["profiles"] for name, service in services.items()} == {name: [name] for name in services}
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
    database = services.pop("database")
    assert database["network_mode"] == "none"
    assert "listen_addresses=" in database["command"]
    assert {volume.split(":")[0] for volume in database["volumes"]} == set(compose["volumes"])
    secrets = {name: tmp_path / name for name in compose["secrets"]}
    for name, text in {"store-url": URL, "store-key": "ab" * 32, "operator-token": "t" * 24}.items():
        secrets.pop(name).write_text(text)
    assert not secrets
    for role, service in services.items():
        assert set(service["secrets"]) == set(compose["secrets"])
        assert service["memswap_limit"] == service["mem_limit"]
        assert megabytes(service["mem_limit"]) == megabytes(read_settings("svote-helper.service")["MemoryMax"])
        settings = {
            name: re.sub(r"\$\{[A-Z_]+:?-(.*)\}", r"\1", value).replace("/run/secrets", str(tmp_path))
            for name, value in service["environment"].items()
        }
        config = load(None, settings).config
        assert (config.helper.role, config.store.url, config.sender.standby) == (role, URL, True)
        assert create_connection_settings(config.store.url, schema="s", host="h")  # no network: encryption not required
    text = (CONTAINER / "Containerfile").read_text()
    assert "requirements-postgres.txt" in text
    assert URL in (CONTAINER / "compose.cluster.yaml").read_text()


def read_pins(file: Path) -> set[Requirement]:
    """The pinned requirements that apply to this platform; others have a marker such as `sys_platform == 'win32'`."""
    pins = [Requirement(pin) for pin in re.findall(r"^([a-z].*==.*) \\$", file.read_text(), re.MULTILINE)]
    return {pin for pin in pins if pin.marker is None or pin.marker.evaluate()}


def test_cluster_requirements_are_pinned() -> None:
    base_pins, postgres_pins = (read_pins(REPO_ROOT / "requirements" / name) for name in ("base.txt", "postgres.txt"))
    assert base_pins < postgres_pins
    assert {pin.name for pin in postgres_pins - base_pins} == {"psycopg", "psycopg-binary", "psycopg-pool"}


def test_compose_service_writes_only_to_its_volume() -> None:
    compose: dict[str, Any] = yaml.safe_load((CONTAINER / "compose.yaml").read_text())
    helper, chain = compose["services"]["helper"], compose["services"]["chain"]
    for service in (helper, chain):
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
    assert helper["volumes"] == ["data:/var/lib/svote-helper"]
    assert set(compose["volumes"]) == {"data"}
    assert helper["mem_limit"] == helper["memswap_limit"]
    assert megabytes(helper["mem_limit"]) == megabytes(read_settings("svote-helper.service")["MemoryMax"])
    assert helper["ulimits"]["core"] == 0
    assert int(helper["stop_grace_period"].removesuffix("s")) > 2 * STOP_GRACE_SECONDS
    assert chain["profiles"] == ["devnet"]
    assert (REPO_ROOT / "deploy" / "container" / helper["build"]["context"]).resolve() == REPO_ROOT
    assert (REPO_ROOT / helper["build"]["dockerfile"]).is_file()
    secret = helper["environment"].pop("SVOTE_HELPER_OPERATOR_TOKEN_FILE")
    assert secret.removeprefix("/run/secrets/") in compose["secrets"]
    settings = {name: re.sub(r"\$\{[A-Z_]+:?-(.*)\}", r"\1", value) for name, value in helper["environment"].items()}
    config = load(None, settings).config
    assert config.chain_nodes == (("http://chain:11317", "http://chain:36657"),)
    assert config.gateway.enable
