"""This host's record of its sends of each share. In memory only; lost on restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from helper.chain.verdicts import Verdict


@dataclass(slots=True)
class SendState:
    """The sends of one share by this host since the start. Times are monotonic.

    Attributes:
        fence: fencing token under which a task read the share's message; None if no task is sending the share.
        first_sent_at: time of the first send.
        last_ended_at: time at which the last send ended. For a call without a response: when its last byte was written.
        sent_to: time of the last send to each node, by node name.
        unanswered: names of the nodes whose calls continue without a response, one for each call.
        is_stuck: whether the last follow-up raised an unexpected error.
    """

    fence: int | None = None
    first_sent_at: float | None = None
    last_ended_at: float | None = None
    sent_to: dict[str, float] = field(default_factory=dict)
    unanswered: list[str] = field(default_factory=list)
    is_stuck: bool = False
    _refused_hash: bytes = b""
    _refusals: dict[str, Verdict] = field(default_factory=dict)

    @property
    def is_in_flight(self) -> bool:
        """Whether a task is sending the share."""
        return self.fence is not None

    def awaits_response(self, node: str, since: float) -> bool:
        """Whether a call to this node that began after `since` continues without a response."""
        return node in self.unanswered and self.sent_to.get(node, since) > since

    def note_first_send(self, now: float) -> None:
        """Record the first send; a later message of the share does not change it."""
        if self.first_sent_at is None:
            self.first_sent_at = now

    def refusals_of(self, tx_hash: bytes) -> Mapping[str, Verdict]:
        """The verdicts of the nodes that refused exactly this message, by node name."""
        return self._refusals if tx_hash == self._refused_hash else {}

    def add_refusal(self, tx_hash: bytes, node: str, verdict: Verdict) -> None:
        """Record that a node refused this message; refusals of an earlier message are dropped."""
        self._refusals = {**self.refusals_of(tx_hash), node: verdict}
        self._refused_hash = tx_hash

    def clear_refusals(self) -> None:
        """Drop all refusals."""
        self._refusals, self._refused_hash = {}, b""


class SendStates:
    """The send states of shares. Above `limit`, the least recently used state is dropped.

    Dropping a state is safe: the heights and the outcome of the last send are on disk.

    Attributes:
        stuck: number of shares whose last follow-up raised an unexpected error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_share: dict[int, SendState] = {}  # in the order of the last claim
        self.stuck = 0

    def get(self, share_id: int) -> SendState:
        """Return the send state of a share.

        Returns a new state that is not stored if there is none.
        """
        return self._by_share.get(share_id) or SendState()

    def claim(self, share_id: int, fence: int) -> bool:
        """Begin to send a share under this fencing token. False if another task is sending it."""
        state = self.get(share_id)
        if state.is_in_flight:
            return False
        state.fence = fence
        self._by_share.pop(share_id, None)
        self._by_share[share_id] = state
        if len(self._by_share) > self._limit:
            oldest = next(iter(self._by_share))
            if not self._by_share[oldest].is_in_flight:
                self._drop(oldest)
        return True

    def release(self, share_id: int) -> None:
        """Release the claim of a share."""
        self.get(share_id).fence = None

    def set_stuck(self, share_id: int, *, is_stuck: bool) -> None:
        """Record whether the follow-up of a claimed share raised an unexpected error."""
        state = self._by_share.get(share_id)
        if state is not None:
            self.stuck += is_stuck - state.is_stuck
            state.is_stuck = is_stuck

    def confirm(self, share_id: int) -> float | None:
        """Drop the state of a confirmed share, except a current claim.

        Returns the time of its first send.
        """
        state = self._by_share.get(share_id)
        if state is None:
            return None
        self._drop(share_id)
        if state.is_in_flight:
            self._by_share[share_id] = SendState(fence=state.fence)
        return state.first_sent_at

    def forget_ends(self) -> None:
        """Clear the end times of sends.

        Another host may have sent the shares since.
        """
        for state in self._by_share.values():
            state.last_ended_at = None

    def _drop(self, share_id: int) -> None:
        self.stuck -= self._by_share.pop(share_id).is_stuck
