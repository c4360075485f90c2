"""Rows of every table with their keyed check, which detects damage, and the texts and marks in `meta`. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hmac import compare_digest
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple, TypeVar

import orjson

from helper.core.share import SHARE_FIELDS, Share, ShareState
from helper.core.text_forms import clean_text, format_time
from helper.errors import StoreCorrupt, StoreError, StoreMoved
from helper.store.models import MOVED, DamagedShare, StoredRound
from proofs import row_check, row_checks

Row = tuple[Any, ...]
"""The row of a query, of a type that its caller knows."""
Column = int | str | bytes | float | None
"""The value of a column."""

CheckedRow = TypeVar("CheckedRow", "RoundKeyRow", "ShareRow", "RevealRow", "RoundRow")

HASH_BYTES: Final = 32
MAX_NOTE_CHARS = 400
MAX_STAGE_CHARS = 32


def truncate_text(text: str, limit: int = MAX_NOTE_CHARS) -> str:
    """Return the text without control characters, truncated to the length of its column."""
    text = clean_text(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def is_sound(key: bytes, row: tuple[Column, ...]) -> bool:
    """Return whether a row passes its check, which is its last column."""
    stored = row[-1]
    try:
        return isinstance(stored, bytes) and compare_digest(stored, row_check(key, row[:-1]))
    except (TypeError, OverflowError):
        return False  # a column has a type or size that is never written


def with_check(key: bytes, row: CheckedRow) -> CheckedRow:
    """Return the same row with its check."""
    return row._replace(row_check=row_check(key, row[:-1]))


class RoundKeyRow(NamedTuple):
    """The number and the MAC key of a round: the columns of `round_keys` in table order."""

    no: int
    round_id: bytes
    mac_key: bytes
    row_check: bytes = b""


_STORED: Final = [(field.name, field.type.row_format) for field in SHARE_FIELDS if field.name != "round_id"]
_INTEGERS: Final = {name: width for name, width in _STORED if not width.endswith("s")}
_BYTES: Final = {name: width for name, width in _STORED if width.endswith("s")}
_INTEGER_NAMES: Final = ("received_ms", *_INTEGERS)
WITNESS_FORMATS: Final = {"received_ms": "q", **_INTEGERS, "nullifier": f"{HASH_BYTES}s", **_BYTES}
"""The fields of the witness in `ShareRow`, in its order, and their formats as in `struct`.

