"""All checks: side by side, each within its own time, and none able to end the others.

What may hang in the kernel (a dead disk, a stuck daemon) is done in threads that nobody waits for: the doctor answers
within `LONGEST` seconds whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping
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
from helper.doctor.daemon import Daemon
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.doctor.settings import Settings, read_settings
from helper.observability.log_config import describe
from helper.runtime.hardening import harden_process, process_facts
from helper.server.connection import ConnectionLimits
from helper.server.http_server import SPARE_FILES
from helper.store import sqlite_version

T = TypeVar("T")
Look = Callable[[], Awaitable[list[CheckResult]]]

LONGEST: Final = 15.0
"""Seconds within which all of it ends."""
_DAEMON: Final = 4.0
_NODES: Final = 9.0
_FILES: Final = 6.0
_MARGIN: Final = 1.0
MOUNTS: Final = Path("/proc/mounts")


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Attributes:
        findings: a line each, in the order in which they are read.
        seconds: how long it took.
        has_hung_checks: whether something still hangs: the process must not wait for its threads.
    """

    findings: tuple[CheckResult, ...]
    seconds: float
    has_hung_checks: bool


async def examine(explicit: Path | None, env: Mapping[str, str], clock: Clock, *, skip_proof: bool = False) -> Report:
    """Look at everything.

    Args:
        explicit: the settings file that was named, if one was.
        env: the environment.
        clock: the time.
        skip_proof: leave the self-test proof out.
    """
    doctor = _Doctor(read_settings(explicit, env), clock, skip_proof=skip_proof)
    findings = await doctor.all()
    return Report(tuple(findings), clock.monotonic() - doctor.began, doctor.has_hung_checks)


