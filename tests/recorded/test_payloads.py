"""The 16 payloads of a real vote pass every check against the recorded round, over HTTP and with real hashes."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx
import pytest

import proofs
from helper.chain.chain_data import Round, RoundStatus, parse_leaves, parse_round
from helper.ingest.admission import AdmissionController
from helper.ingest.validator import ShareValidator
from helper.server.application import create_app
from helper.server.routes.wallet import WalletView
from tests.unit.ingest.admission_fixtures import FakeChain, FakeClock, FakeStore
from tests.unit.server.wallet_fixtures import SHARES_PATH, error_text

pytestmark = pytest.mark.anyio

SHARE_INDICES = range(16)
MODULUS = 0x40000000000000000000000000000000224698FC094CF91B992D30ED00000001
"""Modulus of the Pallas base field: the smallest non-canonical value."""


def find_response(exchanges: list[dict[str, Any]], name: str) -> Any:
    return next(exchange["response"] for exchange in exchanges if exchange["name"] == name)


@pytest.fixture
def active_round(recorded_exchanges: list[dict[str, Any]]) -> Round:
    return parse_round(find_response(recorded_exchanges, "round, status 1"))


class RecordedHelper:
    """A helper that knows only the recorded round and its three leaves."""

    def __init__(self, known: Round, leaves: dict[tuple[bytes, int], bytes]) -> None:
        clock = FakeClock()
        self.store = FakeStore()
        self.chain = FakeChain(clock, rounds={known.round_id: known}, leaves=leaves)
        intake = AdmissionController(
            store=self.store,
            rounds=self.chain.registry,
            trees=self.chain.trees,
            validator=ShareValidator(proofs),
            clock=clock,
            wake=lambda _due: None,
            get_pause_reason=lambda: None,
            get_round_pause_reason=lambda _: None,
        )
        view = WalletView(
            admission=intake,
            store=self.store,
            rounds=self.chain.registry,
            trees=self.chain.trees,
            is_ready=lambda: True,
        )
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(view)), base_url="http://helper")

    async def post(self, payload: dict[str, Any]) -> httpx.Response:
        return await self.client.post(SHARES_PATH, content=json.dumps(payload))


@pytest.fixture
def recorded(active_round: Round, recorded_exchanges: list[dict[str, Any]]) -> RecordedHelper:
    leaves: dict[tuple[bytes, int], bytes] = {}
    for block in parse_leaves(find_response(recorded_exchanges, "leaves")).blocks:
        for number in range(len(block.leaves) // 32):
            position = block.start_index + number
            leaves[active_round.round_id, position] = block.leaves[32 * number : 32 * number + 32]
    assert sorted(position for _, position in leaves) == [0, 1, 2]
    return RecordedHelper(active_round, leaves)


@pytest.mark.rule("R13")
async def test_recorded_shares_are_accepted_then_duplicates(
    recorded: RecordedHelper, recorded_shares: list[dict[str, Any]]
) -> None:
    first = [(await recorded.post(payload)).json() for payload in recorded_shares]
    repeated = [(await recorded.post(payload)).json() for payload in recorded_shares]
    assert first == [{"status": "queued"}] * 16
    assert repeated == [{"status": "duplicate"}] * 16
    assert [share.share_index for share in recorded.store.shares] == list(SHARE_INDICES)


@pytest.mark.parametrize("index", SHARE_INDICES)
async def test_recorded_share_has_recorded_nullifier(
    recorded_shares: list[dict[str, Any]], recorded_reveals: list[dict[str, Any]], index: int
) -> None:
    (share,) = proofs.read_shares([json.dumps(recorded_shares[index]).encode()])
    assert isinstance(share, proofs.ReadShare)
    ciphertext = base64.b64encode(share.c1 + share.c2).decode()
    reveal = next(r["request"] for r in recorded_reveals if r["request"]["enc_share"] == ciphertext)
    assert share.nullifier == base64.b64decode(reveal["share_nullifier"])


@pytest.mark.rule("R12")
async def test_share_revealed_by_other_helper_is_duplicate(
    recorded: RecordedHelper, recorded_shares: list[dict[str, Any]], recorded_reveals: list[dict[str, Any]]
) -> None:
    round_id = bytes.fromhex(recorded_shares[0]["vote_round_id"])
    for reveal in recorded_reveals:
        recorded.store.spent.add((round_id, base64.b64decode(reveal["request"]["share_nullifier"])))
    responses = [(await recorded.post(payload)).json() for payload in recorded_shares]
    assert responses == [{"status": "duplicate"}] * 16
    assert recorded.store.shares == []


def b64(value: bytes) -> str:
    return base64.b64encode(value).decode()


NOT_CANONICAL = b64(MODULUS.to_bytes(32, "little"))
OFF_CURVE = b64(bytes([2]) + bytes(31))
"""Pallas has no point with x = 2."""
IDENTITY = b64(bytes(32))


def with_inner(payload: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**payload, "enc_share": {**payload["enc_share"], **changes}}


def with_commitment(payload: dict[str, Any], index: int, value: str) -> dict[str, Any]:
    comms = list(payload["share_comms"])
    comms[index] = value
    return {**payload, "share_comms": comms}


def broken_payloads(payload: dict[str, Any], other: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return payloads that are invalid but have a valid shape, by the expected error."""
    index = payload["enc_share"]["share_index"]
    return {
        "shares_hash: is not a canonical": {**payload, "shares_hash": NOT_CANONICAL},
        "shares_hash: is not the hash": {**payload, "shares_hash": b64(b"\x01" + bytes(31))},
        "share_comms[5]: is not a canonical": with_commitment(payload, 5, NOT_CANONICAL),
        "shares_hash: is not the hash ": with_commitment(payload, 5, b64(b"\x01" + bytes(31))),
        "primary_blind: is not a canonical": {**payload, "primary_blind": NOT_CANONICAL},
        f"share_comms[{index}]: is not the commitment": {**payload, "primary_blind": other["primary_blind"]},
        "vote_round_id: is not a canonical": {**payload, "vote_round_id": "ff" * 32},
        "enc_share.c1: is not a point": with_inner(payload, c1=OFF_CURVE),
        "enc_share.c2: is not a point": with_inner(payload, c2=OFF_CURVE),
        "enc_share.c1: must not be the identity": with_inner(payload, c1=IDENTITY),
        "enc_share.c2: must not be the identity": with_inner(payload, c2=IDENTITY),
        f"share_comms[{index}]: is not": with_inner(payload, c1=other["enc_share"]["c1"]),
        f"share_comms[{(index + 1) % 16}]: ": with_inner(payload, share_index=(index + 1) % 16),
        "proposal_id: ": {**payload, "proposal_id": 50},
        "vote_decision: ": {**payload, "vote_decision": 7},
        "tree_position: has a different": {**payload, "tree_position": 1},
        "tree_position: has": {**payload, "vote_decision": 1 - payload["vote_decision"]},
        "submit_at: ": {**payload, "submit_at": 1_795_268_196},
    }


