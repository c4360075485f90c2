"""Control routes of the dev chain, `/devnet/…` on every node's REST port: rounds, votes, blocks, faults, request log.

On a real chain, delegations and votes carry proofs of two more circuits, which are not part of this product. Here they
have no proofs: a helper only sees the leaves that they append.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import proofs
from devnet.blocks import rfc3339_nano, validator_json
from devnet.ceremony import Ceremony, default_threshold
from devnet.chain import TxResult
from devnet.faults import FaultRequest, FaultRules
from devnet.gojson import b64
from devnet.lies import Liar
from devnet.network import DevNet
from devnet.responses import create_error, json_response
from devnet.tx import Cast, Delegation, EndRound, EndTimeChange, NewRound, Reveal, decode, encode

_DEFAULT_PROPOSALS: list[dict[str, Any]] = [
    {"title": "Proposal A", "description": "First proposal", "options": ["Support", "Oppose"]},
    {"title": "Proposal B", "description": "Second proposal", "options": ["Support", "Oppose"]},
]
_PENDING_FOREVER_BLOCKS = 1 << 40
_SNAPSHOT_HEIGHT = 42000
_PROOF_BYTES = 4992
T = TypeVar("T", bound=BaseModel)


class _Body(BaseModel):
    """A request body. Unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")


class ProposalBody(_Body):
    """A proposal of a new round: options as labels; ids count from 1 unless given."""

    id: int | None = None
    title: str = ""
    description: str = ""
    options: list[str] = Field(min_length=1, max_length=8)


class RoundBody(_Body):
    """A new round. It ends at `vote_end_time` or in `seconds`. `status` 1: ACTIVE immediately; 4: always PENDING.

    With `validators`, it has a key ceremony and a threshold tally whose transactions are in blocks. `removed` are the
    indices of validators that leave after the ceremony, `absent` those that submit no partial decryptions.
    """

    proposals: list[ProposalBody] | None = None
    vote_end_time: int | None = None
    seconds: float = 3600
    status: int | None = None
    pending_blocks: int = Field(2, ge=0)
    tally_blocks: int = Field(3, ge=1)
    vote_round_id: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    validators: int | None = Field(None, ge=1, le=32)
    threshold: int | None = Field(None, ge=1, le=32)
    removed: list[int] = Field(default_factory=list)
    absent: list[int] = Field(default_factory=list)


class EndTimeBody(_Body):
    """A new end time of an active round, in Unix seconds."""

    round_id: str
    vote_end_time: int


class CastBody(_Body):
    """A vote: its commitment (hex), or a batch under one VAN. `wait`: maximum seconds to wait for its block."""

    round_id: str
    vote_commitment: str | None = None
    vote_commitments: list[str] = Field(default_factory=list)
    proposal_id: int = Field(1, ge=1)
    wait: float = 0


class DelegateBody(_Body):
    """A number of random leaves to append to a round's tree in one transaction, or `separate`, one each."""

    round_id: str
    count: int = Field(1, ge=1, le=1_000_000)
    separate: bool = False


class MineBody(_Body):
    """Blocks to produce now: at the clock's time, at `time` (Unix seconds), or after advancing the clock."""

    blocks: int = Field(1, ge=1, le=10_000)
    time: float | None = None
    advance_seconds: float = 0


class EndBody(_Body):
    """A round to end now, before its `vote_end_time`."""

    round_id: str


class RevealBody(_Body):
    """A reveal of another helper, to include in the next block. Its proof is not checked."""

    round_id: str
    nullifier: str
    enc_share: str = Field(pattern="^[0-9a-f]{128}$")
    proposal_id: int = Field(ge=1)
    vote_decision: int = Field(ge=0)


class ValidatorBody(_Body):
    """A validator to add to staking or to remove."""

    operator_address: str
    moniker: str = "validator"
    status: str = "BOND_STATUS_BONDED"
    remove: bool = False


class VotingConfigBody(RootModel[dict[str, Any]]):
    """A voting configuration: any object."""


