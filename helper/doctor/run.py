"""Runs all checks concurrently, each with its own time limit.

Calls that may hang in the kernel (a failed disk, a hung helper) run in threads that are abandoned then, so a report is
always ready within `MAX_TOTAL_SECONDS` seconds.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from admin.config_refresh import ConfigFetcher
from helper.circuits import default_circuit
from helper.clock import Clock
from helper.config.loader import load_valid_settings
from helper.config.sections import Config
from helper.config.settings_file import CREDENTIALS, FILE_CREDENTIALS, SECRET_SETTINGS, find_file, is_missing
from helper.doctor import CheckResult, chain, database, fail, machine, ok, proving, publication, running_helper, warn
from helper.doctor.running_helper import DaemonReport
from helper.errors import HelperError
from helper.observability.log_config import describe_exception
from helper.observability.queue_snapshot import QueueSnapshot, measured_rate
from helper.runtime.network_clients import create_async_client
from helper.runtime.process_security import get_process_limits, harden_process
from helper.runtime.release_files import check_native_module, read_release
from helper.server.listening import BACKLOG, NEEDED_FILE_DESCRIPTORS
from helper.store.factory import read_file_encryption
from proofs import native_module_path

T = TypeVar("T")
AsyncCheck = Callable[[], Awaitable[list[CheckResult]]]

MAX_TOTAL_SECONDS: Final = 15.0
"""Time limit in seconds for all checks together."""
_DAEMON_SECONDS: Final = 4.0
_NODES_SECONDS: Final = 9.0
_FILES_SECONDS: Final = 6.0
_MARGIN_SECONDS: Final = 1.0


async def _call_in_thread(call: Callable[[], T]) -> T:
    """Call in a daemon thread, as only such a one is not joined at exit."""
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(done)


def _in_thread(check: Callable[[], list[CheckResult]]) -> AsyncCheck:
    return lambda: _call_in_thread(check)


class Doctor:
    """One run of all checks. Later checks use results of earlier ones.

    Attributes:
        config: the settings; invalid values are replaced by defaults.
        path: the settings file, None if there is none.
        are_settings_readable: whether the file could be read; if not, `config` holds only defaults.
        has_secrets: whether the file itself contains a secret.
        has_hung_checks: whether a check still hangs; the process must exit without joining its threads.
    """

    def __init__(
        self, config_file: Path | None, env: Mapping[str, str], clock: Clock, *, skip_proof: bool = False
    ) -> None:
        self.path = path = find_file(config_file, env)
        loaded, problems = load_valid_settings(path, env)
        self.config: Config = loaded.config
        self.findings = publication.evaluate_settings(loaded, problems)
        self.are_settings_readable = all(problem.key or problem.source != str(path) for problem in problems)
        origins = [loaded.origins[setting] for setting in SECRET_SETTINGS]
        self.has_secrets = any(origin.kind == "file" and origin.source == str(path) for origin in origins)
        self.clock = clock
        self.skip_proof = skip_proof
        self.started_at = clock.monotonic()
        self.has_hung_checks = False
        self.daemon = DaemonReport(is_running=False)
        self.file_queue: QueueSnapshot | None = None
        self.usable_nodes: list[chain.NodeReport] = []
        self.self_test_seconds: float | None = None

    async def run_all(self) -> list[CheckResult]:
        """Return the results in display order."""
        config = self.config
        tokens = config.helper.api_token, config.operator.token
        helper = await self._run_guarded("helper", self._check_helper, _DAEMON_SECONDS)
        checks: list[tuple[str, AsyncCheck, float]] = [
            ("database", self._check_database, MAX_TOTAL_SECONDS if config.store.url else _FILES_SECONDS),
            ("integrity", self._check_integrity, _FILES_SECONDS),
            ("file modes", _in_thread(self._check_modes), _FILES_SECONDS),
            ("fsync", _in_thread(lambda: database.check_disk(config.db_path, self.clock)), _FILES_SECONDS),
            ("nodes", self._check_nodes, _NODES_SECONDS),
            ("prover", self._check_prover, MAX_TOTAL_SECONDS),
            ("release", _in_thread(self._check_release), _FILES_SECONDS),
            ("tokens", _in_thread(lambda: publication.evaluate_tokens(*tokens)), _FILES_SECONDS),
            ("process", _in_thread(self._check_process), _FILES_SECONDS),
            ("address", _in_thread(self._check_addresses), _FILES_SECONDS),
            ("onion service", self._check_onion_service, MAX_TOTAL_SECONDS),
            ("page", _in_thread(lambda: [publication.check_page(config)]), _FILES_SECONDS),
            ("published addresses", _in_thread(lambda: [publication.evaluate_publication(config)]), _FILES_SECONDS),
            ("voting config", self._check_voting_config, MAX_TOTAL_SECONDS),
            ("public URL", self._check_public_url, MAX_TOTAL_SECONDS),
        ]
        results = await asyncio.gather(*(self._run_guarded(*check) for check in checks))
        for subject, check in (("circuit", self._check_circuit), ("backlog", self._check_backlog)):
            results.append(await self._run_guarded(subject, _in_thread(check), _FILES_SECONDS))
        return [*self.findings, *helper, *(finding for part in results for finding in part)]

    # ---------------------------------------------------------------- execution

    async def _run_guarded(self, subject: str, check: AsyncCheck, seconds: float) -> list[CheckResult]:
        """Run a check within its time limit. A timeout or an exception becomes a failure result."""
        seconds_left = min(seconds, self._seconds_left())
        try:
            async with asyncio.timeout(seconds_left):
                return await check()
        except TimeoutError:
            self.has_hung_checks = True
            advice = "A call hangs: check the disk and the load of this machine."
            return [fail(subject, f"check timed out after {seconds_left:.0f} s", advice)]
        except HelperError as error:
            return [fail(subject, str(error), error.advice)]
        except Exception as error:
            return [
                fail(
                    subject,
                    f"internal error in this check: {describe_exception(error)}",
                    "Report this message as a bug.",
                )
            ]

    def _seconds_left(self) -> float:
        return max(0.1, MAX_TOTAL_SECONDS - _MARGIN_SECONDS - (self.clock.monotonic() - self.started_at))

    # ---------------------------------------------------------------- the checks

    async def _check_helper(self) -> list[CheckResult]:
        socket, shared = self.config.socket_path, bool(self.config.store.url)
        query = partial(running_helper.query_daemon, socket, shares_database=shared)
        self.daemon = daemon = await _call_in_thread(query)
        evaluations = (running_helper.evaluate_daemon, running_helper.evaluate_sender, running_helper.evaluate_archive)
        return [result for evaluate in evaluations for result in evaluate(daemon)]

    async def _check_database(self) -> list[CheckResult]:
        config, path = self.config, self.config.db_path
        now, running = self.clock.now(), self.daemon.is_running
        if config.store.url:
            check = partial(database.check_shared_database, config, now=now, running=running)
            finding = await _call_in_thread(check)
        elif is_missing(path):
            if not running:
                await _call_in_thread(partial(read_file_encryption, config.store.key_file))
            finding, self.file_queue = database.evaluate_missing_file(path, running=running), QueueSnapshot(at=now)
        else:
            read = partial(database.read_database, path, config.store.key_file, now=now)
            finding, self.file_queue = await _call_in_thread(lambda: asyncio.run(read()))
        queue = self._queue
        return [finding, *([] if queue is None else running_helper.evaluate_failures(queue))]

    async def _check_integrity(self) -> list[CheckResult]:
        path = self.config.db_path
        if self.config.store.url or self.daemon.is_running:
            return []  # the running helper checks the file and reports damage
        if not os.access(path, os.R_OK) or not path.stat().st_size:
            return []  # the check of the database reports it
        return [await _call_in_thread(lambda: database.check_integrity(path, self.clock))]

    def _check_modes(self) -> list[CheckResult]:
        config = self.config
        databases = [] if config.store.url else [config.db_path]
        databases += [] if config.admin.disable else [config.admin_db_path]
        sections = config.model_dump()
        named = [*(f"{setting}_file" for setting in CREDENTIALS), *FILE_CREDENTIALS]
        files = [sections[section][key] for section, key in (setting.split(".") for setting in named)]
        secrets = [config.socket_path, *(Path(path) for path in files if path)]
        if self.path is not None and self.has_secrets:
            secrets.append(self.path)
        return machine.check_modes(databases, secrets)

    async def _check_nodes(self) -> list[CheckResult]:
        if not self.are_settings_readable:
            return [warn("nodes", "not checked: the settings cannot be read", "Fix the settings first.")]
        chain_id = self.daemon.service.chain_id
        findings, self.usable_nodes = await chain.check_nodes(self.config, self.clock, chain_id)
        return findings

    async def _check_prover(self) -> list[CheckResult]:
        if self.skip_proof:
            return [ok("prover", "skipped (--skip-proof)")]
        name, slots = self._circuit_name(), self.config.proof_slots
        timeout = self._seconds_left() - 2 * _MARGIN_SECONDS
        tested = await proving.check_proof(name, slots, nice=self.config.prover.nice, clock=self.clock, timeout=timeout)
        self.self_test_seconds = tested.facts["seconds"]
        return [tested]

    def _check_release(self) -> list[CheckResult]:
        prover = self.config.prover
        if not prover.require_verified:
            return []
        release = read_release(Path(prover.release_manifest), Path(prover.allowed_signers))
        check_native_module(release, native_module_path())
        return [ok("release", f"the native module is that of {release.version}, signed by {release.signer}")]

    async def _check_voting_config(self) -> list[CheckResult]:
        settings = self.config.admin
        if settings.disable or not settings.config_url or not self.are_settings_readable:
            return []
        fetcher = ConfigFetcher(settings.config_url, timeout=publication.DOCUMENT_SECONDS)
        return await publication.check_voting_config(
            fetcher, settings.public_url, lambda: chain.query_authority_keys(self.config.chain_endpoints)
        )

    async def _check_public_url(self) -> list[CheckResult]:
        config = self.config
        url = config.admin.public_url
        if not url or not self.are_settings_readable:
            return []
        chain_id = config.chain.chain_id or self.daemon.service.chain_id or ""
        async with create_async_client(timeout=publication.PUBLIC_URL_SECONDS) as client:
            return await publication.check_public_url(client, url, chain_id=chain_id, has_gateway=config.gateway.enable)

    def _check_process(self) -> list[CheckResult]:
        reported = self.daemon.service.process
        if reported is None:
            harden_process()  # as the service does
        facts = reported or get_process_limits()
        slots = self.config.proof_slots
        kilobytes = machine.read_number(machine.MEMORY_INFO, "MemAvailable:")
        available = None if kilobytes is None else kilobytes * 1024
        return [
            machine.evaluate_cores(
                facts,
                machine.read_text(machine.CORE_PATTERN),
                process_name="the helper" if reported else "a process of this user",
            ),
            machine.evaluate_open_files(facts.open_files, NEEDED_FILE_DESCRIPTORS, raised=reported is not None),
            machine.evaluate_accept_queue(machine.read_number(machine.ACCEPT_QUEUE_LIMIT), BACKLOG),
            machine.evaluate_memory(available, slots, running=reported is not None),
        ]

    def _check_addresses(self) -> list[CheckResult]:
        config = self.config
        if self.daemon.is_running:
            return []
        results = [
            machine.check_socket(Path(config.server.unix_socket))
            if config.server.unix_socket
            else machine.check_address("the wallet API", config.helper.host, config.helper.port, "[helper]")
        ]
        if config.metrics.enable:
            results.append(machine.check_address("metrics", config.metrics.host, config.metrics.port, "[metrics]"))
        return results

    async def _check_onion_service(self) -> list[CheckResult]:
        address, proxy = self.config.server.onion_address, self.config.server.tor_socks
        seconds = min(publication.ONION_SECONDS, self._seconds_left() - _MARGIN_SECONDS)
        return [await publication.check_onion_service(address, proxy, self.clock, seconds=seconds)]

    # ---------------------------------------------------------------- checks that use results of others

    @property
    def _queue(self) -> QueueSnapshot | None:
        """The queue as the helper reports it, else as it is in the file; None if neither is known."""
        return self.daemon.queue or self.file_queue

    def _circuit_name(self) -> str:
        setting = self.config.prover.circuit
        return self.daemon.service.circuit or (default_circuit() if setting == "auto" else setting)

    def _check_circuit(self) -> list[CheckResult]:
        if not self.usable_nodes:
            return []
        versions = [node.info.version for node in self.usable_nodes]
        return [proving.evaluate_circuit(self.config.prover.circuit, self.daemon.service.circuit, versions)]

    def _check_backlog(self) -> list[CheckResult]:
        queue = self._queue
        if queue is None:
            return []  # the check of the database reports why
        blocks = [node.block_seconds for node in self.usable_nodes if node.block_seconds]
        rate = replace(measured_rate(self.daemon.service), slots=self.config.proof_slots)
        if not self.daemon.service.proof.count and self.self_test_seconds is not None:
            rate = replace(rate, seconds_per_proof=self.self_test_seconds)
        if blocks:
            rate = replace(rate, block_seconds=max(blocks))
        return running_helper.evaluate_backlog(queue, rate, self.clock.now())
