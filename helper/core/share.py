"""A share, its key, its states, and the one table of legal moves. Pure.

`Share` is what a wallet posted, after parsing: raw bytes and integers, nothing encoded. `ShareKey` names a
share for good: two posts with the same key are the same share. `TRANSITIONS` is what the store, the schema
and `docs/state_machine.md` are held to.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

SHARE_COUNT: Final = 16
"""Shares of one vote; `share_index` is below it."""
MAX_TREE_POSITION: Final = 2**24 - 1
"""The last leaf of a tree of depth 24."""

_KEY = struct.Struct(">32sBIQ")


class ShareState(IntEnum):
    """Where a share stands. The numbers are those of the original and are kept in databases."""

    RECEIVED = 0
    """On disk, waiting for its time (or for a retry's time)."""
    WITNESSED = 1
    """Taken up: its proof is being made. Goes back to RECEIVED when the service starts."""
    SUBMITTED = 2
    """Its nullifier was counted in a block, whoever sent it. Only a tombstone is left."""
    FAILED = 3
    """Given up and reported; the witness is kept until the round is purged."""
    BROADCAST = 4
    """May have been sent: its message was on disk before the first byte left."""


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
"""For each state, the states that a share may move to from it."""


class ShareKey(NamedTuple):
    """What makes a share the same share, whatever time it is posted with.

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
        """The 45 bytes that stand for the key in hashes: fixed widths, big-endian, so no two keys collide."""
        return _KEY.pack(self.round_id, self.share_index, self.proposal_id, self.tree_position)


@dataclass(frozen=True, slots=True)
class Share:
    """One share as a wallet posted it. Its repr shows no field of the witness, so that none can reach a log.

    Attributes:
        round_id: 32 bytes.
        share_index: 0 to 15.
        proposal_id: 1 or more.
        vote_decision: option index of the proposal.
        tree_position: leaf index of the vote commitment, below 2^24.
        submit_at: unix second before which nothing of the share leaves the machine; 0 is at once.
        shares_hash: 32 bytes, Poseidon of the 16 commitments.
        share_comms: 512 bytes, the 16 commitments in order.
        primary_blind: 32 bytes, opens the commitment of this share.
        c1: 32 bytes, compressed point.
        c2: 32 bytes, compressed point.
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

    @property
    def key(self) -> ShareKey:
        """The share's name: everything but its time and its witness."""
        return ShareKey(self.round_id, self.share_index, self.proposal_id, self.tree_position)
