"""Hosts of all roles on one PostgreSQL database, as the services that they are, hurt while wallets vote.

How it hurts. One host takes shares (two in the full form), as many prove, two may send, one of them at a time. In any
order: SIGKILL of any of them, and it is started again at once or when its work is another's; SIGSTOP for longer than a
lease, and SIGCONT; a crash of the server (`pg_ctl stop -m immediate`); every connection to it cut within its next
bytes, of a question or of an answer; and for a while all that hosts say to each other (NOTIFY) is lost on the way.

What must hold. Nothing is lost, early or counted twice, and all is confirmed and erased. Each send is noted by the
host that has the lease: the database itself writes down who notes one, and who holds the lease then. What a silent
host had in hand, or the right to send, is another's within a lease and 5 s; after a crash reveals are sent again within
10 s. No attempt is spent.

Planted: `sends` and `keep_sender` (queries.sql) no longer asked for the fence. The short form said: "sends noted
without the lease: 44 (= 0)" and "sends of a share at a height that had one: 43 (≤ 16)".
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any, Final

import httpx
import psycopg

from devnet.ballot import Ballot
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.process_lifecycle import attempts
from tests.campaign.wallet_clients import Crowd
from tests.support.database_proxy import Way
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper
from tests.support.postgres import Cluster, binaries
from tests.support.process import free_port

SCHEMA: Final = "queue"
SLACK: Final = 5.0
"""Seconds beyond a lease in which what a silent host did is another's to do."""
RESUMED: Final = 10.0
"""Seconds after a crash of the server in which reveals are sent again."""
AHEAD: Final = 4.0
"""Seconds over which the shares of a vote fall due."""
SHARES: Final = 16
AT_ONCE: Final = 16
"""Sends of one host that may have begun at one moment (`helper.reveal.broadcaster.IN_FLIGHT`)."""
STOPPED: Final = "SIGSTOP: who sends"
START: Final = 300.0
"""Seconds in which a host must be up, on a machine that others use too."""
NOTED: Final = f"""
CREATE SCHEMA campaign;
CREATE TABLE campaign.noted (host TEXT NOT NULL, sender TEXT);
CREATE FUNCTION campaign.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO campaign.noted VALUES (current_setting('application_name'), (SELECT host FROM {SCHEMA}.sender));
  RETURN NEW;
END $$;
CREATE TRIGGER noted AFTER UPDATE ON {SCHEMA}.reveals FOR EACH ROW WHEN (NEW.sends > OLD.sends)
  EXECUTE FUNCTION campaign.note();
"""
"""Who notes a send, and who has the lease then or had it last, by the server's own word. A note that was begun in time
may end after it: until it is committed nobody takes over.
"""


@dataclass
class Scene:
    """What takes part.

    Attributes:
        lease: seconds.
        quiet: the longest that something was nobody's, by what was done.
        looking: a connection of the campaign's own.
    """

    setting: Setting
    findings: Findings
    chain: Chain
    cluster: Cluster
    way: Way
    crowd: Crowd
    hosts: dict[str, Helper]
    lease: float
    dice: random.Random
    quiet: dict[str, float] = field(default_factory=dict)
    looking: psycopg.Connection[tuple[Any, ...]] | None = None

    async def ask(self, query: str, *values: object) -> Any:
        """The one value that the database has for a query, as it is without the way."""

        def look() -> Any:
            if self.looking is None or self.looking.closed:
                way = f"-c search_path={SCHEMA}"
                self.looking = psycopg.connect(self.cluster.address, options=way, autocommit=True)
            row = self.looking.execute(query.encode(), values).fetchone()
            return None if row is None else row[0]

        return await asyncio.to_thread(look)

    async def sender(self) -> str:
        """The host that has the lease, "" for none."""
        return await self.ask("SELECT host FROM sender WHERE until >= clock_timestamp()") or ""

    async def in_hand(self, name: str) -> int:
        """How many shares a host proves."""
        return int(await self.ask("SELECT count(*) FROM claims WHERE host = %s", name))

    async def sends(self) -> int:
        """How many sends were noted."""
        return int(await self.ask("SELECT count(*) FROM campaign.noted"))

    async def until(self, what: str, holds: Callable[[], Awaitable[object]], bound: float) -> None:
        """Wait until this holds, and promise how soon."""
        began = time.monotonic()
        while not await holds() and time.monotonic() < began + 10 * bound:
            await asyncio.sleep(0.1)
        name = f"seconds until {what}"
        self.quiet[name] = max(self.quiet.get(name, 0.0), time.monotonic() - began)
        self.findings.at_most(name, self.quiet[name], bound)

    async def taken_over(self, name: str) -> None:
        """Wait until nothing is a silent host's any more."""
        if name.startswith("sends"):

            async def another() -> bool:
                return await self.sender() not in {"", name}

            await self.until("another host sends", another, self.lease + SLACK)
        elif name.startswith("proves"):

            async def none() -> bool:
                return await self.in_hand(name) == 0

            await self.until("its shares are another's", none, self.lease + SLACK)

    async def up(self, name: str) -> None:
        """Start a host; its name may still be its last life's for a moment."""
        while True:
            self.hosts[name].launch(STANDIN_SECONDS="0.05")
            with contextlib.suppress(AssertionError):
                await self.hosts[name].listening()
                break
            assert self.hosts[name].process is not None
            await self.hosts[name].ended()
        async with self.hosts[name].patience("is ready", START):
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await self.hosts[name].service())["ready"]:
                        return
                await asyncio.sleep(0.05)


