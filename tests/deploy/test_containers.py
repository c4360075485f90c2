"""The container files, built and run by podman: image, compose files, a killed prover, and the demo in 512 MB."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.deploy.base_images import POSTGRES_IMAGE, PYTHON_IMAGE, RUST_IMAGE, build_base_images
from tests.deploy.commands import run
from tests.deploy.debian_root import BUILD
from tests.deploy.podman import COMPOSE, Compose, Podman, wait_until
from tests.deploy.prerequisites import require_programs, require_root
from tests.support.planted_secrets import SECRET, copy_sources_with_secrets, find_files_with

pytestmark = pytest.mark.timeout(1800)  # the first test builds everything

OVERRIDES = Path(__file__).parent / "compose"
USER = 10001
KEY = SECRET.encode().hex().ljust(64, "0")
PROGRAMS = {"podman": "podman", "runc": "runc", "debootstrap": "debootstrap", "iptables": "iptables"} | {
    f"/usr/lib/podman/{name}": name for name in ("netavark", "aardvark-dns")
}
"""Programs and their Debian packages."""
SHARES = 16
"""Shares of one vote."""
VOTES = 4
IMAGE = "localhost/svote-helper"


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    require_root("run containers of other users")
    require_programs(PROGRAMS)
    engine = Podman(BUILD / "containers")
    engine.remove_containers()
    yield engine
    engine.remove_containers()
    engine.unmount_storage()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with secret files; those next to the compose files are valid."""
    copy = tmp_path_factory.mktemp("sources") / "tree"
    copy_sources_with_secrets(copy)
    container = copy / "deploy" / "container"
    (url,) = re.findall(r"echo '(postgresql://.*)' > store-url", (container / "compose.cluster.yaml").read_text())
    for name, text in {"operator-token": f"{SECRET}-{'0' * 32}", "store-url": url, "store-key": KEY}.items():
        (container / name).write_text(text)
        (container / name).chmod(0o400)
        os.chown(container / name, USER, USER)
    return copy


@pytest.fixture(scope="module")
def image(podman: Podman, tree: Path) -> str:
    """The image, built as compose builds it, and its build stage, which remains as a layer cache."""
    build_base_images(podman, BUILD / "containers")
    compose: list[str | Path] = [COMPOSE, "--file", tree / "deploy/container/compose.yaml", "build"]
    arguments = [f"--build-arg=RUST_IMAGE={RUST_IMAGE}", f"--build-arg=PYTHON_IMAGE={PYTHON_IMAGE}"]
    podman.build(*arguments, "helper", program=compose)
    return IMAGE


def limit_of(process: int, controller: str, old: str, new: str) -> str:
    """A value of the cgroup of a process, of version 1 or 2."""
    groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{process}/cgroup").read_text().splitlines())
    if controller in groups:
        return Path(f"/sys/fs/cgroup/{controller}{groups[controller]}/{old}").read_text().strip()
    return Path(f"/sys/fs/cgroup{groups['']}/{new}").read_text().strip()


def open_round(chain: str, helper: str) -> str:
    round_id = str(httpx.post(f"{chain}/devnet/rounds", json={"status": 1}).raise_for_status().json()["vote_round_id"])
    url = f"{helper}/shielded-vote/v1/round/{round_id}"
    wait_until(lambda: '"status":1' in httpx.get(url).text.replace(" ", ""), f"{url} has status 1")
    return round_id


def vote(compose: Compose, service: str, round_id: str, *options: str) -> None:
    command = ("svote-helper", "wallet", "vote", round_id, "--proposal", "1", "--decision", "1")
    printed = compose.exec(service, *command, "--base", "http://127.0.0.1:8090", "--json", *options)
    assert json.loads(printed.splitlines()[-1])


def submitted_shares(compose: Compose, service: str) -> int:
    """The number of shares whose reveals the chain has counted, as the helper knows it."""
    stats = json.loads(compose.exec(service, "svote-helper", "queue", "stats", "--json").splitlines()[-1])
    return int(stats["total"]["submitted"])


def is_healthy(podman: Podman, container: str) -> bool:
    """Whether the health check of the image passes."""
    return podman.exit_code("healthcheck", "run", container) == 0


