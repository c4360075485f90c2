"""Holds the service to its promises, while it runs and at the end. It believes the chain and the disk, nobody else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from helper.chain.reveal_transaction import RevealMessage
from helper.core.share import TRANSITIONS, Share, ShareState
from tests.simulation.chain import EPOCH, SimChain
from tests.simulation.event_log import Story
from tests.simulation.host import Host
from tests.simulation.node import SimNode
from tests.simulation.prover import Ill
from tests.simulation.scenario import Plan, RoundPlan

CLOCK_TOLERANCE = 120.0
FREE_CRASHES = 2
REPROVE_BLOCKS = 10
LAG = 3
"""Blocks by which what the service knows of the chain's height may be behind when it sends."""
HURRY = 60.0
"""Seconds before a round's end until which a share must be due to be sure to count, beside the drain."""


@dataclass(eq=False)
class Tracked:
    """A share that a wallet has.

    Attributes:
        acknowledged: loop second at which the service first said that it has it, None until then.
        queued: whether it said that it is new.
    """

    share: Share
    nullifier: bytes
    plan: RoundPlan
    acknowledged: float | None = None
    queued: bool = False

    @property
    def due(self) -> float:
        """Loop second at which it is to be revealed."""
        assert self.acknowledged is not None
        return max(self.share.submit_at - EPOCH, self.acknowledged)


