"""A PostgreSQL primary fails in a round, and its synchronous standby is promoted; or both serve at the same time.

The tests follow docs/cluster.md, "Failure of the database server".
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from devnet import ballot
from devnet.wallet import CastVote, Wallet
from helper.clock import SystemClock
from helper.config.loader import load
from helper.store.factory import create_store
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, cast_vote, unix_time_in
from tests.support.postgres import REQUIRE_NO_STANDBY, REQUIRE_STANDBY, Cluster, Standby, find_binaries
from tests.support.s3 import BUCKET_NAME, ObjectStoreProcess, put_released_lease
from tests.support.shared_queue import SharedQueueHosts, create_key_file
from tests.support.tasks import poll

SERVERS = ["servers"] if find_binaries() is not None else []
LEASE_SECONDS = 5
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
WALLET_TIMEOUT_SECONDS = 5
"""Seconds after which a wallet that posts shares one by one gives up on a request."""

pytestmark = pytest.mark.parametrize("database", SERVERS)


class Servers:
    """A primary and its synchronous standby."""

    def __init__(self) -> None:
        self.primary = Cluster()
        self.standby = Standby(self.primary)

    @property
    def both_url(self) -> str:
        return f"postgresql://tests@/postgres?host={self.primary.directory},{self.standby.directory}"


@pytest.fixture
def servers() -> Iterator[Servers]:
    started = Servers()
    try:
        started.primary.start()
        started.standby.start()
        yield started
    finally:
        started.standby.remove()
        started.primary.remove()


class Hosts(SharedQueueHosts):
    """Hosts that each have a database URL of their own."""

    async def start_host(
        self, name: str, url: str, *, sender: Mapping[str, Any] = NO_SETTINGS, s3: Mapping[str, Any] = NO_SETTINGS
    ) -> HelperProcess:
        host = self.create_host(
            name,
            helper={"max_concurrent_proofs": 1},
            store={"url": url, "lease_seconds": LEASE_SECONDS},
            sender={"standby": True, **sender},
            s3=dict(s3),
        )
        await host.start()
        await host.wait_until_ready()
        return host


@pytest.fixture
async def hosts(tmp_path: Path, http: httpx.AsyncClient, chain: DevChain) -> AsyncIterator[Hosts]:
    started = Hosts(tmp_path, http, chain)
    yield started
    await started.kill_all()


async def wait_until_counted(chain: DevChain, round_id: bytes, count: int) -> None:
    async with asyncio.timeout(60):
        while len(await chain.spent_nullifiers(round_id)) < count:
            await asyncio.sleep(0.1)


async def assert_each_share_is_in_one_transaction(chain: DevChain, round_id: bytes, votes: list[CastVote]) -> None:
    """Assert that exactly the shares of these votes were revealed, and none was included in a block twice."""
    await chain.mine(3)
    shares = {share.nullifier.hex() for vote in votes for share in vote.shares}
    assert await chain.spent_nullifiers(round_id) == dict.fromkeys(shares, 1)
    assert len(await chain.find_transactions(round_id)) == len(shares)


def test_statements_are_the_documented_ones(database: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    section = page.partition("## Failure of the database server")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines()]
    for statements in (REQUIRE_STANDBY, REQUIRE_NO_STANDBY):
        assert "\n".join(statements.splitlines()) in "\n".join(lines)
    assert "pg_ctl promote -D DATA" in section
    assert 'url = "postgresql://helper@db1.example,db2.example/helper"' in section


async def test_host_starts_if_the_first_server_does_not_respond(tmp_path: Path, database: str) -> None:
    """As after the failure of a machine: its address does not respond, and every connection waits for it first."""
    cluster = Cluster()
    config = tmp_path / "helper.toml"
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(cluster.remove)
        cluster.start()
        silent = cleanup.enter_context(socket.create_server(("127.0.0.1", 0)))
        ports = f"{silent.getsockname()[1]},{cluster.settings['port']}"
        url = f"postgresql://tests@/postgres?host=127.0.0.1,{cluster.directory}&port={ports}"
        config.write_text(f'[store]\nurl = "{url}"\nkey_file = "{create_key_file(tmp_path)}"\n')
        store = create_store(load(config, {}, {}).config, SystemClock())
        await store.open()
        try:
            assert await store.count_shares() == {}
        finally:
            await store.close()


async def test_standby_promoted_in_round_has_every_acknowledged_share(
    servers: Servers, hosts: Hosts, chain: DevChain, database: str
) -> None:
    round_id = await chain.open_round()
    one = await hosts.start_host("one", servers.both_url)
    two = await hosts.start_host("two", servers.both_url)
    async with Wallet(chain.url, [one.url, two.url], mode="parallel") as wallet:
        now_and_later = [*[0] * 8, *[unix_time_in(8)] * 8]
        first = await wallet.cast_vote(round_id, 1, 1, times=now_and_later)
        assert first.is_accepted
        first_body = ballot.post_body(first.ballot, first.ballot.shares[0], first.position, 0)
        sealed = await wallet.seal_ballot(round_id, 2, 1)
        position = await wallet.cast_ballot(sealed)
        await wait_until_counted(chain, round_id, 1)

        posting = asyncio.create_task(wallet.post_shares(sealed, position, times=now_and_later))
        servers.primary.stop(signal.SIGQUIT)
        await one.wait_for_response("/readyz", 503)
        async with asyncio.timeout(WALLET_TIMEOUT_SECONDS):
            assert (await one.post_share(first_body)).status_code == 503
        servers.standby.promote()
        servers.standby.execute_all(REQUIRE_NO_STANDBY)
        second = await posting

        for host in (one, two):
            await host.wait_until_ready()
        await wait_until_counted(chain, round_id, 16 + sum(share.is_accepted for share in second.shares))
        # as a wallet does with what was not accepted
        again = await wallet.post_shares(sealed, position, times=ballot.immediate_times())
        assert again.is_accepted
        third = await wallet.cast_vote(round_id, 3, 1)
        assert third.is_accepted
    await wait_until_counted(chain, round_id, 48)
    await assert_each_share_is_in_one_transaction(chain, round_id, [first, again, third])


async def test_commits_that_wait_for_a_lost_standby_are_reported(
    servers: Servers, hosts: Hosts, chain: DevChain, database: str
) -> None:
    round_id = await chain.open_round()
    one = await hosts.start_host("one", servers.both_url)
    async with Wallet(chain.url, [one.url], mode="parallel") as wallet:
        first = await wallet.cast_vote(round_id, 1, 1)
        assert first.is_accepted
        await wait_until_counted(chain, round_id, 16)
        sealed = await wallet.seal_ballot(round_id, 2, 1)
        position = await wallet.cast_ballot(sealed)

        servers.standby.stop(signal.SIGQUIT)
        await one.wait_for_response("/readyz", 503)
        await one.wait_for("logs the reason", lambda: "database_writes_stalled" in one.log.read_text())
        body = ballot.post_body(first.ballot, first.ballot.shares[0], first.position, 0)
        async with asyncio.timeout(WALLET_TIMEOUT_SECONDS):
            assert (await one.post_share(body)).status_code == 503, "the standby may lack what is visible"

        servers.primary.execute_all(REQUIRE_NO_STANDBY)
        await one.wait_until_ready()
        second = await wallet.post_shares(sealed, position, times=ballot.immediate_times())
        assert second.is_accepted
    await wait_until_counted(chain, round_id, 32)
    await assert_each_share_is_in_one_transaction(chain, round_id, [first, second])


async def test_object_store_lease_decides_between_two_primaries(
    servers: Servers,
    hosts: Hosts,
    chain: DevChain,
    object_store: ObjectStoreProcess,
    database: str,
) -> None:
    await put_released_lease(object_store.open_bucket_client("queue"), seconds=LEASE_SECONDS)
    lease: dict[str, Any] = {
        "sender": {"lease": f"s3://{BUCKET_NAME}/queue/sender.json"},
        "s3": {"endpoint": object_store.url},
    }
    round_id = await chain.open_round()
    one = await hosts.start_host("one", servers.primary.url, **lease)
    await one.wait_until("sends", lambda facts: facts["sends"])
    servers.primary.execute_all(REQUIRE_NO_STANDBY)
    await chain.set_faults(routes=["reveal-share"], refuse=1)
    first = await cast_vote(chain, one, round_id)
    assert first.is_accepted
    await wait_until_replicated(servers)
    servers.standby.promote()
    servers.standby.execute_all(REQUIRE_NO_STANDBY)
    two = await hosts.start_host("two", servers.standby.url, **lease)

    # Both databases are primaries and contain all messages, and only one host sends.
    messages = f"SELECT count(*) FROM {hosts.schema_name}.reveals"
    await two.wait_for("has all messages", lambda: servers.standby.execute(messages) == [(16,)])
    await chain.clear_faults()
    await wait_until_counted(chain, round_id, 16)
    sent_by_one, sent_by_two = await count_sent(one, two)
    assert (sent_by_one >= 16, sent_by_two) == (True, 0)
    assert [(await host.service_stats())["sends"] for host in (one, two)] == [True, False]

    assert one.process is not None
    one.process.send_signal(signal.SIGSTOP)
    try:
        await two.wait_until("sends", lambda facts: facts["sends"])
        second = await cast_vote(chain, two, round_id, proposal=2)
        assert second.is_accepted
        await wait_until_counted(chain, round_id, 32)
    finally:
        one.process.send_signal(signal.SIGCONT)
    await one.wait_until("has noticed", lambda facts: not facts["sends"])
    assert await count_sent(one, two) == [sent_by_one, 16]
    await assert_each_share_is_in_one_transaction(chain, round_id, [first, second])


async def count_sent(*hosts: HelperProcess) -> list[int]:
    """Return how often each host has sent a share, with refused attempts."""
    return [(await host.service_counts()).get("broadcast", 0) for host in hosts]


async def wait_until_replicated(servers: Servers) -> None:
    """Wait until the standby has received everything that the primary has committed."""
    ((position,),) = servers.primary.execute("SELECT pg_current_wal_flush_lsn()")
    query = f"SELECT replay_lsn >= '{position}' FROM pg_stat_replication"
    async with asyncio.timeout(30):
        await poll(lambda: servers.primary.execute(query) == [(True,)])
