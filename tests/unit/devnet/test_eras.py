"""Differences between chain versions: statuses, events, routes, limits, keys that warm up, lost engines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

import proofs
from devnet.eras import BATCH_CAST, BATCH_DELEGATE, ERAS
from devnet.tx import encode, tx_hash
from devnet.vote_submission import batch_body, delegation_body
from tests.unit.devnet.support import API_PREFIX, replace_fields, reveal_body, run_chain

UNKNOWN = "11" * 32
TREE = f"{API_PREFIX}/commitment-tree"


@pytest.mark.parametrize(
    ("path", "statuses", "text"),
    [
        (f"{API_PREFIX}/round/{UNKNOWN}", (500, 404, 404), "vote round not found"),
        (f"{TREE}/{UNKNOWN}/7", (500, 404, 404), "no commitment root at height 7"),
        (f"{TREE}/{UNKNOWN}/latest", (200, 200, 200), '{"tree":{}}'),
        (f"{TREE}/{UNKNOWN}/leaves", (400, 200, 200), ""),
        (f"{TREE}/{UNKNOWN}/leaves?from_height=1&to_height=2000", (500, 400, 200), ""),
        (f"{TREE}/{UNKNOWN}/leaves?from_height=9&to_height=3", (200, 400, 400), ""),
        (f"{TREE}/{UNKNOWN}/leaves?from_height=x", (400, 400, 400), ""),
        (f"{API_PREFIX}/rounds/active", (500, 200, 200), "round"),
        (f"{API_PREFIX}/vote-summary/{UNKNOWN}", (500, 500, 500), "vote round not found"),
        (f"{API_PREFIX}/tx/{UNKNOWN}", (404, 404, 404), '{"error":"tx not found"}'),
        (f"{API_PREFIX}/readiness", (404, 200, 200), ""),
    ],
)
async def test_query_status_depends_on_era(path: str, statuses: tuple[int, int, int], text: str) -> None:
    for era, status in zip(("0.5", "1.4", "1.6"), statuses, strict=True):
        async with run_chain(era=ERAS[era]) as chain:
            response = await chain.rest.get(path)
            assert response.status_code == status, era
            assert text in response.text
            assert isinstance(response.json(), dict)


@pytest.mark.parametrize(("era", "version", "circuit"), [("0.5", "v0.5.42", "k11"), ("1.6", "v1.6.0", "k10")])
async def test_era_sets_version_and_circuit(era: str, version: str, circuit: str) -> None:
    async with run_chain(era=ERAS[era]) as chain:
        assert (chain.devnet.version, chain.devnet.verifier.circuit) == (version, circuit)
    async with run_chain(era=ERAS[era], circuit="k11", version="v9") as chain:
        assert (chain.devnet.version, chain.devnet.verifier.circuit) == ("v9", "k11")


@pytest.mark.parametrize(("era", "is_garbled"), [("0.5", True), ("1.4", True), ("1.6", False)])
async def test_tx_events_are_unaltered_from_v1_5(era: str, is_garbled: bool) -> None:
    async with run_chain(era=ERAS[era]) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        reveal = chain.create_stand_in_reveal(ballot, 0)
        sent = (await chain.send_reveal(reveal)).json()
        await chain.mine()
        shown = await chain.get_json(f"{API_PREFIX}/tx/{sent['tx_hash']}")
        values = {pair["key"]: pair["value"] for pair in shown["events"][1]["attributes"]}
        assert (values["share_nullifier"] != reveal.nullifier.hex()) is is_garbled
        assert (shown["code"], values["proposal_id"]) == (0, "1")
        results = (await chain.rpc.get(f"/block_results?height={shown['height']}")).text
        assert reveal.nullifier.hex() in results, "the consensus RPC never alters values"


def create_batch(round_id: bytes, count: int) -> tuple[dict[str, Any], list[bytes]]:
    commitments = [proofs.random_field() for _ in range(count)]
    return batch_body(round_id, list(zip(commitments, range(1, count + 1), strict=True)), anchor_height=1), commitments


@pytest.mark.parametrize("route", [BATCH_CAST, BATCH_DELEGATE])
async def test_batch_appends_one_van_and_its_commitments_in_order(route: str) -> None:
    async with run_chain(era=ERAS["1.6"]) as chain:
        round_id = await chain.create_round()
        await chain.rest.post("/devnet/delegate", json={"round_id": round_id.hex(), "count": 7})
        await chain.mine()
        body, commitments = create_batch(round_id, 3)
        if route == BATCH_DELEGATE:
            body["delegation"] = delegation_body(round_id)
            del body["delegation"]["vote_round_id"]
        sent = await chain.rest.post(f"{API_PREFIX}/{route}", json=body)
        assert sent.status_code == 200, sent.text
        assert set(sent.json()) == {"tx_hash", "code", "batch_digest"}
        await chain.mine()
        shown = await chain.get_json(f"{API_PREFIX}/tx/{sent.json()['tx_hash']}")
        event = shown["events"][1]
        values = {pair["key"]: pair["value"] for pair in event["attributes"]}
        assert event["type"] == route.replace("-", "_")
        assert values["final_van_leaf_index"] == "7"
        assert values["vote_commitment_leaf_indices"] == "8,9,10"
        assert values["proposal_ids"] == "1,2,3"
        assert values["batch_digest"] == sent.json()["batch_digest"]
        assert values.get("nullifier_count") == ("1" if route == BATCH_DELEGATE else None)
        tree = chain.devnet.chain.rounds[round_id].tree
        assert [tree.leaf(index) for index in (8, 9, 10)] == commitments


async def test_batch_of_50_votes_is_accepted_and_larger_or_odd_ones_are_refused() -> None:
    async with run_chain(era=ERAS["1.6"]) as chain:
        round_id = await chain.create_round()

        async def post(body: dict[str, Any]) -> httpx.Response:
            return await chain.rest.post(f"{API_PREFIX}/{BATCH_CAST}", json=body)

        body, _ = create_batch(round_id, 50)
        assert 750_000 < len(json.dumps(body)) < 800_000
        assert (await post(body)).status_code == 200
        too_many, _ = create_batch(round_id, 51)
        twice = {**body, "votes": [body["votes"][0]] * 2}
        for bad in ({**body, "memo": ""}, too_many, twice, {**body, "votes": []}, {**body, "votes": [7]}):
            assert (await post(bad)).status_code == 400


@pytest.mark.parametrize(("era", "statuses"), [("0.5", [404, 404]), ("1.4", [404, 404]), ("1.6", [400, 400])])
async def test_batch_routes_exist_from_1_6(era: str, statuses: list[int]) -> None:
    async with run_chain(era=ERAS[era]) as chain:
        responses = [await chain.rest.post(f"{API_PREFIX}/{route}", json={}) for route in (BATCH_CAST, BATCH_DELEGATE)]
        assert [response.status_code for response in responses] == statuses
        assert all(list(response.json()) == ["error"] for response in responses)


@pytest.mark.parametrize("era", ["0.5", "1.4", "1.6"])
@pytest.mark.parametrize("keys", ["not_started", "warming", "failed"])
async def test_every_post_is_refused_while_keys_warm_up(era: str, keys: str) -> None:
    async with run_chain(era=ERAS[era]) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        reveal = chain.create_stand_in_reveal(ballot, 0)
        await chain.set_faults(keys=keys)
        posts = [await chain.rest.post(f"{API_PREFIX}/{name}", json={}) for name in ("delegate-vote", "cast-vote")]
        for response in (*posts, await chain.send_reveal(reveal)):
            assert response.status_code == 503
            if era == "0.5":
                assert response.json() == {"error": "verifying keys are warming up"}
                assert "retry-after" not in response.headers
            else:
                assert response.json()["status"] == keys
                assert response.headers["retry-after"] == "2"
        if era != "0.5":
            warming = await chain.rest.get(f"{API_PREFIX}/readiness")
            assert (warming.status_code, warming.json()["status"]) == (503, keys)
        await chain.set_faults(keys="ready")
        assert (await chain.send_reveal(reveal)).status_code == 200


@pytest.mark.parametrize(
    ("era", "failures", "delivers", "status"),
    [
        ("0.5", 1, False, 502),
        ("1.6", 2, False, 200),
        ("1.6", 3, False, 502),
        ("1.6", 3, True, 502),
    ],
)
async def test_node_tries_three_times_to_reach_its_engine(era: str, failures: int, delivers: bool, status: int) -> None:
    async with run_chain(era=ERAS[era]) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        reveal = chain.create_stand_in_reveal(ballot, 0)
        await chain.set_faults(engine_failures=failures, engine_seconds=0, engine_delivers=delivers)
        response = await chain.send_reveal(reveal)
        assert response.status_code == status
        digest = tx_hash(encode(reveal))
        if era == "1.6" and status == 502:
            text = f"broadcast outcome unknown after retries; tx_hash={digest.hex().upper()}"
            assert response.json() == {"error": text}
        await chain.mine()
        assert (digest in chain.devnet.chain.transactions) is (delivers or status == 200)


async def test_node_finds_delivered_transaction_after_lost_engine_response() -> None:
    async with run_chain(era=ERAS["1.6"]) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        await chain.set_faults(engine_failures=3, engine_seconds=0.05, engine_delivers=True)
        sending = asyncio.ensure_future(chain.send_reveal(chain.create_stand_in_reveal(ballot, 0)))
        while not chain.devnet.admission.mempool:
            await asyncio.sleep(0)
        await chain.mine()
        assert (await sending).status_code == 200


async def test_newer_proposer_drops_second_reveal_of_a_share_and_limits_blocks() -> None:
    era = replace(ERAS["1.6"], max_block_bytes=3000)
    async with run_chain(era=era, max_reveals=2) as chain:
        round_id = await chain.create_round()
        ballot, _ = await chain.cast_vote(round_id)
        first = chain.create_stand_in_reveal(ballot, 0)
        second = replace_fields(first, proof=first.proof + b"\0")
        others = [chain.create_stand_in_reveal(ballot, index) for index in (1, 2)]
        chain.devnet.verifier.check = accept_all  # type: ignore[method-assign, assignment]
        for reveal in (first, second, *others):
            assert (await chain.send_reveal(reveal)).status_code == 200
        sizes = []
        for _ in range(3):
            await chain.mine()
            sizes.append([result.code for result in chain.devnet.chain.blocks[-1].results])
        assert sizes == [[0, 0], [0], []]
        for count in (40, 40, 40):
            await chain.rest.post("/devnet/delegate", json={"round_id": round_id.hex(), "count": count})
        for expected in (2, 1):
            await chain.mine()
            assert len(chain.devnet.chain.blocks[-1].results) == expected


async def accept_all(*_: object) -> None:
    return None


@pytest.mark.parametrize(("era", "limit"), [("0.5", 8192), ("1.4", 15360)])
async def test_proof_limit_depends_on_era(era: str, limit: int) -> None:
    async with run_chain(era=ERAS[era]) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        body = reveal_body(replace_fields(chain.create_stand_in_reveal(ballot, 0), proof=bytes(limit + 1)))
        response = await chain.rest.post(f"{API_PREFIX}/reveal-share", json=body)
        assert f"proof must be 1..{limit} bytes, got {limit + 1}" in response.json()["error"]


async def test_status_503_fault_has_retry_after_in_newer_eras() -> None:
    for era, header in (("0.5", None), ("1.6", "2")):
        async with run_chain(era=ERAS[era]) as chain:
            await chain.set_faults(status_503=1, routes=["reveal-share"])
            response = await chain.rest.post(f"{API_PREFIX}/reveal-share", json={})
            assert (response.status_code, response.headers.get("retry-after")) == (503, header)
