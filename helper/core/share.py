"""Share and its fields, share key, share states and the table of legal transitions. Pure.

`Share` is a parsed payload: raw bytes and integers. Its annotations are the one table of its fields: the description of
the API, error texts, JSON, rows and exports are derived from it. `ShareKey` identifies a share: two payloads with the
same key are the same share. The store, the schema and `docs/state_machine.md` are tested against `TRANSITIONS`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

from helper.core.share_fields import (
    ArrayField,
    Base64Field,
    HexField,
    IntegerField,
    ObjectField,
    list_fields,
    nest_fields,
)
from helper.errors import ShareRefused

SHARE_COUNT: Final = 16
"""Number of shares of a vote; `share_index` is less than this."""
MAX_TREE_POSITION: Final = 2**24 - 1
"""The last leaf of a tree of depth 24."""
_INDEX: Final = IntegerField("Which of the vote's shares this is.", 0, SHARE_COUNT - 1, default=0)
_POINT: Final = Base64Field("A compressed Pallas point, not the identity.")

_KEY = struct.Struct(">32sBIQB32s")


class ShareState(IntEnum):
    """State of a share. The numbers are those of the original implementation and are stored in databases."""

    WAITING = 0
    """Stored, waiting for its due time or the time of a retry."""
    PROVING = 1
    """Claimed: its proof is being created. On startup it returns to WAITING."""
    CONFIRMED = 2
    """Its nullifier is in a block, whichever helper sent it. Only a tombstone remains."""
    FAILED = 3
    """Reported, and not retried unless an operator retries it. The witness is stored until the round is purged."""
    SENT = 4
    """May have been sent. Its message was stored before the first byte was sent."""

    @property
    def label(self) -> str:
        """The name in documents and in the text of commands."""
        return self.name.lower()

    @property
    def json_name(self) -> str:
        """The name in JSON, exports and metrics: the original implementation's word."""
        return _JSON_NAMES[self]

    @classmethod
    def parse(cls, text: str) -> ShareState:
        """Return the state with this label or JSON name, in any case. Raises ValueError if there is none."""
        for state in cls:
            if text.lower() in {state.label, state.json_name}:
                return state
        raise ValueError(f"one of {', '.join(state.label for state in cls)}")


_JSON_NAMES: Final = {
    ShareState.WAITING: "received",
    ShareState.PROVING: "witnessed",
    ShareState.CONFIRMED: "submitted",
    ShareState.FAILED: "failed",
    ShareState.SENT: "broadcast",
}

LIVE_STATES: Final = frozenset(ShareState) - {ShareState.CONFIRMED}
"""The states in which a share has a row with its witness."""
UNCONFIRMED_STATES: Final = LIVE_STATES - {ShareState.FAILED}
"""The states in which a share is processed."""

TRANSITIONS: Final[Mapping[ShareState, frozenset[ShareState]]] = MappingProxyType(
    {
        ShareState.WAITING: frozenset({ShareState.PROVING, ShareState.CONFIRMED, ShareState.FAILED}),
        ShareState.PROVING: frozenset({ShareState.WAITING, ShareState.SENT, ShareState.CONFIRMED, ShareState.FAILED}),
        ShareState.SENT: frozenset({ShareState.WAITING, ShareState.CONFIRMED, ShareState.FAILED}),
        ShareState.FAILED: frozenset({ShareState.WAITING, ShareState.CONFIRMED}),
        ShareState.CONFIRMED: frozenset(),
    }
)
"""Legal next states of each state."""


class ShareKey(NamedTuple):
    """Identity of a share, independent of its due time.

    The last two bind the content (`kind` and `extra` do not), because a position does not: until the leaves are agreed,
    a false node can serve another leaf there, and a share of that leaf must not make the voter's share known.

    Attributes:
        round_id: 32 bytes.
        share_index: 0 to 15.
        proposal_id: 1 or more.
        tree_position: leaf index of the vote commitment, below 2^24.
        vote_decision: 0 to 7.
        shares_hash: 32 bytes.
    """

    round_id: bytes
    share_index: int
    proposal_id: int
    tree_position: int
    vote_decision: int
    shares_hash: bytes

    def encode(self) -> bytes:
        """Encode the key as 78 bytes for hashing: fixed widths, big-endian, so the encoding is injective."""
        return _KEY.pack(*self)


