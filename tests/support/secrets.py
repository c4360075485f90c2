"""What a vote would keep to itself: for searches in files, logs and requests."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from devnet.leak_check import SensitiveValue
from devnet.wallet import CastVote
from helper.core.share import ShareKey

LEAVES_BEYOND_HEIGHTS = 5000
"""Leaves before a vote, so that its position is a number that no height of a test's chain has."""


def collect_secrets(vote: CastVote) -> dict[str, bytes]:
    """What must be in no log ever, and in no file once the vote's shares are confirmed."""
    found = {"shares_hash": vote.ballot.shares_hash, "commitments": b"".join(vote.ballot.share_comms)}
    for share in vote.ballot.shares:
        found[f"blind {share.index}"] = share.blind
        found[f"c1 {share.index}"] = share.c1
        found[f"c2 {share.index}"] = share.c2
        key = ShareKey(vote.ballot.round_id, share.index, vote.ballot.proposal_id, vote.position)
        found[f"key {share.index}"] = key.encode()
    return found


def sensitive_values(
    votes: Sequence[CastVote], hashes: Mapping[str, bytes], *, not_before: float = 0
) -> list[SensitiveValue]:
    """What no request may name before each share's time (or before `not_before`, where that is later).

    Args:
        votes: the votes; a vote's own things may be named when its last share may.
        hashes: the hash of the transaction that revealed a nullifier (hex).
        not_before: unix seconds.
    """
    found: list[SensitiveValue] = []
    for vote in votes:
        times = {share.index: share.submit_at for share in vote.shares}
        last = max([not_before, *times.values()])
        found += [
            SensitiveValue("position", vote.position, last),
            SensitiveValue("shares hash", vote.ballot.shares_hash, last),
            SensitiveValue("commitment", vote.ballot.commitment, last),
        ]
        for share in vote.ballot.shares:
            at = max(not_before, times.get(share.index, 0))
            values = {"nullifier": share.nullifier, "c1": share.c1, "c2": share.c2, "blind": share.blind}
            found += [SensitiveValue(what, value, at) for what, value in values.items()]
            if share.nullifier.hex() in hashes:
                found.append(SensitiveValue("transaction", hashes[share.nullifier.hex()], at))
    return found


def secrets_in_text(text: str, secrets: Mapping[str, bytes]) -> list[str]:
    """The names of the secrets that a text tells: in hex, in base64, or as Python shows bytes, also inside JSON."""
    lower, plain = text.lower(), text.replace("\\\\", "\\")
    return [
        name
        for name, secret in secrets.items()
        if secret.hex() in lower or base64.b64encode(secret).decode() in text or repr(secret)[2:-1] in plain
    ]
