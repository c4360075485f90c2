"""Hosts of all roles on one PostgreSQL database, with faults while wallets vote.

Method. The hosts run the complete service. One accepts shares (two in the full form), as many prove, two may send, one
of them at a time. The faults come in random order: SIGKILL of any host, which is restarted immediately or after another
host has taken over; SIGSTOP for longer than a lease, and SIGCONT; a crash of the server (`pg_ctl stop -m immediate`);
every connection to it closed within its next bytes, of a query or of a result; and periods in which all notifications
between hosts (NOTIFY) are lost.

Requirements. Nothing is lost, early or counted twice, and all shares are confirmed and erased. Each send is recorded by
the lease holder: the database itself logs which host records a send and which host holds the lease at that time. The
claims of a silent host, or its right to send, pass to another host within a lease and 5 s; after a crash of the server
reveals are sent again within 10 s. No attempt is spent.

Injected fault: `can_send` and `renew_sender_lease` (queries.sql) did not check the fencing token. The short form
reported: "sends recorded without the lease: 44 (= 0)" and "repeated sends of a share at one height: 43 (≤ 16)".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx
import psycopg

from devnet.ballot import Ballot
from tests.campaign import promise_check
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.process_lifecycle import count_attempts
from tests.campaign.wallet_clients import WalletGroup
from tests.support.database_proxy import DatabaseProxy
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, run_chain
from tests.support.postgres import Cluster, find_binaries
from tests.support.process import find_free_port
from tests.support.shared_queue import SharedQueueHosts
from tests.support.tasks import is_met_within

SCHEMA_NAME: Final = "queue"
SLACK_SECONDS: Final = 5.0
"""Seconds after its lease within which a silent host's work is taken over."""
RESUME_SECONDS: Final = 10.0
"""Seconds after a crash of the server within which reveals are sent again."""
MAX_AHEAD_SECONDS: Final = 4.0
"""Seconds over which the shares of a vote fall due."""
POSTER_COUNT: Final = 16
"""Maximum concurrent sends of one host (`helper.reveal.sender.CONCURRENT_RESENDS`)."""
STOPPED_SENDER: Final = "SIGSTOP: sender"
START_TIMEOUT_SECONDS: Final = 300.0
"""Seconds within which a host must be up, on a shared machine."""
SEND_LOG_SQL: Final = f"""
CREATE SCHEMA campaign;
CREATE TABLE campaign.sends (host TEXT NOT NULL, sender TEXT);
CREATE FUNCTION campaign.log_send() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO campaign.sends VALUES (current_setting('application_name'), (SELECT host FROM {SCHEMA_NAME}.sender));
  RETURN NEW;
END $$;
CREATE TRIGGER log_send AFTER UPDATE ON {SCHEMA_NAME}.reveals FOR EACH ROW WHEN (NEW.sends > OLD.sends)
  EXECUTE FUNCTION campaign.log_send();
"""
"""Logs which host records a send and which host holds, or last held, the lease, according to the server. A record
that was started in time may be committed after the lease ends: no host takes over before it is committed.
"""


