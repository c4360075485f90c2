"""Frauds of a node about a finished round: what it changes in its responses. An audit must find each of them.

The names state what is changed; the comment of each says which check of an audit names it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Literal

from devnet.gojson import dumps
from devnet.tx import TAG_CAST, TAG_DELEGATE, TAG_PARTIAL, TAG_REVEAL, TAG_TALLY

Fraud = Literal[
    "reveal_dropped",
    "reveal_repeated",
    "proof_altered",
    "reveals_late",
    "cast_dropped",
    "sum_altered",
    "sum_moved",
    "key_replaced",
    "commitment_altered",
    "partial_altered",
    "total_altered",
    "total_impossible",
    "summary_altered",
    "tally_early",
    "leaf_added",
    "root_altered",
    "round_altered",
    "vote_repeated",
    "state_altered",
]

_DAY = timedelta(days=1)


def _flip(text: str) -> str:
    """Flip the lowest bit of base64-encoded bytes."""
    raw = base64.b64decode(text)
    return base64.b64encode(bytes([raw[0] ^ 1]) + raw[1:]).decode()


def _change_txs(tag: int, change: Callable[[str], list[str]]) -> Callable[[dict[str, Any]], None]:
    """Replace each transaction with a tag in a block by others."""

    def apply(response: dict[str, Any]) -> None:
        for block in (response["block"], response["sdk_block"]):
            txs: list[str] = []
            for raw in block["data"]["txs"]:
                txs += change(raw) if base64.b64decode(raw)[0] == tag else [raw]
            block["data"]["txs"] = txs

    return apply


def _move_time(tag: int, by: timedelta) -> Callable[[dict[str, Any]], None]:
    """Change the time of the blocks that contain a transaction with a tag."""

    def apply(response: dict[str, Any]) -> None:
        for block in (response["block"], response["sdk_block"]):
            if any(base64.b64decode(raw)[0] == tag for raw in block["data"]["txs"]):
                header = block["header"]
                header["time"] = (datetime.fromisoformat(header["time"]) + by).isoformat().replace("+00:00", "Z")

    return apply


def _alter_proof(raw: str) -> list[str]:
    """Change a byte of the longest field of a reveal: its proof."""
    tx = bytearray(base64.b64decode(raw))
    tx[len(tx) // 2] ^= 1
    return [base64.b64encode(tx).decode()]


def _alter_partial(raw: str) -> list[str]:
    """Change the last byte: the response of the last DLEQ proof, below its highest bits."""
    tx = bytearray(base64.b64decode(raw))
    tx[-2] ^= 1
    return [base64.b64encode(tx).decode()]


def _alter_sum(response: dict[str, Any]) -> None:
    """Exchange the halves of each sum."""
    for option, text in response.get("tally", {}).items():
        raw = base64.b64decode(text)
        response["tally"][option] = base64.b64encode(raw[32:] + raw[:32]).decode()


def _move_sum(response: dict[str, Any]) -> None:
    """Show each sum for another option."""
    response["tally"] = {str(int(option) ^ 1): text for option, text in response.get("tally", {}).items()}


def _replace_key(response: dict[str, Any]) -> None:
    response["round"]["ea_pk"] = response["round"]["feldman_commitments"][-1]


def _alter_commitment(response: dict[str, Any]) -> None:
    commitments = response["round"]["feldman_commitments"]
    commitments[-1] = commitments[0]


def _change_totals(change: Callable[[int], int]) -> Callable[[dict[str, Any]], None]:
    def apply(response: dict[str, Any]) -> None:
        for result in response.get("results", []):
            result["total_value"] = change(result.get("total_value", 0))

    return apply


def _alter_summary(response: dict[str, Any]) -> None:
    for proposal in response["proposals"]:
        for option in proposal["options"]:
            if "total_value" in option:
                option["total_value"] += 1


def _add_leaf(response: dict[str, Any]) -> None:
    """Append a leaf to the last block of the page."""
    if response.get("blocks"):
        leaves = response["blocks"][-1]["leaves"]
        leaves.append(leaves[0])


def _alter_root(response: dict[str, Any]) -> None:
    if "root" in response["tree"]:
        response["tree"]["root"] = _flip(response["tree"]["root"])


def _alter_round(response: dict[str, Any]) -> None:
    response["round"]["nc_root"] = _flip(response["round"]["nc_root"])


def _alter_state(response: dict[str, Any]) -> None:
    for block in (response["block"], response["sdk_block"]):
        block["header"]["app_hash"] = _flip(block["header"]["app_hash"])


_CHANGES: dict[Fraud, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "reveal_dropped": ("blocks", _change_txs(TAG_REVEAL, lambda _: [])),  # A1
    "reveal_repeated": ("blocks", _change_txs(TAG_REVEAL, lambda raw: [raw, raw])),  # A2
    "proof_altered": ("blocks", _change_txs(TAG_REVEAL, _alter_proof)),  # A3
    "reveals_late": ("blocks", _move_time(TAG_REVEAL, _DAY)),  # A4
    "cast_dropped": ("blocks", _change_txs(TAG_CAST, lambda _: [])),  # A5
    "sum_altered": ("tally", _alter_sum),  # B1
    "sum_moved": ("tally", _move_sum),  # B2
    "key_replaced": ("round", _replace_key),  # C1
    "commitment_altered": ("round", _alter_commitment),  # C2
    "partial_altered": ("blocks", _change_txs(TAG_PARTIAL, _alter_partial)),  # C3
    "total_altered": ("tally-results", _change_totals(lambda total: total + 1)),  # C4
    "total_impossible": ("tally-results", _change_totals(lambda total: total + (1 << 28))),  # C5
    "summary_altered": ("vote-summary", _alter_summary),  # C6
    "tally_early": ("blocks", _move_time(TAG_TALLY, -_DAY)),  # C7
    "leaf_added": ("tree-leaves", _add_leaf),  # D1
    "root_altered": ("tree-height", _alter_root),  # D2
    "round_altered": ("round", _alter_round),  # D3
    "vote_repeated": ("blocks", _change_txs(TAG_DELEGATE, lambda raw: [raw, raw])),  # D4
    "state_altered": ("blocks", _alter_state),  # E
}
"""Route and change of each fraud."""


def distort(fraud: Fraud, route: str, body: bytes) -> bytes:
    """Return the body of a successful response as a fraudulent node sends it."""
    changed_route, change = _CHANGES[fraud]
    if route != changed_route:
        return body
    response = json.loads(body)
    change(response)
    return dumps(response)
