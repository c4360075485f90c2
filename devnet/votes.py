"""Routes for delegating and voting, `POST /shielded-vote/v1/{delegate,cast}-vote`.

On a real chain both carry proofs and signatures of circuits that are not part of this product. Here the format and the
lengths of the fields are checked, and only the leaves that they append are used. Proofs, signatures and spent
authorities are not checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from devnet.gojson import parse_object, take_bytes, take_uint
from devnet.network import DevNet
from devnet.responses import create_field_error, get_view, json_response
from devnet.rounds import ACTIVE, STATUS_NAMES
from devnet.tx import Cast, Delegation, encode

_PREFIX: Final = "/shielded-vote/v1"
_CAST_BYTES: Final = {
    "vote_round_id": 32,
    "van_nullifier": 32,
    "vote_authority_note_new": 32,
    "vote_commitment": 32,
    "r_vpk": 32,
    "vote_auth_sig": 64,
}
_DELEGATE_BYTES: Final = {
    "vote_round_id": 32,
    "rk": 32,
    "spend_auth_sig": 64,
    "sighash": 32,
    "signed_note_nullifier": 32,
    "cmx_new": 32,
    "van_cmx": 32,
}
_MAX_PROOF_BYTES: Final = 8192


async def post_cast_vote(request: Request) -> Response:
    """Cast a vote: append the vote commitment and the voter's new authority note in the next block."""
    fields = parse_object(await request.body())
    found = _decode_fields(fields, _CAST_BYTES)
    if take_uint(fields, "vote_comm_tree_anchor_height", 64) == 0:
        raise create_field_error("vote_comm_tree_anchor_height cannot be zero")
    take_uint(fields, "proposal_id", 32)
    message = Cast(found["vote_round_id"], found["vote_authority_note_new"], (found["vote_commitment"],))
    return _submit(request, found["vote_round_id"], encode(message))


async def post_delegate_vote(request: Request) -> Response:
    """Delegate: append a voter's first authority note in the next block."""
    found = _decode_fields(parse_object(await request.body()), _DELEGATE_BYTES)
    return _submit(request, found["vote_round_id"], encode(Delegation(found["vote_round_id"], (found["van_cmx"],))))


ROUTES = [
    Route(f"{_PREFIX}/cast-vote", post_cast_vote, methods=["POST"]),
    Route(f"{_PREFIX}/delegate-vote", post_delegate_vote, methods=["POST"]),
]


def _submit(request: Request, round_id: bytes, raw: bytes) -> Response:
    """Respond with the transaction's hash, or with 422 if the round does not accept votes."""
    found = get_view(request).round(round_id)
    if found is None:
        return json_response({"code": 3, "log": "vote round not found"}, 422)
    if found[1] != ACTIVE:
        return json_response({"code": 1, "log": f"vote round is not active: status is {STATUS_NAMES[found[1]]}"}, 422)
    devnet: DevNet = request.app.state.devnet
    return json_response({"tx_hash": devnet.admission.submit_message(raw).hex().upper(), "code": 0})


def _decode_fields(fields: Mapping[str, Any], lengths: Mapping[str, int]) -> dict[str, bytes]:
    """Decode the fields of fixed length and check that there is a proof."""
    found = {}
    for name, length in lengths.items():
        found[name] = take_bytes(fields, name)
        if len(found[name]) != length:
            raise create_field_error(f"{name} must be {length} bytes, got {len(found[name])}")
    proof = take_bytes(fields, "proof")
    if not 1 <= len(proof) <= _MAX_PROOF_BYTES:
        raise create_field_error(f"proof must be 1..{_MAX_PROOF_BYTES} bytes, got {len(proof)}")
    return found
