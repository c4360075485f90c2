"""The measured costs carried to many hosts: a simulation of events, with no clock and no dice. Pure.

Hosts that prove take shares from a queue that never gets empty. Each share costs the database's server CPU (taken in,
claimed, kept, sent), a core of its host the proof and the host's own work, the one sender its time, and the chain a
place in a block. Every host reads every block into the database, one after the other: the first finds the shares that
were counted, all others that there is nothing left to do. Hosts that have fallen behind the chain wait until they know
what it says. What is slowest sets the rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Final

BLOCK: Final = 256
"""Reveals that fit a block."""
HOST_CORES: Final = 2
SERVER_CORES: Final = 2
AHEAD: Final = 2
"""Shares that a host has in hand for each core: the one that is proven and the next."""
IN_FLIGHT: Final = 16
"""Reveals that the sender has under way at once."""
FULL: Final = 0.95
"""A part of its time from which on something counts as what limits all."""
BEHIND: Final = 2
"""Blocks that may be unread while hosts go on."""
LEAST_SECONDS: Final = 30.0
LEAST_BLOCKS: Final = 6
"""How long is looked at, after half as long that is not."""

PROOFS, SENDER, DATABASE, READING, CHAIN = "proofs", "the sender", "the database", "reading blocks", "the chain"


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds a share.

    Attributes:
        proof: of a core that proves.
        host: of the same core, beside the proof.
        database: of a core of the server: taking in, claiming, keeping the message.
        sender: of the sender, which sends one after the other.
        sent: of a core of the server for it.
        counted: of whoever reads a block first, for each reveal in it.
        counted_database: of a core of the server for it.
        again: of each other host that reads it, for each reveal in it.
        again_database: of a core of the server for it.
    """

    proof: float
    host: float = 0.0
    database: float = 0.0
    sender: float = 0.0
    sent: float = 0.0
    counted: float = 0.0
    counted_database: float = 0.0
    again: float = 0.0
    again_database: float = 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """What came of it.

    Attributes:
        rate: reveals counted in a second.
        busy: for what part of the time everything was busy, by its name.
        limit: what sets the rate.
    """

    rate: float
    busy: Mapping[str, float]
    limit: str


