"""Two hosts reveal the shares of one queue: every interleaving of their commits and sends, with faults between any two.

The product runs: `Revealer`, `Sender`, `RoundClosing`, and the store's operations on SQLite in memory. The environment
is drawn here: time, blocks, nodes, the lease, and which host continues. A coroutine in progress is the log of what it
was answered, and is run again from its start for each step. A host's memory is lost in a crash. Node penalties, which
only order the nodes, are forgotten between two tasks. The chain has the constants of `SCALED`, so that few blocks show
all.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from helper.chain import agreement
from helper.chain.broadcast_outcome import BroadcastOutcome, Verdict
from helper.chain.chain_data import Anchor, Round, RoundStatus, TxResult
from helper.chain.node import NO_PENALTY
from helper.chain.round_registry import to_stored_round
from helper.core.share import ShareState
from helper.errors import ProofFailed, StoreError
from helper.reveal import revealer, round_closing, send_policy, sender
from helper.reveal.revealer import RetrySchedule, Revealer
from helper.reveal.round_closing import RoundClosing
from helper.reveal.send_policy import SendState
from helper.reveal.sender import Sender
from helper.store import blocks, ledger, rounds, shares
from helper.store.models import QueueFilter
from helper.store.sqlite.schema import migrations
from helper.store.sqlite.transaction import SqliteTransaction
from helper.store.table_rows import ShareRow
from helper.store.transaction import DatabaseKeys
from proofs import Proved
from tests.explorer.search import BrokenPromiseError, Exploration, Label, explore, replace_at
from tests.support.fakes import create_share, nullifier_of
from tests.support.partial_store import PartialStore

ROUND: Final = b"\x01" * 32
START: Final = 1_795_268_000.0
BLOCK_SECONDS: Final = 6.0
SCALED: Final[Mapping[str, Any]] = {
    "REPROVE_BLOCKS": 2,
    "REPROVE_SECONDS": 12.0,
    "INCLUSION_WAIT_BLOCKS": 1,
    "SPENT_WAIT_BLOCKS": 2,
}
TAIL_BLOCKS: Final = 12
"""Blocks after the last fault until every share must have ended."""
FALSE_BLOCKS: Final = 50
"""How far a false head is ahead."""
FAILED_PROOF: Final = ProofFailed("failed")
TERM: Final = "start_term"
"""In the log of a task: the host acquired the lease."""
LIVE: Final = {ShareState.WAITING, ShareState.PROVING, ShareState.SENT}


class Env(NamedTuple):
    """What a host sees during one step. `fence` is that of the lease, 0 without it."""

    height: int
    head: int
    offset: float
    fence: int

    @property
    def monotonic(self) -> float:
        return self.height * BLOCK_SECONDS + 1

    @property
    def wall(self) -> float:
        return START + self.monotonic + self.offset


class Task(NamedTuple):
    """A coroutine in progress: how it began, what it was answered, and what it waits for."""

    kind: str
    share: int
    argument: Any
    since: float
    before: Any
    log: tuple[tuple[Env, Any], ...]
    pending: str = ""


class Slot(NamedTuple):
    """What a host knows and does about one share: its send state, a proof, a send, a call without a response."""

    state: Any = None
    prove: Task | None = None
    send: Task | None = None
    late: Any = None


class Host(NamedTuple):
    since: float
    fences: tuple[tuple[int, int], ...]
    slots: tuple[Slot, ...]
    main: Task | None = None


class Sent(NamedTuple):
    """What was really sent of a share, which no function sees. True heights.

    Attributes:
        last: of the last send, -1 before it.
        first: at which the first send of the newest message was recorded, None before it.
        refusers: nodes that refused this message.
        is_excused: whether an operator has asked for a new proof since.
    """

    last: int = -1
    first: int | None = None
    refusers: frozenset[str] = frozenset()
    is_excused: bool = False


class World(NamedTuple):
    """The state of the search.

    Attributes:
        db: number of the database's content.
        counted: for each share, the height of the block that contains its reveal.
        mempool: shares whose reveal the nodes hold.
        lease: its holder, -1 for none, and its fencing token.
        claims: (share, host, fencing token, whether it has expired).
        offset: seconds by which the hosts' wall clock was set.
        faults: faults that may still happen.
    """

    db: int
    height: int
    closed_at: int | None
    counted: tuple[int | None, ...]
    mempool: frozenset[int]
    lease: tuple[int, int]
    claims: tuple[tuple[int, int, int, bool], ...]
    hosts: tuple[Host, ...]
    sent: tuple[Sent, ...]
    offset: float
    faults: int


class Facts(NamedTuple):
    """What the checks read of a database: live shares with their states, tombstones, the round's report, the ledger."""

    live: Mapping[int, ShareState]
    confirmed: int
    is_reported: bool
    ledger: ledger.Ledger


class Request:
    """What a coroutine waits for."""

    def __init__(self, kind: str, *details: Any, **options: Any) -> None:
        self.kind, self.details, self.options = kind, details, options

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self)


