"""Decides for one prepared message: wait, send it to which node, or prove the share anew. Pure.

A message is public once it is sent. Resending the same bytes reveals nothing more and is safe, because the chain counts
a nullifier once. So nothing but due time, lease and round holds a send back: each wait ends at a height and at a time,
because heights stand still while one of two nodes is silent, and a node may report a false one. A new proof is as safe,
but expensive: it is made only if the old message had ten blocks, and after blocks in which the message could not be
sent (the service or its nodes were down), the message is sent again first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from helper.chain.broadcast_outcome import MESSAGE_REFUSALS, BroadcastOutcome, Verdict
from helper.chain.node import NO_PENALTY, Penalty
from helper.chain.node_pool import RESEND_SECONDS
from helper.store.messages import SentReveal

INCLUSION_WAIT_BLOCKS: Final = 3
"""Blocks to wait for the inclusion of an accepted message before it is resent."""
REPROVE_BLOCKS: Final = 10
"""Blocks after the first send until an unconfirmed message is replaced by a new proof."""
REPROVE_SECONDS: Final = 60.0
"""Seconds after which that is decided without an agreed height."""
SPENT_WAIT_BLOCKS: Final = 10
"""Blocks until a message is resent that every node in sync reports as spent: only its block is not read yet."""
STUCK_HEIGHT_SECONDS: Final = 30.0
"""Seconds after the last send from which an agreed height that a node in sync has passed holds nothing back."""
RECHECK_SECONDS: Final = 1.0
"""Seconds until a message is looked at again that cannot be sent now."""
MAX_SENDS_IN_A_ROW: Final = 2
"""Sends of a share to one node until another one gets it: a false node may be the first to report each block."""
AVOIDANCE_SECONDS: Final = 30.0
"""Seconds for which a node is tried last after an inconclusive response.

