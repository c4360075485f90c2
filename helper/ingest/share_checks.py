"""Whether a share's own fields belong together: what is asked of the native code, field by field."""

from __future__ import annotations

from typing import Protocol

from helper.core.share import Share
from proofs import ShareCheck


class ShareChecks(Protocol):
    """The native check of one share; the module `proofs` is one."""

    def check_share(
        self,
        *,
        round_id: bytes,
        shares_hash: bytes,
        share_comms: bytes,
        share_index: int,
        proposal_id: int,
        vote_decision: int,
        primary_blind: bytes,
        c1: bytes,
        c2: bytes,
    ) -> ShareCheck:
        """Canonical encodings, points, hashes: the vote commitment and the nullifier, or a ProofsError."""
        ...


def check_share(checks: ShareChecks, share: Share) -> ShareCheck:
    """A third of a millisecond of hashing, outside the interpreter's lock.

    Raises:
        ProofsError: an encoding is wrong, or its hashes do not hold.
    """
    return checks.check_share(
        round_id=share.round_id,
        shares_hash=share.shares_hash,
        share_comms=share.share_comms,
        share_index=share.share_index,
        proposal_id=share.proposal_id,
        vote_decision=share.vote_decision,
        primary_blind=share.primary_blind,
        c1=share.c1,
        c2=share.c2,
    )
