"""Posted shares and reveals without validation, for fakes of the native checks and for tests that change a share."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

from helper.core.share import SHARE_FIELDS, Share, share_from_payload, share_to_payload
from proofs import ReadShare


def share_body(share: Share) -> bytes:
    return json.dumps(share_to_payload(share)).encode()


def decode_share(body: bytes) -> Share:
    """Decode a body whose fields are valid, without any check of its hashes."""
    return share_from_payload(json.loads(body))


def as_read_share(share: Share, *, vote_commitment: bytes, nullifier: bytes) -> ReadShare:
    """The result of the native checks for a valid share."""
    return ReadShare(tuple(getattr(share, field.name) for field in SHARE_FIELDS), vote_commitment, nullifier)


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