def wait_until_healthy(podman: Podman, container: str) -> None:
    wait_until(lambda: is_healthy(podman, container), f"the health check of {container} passes")


def search_layers(archive: IO[bytes]) -> tuple[int, list[str]]:
    """Return the number of layers of a saved image, and the layers that contain a planted secret."""
    layers, leaking_layers = 0, []
    with tarfile.open(fileobj=archive) as image:
        for member in image:
            content = image.extractfile(member)
            if content is None:
                continue
            data = content.read()
            layers += member.name.endswith(".tar")
            if SECRET.encode() in data or KEY.encode() in data:
                leaking_layers.append(member.name)
    return layers, leaking_layers


def test_planted_secrets_are_in_no_layer(podman: Podman, image: str, tree: Path, tmp_path: Path) -> None:
    saved = tmp_path / "image.tar"
    podman.output("save", "--format", "docker-archive", "--output", saved, image)
    with saved.open("rb") as archive:
        layers, leaking_layers = search_layers(archive)
    saved.unlink()  # several hundred megabytes
    assert layers >= 2
    assert leaking_layers == []
    # The layers of the build stage, too. Only they contain the Makefile.
    first_line = (tree / "Makefile").read_text().partition("\n")[0]
    assert find_files_with(first_line, podman.storage / "overlay") != [], "the search reads the build stage"
    for secret in (SECRET, KEY):
        assert find_files_with(secret, tree) != []
        assert find_files_with(secret, podman.storage / "overlay") == []


HASH_MODULES = """\
import hashlib, importlib.resources, sys
for name in sys.argv[1:]:
    texts = sorted(path.read_bytes() for path in importlib.resources.files(name).rglob("*.py"))
    print(name, hashlib.sha256(b"".join(texts)).hexdigest())
"""


def test_image_has_the_modules_of_its_sources(podman: Podman, image: str, tree: Path) -> None:
    """An earlier image, whose layers are reused, may have been built from other sources."""
    command = ["-c", HASH_MODULES, "admin", "audit", "conformance", "helper"]
    installed = podman.output("run", "--rm", "--entrypoint", "python", image, *command)
    assert installed == run([sys.executable, *command], {"PYTHONPATH": str(tree)})


def test_compose_service_is_confined_and_keeps_its_queue(podman: Podman, image: str, tree: Path) -> None:
    files = [tree / "deploy/container/compose.yaml", OVERRIDES / "single.yaml"]
    compose = Compose(podman, files, ["devnet"])
    compose.output("up", "--detach", "--no-build")
    helper = compose.container("helper")
    wait_until_healthy(podman, helper)
    check_confinement(podman, helper)
    chain, base = compose.address("chain", 11317), compose.address("helper", 8090)
    round_id = open_round(chain, base)
    vote(compose, "helper", round_id)
    wait_until(lambda: submitted_shares(compose, "helper") == SHARES, "all shares are counted")
    vote(compose, "helper", round_id, "--spread", "1800")
    assert count_reveals(chain, round_id) >= SHARES

    # another container, with the same volume
    compose.output("stop", "helper")
    assert podman.inspect(helper)["State"]["ExitCode"] == 0
    podman.output("rm", helper)
    compose.output("up", "--detach", "--no-build", "helper")
    replaced = compose.container("helper")
    assert replaced != helper
    wait_until_healthy(podman, replaced)
    stats = json.loads(compose.exec("helper", "svote-helper", "queue", "stats", "--json").splitlines()[-1])
    assert (stats["total"]["total"], stats["total"]["submitted"]) == (2 * SHARES, SHARES)

    podman.output("kill", "--signal", "KILL", compose.container("chain"))
    wait_until(lambda: not is_healthy(podman, replaced), "the health check fails without the chain")
    assert podman.inspect(replaced)["State"]["Running"], "the health check of a stopped container fails too"
    compose.output("down", "--volumes")