async def post_round(request: Request) -> Response:
    """Create a round in the next block."""
    devnet, body = _get_devnet(request), await _parse_body(request, RoundBody)
    secret, public = proofs.elgamal_keygen(secrets.token_bytes(32))
    end = body.vote_end_time
    pending = {1: 0, 4: _PENDING_FOREVER_BLOCKS}.get(body.status or 0, body.pending_blocks)
    given = [proposal.model_dump(exclude_none=True) for proposal in body.proposals or []]
    fields: dict[str, Any] = {
        "vote_round_id": body.vote_round_id or proofs.random_field().hex(),
        "vote_end_time": end if end is not None else int(devnet.producer.now_ns() / 1e9 + body.seconds),
        "proposals": given or _DEFAULT_PROPOSALS,
        "pending_blocks": pending,
        "tally_blocks": body.tally_blocks,
        "ea_secret": secret.hex(),
        "ea_pk": public.hex(),
    }
    if body.validators is not None:
        fields |= _ceremony_fields(body, body.validators, int(fields["vote_end_time"]))
    digest = devnet.admission.submit_message(encode(NewRound(fields)))
    shown = {name: fields[name] for name in ("vote_round_id", "vote_end_time", "ea_pk")}
    return json_response({**shown, "tx_hash": digest.hex().upper()})


def _ceremony_fields(body: RoundBody, validators: int, end: int) -> dict[str, Any]:
    """The fields of a round with a key ceremony. Its id is the hash of its fields, as on the real chain."""
    ceremony = Ceremony(
        secrets.token_bytes(32),
        validators,
        body.threshold or default_threshold(validators),
        frozenset(body.removed),
        frozenset(body.absent),
    )
    if len(ceremony.decrypting) < ceremony.threshold:
        raise create_error(400, f"{len(ceremony.decrypting)} validators cannot reach threshold {ceremony.threshold}")
    block_hash, proposals_hash = secrets.token_bytes(32), secrets.token_bytes(32)
    roots = [proofs.random_field(), proofs.random_field()]
    numbers = [_SNAPSHOT_HEIGHT]
    numbers += [int.from_bytes(half, "little") for h in (block_hash, proposals_hash) for half in (h[:16], h[16:])]
    round_id = proofs.poseidon(*(number.to_bytes(32, "little") for number in (*numbers, end)), *roots)
    return {
        "vote_round_id": round_id.hex(),
        "ceremony": ceremony.to_fields(),
        "ea_secret": ceremony.secret.hex(),
        "ea_pk": ceremony.commitments[0].hex(),
        "shown": {
            "snapshot_height": _SNAPSHOT_HEIGHT,
            "snapshot_blockhash": b64(block_hash),
            "proposals_hash": b64(proposals_hash),
            "nullifier_imt_root": b64(roots[0]),
            "nc_root": b64(roots[1]),
        },
    }


async def post_round_end(request: Request) -> Response:
    """End an ACTIVE round in the next block: the tally begins, `vote_end_time` is unchanged."""
    devnet, body = _get_devnet(request), await _parse_body(request, EndBody)
    digest = devnet.admission.submit_message(encode(EndRound(_parse_element(body.round_id))))
    return json_response({"tx_hash": digest.hex().upper()})


async def post_end_time(request: Request) -> Response:
    """Change a round's end in the next block."""
    devnet, body = _get_devnet(request), await _parse_body(request, EndTimeBody)
    digest = devnet.admission.submit_message(encode(EndTimeChange(_parse_element(body.round_id), body.vote_end_time)))
    return json_response({"tx_hash": digest.hex().upper()})


async def post_cast(request: Request) -> Response:
    """Cast a vote in the next block. Returns its hash and, with `wait`, the positions of its leaves."""
    devnet, body = _get_devnet(request), await _parse_body(request, CastBody)
    wanted = [body.vote_commitment] if body.vote_commitment else body.vote_commitments
    commitments = tuple(_parse_element(text) for text in wanted)
    if not commitments:
        raise create_error(400, "vote_commitment or vote_commitments is required")
    round_id, note, nullifier = _parse_element(body.round_id), proofs.random_field(), proofs.random_field()
    vote = Cast(round_id, note, commitments, nullifier, body.proposal_id)
    digest = devnet.admission.submit_message(encode(vote))
    result = await _wait_for_transaction(devnet, digest, body.wait)
    return json_response(_cast_json(result) if result else {"tx_hash": digest.hex().upper()})


