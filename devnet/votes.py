"""Routes for delegating and voting, `POST /shielded-vote/v1/{delegate,cast}-vote`, and for batches of votes.

On a real chain both carry proofs and signatures of circuits that are not part of this product. Here the format and the
lengths of the fields are checked, and only the leaves that they append are used. Proofs, signatures and spent
authorities are not checked. The layout of a batch is that of this dev chain: `votes` contains bodies of `cast-vote`
and `delegation` one of `delegate-vote`, all without their round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from devnet.admission import BroadcastResult
from devnet.broadcasts import broadcast, require_keys
from devnet.eras import BATCH_CAST, BATCH_DELEGATE
from devnet.gojson import GoJsonError, omit_zero, parse_object, take_bytes, take_uint
from devnet.network import DevNet
from devnet.responses import create_field_error, get_view, json_response
from devnet.rounds import ACTIVE, STATUS_NAMES
from devnet.tx import Cast, CastBatch, Delegation, encode

_PREFIX: Final = "/shielded-vote/v1"
_ROUND_BYTES: Final = {"vote_round_id": 32}
_CAST_BYTES: Final = {
    "van_nullifier": 32,
    "vote_authority_note_new": 32,
    "vote_commitment": 32,
    "r_vpk": 32,
    "vote_auth_sig": 64,
}
_DELEGATE_BYTES: Final = {
    "rk": 32,
    "spend_auth_sig": 64,
    "sighash": 32,
    "signed_note_nullifier": 32,
    "cmx_new": 32,
    "van_cmx": 32,
}
_CAST_FIELDS: Final = frozenset({*_CAST_BYTES, "proposal_id", "proof", "vote_comm_tree_anchor_height"})
_DELEGATE_FIELDS: Final = frozenset({*_DELEGATE_BYTES, "gov_nullifiers", "proof"})
_MAX_BATCH_VOTES: Final = 50


async def post_cast_vote(request: Request) -> Response:
    """Cast a vote: append the vote commitment and the voter's new authority note in the next block."""
    require_keys(request)
    fields = parse_object(await request.body())
    round_id, vote = _decode_round_id(fields), _decode_vote(request, fields)
    note, commitment, nullifier = (
        vote[name] for name in ("vote_authority_note_new", "vote_commitment", "van_nullifier")
    )
    message = Cast(round_id, note, (commitment,), nullifier, take_uint(fields, "proposal_id", 32))
    return await _submit(request, round_id, encode(message))


async def post_delegate_vote(request: Request) -> Response:
    """Delegate: append a voter's first authority note in the next block."""
    require_keys(request)
    fields = parse_object(await request.body())
    round_id, delegation = _decode_round_id(fields), _decode_proven(request, fields, _DELEGATE_BYTES)
    return await _submit(request, round_id, encode(Delegation(round_id, (delegation["van_cmx"],))))


async def post_cast_vote_batch(request: Request) -> Response:
    """Cast several votes: append one authority note, then the vote commitments in order."""
    require_keys(request)
    fields = parse_object(await request.body())
    _refuse_unknown_fields(fields, {"vote_round_id", "votes"})
    return await _submit_batch(request, fields, delegated_nullifiers=0)


async def post_delegate_and_cast_vote_batch(request: Request) -> Response:
    """Delegate and cast several votes. The delegated note is spent by the first vote and not appended."""
    require_keys(request)
    fields = parse_object(await request.body())
    _refuse_unknown_fields(fields, {"vote_round_id", "votes", "delegation"})
    delegation = _take_object(fields, "delegation")
    _refuse_unknown_fields(delegation, _DELEGATE_FIELDS)
    _decode_proven(request, delegation, _DELEGATE_BYTES)
    nullifiers = _take_list(delegation, "gov_nullifiers")
    if not nullifiers:
        raise create_field_error("gov_nullifiers cannot be empty")
    return await _submit_batch(request, fields, delegated_nullifiers=len(nullifiers))


ROUTES = [
    Route(f"{_PREFIX}/cast-vote", post_cast_vote, methods=["POST"]),
    Route(f"{_PREFIX}/delegate-vote", post_delegate_vote, methods=["POST"]),
]
ERA_ROUTES = {
    BATCH_CAST: Route(f"{_PREFIX}/{BATCH_CAST}", post_cast_vote_batch, methods=["POST"]),
    BATCH_DELEGATE: Route(f"{_PREFIX}/{BATCH_DELEGATE}", post_delegate_and_cast_vote_batch, methods=["POST"]),
}
"""Routes that older eras do not have, by name."""


