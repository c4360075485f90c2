"""Discrete-event simulation that extrapolates measured costs to many hosts. Deterministic and pure.

Prover hosts take shares from a queue that is never empty. Each share uses CPU time of the database server (enqueue,
claim, prepare, send), a core of its host for the proof and for the host's own work, time of the single sender, and
space in a block. Every host applies every block to the database, one after the other. The first confirms the
shares; for the others, they are already confirmed. Hosts that are behind the chain wait until they have applied the
newest block. The slowest resource limits the rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Final

from helper.core.load_forecast import MAX_REVEALS_PER_BLOCK

HOST_CORES: Final = 2
SERVER_CORES: Final = 2
CLAIMS_PER_CORE: Final = 2
"""Claimed shares per core: the one being proven and the next."""
MAX_SENDS_IN_FLIGHT: Final = 16
"""Maximum concurrent sends."""
SATURATION_RATIO: Final = 0.95
"""Utilization above which a resource counts as saturated."""
MAX_UNREAD_BLOCKS: Final = 2
"""Unread blocks with which hosts still continue."""
MIN_SECONDS: Final = 30.0
MIN_BLOCKS: Final = 6
"""Measured blocks, after a warm-up of half as many."""

LIMIT_PROOFS, LIMIT_SENDER, LIMIT_DATABASE, LIMIT_BLOCK_READING, LIMIT_CHAIN = (
    "proofs",
    "the sender",
    "the database",
    "reading blocks",
    "the chain",
)


@dataclass(frozen=True, slots=True)
class ShareCosts:
    """Costs of one share, in seconds.

    Attributes:
        proof: core time of the proof.
        host: core time of the host's other work.
        database: database server core time for enqueue, claim and prepare.
        sender: sender time. Shares are sent sequentially.
        sender_database: database server core time for sending.
        first_read: time per reveal for the first host that applies a block.
        first_read_database: database server core time of the first application, per reveal.
        other_read: time per reveal for each other host that applies the block.
        other_read_database: database server core time of each other application, per reveal.
    """

    proof: float
    host: float = 0.0
    database: float = 0.0
    sender: float = 0.0
    sender_database: float = 0.0
    first_read: float = 0.0
    first_read_database: float = 0.0
    other_read: float = 0.0
    other_read_database: float = 0.0


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """Result of a simulation.

    Attributes:
        rate: confirmed reveals per second.
        utilization: fraction of the time that each resource was busy, by name.
        limit: the resource that limits the rate.
    """

    rate: float
    utilization: Mapping[str, float]
    limit: str


class EventQueue:
    """Event queue ordered by time. Events with equal times run in insertion order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._scheduled: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def schedule(self, seconds: float, callback: Callable[[], None]) -> None:
        """Schedule a callback after this many seconds."""
        self._sequence += 1
        heappush(self._scheduled, (self.now + seconds, self._sequence, callback))

    def run_until(self, end: float) -> None:
        """Run all events up to this time."""
        while self._scheduled and self._scheduled[0][0] <= end:
            self.now, _, callback = heappop(self._scheduled)
            callback()
        self.now = end


