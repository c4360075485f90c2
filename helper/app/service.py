"""Composition root: creates the components, connects them, and starts and stops them in order.

Start: database (with recovery after a crash), sockets, chain, provers, then dispatch. Stop: new requests are refused,
pending ones complete, dispatch ends, the workers exit, the database closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from helper import circuits
from helper.app.cluster import POLL_SECONDS, ClusterMember, send_prepared
from helper.app.gates import Gates
from helper.app.health import ServiceHealth
from helper.app.listeners import Listeners
from helper.chain.block_reader import RevealHistory
from helper.chain.chain_data import BlockHead
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.follower import BlockFollower
from helper.chain.node import Node
from helper.chain.node_pool import ReadOnlyNodePool, create_node_pool
from helper.chain.round_registry import RoundRegistry
from helper.chain.scheduled_sync import ChainSync
from helper.clock import Clock, SystemClock
from helper.config.sections import ROLES, Config
from helper.core.dispatch_order import SHARES_PER_PROVER, BacklogLimits
from helper.errors import HelperError
from helper.ingest.admission import AdmissionController
from helper.ingest.validator import Checks, ShareValidator
from helper.lease import DatabaseLease, Lease
from helper.lease.s3_lease import create_s3_lease
from helper.observability.queue_summary import QueueSummaries, read_block_time
from helper.observability.service_state import ServiceState
from helper.observability.stats import Stats
from helper.operations.archive_reader import open_archive_bucket
from helper.operations.archive_writer import ArchiveWriter
from helper.operations.finished_rounds import FinishedRounds
from helper.operations.operator_actions import OperatorActions
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.dispatcher import MAX_SLEEP_SECONDS, Backlog, Dispatcher
from helper.reveal.prover_pool import ProverPool, WorkerProcess, WorkerSpawner
from helper.reveal.revealer import ProofTimes, RetrySchedule, Revealer
from helper.reveal.round_closing import RoundClosing
from helper.reveal.sender import Sender
from helper.runtime.release_files import check_native_module, read_release
from helper.runtime.supervisor import AuxiliaryTasks, run_until_stopped, supervise
from helper.server.wallet_routes import WalletApi
from helper.store import blocks, shares
from helper.store.factory import create_store, get_host_name
from helper.store.messages import PREPARED_NOTIFICATION
from helper.store.shares import DUE_NOTIFICATION
from helper.store.store import Store, run_maintenance
from proofs import native_module_path

if TYPE_CHECKING:
    from helper.store.postgres.store import PostgresStore

log = structlog.get_logger("helper.app")

HOUR_SECONDS: Final = 3600.0
NODE_IDS_SECONDS = 60.0
"""Seconds between comparisons of the nodes' ids."""
FOLLOWER_WAIT_SECONDS = 1.0
"""Seconds that resends wait for the block follower to read the newest block."""


def create_lease(config: Config, store: Store, clock: Clock) -> Lease | None:
    """Create the sender lease of this store's queue; None if no other host can use the queue.

    Raises:
        ConfigError: a required library is not installed, or the credentials file is invalid.
    """
    outer: Lease | None = None
    if config.sender.lease_location is not None and ROLES[config.helper.role].can_send:
        outer = create_s3_lease(
            config.s3,
            config.sender.lease_location,
            host=get_host_name(config),
            clock=clock,
            seconds=config.store.lease_seconds,
        )
    return DatabaseLease(cast("PostgresStore", store), clock=clock, outer=outer) if store.is_shared else outer


def _create_native_module_check(config: Config) -> Callable[[], None]:
    """Return the check of the native module before each start of a prover.

    Raises:
        ReleaseError: the release is not signed by an allowed key, or does not have this native module.
    """
    release = read_release(Path(config.prover.release_manifest), Path(config.prover.allowed_signers))
    check = partial(check_native_module, release, native_module_path())
    check()
    log.info("release_verified", version=release.version, note=f"signed by {release.signer}")
    return check


