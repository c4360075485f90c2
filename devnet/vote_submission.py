"""A wallet's way to the chain by the routes that real wallets use: delegate, cast, and wait for both to be in a block.

Proofs, signatures and spent authorities are random bytes: the dev chain does not look at them (see `votes.py`).
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
    """The chain did not take the vote."""


async def delegate_and_cast(http: httpx.AsyncClient, base: str, ballot: Ballot) -> int:
    """Put a voter's authority, then the vote's commitment on the chain behind `base`; the commitment's position.

    Raises:
        CastingError: one of the two was refused; says by what words.
        httpx.HTTPError: a request was not answered.
    """
    await _sent(http, base, "delegate-vote", delegation(ballot.round_id))
    tree = await http.get(f"{base}{_PREFIX}/commitment-tree/{ballot.round_id.hex()}/latest")
    height = int(tree.json()["tree"]["height"])
    message = vote_message(ballot.round_id, ballot.commitment, proposal_id=ballot.proposal_id, anchor_height=height)
    events = await _sent(http, base, "cast-vote", message)
    _van, position = events["cast_vote"]["leaf_index"].split(",")
    return int(position)


async def _sent(http: httpx.AsyncClient, base: str, route: str, body: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Broadcast, and the events of the transaction once it is in a block."""
    answer = await http.post(f"{base}{_PREFIX}/{route}", json=body)
    if answer.status_code != 200 or answer.json().get("code"):
        raise CastingError(f"{route}: HTTP {answer.status_code} {answer.text[:200]}")
    where = f"{base}{_PREFIX}/tx/{answer.json()['tx_hash']}"
    while (found := await http.get(where)).status_code == 404:
        await asyncio.sleep(_POLL_SECONDS)
    if found.status_code != 200:
        raise CastingError(f"{route}: HTTP {found.status_code} {found.text[:200]}")
    return {
        event["type"]: {attribute["key"]: attribute["value"] for attribute in event["attributes"]}
        for event in found.json()["events"]
    }


def delegation(round_id: bytes) -> dict[str, Any]:
    """The body of a delegation."""
    return {
        "rk": _noise(32),
        "spend_auth_sig": _noise(64),
        "sighash": _noise(32),
        "signed_note_nullifier": _noise(32),
        "cmx_new": _noise(32),
        "van_cmx": b64(proofs.random_field()),
        "gov_nullifiers": [_noise(32)],
        "proof": _noise(4992),
        "vote_round_id": b64(round_id),
    }


def vote_message(round_id: bytes, commitment: bytes, *, proposal_id: int, anchor_height: int) -> dict[str, Any]:
    """The body of a cast vote."""
    return {
        "van_nullifier": _noise(32),
        "vote_authority_note_new": b64(proofs.random_field()),
        "vote_commitment": b64(commitment),
        "proposal_id": proposal_id,
        "proof": _noise(4992),
        "vote_comm_tree_anchor_height": anchor_height,
        "vote_round_id": b64(round_id),
        "r_vpk": _noise(32),
        "vote_auth_sig": _noise(64),
    }


def _noise(length: int) -> str:
    return b64(secrets.token_bytes(length))