@dataclass(frozen=True, slots=True)
class Share:
    """A share as posted by a wallet.

    The fields that a wallet posts have a type and, if it differs, a name in JSON. They are validated in this order. The
    repr omits the witness, so that no secret reaches a log.

    Attributes:
        kind: selects the circuit generations that prove the share (`helper.circuits`); "" for k10 and k11.
        extra: all other fields of shares of this kind, encoded by their generation; empty for k10 and k11.
    """

    share_index: Annotated[int, _INDEX, "enc_share.share_index"]
    c1: Annotated[bytes, _POINT, "enc_share.c1"] = field(repr=False)
    c2: Annotated[bytes, _POINT, "enc_share.c2"] = field(repr=False)
    round_id: Annotated[bytes, HexField("The voting round: a canonical Pallas base field element."), "vote_round_id"]
    proposal_id: Annotated[int, IntegerField("A proposal of the round.", 1, 50)]
    vote_decision: Annotated[int, IntegerField("The index of one of the proposal's options.", 0, 7)]
    tree_position: Annotated[
        int,
        IntegerField("The index of the vote commitment's leaf in the round's commitment tree.", 0, MAX_TREE_POSITION),
    ] = field(repr=False)
    submit_at: Annotated[
        int,
        IntegerField(
            "The Unix time in seconds at which to reveal the share; 0, a time in the past or no value means "
            "immediately. At most the round's vote_end_time; a share for exactly that time is accepted, but the chain "
            "counts it only if the end is postponed.",
            0,
            2**63 - 1,
            default=0,
        ),
    ]
    shares_hash: Annotated[
        bytes, Base64Field("Poseidon hash of share_comms: a canonical Pallas base field element.")
    ] = field(repr=False)
    share_comms: Annotated[
        bytes,
        ArrayField(
            "The commitments to the vote's shares.", SHARE_COUNT, Base64Field("A canonical Pallas base field element.")
        ),
    ] = field(repr=False)
    primary_blind: Annotated[
        bytes, Base64Field("The blind of this share's commitment: a canonical Pallas base field element.")
    ] = field(repr=False)
    kind: str = ""
    extra: bytes = field(default=b"", repr=False)

    def find_choice_error(self, options: Sequence[int]) -> ShareRefused | None:
        """Return why the share does not fit a proposal with these options, None if it does.

        Generations whose shares hide the decision override this in the shares that they read.
        """
        if self.vote_decision in options:
            return None
        return ShareRefused(400, "is not an option of the proposal", field="vote_decision")

    @property
    def key(self) -> ShareKey:
        """The identity of the share."""
        return ShareKey(
            self.round_id,
            self.share_index,
            self.proposal_id,
            self.tree_position,
            self.vote_decision,
            self.shares_hash,
        )


SHARE_FIELDS: Final = list_fields(Share)
"""The fields that a wallet posts, in the order in which they are validated."""
SHARE_JSON: Final = ObjectField(
    "One share of a vote. Unknown fields are ignored.",
    nest_fields(SHARE_FIELDS, {"enc_share": "The share, encrypted with ElGamal over Pallas."}),
    kind="a JSON object",
)
"""The payload of `POST /shares`."""


def share_to_payload(share: Share) -> dict[str, Any]:
    """Return the fields of a share as a wallet sends them."""
    payload: dict[str, Any] = {}
    for name, json_name, kind in SHARE_FIELDS:
        *outer, key = json_name.split(".")
        holder = payload.setdefault(outer[0], {}) if outer else payload
        holder[key] = kind.encode(getattr(share, name))
    return payload


def share_from_payload(payload: Mapping[str, Any]) -> Share:
    """Return the share of a payload, without the checks that only native code makes: ranges, points and hashes.

    Raises:
        ValueError: a field is missing or malformed. The error does not quote its value.
    """
    values: dict[str, Any] = {}
    for name, json_name, kind in SHARE_FIELDS:
        *outer, key = json_name.split(".")
        holder = payload.get(outer[0]) if outer else payload
        try:
            values[name] = kind.decode(None if holder is None else holder.get(key))
        except (AttributeError, TypeError, ValueError):
            raise ValueError(f"{json_name} is missing or invalid") from None
    return Share(**values)
