"""One queue in PostgreSQL with hosts of different roles: API, prover, sender and standby."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import psycopg
import pytest
from psycopg import sql

from devnet import ballot
from tests.support.devnet import DevChain
from tests.support.harness import STAND_IN_PROGRAM, HelperProcess, cast_vote, unix_time_in
from tests.support.postgres import Cluster, find_binaries

CLUSTERS = ["cluster"] if find_binaries() is not None else []


class Hosts:
    """Hosts that share a queue, by name."""

    def __init__(self, directory: Path, http: httpx.AsyncClient, chain: DevChain, url: str) -> None:
        self._directory = directory
        self._http = http
        self._chain = chain
        self._keys = directory / "keys"
        self._keys.touch(0o600)
        self._keys.write_text(token_hex(32))
        self._store = {
            "url": url,
            "key_file": str(self._keys),
            "schema_name": f"roles_{token_hex(6)}",
        }
        self.all_hosts: dict[str, HelperProcess] = {}

    async def kill_sender_and_expire_lease(self, name: str) -> None:
        """Kill the sender and expire its lease immediately. Campaigns wait for the real expiry."""
        await self.all_hosts[name].kill()
        with psycopg.connect(str(self._store["url"]), autocommit=True) as conn:
            place = sql.Identifier(str(self._store["schema_name"]), "sender")
            changed = conn.execute(
                sql.SQL("UPDATE {} SET until = clock_timestamp() WHERE host = %s").format(place), (name,)
            )
            assert changed.rowcount == 1

    def create_host(self, name: str, role: str, **sender: Any) -> HelperProcess:
        directory = self._directory / name
        directory.mkdir()
        host = HelperProcess(
            directory,
            self._http,
            self._chain,
            program=STAND_IN_PROGRAM,
            nodes=2,
            helper={"role": role, "max_concurrent_proofs": 2},
            store={**self._store, "host": name},
            sender=sender,
        )
        self.all_hosts[name] = host
        return host

    async def start_host(self, name: str, role: str, **sender: Any) -> HelperProcess:
        host = self.create_host(name, role, **sender)
        await host.start()
        await host.wait_until("is ready", lambda facts: facts["ready"])
        return host


@pytest.fixture
async def hosts(
    request: pytest.FixtureRequest, tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> AsyncIterator[Hosts]:
    cluster: Cluster = request.getfixturevalue("cluster")
    hosts = Hosts(tmp_path, http, chain, cluster.url)
    yield hosts
    for host in hosts.all_hosts.values():
        with contextlib.suppress(ProcessLookupError):
            await host.kill()


pytestmark = pytest.mark.parametrize("database", CLUSTERS)


async def test_three_roles_reveal_vote_and_standby_sender_takes_over(
    hosts: Hosts, chain: DevChain, database: str
) -> None:
    round_id = await chain.open_round()
    takes, proves, sends = await asyncio.gather(
        hosts.start_host("takes", "api"), hosts.start_host("proves", "prover"), hosts.start_host("sends", "sender")
    )
    wrong = hosts.create_host("wrong", "sender")
    wrong.spawn()
    first = await cast_vote(chain, takes, round_id, times=ballot.same_second_times(unix_time_in(1)))
    await takes.wait_until_confirmed(first)
    assert [(await host.service_counts()).get("proven", 0) for host in (takes, proves, sends)] == [0, 16, 0]
    assert [(await host.service_counts()).get("broadcast", 0) for host in (takes, proves, sends)] == [0, 0, 16]

    waits = await hosts.start_host("waits", "sender", standby=True)
    assert await wrong.wait_for_exit() == 1
    assert "host 'sends' holds the sender lease of this queue" in wrong.log_tail()
    assert not (await waits.service_stats())["sends"]
    await hosts.kill_sender_and_expire_lease("sends")
    second = await cast_vote(chain, takes, round_id, proposal=2, times=ballot.same_second_times(unix_time_in(1)))
    await takes.wait_until_confirmed(second)
    assert (await waits.service_counts())["broadcast"] == 16
    assert sum((await chain.spent_nullifiers(round_id)).values()) == 32


async def test_only_api_role_accepts_shares(hosts: Hosts, http: httpx.AsyncClient, database: str) -> None:
    proves = await hosts.start_host("proves", "prover")
    await proves.wait_until("is healthy", lambda facts: not any(check["problem"] for check in facts["checks"]))
    assert (await http.get(f"{proves.url}/readyz")).status_code == 200
    for path in ("shares", "status"):
        assert (await http.post(f"{proves.url}/shielded-vote/v1/{path}", json={})).status_code == 404
    await proves.kill()
    alone = await hosts.start_host("alone", "api")
    await alone.wait_until(
        "names both missing hosts",
        lambda facts: [check["name"] for check in facts["checks"] if check["problem"]] == ["sender", "provers"],
    )
    response = await http.get(f"{alone.url}/readyz?verbose")
    assert response.status_code == 503
    assert "svote-helper serve --role sender" in response.text
    await hosts.start_host("proves again", "prover")
    await alone.wait_until(
        "sees the prover",
        lambda facts: [check["name"] for check in facts["checks"] if check["problem"]] == ["sender"],
    )
