"""Builds the components of the service in groups, from the settings and what they depend on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import structlog

from helper.app.cluster import POLL_SECONDS
from helper.app.gates import Gates
from helper.chain.block_reader import RevealHistory
from helper.chain.commitment_trees import CommitmentTreeSync
from helper.chain.node import Node
from helper.chain.node_pool import NodePool, ReadOnlyNodePool, create_node_pool
from helper.chain.round_registry import RoundRegistry
from helper.chain.scheduled_sync import ChainSync
from helper.clock import Clock
from helper.config.sections import ROLES, Config, Role
from helper.core.dispatch_order import SHARES_PER_PROVER, BacklogLimits
from helper.lease import DatabaseLease, Lease
from helper.lease.s3_lease import create_s3_lease
from helper.observability.stats import Stats
from helper.operations.archive_reader import open_archive_bucket
from helper.operations.archive_writer import ArchiveWriter
from helper.operations.finished_rounds import FinishedRounds
from helper.reveal.circuit_choice import CircuitChoice
from helper.reveal.dispatcher import MAX_SLEEP_SECONDS, Backlog, Dispatcher
from helper.reveal.prover_pool import ProverPool, WorkerSpawner
from helper.reveal.revealer import AttemptBudget, ProofTimes, Revealer
from helper.reveal.round_closing import RoundClosing
from helper.reveal.sender import Sender
from helper.runtime.release_files import check_native_module, read_release
from helper.store import blocks
from helper.store.factory import create_store, get_host_name
from helper.store.store import Store
from proofs import native_module_path

if TYPE_CHECKING:
    from helper.store.postgres.store import PostgresStore

log = structlog.get_logger("helper.app")

HOUR_SECONDS: Final = 3600.0


class Host(NamedTuple):
    """What all components of this host use."""

    config: Config
    clock: Clock
    stats: Stats
    role: Role
    store: Store
    lease: Lease | None


class Chain(NamedTuple):
    """The chain as the nodes report it, and as far as it is stored."""

    node_pool: NodePool
    rounds: RoundRegistry
    trees: CommitmentTreeSync
    sync: ChainSync


class Provers(NamedTuple):
    """The prover workers, and the circuit that they prove."""

    circuits: CircuitChoice
    pool: ProverPool
    times: ProofTimes


class Pipeline(NamedTuple):
    """From a due share to its confirmation."""

    sender: Sender
    dispatcher: Dispatcher
    round_closing: RoundClosing


def build_host(config: Config, clock: Clock, store: Store | None) -> Host:
    """Build the queue and the sender lease. `store` replaces the configured database."""
    store = store or create_store(config, clock)
    return Host(config, clock, Stats(), ROLES[config.helper.role], store, create_lease(config, store, clock))


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


def build_chain(host: Host, nodes: Sequence[Node] | None) -> Chain:
    """Build the nodes, rounds and trees. `nodes` replace the configured ones."""
    node_pool = create_node_pool(host.config, host.clock, nodes)
    rounds = RoundRegistry(host.store, node_pool)
    trees = CommitmentTreeSync(host.store, node_pool, rounds)
    sync = ChainSync(node_pool=node_pool, rounds=rounds, trees=trees, interval=host.config.chain.poll_seconds)
    return Chain(node_pool, rounds, trees, sync)


def build_provers(host: Host, spawn: WorkerSpawner) -> Provers:
    """Build the prover pool. `spawn` starts a worker.

    Raises:
        ReleaseError: the native module is not that of a signed release, although [prover] require_verified is set.
    """
    settings = host.config.prover
    circuits = CircuitChoice(
        settings.circuit,
        clock=host.clock,
        store_counted=lambda key, value: host.store.run(blocks.set_meta, key, value),
    )
    pool = ProverPool(
        # A host that only sends needs one worker, to verify proofs that the chain has refused.
        workers=host.config.proof_slots if host.role.can_prove else 1,
        circuits=circuits.required_circuits,
        clock=host.clock,
        nice=settings.nice,
        timeout=settings.timeout_seconds,
        spawn=spawn,
        check_start=_create_native_module_check(host.config) if settings.require_verified else None,
    )
    return Provers(circuits, pool, ProofTimes(pool.workers, lambda: pool.estimated_seconds(circuits.current)))


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


def build_pipeline(host: Host, chain: Chain, provers: Provers, gates: Gates) -> Pipeline:
    """Build the dispatcher, the sender, and what they use."""
    config, store, clock, stats = host.config, host.store, host.clock, host.stats
    attempts = AttemptBudget(
        store=store,
        node_pool=chain.node_pool,
        rounds=chain.rounds,
        stats=stats,
        quick_retries=config.helper.max_attempts,
    )
    sender = Sender(
        store=store,
        node_pool=chain.node_pool,
        trees=chain.trees,
        circuits=provers.circuits,
        attempts=attempts,
        verifier=provers.pool,
        lease=host.lease,
        clock=clock,
        stats=stats,
    )
    revealer = Revealer(
        store=store,
        trees=chain.trees,
        node_pool=chain.node_pool,
        circuits=provers.circuits,
        attempts=attempts,
        rounds=chain.rounds,
        prover=provers.pool,
        proof_times=provers.times,
        clock=clock,
        stats=stats,
    )
    backlog = Backlog(
        store=store,
        proof_times=provers.times,
        limits=BacklogLimits(
            due_shares=config.helper.backlog_min_shares or SHARES_PER_PROVER * provers.pool.workers,
            overdue_seconds=config.helper.backlog_after_seconds,
        ),
        clock=clock,
        stats=stats,
    )
    dispatcher = Dispatcher(
        store=store,
        revealer=revealer,
        sender=sender if host.role.can_send else None,
        get_gate=gates.get_dispatch_gate,
        backlog=backlog,
        slots=provers.pool.workers,
        clock=clock,
        stats=stats,
        max_sleep=POLL_SECONDS if store.is_shared else MAX_SLEEP_SECONDS,
    )
    round_closing = RoundClosing(
        store=store,
        clock=clock,
        stats=stats,
        rounds=chain.rounds,
        purge_after=config.helper.purge_after_hours * HOUR_SECONDS,
        lease=host.lease,
    )
    return Pipeline(sender, dispatcher, round_closing)


def build_archive(
    host: Host, chain: Chain, *, is_writer: Callable[[], bool]
) -> tuple[ArchiveWriter | None, FinishedRounds | None]:
    """Build the archive, if one is configured and this host may send. `is_writer` tells whether this host writes it."""
    config, clock = host.config, host.clock
    if not config.archive.place or not host.role.can_send:
        return None, None
    bucket = open_archive_bucket(config, clock)
    open_readers = partial(ReadOnlyNodePool, chain.node_pool, timeout=config.chain.timeout_seconds)
    writer = ArchiveWriter(
        bucket,
        RevealHistory(open_readers()),
        rounds=lambda: chain.rounds.agreed_rounds() if chain.rounds.is_synced else None,
        clock=clock,
        interval_seconds=config.archive.check_seconds,
        is_writer=is_writer,
    )
    finished_rounds = FinishedRounds(
        config,
        bucket,
        open_readers(),
        archived_height=lambda: writer.archived_height,
        is_writer=is_writer,
        clock=clock,
    )
    return writer, finished_rounds
