"""From a vote to its tally with real proofs, and what the chain refuses on the way."""

from __future__ import annotations

import base64

import pytest

from devnet.tx import Reveal, encode, tx_hash
from tests.unit.devnet.support import API, START, changed, prove, running

pytestmark = pytest.mark.anyio


async def test_proven_shares_are_counted_once_and_tallied_after_the_end() -> None:
    async with running(stand_in=False) as net:
        round_id = await net.new_round(vote_end_time=START + 500)
        ballot, position = await net.vote(round_id, weight=4321)
        assert position == 1  # behind the VAN of the same vote
        reveals = [prove(net, ballot, position, index) for index in range(16)]
        for reveal in reveals:
            answer = await net.send(reveal)
            assert answer.status_code == 200
            assert answer.json() == {"tx_hash": tx_hash(encode(reveal)).hex().upper(), "code": 0}
            assert (await net.rest.get(f"{API}/tx/{answer.json()['tx_hash']}")).status_code == 404
        await net.mine()
        shown = await net.get(f"{API}/tx/{tx_hash(encode(reveals[0])).hex()}")
        assert shown["code"] == 0
        assert shown["height"] == str(net.devnet.chain.height)

        summary = await net.get(f"{API}/vote-summary/{round_id.hex()}")
        assert summary["proposals"][0]["options"][1] == {"index": 1, "label": "Oppose", "ballot_count": 16}
        assert await net.get(f"{API}/tally-results/{round_id.hex()}") == {}

        await net.mine(time=START + 499.9)
        assert (await net.get(f"{API}/round/{round_id.hex()}"))["round"]["status"] == 1
        await net.mine(time=START + 500)
        assert (await net.get(f"{API}/round/{round_id.hex()}"))["round"]["status"] == 2
        await net.mine(3, time=START + 501)
        assert (await net.get(f"{API}/tally-results/{round_id.hex()}"))["results"] == [
            {
                "vote_round_id": base64.b64encode(round_id).decode(),
                "proposal_id": 1,
                "vote_decision": 1,
                "total_value": 4321,
            }
        ]


async def test_round_end_control_starts_the_tally_of_what_was_counted_before() -> None:
    async with running(stand_in=False) as net:
        round_id = await net.new_round(vote_end_time=START + 500)
        ballot, position = await net.vote(round_id, weight=77)
        reveals = [prove(net, ballot, position, index) for index in range(16)]
        for reveal in reveals[:-1]:
            await net.send(reveal)
        await net.mine()

        ended = await net.rest.post("/devnet/rounds/end", json={"round_id": round_id.hex()})
        assert ended.status_code == 200
        await net.mine()
        shown = (await net.get(f"{API}/round/{round_id.hex()}"))["round"]
        assert (shown["status"], shown["vote_end_time"]) == (2, START + 500)
        late = await net.send(reveals[-1])
        assert "vote round is not active" in late.json()["log"]
        await net.mine(3)

        (row,) = (await net.get(f"{API}/tally-results/{round_id.hex()}"))["results"]
        assert row["total_value"] == 77 - ballot.shares[15].value, "the tally is of what was counted"


async def test_a_proof_with_one_bit_flipped_is_refused_and_checked_only_once() -> None:
    async with running(stand_in=False) as net:
        ballot, position = await net.vote(await net.new_round())
        good = prove(net, ballot, position, 3)
        bad = changed(good, proof=bytes([*good.proof[:-1], good.proof[-1] ^ 1]))
        for _ in range(2):
            answer = await net.send(bad)
            assert answer.status_code == 422
            assert answer.json()["code"] == 1
            assert answer.json()["log"].endswith("verify_proof failed: ConstraintSystemFailure")
        assert net.devnet.verifier.checked == 1
        # The same proof says nothing about another decision, proposal, or ciphertext.
        for other in (changed(good, vote_decision=0), changed(good, proposal_id=2)):
            assert (await net.send(other)).status_code == 422
        longer = changed(good, proof=good.proof + b"\0")
        assert (await net.send(longer)).status_code == 422
        assert (await net.send(good)).status_code == 200


async def test_a_chain_of_one_circuit_refuses_the_others_proofs_until_it_is_upgraded() -> None:
    async with running(stand_in=False) as net:
        ballot, position = await net.vote(await net.new_round())
        reveal = prove(net, ballot, position, 0)
        await net.fault(circuit="k11", version="v1.2.0")
        assert (await net.send(reveal)).status_code == 422
        info = await net.get("/cosmos/base/tendermint/v1beta1/node_info")
        assert info["application_version"]["version"] == "v1.2.0"
        await net.fault(circuit="k10")
        assert (await net.send(reveal)).status_code == 200