class Events:
    """What happens when: no two at the same time in an order that is not that of their coming."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        self._number += 1
        heappush(self._coming, (self.now + seconds, self._number, what))

    def run(self, until: float) -> None:
        """Let time go on."""
        while self._coming and self._coming[0][0] <= until:
            self.now, _, what = heappop(self._coming)
            what()
        self.now = until


class Station:
    """Some that serve, and a line before them.

    Attributes:
        spent: seconds of service that were begun so far.
    """

    def __init__(self, events: Events, servers: int) -> None:
        self._events = events
        self._free = self.servers = servers
        self._line: deque[tuple[float, Callable[[], None]]] = deque()
        self.spent = 0.0

    def serve(self, seconds: float, done: Callable[[], None]) -> None:
        """Serve for so long when it is its turn."""
        self._line.append((seconds, done))
        self._next()

    @property
    def waiting(self) -> int:
        """How many stand in the line."""
        return len(self._line)

    def _next(self) -> None:
        while self._free and self._line:
            seconds, done = self._line.popleft()
            self._free -= 1
            self.spent += seconds
            self._events.after(seconds, partial(self._end, done))

    def _end(self, done: Callable[[], None]) -> None:
        self._free += 1
        done()
        self._next()


class Host:
    """One that proves.

    Attributes:
        cores: make the proofs.
        wanted: shares that it has room for.
        asking: it waits for the database: one connection writes, and asks for one thing after the other.
    """

    def __init__(self, events: Events) -> None:
        self.cores = Station(events, HOST_CORES)
        self.wanted = 0
        self.asking = False


class Cluster:
    """Hosts, their database, the sender and the chain."""

    def __init__(self, costs: Costs, provers: int, block_seconds: float) -> None:
        self._costs, self._provers, self._block_seconds = costs, provers, block_seconds
        self.events = Events()
        self.database = Station(self.events, SERVER_CORES)
        self.hosts = [Host(self.events) for _ in range(provers)]
        self.sender = Station(self.events, 1)
        self.reading = Station(self.events, 1)
        self.counted = self.full = 0
        self._held_up: deque[Host] = deque()
        self._prepared = self._under_way = self._mempool = 0
        in_hand = HOST_CORES * AHEAD
        # Not all at the same moment, as hosts are not that have worked for long.
        for number, host in enumerate(self.hosts):
            for one in range(in_hand):
                wait = (number + one * provers) / (provers * in_hand) * costs.proof
                self.events.after(wait, partial(self._want, host))
        self.events.after(block_seconds, self._block)

    def _want(self, host: Host) -> None:
        host.wanted += 1
        self._claim(host)

    def _claim(self, host: Host) -> None:
        if host.asking or not host.wanted:
            return
        host.asking = True
        host.wanted -= 1
        if self._behind:
            self._held_up.append(host)
        else:
            self._ask(host)

    def _ask(self, host: Host) -> None:
        self.database.serve(self._costs.database, partial(self._prove, host))

    def _prove(self, host: Host) -> None:
        host.asking = False
        host.cores.serve(self._costs.proof + self._costs.host, partial(self._proven, host))
        self._claim(host)

    def _proven(self, host: Host) -> None:
        self._want(host)
        self._prepared += 1
        self._send()

    def _send(self) -> None:
        while self._prepared and self._under_way < IN_FLIGHT and not self._behind:
            self._prepared -= 1
            self._under_way += 1
            self.sender.serve(self._costs.sender, self._note)

    def _note(self) -> None:
        self.database.serve(self._costs.sent, self._sent)

    def _sent(self) -> None:
        self._under_way -= 1
        self._mempool += 1
        self._send()

    def _block(self) -> None:
        count = min(BLOCK, self._mempool)
        self._mempool -= count
        self.counted += count
        self.full += count == BLOCK
        self._read(count * self._costs.counted, count * self._costs.counted_database)
        for _ in range(self._provers):  # the sender is one more, and one was first
            self._read(count * self._costs.again, count * self._costs.again_database)
        self.events.after(self._block_seconds, self._block)

    def _read(self, seconds: float, database: float) -> None:
        self.reading.serve(seconds, self._was_read)
        self.database.serve(database, _nothing)

    def _was_read(self) -> None:
        if not self._behind:
            while self._held_up:
                self._ask(self._held_up.popleft())
            self._send()

    @property
    def _behind(self) -> bool:
        return self.reading.waiting > BEHIND * (self._provers + 1)

    def spent(self) -> dict[str, float]:
        """Seconds that everything was busy so far."""
        return {
            PROOFS: sum(host.cores.spent for host in self.hosts) / (self._provers * HOST_CORES),
            DATABASE: self.database.spent / SERVER_CORES,
            READING: self.reading.spent,
            SENDER: self.sender.spent,
            CHAIN: self.full * self._block_seconds,
        }


def _nothing() -> None:
    pass


def carry(costs: Costs, provers: int, block_seconds: float) -> Found:
    """What so many hosts bring to a chain with such blocks.

    Args:
        costs: what a share costs.
        provers: hosts that prove, each with `HOST_CORES` cores.
        block_seconds: between two blocks.
    """
    blocks = max(LEAST_BLOCKS, round(LEAST_SECONDS / block_seconds))
    cluster = Cluster(costs, provers, block_seconds)
    cluster.events.run(blocks // 2 * block_seconds)
    spent, counted = cluster.spent(), cluster.counted
    cluster.events.run((blocks // 2 + blocks) * block_seconds)
    seconds = blocks * block_seconds
    busy = {name: (after - spent[name]) / seconds for name, after in cluster.spent().items()}
    return Found((cluster.counted - counted) / seconds, busy, _limit(busy))


def _limit(busy: Mapping[str, float]) -> str:
    """What sets the rate: the last on a share's way that is always busy. What comes before it only fills the line."""
    full = [name for name in (CHAIN, SENDER, READING, DATABASE, PROOFS) if busy[name] >= FULL]
    # Where hosts wait for what comes in pieces, nothing is busy all the time.
    return full[0] if full else max((READING, DATABASE), key=busy.__getitem__)


def knee(costs: Costs, block_seconds: float, most: int) -> tuple[int, str] | None:
    """From which number of hosts on it is not proofs that limit, and what it is; None where that is beyond `most`."""
    if carry(costs, most, block_seconds).limit == PROOFS:
        return None
    below, found = 0, most
    while found - below > 1:
        middle = (below + found) // 2
        if carry(costs, middle, block_seconds).limit == PROOFS:
            below = middle
        else:
            found = middle
    return found, carry(costs, found, block_seconds).limit