async def run(setting: Setting) -> Findings:
    """Start, hurt, and judge."""
    findings = Findings()
    findings.exactly("can be tried here", "yes" if binaries() is not None else "no PostgreSQL", "yes")
    if not findings.held:
        return findings
    async with _scene(setting, findings) as scene:
        await _hurt(scene)
        await _judge(scene)
    return findings


@contextlib.asynccontextmanager
async def _scene(setting: Setting, findings: Findings) -> AsyncIterator[Scene]:
    """All of it at work; nothing of it afterwards."""
    cluster = Cluster()
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        stack.callback(cluster.remove)
        await asyncio.to_thread(cluster.start)
        way = Way(cluster.folder / ".s.PGSQL.5432")
        await stack.enter_async_context(way.opened())
        chain = Chain(setting.folder, http, "--block-seconds", "1", "--stand-in-proofs")
        await chain.start()
        stack.push_async_callback(chain.kill)
        lease = setting.scale(10.0, 2.0)
        hosts = _hosts(setting, http, chain, way, lease)
        urls = [f"http://127.0.0.1:{port}" for port in _ports(hosts)]
        crowd = Crowd(chain, lambda: urls, setting.dice("wallets"))
        scene = Scene(setting, findings, chain, cluster, way, crowd, hosts, lease, setting.dice("hurts"))
        stack.push_async_callback(_end, scene)
        first, *others = hosts
        await scene.up(first)  # it makes the tables
        await asyncio.to_thread(_watch, cluster)
        await asyncio.gather(*map(scene.up, others))
        yield scene


def _hosts(setting: Setting, http: httpx.AsyncClient, chain: Chain, way: Way, lease: float) -> dict[str, Helper]:
    """Hosts by name, not started; the name begins with what one does."""
    keys = setting.folder / "keys"
    keys.touch(0o600)
    keys.write_text(token_hex(32))
    store = {
        "url": f"postgresql://tests@127.0.0.1:{way.port}/postgres?sslmode=disable&gssencmode=disable",
        "key_file": str(keys),
        "schema_name": SCHEMA,
        "lease_seconds": lease,
    }
    kinds = {"takes": ("api", setting.scale(2, 1)), "proves": ("prover", 2), "sends": ("sender", 2)}
    made = {}
    for kind, (role, number) in kinds.items():
        for one in range(number):
            name = f"{kind}-{one}"
            folder = setting.folder / name
            folder.mkdir()
            sections: dict[str, Any] = {
                "helper": {"role": role, "port": free_port(), "max_concurrent_proofs": 1},
                "store": {**store, "host": name},
                "sender": {"standby": True},
                "admin": {"disable": True},
            }
            made[name] = Helper(folder, http, chain, program=STAND_IN, **sections)
    return made


def _ports(hosts: dict[str, Helper]) -> list[int]:
    """Where wallets post."""
    found = []
    for name, host in hosts.items():
        if name.startswith("takes"):
            lines = host.config.read_text().splitlines()
            found += [int(line.removeprefix("port = ")) for line in lines if line.startswith("port = ")]
    return found


def _watch(cluster: Cluster) -> None:
    with psycopg.connect(cluster.address, autocommit=True) as conn:
        conn.execute(NOTED.encode())


async def _end(scene: Scene) -> None:
    if scene.looking is not None:
        scene.looking.close()
    for host in scene.hosts.values():
        if host.process is not None and host.process.poll() is None:
            host.process.send_signal(signal.SIGCONT)
            await host.kill()


# ---------------------------------------------------------------- what is done to them


async def _kill(scene: Scene, name: str) -> None:
    """End a host, and start it again: at once, or when what it did is done by another."""
    await scene.hosts[name].kill()
    if scene.setting.quick or scene.dice.random() < 0.5:
        await scene.taken_over(name)
    await scene.up(name)


async def _stop(scene: Scene, name: str) -> None:
    """Have a host sleep through its lease, and go on as if nothing was."""
    os.kill(scene.hosts[name].pid, signal.SIGSTOP)
    await scene.taken_over(name)
    if not name.startswith("sends"):
        await asyncio.sleep(scene.lease)
    os.kill(scene.hosts[name].pid, signal.SIGCONT)


async def _sender(scene: Scene, hurt: Callable[[Scene, str], Awaitable[None]]) -> None:
    """Do it to the host that sends."""
    while not (name := await scene.sender()):
        await asyncio.sleep(0.05)
    await hurt(scene, name)


async def _crash(scene: Scene) -> None:
    """The server ends as in a power failure, and starts."""
    if scene.looking is not None:
        scene.looking.close()
    await asyncio.to_thread(scene.cluster.stop, signal.SIGQUIT)
    await asyncio.to_thread(scene.cluster.start)
    await _goes_on(scene, "reveals are sent after the server's crash")