class Ignored:
    """Statistics and logs."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


@dataclass(slots=True)
class HostTransaction(SqliteTransaction):
    """A transaction of one of several hosts, with claims and the lease as on PostgreSQL."""

    host: int = 0
    holder: int = -1
    claims: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    last_fence: int = 0

    def acquire_claim(self, share_id: int) -> None:
        self.last_fence += 1
        self.claims[share_id] = (self.host, self.last_fence, False)
        self.fences[share_id] = self.last_fence

    def release_claim(self, share_id: int) -> None:
        self.claims.pop(share_id, None)
        self.fences.pop(share_id, None)

    def has_claim(self, row: ShareRow) -> bool:
        fence = self.fences.get(row.id)
        if fence is None:
            return row.state != ShareState.PROVING
        return self.claims.get(row.id, (-1, -1))[:2] == (self.host, fence)

    def expired_claims(self, limit: int) -> list[int]:
        held = self.fences.values()
        return [share for share, (_, fence, expired) in self.claims.items() if expired and fence not in held][:limit]

    def orphaned_claims(self, limit: int) -> list[int]:
        claimed = [row[0] for row in self.fetch_all("shares_in_state", {"state": 1, "limit": limit})]
        return [share for share in claimed if share not in self.claims or self._is_orphaned(*self.claims[share])]

    def _is_orphaned(self, host: int, _fence: int, expired: bool) -> bool:
        return host == self.host or expired

    def can_send(self) -> bool:
        return self.host == self.holder


def _clock_at(wall: float) -> Any:
    return SimpleNamespace(now=lambda: wall)


class StepStore(PartialStore):
    """The store's methods. Each commit and each read is a request to the model."""

    def __init__(self, keys: DatabaseKeys) -> None:
        self._reader = SimpleNamespace(fetch=self._fetch)
        self._writer: Any = SimpleNamespace(keys=keys)

    async def run(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return await Request("commit", op, *args, **kwargs)

    async def _fetch(self, name: str, params: Any = ()) -> Any:
        return await Request("read", name, params)


class StepCall:
    """A send to a node in place of `SendCall`."""

    def __init__(self, node: Any, message: Any, clock: Any, outcome: BroadcastOutcome | None = None) -> None:
        self.node, self.written_at, self._outcome = node, clock.monotonic(), outcome

    async def wait(self) -> Any:
        return await Request("send", self.node.name)

    async def finish(self) -> Any:
        return self._outcome


class HostProcess:
    """The objects of a host's process, made anew for each run of a coroutine. `env` is what they see."""

    def __init__(self, env: Env, keys: DatabaseKeys, since: float, states: Mapping[int, Any]) -> None:
        self.env, self.selected = env, list[int]()
        self.late: Any = None
        client = SimpleNamespace(tx=lambda _hash: Request("tx"), response_wait=1.0)
        nodes = [SimpleNamespace(name=name, penalty=NO_PENALTY, client=client) for name in "AB"]
        clock = SimpleNamespace(now=lambda: self.env.wall, monotonic=lambda: self.env.monotonic)
        store = StepStore(keys)
        pool: Any = _Pool(self, nodes)
        lease: Any = _Lease(self)
        chain_rounds: Any = SimpleNamespace(
            get=lambda _round: None,
            view=lambda _round: SimpleNamespace(latest_end=0),
            chain_now=lambda: START + self.env.height * BLOCK_SECONDS,
            is_closed=self._is_closed,
            frozen_reason=lambda _round: None,
            forget=lambda _round: None,
            revision=1,
        )
        circuits = SimpleNamespace(
            refusers={},
            is_unproven=lambda _circuit: False,
            is_outdated=lambda _circuit, _share_id, was_sent: False,
            record_accepted=lambda _circuit, _node: None,
            circuit_for=lambda _kind, _share_id: "k11",
            use_other=lambda _share_id, _circuit: None,
            forget_share=lambda _share_id: None,
        )
        # Both nodes serve the root of every proof, and every proof is valid.
        trees: Any = SimpleNamespace(find_anchor=self._find_anchor, path=self._find_path, serves_root=lambda *_: True)
        ignored: Any = Ignored()
        shared: Any = {"store": store, "clock": clock, "stats": ignored}
        retries = RetrySchedule(store=store, node_pool=pool, rounds=chain_rounds, stats=ignored, quick_retries=5)
        both: Any = {**shared, "node_pool": pool, "trees": trees, "circuits": circuits, "retries": retries}
        prover: Any = SimpleNamespace(prove=self._prove, verify=self._verify)
        self.revealer = Revealer(**both, rounds=chain_rounds, prover=prover, proof_times=ignored)
        self.sender = Sender(**both, verifier=prover, lease=lease)
        self.closing = RoundClosing(**shared, rounds=chain_rounds, purge_after=BLOCK_SECONDS, lease=lease)
        self.store, self._clock, self._nodes = store, clock, nodes
        self.sender._sending_since = since
        for share, stored in states.items():
            self._restore(share, stored)

    async def _is_closed(self, _round: bytes) -> bool:
        return True  # the model starts it only then

    def _find_anchor(self, *_: Any, **__: Any) -> Anchor:
        return Anchor(height=self.env.height, size=8, root=b"\x0a" * 32)

    async def _find_path(self, *_: Any) -> bytes:
        return b""

    async def _prove(self, _circuit: str, share: Any, _path: bytes, **options: Any) -> Proved:
        await options["begin"]()
        await Request("prove")
        nullifier = nullifier_of(share.primary_blind)
        return Proved(b"%d" % self.env.height, nullifier, b"\x0a" * 32)

    async def _verify(self, *_: Any) -> bool:
        return True

    def _restore(self, share: int, stored: Any) -> None:
        if stored is not None:
            (fence, message_at, ended_at, sent_at, last, unanswered, verdicts, tx_hash), wait = stored
            values = ended_at, dict(sent_at), *last, [*unanswered], dict(verdicts), tx_hash
            state = SendState(fence, None, message_at, 0.0, *values)
            self.sender._states._by_share[share] = state
            if wait is not None:
                self.sender._states._waits[share] = wait

    def snapshot(self, share: int) -> Any:
        state, wait = self.sender._states._by_share.get(share), self.sender._states._waits.get(share)
        if state is None:
            return None
        dicts = (
            tuple(sorted(state.sent_at.items())),
            (state.last_node, state.sends_in_a_row),
            tuple(state.unanswered),
            tuple(sorted(state.verdicts.items(), key=str)),
        )
        return (state.fence, state.message_sent_at, state.ended_at, *dicts, state.tx_hash), wait

    def begin(self, task: Task, values: Sequence[Any]) -> Coroutine[Any, Any, Any]:
        if task.kind == "prove":
            return self.revealer.prove(values[task.argument])
        if task.kind == "late":
            reveal, node, fence, outcome = values[task.argument]
            call: Any = StepCall(self._nodes["AB".index(node)], None, self._clock, outcome)
            return self.sender._await_late_outcome(reveal, call, self.sender._states.get(task.share), fence)
        if task.kind == "send":
            return self.sender.send(task.share)
        return self.closing.run_once() if task.kind == "closing" else self.store.run_batches(shares.recover)

    async def select(self) -> None:
        await self.sender.reconcile()
        await self.sender.send_new()

    def create_task(self, late: Any) -> Any:
        """Keep what a call without a response needs, in place of the task that waits for it."""
        values = late.cr_frame.f_locals
        self.late = values["reveal"], values["call"].node.name, values["fence"]
        late.close()
        return Ignored()


class _Lease:
    def __init__(self, process: HostProcess) -> None:
        self._process = process

    @property
    def fence(self) -> int:
        return self._process.env.fence

    @property
    def is_held(self) -> bool:
        return self._process.env.fence > 0


class _Pool:
    """Two honest nodes in sync, except for a head that is false for one step."""

    needed = 2

    def __init__(self, process: HostProcess, nodes: Sequence[Any]) -> None:
        self._process, self.nodes, self.usable_nodes, self.in_sync_nodes = process, nodes, nodes, nodes

    @property
    def head(self) -> Any:
        return SimpleNamespace(height=self._process.env.head, time=START + self._process.env.height * BLOCK_SECONDS)

    @property
    def agreed_height(self) -> int:
        return self._process.env.height

    @property
    def greatest_height(self) -> int:
        return max(self._process.env.head, self._process.env.height)

    def wall_time(self) -> float:
        return self._process.env.wall

    def nodes_with_head_since(self, monotonic: float) -> set[str]:
        return {"A", "B"} if self._process.env.height * BLOCK_SECONDS > monotonic else set()

    def start_backoff(self, *_: Any) -> None:
        pass


class TwoHosts:
    """The model of one search.

    Args:
        kinds: the faults that happen, and "close" if the round may close, separated by spaces.
        count: number of shares; the second one is due one block later.
        hosts: number of hosts.
        height: the greatest height at which faults happen and the round closes.
        faults: the number of faults.
    """

    def __init__(self, kinds: str, *, faults: int, height: int, count: int = 1, hosts: int = 2) -> None:
        self._ids, self._greatest, self._faults = range(1, count + 1), height, faults
        self._kinds, self._hosts = frozenset(kinds.split()), range(hosts)
        self._keys = DatabaseKeys(bytes(32), bytes(32))
        self._conn = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
        self._conn.executescript(f"PRAGMA page_size = 512; {' '.join(migrations())}; PRAGMA foreign_keys = ON")
        self._contents, self._facts, self._numbers = list[bytes](), list[Facts](), dict[Any, int]()
        self._memo = dict[Any, Any]()
        self._values, self._value_numbers = list[Any](), dict[Any, int]()
        self._next = dict[World, World]()
        self._process: HostProcess
        self.edges = set[tuple[ShareState, ShareState]]()
        posted = [create_share(n, int(START + BLOCK_SECONDS + 1) if n > 1 else 0, ROUND) for n in self._ids]
        self._nullifiers = [nullifier_of(share.primary_blind) for share in posted]
        self._due = [max(share.submit_at, START + 1) for share in posted]
        tx = HostTransaction(self._keys, self._conn, 1, clock=_clock_at(START))
        rounds.save_rounds(tx, [to_stored_round(Round(ROUND, RoundStatus.ACTIVE, int(START) + 10**6, (), 1))], START)
        blocks.begin_ledger(tx, 1)
        operations = [shares.EnqueueOperation(share, nullifier_of(share.primary_blind), START + 1) for share in posted]
        shares.enqueue_all(tx, operations)
        tx.flush_counts()
        self._first = self._intern()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Within it, the product's classes take the model's steps in place of asyncio and of the network."""

        async def gather(items: Sequence[int], *_: Any) -> None:
            self._process.selected += items

        def start(late: Any) -> Any:
            return self._process.create_task(late)

        replaced: dict[str, Any] = {
            "asyncio": SimpleNamespace(create_task=start, Lock=asyncio.Lock),
            "anyio": SimpleNamespace(move_on_after=nullcontext),  # a node's response is a step, however late
            "SendCall": StepCall,
            "gather_limited": gather,
        }
        with ExitStack() as stack:
            stack.enter_context(patch.multiple(sender, **replaced))
            stack.enter_context(patch.multiple(send_policy, **SCALED))
            for module in (sender, round_closing, revealer):
                stack.enter_context(patch.object(module, "log", Ignored()))
            yield

    def explore(self) -> Exploration:
        """Search all states, and check that each leads to the end of every share once faults stop."""
        with self.patched():
            result = explore(self)
        self.check_ends()
        return result

    def initial(self) -> World:
        empty = Host(-1.0, (), (Slot(),) * len(self._ids))
        nothing, unsent = (None,) * len(self._ids), (Sent(),) * len(self._ids)
        hosts = (empty,) * len(self._hosts)
        return World(self._first, 0, None, nothing, frozenset(), (0, 1), (), hosts, unsent, 0.0, self._faults)

    def steps(self, world: World) -> Iterator[tuple[Label, World]]:
        """Every step; the first one that is no fault is the fair one."""
        if not self._facts[world.db].live or (world.height > self._greatest and self._has_ended(world)):
            return
        for is_fault, label, after in self._moves(world):
            if after == world or (label[0] not in self._kinds and (is_fault or label[0] == "close")):
                continue
            if not is_fault and world not in self._next:
                self._next[world] = after
            if world.height <= self._greatest or not is_fault:
                yield label, after
            if world.height > self._greatest and world in self._next:
                return

    def check(self, world: World) -> None:
        if world.height > self._greatest + TAIL_BLOCKS and not self._has_ended(world):
            raise BrokenPromiseError(f"{TAIL_BLOCKS} blocks after the last fault: {dict(self._facts[world.db].live)}")

    def check_ends(self) -> None:
        """Check that every state leads to the end of every share, once faults stop. Call it after the search."""
        good = set[World]()
        for start in list(self._next):
            way, world = dict.fromkeys([start]), start
            while world not in good and not self._has_ended(world):
                if world not in self._next or self._next[world] in way:
                    raise BrokenPromiseError(f"no step leads on without a fault: {world}")
                world = self._next[world]
                way[world] = None
            good.update(way)

    def _has_ended(self, world: World) -> bool:
        """Whether each share is counted, or failed in a closed round or because two nodes refused it."""
        live = self._facts[world.db].live
        return all(
            share not in live
            or (
                live[share] is ShareState.FAILED
                and (world.closed_at is not None or len(world.sent[share - 1].refusers) > 1)
            )
            for share in self._ids
        )

    # ---------------------------------------------------------------- moves

    def _moves(self, world: World) -> Iterator[tuple[bool, Label, World]]:  # noqa: PLR0912
        """All moves: (whether it is a fault, label, state after it), in the order of a fair schedule."""
        can_fail = world.faults > 0 and world.height <= self._greatest
        failing = world._replace(faults=world.faults - 1)
        for number, host in enumerate(world.hosts):
            for task in (host.main, *(task for slot in host.slots for task in (slot.prove, slot.send))):
                if task is not None:
                    yield from self._continue(world, number, task)
        if world.lease[0] < 0:
            for number in self._hosts:
                yield False, ("acquire", number), self._acquire(world, number)
        for number, host in enumerate(world.hosts):
            for share, slot in zip(self._ids, host.slots, strict=True):
                if slot.late is not None and slot.send is None:
                    yield from self._respond_late(world, number, share, slot)
        yield from self._read_block(world, failing if can_fail else None)
        holder = world.lease[0]
        if holder >= 0:
            if world.hosts[holder].main is None and self._is_closed(world):
                yield from self._start(world, holder, Task("closing", 0, None, -1.0, None, ()))
            heads = [(world, 0), (failing, FALSE_BLOCKS)] if can_fail else [(world, 0)]
            for before, extra in heads:
                for share in self._select(before, holder, extra):
                    slot = before.hosts[holder].slots[share - 1]
                    if slot.send is None:
                        task = Task("send", share, None, before.hosts[holder].since, slot.state, ())
                        for _, label, after in self._start(before, holder, task, extra):
                            yield extra > 0, ("false_head", *label) if extra else label, after
        if world.closed_at is None:
            yield from self._claim(world, can_fail)
            everything = tuple(sorted(world.mempool))
            for size in range(len(everything), -1, -1):
                for included in combinations(everything, size):
                    yield False, ("block", *included), self._add_block(world, included)
            if world.height <= self._greatest:
                yield False, ("close",), world._replace(closed_at=world.height, mempool=frozenset())
        elif self._facts[world.db].live:
            yield False, ("block",), self._add_block(world, ())
        if world.height <= self._greatest:
            yield from self._operator_retry(world)
        if can_fail:
            yield from self._faults_of(failing)

    def _faults_of(self, world: World) -> Iterator[tuple[bool, Label, World]]:
        for number in self._hosts:
            yield True, ("crash", number), self._crash(world, number)
        if world.lease[0] >= 0:
            yield True, ("lose_lease",), self._lose_lease(world)
        for share, host, fence, _ in world.claims:
            claims = tuple(c if c[0] != share else (share, host, fence, True) for c in world.claims)
            yield True, ("claim_expires", share), world._replace(claims=claims)
        if not world.offset:
            yield True, ("clock_back",), world._replace(offset=-BLOCK_SECONDS)

    def _operator_retry(self, world: World) -> Iterator[tuple[bool, Label, World]]:
        live = self._facts[world.db].live
        closed = frozenset({ROUND} if self._is_closed(world) else ())
        options = {"closed": closed, "note": "", "dry_run": False}
        _, after = self._commit(world, 0, Request("commit", shares.retry_failed, tuple(live), QueueFilter(), **options))
        sent = [
            one._replace(is_excused=True) if live.get(share) is ShareState.FAILED else one
            for share, one in zip(self._ids, after.sent, strict=True)
        ]
        if after.db != world.db:
            # It costs no fault, because the failure before it did.
            yield True, ("operator_retry",), after._replace(sent=tuple(sent), faults=world.faults)

    def _lose_lease(self, world: World) -> World:
        """What the next term would forget is forgotten now, so that there are fewer states."""
        holder, fence = world.lease
        after = self._acquire(world, holder)
        host, before = after.hosts[holder], world.hosts[holder]
        slots = [a._replace(send=b.send) for a, b in zip(host.slots, before.slots, strict=True)]
        hosts = replace_at(after.hosts, holder, host._replace(since=-1.0, slots=tuple(slots)))
        return after._replace(lease=(-1, fence), hosts=hosts)

    def _crash(self, world: World, number: int) -> World:
        host = Host(-1.0, (), (Slot(),) * len(self._ids))
        lease = (-1, world.lease[1]) if world.lease[0] == number else world.lease
        world = world._replace(hosts=replace_at(world.hosts, number, host), lease=lease)
        if not any(claim[1] == number for claim in world.claims):
            return world
        ((_, _, after),) = self._start(world, number, Task("recover", 0, None, -1.0, None, ()))
        return after

    def _acquire(self, world: World, number: int) -> World:
        """Give the lease to a host. Its sender begins a term."""
        world = world._replace(lease=(number, world.lease[1] + 1))
        env, host = self._env(world, number), world.hosts[number]
        process = HostProcess(
            env, self._keys, host.since, {s: x.state for s, x in zip(self._ids, host.slots, strict=True)}
        )
        process.sender.start_term()
        slots = [
            slot._replace(state=process.snapshot(share), send=_with_log(slot.send, env, self._number(TERM)))
            for share, slot in zip(self._ids, host.slots, strict=True)
        ]
        host = host._replace(since=env.monotonic, slots=tuple(slots))
        return world._replace(hosts=replace_at(world.hosts, number, host))

    def _add_block(self, world: World, included: Sequence[int]) -> World:
        height = world.height + 1
        counted = tuple(height if share in included else at for share, at in zip(self._ids, world.counted, strict=True))
        faults = world.faults if height <= self._greatest else 0
        mempool = world.mempool.difference(included)
        return world._replace(height=height, counted=counted, mempool=mempool, faults=faults)

    def _read_block(self, world: World, failing: World | None) -> Iterator[tuple[bool, Label, World]]:
        """Read the next block from both nodes. One may invent or omit a reveal."""
        known = self._facts[world.db].ledger
        for height in ledger.next_heights(known, (0, world.height), {}, 0.0, 1):
            true = frozenset(share for share in self._ids if world.counted[share - 1] == height)
            others = [true ^ {share} for share in self._ids if world.counted[share - 1] in (None, height)]
            for block, before in [(true, world), *((block, failing) for block in others)]:
                if before is None:
                    continue
                agreed = agreement.agreed_block({"A": true, "B": block}, 2, 2)
                if isinstance(agreed, frozenset):
                    spent = tuple(sorted((ROUND, self._nullifiers[share - 1]) for share in agreed))
                    request = Request("commit", blocks.apply_blocks, ((height, height),), spent)
                    yield (
                        block != true,
                        ("read" if block == true else "lie", height, *block),
                        self._commit(before, 0, request)[1],
                    )

    def _claim(self, world: World, can_fail: bool) -> Iterator[tuple[bool, Label, World]]:
        for number, host in enumerate(world.hosts):
            if host.main is None and not any(slot.prove for slot in host.slots):
                now = self._env(world, number).wall
                claimed, after = self._commit(
                    world, number, Request("commit", shares.claim_due, now=now, limit=1, rounds=(ROUND,))
                )
                for queued in claimed:
                    task = Task("prove", queued.id, self._number(queued), -1.0, None, ())
                    for is_fault, label, proven in self._start(after, number, task):
                        if not is_fault or can_fail:
                            yield is_fault, ("claim", *label), proven
                if not claimed:
                    yield False, ("requeue_expired", number), after

    def _respond_late(self, world: World, number: int, share: int, slot: Slot) -> Iterator[tuple[bool, Label, World]]:
        argument = self._number((*self._values[slot.late], self._outcome(world, share)))
        world = _with_slot(world, number, share, late=None)
        task = Task("late", share, argument, world.hosts[number].since, slot.state, ())
        yield from self._start(world, number, task)

    def _outcome(self, world: World, share: int) -> BroadcastOutcome:
        if world.counted[share - 1] is not None:
            return BroadcastOutcome(Verdict.SPENT)
        return BroadcastOutcome(Verdict.ACCEPTED if world.closed_at is None else Verdict.ROUND_CLOSED)

    # ---------------------------------------------------------------- tasks

    def _env(self, world: World, number: int, extra: int = 0) -> Env:
        holder, fence = world.lease
        return Env(world.height, world.height + extra, world.offset, fence if holder == number else 0)

    def _is_closed(self, world: World) -> bool:
        """Whether the chain has closed the round, and every block until then was read."""
        closed_at = world.closed_at
        return closed_at is not None and ledger.is_read(self._facts[world.db].ledger, 1, closed_at)

    def _select(self, world: World, number: int, extra: int) -> list[int]:
        """The shares that the sender of this host follows up now."""
        host, env = world.hosts[number], self._env(world, number, extra)
        key = ("select", world.db, env, host.since, tuple(slot.state for slot in host.slots))
        if key not in self._memo:
            states = {share: slot.state for share, slot in zip(self._ids, host.slots, strict=True)}
            self._process = HostProcess(env, self._keys, host.since, states)
            coroutine, answer = self._process.select(), None
            while True:
                try:
                    request = coroutine.send(answer)
                except StopIteration:
                    break
                answer = self._fetch(world, request)
            self._memo[key] = sorted(set(self._process.selected))
        selected: list[int] = self._memo[key]
        return selected

    def _start(self, world: World, number: int, task: Task, extra: int = 0) -> Iterator[tuple[bool, Label, World]]:
        yield from self._run(world, number, task, self._env(world, number, extra), None)

    def _continue(self, world: World, number: int, task: Task) -> Iterator[tuple[bool, Label, World]]:
        """Commit, or deliver the response to a send."""
        env, share = self._env(world, number), task.share
        if task.pending == "commit":
            yield from self._run(world, number, task, env, self._commit)
            return
        if task.pending == "prove":
            yield from self._run(world, number, task, env, None, is_answer=True)
            if world.faults:
                failing = world._replace(faults=world.faults - 1)
                for _, label, after in self._run(failing, number, task, env, FAILED_PROOF, is_answer=True):
                    yield True, ("proof_fails", *label), after
            return
        if task.pending.startswith("result"):
            value = self._values[int(task.pending.split()[1])]
            yield from self._run(world, number, task, env, value, is_answer=True)
            return
        _, node, has_left = task.pending.split()
        outcome = self._outcome(world, share)
        answers: list[tuple[str, BroadcastOutcome | None]] = [("response", outcome), ("late", None)]
        answers.append(("lost", BroadcastOutcome(Verdict.AMBIGUOUS)))
        answers.append(("refused", BroadcastOutcome(Verdict.PERMANENT)))
        if has_left != "left":
            answers = [("no_connection", BroadcastOutcome(Verdict.UNAVAILABLE, may_be_sent=False))]
        for name, answer in answers:
            after, is_fault = world, name not in ("response", "no_connection")
            if is_fault:
                if not world.faults or world.height > self._greatest:
                    continue
                after = after._replace(faults=after.faults - 1)
            if name == "refused":
                one = after.sent[share - 1]
                one = one._replace(refusers=one.refusers | {node})
                after = after._replace(sent=replace_at(after.sent, share - 1, one))
            for other_fault, label, result in self._run(after, number, task, env, answer, is_answer=True):
                yield is_fault or other_fault, (name, *label), result

    def _run(  # noqa: PLR0912
        self, world: World, number: int, task: Task, env: Env, answer: Any, *, is_answer: bool = False
    ) -> Iterator[tuple[bool, Label, World]]:
        """Run a task up to its next commit or its next response, in each way that its environment permits."""
        label: Label = (task.kind, number, task.share)
        process = self._process = HostProcess(
            task.log[0][0] if task.log else env, self._keys, task.since, {task.share: task.before}
        )
        coroutine, log, request, value = process.begin(task, self._values), list(task.log), None, None
        position, is_new = 0, False
        if not log:
            log, is_new = [(env, self._number(None))], True
        while True:
            if position == len(log):
                assert request is not None
                if request.kind in ("read", "tx"):
                    value = self._fetch(world, request, task.share)
                elif is_new:
                    break
                elif is_answer:
                    value, is_new = answer, True
                else:
                    value, world = self._commit(world, number, request)
                    is_new = True
                    if request.details[0].__name__ == "mark_sending":  # the lease may end before the send
                        coroutine.close()
                        one = world.sent[task.share - 1]
                        if value and one.first is None:
                            first = min(request.options["height"], world.height)
                            marked = one._replace(first=first)
                            world = world._replace(sent=replace_at(world.sent, task.share - 1, marked))
                        waiting = task._replace(pending=f"result {self._number(value)}")
                        yield False, (*label, "marked"), _with_task(world, number, waiting)
                        return
                log.append((env, self._number(value)))
            process.env, value = log[position][0], self._values[log[position][1]]
            position += 1
            if isinstance(value, str):  # TERM
                process.sender.start_term()
                continue
            try:
                request = coroutine.throw(value) if isinstance(value, Exception) else coroutine.send(value)
            except StopIteration:
                request = None
                break
            except (StoreError, AssertionError) as error:
                raise BrokenPromiseError(f"{label} raised {error!r}") from None
        if process.late is not None and task.kind == "send":
            world = _with_slot(world, number, task.share, late=self._number(process.late))
        if request is None:
            yield False, label, self._end(world, number, task, process)
            return
        coroutine.close()
        task = task._replace(log=tuple(log), pending=request.kind)
        if request.kind == "commit":
            yield False, (*label, f"before {request.details[0].__name__}"), _with_task(world, number, task)
        elif request.kind == "prove":
            yield False, label, _with_task(world, number, task)
        else:
            yield from self._send(world, number, task, request.details[0])

    def _send(self, world: World, number: int, task: Task, node: str) -> Iterator[tuple[bool, Label, World]]:
        """A message leaves. It reaches the node, or the node drops it, or there is no connection."""
        share = task.share
        label: Label = (task.kind, number, share, "to", node)
        one = world.sent[share - 1]
        seen = max(at.wall for at, _ in task.log)  # the clock may be set back after the decision
        if seen < self._due[share - 1]:
            raise BrokenPromiseError(f"{label} at {seen - START} s, before its due time")
        if one.last == world.height:
            raise BrokenPromiseError(f"{label}: sent twice at height {world.height}")
        sent = replace_at(world.sent, share - 1, one._replace(last=world.height))
        left = _with_task(world._replace(sent=sent), number, task._replace(pending=f"send {node} left"))
        is_countable = world.counted[share - 1] is None and world.closed_at is None
        yield False, label, left._replace(mempool=world.mempool | {share}) if is_countable else left
        if world.faults and world.height <= self._greatest:
            yield True, ("dropped", *label), left._replace(faults=world.faults - 1)
            unsent = _with_task(world, number, task._replace(pending=f"send {node} unsent"))
            yield True, ("unsent", *label), unsent._replace(faults=world.faults - 1)

    def _end(self, world: World, number: int, task: Task, process: HostProcess) -> World:
        if task.kind in ("recover", "closing"):
            host = world.hosts[number]._replace(main=None)
            return world._replace(hosts=replace_at(world.hosts, number, host))
        if task.kind == "prove":
            return _with_slot(world, number, task.share, prove=None)
        is_live = task.share in self._facts[world.db].live
        return _with_slot(world, number, task.share, send=None, state=process.snapshot(task.share) if is_live else None)

    # ---------------------------------------------------------------- database

    def _fetch(self, world: World, request: Request, share: int = 0) -> Any:
        if request.kind == "tx":
            at = world.counted[share - 1]
            return None if at is None else TxResult(0, at, "")
        name, params = request.details
        key = ("read", world.db, name, tuple(params.items()) if isinstance(params, Mapping) else tuple(params))
        if key not in self._memo:
            self._conn.deserialize(self._contents[world.db])
            self._memo[key] = tuple(
                HostTransaction(self._keys, self._conn, 0, clock=_clock_at(START)).fetch_all(name, params)
            )
        return self._memo[key]

    def _commit(self, world: World, number: int, request: Request) -> tuple[Any, World]:
        """Run an operation as a host, in a transaction. Returns its result and the state after it."""
        op, *args = request.details
        host = world.hosts[number]
        used = [0, *(fence for _, _, fence, _ in world.claims), *(f for h in world.hosts for _, f in h.fences)]
        where = (world.db, world.lease, world.claims, number, host.fences, max(used))
        key = (*where, op, *args, *sorted(request.options.items()))
        if key not in self._memo:
            self._conn.deserialize(self._contents[world.db])
            claims = {share: (owner, fence, expired) for share, owner, fence, expired in world.claims}
            tx = HostTransaction(
                self._keys, self._conn, 9, clock=_clock_at(self._env(world, number).wall),
                host=number, holder=world.lease[0], claims=claims,
                fences=dict(host.fences), last_fence=max(used),
            )  # fmt: skip
            self._conn.execute("BEGIN")
            try:
                result = op(tx, *args, **request.options)
            except StoreError as error:
                raise BrokenPromiseError(f"host {number}: {op.__name__}: {error}") from None
            tx.flush_counts()
            self._conn.execute("COMMIT")
            owned = tuple(sorted((share, *claim) for share, claim in tx.claims.items()))
            self._memo[key] = result, self._intern(), owned, tuple(sorted(tx.fences.items()))
        result, db, owned, fences = self._memo[key]
        after = world._replace(db=db, claims=owned, hosts=replace_at(world.hosts, number, host._replace(fences=fences)))
        return result, self._check_commit(world, after, op)

    def _check_commit(self, world: World, after: World, op: Callable[..., Any]) -> World:
        before, now = self._facts[world.db], self._facts[after.db]
        for share in self._ids:
            was, state = before.live.get(share), now.live.get(share)
            if was is None or was is state:
                continue
            one = world.sent[share - 1]
            if state is not None:
                self.edges.add((was, state))
            elif now.confirmed > before.confirmed:
                self.edges.add((was, ShareState.CONFIRMED))
                if world.counted[share - 1] is None:
                    raise BrokenPromiseError(f"share {share} was confirmed by {op.__name__}, but is not counted")
                after = _without_states(after, share)
            elif not before.is_reported or was is not ShareState.FAILED or world.closed_at is None:
                raise BrokenPromiseError(f"share {share} was deleted by {op.__name__} as {was.name}")
            if state is ShareState.SENT:
                if not (
                    one.first is None
                    or one.is_excused
                    or len(one.refusers) > 1
                    or world.height >= one.first + SCALED["REPROVE_BLOCKS"]
                ):
                    raise BrokenPromiseError(
                        f"share {share} was proven anew at {world.height}, first sent at {one.first}"
                    )
                after = after._replace(sent=replace_at(after.sent, share - 1, Sent(one.last)))
            if op.__name__ == "fail_unconfirmed" and world.counted[share - 1] is not None:
                raise BrokenPromiseError(
                    f"share {share} is counted at {world.counted[share - 1]}, and failed at the close"
                )
        return after

    def _number(self, value: Any) -> int:
        if value not in self._value_numbers:
            self._value_numbers[value] = len(self._values)
            self._values.append(value)
        return self._value_numbers[value]

    def _intern(self) -> int:
        """Return the number of the database's content, without times of events, notes, checks and bytes of messages."""
        read = self._conn.execute
        rows = [
            read("SELECT id, state, due_ms, attempts, crashes, stage = 'closed' FROM shares").fetchall(),
            read(
                "SELECT share_id, substr(message, 1, 32), sends > 0, first_sent_height, last_sent_height, "
                "last_endpoint, last_outcome, decide_height FROM reveals"
            ).fetchall(),
            read("SELECT share_id, min(2, count(*)) FROM history WHERE stage = 'broadcast' GROUP BY 1").fetchall(),
            read("SELECT closed_ms IS NULL, alerted_ms IS NULL, closed_ms FROM rounds").fetchall(),
            read("SELECT value FROM meta WHERE key = ?", (ledger.LEDGER_KEY,)).fetchall(),
            read("SELECT mac FROM tombstones").fetchall(),
            read("SELECT count(*) FROM spent").fetchall(),
            read("SELECT share_id FROM damaged").fetchall(),
        ]
        key = tuple(map(tuple, rows))
        if key not in self._numbers:
            self._numbers[key] = len(self._contents)
            self._contents.append(self._conn.serialize())
            known = ledger.parse_ledger(rows[4][0][0])
            assert known is not None
            live = {row[0]: ShareState(row[1]) for row in rows[0]}
            self._facts.append(Facts(live, len(rows[5]), any(not row[1] for row in rows[3]), known))
        return self._numbers[key]


def _with_slot(world: World, number: int, share: int, **changes: Any) -> World:
    host = world.hosts[number]
    slots = replace_at(host.slots, share - 1, host.slots[share - 1]._replace(**changes))
    return world._replace(hosts=replace_at(world.hosts, number, host._replace(slots=slots)))


def _with_task(world: World, number: int, task: Task) -> World:
    if task.share:
        return _with_slot(world, number, task.share, **{"prove" if task.kind == "prove" else "send": task})
    return world._replace(hosts=replace_at(world.hosts, number, world.hosts[number]._replace(main=task)))


def _with_log(task: Task | None, env: Env, value: Any) -> Task | None:
    return None if task is None else task._replace(log=(*task.log, (env, value)))


def _without_states(world: World, share: int) -> World:
    """Forget what hosts know about a confirmed share, except what is in progress."""
    for number in range(len(world.hosts)):
        world = _with_slot(world, number, share, state=None, late=None)
    return world._replace(sent=replace_at(world.sent, share - 1, Sent()))


def two_host_models(more: int) -> Mapping[str, Callable[[], TwoHosts]]:
    """The searches, by what goes wrong; `more` adds blocks and a fault."""
    models = {
        "hosts": partial(TwoHosts, "crash lose_lease claim_expires proof_fails", faults=1 + min(more, 1), height=0),
        "sends": partial(TwoHosts, "crash late lost dropped unsent lie", faults=1, height=1 + more, hosts=1),
        "heads": partial(TwoHosts, "false_head dropped", faults=2, height=more, hosts=1),
        "refusals": partial(TwoHosts, "refused operator_retry crash", faults=2 + more, height=1, hosts=1),
        "close": partial(TwoHosts, "close crash", faults=1, height=more, hosts=1),
        "shares": partial(TwoHosts, "lose_lease clock_back", faults=1, height=0, count=2),
    }
    return {f"two hosts, {name}": create for name, create in models.items()}
