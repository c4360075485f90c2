"""Concurrent access to the database: 64 wallets, operators, a backup, a second helper.

Method. 64 posters post continuously while shares are revealed and confirmed (and so erased: the WAL is truncated
repeatedly). Concurrently, operators' commands run one after another, both those that query the helper and those that
read the file (with the configuration of a helper whose control socket has no server). The control socket is queried,
backups run one after another, and a second helper is started on the file repeatedly.

With PostgreSQL all commands query the helper, `pg_dump` makes the backups, and the second helper uses the name of the
first. A file lock is checked before anything else; the name is checked in the database before the service is loaded,
with a grace of a second because the server detects late that a holder has exited. The limit is therefore 5 s.

Requirements. No response, command output or log line contains "locked" or reports a deadlock; only the second helper is
refused, immediately, with exit status 1. No response is a 5xx, no command fails, every backup is complete; and the
promises of every campaign hold.

Injected fault that it caught: the backup first made sure that there is no writer (`BEGIN IMMEDIATE` over a writable
connection, in helper/store/sqlite/snapshot.py). It printed ""locked" anywhere: 1 (= 0)" and "commands that failed: db
backup: 1 the database could not be used: database is locked".
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from devnet.ballot import SHARE_COUNT
from helper.observability.stats import percentile
from tests.campaign import promise_check
from tests.campaign.campaign import CampaignRun, Findings
from tests.campaign.process_lifecycle import DATABASE_LOCKED_TEXT
from tests.campaign.wallet_clients import WalletGroup
from tests.support.command import CommandResult, run_command
from tests.support.harness import HelperProcess
from tests.support.postgres import Cluster

MAX_REFUSED = {"sqlite": 3, "postgres": 5}
"""Seconds within which a second helper is refused, by store."""
POSTER_COUNT = 64
NOT_FOUND_EXIT_CODE = 5
CONTENTION_ERRORS = ("locked", "busy", "deadlock", "could not serialize")
BACKUP_ENV = {"SVOTE_HELPER_BACKUP_PASSPHRASE": "correct horse battery staple"}


@dataclass
class Observations:
    """Responses and outputs of all clients.

    Attributes:
        texts: all outputs and responses except those of the second helper.
        failed: commands whose exit status was not 0.
        runs: how often each kind of command ran.
        second_instance: results of the second helpers.
    """

    texts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    runs: Counter[str] = field(default_factory=Counter)
    second_instance: list[CommandResult] = field(default_factory=list)

    def record_command(self, name: str, result: CommandResult) -> None:
        self.runs[name] += 1
        self.texts += [result.stdout, result.stderr]
        if result.exit_code != 0:
            self.failed.append(f"{name}: {result.exit_code} {result.stderr.strip()}")


async def run(setting: CampaignRun) -> Findings:
    findings, observations = Findings(), Observations()
    async with setting.run_helper() as (chain, helper):
        wallets = WalletGroup(chain, lambda: [helper.url], setting.seeded_random("crowd"))
        round_id = await chain.open_round()
        votes = await wallets.cast_votes(round_id, setting.scale(300, 24))
        await helper.wait_for_leaf(round_id, max(position for _, position in votes))
        rng, start, seconds = setting.seeded_random("times"), time.time(), setting.scale(60, 8)
        pause = seconds * POSTER_COUNT / (len(votes) * SHARE_COUNT)
        end = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for other in _start_other_clients(setting, helper, observations):
                group.create_task(_repeat_until(end, other))
            group.create_task(
                wallets.post_shares(
                    votes, lambda: int(start + rng.uniform(0, 1.2 * seconds)), posters=POSTER_COUNT, pause_seconds=pause
                )
            )
        await promise_check.wait_until_drained(chain, wallets.ledger, setting.scale(180, 60))
        _check_results(
            findings, helper, observations, wallets, MAX_REFUSED["sqlite" if setting.cluster is None else "postgres"]
        )
        await promise_check.check_promises(findings, chain, wallets.ledger)
        await promise_check.check_no_share_charged(findings, helper)
    return findings


async def _repeat_until(end: float, operation: Callable[[], Awaitable[None]]) -> None:
    """Repeat an operation until a time, at least once."""
    await operation()
    while time.monotonic() < end:
        await operation()


def _start_other_clients(
    setting: CampaignRun, helper: HelperProcess, observations: Observations
) -> list[Callable[[], Awaitable[None]]]:
    file_config = setting.directory / "alone.toml"
    file_config.write_text(f'{helper.config.read_text()}\n[operator]\nsocket = "{setting.directory}/unserved.sock"\n')

    async def run_repeatedly(config: Path, source: str) -> None:
        listed = await run_command("queue", "list", "--config", str(config), "--json")
        observations.record_command(f"queue list ({source})", listed)
        if listed.exit_code == 0 and (shares := listed.json()["shares"]):
            show_result = await run_command("queue", "show", shares[-1]["ref"], "--config", str(config), "--json")
            # the share may have been confirmed in the meantime
            observations.record_command(
                f"queue show ({source})",
                replace(show_result, exit_code=0) if show_result.exit_code == NOT_FOUND_EXIT_CODE else show_result,
            )
        observations.record_command(
            f"queue stats ({source})", await run_command("queue", "stats", "--config", str(config), "--json")
        )

    async def run_operator() -> None:
        await run_repeatedly(helper.config, "daemon")
        if setting.cluster is None:
            await run_repeatedly(file_config, "file")

    async def query_socket() -> None:
        response = await helper.operator_get("/stats")
        observations.runs["control socket"] += 1
        observations.texts.append(str(response["service"]["paused"]))
        await helper.operator_get("/queue")
        await asyncio.sleep(0.05)

    async def run_backups() -> None:
        output = setting.directory / "backup.age"
        arguments = ("db", "backup", "--config", str(helper.config), "--output", str(output), "--force", "--json")
        observations.record_command("db backup", await run_command(*arguments, env=BACKUP_ENV))
        observations.record_command(
            "db check", await run_command("db", "check", "--config", str(helper.config), "--json")
        )

    async def run_dumps() -> None:
        assert setting.cluster is not None
        observations.record_command("pg_dump", await asyncio.to_thread(_run_pg_dump, setting.cluster))

    async def start_second_instance() -> None:
        observations.second_instance.append(
            await run_command("serve", "--config", str(file_config), "--port", "0", timed_externally=True)
        )
        await asyncio.sleep(1)

    return [run_operator, query_socket, run_backups if setting.cluster is None else run_dumps, start_second_instance]


def _run_pg_dump(cluster: Cluster) -> CommandResult:
    """Make a backup with PostgreSQL's own tool and return its result."""
    started_at = time.monotonic()
    completed = cluster.run("pg_dump", cluster.url)
    complete = b"database dump complete" in completed.stdout[-200:]
    errors = completed.stderr.decode(errors="replace")
    return CommandResult(completed.returncode or int(not complete), "", errors, time.monotonic() - started_at)


