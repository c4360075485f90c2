"""REST routes of the vote module, `/shielded-vote/v1/…`, in the recorded format."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from devnet.admission import BroadcastResult, Fate
from devnet.blocks import tx_events
from devnet.broadcasts import broadcast, require_keys
from devnet.eras import PARTIAL_DECRYPTIONS, READINESS, Era, garble_events
from devnet.gojson import b64, omit_zero, parse_object, take_bytes, take_uint
from devnet.network import DevNet
from devnet.responses import QueryError, create_error, create_field_error, get_view, json_response
from devnet.rounds import ACTIVE, FINALIZED, LeafBlock, Round
from devnet.tx import Reveal, encode, tx_hash

_PREFIX = "/shielded-vote/v1"
_MAX_RANGE_BLOCKS = 1000


async def get_round(request: Request) -> Response:
    """One round, or `NotFound`."""
    round_, status = _require_round(request)
    return json_response({"round": round_.to_json(status)})


async def get_rounds(request: Request) -> Response:
    """All rounds."""
    return json_response(
        omit_zero({"rounds": [round_.to_json(status) for round_, status in get_view(request).rounds()]})
    )


async def get_active_round(request: Request) -> Response:
    """The newest ACTIVE round."""
    active = [round_ for round_, status in get_view(request).rounds() if status == ACTIVE]
    if not active:
        if _era(request).has_null_active_round:
            return json_response({"round": None})
        raise QueryError("NotFound", "no active voting round: key not found")
    return json_response({"round": active[-1].to_json(ACTIVE)})


async def get_summary(request: Request) -> Response:
    """Ballot counts of a round and, once finalized, its totals. An unknown round is an internal error in every era."""
    try:
        round_, status = _require_round(request)
    except QueryError as error:
        raise QueryError("Internal", error.text) from None
    return json_response(round_.summary_json(status))


async def get_tally(request: Request) -> Response:
    """The summed ciphertexts of one proposal, by option."""
    round_, _ = _require_round(request)
    try:
        proposal = int(request.path_params["proposal"])
    except ValueError:
        raise create_error(400, f"invalid proposal_id: {request.path_params['proposal']}") from None
    ballots = {option: ballot for (of, option), ballot in sorted(round_.option_tallies.items()) if of == proposal}
    sums = {str(option): b64(await asyncio.to_thread(ballot.compute_sum)) for option, ballot in ballots.items()}
    return json_response(omit_zero({"tally": sums}))


async def get_tally_results(request: Request) -> Response:
    """The decrypted totals; empty before the round is finalized."""
    round_, status = _require_round(request)
    results = [
        omit_zero(
            {
                "vote_round_id": b64(round_.round_id),
                "proposal_id": proposal,
                "vote_decision": option,
                "total_value": total,
            }
        )
        for (proposal, option), total in sorted(round_.totals.items())
    ]
    return json_response(omit_zero({"results": results if status == FINALIZED else []}))


async def get_partial_decryptions(request: Request) -> Response:
    """The partial decryptions of a round. Chains before v1 have them in blocks and in the store only."""
    round_, _ = _require_round(request)
    return json_response(round_.partials_json())


async def get_tree_latest(request: Request) -> Response:
    """The newest root of a round's tree; `{"tree":{}}` if it has no leaves or the round is unknown."""
    view = get_view(request)
    round_view = view.round(_parse_round_id(request))
    block = round_view[0].latest_leaf_block(view.height) if round_view else None
    if block is None:
        return json_response({"tree": {}})
    size = block.start + block.count
    tree = {
        "next_index": size,
        "root": b64(view.served_root(block)),
        "height": block.height,
        "next_index_at_root": size,
    }
    return json_response({"tree": tree})


async def get_tree_at(request: Request) -> Response:
    """The tree at a height that has a root."""
    view = get_view(request)
    round_id = _parse_round_id(request)
    try:
        height = int(request.path_params["height"])
    except ValueError:
        raise create_error(400, f"invalid height: {request.path_params['height']}") from None
    round_view = view.round(round_id)
    block = round_view[0].leaf_block_at(height) if round_view and height <= view.height else None
    if block is None:
        raise QueryError("NotFound", f"no commitment root at height {height}: key not found")
    tree = {"next_index": block.start + block.count, "root": b64(view.served_root(block)), "height": height}
    return json_response({"tree": tree})


