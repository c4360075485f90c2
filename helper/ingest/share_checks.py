"""Native validation of one share: field encodings, curve points and hashes."""

from __future__ import annotations

from typing import Protocol

from helper.core.share import Share
from proofs import ShareCheck


class ShareChecks(Protocol):
    """The native validation of one share; implemented by the module `proofs`."""

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
        """Validate the fields; return vote commitment and nullifier, or raise ProofsError."""
        ...


def check_share(checks: ShareChecks, share: Share) -> ShareCheck:
    """Validate a share; takes 0.3 ms and releases the GIL.

    Raises:
        ProofsError: an encoding or a hash is not valid.
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
