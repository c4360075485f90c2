"""Secrets of a vote in every encoding, and bodies malformed in every way."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from devnet.ballot import Ballot
from helper.core.share import ShareKey

Votes = Sequence[tuple[Ballot, int]]
"""Votes, each with the position of its commitment."""
PIECE_LENGTH = 12
"""Number of characters of an encoded secret that counts as a leak."""


def collect_secrets(vote: Ballot, position: int) -> dict[str, bytes]:
    """Return the secrets that only the database may contain, and only until the shares are confirmed."""
    name = vote.commitment.hex()[:8]
    secrets = {f"shares hash of {name}": vote.shares_hash}
    for share, commitment in zip(vote.shares, vote.share_comms, strict=True):
        key = ShareKey(vote.round_id, share.index, vote.proposal_id, position, vote.vote_decision, vote.shares_hash)
        held = {"blind": share.blind, "c1": share.c1, "c2": share.c2, "commitment": commitment, "key": key.encode()}
        secrets |= {f"{what} {share.index} of {name}": value for what, value in held.items()}
    return secrets


def stored_secrets(votes: Votes) -> dict[str, bytes]:
    """Return the secrets that are stored in columns. The share key is only stored as a hash."""
    secrets = {name: value for vote, at in votes for name, value in collect_secrets(vote, at).items()}
    return {name: value for name, value in secrets.items() if not name.startswith("key")}


def collect_nullifiers(votes: Votes) -> dict[str, bytes]:
    return {
        f"nullifier {share.index} of {vote.commitment.hex()[:8]}": share.nullifier
        for vote, _ in votes
        for share in vote.shares
    }


def find_secrets(data: bytes, secrets: Mapping[str, bytes]) -> list[str]:
    """Return the names of secrets that occur in these bytes unencoded."""
    return [name for name, secret in secrets.items() if secret in data]


class SecretScanner:
    """Finds pieces of a secret in hex or base64 in text, and complete secrets in bytes."""

    def __init__(self, secrets: Iterable[bytes], positions: Iterable[int]) -> None:
        self._secrets = list(secrets)
        self._positions = {str(position) for position in positions}
        self._pieces: set[str] = set()
        for secret in self._secrets:
            self._pieces.update(_pieces_of(secret.hex()), _pieces_of(secret.hex().upper()))
            for offset in range(3):
                # At a base64 offset, use only the characters whose bits all belong to the secret.
                text = base64.b64encode(bytes(offset) + secret).decode()
                self._pieces.update(_pieces_of(text[-(-offset * 8 // 6) : (offset + len(secret)) * 8 // 6]))

    def count_in_text(self, text: str) -> int:
        """Count pieces of secrets, and positions, in a text; hex must be all lower or all upper case."""
        matches = self._pieces.intersection(_pieces_of(text))
        numbers = "".join(char if char.isalnum() or char == "." else " " for char in text).split()
        return len(matches) + sum(number in self._positions for number in numbers)

    def count_in_bytes(self, data: bytes) -> int:
        """Count secrets and positions in bytes, encoded and unencoded."""
        return self.count_in_text(data.decode("latin-1")) + sum(secret in data for secret in self._secrets)


def _pieces_of(text: str) -> Iterable[str]:
    return (text[at : at + PIECE_LENGTH] for at in range(len(text) - PIECE_LENGTH + 1))


def malformed_bodies(body: Mapping[str, Any], rng: random.Random) -> list[bytes]:
    """Return bodies with one error each; they contain all secrets, some in the wrong field."""
    valid_body = json.dumps(body).encode()
    blind, hash_ = body["primary_blind"], body["shares_hash"]
    missing = rng.choice(sorted(body.keys() - {"submit_at"}))  # without a due time the share would be due at once
    bodies: list[Any] = [
        {**body, "primary_blind": blind[:-4]},
        {**body, "primary_blind": blind + "!"},
        {**body, "primary_blind": [blind]},
        {**body, "primary_blind": hash_},
        {**body, "shares_hash": base64.b64decode(hash_).hex()},
        {**body, "shares_hash": blind},
        {**body, "share_comms": body["share_comms"][:-1]},
        {**body, "share_comms": [*body["share_comms"][:-1], blind]},
        {**body, "enc_share": {**body["enc_share"], "c1": blind}},
        {**body, "enc_share": {**body["enc_share"], "share_index": 99}},
        {**body, "enc_share": blind},
        {**body, "tree_position": str(body["tree_position"])},
        {**body, "tree_position": -body["tree_position"]},
        {**body, "vote_decision": blind},
        {**body, "proposal_id": 77},
        {**body, "vote_round_id": base64.b64decode(blind).hex()},
        {**body, "submit_at": blind},
        {**body, blind: blind},
        {key: value for key, value in body.items() if key != missing},
        [body],
        blind,
    ]
    return [
        *(json.dumps(content).encode() for content in bodies),
        valid_body[: rng.randrange(1, len(valid_body))],
        valid_body + valid_body,
        b"\xff" + valid_body,
    ]
