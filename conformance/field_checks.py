"""Checks that every field of a share is required and strictly encoded. One check for each field and fault.

Each check posts a valid share with one altered field, which fails only this check if it is accepted. If a lenient
helper can read the unaltered value, the share is another one than that of all other alterations.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from conformance.check_failures import CheckSkipped
from conformance.checks import CheckList, Level
from conformance.refusals import Reason, refused
from conformance.session import Session
from conformance.shares import Body, TestShare, decode32, encode32

_SOURCE: Final = "protocol §2: POST shares"
_ENCODING: Final = "protocol §3: canonical encodings"
_MODULUS: Final = 0x40000000000000000000000000000000224698FC094CF91B992D30ED00000001
"""Of the Pallas base field (pasta_curves)."""
_NON_CANONICAL: Final = (_MODULUS + 5).to_bytes(32, "little")
_OFF_CURVE_X: Final = 2
"""No point of Pallas (y² = x³ + 5) has this x."""
_MAX_POSITIONS: Final = 1 << 24
_REASONS: Final = {"submit_at": (Reason.TIME,), "vote_round_id": (Reason.ROUND, Reason.LATER)}
"""Other reasons for which a field is refused."""

checks = CheckList()

Alter = Callable[[Any], Any]
_ABSENT: Final = object()
"""Returned by a fault that removes the field."""


@dataclass(frozen=True, slots=True)
class _Fault:
    """An invalid change of a field's value; `is_readable` if a lenient helper can still read the value."""

    number: int
    name: str
    alter: Alter
    level: Level = "must"
    source: str = _SOURCE
    is_readable: bool = False


@dataclass(frozen=True, slots=True)
class _Field:
    """A field: its number, its path in the JSON, and its faults."""

    number: int
    path: tuple[str | int, ...]
    faults: tuple[_Fault, ...]

    @property
    def name(self) -> str:
        """The name in observations: `enc_share.c1`, `share_comms[3]`."""
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text


@dataclass(frozen=True, slots=True)
class _FieldCheck:
    """Posts a share with one faulty field, which must be refused."""

    field: _Field
    fault: _Fault

    async def __call__(self, session: Session) -> str:
        names = [part for part in self.field.path if isinstance(part, str)]
        is_readable = self.fault.is_readable or names == ["submit_at"]
        post = session.post_refusable if is_readable else session.post_altered
        reply = await post(lambda share, due: _altered(share, self.field.path, self.fault.alter, due))
        reasons = (Reason.CONTENT, *_REASONS.get(names[-1], ()))
        return refused(f"POST with {self.field.name} {self.fault.name}", reply, *reasons, path=names)


def _altered(share: TestShare, path: tuple[str | int, ...], alter: Alter, submit_at: int) -> Body:
    """The share's JSON with one altered field."""
    body = share.body(submit_at)
    parent: Any = body
    for part in path[:-1]:
        parent = parent[part]
    before = parent.get(path[-1], 0) if isinstance(parent, dict) else parent[path[-1]]
    value = alter(before)
    if value is _ABSENT:
        if before == 0:
            raise CheckSkipped("the share's value is 0, which may be absent")
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return body


def _always(value: Any) -> Alter:
    return lambda _: value


def _on_bytes(change: Callable[[bytes], bytes]) -> Alter:
    return lambda text: encode32(change(decode32(text)))