class ServiceStation:
    """Servers with a shared waiting queue.

    Attributes:
        busy_seconds: total service time of all requests started so far.
    """

    def __init__(self, events: EventQueue, servers: int) -> None:
        self._events = events
        self._free = self.servers = servers
        self._queue: deque[tuple[float, Callable[[], None]]] = deque()
        self.busy_seconds = 0.0

    def enqueue(self, seconds: float, callback: Callable[[], None]) -> None:
        """Add a request with this service time."""
        self._queue.append((seconds, callback))
        self._start_next()

    @property
    def queue_length(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    def _start_next(self) -> None:
        while self._free and self._queue:
            seconds, callback = self._queue.popleft()
            self._free -= 1
            self.busy_seconds += seconds
            self._events.schedule(seconds, partial(self._finish, callback))

    def _finish(self, callback: Callable[[], None]) -> None:
        self._free += 1
        callback()
        self._start_next()


class ProverHost:
    """A prover host.

    Attributes:
        cores: number of cores that prove.
        free_slots: number of additional shares that the host can claim.
        is_claiming: whether a claim is in progress. The host has one writing connection and sends one
            request at a time.
    """

    def __init__(self, events: EventQueue) -> None:
        self.cores = ServiceStation(events, HOST_CORES)
        self.free_slots = 0
        self.is_claiming = False


class ClusterModel:
    """Cluster of hosts with a database, a sender and a chain."""

    def __init__(self, costs: ShareCosts, provers: int, block_seconds: float) -> None:
        self._costs, self._provers, self._block_seconds = costs, provers, block_seconds
        self.events = EventQueue()
        self.database = ServiceStation(self.events, SERVER_CORES)
        self.hosts = [ProverHost(self.events) for _ in range(provers)]
        self.sender = ServiceStation(self.events, 1)
        self.block_reader = ServiceStation(self.events, 1)
        self.confirmed = self.full_blocks = 0
        self._blocked_hosts: deque[ProverHost] = deque()
        self._prepared = self._in_flight = self._mempool = 0
        claims = HOST_CORES * CLAIMS_PER_CORE
        # Stagger the hosts, as in a cluster that has run for a long time.
        for number, host in enumerate(self.hosts):
            for claim in range(claims):
                wait = (number + claim * provers) / (provers * claims) * costs.proof
                self.events.schedule(wait, partial(self._request_share, host))
        self.events.schedule(block_seconds, self._produce_block)

    def _request_share(self, host: ProverHost) -> None:
        host.free_slots += 1
        self._claim_share(host)

    def _claim_share(self, host: ProverHost) -> None:
        if host.is_claiming or not host.free_slots:
            return
        host.is_claiming = True
        host.free_slots -= 1
        if self._is_behind:
            self._blocked_hosts.append(host)
        else:
            self._query_database(host)

    def _query_database(self, host: ProverHost) -> None:
        self.database.enqueue(self._costs.database, partial(self._start_proof, host))

    def _start_proof(self, host: ProverHost) -> None:
        host.is_claiming = False
        host.cores.enqueue(self._costs.proof + self._costs.host, partial(self._finish_proof, host))
        self._claim_share(host)

    def _finish_proof(self, host: ProverHost) -> None:
        self._request_share(host)
        self._prepared += 1
        self._send_prepared()

    def _send_prepared(self) -> None:
        while self._prepared and self._in_flight < MAX_SENDS_IN_FLIGHT and not self._is_behind:
            self._prepared -= 1
            self._in_flight += 1
            self.sender.enqueue(self._costs.sender, self._record_send)

    def _record_send(self) -> None:
        self.database.enqueue(self._costs.sender_database, self._finish_send)

    def _finish_send(self) -> None:
        self._in_flight -= 1
        self._mempool += 1
        self._send_prepared()

    def _produce_block(self) -> None:
        count = min(MAX_REVEALS_PER_BLOCK, self._mempool)
        self._mempool -= count
        self.confirmed += count
        self.full_blocks += count == MAX_REVEALS_PER_BLOCK
        self._read_block(count * self._costs.first_read, count * self._costs.first_read_database)
        for _ in range(self._provers):  # all other hosts: the provers and the sender, except the first reader
            self._read_block(count * self._costs.other_read, count * self._costs.other_read_database)
        self.events.schedule(self._block_seconds, self._produce_block)

    def _read_block(self, seconds: float, database: float) -> None:
        self.block_reader.enqueue(seconds, self._finish_read)
        self.database.enqueue(database, _do_nothing)

    def _finish_read(self) -> None:
        if not self._is_behind:
            while self._blocked_hosts:
                self._query_database(self._blocked_hosts.popleft())
            self._send_prepared()

    @property
    def _is_behind(self) -> bool:
        return self.block_reader.queue_length > MAX_UNREAD_BLOCKS * (self._provers + 1)

    def busy_seconds(self) -> dict[str, float]:
        """Busy time of all resources so far, in seconds."""
        return {
            LIMIT_PROOFS: sum(host.cores.busy_seconds for host in self.hosts) / (self._provers * HOST_CORES),
            LIMIT_DATABASE: self.database.busy_seconds / SERVER_CORES,
            LIMIT_BLOCK_READING: self.block_reader.busy_seconds,
            LIMIT_SENDER: self.sender.busy_seconds,
            LIMIT_CHAIN: self.full_blocks * self._block_seconds,
        }


def _do_nothing() -> None:
    pass


def simulate_cluster(costs: ShareCosts, provers: int, block_seconds: float) -> CapacityResult:
    """Simulate a cluster with this many prover hosts.

    Args:
        costs: costs of one share.
        provers: number of prover hosts, each with `HOST_CORES` cores.
        block_seconds: block interval.
    """
    blocks = max(MIN_BLOCKS, round(MIN_SECONDS / block_seconds))
    cluster = ClusterModel(costs, provers, block_seconds)
    cluster.events.run_until(blocks // 2 * block_seconds)
    busy_before, confirmed_before = cluster.busy_seconds(), cluster.confirmed
    cluster.events.run_until((blocks // 2 + blocks) * block_seconds)
    seconds = blocks * block_seconds
    busy = {name: (after - busy_before[name]) / seconds for name, after in cluster.busy_seconds().items()}
    return CapacityResult((cluster.confirmed - confirmed_before) / seconds, busy, _find_limit(busy))


def _find_limit(busy: Mapping[str, float]) -> str:
    """Return the limiting resource: the last saturated one in processing order.

    Resources before it only fill its waiting queue.
    """
    saturated = [
        name
        for name in (LIMIT_CHAIN, LIMIT_SENDER, LIMIT_BLOCK_READING, LIMIT_DATABASE, LIMIT_PROOFS)
        if busy[name] >= SATURATION_RATIO
    ]
    # If hosts wait for batched work, no resource is saturated.
    return saturated[0] if saturated else max((LIMIT_BLOCK_READING, LIMIT_DATABASE), key=busy.__getitem__)


def find_saturation(costs: ShareCosts, block_seconds: float, max_hosts: int) -> tuple[int, str] | None:
    """Find the smallest number of hosts at which proofs are not the limit.

    Returns that number and the limiting resource, or None if it exceeds `max_hosts`.
    """
    if simulate_cluster(costs, max_hosts, block_seconds).limit == LIMIT_PROOFS:
        return None
    below, at = 0, max_hosts
    while at - below > 1:
        middle = (below + at) // 2
        if simulate_cluster(costs, middle, block_seconds).limit == LIMIT_PROOFS:
            below = middle
        else:
            at = middle
    return at, simulate_cluster(costs, at, block_seconds).limit