@dataclass
class Environment:
    """The participants.

    Attributes:
        lease: seconds.
        query_connection: the campaign's direct connection to the database.
    """

    setting: CampaignRun
    findings: Findings
    chain: DevChain
    cluster: Cluster
    proxy: DatabaseProxy
    wallets: WalletGroup
    hosts: dict[str, HelperProcess]
    lease: float
    rng: random.Random
    query_connection: psycopg.Connection[tuple[Any, ...]] | None = None

    async def query_value(self, query: str, *values: object) -> Any:
        """Return the single value of a query, read without the proxy."""

        def run_query() -> Any:
            if self.query_connection is None or self.query_connection.closed:
                search_path = f"-c search_path={SCHEMA_NAME}"
                self.query_connection = psycopg.connect(self.cluster.url, options=search_path, autocommit=True)
            row = self.query_connection.execute(query.encode(), values).fetchone()
            return None if row is None else row[0]

        return await asyncio.to_thread(run_query)

    async def current_sender(self) -> str:
        """Return the host that holds the lease, "" for none."""
        return await self.query_value("SELECT host FROM sender WHERE until >= clock_timestamp()") or ""

    async def count_claims(self, name: str) -> int:
        """Return the number of shares claimed by a host."""
        return int(await self.query_value("SELECT count(*) FROM claims WHERE host = %s", name))

    async def count_sends(self) -> int:
        return int(await self.query_value("SELECT count(*) FROM campaign.sends"))

    async def require_within(self, description: str, condition: Callable[[], Awaitable[object]], bound: float) -> None:
        """Wait for a condition and require that it is met within the bound."""
        started_at = time.monotonic()
        while not await condition() and time.monotonic() < started_at + 10 * bound:
            await asyncio.sleep(0.1)
        self.findings.require_at_most(f"seconds until {description}", time.monotonic() - started_at, bound)

    async def wait_for_takeover(self, name: str) -> None:
        """Wait until another host has taken over a silent host's work."""
        if name.startswith("sends"):

            async def has_other_sender() -> bool:
                return await self.current_sender() not in {"", name}

            await self.require_within("another host sends", has_other_sender, self.lease + SLACK_SECONDS)
        elif name.startswith("proves"):

            async def has_no_claims() -> bool:
                return await self.count_claims(name) == 0

            await self.require_within("another host has its shares", has_no_claims, self.lease + SLACK_SECONDS)

    async def start_host(self, name: str) -> None:
        """Start a host; its name may still be in use by its previous run for a moment."""
        while True:
            self.hosts[name].spawn(STANDIN_SECONDS="0.05")
            with contextlib.suppress(AssertionError):
                await self.hosts[name].wait_until_listening()
                break
            assert self.hosts[name].process is not None
            await self.hosts[name].wait_for_exit()
        async with self.hosts[name].timeout("is ready", START_TIMEOUT_SECONDS):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await self.hosts[name].service_stats())["ready"]:
                        return
                await asyncio.sleep(0.05)


async def run(setting: CampaignRun) -> Findings:
    findings = Findings()
    findings.require_equal(
        "requirements are installed", "yes" if find_binaries() is not None else "no PostgreSQL", "yes"
    )
    if not findings.is_held:
        return findings
    async with _run_environment(setting, findings) as env:
        await _run_faults(env)
        await _check_promises(env)
    return findings


@contextlib.asynccontextmanager
async def _run_environment(setting: CampaignRun, findings: Findings) -> AsyncIterator[Environment]:
    """Run chain, database, proxy and hosts; stop them afterwards."""
    cluster = Cluster()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(cluster.remove)
        await asyncio.to_thread(cluster.start)
        proxy = DatabaseProxy(cluster.directory / ".s.PGSQL.5432")
        await stack.enter_async_context(proxy.listen())
        chain = await stack.enter_async_context(
            run_chain(setting.directory, "--block-seconds", "1", "--stand-in-proofs")
        )
        lease = setting.scale(10.0, 2.0)
        hosts, urls = _create_hosts(setting, chain, proxy, lease)
        wallets = WalletGroup(chain, lambda: urls, setting.seeded_random("wallets"))
        env = Environment(
            setting, findings, chain, cluster, proxy, wallets, hosts, lease, setting.seeded_random("hurts")
        )
        stack.push_async_callback(_stop_hosts, env)
        first, *others = hosts
        await env.start_host(first)  # creates the tables
        await asyncio.to_thread(_install_send_log, cluster)
        await asyncio.gather(*map(env.start_host, others))
        yield env


