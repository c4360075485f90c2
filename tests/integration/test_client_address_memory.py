"""The service behind a proxy has no client address in its memory, files, log or metrics after 1,000 posted shares.

The proxies run with their example configurations. All clients connect from one loopback address, and claim another one
in their headers. The search reads all memory of the service and its provers, so it needs root.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from devnet import ballot
from tests.campaign.wallet_clients import create_waiting_bodies
from tests.support.devnet import DevChain
from tests.support.harness import run_helper
from tests.support.memory_search import AddressSearch, is_in_process
from tests.support.process import find_free_port
from tests.support.proxies import PROXIES, run_proxy
from tests.support.short_connections import ShortConnectionPoster

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can read the memory of a hardened process")

CLIENT_ADDRESS = "127.83.42.77"
CLAIMED_ADDRESS = "203.0.113.177"
FORGED_HEADERS = (
    f"X-Forwarded-For: {CLAIMED_ADDRESS}",
    f"X-Real-IP: {CLAIMED_ADDRESS}",
    f"Forwarded: for={CLAIMED_ADDRESS}",
)
SHARE_COUNT = 1_000
REFUSED_COUNT = 100
MARKER = "held-in-the-environment"
MAX_CHANCE_HITS = 2
"""Maximum occurrences of four bytes in another form: a few hundred megabytes have one by chance in every tenth run."""
HOLDING_PROGRAM = """
import ctypes, ipaddress, socket, struct, sys
address = ipaddress.ip_address(sys.argv[1])
packed, number = bytes(address.packed), int(address)
structure = ctypes.create_string_buffer(struct.pack("=HH4s", socket.AF_INET, 4711, packed) + bytes(8))
print(flush=True)
sys.stdin.read()
"""


async def test_memory_search_finds_each_form_of_an_address() -> None:
    command = [sys.executable, "-c", HOLDING_PROGRAM, CLIENT_ADDRESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdout.readline()
        found = AddressSearch(CLIENT_ADDRESS).count_in_process(holder.pid)
        other = AddressSearch(CLAIMED_ADDRESS).count_in_process(holder.pid)
        holder.stdin.close()
    assert found.keys() >= {"text", "sockaddr", "bytes", "int"}
    assert other.keys() <= {"other"}


@pytest.mark.parametrize("proxy", PROXIES)
async def test_service_behind_proxy_holds_no_client_address(
    proxy: str, chain: DevChain, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    state, proxy_directory = tmp_path / "state", tmp_path / "proxy"
    proxy_directory.mkdir()
    metrics = {"enable": True, "port": find_free_port()}
    env = {"TEST_MARKER": MARKER}
    async with run_helper(state, http, chain, env=env, metrics=metrics) as helper:
        round_id, bodies = await create_waiting_bodies(chain, helper, -(-SHARE_COUNT // ballot.SHARE_COUNT))
        bodies = bodies[:SHARE_COUNT]
        async with run_proxy(proxy, proxy_directory, httpx.URL(helper.url).port or 0) as client:
            poster = ShortConnectionPoster(str(client.base_url), source=CLIENT_ADDRESS, headers=FORGED_HEADERS)
            accepted = await asyncio.to_thread(poster.run, bodies, 32)
            refused = await asyncio.to_thread(poster.run, [body[:-1] for body in bodies[:REFUSED_COUNT]], 32)
            assert accepted.responses == {"200 queued": SHARE_COUNT}
            assert refused.responses == {"400 error": REFUSED_COUNT}
            pids = [helper.pid, *await helper.worker_pids()]
            assert len(pids) > 1
            assert is_in_process(helper.pid, f"TEST_MARKER={MARKER}".encode()), "the search reads no environment"
            assert is_in_process(helper.pid, round_id), "the search reads no heap"
            texts = {
                "metrics": (await http.get(f"http://127.0.0.1:{metrics['port']}/metrics")).text,
                "stats": json.dumps(await helper.operator_get("/stats")),
                "queue": json.dumps(await helper.operator_get("/queue?limit=10000")),
            }
            data = {name: text.encode() for name, text in texts.items()}
            data |= {path.name: path.read_bytes() for path in state.rglob("*") if path.is_file()}
            assert {"helper.log", "queue.db", "queue.db-wal"} <= data.keys()
            for address in (CLIENT_ADDRESS, CLAIMED_ADDRESS):
                search = AddressSearch(address)
                in_memory = sum((search.count_in_process(pid) for pid in pids), search.count(b""))
                assert in_memory.pop("other", 0) <= MAX_CHANCE_HITS
                assert in_memory == {}
                assert {name for name, part in data.items() if search.count(part).keys() - {"other"}} == set()