class PromiseChecker:
    """The promises.

    Attributes:
        clock_wrong_until: loop second until which the service's clock was wrong, and what it had begun by it may
            still be under way.
        heights_wrong: spans of loop seconds in which the only node told heights that rise at a pace of their own: ten
            of its blocks are not ten of the chain's.
    """

    def __init__(self, plan: Plan, story: Story, chain: SimChain, host: Host) -> None:
        self._plan = plan
        self._story = story
        self._chain = chain
        self._host = host
        self.shares: dict[bytes, Tracked] = {}
        self.clock_wrong_until = -1.0
        self.heights_wrong: list[tuple[float, float]] = []
        self.broadcasts: dict[tuple[bytes, int], bytes] = {}
        self.sins: Counter[bytes] = Counter()
        self.deaths: Counter[bytes] = Counter()
        self.spent: Counter[bytes] = Counter()
        self._rows: dict[int, bytes] = {}
        self._message: dict[bytes, tuple[bytes, int, float]] = {}  # with the proof's height, the send's time
        self._proven_at: dict[bytes, int] = {}  # the chain's height when its message came on the disk
        self._refused: set[bytes] = set()
        self.counts: Counter[str] = Counter()
        host.disk.on_moves = self.on_moves
        host.on_spend = self.on_spend

    # While it runs

    def on_broadcast(self, message: RevealMessage, node: SimNode) -> None:
        """A reveal has left the machine."""
        now = self._chain.now()
        spent = message.nullifier
        self._story.tell("broadcast", spent, "to", node.name, "anchor", message.anchor_height)
        self.counts["broadcasts"] += 1
        known = self.shares.get(spent)
        if known is None:
            self._story.fail("a reveal of nobody's share", spent)
            return
        tolerance = CLOCK_TOLERANCE if now - EPOCH <= self.clock_wrong_until else 0.0
        if now < known.share.submit_at - tolerance:
            self._story.fail("revealed early", spent, "by", known.share.submit_at - now)
        self._once_a_height(spent, self._chain.height, message)
        self._not_too_soon(spent, message.tx_hash())

    def _not_too_soon(self, spent: bytes, tx_hash: bytes) -> None:
        """A new proof is made only after a refusal, an operator's word, or ten blocks without a count."""
        height = self._proven_at.get(spent, 0)
        before = self._message.get(spent)
        if before is not None and before[0] == tx_hash:
            return
        now = self._chain.now() - EPOCH
        self._message[spent] = (tx_hash, height, now)
        if before is None or before[0] in self._refused or height >= before[1] + REPROVE_BLOCKS - LAG:
            return
        if not any(first <= at <= last for first, last in self.heights_wrong for at in (before[2], now)):
            self._story.fail("proven anew too soon", spent, "heights", before[1], height)

    def on_refusal(self, message: RevealMessage) -> None:
        """A node refuses this very message: another may follow."""
        self._refused.add(message.tx_hash())

    def on_pardon(self, spent: bytes) -> None:
        """An operator has a share tried again: anything may follow."""
        self._message.pop(spent, None)

    def _once_a_height(self, spent: bytes, height: int, message: RevealMessage) -> None:
        before = self.broadcasts.get((spent, height))
        if before is not None:
            same = "the same bytes" if before == message.tx_hash() else "other bytes"
            self._story.fail("broadcast twice at one height", spent, "height", height, same)
        self.broadcasts[spent, height] = message.tx_hash()

    def on_sin(self, nullifier: bytes, ill: Ill) -> None:
        """A prover does wrong: this may cost an attempt."""
        self._story.tell("prover", ill.value, nullifier)
        if ill is Ill.DIES:
            self.deaths[nullifier] += 1
        else:
            self.sins[nullifier] += 1

    def on_lie(self, message: RevealMessage) -> None:
        """A node refuses for good what is good: when all do, this may cost an attempt, or all."""
        self.sins[message.nullifier] += 1

    def on_spend(self, share_id: int, stage: str, note: str) -> None:
        """An attempt is spent, or the share given up."""
        spent = self._rows.get(share_id, b"")
        self._story.tell("attempt spent", spent, stage, note)
        self.counts["attempts"] += 1
        self.spent[spent] += 1
        allowed = self.sins[spent] + max(0, self.deaths[spent] - FREE_CRASHES)
        if self.spent[spent] > allowed:
            self._story.fail("an attempt spent for nothing", spent, stage, note)

    def on_moves(self, moves: list[tuple[int, int, int | None, bytes]]) -> None:
        """What a commit changed."""
        for share_id, before, after, spent in moves:
            self._rows[share_id] = spent
            if after is None:
                self._story.tell("row goes", spent, "from", ShareState(before).name)
                self._gone(spent)
                continue
            self._story.tell("moves", spent, "to", ShareState(after).name)
            if after == ShareState.BROADCAST:
                self._proven_at[spent] = self._chain.height
            if before >= 0 and ShareState(after) not in TRANSITIONS[ShareState(before)]:
                self._story.fail("an illegal move", spent, before, after)

    def _gone(self, spent: bytes) -> None:
        """A row may only go when the chain counted it, or its round is closed and purged."""
        known = self.shares[spent]
        if (known.share.round_id, spent) in self._chain.counted:
            return
        one = self._chain.rounds[known.share.round_id]
        if not one.tallying:
            self._story.fail("submitted though never counted", spent)
        elif self._chain.now() < self._chain.head(one.tallying).time + self._plan.purge_after - CLOCK_TOLERANCE:
            self._story.fail("purged too early", spent)

    # At the end of a life, and of all

    def look_at_disk(self) -> None:
        """Every share that was acknowledged is on the disk, or counted, or rightly purged."""
        there = {row[0] for row in self._host.disk.rows("SELECT nullifier FROM shares")}
        for spent, known in self.shares.items():
            if known.queued and spent not in there and not self._is_counted(known):
                one = self._chain.rounds[known.share.round_id]
                if not one.tallying:
                    self._story.fail("an acknowledged share is lost", spent)

    def _is_counted(self, known: Tracked) -> bool:
        return (known.share.round_id, known.nullifier) in self._chain.counted

    def at_the_end(self) -> None:
        """All that must hold when nothing is wrong any more."""
        self.look_at_disk()
        disk = self._host.disk
        states: dict[bytes, int] = dict(disk.rows("SELECT nullifier, state FROM shares"))
        for spent, known in self.shares.items():
            one = self._chain.rounds[known.share.round_id]
            if known.acknowledged is None:
                continue
            self.counts["acknowledged"] += 1
            counted = self._is_counted(known)
            self.counts["counted"] += counted
            if not counted and self._had_time(known):
                self._story.fail(
                    "an acknowledged share was not counted", spent, "due", known.due, "state", states.get(spent)
                )
            if counted and spent in states and not self._left_out():
                self._story.fail("a witness is left after confirmation", spent)
            if not counted and one.tallying and states.get(spent, 3) != ShareState.FAILED:
                self._story.fail("a closed round's share is neither counted nor failed", spent, states.get(spent))
        self._rounds_closed()

    def _had_time(self, known: Tracked) -> bool:
        """Whether the share could certainly have been counted."""
        end = min(float(known.plan.end), self._plan.length)
        if not known.plan.demanding and known.plan.end < self._plan.length:
            return False
        return known.due <= end - HURRY - self._plan.drain

    def _left_out(self) -> bool:
        """Whether blocks may have been left out for want of a node that has them."""
        return not all(self._plan.rpcs) and any(one.what.name == "PRUNED" for one in self._plan.episodes)

    def _rounds_closed(self) -> None:
        sql = "SELECT k.round_id, r.alerted_ms FROM rounds r JOIN round_keys k ON k.no = r.round_no"
        alerted: dict[bytes, int | None] = dict(self._host.disk.rows(sql))
        for one in self._chain.rounds.values():
            if one.round_id not in alerted:
                continue
            if one.tallying and alerted[one.round_id] is None:
                self._story.fail("a closed round was not reported", one.round_id)
            if not one.tallying and alerted[one.round_id] is not None:
                self._story.fail("a round was closed that is open", one.round_id)
