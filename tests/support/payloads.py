"""Posted shares and reveals without validation, for fakes of the native checks and for tests that change a share."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

from helper.core.share import Share
from helper.ingest.payload import share_to_payload
from proofs import ReadShare


def share_body(share: Share) -> bytes:
    return json.dumps(share_to_payload(share)).encode()


def decode_share(body: bytes, *, vote_commitment: bytes, nullifier: bytes) -> ReadShare:
    """Decode a body whose fields are valid, without any check of its hashes."""
    posted = json.loads(body)
    encrypted = posted["enc_share"]
    return ReadShare(
        round_id=bytes.fromhex(posted["vote_round_id"]),
        share_index=encrypted.get("share_index") or 0,
        proposal_id=posted["proposal_id"],
        vote_decision=posted["vote_decision"],
        tree_position=posted["tree_position"],
        submit_at=posted.get("submit_at") or 0,
        shares_hash=b64decode(posted["shares_hash"]),
        share_comms=b"".join(map(b64decode, posted["share_comms"])),
        primary_blind=b64decode(posted["primary_blind"]),
        c1=b64decode(encrypted["c1"]),
        c2=b64decode(encrypted["c2"]),
        vote_commitment=vote_commitment,
        nullifier=nullifier,
    )


def reveal_fields(request: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a reveal, as attributes, from its REST body."""
    return {
        "nullifier": b64decode(request["share_nullifier"]),
        "enc_share": b64decode(request["enc_share"]),
        "proposal_id": request["proposal_id"],
        "vote_decision": request["vote_decision"],
        "proof": b64decode(request["proof"]),
        "round_id": b64decode(request["vote_round_id"]),
        "anchor_height": request["vote_comm_tree_anchor_height"],
    }
