"""Malformed payloads: bytes flipped, cut or repeated, and values replaced by hostile ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

PLACEHOLDER = "\ue000"
LONG_NUMBER = b"9" * 5000
HOSTILE_VALUES: Sequence[bytes] = (
    b"null",
    b"true",
    b"-1",
    b"0",
    b"-0",
    b"15",
    b"16",
    b"1.0",
    b"1e0",
    b"1e999",
    b"-1e-999",
    b"NaN",
    b"Infinity",
    b"0x10",
    b"01",
    b"16777216",
    b"9223372036854775807",
    b"9223372036854775808",
    b"18446744073709551616",
    LONG_NUMBER,
    b'""',
    b'"0"',
    b'"\\ud800"',
    b'"\\u0000"',
    b'"\xff\xfe"',
    b'"\xed\xa0\x80"',
    b'"\xe2\x80\xa8"',
    b'"' + b"A" * 43 + b'="',
    b'"' + b"A" * 42 + b'B="',
    b'"' + b"/" * 43 + b'="',
    b'"' + b"f" * 64 + b'"',
    b'"' + b"A" * 20_000 + b'"',
    '"{}"'.format("٣" * 64).encode(),
    b"[]",
    b"{}",
    b"[" * 1500 + b"]" * 1500,
    b'{"a":' * 1500,
    b"[null,null]",
    b"[" + b"0," * 15 + b"0]",
    b'{"c1":null,"c2":null}',
    b"",
    b",",
    b'"unclosed',
    b'"a":1,"b"',
)
"""Hostile values that replace a value."""


class PayloadMutator:
    """Endless iterator over malformed payloads.

    Args:
        payloads: valid payloads as wallets send them.
        rng: selects the payload and the mutation.
    """

    def __init__(self, payloads: Sequence[dict[str, Any]], rng: random.Random) -> None:
        self._rng = rng
        self._payloads = [json.dumps(payload).encode() for payload in payloads]
        self._slots = [pieces for payload in payloads for pieces in _value_slots(payload)]
        self._values = [*HOSTILE_VALUES, *(value for _, value, _ in self._slots)]

    def __iter__(self) -> Iterator[bytes]:
        while True:
            yield self.next_payload()

    def next_payload(self) -> bytes:
        """Return a payload with a value replaced, bytes changed, or both."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.6:
            before, _, after = rng.choice(self._slots)
            payload = before + rng.choice(self._values) + after
        else:
            payload = rng.choice(self._payloads)
        if kind < 0.5:
            return payload
        changed = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            self._change_bytes(changed)
        return bytes(changed)

    def _change_bytes(self, payload: bytearray) -> None:
        rng = self._rng
        start = rng.randrange(len(payload) + 1)
        end = min(len(payload), start + rng.randint(0, 40))
        match rng.randrange(6):
            case 0:
                payload[start : start + 1] = bytes([rng.randrange(256)])
            case 1:
                del payload[start:end]
            case 2:
                payload[start:start] = payload[start:end] * rng.randint(1, 3)
            case 3:
                payload[start:start] = rng.randbytes(rng.randint(1, 8))
            case 4:
                payload[start:start] = rng.choice(HOSTILE_VALUES)
            case _:
                del payload[start:]


def _value_slots(payload: dict[str, Any]) -> list[tuple[bytes, bytes, bytes]]:
    """Return for every nested value the text before it, its own, and the text after."""
    slots = []
    for path, value in _value_paths(payload, ()):
        if path[0] == "all_enc_shares" and len(path) > 1:
            continue  # this value is not read
        before, after = json.dumps(_replace_value(payload, path), ensure_ascii=False).split(f'"{PLACEHOLDER}"')
        slots.append((before.encode(), json.dumps(value).encode(), after.encode()))
    return slots


def _value_paths(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if path:
        yield path, node
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield from _value_paths(value, (*path, key))


def _replace_value(node: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return PLACEHOLDER
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = _replace_value(node[path[0]], path[1:])
    return copy