async def _cut(scene: Scene) -> None:
    """Every connection breaks within its next words."""
    scene.way.cut(scene.dice.randrange(1, 400))
    patience = time.monotonic() + 3  # one on which nothing is said stays
    while scene.way.cutting and time.monotonic() < patience:
        await asyncio.sleep(0.01)
    await _goes_on(scene, "reveals are sent after the cut")


async def _goes_on(scene: Scene, what: str) -> None:
    before = await scene.sends()

    async def more() -> bool:
        return await scene.sends() > before or not await scene.ask("SELECT count(*) FROM shares")

    await scene.until(what, more, RESUMED)


async def _hurt(scene: Scene) -> None:
    """Do it all, in any order, while votes are posted in step."""
    setting, dice = scene.setting, scene.dice
    round_id = await scene.chain.open_round()
    hurts = _hurts(scene)
    votes = await scene.crowd.vote(round_id, setting.scale(125, 6))
    due = setting.dice("times")
    begun = 0
    async with asyncio.TaskGroup() as group:

        def post(upto: int) -> None:
            nonlocal begun
            some: list[tuple[Ballot, int]] = votes[begun:upto]
            begun = upto
            group.create_task(
                scene.crowd.post(some, lambda: int(time.time() + due.uniform(0, AHEAD)) + 1, patience=START)
            )

        for number, (what, hurt) in enumerate(hurts):
            post(-(-len(votes) * (number + 1) // (len(hurts) + 1)))
            scene.findings.figure(what, int(scene.findings.figures.get(what, 0)) + 1)
            await asyncio.sleep(dice.uniform(0.2, 1.5))
            scene.way.deaf = number % 3 == 1
            await hurt()
        scene.way.deaf = True  # what is left comes without a word
        post(len(votes))


def _hurts(scene: Scene) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """What is done, and how it is called, in any order."""
    setting, dice, names = scene.setting, scene.dice, list(scene.hosts)

    kills = names * setting.scale(100 // len(names), 0) or ["takes-0", "proves-0"]
    stops = [name for name in names if not name.startswith("sends")] * setting.scale(3, 0) or ["proves-0"]
    found: list[tuple[str, Callable[[], Awaitable[None]]]] = []
    found += [(f"SIGKILL: {name.partition('-')[0]}", partial(_kill, scene, name)) for name in kills]
    found += [("SIGKILL: who sends", partial(_sender, scene, _kill))] * setting.scale(4, 1)
    found += [(f"SIGSTOP: {name.partition('-')[0]}", partial(_stop, scene, name)) for name in stops]
    found += [(STOPPED, partial(_sender, scene, _stop))] * setting.scale(12, 1)
    found += [("crashes of the server", partial(_crash, scene))] * setting.scale(5, 1)
    found += [("cuts of all connections", partial(_cut, scene))] * setting.scale(20, 1)
    dice.shuffle(found)
    return found


# ---------------------------------------------------------------- what came of it


async def _judge(scene: Scene) -> None:
    findings, ledger = scene.findings, scene.crowd.ledger
    await promise_check.drained(scene.chain, ledger, 90 + 0.1 * len(ledger.posted))
    await promise_check.judge(findings, scene.chain, ledger)
    findings.exactly("shares posted and not acknowledged", len(ledger.posted) - len(ledger.acknowledged), 0)
    findings.exactly("shares refused", len(scene.crowd.refused), 0)
    findings.at_least("words between hosts that were lost", scene.way.lost, 1)
    findings.exactly("sends noted without the lease", await _astray(scene), 0)
    findings.at_least("hosts that have sent", await scene.ask("SELECT count(DISTINCT host) FROM campaign.noted"), 2)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            while await scene.ask("SELECT count(*) FROM shares"):
                await asyncio.sleep(0.1)
    findings.exactly("shares left in the database", await scene.ask("SELECT count(*) FROM shares"), 0)
    findings.exactly("shares set aside", await scene.ask("SELECT count(*) FROM damaged"), 0)
    for host in scene.hosts.values():
        findings.exactly("exit status of a host", await host.stop(), 0)
    spent = sum(attempts(host.log)[0] for host in scene.hosts.values())
    findings.exactly("attempts spent", spent, 0)
    await _twice(scene)


async def _astray(scene: Scene) -> int:
    """Sends that were noted by a host that was not the sender at that moment."""
    return int(await scene.ask("SELECT count(*) FROM campaign.noted WHERE host IS DISTINCT FROM sender"))


async def _twice(scene: Scene) -> None:
    """A host that is stopped between its note and its first byte may send once more than another has, by share."""
    sent = await promise_check.broadcasts(scene.chain, scene.crowd.ledger)
    pairs = {(entry["nullifier"], entry["height"]) for entry in sent}
    stops = int(scene.findings.figures.get(STOPPED, 0))
    scene.findings.at_most("sends of a share at a height that had one", len(sent) - len(pairs), AT_ONCE * stops)


CAMPAIGN = Campaign("roles", run)