async def get_cast(request: Request) -> Response:
    """Return the positions of a cast vote; 404 until it is in a block. `?wait=` is the maximum wait in seconds."""
    digest = _parse_element(request.path_params["hash"])
    result = await _wait_for_transaction(_get_devnet(request), digest, float(request.query_params.get("wait", 0)))
    if result is None:
        raise create_error(404, "tx not found")
    return json_response(_cast_json(result))


async def post_delegate(request: Request) -> Response:
    """Append random leaves in the next block."""
    devnet, body = _get_devnet(request), await _parse_body(request, DelegateBody)
    leaves = [proofs.random_field() for _ in range(body.count)]
    groups = [(leaf,) for leaf in leaves] if body.separate else [tuple(leaves)]
    round_id = _parse_element(body.round_id)
    for group in groups:
        nullifiers = (proofs.random_field(),) if body.separate else ()
        digest = devnet.admission.submit_message(encode(Delegation(round_id, group, nullifiers)))
    return json_response({"tx_hash": digest.hex().upper()})


async def post_reveal(request: Request) -> Response:
    """Include a reveal in the next block, as if another helper had sent it."""
    devnet, body = _get_devnet(request), await _parse_body(request, RevealBody)
    reveal = Reveal(
        nullifier=_parse_element(body.nullifier),
        enc_share=bytes.fromhex(body.enc_share),
        proposal_id=body.proposal_id,
        vote_decision=body.vote_decision,
        proof=secrets.token_bytes(_PROOF_BYTES),
        round_id=_parse_element(body.round_id),
        anchor_height=devnet.chain.height,
    )
    digest = devnet.admission.submit_message(encode(reveal))
    return json_response({"tx_hash": digest.hex().upper()})


async def get_reveals(request: Request) -> Response:
    """The reveals of a round that counted, oldest first, with height and time of their block (Unix seconds)."""
    devnet, round_id = _get_devnet(request), _parse_element(request.path_params["round_id"])
    rows = [_reveal_json(devnet, result) for result in devnet.chain.reveals.get(round_id, [])]
    return json_response({"reveals": rows})


async def post_mine(request: Request) -> Response:
    """Produce blocks now. Returns the newest height and time."""
    devnet, body = _get_devnet(request), await _parse_body(request, MineBody)
    devnet.producer.offset_seconds += body.advance_seconds
    at = None if body.time is None else int(body.time * 1e9)
    for _ in range(body.blocks):
        await devnet.producer.mine(time_ns=at)
    block = devnet.chain.blocks[-1]
    return json_response({"height": block.height, "time": block.time_ns / 1e9})


async def post_faults(request: Request) -> Response:
    """Set this node's fault switches. Returns all of its rules."""
    devnet, body = _get_devnet(request), await _parse_body(request, FaultRequest)
    faults: FaultRules = request.app.state.faults
    faults.apply_request(body, devnet.chain.height)
    liar: Liar = request.app.state.liar
    if body.lies is not None or (body.reset and body.routes is None):
        liar.begin(body.lies or [], devnet.chain.height, body.seed)
    if body.halt_chain is not None:
        devnet.producer.is_halted = body.halt_chain
    if body.clock_offset_seconds is not None:
        devnet.producer.offset_seconds = body.clock_offset_seconds
    if body.duplicates is not None:
        devnet.admission.filter_duplicates = body.duplicates == "filter"
    if body.circuit is not None:
        devnet.verifier.circuit = body.circuit
    if body.version is not None:
        devnet.version = body.version
    return await get_faults(request)


async def get_faults(request: Request) -> Response:
    """This node's fault rules and lies."""
    lies = sorted(request.app.state.liar.lies)
    return json_response(request.app.state.faults.to_json() | ({"lies": lies} if lies else {}))


async def get_requests(request: Request) -> Response:
    """The request log of all nodes after entry `after`, oldest first."""
    params = request.query_params
    entries = _get_devnet(request).request_log.entries_after(
        int(params.get("after", 0)), int(params.get("limit", 10_000))
    )
    return json_response({"requests": entries})


async def get_stats(request: Request) -> Response:
    """CPU seconds and counts."""
    return json_response(_get_devnet(request).stats())


