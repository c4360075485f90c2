"""Export files of svoted's helper, as `svoted helper export-queue` writes them."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from devnet.ballot import Ballot
from helper.core.share import Share


def encode(value: bytes) -> str:
    return b64encode(value).decode()


def ballot_shares(ballot: Ballot, position: int, submit_at: int) -> list[Share]:
    return [
        Share(
            round_id=ballot.round_id,
            share_index=share.index,
            proposal_id=ballot.proposal_id,
            vote_decision=ballot.vote_decision,
            tree_position=position,
            submit_at=submit_at,
            shares_hash=ballot.shares_hash,
            share_comms=b"".join(ballot.share_comms),
            primary_blind=share.blind,
            c1=share.c1,
            c2=share.c2,
        )
        for share in ballot.shares
    ]


def svoted_row(share: Share, **changes: Any) -> dict[str, Any]:
    """The row of a waiting share; a field that is changed to None is left out."""
    row = {
        "share_index": share.share_index,
        "shares_hash": encode(share.shares_hash),
        "proposal_id": share.proposal_id,
        "vote_decision": share.vote_decision,
        "enc_share": {"c1": encode(share.c1), "c2": encode(share.c2), "share_index": share.share_index},
        "tree_position": share.tree_position,
        "share_comms": [encode(share.share_comms[start : start + 32]) for start in range(0, 512, 32)],
        "primary_blind": encode(share.primary_blind),
        "state": 0,
        "attempts": 1,
        "vote_end_time": 0,
        "submit_at": share.submit_at,
        "original_submit_at": share.submit_at,
        "received_at": 1_700_000_000,
        "processable": True,
    }
    return {name: value for name, value in {**row, **changes}.items() if value is not None}


def erased_row(share: Share) -> dict[str, Any]:
    return svoted_row(
        share,
        shares_hash=None,
        share_comms=None,
        primary_blind=None,
        enc_share={"c1": "", "c2": "", "share_index": 0},
        state=2,
        processable=False,
    )


def pending_broadcast(share: Share, nullifier: bytes, **changes: Any) -> dict[str, Any]:
    """The message of a share that was sent and not seen, as version 2 has it."""
    reveal = {
        "share_nullifier": encode(nullifier),
        "enc_share": encode(share.c1 + share.c2),
        "proposal_id": share.proposal_id,
        "vote_decision": share.vote_decision,
        "proof": encode(b"p" * 4_992),
        "vote_round_id": encode(share.round_id),
        "vote_comm_tree_anchor_height": 84,
    }
    return {"reveal": {**reveal, **changes}, "tx_hash": "AB" * 32, "since_height": 90, "rebroadcast_count": 2}


def svoted_file(round_: bytes, rows: Sequence[Any] | None, /, **changes: Any) -> bytes:
    content = {
        "version": 1,
        "round_id": round_.hex(),
        "exported_at": 1_700_000_500,
        "round": {"created_at_time": 1_699_990_000, "vote_end_time": 1_700_090_000},
        "rows": rows,
        **changes,
    }
    return json.dumps(content, indent=2).encode()