For a share whose call to it continues without a response, it is not tried at all in this time.
"""
PROBE_SECONDS: Final = 2.0
"""Seconds between two reveals to a node that asked for a delay while every node did, and between checks after it."""

MAX_REPROVE_SECONDS: Final = 600.0
"""Maximum seconds for which a message is sent before a new proof is considered."""
MAX_DISPUTE_SECONDS: Final = 3600.0
"""The same while nodes dispute whether the share is counted already."""

NEXT_BLOCK_VERDICTS: Final = frozenset({Verdict.AMBIGUOUS, Verdict.UNAVAILABLE, Verdict.BEHIND})
"""Verdicts that are not about the message itself: the same bytes are resent one block later."""
# A refusal of the message must be confirmed by a second node, so it is sent to another one, one block later.
_NEXT_BLOCK_OUTCOMES: Final = {None, *(verdict.name for verdict in NEXT_BLOCK_VERDICTS | MESSAGE_REFUSALS)}
_REFUSED_OUTCOMES: Final = {v.name for v in (*MESSAGE_REFUSALS, Verdict.REFUSED, Verdict.REFUSED_ANCHOR)}
_CHECKED_OUTCOMES: Final = {v.name for v in (*MESSAGE_REFUSALS, Verdict.ACCEPTED)}
_SPENT: Final = Verdict.SPENT.name


class Wait(NamedTuple):
    """Decide again at this monotonic time, or once nodes in sync have reached this height."""

    until: float
    height: int


NO_HEIGHT: Final = 1 << 62
"""Height of a wait that only its time ends."""


class Send(NamedTuple):
    """Send the message to this node.

    `is_probe`: the node asked for a delay before, so ask first whether it is ready.
    """

    node: str
    is_probe: bool = False


class ProveAnew(NamedTuple):
    """Return the share to the queue for a new proof."""

    reason: str


Step = Wait | Send | ProveAnew


class ProcessFacts(NamedTuple):
    """What this process knows. Times without a unit are monotonic.

    Attributes:
        now_ms: Unix milliseconds.
        head: the height of the nodes in sync; None while no node is usable.
        agreed: the greatest height that enough of the configured nodes have reached, 0 before the first.
        greatest: the greatest height that any node in sync reports.
        began_at: the first send of this message, or the start of sending on this host if that was later.
        ended_at: the end of the last send of the share, in the same way; None if it was never sent.
        seconds_left: seconds until the round's end.
        is_circuit_refused: whether shares are now proven with another circuit.
        sent_before: seconds for which earlier messages of the share were sent by this host.
        is_disputed: see `is_disputed`.
    """

    now: float
    now_ms: int
    head: int | None
    agreed: int
    greatest: int
    began_at: float = -math.inf
    ended_at: float | None = None
    seconds_left: float = math.inf
    is_circuit_refused: bool = False
    sent_before: float = 0.0
    is_disputed: bool = False

    def has_no_block_above(self, height: int) -> bool:
        """Whether there is no block above a height: enough nodes have reached it, and none reports a greater one."""
        return self.greatest <= height <= self.agreed


class NodeFacts(NamedTuple):
    """What one usable node did last.

    Attributes:
        sent_at: monotonic time at which the share was last sent to it; minus infinity if it was not.
        verdict: its last response to exactly this message, None without one.
        refuses_circuit: whether it has refused another proof of a circuit that no node has accepted.
        has_pending_call: whether a call with this share continues without a response.
        has_turn: whether it may get the message now: it, or enough nodes, report a block that was produced after the
            last send. After `MAX_SENDS_IN_A_ROW` it is another node's turn, of two nodes as soon as the first reports
            such a block.
    """

    name: str
    penalty: Penalty = NO_PENALTY
    sent_at: float = -math.inf
    verdict: Verdict | None = None
    refuses_circuit: bool = False
    has_pending_call: bool = False
    has_turn: bool = True


def decide(reveal: SentReveal, process: ProcessFacts, nodes: Sequence[NodeFacts]) -> Step:
    """Return what to do with a message now."""
    now, head = process.now, process.head
    if process.now_ms < reveal.due_ms:  # the clock was set back since the proof or the last send
        return Wait(now + (reveal.due_ms - process.now_ms) / 1000, 0 if head is None else head + 1)
    if head is None:
        return Wait(now + RECHECK_SECONDS, 0)
    reason = _reason_to_prove(reveal, process, head, has_new_block=any(node.has_turn for node in nodes))
    if reason:
        return ProveAnew(reason)
    first, last = reveal.row.first_sent_height, reveal.row.last_sent_height
    if reveal.row.sends and first is not None and last is not None:
        is_spent = is_spent_everywhere(nodes)
        height = decide_height(first=first, last=last, outcome=reveal.row.last_outcome, is_spent=is_spent)
        ended_at = now if process.ended_at is None else process.ended_at
        until = ended_at + max(RESEND_SECONDS * (6 if is_spent else 1), STUCK_HEIGHT_SECONDS if head > last else 0.0)
        # A height that is not above that of the last send says nothing, unless the chain stands: one may be false. One
        # above it may stand still, while a node in sync has reached the decision's.
        is_decisive = process.has_no_block_above(last) or (head > last and process.greatest < height)
        if head < height and (is_decisive or now < until):
            return Wait(until, height)
    node = choose_node(nodes, now, process.seconds_left)
    return node or Wait(now + RECHECK_SECONDS, head + 1)


def _reason_to_prove(reveal: SentReveal, process: ProcessFacts, head: int, *, has_new_block: bool) -> str:
    """Why a share needs a new proof, "" if it does not."""
    outcome, first, last = reveal.row.last_outcome, reveal.row.first_sent_height, reveal.row.last_sent_height
    is_refused = not reveal.row.sends or (outcome == Verdict.BAD_PROOF.name and not process.is_disputed)
    if process.is_circuit_refused and is_refused:
        return f"the chain refuses {reveal.row.circuit} proofs"
    if not reveal.row.sends or first is None or last is None or outcome == _SPENT:
        return ""  # a spent nullifier stays spent: a new proof would be refused too
    age = process.now - process.began_at
    if age < min_message_seconds(process):
        return ""
    is_old = age >= REPROVE_SECONDS
    for height in (process.agreed, head if is_old else 0):
        if _had_its_blocks(first, last, outcome, height):
            return f"not confirmed within {height - first} blocks"
    # The time decides if the recorded height was false or the message was refused. It also does once any node has ten
    # more blocks, if the height stands still, as the chain itself may have done until now, or if no node knows the
    # anchor: one that is behind may catch up, but nobody knows a root that a false node served.
    is_time_decisive = is_old and has_new_block and not process.has_no_block_above(last)
    reached, had_blocks = max(head, process.agreed), process.greatest >= first + REPROVE_BLOCKS
    has_waited = had_blocks and (reached == first or outcome == Verdict.BEHIND.name)
    if is_time_decisive and (reached < first or has_waited or outcome in _REFUSED_OUTCOMES):
        return f"not confirmed within {REPROVE_SECONDS:.0f} s"
    return ""


def _had_its_blocks(first: int, last: int, outcome: str | None, height: int) -> bool:
    if height < first + REPROVE_BLOCKS or height <= last:
        return False
    was_down = height >= last + REPROVE_BLOCKS
    was_resent_late = last >= first + REPROVE_BLOCKS  # resent after downtime: wait for its inclusion as usual
    return not was_down and (not was_resent_late or height >= decide_height(first=first, last=last, outcome=outcome))


def decide_height(*, first: int, last: int, outcome: str | None, is_spent: bool = False) -> int:
    """Return the height at which a message that was sent needs a decision. It is stored with each send and outcome.

    Args:
        first: the height at the first send.
        last: the height at the last send.
        outcome: name of the last verdict; None if there is none (a crash or a lost response).
        is_spent: whether every node in sync reports the nullifier as spent.
    """
    if outcome == _SPENT:
        return last + (SPENT_WAIT_BLOCKS if is_spent else 1)
    height = last + (1 if outcome in _NEXT_BLOCK_OUTCOMES else INCLUSION_WAIT_BLOCKS)
    return height if last >= first + REPROVE_BLOCKS else min(height, max(last + 1, first + REPROVE_BLOCKS))


def min_message_seconds(process: ProcessFacts) -> float:
    """Return how long a message is sent at least before a new proof replaces it, in seconds.

    A share's first message has no minimum. A later one is sent for as long as those before it together, in a dispute
    three times as long. Otherwise a false node that withholds confirmations has counted shares proven again without
    end, which takes the provers from shares without a proof.
    """
    if process.is_disputed:
        return min(3 * process.sent_before, MAX_DISPUTE_SECONDS)
    return min(process.sent_before, process.seconds_left / 2, MAX_REPROVE_SECONDS)


def is_disputed(reveal: SentReveal, verdicts: Collection[Verdict], needed: int) -> bool:
    """Whether nodes contradict each other: one reports the nullifier as spent, another one has checked the message.

    A new proof helps only if the report is wrong, as it is if enough nodes have accepted or refused the message.
    """
    checked = sum(verdict is Verdict.ACCEPTED or verdict in MESSAGE_REFUSALS for verdict in verdicts)
    return Verdict.SPENT in verdicts and reveal.row.last_outcome in _CHECKED_OUTCOMES and checked < needed


def is_spent_everywhere(nodes: Iterable[NodeFacts]) -> bool:
    """Whether every usable node has answered this message with "spent"."""
    return {node.verdict for node in nodes} == {Verdict.SPENT}


def choose_node(nodes: Iterable[NodeFacts], now: float, seconds_left: float = math.inf) -> Send | None:
    """Return the node to send to, None if no node may get the message now.

    First the nodes that have not received the share, then those that received it longest ago, because a node may accept
    a reveal and drop it. Among those without it, nodes that refused its circuit come last; they get it too, because
    another node may answer "spent" to every message. A node that received it recently and has not
    responded is not tried: more copies would only add to its load. While every node asks for a delay, one share after
    the other is sent to a node that is ready: it may accept reveals long before the time that it named.
    """

    def preference(node: NodeFacts) -> tuple[float, bool, bool]:
        is_refuser = node.refuses_circuit or node.verdict in MESSAGE_REFUSALS
        return node.sent_at, is_refuser, node.penalty.avoid_until > now

    since = now - AVOIDANCE_SECONDS
    candidates = [n for n in nodes if n.has_turn and not (n.has_pending_call and n.sent_at > since)]
    are_all_held = all(node.penalty.is_held(now, seconds_left) for node in candidates)
    for name, penalty, *_ in sorted(candidates, key=preference):
        if not penalty.is_held(now, seconds_left) or (are_all_held and now >= penalty.probe_at):
            return Send(name, is_probe=penalty.hold_seconds > 0)
    return None


def next_penalty(before: Penalty, outcome: BroadcastOutcome, now: float) -> Penalty:
    """Return a node's penalty after a response to a reveal."""
    if outcome.retry_after is not None:
        return Penalty(now, outcome.retry_after, now + PROBE_SECONDS, now + AVOIDANCE_SECONDS)
    if outcome.verdict in NEXT_BLOCK_VERDICTS:
        return before._replace(avoid_until=now + AVOIDANCE_SECONDS)
    return NO_PENALTY if outcome.verdict is Verdict.ACCEPTED else before