class _Doctor:
    """One examination: what one check learns, others go by."""

    def __init__(self, settings: Settings, clock: Clock, *, skip_proof: bool) -> None:
        self.settings = settings
        self.config: Config = settings.config
        self.clock = clock
        self.skip_proof = skip_proof
        self.began = clock.monotonic()
        self.has_hung_checks = False
        self.daemon = Daemon(running=False)
        self.told = database.DatabaseReport(ok("database", ""))
        self.judged = chain.Judged([])
        self.proved: proving.Proved | None = None

    async def all(self) -> list[CheckResult]:
        """Every line."""
        helper = await self._guarded("helper", self._helper, _DAEMON)
        checks: list[tuple[str, Look, float]] = [
            ("sqlite", _quickly(lambda: [database.judge_sqlite(sqlite_version())]), _FILES),
            ("database", self._database, _FILES),
            ("integrity", self._integrity, _FILES),
            ("file modes", self._apart(self._modes), _FILES),
            ("fsync", self._apart(self._disk), _FILES),
            ("nodes", self._nodes, _NODES),
            ("prover", self._prover, LONGEST),
            ("tokens", _quickly(self._tokens), _FILES),
            ("process", self._apart(self._process), _FILES),
            ("address", self._apart(self._addresses), _FILES),
            ("page", self._apart(self._page), _FILES),
            (publication.SUBJECT, _quickly(lambda: [publication.judge_publication(self.config)]), _FILES),
        ]
        found = await asyncio.gather(*(self._guarded(*check) for check in checks))
        for subject, look in (("circuit", self._circuit), ("backlog", self._backlog)):
            found.append(await self._guarded(subject, _quickly(look), _FILES))
        return [*self.settings.findings, *helper, *(finding for part in found for finding in part)]

    # ---------------------------------------------------------------- running them

    async def _guarded(self, subject: str, look: Look, seconds: float) -> list[CheckResult]:
        """What a check found; that it did not end in time, or failed itself, is a finding too."""
        left = min(seconds, self._left())
        try:
            async with asyncio.timeout(left):
                return await look()
        except TimeoutError:
            self.has_hung_checks = True
            advice = "Something hangs: look at the disk and at this machine's load."
            return [fail(subject, f"nothing could be found out within {left:.0f} s", advice)]
        except Exception as error:
            return [fail(subject, f"the check itself failed: {describe(error)}", "Report this with the line above.")]

    async def _threaded(self, look: Callable[[], T]) -> T:
        """Run what blocks in a thread that nothing waits for at the end."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(end: Callable[[], None]) -> None:
            if not done.done():
                end()

        def run() -> None:
            try:
                end = partial(done.set_result, look())
            except Exception as error:
                end = partial(done.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the doctor has left
                loop.call_soon_threadsafe(tell, end)

        threading.Thread(target=run, daemon=True).start()
        return await done

    def _apart(self, look: Callable[[], list[CheckResult]]) -> Look:
        """A check that blocks, as one that is waited for."""
        return lambda: self._threaded(look)

    def _left(self) -> float:
        return max(0.1, LONGEST - _MARGIN - (self.clock.monotonic() - self.began))

    # ---------------------------------------------------------------- the checks

    async def _helper(self) -> list[CheckResult]:
        self.daemon = await self._threaded(lambda: daemons.ask_daemon(self.config.socket_path))
        found = daemons.judge_daemon(self.daemon, self.config.socket_path)
        return [*found, *daemons.judge_sender(self.daemon), *daemons.judge_archive(self.daemon)]

    async def _database(self) -> list[CheckResult]:
        if self.config.store.url:
            return [database.judge_shared(running=self.daemon.running)]
        path, now = self.config.db_path, self.clock.now()
        if not path.exists():
            return [database.judge_absent(path, running=self.daemon.running)]
        self.told = await self._threaded(lambda: asyncio.run(database.read_file(path, now=now)))
        counts, damaged = database.totals_of(self.told.outlook), list[object](self.told.damaged)
        if self.daemon.stats:
            counts, damaged = self.daemon.stats["total"], list(self.daemon.stats["damaged"])
        return [self.told.finding, *daemons.judge_failures(counts, damaged)]

    async def _integrity(self) -> list[CheckResult]:
        path = self.config.db_path
        if self.config.store.url or self.daemon.running or not path.exists() or not path.stat().st_size:
            return []  # a daemon looks through its file itself, and tells what it finds
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
        secrets += [Path(one) for one in named if one]
        if self.settings.path is not None and self.settings.holds_secrets:
            secrets.append(self.settings.path)
        return files.look_at_modes(databases, secrets)

    def _disk(self) -> list[CheckResult]:
        folder = self.config.db_path.resolve().parent
        try:
            measured = disk.measure(folder, self.clock)
        except OSError as error:
            advice = f"Make it, and let the helper's user write in it: `install -d -m 700 {folder}`."
            return [fail("disk space", f"{folder} cannot be looked at: {error.strerror}", advice)]
        return disk.judge_disk(folder, measured, disk.file_system(folder, process.read_text(MOUNTS) or ""))

    async def _nodes(self) -> list[CheckResult]:
        if not self.settings.readable:
            return [warn("nodes", "not asked: the settings that name them cannot be read", "Mend the settings first.")]
        looks = await chain.query_nodes(self.config.chain_nodes, self.clock)
        limits, now = self.config.chain, self.clock.now()
        expected = chain.Expected(
            chain_id=limits.chain_id or self.daemon.facts.get("chain_id"),
            now=now,
            stale_after=limits.stale_seconds,
            clock_skew=limits.clock_skew_seconds,
        )
        self.judged = chain.judge_nodes(looks, expected)
        clock = chain.judge_clock(self.judged.same_chain, now, limit=limits.clock_skew_seconds)
        return [*self.judged.findings, clock]

    async def _prover(self) -> list[CheckResult]:
        measured = proving.judge_measured(self.daemon.facts)
        found = [] if measured is None else [measured]
        if self.skip_proof:
            return found or [ok("prover", "not tried (--skip-proof)")]
        name, slots = self._circuit_name(), self.config.proof_slots
        self.proved = await proving.prove_once(
            name, nice=self.config.prover.nice, clock=self.clock, patience=self._left() - 2 * _MARGIN
        )
        return [*found, proving.judge_proof(self.proved, name, slots)]

    def _tokens(self) -> list[CheckResult]:
        return tokens.judge_tokens(self.config.helper.api_token, self.config.operator.token)

    def _process(self) -> list[CheckResult]:
        told = self.daemon.facts.get("process")
        if told is None:
            harden_process()  # as the service does
        facts = told or process_facts()
        slots = self.config.proof_slots
        needed = ConnectionLimits().connections + SPARE_FILES
        available = process.available_memory(process.read_text(process.MEMORY) or "")
        return [
            process.judge_cores(
                facts, process.read_text(process.CORE_PATTERN), whose="the helper" if told else "a process started here"
            ),
            process.judge_open_files(facts["open_files"], needed, raised=told is not None),
            process.judge_memory(available, slots, running=told is not None),
        ]

    def _addresses(self) -> list[CheckResult]:
        config = self.config
        if self.daemon.running:
            return []
        found = [ports.look_at_address("the wallets' API", config.helper.host, config.helper.port, "[helper]")]
        if config.metrics.enable:
            found.append(ports.look_at_address("metrics", config.metrics.host, config.metrics.port, "[metrics]"))
        return found

    def _page(self) -> list[CheckResult]:
        ui = self.config.ui
        folder = Path(ui.dist_path) if ui.dist_path else BUILT_PAGE
        return [page.look_at_page(folder, enabled=ui.enable)]

    # ---------------------------------------------------------------- what goes by what others found

    def _circuit_name(self) -> str:
        setting = self.config.prover.circuit
        return str(self.daemon.facts.get("circuit") or ("k10" if setting == "auto" else setting))

    def _circuit(self) -> list[CheckResult]:
        if not self.judged.good:
            return []
        versions = [look.version for look in self.judged.good]
        return [circuit.judge_circuit(self.config.prover.circuit, self.daemon.facts.get("circuit"), versions)]

    def _backlog(self) -> list[CheckResult]:
        told = self.daemon.overview
        waiting = daemons.waiting_of(told) if told else database.waiting_of(self.told.outlook)
        blocks = [look.block_seconds for look in self.judged.good if look.block_seconds]
        pace = backlog.ProofRate(self._seconds_per_proof(), self.config.proof_slots)
        if blocks:
            pace = replace(pace, block_seconds=max(blocks))
        return backlog.judge_backlog(waiting, pace, self.clock.now())

    def _seconds_per_proof(self) -> float | None:
        """By the daemon's own proofs, else its self-test, else ours."""
        facts = self.daemon.facts
        recent = (facts.get("proof") or {}).get("p50_ms")
        if recent is not None:
            return float(recent) / 1000
        if self.proved is not None and self.proved.seconds is not None:
            return self.proved.seconds
        at_start = (facts.get("provers") or {}).get("self_test_seconds")
        return None if at_start is None else float(at_start)


def _quickly(look: Callable[[], list[CheckResult]]) -> Look:
    """A check that neither waits nor blocks, as one that is waited for."""

    async def now() -> list[CheckResult]:
        return look()

    return now
