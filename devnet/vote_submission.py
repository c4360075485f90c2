"""Submits a vote over the routes of real wallets: delegate, cast, and wait until both are in a block.

Proofs, signatures and spent authorities are random bytes, because the dev chain does not check them (see `votes.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, Final

import httpx

import proofs
from devnet.ballot import Ballot
from devnet.eras import BATCH_DELEGATE
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


async def delegate_and_cast_batch(http: httpx.AsyncClient, chain_url: str, ballots: Sequence[Ballot]) -> list[int]:
    """Delegate and cast several votes of one round in one message. Returns the positions of their vote commitments.

    Raises:
        CastingError: the chain refused the message.
        httpx.HTTPError: a request failed.
    """
    round_id = ballots[0].round_id
    message = batch_body(round_id, [(ballot.commitment, ballot.proposal_id) for ballot in ballots], anchor_height=1)
    message["delegation"] = _without_round(delegation_body(round_id))
    events = await _broadcast_and_wait(http, chain_url, BATCH_DELEGATE, message)
    return [int(index) for index in events["delegate_and_cast_vote_batch"]["vote_commitment_leaf_indices"].split(",")]


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


def batch_body(
    round_id: bytes, votes: Sequence[tuple[bytes, int]], *, anchor_height: int, proof_bytes: int = 11_040
) -> dict[str, Any]:
    """Build the body of a batch from the commitment and the proposal of each vote. Proofs have the real length."""
    entries = []
    for commitment, proposal_id in votes:
        vote = cast_vote_body(round_id, commitment, proposal_id=proposal_id, anchor_height=anchor_height)
        entries.append({**_without_round(vote), "proof": _random_base64(proof_bytes)})
    return {"vote_round_id": b64(round_id), "votes": entries}


def _without_round(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name != "vote_round_id"}


def _random_base64(length: int) -> str:
    return b64(secrets.token_bytes(length))