After them it has, unless both are empty, the length of `kind` in one byte, `kind` and `extra`.
"""
_NUMBERS: Final = struct.Struct(">q" + "".join(_INTEGERS.values()))
_WITNESS: Final = struct.Struct(">" + "".join(WITNESS_FORMATS.values()))
_NULLIFIER: Final = slice(_NUMBERS.size, _NUMBERS.size + HASH_BYTES)
_DECODED: Final = [*WITNESS_FORMATS, "round_id"]
_get_integers: Final = attrgetter(*_INTEGERS)
_get_bytes: Final = attrgetter(*_BYTES)
_select_posted: Final = itemgetter(*(_DECODED.index(field.name) for field in SHARE_FIELDS))


def encode_witness(share: Share, nullifier: bytes, received_ms: int) -> bytes:
    """Return the witness of a share. Runs for each accepted share.

    Raises:
        StoreError: a field has a wrong length or is out of range.
    """
    kind = share.kind.encode()
    try:
        numbers = _NUMBERS.pack(received_ms, *_get_integers(share))
        others = b"".join((bytes((len(kind),)), kind, share.extra)) if kind or share.extra else b""
    except (struct.error, ValueError) as error:
        raise _invalid_share(str(error)) from error
    fixed = b"".join((numbers, nullifier, *_get_bytes(share)))
    if len(fixed) != _WITNESS.size:
        raise _invalid_share("a field of the share has a wrong length")
    return fixed + others


def _invalid_share(reason: str) -> StoreError:
    return StoreError(f"the schema rejected the change: {reason}", advice="This is a bug in the helper: report it.")


def read_extra(witness: bytes) -> tuple[str, bytes]:
    """Return `kind` and `extra` of a witness."""
    others = witness[_WITNESS.size :]
    kind_end = 1 + others[0] if others else 0
    return others[1:kind_end].decode(), others[kind_end:]


class ShareRow(NamedTuple):
    """A live share: its round id and the columns of `shares`, except `tag`, in the order of the row check.

    Attributes:
        id: never reused.
        witness: what nobody with access to the database may read, before it is sealed; empty if it cannot be read.
        rank: its sort key among shares due in the same millisecond.
        crashes: prover workers that crashed on it so far.
        proved_height: chain height at its last proof, None before the first.
    """

    round_id: bytes
    id: int
    round_no: int
    mac: bytes
    witness: bytes
    rank: int
    state: int
    due_ms: int
    attempts: int
    crashes: int
    proved_height: int | None
    stage: str
    note: str
    row_check: bytes = b""

    def __repr__(self) -> str:
        """Hide the witness."""
        return f"ShareRow(id={self.id!r})"

    @property
    def is_moved(self) -> bool:
        """Whether an export moved the share to another machine."""
        return self.state == ShareState.FAILED and self.stage == MOVED

    @property
    def nullifier(self) -> bytes:
        """The nullifier; shorter if the witness is damaged."""
        return self.witness[_NULLIFIER]

    @property
    def integers(self) -> dict[str, int]:
        """The integers of the witness by name, -1 if it is damaged. Decodes nothing else."""
        if len(self.witness) < _WITNESS.size:
            return dict.fromkeys(_INTEGER_NAMES, -1)
        return dict(zip(_INTEGER_NAMES, _NUMBERS.unpack_from(self.witness), strict=True))

    @property
    def submit_at(self) -> int:
        """The time that the wallet has set, -1 if the witness is damaged."""
        return self.integers["submit_at"]

    @property
    def received_ms(self) -> int:
        """Unix milliseconds of the share's arrival, -1 if the witness is damaged."""
        return self.integers["received_ms"]

    @property
    def first_due_ms(self) -> int:
        """Unix milliseconds at which the first attempt was due: `submit_at`, or the arrival if that was later."""
        return max(self.submit_at * 1000, self.received_ms)

    @property
    def share(self) -> Share:
        """The share as the wallet posted it. The row must be sound."""
        values = _select_posted((*_WITNESS.unpack_from(self.witness), self.round_id))
        return Share(*(*values, *read_extra(self.witness)))

    def with_submit_at(self, submit_at: int) -> ShareRow:
        """Return the row with another time set by the wallet, without its check."""
        share = replace(self.share, submit_at=submit_at)
        return self._replace(witness=encode_witness(share, self.nullifier, self.received_ms))

    def to_damaged_share(self) -> DamagedShare:
        """Convert a damaged row for the report that it is quarantined. Any column may have any value."""
        mac, round_id, state = self.mac, self.round_id, self.state
        return DamagedShare(
            ref=share_ref(mac) if isinstance(mac, bytes) else "",
            round_id=round_id if isinstance(round_id, bytes) else b"",
            state=state if isinstance(state, int) else -1,
        )


def add_row_checks(key: bytes, rows: Sequence[ShareRow]) -> list[ShareRow]:
    """Return the same rows with their checks."""
    checks = row_checks(key, [row[:-1] for row in rows])
    return [ShareRow._make((*row[:-1], check)) for row, check in zip(rows, checks, strict=True)]


class RevealRow(NamedTuple):
    """The message of a share, and its sends: the fields in the order of the row check.

    Attributes:
        share_id: 0 before it is stored.
        message: the transaction: 0x04 and the protobuf.
        tx_hash: SHA-256 of `message`.
        anchor_height: height of the tree root that the proof refers to.
        height: the chain's height when the proof was made.
        sends: number of sends that were started.
        first_sent_height: chain height at the first send, None before it.
        last_sent_height: chain height at the latest send.
        last_endpoint: name of the endpoint of the latest send.
        last_outcome: result of the latest send, None while unknown.
        decide_height: height of the chain at which the message needs a decision.
        anchor_root: the root itself, since nodes may have different ones at that height; None if it was imported.
    """

    share_id: int
    message: bytes
    tx_hash: bytes
    anchor_height: int
    circuit: str
    height: int
    sends: int = 0
    first_sent_height: int | None = None
    last_sent_height: int | None = None
    last_endpoint: str | None = None
    last_outcome: str | None = None
    decide_height: int = 0
    anchor_root: bytes | None = None
    row_check: bytes = b""

    def __repr__(self) -> str:
        """Hide the message."""
        return f"RevealRow(share_id={self.share_id!r})"


class RoundRow(NamedTuple):
    """A round as the chain last listed it: the columns of `rounds` in table order."""

    round_no: int
    status: int
    vote_end_time: int
    created_at_height: int
    proposals: str
    seen_ms: int
    closed_ms: int | None = None
    alerted_ms: int | None = None
    row_check: bytes = b""

    def to_stored_round(self, round_id: bytes) -> StoredRound:
        """Return the row as `Store.list_rounds` returns it."""
        return StoredRound(
            round_id=round_id,
            status=self.status,
            vote_end_time=self.vote_end_time,
            created_at_height=self.created_at_height,
            proposals=tuple((number, tuple(options)) for number, options in orjson.loads(self.proposals)),
            closed_at=None if self.closed_ms is None else self.closed_ms / 1000,
            alerted_at=None if self.alerted_ms is None else self.alerted_ms / 1000,
        )