def _create_hosts(
    setting: CampaignRun, chain: DevChain, proxy: DatabaseProxy, lease: float
) -> tuple[dict[str, HelperProcess], list[str]]:
    """Create hosts by name without starting them; a name begins with the role. Returns also the URLs for wallets."""
    url = f"postgresql://tests@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable"
    hosts = SharedQueueHosts(
        setting.directory, chain.http, chain, url=url, schema_name=SCHEMA_NAME, lease_seconds=lease
    )
    kinds = {"takes": ("api", setting.scale(2, 1)), "proves": ("prover", 2), "sends": ("sender", 2)}
    urls = []
    for kind, (role, number) in kinds.items():
        for index in range(number):
            port = find_free_port()
            hosts.create_host(
                f"{kind}-{index}",
                helper={"role": role, "port": port, "max_concurrent_proofs": 1},
                sender={"standby": True},
                admin={"disable": True},
            )
            urls += [f"http://127.0.0.1:{port}"] if role == "api" else []
    return hosts.all_hosts, urls


def _install_send_log(cluster: Cluster) -> None:
    with psycopg.connect(cluster.url, autocommit=True) as conn:
        conn.execute(SEND_LOG_SQL.encode())


async def _stop_hosts(env: Environment) -> None:
    if env.query_connection is not None:
        env.query_connection.close()
    for host in env.hosts.values():
        if host.process is not None and host.process.poll() is None:
            host.process.send_signal(signal.SIGCONT)
            await host.kill()


# ---------------------------------------------------------------- faults


async def _kill_host(env: Environment, name: str) -> None:
    """Kill a host and restart it immediately or after the takeover."""
    await env.hosts[name].kill()
    if env.setting.is_quick or env.rng.random() < 0.5:
        await env.wait_for_takeover(name)
    await env.start_host(name)


async def _suspend_host(env: Environment, name: str) -> None:
    """Suspend a host for longer than its lease, then resume it."""
    os.kill(env.hosts[name].pid, signal.SIGSTOP)
    await env.wait_for_takeover(name)
    if not name.startswith("sends"):
        await asyncio.sleep(env.lease)
    os.kill(env.hosts[name].pid, signal.SIGCONT)


async def _disrupt_sender(env: Environment, fault: Callable[[Environment, str], Awaitable[None]]) -> None:
    while not (name := await env.current_sender()):
        await asyncio.sleep(0.05)
    await fault(env, name)


async def _crash_database(env: Environment) -> None:
    """Crash the server, as a power failure would, and start it."""
    if env.query_connection is not None:
        env.query_connection.close()
    await asyncio.to_thread(env.cluster.stop, signal.SIGQUIT)
    await asyncio.to_thread(env.cluster.start)
    await _require_progress(env, "reveals are sent after the server's crash")


async def _cut_connections(env: Environment) -> None:
    """Close every connection within its next bytes."""
    env.proxy.cut_connections(env.rng.randrange(1, 400))
    deadline = time.monotonic() + 3  # idle connections stay open
    while env.proxy.open_cut_connections and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    await _require_progress(env, "reveals are sent after all connections closed")


async def _require_progress(env: Environment, description: str) -> None:
    before = await env.count_sends()

    async def has_progress() -> bool:
        return await env.count_sends() > before or not await env.query_value("SELECT count(*) FROM shares")

    await env.require_within(description, has_progress, RESUME_SECONDS)


