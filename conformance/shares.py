"""Shares to post: their JSON as wallets send it, and files of them. Pure."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import proofs
from devnet import ballot
from devnet.ballot import Ballot
from helper.errors import UsageError

END_FIELD: Final = "vote_end_time"
"""Field of a line in a file of shares: the end of its round in Unix seconds. It is not posted."""

MIN_SHARES: Final = 2
"""One share to test that valid shares are accepted, and one that is only posted with alterations."""

Body = dict[str, Any]


class SharesFileError(UsageError):
    """A file of shares cannot be used. The text contains no data of a share."""


@dataclass(frozen=True, slots=True)
class TestShare:
    """A share that the helper under test must accept.

    Attributes:
        fields: its JSON as wallet library 5.3.0 sends it, without `submit_at`.
        nullifier: 32 bytes.
        commitment: its vote commitment.
        all_enc_shares: the ciphertexts of the vote's 16 shares, which other wallets send too; None if unknown.
        submit_at: when the wallet requests its reveal; None if the check may choose.
    """

    __test__ = False  # not a test class

    fields: Mapping[str, Any] = field(repr=False)
    nullifier: bytes = field(repr=False)
    commitment: bytes = field(repr=False)
    all_enc_shares: Sequence[Mapping[str, Any]] | None = field(default=None, repr=False)
    submit_at: int | None = None

    @property
    def round_id(self) -> bytes:
        """Its round."""
        return bytes.fromhex(self.fields["vote_round_id"])

    @property
    def index(self) -> int:
        """Its index among the vote's shares."""
        return int(self.fields["enc_share"].get("share_index", 0))

    def body(self, submit_at: int | None = None, /, **changed: Any) -> Body:
        """The JSON to post, a deep copy. `changed` replaces fields."""
        body = {**copy.deepcopy(dict(self.fields)), **changed}
        if submit_at is not None:
            body["submit_at"] = submit_at
        return body


def encode(body: object) -> bytes:
    """Encode a body as JSON without spaces, as wallets do."""
    return json.dumps(body, separators=(",", ":")).encode()


def shares_of(vote: Ballot, position: int) -> list[TestShare]:
    """The 16 shares of a vote."""
    return [_share_of(vote, index, position) for index in range(ballot.SHARE_COUNT)]


def _share_of(vote: Ballot, index: int, position: int) -> TestShare:
    share = vote.shares[index]
    fields = ballot.post_body(vote, share, position, 0)
    all_enc_shares = fields.pop("all_enc_shares")
    return TestShare({**fields, "share_index": index}, share.nullifier, vote.commitment, all_enc_shares)


def seal(round_id: bytes, ea_pk: bytes, proposal_id: int, vote_decision: int) -> Ballot:
    """Encrypt a vote with the key of its round."""
    return ballot.seal_ballot(
        round_id=round_id,
        ea_pk=ea_pk,
        proposal_id=proposal_id,
        vote_decision=vote_decision,
        weight=random.SystemRandom().randint(1, 10_000),
        rng=random.SystemRandom(),
    )


def invented_share() -> TestShare:
    """A share of a vote in a round that no chain has."""
    _, public = proofs.elgamal_keygen(proofs.random_field())
    return _share_of(seal(proofs.random_field(), public, 1, 1), 1, 5)


def read_shares_file(path: Path) -> tuple[list[TestShare], int | None]:
    """Read a file of shares: one JSON object on each line, as a wallet posts it.

    Returns:
        the shares, all of one round, and the end of the round if a line has it.

    Raises:
        SharesFileError: a line is not a valid share, there are too few, they are of different rounds, or one is late.
    """
    shares: list[TestShare] = []
    ends: set[int] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            shares.append(_parse_line(line, number, ends.add))
    if len(shares) < MIN_SHARES:
        raise SharesFileError(f"the file needs at least {MIN_SHARES} shares, it has {len(shares)}")
    if len({share.round_id for share in shares}) > 1 or len(ends) > 1:
        raise SharesFileError("the shares are of different rounds, or disagree about its end")
    end = next(iter(ends), None)
    if end is not None and any((share.submit_at or 0) > end for share in shares):
        raise SharesFileError(f"a share has a submit_at after the end of its round, {end}")
    return shares, end


def _parse_line(line: bytes, number: int, add_end: Callable[[int], object]) -> TestShare:
    read = proofs.read_shares([line])[0]
    if isinstance(read, proofs.InvalidShare):
        raise SharesFileError(f"line {number}: {read.field} is not valid ({read.reason})")
    fields: Body = json.loads(line)
    end = fields.pop(END_FIELD, None)
    if isinstance(end, int):
        add_end(end)
    all_enc_shares = fields.pop("all_enc_shares", None)
    submit_at = fields.pop("submit_at", None)
    return TestShare(fields, read.nullifier, read.vote_commitment, all_enc_shares, submit_at or 0)


def decode32(text: str) -> bytes:
    """Decode 32 bytes from base64."""
    return base64.b64decode(text)


def encode32(value: bytes) -> str:
    """Encode bytes in base64."""
    return base64.b64encode(value).decode()
