"""Runs all checks concurrently, each with its own time limit.

Calls that may hang in the kernel (a dead disk, a stuck helper) run in daemon threads that are not joined, so a report
is ready within `LONGEST` seconds in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from helper.app.listeners import BUILT_PAGE
from helper.clock import Clock
from helper.config import Config
from helper.doctor import (
    backlog,
    chain,
    circuit,
    database,
    disk,
    files,
    page,
    ports,
    process,
    proving,
    publication,
    tokens,
)
from helper.doctor import daemon as daemons
from helper.doctor.backlog import Waiting
from helper.doctor.daemon import Daemon
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.doctor.settings import Settings, read_settings
from helper.observability.log_config import describe
from helper.runtime.hardening import harden_process, process_facts
from helper.server.connection_limits import ConnectionLimits
from helper.server.http_server import SPARE_FILES
from helper.store import sqlite_version

T = TypeVar("T")
AsyncCheck = Callable[[], Awaitable[list[CheckResult]]]

LONGEST: Final = 15.0
"""Time limit in seconds for all checks together."""
_DAEMON: Final = 4.0
_NODES: Final = 9.0
_FILES: Final = 6.0
_MARGIN: Final = 1.0
MOUNTS: Final = Path("/proc/mounts")


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all checks.

    Attributes:
        findings: results in display order.
        seconds: duration of all checks.
        has_hung_checks: whether a check still hangs; the process must exit without joining its threads.
    """

    findings: tuple[CheckResult, ...]
    seconds: float
    has_hung_checks: bool


async def examine(explicit: Path | None, env: Mapping[str, str], clock: Clock, *, skip_proof: bool = False) -> Report:
    """Run all checks.

    Args:
        explicit: settings file given on the command line.
        env: the environment.
        clock: source of the time.
        skip_proof: skip the self-test proof.
    """
    doctor = _Doctor(read_settings(explicit, env), clock, skip_proof=skip_proof)
    findings = await doctor.all()
    return Report(tuple(findings), clock.monotonic() - doctor.began, doctor.has_hung_checks)