async def test_test_proofs_count_only_where_they_are_asked_for() -> None:
    async with running() as net:
        ballot, _ = await net.vote(await net.new_round())
        assert (await net.send(net.stand_in(ballot, 0))).status_code == 200
        assert (await net.send(net.stand_in(ballot, 1, proof_of=2))).status_code == 422
        net.devnet.verifier.stand_in = False
        assert (await net.send(net.stand_in(ballot, 3))).status_code == 422


async def test_checks_come_in_the_chains_order() -> None:
    async with running() as net:
        round_id = await net.new_round(vote_end_time=START + 100)
        ballot, _ = await net.vote(round_id)
        spent, fresh = net.stand_in(ballot, 0), net.stand_in(ballot, 1)
        assert (await net.send(spent)).status_code == 200
        await net.mine()
        respent = changed(spent, proof=b"\1")
        no_anchor = changed(fresh, anchor_height=fresh.anchor_height + 1)

        async def log(reveal: Reveal) -> str:
            answer = await net.send(reveal)
            assert answer.status_code == 422
            return str(answer.json()["log"])

        assert await log(changed(respent, round_id=bytes(32))) == "vote round not found"
        assert await log(changed(respent, proposal_id=9)) == f"nullifier already spent: {spent.nullifier.hex()}"
        assert await log(changed(no_anchor, proposal_id=9)) == "invalid proposal ID: 9"
        assert (await log(changed(no_anchor, vote_decision=2))).startswith("invalid vote decision")
        assert (await log(no_anchor)).endswith(f"no commitment tree root at height {no_anchor.anchor_height}")
        await net.mine(time=START + 100)
        assert await log(respent) == "vote round is not active: status is SESSION_STATUS_TALLYING"


async def test_a_reveal_counts_only_in_a_block_before_the_end() -> None:
    async with running() as net:
        ballot, _ = await net.vote(await net.new_round(vote_end_time=START + 100))
        sent = (await net.send(net.stand_in(ballot, 0))).json()
        await net.mine(time=START + 100)
        late = await net.rest.get(f"{API}/tx/{sent['tx_hash']}")
        assert late.status_code == 422
        assert (
            late.json()["log"] == f"vote round is not active: vote_end_time {START + 100} <= block_time {START + 100}"
        )
        results = await net.rpc.get(f"/block_results?height={net.devnet.chain.height}")
        assert results.json()["result"]["txs_results"][0]["events"] == []


async def test_rounds_wait_for_their_key_ceremony() -> None:
    async with running() as net:
        answer = await net.rest.post("/devnet/rounds", json={"pending_blocks": 2})
        path = f"{API}/round/{answer.json()['vote_round_id']}"
        await net.mine()
        pending = (await net.get(path))["round"]
        assert pending["status"] == 4
        assert "ea_pk" not in pending
        await net.mine(2)
        assert (await net.get(path))["round"]["status"] == 1
        stays = await net.rest.post("/devnet/rounds", json={"status": 4})
        await net.mine(20)
        assert (await net.get(f"{API}/round/{stays.json()['vote_round_id']}"))["round"]["status"] == 4
        active = (await net.get(f"{API}/rounds/active"))["round"]
        assert active["vote_round_id"] == pending["vote_round_id"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("share_nullifier", "AAAA", "share_nullifier must be 32 bytes, got 3"),
        ("vote_round_id", "", "vote_round_id must be 32 bytes, got 0"),
        ("proof", base64.b64encode(bytes(8193)).decode(), "proof must be 1..8192 bytes, got 8193"),
        ("enc_share", "!", "illegal base64"),
        ("vote_comm_tree_anchor_height", "7", "cannot unmarshal string into Go struct field"),
        ("proposal_id", -1, "cannot unmarshal number -1"),
    ],
)
async def test_malformed_reveals_are_bad_requests(field: str, value: object, said: str) -> None:
    async with running() as net:
        body = {
            "share_nullifier": base64.b64encode(bytes(32)).decode(),
            "enc_share": base64.b64encode(bytes(64)).decode(),
            "proposal_id": 1,
            "vote_decision": 1,
            "proof": "AAAA",
            "vote_round_id": base64.b64encode(bytes(32)).decode(),
            "vote_comm_tree_anchor_height": 1,
        }
        answer = await net.rest.post(f"{API}/reveal-share", json={**body, field: value})
        assert answer.status_code == 400
        assert said in answer.json()["error"]