class Service:
    """The complete helper, created from its settings. Tests and the simulation replace the other arguments.

    Args:
        clock: the clock; the system's if None.
        store: the queue; None opens the configured database.
        nodes: the chain's nodes; None connects to the configured ones.

    Attributes:
        new_database: where the queue is, if its database has never seen a chain; otherwise None.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        store: Store | None = None,
        nodes: Sequence[Node] | None = None,
        spawn_worker: WorkerSpawner = WorkerProcess.spawn,
        share_checks: Checks = circuits,
    ) -> None:
        self.config = config
        self.clock = clock or SystemClock()
        self.stats = Stats()
        self.role = ROLES[config.helper.role]
        self.store = store or create_store(config, self.clock)
        self.lease = create_lease(config, self.store, self.clock)

        # ------------------------------------------------------------------ the chain

        self.node_pool = create_node_pool(config, self.clock, nodes)
        self.round_registry = RoundRegistry(self.store, self.node_pool)
        self.tree_sync = CommitmentTreeSync(self.store, self.node_pool, self.round_registry)
        self.chain_sync = ChainSync(
            node_pool=self.node_pool,
            rounds=self.round_registry,
            trees=self.tree_sync,
            interval=config.chain.poll_seconds,
        )

        # ------------------------------------------------------------------ the provers

        self.circuit_choice = CircuitChoice(
            config.prover.circuit,
            clock=self.clock,
            store_counted=lambda key, value: self.store.run(blocks.set_meta, key, value),
        )
        self.prover_pool = ProverPool(
            # A host that only sends needs one worker, to verify proofs that the chain has refused.
            workers=config.proof_slots if self.role.can_prove else 1,
            circuits=self.circuit_choice.required_circuits,
            clock=self.clock,
            nice=config.prover.nice,
            timeout=config.prover.timeout_seconds,
            spawn=spawn_worker,
            check_start=_create_native_module_check(config) if config.prover.require_verified else None,
        )
        self.proof_times = ProofTimes(
            self.prover_pool.workers, lambda: self.prover_pool.estimated_seconds(self.circuit_choice.current)
        )

        # ------------------------------------------------------------------ blocks, gates and health

        self.new_database: str | None = None
        self._new_block = asyncio.Event()
        self._agreed_block = asyncio.Event()
        self._prepared = asyncio.Event()  # a message that may not be sent yet
        self._reconciled_heights: tuple[int, ...] = ()
        self._stop = asyncio.Event()
        self.cluster = None if self.lease is None else self._create_cluster_member(self.lease)
        self.block_follower = BlockFollower(
            self.store,
            self.node_pool,
            self.round_registry,
            is_leader=self._is_leader,
            on_block=self._on_block,
            on_confirmed=self._on_confirmed,
        )
        self.node_pool.subscribe_to_probes(self._on_probe)
        self.gates = Gates(
            store=self.store,
            node_pool=self.node_pool,
            round_registry=self.round_registry,
            tree_sync=self.tree_sync,
            chain_sync=self.chain_sync,
            block_follower=self.block_follower,
            circuit_choice=self.circuit_choice,
            proof_times=self.proof_times,
            clock=self.clock,
            cluster=self.cluster,
        )
        self.health = ServiceHealth(self.gates, prover_pool=self.prover_pool, stats=self.stats, role=self.role)

        # ------------------------------------------------------------------ from a due share to its confirmation

        sender_lease = Lease() if self.lease is None else self.lease
        retries = RetrySchedule(
            store=self.store,
            node_pool=self.node_pool,
            rounds=self.round_registry,
            stats=self.stats,
            quick_retries=config.helper.max_attempts,
        )
        self.sender = Sender(
            store=self.store,
            node_pool=self.node_pool,
            trees=self.tree_sync,
            circuits=self.circuit_choice,
            retries=retries,
            verifier=self.prover_pool,
            lease=sender_lease,
            clock=self.clock,
            stats=self.stats,
        )
        revealer = Revealer(
            store=self.store,
            trees=self.tree_sync,
            node_pool=self.node_pool,
            circuits=self.circuit_choice,
            retries=retries,
            rounds=self.round_registry,
            prover=self.prover_pool,
            proof_times=self.proof_times,
            clock=self.clock,
            stats=self.stats,
        )
        backlog = Backlog(
            store=self.store,
            proof_times=self.proof_times,
            limits=BacklogLimits(
                due_shares=config.helper.backlog_min_shares or SHARES_PER_PROVER * self.prover_pool.workers,
                overdue_seconds=config.helper.backlog_after_seconds,
            ),
            clock=self.clock,
            stats=self.stats,
        )
        self.dispatcher = Dispatcher(
            store=self.store,
            revealer=revealer,
            sender=self.sender if self.role.can_send else None,
            get_gate=self.gates.get_dispatch_gate,
            backlog=backlog,
            slots=self.prover_pool.workers,
            clock=self.clock,
            stats=self.stats,
            max_sleep=POLL_SECONDS if self.store.is_shared else MAX_SLEEP_SECONDS,
        )
        self.round_closing = RoundClosing(
            store=self.store,
            clock=self.clock,
            stats=self.stats,
            rounds=self.round_registry,
            purge_after=config.helper.purge_after_hours * HOUR_SECONDS,
            lease=sender_lease,
        )
        self.sender.subscribe(self._new_block.set)

        # ------------------------------------------------------------------ what clients and operators use

        self.admission = AdmissionController(
            store=self.store,
            rounds=self.round_registry,
            trees=self.tree_sync,
            validator=ShareValidator(share_checks),
            clock=self.clock,
            wake=self.dispatcher.wake_if_due,
            get_pause_reason=self.gates.intake_pause_reason,
            get_round_pause_reason=self.gates.round_pause_reason,
        )
        self.operations = OperatorActions(
            store=self.store,
            rounds=self.round_registry,
            share_checks=share_checks,
            wake=self.dispatcher.wake,
            find_counted=self.block_follower.find_counted,
            on_rescan=self.block_follower.wake,
        )
        self.queue_summaries = (
            QueueSummaries(self.store, self.round_registry, partial(read_block_time, self.node_pool), clock=self.clock)
            if config.helper.expose_queue_summary and self.role.can_accept
            else None
        )
        self.wallet_api = WalletApi(
            admission=self.admission,
            is_ready=lambda: self.health.is_ready,
            queue_summaries=self.queue_summaries,
            pending_status=config.server.pending_status,
            count_outcome=self.stats.count,
            api_token=config.helper.api_token,
            expose_queue_status=config.helper.expose_queue_status,
        )
        self.archive_writer: ArchiveWriter | None = None
        self.finished_rounds: FinishedRounds | None = None
        if config.archive.place and self.role.can_send:
            self._create_archive()

    def _create_cluster_member(self, lease: Lease) -> ClusterMember:
        self.store.listen(self._on_notification)
        self.store.renew_claims_while(lambda: self.prover_pool.is_ready)
        return ClusterMember(
            self.store,
            lease=lease,
            role=self.role,
            standby=self.config.sender.standby,
            circuits=self.circuit_choice,
            rounds=self.round_registry,
            clock=self.clock,
            on_acquired=self._on_lease_acquired,
            can_reveal=lambda: self.gates.is_dispatching and self.node_pool.has_usable_node,
        )

    def _create_archive(self) -> None:
        bucket = open_archive_bucket(self.config, self.clock)
        open_readers = partial(ReadOnlyNodePool, self.node_pool, timeout=self.config.chain.timeout_seconds)
        self.archive_writer = writer = ArchiveWriter(
            bucket,
            RevealHistory(open_readers()),
            rounds=lambda: self.round_registry.agreed_rounds() if self.round_registry.is_synced else None,
            clock=self.clock,
            interval_seconds=self.config.archive.check_seconds,
            is_writer=self._is_leader,
        )
        self.finished_rounds = FinishedRounds(
            self.config,
            bucket,
            open_readers(),
            archived_height=lambda: writer.archived_height,
            is_writer=self._is_leader,
            clock=self.clock,
        )

    def stop(self) -> None:
        """Request shutdown; `run` returns when all tasks have ended."""
        self._stop.set()

    async def get_status(self) -> str:
        """Return a short status once the database's thread has responded; waits while it hangs."""
        await self.store.ping_writer()
        pause_reason = self.gates.intake_pause_reason() or self._pause_reason()
        return pause_reason or (
            "accepts and reveals shares" if self.health.is_ready else "starting: the provers are not ready"
        )

    async def run(
        self, *, on_started: Callable[[str], None] = lambda _: None, wallet_socket: socket.socket | None = None
    ) -> None:
        """Run until `stop`, or until a component fails permanently. The arguments are those of `Listeners.open`.

        Raises:
            HelperError: the service could not start or cannot continue.
        """
        listeners = Listeners(self.config, node_pool=self.node_pool, clock=self.clock)
        listeners.add_queue(
            self.wallet_api if self.role.can_accept else None,
            self.store,
            self.round_registry,
            read_status=self._collect_status,
            run_checks=self.health.run_checks,
            stats=self.stats,
            operations=self.operations,
            tree_size=self.tree_sync.last_size,
        )
        async with self.open_queue(), listeners.open(on_started, wallet_socket) as servers:
            await self.run_components(
                servers,
                {
                    **listeners.auxiliary_tasks,
                    **({} if self.queue_summaries is None else {"queue summaries": self.queue_summaries.run}),
                },
            )

    def _is_leader(self) -> bool:
        """Whether this host runs the tasks that are limited to one host (the sender)."""
        return self.lease is None or self.lease.is_held

    @contextlib.asynccontextmanager
    async def open_queue(self) -> AsyncIterator[None]:
        """Open the database, restore queue, rounds and trees from it, and close it at the end.

        Raises:
            HelperError: the database cannot be used, or belongs to another chain.
        """
        await self.store.open()
        try:
            recovered = await self.store.run_batches(shares.recover)
            log.info("queue_opened", recovered=recovered)
            await self.round_registry.restore()
            if not self.round_registry.has_stored_state:
                self.new_database = (
                    f"schema {self.config.store.schema_name}"
                    if self.store.is_shared
                    else str(self.config.db_path.absolute())
                )
                log.info("database_created", path=self.new_database, note="the queue is new and empty")
            await self.tree_sync.restore()
            await self._restore_circuit()
            if self.cluster is not None:
                await run_until_stopped(self._stop, self.cluster.start())
            yield
        finally:
            await self.store.close()

    async def _restore_circuit(self) -> None:
        """Have the provers create the keys of the circuit that the chain accepted last first."""
        if self.node_pool.chain_id is not None:
            key = CircuitChoice.storage_key(self.node_pool.chain_id)
            self.circuit_choice.restore(await self.store.get_meta(key))
            self.prover_pool.circuits = self.circuit_choice.required_circuits

    def _pause_reason(self) -> str | None:
        """Why this host's processing of admitted shares is paused, or None."""
        return (
            self.dispatcher.pause_reason
            if self.role.can_prove
            else self.gates.get_dispatch_gate().pause_reason
            if self.role.can_send
            else None
        )

    def _collect_status(self) -> ServiceState:
        state = replace(
            self.health.collect_status(),
            paused=self._pause_reason(),
            height=self.block_follower.height,
            in_hand=self.dispatcher.claimed_count,
            archive=None if self.archive_writer is None else self.archive_writer.collect_status(),
        )
        if self.cluster is not None:
            state = replace(self.cluster.add_state(state), role=self.config.helper.role)
        return state

    async def run_components(
        self,
        servers: Sequence[asyncio.Task[None]] = (),
        more_auxiliary: AuxiliaryTasks | None = None,
    ) -> None:
        """Run all background components until `stop` is called. Requires `open_queue`.

        Args:
            servers: server tasks to watch; the caller ends them.
            more_auxiliary: additional auxiliary tasks, by name.

        Raises:
            HelperError: a component ended unexpectedly.
        """
        auxiliary = {"node ids": self._compare_node_ids, **(more_auxiliary or {})}
        components: dict[str, Coroutine[Any, Any, None]] = {
            "chain_sync": self.chain_sync.run(),
            "block_follower": self.block_follower.run(),
        }
        if self.cluster is not None:
            components |= self.cluster.tasks
        if self.role.can_process:
            components |= {"prover_pool": self.prover_pool.run(), "dispatcher": self._run_dispatch()}
        if self.role.can_send:
            components |= {"reconciler": self._reconcile_after_blocks(), "round_closing": self.round_closing.run()}
            auxiliary["circuit"] = self._learn_circuit
            auxiliary["database check"] = partial(
                run_maintenance, self.store, is_responsible=self._is_leader, clock=self.clock
            )
            if self.archive_writer is not None:
                auxiliary["archive"] = self.archive_writer.run
            if self.finished_rounds is not None:
                auxiliary["finished rounds"] = self.finished_rounds.run
        try:
            await supervise(components, servers, self._stop, auxiliary=auxiliary, clock=self.clock)
        finally:
            self.admission.stop_waits()
            for closable in (self.archive_writer, self.finished_rounds):
                if closable is not None:
                    await closable.aclose()
            await self.sender.stop()
            await self.node_pool.aclose()

    async def _run_dispatch(self) -> None:
        """Dispatch and send, once the provers are ready and the circuit is selected."""
        await asyncio.sleep(0)
        await self.prover_pool.wait_ready()
        await self.chain_sync.wait_ready()
        await self._select_circuit()
        self.node_pool.subscribe(self.dispatcher.wake)
        self.gates.is_dispatching = True
        circuit = self.circuit_choice.current
        log.info("service_ready", circuit=circuit, self_test=self.prover_pool.estimated_seconds(circuit))
        if self.cluster is None:
            await self.dispatcher.run()
            return
        async with asyncio.TaskGroup() as group:
            if self.role.can_prove:
                group.create_task(self.dispatcher.run())
            if self.role.can_send:
                group.create_task(
                    send_prepared(
                        self.sender,
                        self._prepared,
                        get_pause_reason=lambda: self.gates.get_dispatch_gate().pause_reason,
                        clock=self.clock,
                        stats=self.stats,
                    )
                )

    async def _compare_node_ids(self) -> None:
        while True:
            await self.node_pool.compare_node_ids()
            await self.clock.sleep(NODE_IDS_SECONDS)

    async def _select_circuit(self) -> None:
        """Select the circuit generation by what the chain counted last and the node's version."""
        node_info = None
        while node_info is None:
            try:
                node_info = await self.node_pool.call(lambda client: client.node_info())
            except HelperError as error:
                log.warning("chain_version_unknown", error=str(error))
                await self.clock.sleep(self.config.chain.poll_seconds)
        chain_id = self.node_pool.reported_chain_id
        assert chain_id is not None, "a usable node has reported one"
        remembered = await self.store.get_meta(CircuitChoice.storage_key(chain_id))
        self.circuit_choice.select_initial(chain_id, node_info.version, remembered)

    def _on_notification(self, channel: str) -> None:
        """Handle a notification of another host; "" if notifications may have been lost."""
        if channel != PREPARED_NOTIFICATION:
            self.dispatcher.wake()
        if channel != DUE_NOTIFICATION:
            self._prepared.set()

    def _on_lease_acquired(self) -> None:
        self.sender.start_term()
        self._new_block.set()
        self._prepared.set()

    def _on_block(self, _height: int) -> None:
        self._new_block.set()
        self._agreed_block.set()
        self.circuit_choice.note_block()
        self.dispatcher.wake()

    def _on_confirmed(self, share_ids: list[int]) -> None:
        self.stats.count("confirmed", len(share_ids))
        for share_id in share_ids:
            self.sender.forget_confirmed(share_id)

    async def _reconcile_after_blocks(self) -> None:
        """Reconcile unconfirmed reveals at each new height, and at each event that may permit a send.

        At start-up this waits a bounded time for the block follower, because unread blocks may confirm many of them.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.sender.seconds_to_probe):
                    await self._new_block.wait()
            self._new_block.clear()
            error: Exception | None = None
            try:
                if not self.block_follower.is_caught_up:
                    await self._wait_for_follower()
                if self.gates.can_send and self.node_pool.has_usable_node and self.block_follower.is_ready:
                    await self.sender.reconcile()
            except Exception as failure:  # retried after the next block
                error = failure
                log.exception("reconcile_failed")
            self.stats.note_attempt("sending again", error, self.clock.monotonic())

    async def _learn_circuit(self) -> None:
        """Learn the circuit from the reveals that each agreed block counted, until it is known."""
        while True:
            await self._agreed_block.wait()
            self._agreed_block.clear()
            if self._is_leader():
                await self.circuit_choice.learn(
                    self.block_follower.counted_height,
                    node_pool=self.node_pool,
                    store=self.store,
                    trees=self.tree_sync,
                    verifier=self.prover_pool,
                )

    async def _wait_for_follower(self) -> None:
        """Give the follower a moment to read the newest block, which may confirm reveals. Nothing waits for it longer.

        A node that lags, has no block, or lies can keep the follower behind for any time.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FOLLOWER_WAIT_SECONDS):
                while not self.block_follower.is_caught_up:
                    await self._new_block.wait()
                    self._new_block.clear()

    def _on_probe(self, head: BlockHead | None) -> None:
        """Reconcile at a new height of any node, whether or not it is agreed or its block can be read."""
        self.health.note_progress(head)
        self.round_closing.wake_if_due()
        heights = tuple(node.height for node in self.node_pool.nodes)
        if head is not None and heights != self._reconciled_heights:
            self._reconciled_heights = heights
            self._new_block.set()