async def get_leaves(request: Request) -> Response:
    """Leaves by block. Newer chains paginate them, with a cursor and a root per block."""
    view = get_view(request)
    devnet: DevNet = request.app.state.devnet
    round_id = _parse_round_id(request)
    first, last = _parse_leaf_range(request, view.height)
    blocks = view.leaf_blocks(round_id, first, last)
    round_view = view.round(round_id)
    if not blocks or round_view is None:
        return json_response({})
    shown: list[dict[str, Any]] = []
    leaf_count, cursor = 0, 0
    for block in blocks:
        if devnet.page_leaves and leaf_count and leaf_count + block.count > devnet.page_leaves:
            cursor = block.height
            break
        shown.append(_leaf_block_json(round_view[0], block, b64(view.served_root(block)) if devnet.page_leaves else ""))
        leaf_count += block.count
    return json_response(omit_zero({"blocks": shown, "next_from_height": cursor}))


async def get_tx(request: Request) -> Response:
    """An included transaction: 200 if it succeeded, 422 if it failed, 404 if it is not (yet) in a block."""
    try:
        digest = bytes.fromhex(request.path_params["hash"])
    except ValueError:
        raise create_error(400, "invalid tx hash") from None
    result = get_view(request).transaction(digest)
    if result is None:
        raise create_error(404, "tx not found")
    shown = {
        "code": result.code,
        "events": garble_events(tx_events(result)) if _era(request).garbles_events else tx_events(result),
        "height": str(result.height),
        "log": result.log,
    }
    return json_response(shown, 200 if result.code == 0 else 422)


async def post_reveal(request: Request) -> Response:
    """Broadcast a reveal: 400 if it is malformed, 422 if CheckTx refuses it, else 200."""
    require_keys(request)
    reveal = _parse_reveal(await request.body(), _era(request).max_proof_bytes)
    view = get_view(request)
    taken = view.liar.take_reveal(reveal, view.height)
    if taken is not None:
        code, log = taken
        shown_hash = "" if code else tx_hash(encode(reveal)).hex().upper()
        return json_response({"tx_hash": shown_hash, "code": code, "log": log}, 422 if code else 200)
    devnet: DevNet = request.app.state.devnet
    fates = {"never_include": Fate.NEVER, "include_failed": Fate.OVERTAKEN}
    fate = fates.get(view.fate or "", Fate.NORMAL)

    async def submit() -> BroadcastResult:
        return await devnet.admission.submit_reveal(
            reveal,
            height=view.height,
            max_anchor_height=view.max_anchor_height,
            fate=fate,
            status=view.switches.round_status,
        )

    accepted = await broadcast(request, encode(reveal), submit)
    shown: dict[str, Any] = {"tx_hash": accepted.hash.hex().upper(), "code": accepted.code}
    if accepted.log:
        shown["log"] = accepted.log
    return json_response(shown, 422 if accepted.code else 200)


async def get_readiness(request: Request) -> Response:
    """Whether the verifying keys are ready; 503 until then."""
    require_keys(request)
    return json_response({"status": "ready"})


ROUTES = [
    Route(f"{_PREFIX}/rounds", get_rounds),
    Route(f"{_PREFIX}/rounds/active", get_active_round),
    Route(f"{_PREFIX}/round/{{round_id}}", get_round),
    Route(f"{_PREFIX}/vote-summary/{{round_id}}", get_summary),
    Route(f"{_PREFIX}/tally/{{round_id}}/{{proposal}}", get_tally),
    Route(f"{_PREFIX}/tally-results/{{round_id}}", get_tally_results),
    Route(f"{_PREFIX}/commitment-tree/{{round_id}}/latest", get_tree_latest),
    Route(f"{_PREFIX}/commitment-tree/{{round_id}}/leaves", get_leaves),
    Route(f"{_PREFIX}/commitment-tree/{{round_id}}/{{height}}", get_tree_at),
    Route(f"{_PREFIX}/tx/{{hash}}", get_tx),
    Route(f"{_PREFIX}/reveal-share", post_reveal, methods=["POST"]),
]
ERA_ROUTES = {
    READINESS: Route(f"{_PREFIX}/{READINESS}", get_readiness),
    PARTIAL_DECRYPTIONS: Route(f"{_PREFIX}/{PARTIAL_DECRYPTIONS}/{{round_id}}", get_partial_decryptions),
}
"""Routes that older eras do not have, by name."""


