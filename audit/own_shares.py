"""A voter's own shares in an audited round: whether each was counted, once and with a valid proof. Pure."""

from __future__ import annotations

import json
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from helper.core.json_records import HEX_32, fact
from helper.errors import UsageError
from helper.server.operator_parameters import parse_hex32

MAX_FILE_BYTES: Final = 128 << 20
MAX_SHARES: Final = 1_000_000
"""Maximum number of shares in a file. A voter has at most 800 in a round."""
_NULLIFIER_KEYS: Final = ("nullifier", "share_nullifier")
_ROUND_KEYS: Final = ("vote_round_id", "round_id", "round")
_MAX_DEPTH: Final = 50


class ShareState(StrEnum):
    """Whether a share was counted."""

    COUNTED = "counted"
    COUNTED_TWICE = "counted_twice"
    MISSING = "missing"
    NOT_CHECKED = "not_checked"


class ProofState(StrEnum):
    """Whether the proof of a reveal is valid."""

    VALID = "valid"
    INVALID = "invalid"
    NOT_CHECKED = "not_checked"


@dataclass(slots=True)
class FoundReveal:
    """A counted reveal of a share."""

    height: int = fact("Block that counted it.")
    proposal: int = fact("Proposal id.")
    option: int = fact("Option that it counts for.")
    proof: ProofState = fact("valid, invalid, or not_checked.", default=ProofState.NOT_CHECKED)


@dataclass(frozen=True, slots=True)
class OwnShare:
    """One of the voter's shares."""

    nullifier: str = fact("Nullifier, hex.", pattern=HEX_32)
    state: ShareState = fact("counted, counted_twice, missing, or not_checked if data of the round is missing.")
    reveals: Sequence[FoundReveal] = fact("Its counted reveals: one, unless it is missing or was counted twice.")


@dataclass(frozen=True, slots=True)
class OwnShares:
    """The voter's shares (`--mine`)."""

    counted: int = fact("Shares that were counted once.")
    counted_twice: int = fact("Shares that were counted more than once.")
    missing: int = fact("Shares that were not counted.")
    not_checked: int = fact("Shares that were not found in a round whose data is incomplete.")
    shares: Sequence[OwnShare] = fact("Each share, in the order of the file.")

    @property
    def are_counted(self) -> bool | None:
        """Whether all shares were counted once, with valid proofs; None if that is not known."""
        proofs = {reveal.proof for share in self.shares for reveal in share.reveals}
        if self.missing or self.counted_twice or ProofState.INVALID in proofs:
            return False
        return None if self.not_checked or ProofState.NOT_CHECKED in proofs else True


@dataclass(slots=True)
class ShareSearch:
    """The search for shares in the reveals of a round.

    Attributes:
        found: the reveals of each share that is searched, by nullifier.
    """

    found: dict[bytes, list[FoundReveal]] = field(default_factory=dict)

    def add(self, nullifier: bytes, height: int, proposal: int, option: int) -> FoundReveal | None:
        """Note a counted reveal, if it is of a searched share."""
        reveals = self.found.get(nullifier)
        if reveals is None:
            return None
        reveals.append(FoundReveal(height, proposal, option))
        return reveals[-1]

    def finish(self, *, is_complete: bool) -> OwnShares:
        """Return what was found. `is_complete`: whether all reveals of the round were read."""
        absent = ShareState.MISSING if is_complete else ShareState.NOT_CHECKED
        by_number = {0: absent, 1: ShareState.COUNTED}
        shares = [
            OwnShare(nullifier.hex(), by_number.get(len(reveals), ShareState.COUNTED_TWICE), reveals)
            for nullifier, reveals in self.found.items()
        ]
        numbers = Counter(share.state for share in shares)
        return OwnShares(**{state.value: numbers[state] for state in ShareState}, shares=shares)


@dataclass(frozen=True, slots=True)
class ShareFile:
    """The nullifiers in a file, each once, by round; None where the file names no round."""

    nullifiers: Mapping[bytes, bytes | None]

    def search(self, round_id: bytes) -> ShareSearch:
        """The search for the shares that may be of a round. It finds none if all are of other rounds."""
        return ShareSearch({nullifier: [] for nullifier, named in self.nullifiers.items() if named in (None, round_id)})


def read_share_file(data: bytes) -> ShareFile:
    """Read nullifiers: hex, one a line, or JSON of a wallet with fields `nullifier` in hex or base64.

    In JSON, the shares in an object with a round id are of that round.

    Raises:
        UsageError: the file is not readable; the text does not contain its values.
    """
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"--mine must have at most {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError("--mine must be text") from None
    nullifiers: dict[bytes, bytes | None] = {}
    for nullifier, round_id in _read_json(text) if text.lstrip()[:1] in ("{", "[") else _read_lines(text):
        nullifiers.setdefault(nullifier, round_id)
        if len(nullifiers) > MAX_SHARES:
            raise UsageError(f"--mine must have at most {MAX_SHARES} shares")
    if not nullifiers:
        raise UsageError("--mine has no nullifier")
    return ShareFile(nullifiers)


def _read_lines(text: str) -> Iterator[tuple[bytes, None]]:
    for number, line in enumerate(text.splitlines(), 1):
        if hex_text := line.strip():
            yield parse_hex32(f"--mine: line {number}", hex_text), None


def _read_json(text: str) -> Iterator[tuple[bytes, bytes | None]]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("--mine is not valid JSON") from None
    yield from _search_json(value, None, 0)


def _search_json(value: Any, round_id: bytes | None, depth: int) -> Iterator[tuple[bytes, bytes | None]]:
    if depth > _MAX_DEPTH:
        raise UsageError("--mine is nested too deeply")
    if isinstance(value, list):
        for item in value:
            yield from _search_json(item, round_id, depth + 1)
    if not isinstance(value, dict):
        return
    names = (_decode_any(value.get(key)) for key in _ROUND_KEYS)
    round_id = next((name for name in names if name is not None), round_id)
    for key, item in value.items():
        if key in _NULLIFIER_KEYS and isinstance(item, str):
            nullifier = _decode_any(item)
            if nullifier is None:
                raise UsageError(f"--mine: {key} must be 32 bytes in hex or base64")
            yield nullifier, round_id
        else:
            yield from _search_json(item, round_id, depth + 1)


def _decode_any(text: object) -> bytes | None:
    """32 bytes in hex or base64; None for anything else, such as the title of a round."""
    if not isinstance(text, str):
        return None
    try:
        value = bytes.fromhex(text) if len(text) == 64 else b64decode(text, validate=True)
    except ValueError:
        return None
    return value if len(value) == 32 else None