async def _submit_batch(request: Request, fields: Mapping[str, Any], *, delegated_nullifiers: int) -> Response:
    """Decode the votes of a batch and submit it. The response contains the digest of the batch."""
    entries = [_as_object(entry, "votes") for entry in _take_list(fields, "votes")]
    if not 1 <= len(entries) <= _MAX_BATCH_VOTES:
        raise create_field_error(f"votes must have 1..{_MAX_BATCH_VOTES} entries, got {len(entries)}")
    for entry in entries:
        _refuse_unknown_fields(entry, _CAST_FIELDS)
    round_id, votes = _decode_round_id(fields), [_decode_vote(request, entry) for entry in entries]
    batch = CastBatch(
        round_id=round_id,
        authority_note=votes[-1]["vote_authority_note_new"],
        vote_commitments=tuple(vote["vote_commitment"] for vote in votes),
        van_nullifiers=tuple(vote["van_nullifier"] for vote in votes),
        proposal_ids=tuple(take_uint(entry, "proposal_id", 32) for entry in entries),
        delegated_nullifiers=delegated_nullifiers,
    )
    if len(set(batch.proposal_ids)) < len(votes):
        raise create_field_error("a proposal occurs more than once in the batch")
    return await _submit(request, round_id, encode(batch), batch_digest=batch.digest.hex())


async def _submit(request: Request, round_id: bytes, raw: bytes, **shown: str) -> Response:
    """Respond with the transaction's hash and `shown`, or with 422 if the round does not accept votes."""
    round_view = get_view(request).round(round_id)
    if round_view is None:
        return json_response({"code": 3, "log": "vote round not found"}, 422)
    if round_view[1] != ACTIVE:
        return json_response(
            {"code": 1, "log": f"vote round is not active: status is {STATUS_NAMES[round_view[1]]}"}, 422
        )
    devnet: DevNet = request.app.state.devnet

    async def submit() -> BroadcastResult:
        return BroadcastResult(devnet.admission.submit_message(raw), 0)

    result = await broadcast(request, raw, submit)
    fields = {"tx_hash": result.hash.hex().upper(), "code": result.code, "log": result.log, **shown}
    return json_response(omit_zero(fields) | {"code": result.code}, 422 if result.code else 200)


def _decode_round_id(fields: Mapping[str, Any]) -> bytes:
    """Decode the round of a message."""
    return _decode_bytes(fields, _ROUND_BYTES)["vote_round_id"]


def _decode_vote(request: Request, fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Decode a vote without its round."""
    values = _decode_proven(request, fields, _CAST_BYTES)
    if take_uint(fields, "vote_comm_tree_anchor_height", 64) == 0:
        raise create_field_error("vote_comm_tree_anchor_height cannot be zero")
    take_uint(fields, "proposal_id", 32)
    return values


def _decode_proven(request: Request, fields: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, bytes]:
    """Decode the fields of fixed length and check that there is a proof."""
    values = _decode_bytes(fields, lengths)
    proof, devnet = take_bytes(fields, "proof"), request.app.state.devnet
    if not 1 <= len(proof) <= devnet.era.max_proof_bytes:
        raise create_field_error(f"proof must be 1..{devnet.era.max_proof_bytes} bytes, got {len(proof)}")
    return values


def _decode_bytes(fields: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, bytes]:
    """Decode fields of fixed length."""
    values = {}
    for name, length in lengths.items():
        values[name] = take_bytes(fields, name)
        if len(values[name]) != length:
            raise create_field_error(f"{name} must be {length} bytes, got {len(values[name])}")
    return values


def _refuse_unknown_fields(fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse a field that the message does not have, like the strict decoder of the batch routes."""
    unknown = next((name for name in fields if name not in known), None)
    if unknown is not None:
        raise GoJsonError(f'json: unknown field "{unknown}"')


def _take_list(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Read a list; absent and null are empty, like a slice in Go."""
    value = fields.get(name)
    if value is not None and not isinstance(value, list):
        raise GoJsonError(f"json: cannot unmarshal value into Go struct field .{name}")
    return value or []


def _take_object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read an object; absent and null are empty, like a struct in Go."""
    return _as_object({} if fields.get(name) is None else fields[name], name)


def _as_object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GoJsonError(f"json: cannot unmarshal value into Go struct field .{name}")
    return value