@pytest.mark.rule("R13")
@pytest.mark.parametrize("index", SHARE_INDICES)
async def test_broken_payload_is_400_with_field_and_not_stored(
    recorded: RecordedHelper, recorded_shares: list[dict[str, Any]], index: int
) -> None:
    payloads = broken_payloads(recorded_shares[index], recorded_shares[(index + 1) % 16])
    for description, payload in payloads.items():
        response = await recorded.post(payload)
        assert (response.status_code, description) == (400, description)
        assert error_text(response).startswith(description.rstrip())
    assert recorded.store.calls == ["known"]  # only the late share, which is valid except for its time


@pytest.mark.rule("W4")
@pytest.mark.parametrize("changes", [{"vote_round_id": "11" * 31 + "00"}, {"tree_position": 3}])
async def test_payload_for_unknown_round_or_position_is_503(
    recorded: RecordedHelper, recorded_shares: list[dict[str, Any]], changes: dict[str, Any]
) -> None:
    recorded.chain.syncs = [lambda: None, lambda: None]
    response = await recorded.post({**recorded_shares[0], **changes})
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")


async def test_share_of_finalized_round_is_refused(
    recorded: RecordedHelper, recorded_shares: list[dict[str, Any]], active_round: Round
) -> None:
    recorded.chain.rounds[active_round.round_id] = Round(
        active_round.round_id,
        RoundStatus.FINALIZED,
        active_round.vote_end_time,
        active_round.proposals,
        active_round.created_at_height,
    )
    response = await recorded.post(recorded_shares[0])
    assert (response.status_code, error_text(response)) == (400, "vote_round_id: the round is not active")