async def post_validator(request: Request) -> Response:
    """Bond a validator, change its status, or remove it."""
    devnet, body = _get_devnet(request), await _parse_body(request, ValidatorBody)
    if body.remove:
        devnet.remove_validator(body.operator_address)
        return json_response({})
    born = rfc3339_nano(devnet.producer.now_ns())
    record = validator_json(body.operator_address, body.moniker, body.status, born)
    devnet.set_validator(record)
    return json_response({"validator": record})


async def get_voting_config(request: Request) -> Response:
    """The published voting configuration; 404 if there is none. `?wait=` is the maximum wait in seconds."""
    config = await _get_devnet(request).published_config.fetch(float(request.query_params.get("wait", 0)))
    if config is None:
        raise create_error(404, "no voting configuration is published")
    return json_response(config)


async def post_voting_config(request: Request) -> Response:
    """Publish a voting configuration."""
    _get_devnet(request).published_config.publish((await _parse_body(request, VotingConfigBody)).root)
    return json_response({})


ROUTES = [
    Route("/devnet/rounds", post_round, methods=["POST"]),
    Route("/devnet/rounds/end", post_round_end, methods=["POST"]),
    Route("/devnet/rounds/end-time", post_end_time, methods=["POST"]),
    Route("/devnet/cast", post_cast, methods=["POST"]),
    Route("/devnet/cast/{hash}", get_cast),
    Route("/devnet/delegate", post_delegate, methods=["POST"]),
    Route("/devnet/reveals", post_reveal, methods=["POST"]),
    Route("/devnet/reveals/{round_id}", get_reveals),
    Route("/devnet/mine", post_mine, methods=["POST"]),
    Route("/devnet/faults", post_faults, methods=["POST"]),
    Route("/devnet/faults", get_faults),
    Route("/devnet/requests", get_requests),
    Route("/devnet/stats", get_stats),
    Route("/devnet/validators", post_validator, methods=["POST"]),
    Route("/devnet/voting-config", get_voting_config),
    Route("/devnet/voting-config", post_voting_config, methods=["POST"]),
]


def _get_devnet(request: Request) -> DevNet:
    devnet = request.app.state.devnet
    assert isinstance(devnet, DevNet)
    return devnet


async def _parse_body(request: Request, model: type[T]) -> T:
    """Parse the body, or raise 400 with the validation errors."""
    try:
        return model.model_validate_json(await request.body() or b"{}")
    except ValidationError as failure:
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in failure.errors()]
        raise create_error(400, "; ".join(problems)) from None


def _parse_element(text: str) -> bytes:
    """Decode 32 bytes from hex, or raise 400."""
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != 32:
        raise create_error(400, f"not 32 bytes of hex: {text[:80]}")
    return value


async def _wait_for_transaction(devnet: DevNet, digest: bytes, seconds: float) -> TxResult | None:
    """Wait until a transaction is in a block, for at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while digest not in devnet.chain.transactions:
                await devnet.producer.wait_for_block()
    except TimeoutError:
        return None
    return devnet.chain.transactions[digest]


def _cast_json(result: TxResult) -> dict[str, Any]:
    """Result of a cast vote: height, code, log, and on success the positions of its leaves."""
    shown: dict[str, Any] = {
        "tx_hash": result.hash.hex().upper(),
        "height": result.height,
        "code": result.code,
        "log": result.log,
    }
    leaves = next((values.get("leaf_index", "") for kind, values in result.events if kind == "cast_vote"), "")
    if leaves:
        van, *positions = (int(part) for part in leaves.split(","))
        shown |= {"van_position": van, "vc_positions": positions, "vc_position": positions[0]}
    return shown


def _reveal_json(devnet: DevNet, result: TxResult) -> dict[str, Any]:
    """A reveal in a block."""
    reveal = decode(result.tx)
    assert isinstance(reveal, Reveal)
    return {
        "nullifier": reveal.nullifier.hex(),
        "enc_share": reveal.enc_share.hex(),
        "proposal_id": reveal.proposal_id,
        "vote_decision": reveal.vote_decision,
        "tx_hash": result.hash.hex().upper(),
        "height": result.height,
        "time": devnet.chain.blocks[result.height - 1].time_ns / 1e9,
    }
