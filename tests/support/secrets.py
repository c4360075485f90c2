"""Secrets of a vote, for searches in files, logs and requests."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from devnet.leak_check import SensitiveValue
from devnet.wallet import CastVote
from helper.core.share import ShareKey

LEAVES_BEYOND_HEIGHTS = 5000
"""Leaves before a vote, so that its position exceeds all block heights of a test's chain."""


def collect_secrets(vote: CastVote) -> dict[str, bytes]:
    """Return values that must never be in a log, nor in a file after the confirmation of the vote's shares."""
    secrets = {"shares_hash": vote.ballot.shares_hash, "commitments": b"".join(vote.ballot.share_comms)}
    ballot = vote.ballot
    for share in ballot.shares:
        secrets[f"blind {share.index}"] = share.blind
        secrets[f"c1 {share.index}"] = share.c1
        secrets[f"c2 {share.index}"] = share.c2
        content = ballot.vote_decision, ballot.shares_hash
        key = ShareKey(ballot.round_id, share.index, ballot.proposal_id, vote.position, *content)
        secrets[f"key {share.index}"] = key.encode()
    return secrets


def sensitive_values(
    votes: Sequence[CastVote], hashes: Mapping[str, bytes], *, not_before: float = 0
) -> list[SensitiveValue]:
    """Return values that no request may contain before each share's due time.

    Args:
        votes: the votes. Values of a vote are allowed once its last share is due.
        hashes: hash of the revealing transaction by nullifier (hex).
        not_before: earliest time in Unix seconds, if it is later than the due time.
    """
    sensitive: list[SensitiveValue] = []
    for vote in votes:
        times = {share.index: share.submit_at for share in vote.shares}
        last = max([not_before, *times.values()])
        sensitive += [
            SensitiveValue("position", vote.position, last),
            SensitiveValue("shares hash", vote.ballot.shares_hash, last),
            SensitiveValue("commitment", vote.ballot.commitment, last),
        ]
        for share in vote.ballot.shares:
            at = max(not_before, times.get(share.index, 0))
            values = {"nullifier": share.nullifier, "c1": share.c1, "c2": share.c2, "blind": share.blind}
            sensitive += [SensitiveValue(what, value, at) for what, value in values.items()]
            if share.nullifier.hex() in hashes:
                sensitive.append(SensitiveValue("transaction", hashes[share.nullifier.hex()], at))
    return sensitive


def secrets_in_text(text: str, secrets: Mapping[str, bytes]) -> list[str]:
    """Return the names of the secrets in a text: in hex, base64, or Python's bytes notation, also inside JSON."""
    lower, unescaped = text.lower(), text.replace("\\\\", "\\")
    return [
        name
        for name, secret in secrets.items()
        if secret.hex() in lower or base64.b64encode(secret).decode() in text or repr(secret)[2:-1] in unescaped
    ]