def begin_probe(before: Penalty, now: float, seconds_left: float) -> Penalty:
    """Return the penalty of a node while it is asked whether it is ready: other shares do not ask in the meantime."""
    if before.is_held(now, seconds_left):
        return before._replace(probe_at=now + PROBE_SECONDS)
    return before._replace(held_at=now, hold_seconds=PROBE_SECONDS, probe_at=now + PROBE_SECONDS)


@dataclass(slots=True)
class SendState:
    """The sends of one share by this host since the start. In memory only. Times are monotonic.

    Attributes:
        fence: fencing token under which a task read the share's message; None if no task is sending the share.
        message_sent_at: time of the first send of the newest message.
        sent_before: seconds between the first send and the end of the message before it.
        ended_at: time at which the last send ended. For a call without a response: when its last byte was written.
        sent_at: time of the last send to each node, by node name.
        last_node: name of the node that received the last sends.
        sends_in_a_row: number of the last sends that all went to it, at most `MAX_SENDS_IN_A_ROW`.
        unanswered: names of the nodes whose calls continue without a response, one for each call.
        verdicts: the last response of each node to the newest message, by node name.
        tx_hash: hash of the newest message.
        other_roots: names of the nodes that checked the newest message with another root than its own.
        spared_for: the nodes with another root for whose sake a refused circuit was kept when the share was last proven
            anew.
    """

    fence: int | None = None
    first_sent_at: float | None = None
    message_sent_at: float | None = None
    sent_before: float = 0.0
    ended_at: float | None = None
    sent_at: dict[str, float] = field(default_factory=dict)
    last_node: str = ""
    sends_in_a_row: int = 0
    unanswered: list[str] = field(default_factory=list)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    tx_hash: bytes = b""
    other_roots: set[str] = field(default_factory=set)
    spared_for: set[str] = field(default_factory=set)

    def start_send(self, tx_hash: bytes, node: str, now: float) -> None:
        """Record that a send of this message begins."""
        self.use_message(tx_hash)
        self.first_sent_at = now if self.first_sent_at is None else self.first_sent_at
        self.message_sent_at = now if self.message_sent_at is None else self.message_sent_at
        self.sent_at[node] = now
        self.sends_in_a_row = min(MAX_SENDS_IN_A_ROW, 1 + (self.sends_in_a_row if node == self.last_node else 0))
        self.last_node = node

    def end_message(self, now: float) -> None:
        """Record that the share is proven anew. The bytes of its next message may be the same."""
        self.sent_before = 0.0 if self.first_sent_at is None else now - self.first_sent_at
        self.message_sent_at = None

    def use_message(self, tx_hash: bytes) -> None:
        """Drop what belongs to an earlier message."""
        if tx_hash != self.tx_hash:
            self.tx_hash, self.message_sent_at, self.verdicts, self.other_roots = tx_hash, None, {}, set()


