"""Share, share key, share states and the table of legal transitions. Pure.

`Share` is a parsed payload: raw bytes and integers. `ShareKey` identifies a share: two payloads with the same key are
the same share. The store, the schema and `docs/state_machine.md` are tested against `TRANSITIONS`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

SHARE_COUNT: Final = 16
"""Number of shares of a vote; `share_index` is less than this."""
MAX_TREE_POSITION: Final = 2**24 - 1
"""The last leaf of a tree of depth 24."""

_KEY = struct.Struct(">32sBIQ")


class ShareState(IntEnum):
    """State of a share. The numbers are those of the original implementation and are stored in databases."""

    RECEIVED = 0
    """Stored, waiting for its due time or the time of a retry."""
    WITNESSED = 1
    """Claimed: its proof is being created. On startup it returns to RECEIVED."""
    SUBMITTED = 2
    """Confirmed: its nullifier is in a block, whichever helper sent it. Only a tombstone remains."""
    FAILED = 3
    """Reported, and not retried unless an operator retries it. The witness is stored until the round is purged."""
    BROADCAST = 4
    """May have been sent. Its message was stored before the first byte was sent."""


TRANSITIONS: Final[Mapping[ShareState, frozenset[ShareState]]] = MappingProxyType(
    {
        ShareState.RECEIVED: frozenset({ShareState.WITNESSED, ShareState.SUBMITTED, ShareState.FAILED}),
        ShareState.WITNESSED: frozenset(
            {ShareState.RECEIVED, ShareState.BROADCAST, ShareState.SUBMITTED, ShareState.FAILED}
        ),
        ShareState.BROADCAST: frozenset({ShareState.RECEIVED, ShareState.SUBMITTED, ShareState.FAILED}),
        ShareState.FAILED: frozenset({ShareState.RECEIVED, ShareState.SUBMITTED}),
        ShareState.SUBMITTED: frozenset(),
    }
)
"""Legal next states of each state."""


class ShareKey(NamedTuple):
    """Identity of a share, independent of its due time.

    Attributes:
        round_id: 32 bytes.
        share_index: 0 to 15.
        proposal_id: 1 or more.
        tree_position: leaf index of the vote commitment, below 2^24.
    """

    round_id: bytes
    share_index: int
    proposal_id: int
    tree_position: int

    def encode(self) -> bytes:
        """Encode the key as 45 bytes for hashing: fixed widths, big-endian, so the encoding is injective."""
        return _KEY.pack(self.round_id, self.share_index, self.proposal_id, self.tree_position)


class InvalidChoice(NamedTuple):
    """Why a share does not fit its proposal.

    Attributes:
        field: the field's name on the wire.
        message: the reason, without the field's value.
    """

    field: str
    message: str


@dataclass(frozen=True, slots=True)
class Share:
    """A share as posted by a wallet. Its repr omits the witness, so that no secret reaches a log.

    Attributes:
        round_id: 32 bytes.
        share_index: 0 to 15.
        proposal_id: 1 or more.
        vote_decision: option index of the proposal; 0 if shares of this kind hide it.
        tree_position: leaf index of the vote commitment, below 2^24.
        submit_at: Unix second before which no data of the share leaves the machine; 0 means immediately.
        shares_hash: 32 bytes, Poseidon of the 16 commitments.
        share_comms: 512 bytes, the 16 commitments in order.
        primary_blind: 32 bytes, opens the commitment of this share.
        c1: 32 bytes, compressed point: first half of the share's only or first ciphertext.
        c2: 32 bytes, compressed point: second half of it.
        kind: selects the circuit generations that prove the share (`helper.circuits`); "" for k10 and k11.
        extra: all other fields of shares of this kind, encoded by their generation; empty for k10 and k11.
    """

    round_id: bytes
    share_index: int
    proposal_id: int
    vote_decision: int
    tree_position: int = field(repr=False)
    submit_at: int
    shares_hash: bytes = field(repr=False)
    share_comms: bytes = field(repr=False)
    primary_blind: bytes = field(repr=False)
    c1: bytes = field(repr=False)
    c2: bytes = field(repr=False)
    kind: str = ""
    extra: bytes = field(default=b"", repr=False)

    def find_choice_error(self, options: Sequence[int]) -> InvalidChoice | None:
        """Return why the share does not fit a proposal with these options, None if it does.

        Generations whose shares hide the decision override this in the shares that they read.
        """
        if self.vote_decision in options:
            return None
        return InvalidChoice("vote_decision", "is not an option of the proposal")

    @property
    def key(self) -> ShareKey:
        """The identity of the share."""
        return ShareKey(self.round_id, self.share_index, self.proposal_id, self.tree_position)