def _check_results(
    findings: Findings, helper: HelperProcess, observations: Observations, wallets: WalletGroup, refused_in: float
) -> None:
    for name, runs in observations.runs.items():
        findings.record_figure(f"{name}, number of runs", runs)
        findings.require_at_least(f"{name}, runs", runs, 1)
    findings.record_figure("POST p99, ms", 1000 * (percentile(wallets.ledger.response_seconds, 0.99) or 0))
    texts = [*observations.texts, *(text for _, text in wallets.refused), helper.log.read_text(errors="replace")]
    findings.require_equal('"locked" anywhere', sum(error in text for text in texts for error in CONTENTION_ERRORS), 0)
    findings.require_none("commands that failed", observations.failed)
    findings.require_equal(
        "POSTs answered 5xx", sum(wallets.status_counts[code] for code in wallets.status_counts if code >= 500), 0
    )
    findings.require_equal("POSTs refused", len(wallets.refused), 0)
    refused = [
        result
        for result in observations.second_instance
        if result.exit_code == 1 and _reports_other_instance(result.stderr)
    ]
    findings.require_at_least("second helpers started", len(observations.second_instance), 1)
    findings.require_equal("of them not refused", len(observations.second_instance) - len(refused), 0)
    findings.require_at_most(
        "seconds to refuse a second helper, slowest",
        max(result.seconds for result in observations.second_instance),
        refused_in,
    )


def _reports_other_instance(stderr: str) -> bool:
    return "another helper" in stderr or DATABASE_LOCKED_TEXT in stderr
