"""Bodies of `POST /shares`, valid or invalid in one known way, by name."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

from helper.ingest.validator import MAX_SHARE_BODY_BYTES, SMALL_BODY_BYTES
from tests.unit.ingest.admission_fixtures import END, PAYLOADS, create_payload

HOLE = "\ue000"
INNER = ("enc_share.c1", "enc_share.c2", "enc_share.share_index")
ENTRIES = ("share_comms[0]", "share_comms[7]", "share_comms[15]")
OUTER = (
    "enc_share",
    "vote_round_id",
    "proposal_id",
    "vote_decision",
    "tree_position",
    "submit_at",
    "shares_hash",
    "share_comms",
    "primary_blind",
)
BYTES_FIELDS = ("enc_share.c1", "enc_share.c2", "shares_hash", *ENTRIES, "primary_blind")
INTEGERS = ("enc_share.share_index", "proposal_id", "vote_decision", "tree_position", "submit_at")
IGNORED = ("all_enc_shares", "share_index", "unknown")
MODULUS = 0x40000000000000000000000000000000224698FC094CF91B992D30ED00000001
"""Modulus of the Pallas base field."""


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


CORRECT = b64(bytes(31) + b"\x01")
NON_CANONICAL = b64(MODULUS.to_bytes(32, "little"))
OFF_CURVE = b64(b"\x02" + bytes(31))

TYPES: Mapping[str, str] = {
    "null": "null",
    "true": "true",
    "false": "false",
    "zero": "0",
    "integer": "7",
    "float": "1.0",
    "exponent": "1e0",
    "empty string": '""',
    "string": '"1"',
    "empty list": "[]",
    "list": "[1,2]",
    "empty object": "{}",
    "object": '{"c1":1}',
    "nested lists": "[[[[[[]]]]]]",
    "list of 16": "[" + "0," * 15 + "0]",
}
BROKEN: Mapping[str, str] = {
    "no value": "",
    "NaN": "NaN",
    "-NaN": "-NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "leading zero": "01",
    "negative leading zero": "-01",
    "plus": "+1",
    "only a minus": "-",
    "no integer part": ".5",
    "no fraction": "1.",
    "no exponent": "1e",
    "two points": "1.5.5",
    "hexadecimal": "0x10",
    "underscore": "1_0",
    "too large a float": "1e999",
    "400 digits": "9" * 400,
    "single quotes": "'x'",
    "part of a literal": "nul",
    "more than a literal": "nulll",
    "invalid escape": '"\\q"',
    "invalid escape after a comma": '"a,b\\,c"',
    "short unicode escape": '"\\u12"',
    "lone high surrogate": '"\\ud800"',
    "lone low surrogate": '"\\udc00"',
    "surrogate and letter": '"\\ud800\\u0041"',
    "control character": '"a\nb"',
    "control character after a comma": '"a,{\nb"',
    "NUL": '"\\u0000" \0',
    "unclosed string": '"abc',
    "unclosed list": "[1,2",
    "unclosed object": '{"c1":1',
    "trailing comma in a list": "[1,2,]",
    "trailing comma in an object": '{"c1":1,}',
    "trailing comma in a nested list": '{"c1":[[1 , ]]}',
    "two commas": "[1,,2]",
    "comma first": "[,1]",
    "wrong bracket": "[1}",
    "wrong brace": '{"c1":1]',
    "name without a value": '{"c1"}',
    "name without a colon": '{"c1" 1}',
    "number as name": "{1:2}",
    "comment": "/* 1 */ 1",
    "open lists": "[" * 600,
    "1025 lists": "[" * 1025 + "]" * 1025,
    "1025 objects": '{"a":' * 1025 + "1" + "}" * 1025,
}
NUMBERS = (
    "-1",
    "-0",
    "1",
    "7",
    "8",
    "15",
    "16",
    "50",
    "51",
    "16777215",
    "16777216",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "-9223372036854775809",
    "9" * 300,
    "0.0",
    "-0.0",
    "1E0",
    "1e-999",
)
TEXTS: Mapping[str, str] = {
    "not in the alphabet": "!" * 43 + "=",
    "URL alphabet": b64(b"\xff" * 32).replace("/", "_"),
    "without padding": CORRECT[:-1],
    "with more padding": CORRECT + "=",
    "line break": CORRECT + "\n",
    "space before": " " + CORRECT,
    "unused bits": CORRECT[:-2] + "F=",
    "only padding": "=" * 44,
    "padding within": CORRECT[:20] + "=" + CORRECT[21:],
    "Latin letters": "é" * 44,
    "other digits": "٣" * 44,
    "hex": "0" * 64,
    "1 byte": b64(bytes(1)),
    "30 bytes": b64(bytes(30)),
    "31 bytes": b64(bytes(31)),
    "33 bytes": b64(bytes(33)),
    "33 bytes and padding": b64(bytes(33)) + "==",
    "31 bytes and unused bits": b64(bytes(31))[:-3] + "B==",
    "3000 bytes": b64(bytes(3000)),
    "not canonical": NON_CANONICAL,
    "largest": b64(b"\xff" * 32),
    "off the curve": OFF_CURVE,
    "identity": b64(bytes(32)),
    "another value": CORRECT,
    "one": b64(b"\x01" + bytes(31)),
}
ROUND_IDS: Mapping[str, str] = {
    "63 characters": "0" * 63,
    "65 characters": "0" * 65,
    "not hex": "g" * 64,
    "spaces": " " * 64,
    "prefix": "0x" + "0" * 62,
    "Latin letter": "0" * 62 + "é",
    "other digits": "٣" * 64,
    "not canonical": "ff" * 32,
    "another round": "11" * 31 + "00",
}


def set_field(name: str, value: Any) -> dict[str, Any]:
    """The first recorded payload with one field, named as in errors, replaced."""
    changed = create_payload(all_enc_shares=PAYLOADS[0]["all_enc_shares"][:1])
    if name.startswith("enc_share."):
        changed["enc_share"] = {**changed["enc_share"], name.removeprefix("enc_share."): value}
    elif name.startswith("share_comms["):
        changed["share_comms"] = [*changed["share_comms"]]
        changed["share_comms"][int(name[12:-1])] = value
    else:
        changed[name] = value
    return changed


def set_text(name: str, text: str) -> bytes:
    """The same with a text that need not be JSON."""
    return json.dumps(set_field(name, HOLE)).replace(json.dumps(HOLE), text).encode()


def remove_field(name: str) -> bytes:
    """The same without one field."""
    changed = set_field(name, None)
    outer, _, inner = name.rpartition(".")
    del (changed[outer] if outer else changed)[inner]
    return json.dumps(changed).encode()


def repeat_field(name: str, first: str) -> bytes:
    """The same with one field twice; `first` is the JSON of the first one."""
    inner = name.rpartition(".")[2]
    return json.dumps(create_payload()).replace(f'"{inner}": ', f'"{inner}": {first}, "{inner}": ').encode()


def all_bodies() -> Iterator[tuple[str, bytes]]:
    """Each body with a unique name."""
    yield from _valid()
    yield from _fields()
    yield from _combinations()
    yield from _documents()
    yield from _encodings()
    yield from _large()


def _valid() -> Iterator[tuple[str, bytes]]:
    for index, recorded in enumerate(PAYLOADS):
        yield f"recorded {index}", json.dumps(recorded).encode()
    yield "compact", json.dumps(create_payload(), separators=(",", ":")).encode()
    yield "indented", json.dumps(create_payload(), indent=4).encode()
    yield "all white space", json.dumps(create_payload()).replace(" ", " \t\r\n").encode() + b"\r\n"
    yield (
        "upper-case round",
        json.dumps(create_payload(vote_round_id=create_payload()["vote_round_id"].upper())).encode(),
    )
    yield "without all_enc_shares", remove_field("all_enc_shares")
    yield "share_index outside", json.dumps(create_payload(share_index=3)).encode()
    yield "escaped slashes", json.dumps(create_payload()).replace("/", "\\/").encode()
    yield "escaped name", json.dumps(create_payload()).replace("tree_position", "tree\\u005fposition").encode()
    yield "other case of a name", json.dumps(create_payload()).replace("tree_position", "Tree_position").encode()
    for submit_at in (0, 1, END - 1, END, END + 1):
        yield f"submit_at {submit_at - END}", json.dumps(create_payload(submit_at=submit_at)).encode()


def _fields() -> Iterator[tuple[str, bytes]]:
    for name in (*OUTER, *INNER, *IGNORED[:1]):
        yield f"{name}: absent", remove_field(name)
    for name in (*OUTER, *INNER, *ENTRIES, *IGNORED):
        for kind, text in TYPES.items():
            yield f"{name}: {kind}", set_text(name, text)
        for kind, text in BROKEN.items():
            yield f"{name}: {kind}", set_text(name, text)
    for name in INTEGERS:
        for text in NUMBERS:
            yield f"{name}: {text[:24]}", set_text(name, text)
    for name in BYTES_FIELDS:
        for kind, value in TEXTS.items():
            yield f"{name}: {kind}", json.dumps(set_field(name, value), ensure_ascii=False).encode()
    for kind, value in ROUND_IDS.items():
        yield f"vote_round_id: {kind}", json.dumps(create_payload(vote_round_id=value), ensure_ascii=False).encode()
    for name in (*OUTER, *INNER):
        yield f"{name}: twice, the last valid", repeat_field(name, '"x"')
        yield f"{name}: twice, the last invalid", set_text(name, f'null, "{name.rpartition(".")[2]}": [0]')
    for count in (0, 1, 15, 17, 300):
        yield f"share_comms: {count} entries", json.dumps(create_payload(share_comms=[CORRECT] * count)).encode()


def _combinations() -> Iterator[tuple[str, bytes]]:
    """Two errors: shows the order of the checks."""
    names = (*OUTER, *INNER, *ENTRIES)
    for first, second in zip(names, (*names[4:], *names[:4]), strict=True):
        changed = set_field(first, [True])
        yield f"{first} and {second}", json.dumps({**changed, **_outer(set_field(second, True), second)}).encode()
    for name in BYTES_FIELDS:
        changed = set_field(name, NON_CANONICAL)
        yield f"{name} not canonical, proposal_id", json.dumps({**changed, "proposal_id": 0}).encode()
        yield f"{name} not canonical, other blind", json.dumps({**changed, "primary_blind": CORRECT}).encode()
        yield f"{name} not canonical, other hash", json.dumps({**changed, "shares_hash": CORRECT}).encode()
        yield f"{name} not canonical, unknown round", json.dumps({**changed, "vote_round_id": "00" * 32}).encode()
    yield "two wrong hashes", json.dumps(create_payload(shares_hash=CORRECT, primary_blind=CORRECT)).encode()
    swapped = [*PAYLOADS[0]["share_comms"][1::-1], *PAYLOADS[0]["share_comms"][2:]]
    yield "commitments swapped", json.dumps(create_payload(share_comms=swapped)).encode()
    for index in range(16):
        yield f"share_index {index} of another", json.dumps(set_field("enc_share.share_index", index)).encode()
    sealed = PAYLOADS[0]["enc_share"]
    yield (
        "ciphertext swapped",
        json.dumps(create_payload(enc_share={**sealed, "c1": sealed["c2"], "c2": sealed["c1"]})).encode(),
    )
    yield (
        "another ciphertext",
        json.dumps(create_payload(enc_share={**sealed, "c1": PAYLOADS[1]["enc_share"]["c1"]})).encode(),
    )
    for name, value in {"proposal_id": 3, "vote_decision": 2, "tree_position": 3, "tree_position ": 1}.items():
        yield f"{name}: {value} is not on the chain", json.dumps(create_payload(**{name.strip(): value})).encode()


def _outer(changed: dict[str, Any], name: str) -> dict[str, Any]:
    outer = name.partition("[")[0].partition(".")[0]
    return {outer: changed[outer]}


def _documents() -> Iterator[tuple[str, bytes]]:
    for text in (
        "",
        " ",
        "null",
        "[]",
        '"x"',
        "12",
        "true",
        "tru",
        "{",
        "}",
        "[",
        "{}",
        "{,}",
        "[,]",
        "x",
        "{}x",
        "{} {}",
    ):
        yield f"document {text!r}", text.encode()
    for text in ('{"proposal_id"', '{"proposal_id":', '{"proposal_id":1', '{"proposal_id":1,', '{"proposal_id":1,}'):
        yield f"document {text!r}", text.encode()
    for text in (
        '{"enc_share":{"c1',
        '{"share_comms":["a",',
        '{"share_comms":[[1],2,,',
        '{"x":{"enc_share":',
        '[{"c1":',
    ):
        yield f"document {text!r}", text.encode()
    yield "document of values", json.dumps(list(create_payload().values())).encode()
    yield "document in a list", json.dumps([create_payload()]).encode()
    complete = json.dumps(create_payload()).encode()
    for length in range(1, len(complete), 97):
        yield f"first {length} bytes", complete[:length]
    yield "twice", complete + complete
    yield "garbage after", complete + b" x"
    yield "byte order mark", b"\xef\xbb\xbf" + complete
    yield "byte order mark after", complete + b"\xef\xbb\xbf"
    yield "NUL after", complete + b"\0"
    yield "form feed before", b"\x0c" + complete
    yield "no-break space", complete.replace(b": ", b":\xc2\xa0", 1)
    yield "UTF-16", json.dumps(create_payload()).encode("utf-16")
    yield "line separator in a name", complete[:-1] + b',"\xe2\x80\xa8":1}'
    yield "brackets in a name", complete[:-1] + b',"{[,:]}":1, "enc_share":}'
    yield "quotes in a name", complete[:-1] + b',"\\"enc_share\\"":}'


def _encodings() -> Iterator[tuple[str, bytes]]:
    invalid = {"continuation": b"\x80", "two bytes": b"\xc3\x28", "surrogate": b"\xed\xa0\x80", "overlong": b"\xc0\xaf"}
    for name in (*OUTER, *INNER, *ENTRIES, *IGNORED):
        for kind, data in invalid.items():
            yield f"{name}: invalid UTF-8, {kind}", set_text(name, '"@@"').replace(b"@@", data)
    yield "invalid UTF-8 in a name", b'{"\xff":1}'
    yield "invalid UTF-8 after invalid JSON", set_text("proposal_id", "x").replace(b"}", b"\xff}")
    yield "invalid UTF-8 after the document", json.dumps(create_payload()).encode() + b"\xff"
    yield "truncated UTF-8", b'{"proposal_id":"\xe2\x80'


def _large() -> Iterator[tuple[str, bytes]]:
    """Bodies above `SMALL_BODY_BYTES`, which are reduced to the fields of a share first."""
    pads = {"spaces": b" " * SMALL_BODY_BYTES, "member": b',"pad":[' + b"[]," * (SMALL_BODY_BYTES // 3) + b"1]"}
    for kind, pad in pads.items():
        for name in (*OUTER, *INNER, *ENTRIES):
            for invalid in ("null", "true", "1e999", '"\\ud800"', "01", "[1,]", "[" * 20, '"\\q"'):
                yield f"large, {kind}, {name}: {invalid[:8]}", set_text(name, invalid)[:-1] + pad + b"}"
        for name in ("proposal_id", "enc_share.c1", "share_comms[7]"):
            before = set_text(name, "@@").replace(b"{", b"{" + pad.strip(b",") + b",", 1).replace(b"{,", b"{", 1)
            yield f"large, {kind} first, {name}: invalid", before.replace(b"@@", b"x")
            yield f"large, {kind} first, {name}: invalid UTF-8", before.replace(b"@@", b'"\xff"')
        valid = json.dumps(create_payload()).encode()
        yield f"large, {kind}, valid", valid[:-1] + pad + b"}"
        yield f"large, {kind}, garbage after", valid[:-1] + pad + b"}x"
        yield f"large, {kind}, truncated", valid[:-1] + pad
        yield f"large, {kind}, repeated name", repeat_field("tree_position", '"x"')[:-1] + pad + b"}"
        yield (
            f"large, {kind}, other blind",
            json.dumps(create_payload(primary_blind=CORRECT)).encode()[:-1] + pad + b"}",
        )
    valid = json.dumps(create_payload()).encode()
    yield (
        "large, lone surrogate in an unknown member",
        valid[:-1] + b',"x":"\\ud800","y":"' + b"y" * SMALL_BODY_BYTES + b'"}',
    )
    yield (
        "large, infinite float in an unknown member",
        valid[:-1] + b',"x":1e999,"y":"' + b"y" * SMALL_BODY_BYTES + b'"}',
    )
    yield "large, deep unknown member", valid[:-1] + b',"x":' + b"[" * SMALL_BODY_BYTES + b"]" * SMALL_BODY_BYTES + b"}"
    yield "large, fields too large", json.dumps(create_payload(share_comms=[0] * SMALL_BODY_BYTES)).encode()
    yield "large, in a list", b"[" + valid + b" " * SMALL_BODY_BYTES + b"]"
    yield "large, spaces only", b" " * (SMALL_BODY_BYTES + 1)
    yield "exactly small", valid[:-1] + b" " * (SMALL_BODY_BYTES - len(valid)) + b"}"
    yield "exactly large", valid[:-1] + b" " * (SMALL_BODY_BYTES + 1 - len(valid)) + b"}"
    yield "exactly largest", valid[:-1] + b" " * (MAX_SHARE_BODY_BYTES - len(valid)) + b"}"
    yield "larger than the largest", valid[:-1] + b" " * (MAX_SHARE_BODY_BYTES + 1 - len(valid)) + b"}"
