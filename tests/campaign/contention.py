"""Everyone at the database at once: 64 wallets, operators' commands, the control socket, a backup, a second daemon.

How it hurts. 64 posters post all the time, while shares are revealed and confirmed (and so erased: the WAL is truncated
again and again). Beside them operators' commands run one after the other, both those that ask the daemon and those that
read the file (with the settings of a helper whose control socket nobody serves); the control socket is asked; one
backup follows the other; and a second daemon is started on the file, again and again.

With PostgreSQL all commands ask the daemon, `pg_dump` makes the backups, and the second daemon has the name of the
first. That is asked of the database before the service is loaded, and it is given a second, as the server notices a bit
late that a holder has died; a file's lock is asked for before anything else at all. Within 5 s, then.

What must hold. Nobody is ever told "locked", or of a deadlock: not in an answer, not in a command's output, not in the
log; only the second daemon is, at once, with exit status 1. No answer is a 5xx, no command fails, every backup is
whole; and what every campaign promises.

The planted bug that it caught: the backup made sure first that nobody writes (`BEGIN IMMEDIATE` over a connection that
may write, in helper/store/sqlite/snapshot.py). It printed ""locked" anywhere: 1 (= 0)" and "commands that failed: db
backup: 1 the database could not be used: database is locked".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.campaign import Campaign, Findings, Setting
from tests.campaign.process_lifecycle import HELD
from tests.campaign.wallet_clients import Crowd
from tests.support.command import Ran, command
from tests.support.harness import STAND_IN, Helper, running
from tests.support.postgres import Cluster

REFUSED = {"sqlite": 1, "postgres": 5}
"""Seconds in which a second daemon is refused."""
POSTERS = 64
VOTE = 16
NOT_FOUND = 5
IN_THE_WAY = ("locked", "busy", "deadlock", "could not serialize")
ENV = {"SVOTE_HELPER_BACKUP_PASSPHRASE": "correct horse battery staple"}


@dataclass
class Seen:
    """What everyone was told.

    Attributes:
        texts: whatever was written or answered by anyone but the second daemon.
        failed: commands that did not end with 0.
        runs: how often each kind of command ran.
        second: the second daemons.
    """

    texts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)
    second: list[Ran] = field(default_factory=list)

    def ran(self, name: str, ran: Ran) -> None:
        self.runs[name] += 1
        self.texts += [ran.out, ran.err]
        if ran.code != 0:
            self.failed.append(f"{name}: {ran.code} {ran.err.strip()}")


async def run(setting: Setting) -> Findings:
    """Let everyone loose for a while, and judge."""
    findings, seen = Findings(), Seen()
    place = setting.cluster
    async with running(setting.folder, "--stand-in-proofs", program=STAND_IN, cluster=place) as (chain, helper):
        crowd = Crowd(chain, lambda: [helper.url], setting.dice("crowd"))
        round_id = await chain.open_round()
        votes = await crowd.vote(round_id, setting.scale(300, 24))
        await helper.knows_leaf(round_id, max(position for _, position in votes))
        dice, begin, seconds = setting.dice("times"), time.time(), setting.scale(60, 8)
        pause = seconds * POSTERS / (len(votes) * VOTE)
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for other in _others(setting, helper, seen):
                group.create_task(_until(end, other))
            group.create_task(
                crowd.post(votes, lambda: int(begin + dice.uniform(0, 1.2 * seconds)), posters=POSTERS, pause=pause)
            )
        await promise_check.drained(chain, crowd.ledger, setting.scale(180, 60))
        _judge(findings, helper, seen, crowd, REFUSED["sqlite" if setting.cluster is None else "postgres"])
        await promise_check.judge(findings, chain, crowd.ledger)
        await promise_check.unharmed(findings, helper)
    return findings


async def _until(end: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do it again and again, at least once."""
    await work()
    while time.monotonic() < end:
        await work()


def _others(setting: Setting, helper: Helper, seen: Seen) -> list[Callable[[], Awaitable[None]]]:
    """Everyone but the wallets."""
    alone = setting.folder / "alone.toml"
    alone.write_text(f'{helper.config.read_text()}\n[operator]\nsocket = "{setting.folder}/nobody.sock"\n')

    async def ask(config: Path, source: str) -> None:
        listed = await command("queue", "list", "--config", str(config), "--json")
        seen.ran(f"queue list ({source})", listed)
        if listed.code == 0 and (shares := listed.json()["shares"]):
            shown = await command("queue", "show", shares[-1]["ref"], "--config", str(config), "--json")
            # it may have been confirmed since
            seen.ran(f"queue show ({source})", replace(shown, code=0) if shown.code == NOT_FOUND else shown)
        seen.ran(f"queue stats ({source})", await command("queue", "stats", "--config", str(config), "--json"))

    async def operator() -> None:
        await ask(helper.config, "daemon")
        if setting.cluster is None:
            await ask(alone, "file")

    async def socket() -> None:
        answer = await helper.operator("/stats")
        seen.runs["control socket"] += 1
        seen.texts.append(str(answer["service"]["paused"]))
        await helper.operator("/queue")
        await asyncio.sleep(0.05)

    async def backup() -> None:
        output = setting.folder / "backup.age"
        arguments = ("db", "backup", "--config", str(helper.config), "--output", str(output), "--json")
        seen.ran("db backup", await command(*arguments, env=ENV))
        seen.ran("db check", await command("db", "check", "--config", str(helper.config), "--json"))

    async def dump() -> None:
        assert setting.cluster is not None
        seen.ran("pg_dump", await asyncio.to_thread(_dump, setting.cluster))

    async def second() -> None:
        seen.second.append(await command("serve", "--config", str(alone), "--port", "0", apart=True))
        await asyncio.sleep(1)

    return [operator, socket, backup if setting.cluster is None else dump, second]


def _dump(cluster: Cluster) -> Ran:
    """A backup as PostgreSQL makes it, to its end."""
    began = time.monotonic()
    ended = cluster.run("pg_dump", cluster.address)
    whole = b"database dump complete" in ended.stdout[-200:]
    said = ended.stderr.decode(errors="replace")
    return Ran(ended.returncode or int(not whole), "", said, time.monotonic() - began)


def _judge(findings: Findings, helper: Helper, seen: Seen, crowd: Crowd, refused_in: float) -> None:
    for name, runs in seen.runs.items():
        findings.figure(f"{name}, times", runs)
        findings.at_least(f"{name} came to its turn", runs, 1)
    findings.figure("POST p99, ms", 1000 * (percentile(crowd.ledger.waits, 0.99) or 0))
    said = [*seen.texts, *(text for _, text in crowd.refused), helper.log.read_text(errors="replace")]
    findings.exactly('"locked" anywhere', sum(word in text for text in said for word in IN_THE_WAY), 0)
    findings.exactly("commands that failed", "; ".join(seen.failed) or "none", "none")
    findings.exactly("POSTs answered 5xx", sum(crowd.answers[code] for code in crowd.answers if code >= 500), 0)
    findings.exactly("POSTs refused", len(crowd.refused), 0)
    refused = [ran for ran in seen.second if ran.code == 1 and _names_another(ran.err)]
    findings.at_least("second daemons started", len(seen.second), 1)
    findings.exactly("of them not refused", len(seen.second) - len(refused), 0)
    findings.at_most("seconds to refuse a second daemon, at most", max(ran.seconds for ran in seen.second), refused_in)


def _names_another(told: str) -> bool:
    return "another daemon" in told or HELD in told


CAMPAIGN = Campaign("contention", run)
