"""One queue in PostgreSQL with hosts of different roles: API, prover, sender and standby."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg import sql

from devnet import ballot
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, cast_vote, unix_time_in
from tests.support.postgres import Cluster, find_binaries
from tests.support.shared_queue import SharedQueueHosts

CLUSTERS = ["cluster"] if find_binaries() is not None else []


class Hosts(SharedQueueHosts):
    """Hosts with a role."""

    async def kill_sender_and_expire_lease(self, name: str) -> None:
        """Kill the sender and expire its lease immediately. Campaigns wait for the real expiry."""
        await self.all_hosts[name].kill()
        with psycopg.connect(str(self._store["url"]), autocommit=True) as conn:
            place = sql.Identifier(self.schema_name, "sender")
            changed = conn.execute(
                sql.SQL("UPDATE {} SET until = clock_timestamp() WHERE host = %s").format(place), (name,)
            )
            assert changed.rowcount == 1

    def create(self, name: str, role: str, **sender: Any) -> HelperProcess:
        return self.create_host(name, helper={"role": role, "max_concurrent_proofs": 2}, sender=sender)

    async def start_host(self, name: str, role: str, **sender: Any) -> HelperProcess:
        host = self.create(name, role, **sender)
        await host.start()
        await host.wait_until("is ready", lambda facts: facts["ready"])
        return host


@pytest.fixture
async def hosts(
    request: pytest.FixtureRequest, tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> AsyncIterator[Hosts]:
    cluster: Cluster = request.getfixturevalue("cluster")
    hosts = Hosts(tmp_path, http, chain, nodes=2, url=cluster.url)
    yield hosts
    await hosts.kill_all()


pytestmark = pytest.mark.parametrize("database", CLUSTERS)


async def test_three_roles_reveal_vote_and_standby_sender_takes_over(
    hosts: Hosts, chain: DevChain, database: str
) -> None:
    round_id = await chain.open_round()
    takes, proves, sends = await asyncio.gather(
        hosts.start_host("takes", "api"), hosts.start_host("proves", "prover"), hosts.start_host("sends", "sender")
    )
    wrong = hosts.create("wrong", "sender")
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
