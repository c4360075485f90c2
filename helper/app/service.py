"""Composition root: creates the components, connects them, and starts and stops them in order.

Start: database (with recovery after a crash), sockets, chain, provers, then dispatch. Stop: new requests are refused,
pending ones complete, dispatch ends, the workers exit, the database closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, cast

import structlog

from helper.app.dependencies import Dependencies
from helper.app.health import ServiceHealth
from helper.app.listeners import Listeners
from helper.chain.block_follower import BlockFollower
from helper.chain.commitment_tree import CommitmentTreeSync
from helper.chain.node_pool import create_node_pool
from helper.chain.round_registry import RoundRegistry
from helper.chain.sync import ChainFollower
from helper.clock import Clock, SystemClock
from helper.cluster.membership import ClusterMember
from helper.cluster.send_loop import POLL_SECONDS, SendLoop
from helper.config import Config
from helper.core.pause import PauseReason, text_of
from helper.core.roles import ROLES
from helper.errors import HelperError
from helper.ingest.admission import AdmissionController
from helper.ingest.validator import ShareValidator
from helper.lease import Lease
from helper.lease.factory import create_lease
from helper.observability.service_state import RunningState, ServiceState
from helper.observability.stats import Stats
from helper.operations.actions import Operations
from helper.operations.archive.factory import archive_writer
from helper.reveal.attempt_budget import AttemptBudget
from helper.reveal.broadcaster import Broadcaster
from helper.reveal.circuit_selector import CircuitSelector
from helper.reveal.dispatcher import LONGEST_SLEEP, Dispatcher
from helper.reveal.prover.pool import DEFAULT_COMMAND, ProverPool
from helper.reveal.prover.process import WorkerCommand
from helper.reveal.retention import Retention
from helper.reveal.revealer import Revealer
from helper.runtime.hardening import harden_process
from helper.runtime.maintenance import Maintenance
from helper.runtime.supervisor import supervise, unless
from helper.server.action_views import RoundState
from helper.server.routes.operator import round_states, rounds_route
from helper.server.routes.operator_actions import operator_action_routes
from helper.server.routes.wallet import WalletView
from helper.store.factory import create_store
from helper.store.operations.messages import PREPARED
from helper.store.operations.shares import DUE

log = structlog.get_logger("helper.app")

HOUR = 3600.0


class Service:
    """The complete helper, created from its settings.

    Args:
        config: validated settings.
        clock: the clock; the system's if None.
        prover_command: the command line of a prover worker; tests use a faster prover.
        edges: connections to the outside world; the real ones if None. The simulation replaces them.
    """

    def __init__(
        self,
        config: Config,
        *,
        clock: Clock | None = None,
        prover_command: WorkerCommand = DEFAULT_COMMAND,
        edges: Dependencies | None = None,
    ) -> None:
        edges = edges or Dependencies()
        self.config = config
        self.clock = clock or SystemClock()
        self.stats = Stats()
        self.role = ROLES[config.helper.role]
        self.store = edges.store or create_store(config, self.clock)
        self.lease = create_lease(config, self.store, clock=self.clock, env=os.environ)
        self.endpoints = create_node_pool(config, self.clock, edges.nodes)
        self.rounds = RoundRegistry(self.store, self.endpoints, clock=self.clock)
        self.trees = CommitmentTreeSync(self.store, self.endpoints, self.rounds)
        self.circuits = CircuitSelector(config.prover.circuit, clock=self.clock, remember=self.store.set_meta)
        self.prover = ProverPool(
            # A host that only sends needs one worker, to check proofs that the chain refuses.
            workers=config.proof_slots if self.role.proves else 1,
            circuits=self.circuits.needed,
            clock=self.clock,
            nice=config.prover.nice,
            timeout=config.prover.timeout_seconds,
            command=prover_command,
            spawn=edges.spawn,
        )
        self._checks = edges.checks
        self._new_block = asyncio.Event()
        self._stop = asyncio.Event()
        self.among = None if self.lease is None else self._join_cluster(self.lease)
        self._create_components()

    def _join_cluster(self, lease: Lease) -> ClusterMember:
        self.store.listen(self._on_notification)
        return ClusterMember(
            self.store,
            lease=lease,
            role=self.role,
            standby=self.config.sender.standby,
            circuits=self.circuits,
            rounds=self.rounds,
            clock=self.clock,
            changed=self._on_sender,
        )

    def _create_components(self) -> None:
        """Create the components that depend on others."""
        self.follower = ChainFollower(
            endpoints=self.endpoints,
            rounds=self.rounds,
            trees=self.trees,
            interval=self.config.chain.poll_seconds,
        )
        self.listener = BlockFollower(
            self.store,
            self.endpoints,
            self.rounds,
            clock=self.clock,
            mine=self._is_leader,
            on_block=self._on_block,
            on_spent=self._on_confirmed,
        )
        self.vitals = ServiceHealth(
            store=self.store,
            endpoints=self.endpoints,
            rounds=self.rounds,
            trees=self.trees,
            follower=self.follower,
            listener=self.listener,
            circuits=self.circuits,
            prover=self.prover,
            stats=self.stats,
            clock=self.clock,
            stale_after=self.config.chain.stale_seconds,
            tolerance=self.config.chain.clock_skew_seconds,
            role=self.role,
            among=self.among,
        )
        attempts = AttemptBudget(
            store=self.store,
            endpoints=self.endpoints,
            stats=self.stats,
            maximum=self.config.helper.max_attempts,
        )
        self.broadcaster = Broadcaster(
            store=self.store,
            trees=self.trees,
            endpoints=self.endpoints,
            circuits=self.circuits,
            attempts=attempts,
            verifier=self.prover,
            lease=self.lease,
            clock=self.clock,
            stats=self.stats,
        )
        revealer = Revealer(
            store=self.store,
            trees=self.trees,
            endpoints=self.endpoints,
            circuits=self.circuits,
            attempts=attempts,
            prover=self.prover,
            clock=self.clock,
            stats=self.stats,
        )
        retention = Retention(
            store=self.store,
            clock=self.clock,
            stats=self.stats,
            rounds=self.rounds,
            purge_after=self.config.helper.purge_after_hours * HOUR,
            lease=self.lease,
        )
        self.processor = Dispatcher(
            store=self.store,
            revealer=revealer,
            broadcaster=self.broadcaster if self.role.sends else None,
            retention=retention if self.among is None else None,
            gate=self.vitals.gate,
            slots=self.prover.workers,
            clock=self.clock,
            stats=self.stats,
            longest_sleep=POLL_SECONDS if self.store.shared else LONGEST_SLEEP,
        )
        self.sending = SendLoop(
            broadcaster=self.broadcaster,
            retention=retention,
            paused=lambda: self.vitals.gate().paused,
            clock=self.clock,
        )
        self.intake = AdmissionController(
            store=self.store,
            rounds=self.rounds,
            trees=self.trees,
            checker=ShareValidator(self._checks),
            clock=self.clock,
            wake=self.processor.wake_by,
            paused=self.vitals.intake_paused,
            round_paused=self.vitals.round_paused,
        )
        self.operations = Operations(
            store=self.store, judge=self.rounds, checks=self._checks, wake=self.processor.wake, running=True
        )
        self.archive = archive_writer(
            self.config,
            self.endpoints,
            lambda: self.rounds.all() if self.rounds.synced else None,
            mine=self._is_leader,
            clock=self.clock,
            env=os.environ,
        )
        self.upkeep = Maintenance(self.store, mine=self._is_leader, clock=self.clock)
        self.wallet_view = WalletView(
            intake=self.intake,
            store=self.store,
            rounds=self.rounds,
            trees=self.trees,
            ready=lambda: self.vitals.ready,
            paused=self.vitals.intake_paused,
            count=self.stats.count,
        )

    def stop(self) -> None:
        """Begin to stop; `run` returns once everything has ended."""
        self._stop.set()

    async def alive(self) -> str:
        """Return a short status, after the database's thread has responded; block while it hangs."""
        await self.store.pulse()
        paused = self.vitals.intake_paused() or self._paused()
        return text_of(paused) or (
            "accepts and reveals shares" if self.vitals.ready else "starting: the provers are not ready"
        )

    async def run(
        self, *, started: Callable[[str], None] = lambda _: None, listener: socket.socket | None = None
    ) -> None:
        """Run until `stop`, or until a component fails for good.

        Args:
            started: called with the wallets' base URL once the sockets listen.
            listener: the wallets' socket, if it is already open.

        Raises:
            HelperError: the service could not start, or must not continue.
        """
        for failure in harden_process():
            log.warning("process_not_hardened", reason=failure)
        listeners = Listeners(self.config, endpoints=self.endpoints, clock=self.clock)
        listeners.join_queue(
            self.wallet_view if self.role.takes else None,
            self.store,
            self.rounds,
            facts=self._facts,
            checks=self.vitals.checks,
            stats=self.stats,
            operators=[
                rounds_route(self.store, self._round_states, self._chain_now),
                *operator_action_routes(self.operations),
            ],
        )
        async with self.opened(), listeners.open(started, listener) as servers:
            await self.work(servers, listeners.parts)

    def _is_leader(self) -> bool:
        """Whether this host runs the tasks that only one host runs."""
        return self.lease is None or self.lease.held

    async def _round_states(self) -> list[RoundState]:
        return round_states(self.rounds, self.trees.size)

    def _chain_now(self) -> float:
        return self.rounds.chain_now() or self.clock.now()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open the database, restore queue, rounds and trees from it, and close it at the end.

        Raises:
            HelperError: the database cannot be used, or belongs to another chain.
        """
        await self.store.open()
        try:
            recovered = await self.store.recover()
            log.info("queue_opened", recovered=recovered)
            await self.rounds.restore()
            await self.trees.restore()
            if self.among is not None:
                await unless(self._stop, self.among.begin())
            yield
        finally:
            await self.store.close()

    def _paused(self) -> PauseReason | None:
        """Why this host's processing of admitted shares is paused, or None."""
        return self.processor.paused if self.role.proves else self.vitals.gate().paused if self.role.sends else None

    def _facts(self) -> ServiceState:
        running: RunningState = {
            **self.vitals.facts(),
            "paused": text_of(self._paused()),
            "height": self.listener.height,
            "in_hand": self.processor.proving,
        }
        state = cast(ServiceState, running)
        if self.among is not None:
            state["role"] = self.config.helper.role
            cluster = self.among.facts()
            state["sends"], state["sender"] = cluster["sends"], cluster["sender"]
            if "database_skew" in cluster:
                state["database_skew"] = cluster["database_skew"]
        if self.archive is not None:
            state["archive"] = self.archive.facts()
        return state

    async def work(
        self, servers: Sequence[asyncio.Task[None]] = (), beside: Mapping[str, Coroutine[Any, Any, None]] | None = None
    ) -> None:
        """Run all background components until `stop` is called. Requires `opened`.

        Args:
            servers: server tasks to watch; the caller ends them.
            beside: further components, by name.

        Raises:
            HelperError: a component ended unexpectedly.
        """
        parts = {
            **(beside or {}),
            "follower": self.follower.run(),
            "listener": self.listener.run(),
        }
        if self.among is not None:
            parts |= self.among.parts
        if self.role.works:
            parts |= {"prover": self.prover.run(), "processor": self._process()}
        if self.role.sends:
            parts |= {"reconciler": self._reconcile(), "database check": self.upkeep.run()}
            if self.archive is not None:
                parts["archive"] = self.archive.run()
        try:
            await supervise(parts, servers, self._stop)
        finally:
            await self.endpoints.aclose()

    async def _process(self) -> None:
        """Dispatch and send, once the provers are ready and the circuit is selected."""
        await asyncio.sleep(0)
        await self.prover.wait_ready()
        await self.follower.wait_ready()
        await self._choose_circuit()
        self.endpoints.subscribe(self.processor.wake)
        self.vitals.revealing = True
        circuit = self.circuits.current
        log.info("service_ready", circuit=circuit, self_test=self.prover.seconds_each(circuit))
        if self.among is None:
            await self.processor.run()
            return
        async with asyncio.TaskGroup() as group:
            if self.role.proves:
                group.create_task(self.processor.run())
            if self.role.sends:
                group.create_task(self.sending.run())

    async def _choose_circuit(self) -> None:
        """Select the circuit generation by the chain's id and the node's version."""
        info = None
        while info is None:
            try:
                info = await self.endpoints.call(lambda client: client.node_info())
            except HelperError as error:
                log.warning("chain_version_unknown", error=str(error))
                await self.clock.sleep(self.config.chain.poll_seconds)
        remembered = await self.store.get_meta(CircuitSelector.key(info.chain_id))
        self.circuits.begin(info.chain_id, info.version, remembered)

    def _on_notification(self, channel: str) -> None:
        """Handle a notification of another host; "" if notifications may have been lost."""
        if channel != PREPARED:
            self.processor.wake()
        if channel != DUE:
            self.sending.wake()

    def _on_sender(self) -> None:
        """Handle the acquisition of the sender's lease."""
        self.broadcaster.took_over()
        self._new_block.set()
        self.sending.wake()

    def _on_block(self, _height: int) -> None:
        self._new_block.set()
        self.circuits.note_block()
        self.processor.wake()

    def _on_confirmed(self, share_ids: list[int]) -> None:
        self.stats.count("confirmed", len(share_ids))
        for share_id in share_ids:
            self.circuits.forget(share_id)
            self.broadcaster.confirmed(share_id)

    async def _reconcile(self) -> None:
        """Follow up unconfirmed reveals after each block.

        At the start this waits for the block follower, because many of them may be confirmed in unread blocks.
        """
        while True:
            await self._new_block.wait()
            self._new_block.clear()
            try:
                followed = self.listener.caught_up and self.listener.arrived
                if self.vitals.sends and self.endpoints.usable and followed:
                    await self.broadcaster.reconcile(self.listener.height or 0)
            except Exception:  # retried after the next block
                log.exception("reconcile_failed")