def _with_trailing_bits(text: str) -> str:
    """The same 32 bytes in base64 whose unused bits are not zero."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    return f"{text[:42]}{alphabet[alphabet.index(text[42]) | 1]}="


def _url_safe(text: str) -> str:
    # The second byte ensures that the two alphabets differ.
    return base64.urlsafe_b64encode(b"\xfb\xff" + decode32(text)[2:]).decode()


_TYPES: Final = (
    _Fault(1, "missing", _always(_ABSENT)),
    _Fault(2, "null", _always(None)),
    _Fault(3, "true", _always(True)),
    _Fault(4, "an object", _always({"a": 1})),
)
_BYTES: Final = (
    *_TYPES,
    _Fault(5, "a number", _always(12)),
    _Fault(6, "an array", lambda text: [text], is_readable=True),
    _Fault(7, "empty", _always("")),
    _Fault(8, "of 31 bytes", _on_bytes(lambda value: value[:31])),
    _Fault(9, "of 33 bytes", _on_bytes(lambda value: value + b"\0"), is_readable=True),
    _Fault(10, "not base64", _always("?" * 44)),
    _Fault(11, "in hex", lambda text: decode32(text).hex(), is_readable=True),
    _Fault(12, "in base64 of the URL alphabet", _url_safe),
    _Fault(13, "without padding", lambda text: text.rstrip("="), is_readable=True),
    _Fault(14, "with unused bits set", _with_trailing_bits, "should", _ENCODING, is_readable=True),
    _Fault(15, "with a line break", lambda text: f"{text[:20]}\n{text[20:]}", "should", _ENCODING, is_readable=True),
    _Fault(16, "with a space at the end", lambda text: f"{text} ", is_readable=True),
)
_ELEMENT: Final = (
    *_BYTES,
    _Fault(20, "above the modulus", _always(encode32(_NON_CANONICAL)), source=_ENCODING),
    _Fault(21, "equal to the modulus", _always(encode32(_MODULUS.to_bytes(32, "little"))), source=_ENCODING),
    _Fault(22, "of all ones", _always(encode32(b"\xff" * 32)), source=_ENCODING),
)
_POINT: Final = (
    *_BYTES,
    _Fault(23, "the identity", _always(encode32(bytes(32))), source="protocol §2: not the identity"),
    _Fault(24, "off the curve", _always(encode32(_OFF_CURVE_X.to_bytes(32, "little"))), source=_ENCODING),
    _Fault(25, "with x above the modulus", _always(encode32(_NON_CANONICAL)), source=_ENCODING),
    _Fault(26, "with the identity's sign bit", _always(encode32(bytes(31) + b"\x80")), source=_ENCODING),
)
_ROUND_ID: Final = (
    *_TYPES,
    _Fault(5, "a number", _always(12)),
    _Fault(7, "empty", _always("")),
    _Fault(8, "of 63 characters", lambda text: text[:63]),
    _Fault(9, "of 66 characters", lambda text: f"{text}00", is_readable=True),
    _Fault(10, "not hex", lambda text: f"{text[:63]}g"),
    _Fault(11, "in base64", lambda text: encode32(bytes.fromhex(text)), is_readable=True),
    _Fault(12, "with 0x", lambda text: f"0x{text[2:]}"),
    _Fault(16, "with a space at the end", lambda text: f"{text[:63]} "),
    _Fault(20, "above the modulus", _always(_NON_CANONICAL.hex()), source=_ENCODING),
    _Fault(22, "of all ones", _always("ff" * 32), source=_ENCODING),
)
_NUMBER: Final = (
    _Fault(1, "missing", _always(_ABSENT)),
    _Fault(3, "true", _always(True), is_readable=True),
    _Fault(4, "an object", _always({"a": 1})),
    _Fault(5, "a string", str, is_readable=True),
    _Fault(6, "an array", lambda number: [number], is_readable=True),
    _Fault(30, "negative", _always(-1)),
    _Fault(31, "a fraction", lambda number: number + 0.5, is_readable=True),
    _Fault(32, "plus 256", lambda number: number + (1 << 8), is_readable=True),
    _Fault(33, "plus 2^32", lambda number: number + (1 << 32), is_readable=True),
    _Fault(34, "plus 2^64", lambda number: number + (1 << 64), is_readable=True),
)
_POSITION: Final = (
    *(fault for fault in _NUMBER if fault.number != 32),  # it is a valid position
    _Fault(35, "plus 2^24", lambda number: number + _MAX_POSITIONS, is_readable=True),
)
_TIME: Final = (
    *(fault for fault in _NUMBER if fault.number not in (1, 32, 33)),
    _Fault(36, "2^63", _always(1 << 63)),
    _Fault(37, "a date", _always("2030-01-01T00:00:00Z")),
)
_OBJECT: Final = (
    _Fault(1, "missing", _always(_ABSENT)),
    _Fault(2, "null", _always(None)),
    _Fault(3, "true", _always(True)),
    _Fault(5, "a string", _always("text")),
    _Fault(6, "an array", lambda value: [value], is_readable=True),
    _Fault(7, "empty", _always({})),
)
_ARRAY: Final = (
    _Fault(1, "missing", _always(_ABSENT)),
    _Fault(2, "null", _always(None)),
    _Fault(4, "an object", lambda value: {str(index): entry for index, entry in enumerate(value)}, is_readable=True),
    _Fault(5, "a string", "".join, is_readable=True),
    _Fault(7, "empty", _always([])),
    _Fault(8, "of 15 entries", lambda value: value[:15]),
    _Fault(9, "of 17 entries", lambda value: [*value, value[0]], is_readable=True),
    _Fault(40, "nested", lambda value: [value], is_readable=True),
)

FIELDS: Final = (
    _Field(100, ("shares_hash",), _ELEMENT),
    _Field(200, ("primary_blind",), _ELEMENT),
    _Field(300, ("share_comms", 15), tuple(fault for fault in _ELEMENT if fault.number != 1)),
    _Field(400, ("share_comms",), _ARRAY),
    _Field(500, ("enc_share",), _OBJECT),
    _Field(600, ("enc_share", "c1"), _POINT),
    _Field(700, ("enc_share", "c2"), _POINT),
    _Field(800, ("enc_share", "share_index"), (*_NUMBER, _Fault(38, "16", _always(16)))),
    _Field(900, ("vote_round_id",), _ROUND_ID),
    _Field(1000, ("proposal_id",), (*_NUMBER, _Fault(39, "0", _always(0)), _Fault(41, "51", _always(51)))),
    _Field(1100, ("vote_decision",), (*_NUMBER, _Fault(42, "8", _always(8)))),
    _Field(1200, ("tree_position",), _POSITION),
    _Field(1300, ("submit_at",), _TIME),
)
for _field in FIELDS:
    for _fault in _field.faults:
        checks.add(
            _fault.level,
            f"FIELD-{_field.number + _fault.number:04}",
            f"refuses {_field.name} {_fault.name}",
            _fault.source,
            needs_shares=True,
        )(_FieldCheck(_field, _fault))