def check_confinement(podman: Podman, container: str) -> None:
    """Check by the kernel's own account that the process has only what the compose file gives it."""
    process = int(podman.inspect(container)["State"]["Pid"])
    status = dict(re.findall(r"^(\w+):\s+(.*)$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE))
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(USER)}
    assert {int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb", "CapInh")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    limits = Path(f"/proc/{process}/limits").read_text()
    assert re.search(r"^Max open files +8192 +8192 ", limits, re.MULTILINE)
    assert re.search(r"^Max core file size +0 +0 ", limits, re.MULTILINE)
    assert limit_of(process, "memory", "memory.limit_in_bytes", "memory.max") == str(1536 * 2**20)
    for directory in ("/", "/opt/svote-helper", "/etc", "/var"):
        assert podman.exit_code("exec", container, "touch", f"{directory}/x") != 0
    for directory in ("/tmp", "/var/lib/svote-helper"):
        assert podman.exit_code("exec", container, "touch", f"{directory}/x") == 0


def count_reveals(chain: str, round_id: str) -> int:
    """The number of different shares that the chain has counted."""
    reveals = httpx.get(f"{chain}/devnet/reveals/{round_id}").raise_for_status().json()["reveals"]
    nullifiers = {reveal["nullifier"] for reveal in reveals}
    assert len(nullifiers) == len(reveals), "a share was counted twice"
    return len(nullifiers)


def test_cluster_counts_all_shares_when_a_prover_is_killed(podman: Podman, image: str, tree: Path) -> None:
    files = [tree / "deploy/container/compose.cluster.yaml", OVERRIDES / "cluster.yaml"]
    profiles = ["database", "api", "prover", "sender", "devnet"]
    compose = Compose(podman, files, profiles, {"POSTGRES_IMAGE": POSTGRES_IMAGE})
    compose.output("up", "--detach", "--no-build", "--scale", "prover=2")
    api, sender = compose.container("api"), compose.container("sender")
    victim, survivor = compose.containers("prover")
    for container in (api, sender, victim, survivor):
        wait_until_healthy(podman, container)
        check_confinement(podman, container)
    chain, base = compose.address("chain", 11317), compose.address("api", 8090)
    round_id = open_round(chain, base)
    for _ in range(VOTES):
        vote(compose, "api", round_id)
    stop_with_claims(podman, compose, victim)
    podman.output("rm", "--force", "--time", "0", victim)
    assert count_claims(compose, victim) > 0, "nothing has released the claims yet"
    wait_until(lambda: submitted_shares(compose, "api") == VOTES * SHARES, "all shares are counted", 300)
    assert count_claims(compose, victim) == 0
    assert count_reveals(chain, round_id) == VOTES * SHARES
    compose.output("down", "--volumes")


def count_claims(compose: Compose, container: str) -> int:
    """The number of shares that a host has claimed. The name of a host is the short id of its container."""
    query = f"SELECT count(*) FROM svote_helper.claims WHERE host = '{container[:12]}'"
    return int(compose.exec("database", "psql", "--username=helper", "--tuples-only", "--command", query))


def stop_with_claims(podman: Podman, compose: Compose, container: str) -> None:
    """Stop the main process of a host while it has claims, so that they cannot change before it is killed."""
    process = int(podman.inspect(container)["State"]["Pid"])

    def stop() -> bool:
        os.kill(process, signal.SIGSTOP)
        if count_claims(compose, container):
            return True
        os.kill(process, signal.SIGCONT)
        return False

    wait_until(stop, f"{container} has claims")


def test_demo_runs_in_512_mb_on_one_core(podman: Podman, image: str) -> None:
    limits = ("--memory", "512m", "--memory-swap", "512m", "--cpus", "1")
    confined = ("--read-only", "--tmpfs", "/tmp:mode=1777", "--cap-drop", "ALL", "--network", "none")
    script = (
        "svote-helper demo --json && cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes /sys/fs/cgroup/memory.peak"
        " 2>/dev/null || test $? = 1"
    )
    output = podman.output("run", "--rm", *limits, *confined, "--entrypoint", "sh", image, "-c", script, timeout=900)
    result, peak = output.splitlines()[-2:]
    assert json.loads(result)["tally_ok"] is True
    print(f"peak {int(peak) / 2**20:.0f} MB")
    assert int(peak) < 512 * 2**20