def _era(request: Request) -> Era:
    devnet: DevNet = request.app.state.devnet
    return devnet.era


def _parse_round_id(request: Request) -> bytes:
    """Parse the round id in the path, or raise 400."""
    text = request.path_params["round_id"]
    try:
        round_id = bytes.fromhex(text)
    except ValueError:
        raise create_error(400, "invalid round_id: not hex") from None
    if len(round_id) != 32:
        raise create_error(400, f"round_id must be exactly 32 bytes, got {len(round_id)}")
    return round_id


def _require_round(request: Request) -> tuple[Round, int]:
    """The round in the path and its status; raises the chain's error if it is unknown."""
    round_view = get_view(request).round(_parse_round_id(request))
    if round_view is None:
        raise QueryError("NotFound", "vote round not found: vote round not found: key not found")
    return round_view


def _parse_leaf_range(request: Request, newest_height: int) -> tuple[int, int]:
    """Parse the first and the last height of a request for leaves."""
    era, params = _era(request), request.query_params
    given_first, given_last = params.get("from_height"), params.get("to_height")
    if not era.has_open_leaf_range and not (given_first and given_last):
        raise create_error(400, "from_height and to_height query params are required")
    first, last = _parse_height(given_first or "0"), _parse_height(given_last or "0")
    if era.has_open_leaf_range:
        last = last or max(first, newest_height)
        if last < first:
            raise QueryError("InvalidArgument", "to_height must not be below from_height: invalid request")
    if era.limits_leaf_range and last - first > _MAX_RANGE_BLOCKS:
        text = f"block range {last - first} exceeds maximum {_MAX_RANGE_BLOCKS}: invalid request"
        raise QueryError("InvalidArgument", text)
    return first, last


def _parse_height(text: str) -> int:
    """Parse a height, or raise 400."""
    if not text.isascii() or not text.isdigit():
        raise create_error(400, f"invalid height: {text}")
    return int(text)


def _leaf_block_json(round_: Round, block: LeafBlock, root: str) -> dict[str, Any]:
    """The leaves of one block."""
    leaves = [b64(round_.tree.leaf(block.start + offset)) for offset in range(block.count)]
    return omit_zero({"height": block.height, "start_index": block.start, "leaves": leaves, "root": root})


def _parse_reveal(body: bytes, max_proof_bytes: int) -> Reveal:
    """Parse a reveal, or raise the chain's 400."""
    fields = parse_object(body)
    reveal = Reveal(
        nullifier=take_bytes(fields, "share_nullifier"),
        enc_share=take_bytes(fields, "enc_share"),
        proposal_id=take_uint(fields, "proposal_id", 32),
        vote_decision=take_uint(fields, "vote_decision", 32),
        proof=take_bytes(fields, "proof"),
        round_id=take_bytes(fields, "vote_round_id"),
        anchor_height=take_uint(fields, "vote_comm_tree_anchor_height", 64),
    )
    problem = _find_invalid_field(reveal, max_proof_bytes)
    if problem:
        raise create_field_error(problem)
    return reveal


def _find_invalid_field(reveal: Reveal, max_proof_bytes: int) -> str | None:
    """The first error that the message's basic validation finds."""
    if len(reveal.nullifier) != 32:
        return f"share_nullifier must be 32 bytes, got {len(reveal.nullifier)}"
    if len(reveal.enc_share) != 64:
        return f"enc_share must be 64 bytes (ElGamal ciphertext), got {len(reveal.enc_share)}"
    if not 1 <= len(reveal.proof) <= max_proof_bytes:
        return f"proof must be 1..{max_proof_bytes} bytes, got {len(reveal.proof)}"
    if len(reveal.round_id) != 32:
        return f"vote_round_id must be 32 bytes, got {len(reveal.round_id)}"
    if reveal.anchor_height == 0:
        return "vote_comm_tree_anchor_height cannot be zero"
    return None