class _Doctor:
    """One run of all checks. Later checks use results of earlier ones."""

    def __init__(self, settings: Settings, clock: Clock, *, skip_proof: bool) -> None:
        self.settings = settings
        self.config: Config = settings.config
        self.clock = clock
        self.skip_proof = skip_proof
        self.began = clock.monotonic()
        self.has_hung_checks = False
        self.daemon = Daemon(running=False)
        self.file_report = database.DatabaseReport(ok("database", ""))
        self.judged = chain.Judged([])
        self.proved: proving.Proved | None = None

    async def all(self) -> list[CheckResult]:
        """Run all checks and return their results in display order."""
        helper = await self._guarded("helper", self._helper, _DAEMON)
        checks: list[tuple[str, AsyncCheck, float]] = [
            ("sqlite", _run_inline(lambda: [database.judge_sqlite(sqlite_version())]), _FILES),
            ("database", self._database, _FILES),
            ("integrity", self._integrity, _FILES),
            ("file modes", self._run_in_thread(self._modes), _FILES),
            ("fsync", self._run_in_thread(self._disk), _FILES),
            ("nodes", self._nodes, _NODES),
            ("prover", self._prover, LONGEST),
            ("tokens", _run_inline(self._tokens), _FILES),
            ("process", self._run_in_thread(self._process), _FILES),
            ("address", self._run_in_thread(self._addresses), _FILES),
            ("page", self._run_in_thread(self._page), _FILES),
            (publication.SUBJECT, _run_inline(lambda: [publication.judge_publication(self.config)]), _FILES),
        ]
        results = await asyncio.gather(*(self._guarded(*check) for check in checks))
        for subject, check in (("circuit", self._circuit), ("backlog", self._backlog)):
            results.append(await self._guarded(subject, _run_inline(check), _FILES))
        return [*self.settings.findings, *helper, *(finding for part in results for finding in part)]

    # ---------------------------------------------------------------- execution

    async def _guarded(self, subject: str, check: AsyncCheck, seconds: float) -> list[CheckResult]:
        """Run a check within its time limit. A timeout or an exception becomes a failure result."""
        left = min(seconds, self._left())
        try:
            async with asyncio.timeout(left):
                return await check()
        except TimeoutError:
            self.has_hung_checks = True
            advice = "A call hangs: check the disk and the load of this machine."
            return [fail(subject, f"check timed out after {left:.0f} s", advice)]
        except Exception as error:
            return [fail(subject, f"internal error in this check: {describe(error)}", "Report this message as a bug.")]

    async def _threaded(self, check: Callable[[], T]) -> T:
        """Run a blocking call in a daemon thread that is not joined at exit."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def complete(end: Callable[[], None]) -> None:
            if not done.done():
                end()

        def run() -> None:
            try:
                end = partial(done.set_result, check())
            except Exception as error:
                end = partial(done.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(complete, end)

        threading.Thread(target=run, daemon=True).start()
        return await done

    def _run_in_thread(self, check: Callable[[], list[CheckResult]]) -> AsyncCheck:
        """Make an asynchronous check of a blocking one."""
        return lambda: self._threaded(check)

    def _left(self) -> float:
        return max(0.1, LONGEST - _MARGIN - (self.clock.monotonic() - self.began))

    # ---------------------------------------------------------------- the checks

    async def _helper(self) -> list[CheckResult]:
        self.daemon = await self._threaded(lambda: daemons.ask_daemon(self.config.socket_path))
        results = daemons.judge_daemon(self.daemon, self.config.socket_path)
        return [*results, *daemons.judge_sender(self.daemon), *daemons.judge_archive(self.daemon)]

    async def _database(self) -> list[CheckResult]:
        if self.config.store.url:
            return [database.judge_shared(running=self.daemon.running)]
        path, now = self.config.db_path, self.clock.now()
        if not path.exists():
            return [database.judge_absent(path, running=self.daemon.running)]
        self.file_report = await self._threaded(lambda: asyncio.run(database.read_file(path, now=now)))
        failed, damaged = database.failed_shares(self.file_report.outlook), len(self.file_report.damaged)
        if self.daemon.failed is not None:
            failed, damaged = self.daemon.failed, self.daemon.damaged
        return [self.file_report.finding, *daemons.judge_failures(failed, damaged)]

    async def _integrity(self) -> list[CheckResult]:
        path = self.config.db_path
        if self.config.store.url or self.daemon.running or not path.exists() or not path.stat().st_size:
            return []  # the helper checks its file itself and reports damage
        return [await self._threaded(lambda: database.look_at_whole(path, self.clock))]

    def _modes(self) -> list[CheckResult]:
        config = self.config
        databases = [] if config.store.url else [config.db_path]
        databases += [] if config.admin.disable else [config.admin_db_path]
        secrets = [config.socket_path]
        named = (
            config.helper.api_token_file,
            config.operator.token_file,
            config.store.url_file,
            config.store.key_file,
            config.s3.credentials_file,
        )
        secrets += [Path(path) for path in named if path]
        if self.settings.path is not None and self.settings.holds_secrets:
            secrets.append(self.settings.path)
        return files.look_at_modes(databases, secrets)

    def _disk(self) -> list[CheckResult]:
        folder = self.config.db_path.resolve().parent
        try:
            measured = disk.measure(folder, self.clock)
        except OSError as error:
            advice = f"Create it with write access for the helper's user: `install -d -m 700 {folder}`."
            return [fail("disk space", f"cannot access {folder}: {error.strerror}", advice)]
        return disk.judge_disk(folder, measured, disk.file_system(folder, process.read_text(MOUNTS) or ""))

    async def _nodes(self) -> list[CheckResult]:
        if not self.settings.readable:
            return [warn("nodes", "not checked: the settings cannot be read", "Fix the settings first.")]
        nodes = await chain.query_nodes(self.config.chain_nodes, self.clock)
        limits, now = self.config.chain, self.clock.now()
        expected = chain.Expected(
            chain_id=limits.chain_id or self.daemon.service.chain_id,
            now=now,
            stale_after=limits.stale_seconds,
            clock_skew=limits.clock_skew_seconds,
        )
        self.judged = chain.judge_nodes(nodes, expected)
        clock = chain.judge_clock(self.judged.same_chain, now, limit=limits.clock_skew_seconds)
        return [*self.judged.findings, clock]

    async def _prover(self) -> list[CheckResult]:
        measured = proving.judge_measured(self.daemon.service)
        results = [] if measured is None else [measured]
        if self.skip_proof:
            return results or [ok("prover", "skipped (--skip-proof)")]
        name, slots = self._circuit_name(), self.config.proof_slots
        self.proved = await proving.prove_once(
            name, nice=self.config.prover.nice, clock=self.clock, patience=self._left() - 2 * _MARGIN
        )
        return [*results, proving.judge_proof(self.proved, name, slots)]

    def _tokens(self) -> list[CheckResult]:
        return tokens.judge_tokens(self.config.helper.api_token, self.config.operator.token)

    def _process(self) -> list[CheckResult]:
        reported = self.daemon.service.process
        if reported is None:
            harden_process()  # as the service does
        facts = reported or process_facts()
        slots = self.config.proof_slots
        needed = ConnectionLimits().connections + SPARE_FILES
        available = process.available_memory(process.read_text(process.MEMORY) or "")
        return [
            process.judge_cores(
                facts,
                process.read_text(process.CORE_PATTERN),
                whose="the helper" if reported else "a process of this user",
            ),
            process.judge_open_files(facts["open_files"], needed, raised=reported is not None),
            process.judge_memory(available, slots, running=reported is not None),
        ]

    def _addresses(self) -> list[CheckResult]:
        config = self.config
        if self.daemon.running:
            return []
        results = [ports.look_at_address("the wallet API", config.helper.host, config.helper.port, "[helper]")]
        if config.metrics.enable:
            results.append(ports.look_at_address("metrics", config.metrics.host, config.metrics.port, "[metrics]"))
        return results

    def _page(self) -> list[CheckResult]:
        ui = self.config.ui
        folder = Path(ui.dist_path) if ui.dist_path else BUILT_PAGE
        return [page.look_at_page(folder, enabled=ui.enable)]

    # ---------------------------------------------------------------- checks that use results of others

    def _circuit_name(self) -> str:
        setting = self.config.prover.circuit
        return self.daemon.service.circuit or ("k10" if setting == "auto" else setting)

    def _circuit(self) -> list[CheckResult]:
        if not self.judged.good:
            return []
        versions = [node.version for node in self.judged.good]
        return [circuit.judge_circuit(self.config.prover.circuit, self.daemon.service.circuit, versions)]

    def _backlog(self) -> list[CheckResult]:
        waiting: Sequence[Waiting] | None = self.daemon.waiting
        if waiting is None:
            waiting = database.waiting_of(self.file_report.outlook)
        blocks = [node.block_seconds for node in self.judged.good if node.block_seconds]
        rate = backlog.ProofRate(self._seconds_per_proof(), self.config.proof_slots)
        if blocks:
            rate = replace(rate, block_seconds=max(blocks))
        return backlog.judge_backlog(waiting, rate, self.clock.now())

    def _seconds_per_proof(self) -> float | None:
        """Median of the helper's proofs, else our self-test, else the helper's self-test."""
        service = self.daemon.service
        if service.p50_ms is not None:
            return service.p50_ms / 1000
        if self.proved is not None and self.proved.seconds is not None:
            return self.proved.seconds
        return service.self_test_seconds


def _run_inline(check: Callable[[], list[CheckResult]]) -> AsyncCheck:
    """Make an asynchronous check of one that does not block."""

    async def now() -> list[CheckResult]:
        return check()

    return now