async def _run_faults(env: Environment) -> None:
    """Apply all faults in random order while votes are posted in proportion."""
    setting, rng = env.setting, env.rng
    round_id = await env.chain.open_round()
    faults = _draw_faults(env)
    votes = await env.wallets.cast_votes(round_id, setting.scale(125, 6))
    due = setting.seeded_random("times")
    started_at = 0
    async with asyncio.TaskGroup() as group:

        def post(stop: int) -> None:
            nonlocal started_at
            batch: list[tuple[Ballot, int]] = votes[started_at:stop]
            started_at = stop
            group.create_task(
                env.wallets.post_shares(
                    batch,
                    lambda: int(time.time() + due.uniform(0, MAX_AHEAD_SECONDS)) + 1,
                    timeout_seconds=START_TIMEOUT_SECONDS,
                )
            )

        for number, (what, apply) in enumerate(faults):
            post(-(-len(votes) * (number + 1) // (len(faults) + 1)))
            env.findings.record_figure(what, int(env.findings.figures.get(what, 0)) + 1)
            await asyncio.sleep(rng.uniform(0.2, 1.5))
            env.proxy.drops_notifications = number % 3 == 1
            await apply()
        env.proxy.drops_notifications = True  # the remaining work must be done without notifications
        post(len(votes))


def _draw_faults(env: Environment) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Return all faults with their names, in random order."""
    setting, rng, names = env.setting, env.rng, list(env.hosts)

    kills = names * setting.scale(100 // len(names), 0) or ["takes-0", "proves-0"]
    stops = [name for name in names if not name.startswith("sends")] * setting.scale(3, 0) or ["proves-0"]
    faults: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    faults += [(f"SIGKILL: {name.partition('-')[0]}", partial(_kill_host, env, name)) for name in kills]
    faults += [("SIGKILL: sender", partial(_disrupt_sender, env, _kill_host))] * setting.scale(4, 1)
    faults += [(f"SIGSTOP: {name.partition('-')[0]}", partial(_suspend_host, env, name)) for name in stops]
    faults += [(STOPPED_SENDER, partial(_disrupt_sender, env, _suspend_host))] * setting.scale(12, 1)
    faults += [("crashes of the server", partial(_crash_database, env))] * setting.scale(5, 1)
    faults += [("closing of all connections", partial(_cut_connections, env))] * setting.scale(20, 1)
    rng.shuffle(faults)
    return faults


# ---------------------------------------------------------------- results


async def _check_promises(env: Environment) -> None:
    findings, ledger = env.findings, env.wallets.ledger
    await promise_check.wait_until_drained(env.chain, ledger, 90 + 0.1 * len(ledger.posted))
    await promise_check.check_promises(findings, env.chain, ledger)
    findings.require_equal("shares posted and not acknowledged", len(ledger.posted) - len(ledger.acknowledged_at), 0)
    findings.require_equal("shares refused", len(env.wallets.refused), 0)
    findings.require_at_least("lost notifications between hosts", env.proxy.dropped_notifications, 1)
    findings.require_equal("sends recorded without the lease", await _sends_by_other_hosts(env), 0)
    findings.require_at_least(
        "hosts that have sent", await env.query_value("SELECT count(DISTINCT host) FROM campaign.sends"), 2
    )
    await is_met_within(60, lambda: env.query_value("SELECT count(*) = 0 FROM shares"))
    findings.require_equal("shares left in the database", await env.query_value("SELECT count(*) FROM shares"), 0)
    findings.require_equal("shares quarantined", await env.query_value("SELECT count(*) FROM damaged"), 0)
    for host in env.hosts.values():
        findings.require_equal("exit status of a host", await host.stop(), 0)
    spent = sum(count_attempts(host.log)[0] for host in env.hosts.values())
    findings.require_equal("attempts spent", spent, 0)
    await _repeated_sends(env)


async def _sends_by_other_hosts(env: Environment) -> int:
    """Count sends recorded by a host that was not the sender at that moment."""
    return int(await env.query_value("SELECT count(*) FROM campaign.sends WHERE host IS DISTINCT FROM sender"))


async def _repeated_sends(env: Environment) -> None:
    """Limit repeated sends: a host stopped between record and first byte may repeat a share's send."""
    sent = await promise_check.find_broadcasts(env.chain, env.wallets.ledger)
    pairs = {(entry["nullifier"], entry["height"]) for entry in sent}
    stops = int(env.findings.figures.get(STOPPED_SENDER, 0))
    env.findings.require_at_most(
        "repeated sends of a share at one height", len(sent) - len(pairs), POSTER_COUNT * stops
    )
