"""Submits a vote over the routes of real wallets: delegate, cast, and wait until both are in a block.

Proofs, signatures and spent authorities are random bytes, because the dev chain does not check them (see `votes.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Final

import httpx

import proofs
from devnet.ballot import Ballot
from devnet.gojson import b64

_PREFIX: Final = "/shielded-vote/v1"
_POLL_SECONDS: Final = 0.25


class CastingError(RuntimeError):
    """The chain refused the vote."""


async def delegate_and_cast(http: httpx.AsyncClient, chain_url: str, ballot: Ballot) -> int:
    """Delegate, then cast a vote on the chain at `chain_url`. Returns the position of the vote commitment.

    Raises:
        CastingError: the chain refused the delegation or the vote.
        httpx.HTTPError: a request failed.
    """
    await _broadcast_and_wait(http, chain_url, "delegate-vote", delegation_body(ballot.round_id))
    tree = await http.get(f"{chain_url}{_PREFIX}/commitment-tree/{ballot.round_id.hex()}/latest")
    height = int(tree.json()["tree"]["height"])
    message = cast_vote_body(ballot.round_id, ballot.commitment, proposal_id=ballot.proposal_id, anchor_height=height)
    events = await _broadcast_and_wait(http, chain_url, "cast-vote", message)
    _van, position = events["cast_vote"]["leaf_index"].split(",")
    return int(position)


async def _broadcast_and_wait(
    http: httpx.AsyncClient, chain_url: str, route: str, body: dict[str, Any]
) -> dict[str, dict[str, str]]:
    """Broadcast a transaction, wait until it is in a block, and return its events."""
    response = await http.post(f"{chain_url}{_PREFIX}/{route}", json=body)
    if response.status_code != 200 or response.json().get("code"):
        raise CastingError(f"{route}: HTTP {response.status_code} {response.text[:200]}")
    url = f"{chain_url}{_PREFIX}/tx/{response.json()['tx_hash']}"
    while (included := await http.get(url)).status_code == 404:
        await asyncio.sleep(_POLL_SECONDS)
    if included.status_code != 200:
        raise CastingError(f"{route}: HTTP {included.status_code} {included.text[:200]}")
    return {
        event["type"]: {attribute["key"]: attribute["value"] for attribute in event["attributes"]}
        for event in included.json()["events"]
    }


def delegation_body(round_id: bytes) -> dict[str, Any]:
    """Build the body of a delegation."""
    return {
        "rk": _random_base64(32),
        "spend_auth_sig": _random_base64(64),
        "sighash": _random_base64(32),
        "signed_note_nullifier": _random_base64(32),
        "cmx_new": _random_base64(32),
        "van_cmx": b64(proofs.random_field()),
        "gov_nullifiers": [_random_base64(32)],
        "proof": _random_base64(4992),
        "vote_round_id": b64(round_id),
    }


def cast_vote_body(round_id: bytes, commitment: bytes, *, proposal_id: int, anchor_height: int) -> dict[str, Any]:
    """Build the body of a cast vote."""
    return {
        "van_nullifier": _random_base64(32),
        "vote_authority_note_new": b64(proofs.random_field()),
        "vote_commitment": b64(commitment),
        "proposal_id": proposal_id,
        "proof": _random_base64(4992),
        "vote_comm_tree_anchor_height": anchor_height,
        "vote_round_id": b64(round_id),
        "r_vpk": _random_base64(32),
        "vote_auth_sig": _random_base64(64),
    }


def _random_base64(length: int) -> str:
    return b64(secrets.token_bytes(length))