def read_rounds(rows: Sequence[Row], key: bytes) -> list[StoredRound]:
    """Return the rounds in the result of the query `rounds` whose rows pass their check."""
    pairs = [(round_id, RoundRow(*columns)) for round_id, *columns in rows]
    return [row.to_stored_round(round_id) for round_id, row in pairs if is_sound(key, row)]


def share_ref(mac: bytes) -> str:
    """Return the reference of a share that operators see: the first 12 hex characters of its mac."""
    return mac.hex()[:12]


ROW_CHECK_KEY: Final = "key.rows"
RANK_KEY: Final = "key.order"
CHAIN_ID_KEY: Final = "chain_id"
"""Key of the id of the chain whose rounds the queue has."""
RUN_KEY: Final = "file.run"
"""Key of the identifier of the run that has the file open or that crashed (see `sqlite/displacement.py`)."""
KEY_CHECK: Final = "seal.check"
"""Key of the key check value of an encrypted database (`Keyring.make_probe`)."""
KEYS_IN_USE: Final = "seal.keys"
"""Key of the identifiers (hex, separated by spaces) of the keys with which rows of a file may be encrypted."""
UNFINISHED_KEY: Final = "copy.unfinished"
"""A copy into this database is unfinished."""
MOVED_KEY: Final = "copy.moved"
"""The queue of this database was moved to another one."""
_CHECK_KEY: Final = b"small facts"
"""Key of the row checks of `meta`. Not secret, because the checks only detect damage."""
_UNREADABLE: Final = "?"


def make_meta_row(name: str, value: str) -> tuple[str, str, bytes]:
    """Return the row of a text."""
    return name, value, row_check(_CHECK_KEY, (name, value))


def read_meta_value(rows: Sequence[Row]) -> str | None:
    """Return the text in the result of the query `get_meta`; None if there is no row or it is damaged."""
    return str(rows[0][1]) if rows and is_sound(_CHECK_KEY, rows[0]) else None


def read_key(rows: Sequence[Row], name: str, label: str = "the database") -> bytes:
    """Return a key in the result of the query `get_meta`.

    Raises:
        StoreCorrupt: there is no row or it is damaged; the message names the key and the database.
    """
    text = read_meta_value(rows)
    if text is None:
        raise StoreCorrupt(f"{label} is damaged: {name} failed its check")
    return bytes.fromhex(text)


@dataclass(frozen=True, slots=True)
class CopyMark:
    """A mark of a copy.

    Attributes:
        id: identifier of the copy, the same in both databases.
        other: the other database, as named in messages without a password.
        at: Unix time at which the mark was written.
        is_erased: whether the source's rows have been deleted, or some of them.
    """

    id: str
    other: str
    at: int
    is_erased: bool = False

    def to_text(self) -> str:
        """Return the stored form."""
        return orjson.dumps(asdict(self)).decode()


def read_mark(rows: Sequence[Row]) -> CopyMark | None:
    """Parse a mark. An unreadable one is returned as a mark with unknown fields, so that it still blocks use."""
    if not rows:
        return None
    text = read_meta_value(rows)
    try:
        fields: Mapping[str, Any] = orjson.loads(text or "")
        return CopyMark(str(fields["id"]), str(fields["other"]), int(fields["at"]), bool(fields.get("is_erased")))
    except (ValueError, KeyError, TypeError):
        return CopyMark(_UNREADABLE, _UNREADABLE, 0)


def refuse_marked(rows: Sequence[Row], label: str) -> None:
    """Refuse to use a database that a copy has marked, with the result of the query `get_marks`.

    Raises:
        StoreMoved: it is marked; the message says where the queue is.
    """
    marks = {row[0]: read_mark([row]) for row in rows}
    mark = marks.get(MOVED_KEY)
    if mark is not None:
        raise StoreMoved(
            f"the queue of {label} was moved to {mark.other} at {format_time(mark.at)} UTC",
            advice="Configure that database: [store] url for a shared database, [helper] db_path for a file. To move "
            "the queue back, run `svote-helper db copy --to` with that database as the source. Only if that database "
            "is permanently lost, run `svote-helper db copy --undo`.",
        )
    mark = marks.get(UNFINISHED_KEY)
    if mark is not None:
        raise StoreMoved(
            f"{label} contains an unfinished copy of {mark.other}",
            advice="Run the same `svote-helper db copy` again to complete it. Until then the queue remains in the "
            "source.",
        )