class SendStates:
    """The send states of shares, and when each share that waits is looked at again.

    Above `limit`, the least recently used state is dropped. That is safe: the heights and the outcome of the last send
    are on disk.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_share: dict[int, SendState] = {}  # in the order of the last claim
        self._waits: dict[int, Wait] = {}

    @property
    def waiting(self) -> int:
        """Number of shares that wait for a time."""
        return len(self._waits)

    def get(self, share_id: int) -> SendState:
        """Return the send state of a share; a new one that is not stored if there is none."""
        return self._by_share.get(share_id) or SendState()

    def claim(self, share_id: int, fence: int) -> bool:
        """Begin to handle a share under this fencing token. False if another task does."""
        state = self.get(share_id)
        if state.fence is not None:
            return False
        state.fence = fence
        self._by_share.pop(share_id, None)
        self._by_share[share_id] = state
        if len(self._by_share) > self._limit:
            oldest = next(iter(self._by_share))
            if self._by_share[oldest].fence is None:
                self.forget(oldest)
        return True

    def release(self, share_id: int, wait: Wait | None) -> None:
        """Release the claim of a share, and record until when it waits."""
        self.get(share_id).fence = None
        self._waits.pop(share_id, None)
        if wait is not None and share_id in self._by_share:
            self._waits[share_id] = wait

    def select(self, share_ids: Iterable[int], *, now: float, height: int, limit: int) -> list[int]:
        """Return the shares to look at now: without those that wait, and those whose time has passed last."""
        by_height: list[int] = []
        by_time: list[tuple[float, int]] = []
        for share_id in share_ids:
            wait = self._waits.get(share_id)
            if wait is None or wait.height <= height:
                by_height.append(share_id)
            elif wait.until <= now:
                by_time.append((wait.until, share_id))
        return [*by_height, *(share_id for _, share_id in sorted(by_time))][:limit]

    def forget(self, share_id: int) -> float | None:
        """Drop the state of a share, except a current claim. Returns the time of its first send."""
        state = self._by_share.pop(share_id, None)
        self._waits.pop(share_id, None)
        if state is None:
            return None
        if state.fence is not None:
            self._by_share[share_id] = SendState(fence=state.fence)
        return state.first_sent_at

    def clear_waits(self) -> None:
        """Have every share looked at again."""
        self._waits.clear()

    def start_term(self) -> None:
        """Forget when sends ended: another host may have sent the shares since."""
        self.clear_waits()
        for state in self._by_share.values():
            state.ended_at = None
