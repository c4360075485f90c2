"""From a vote to its tally with real proofs, and the chain's refusals."""

from __future__ import annotations

import base64

import pytest

from devnet.tx import Reveal, encode, tx_hash
from tests.unit.devnet.support import API_PREFIX, START_TIME, ChainFixture, prove_reveal, replace_fields, run_chain


async def test_proven_shares_are_counted_once_and_tallied_after_end() -> None:
    async with run_chain(stand_in=False) as chain:
        round_id = await chain.create_round(vote_end_time=START_TIME + 500)
        ballot, position = await chain.cast_vote(round_id, weight=4321)
        assert position == 1  # after the VAN of the same vote
        reveals = [prove_reveal(chain, ballot, position, index) for index in range(2)]
        for reveal in reveals:
            response = await chain.send_reveal(reveal)
            assert response.status_code == 200
            assert response.json() == {"tx_hash": tx_hash(encode(reveal)).hex().upper(), "code": 0}
            assert (await chain.rest.get(f"{API_PREFIX}/tx/{response.json()['tx_hash']}")).status_code == 404
        await chain.mine()
        shown = await chain.get_json(f"{API_PREFIX}/tx/{tx_hash(encode(reveals[0])).hex()}")
        assert shown["code"] == 0
        assert shown["height"] == str(chain.devnet.chain.height)

        summary = await chain.get_json(f"{API_PREFIX}/vote-summary/{round_id.hex()}")
        assert summary["proposals"][0]["options"][1] == {"index": 1, "label": "Oppose", "ballot_count": 2}
        assert await chain.get_json(f"{API_PREFIX}/tally-results/{round_id.hex()}") == {}

        await chain.mine(time=START_TIME + 499.9)
        assert (await chain.get_json(f"{API_PREFIX}/round/{round_id.hex()}"))["round"]["status"] == 1
        await chain.mine(time=START_TIME + 500)
        assert (await chain.get_json(f"{API_PREFIX}/round/{round_id.hex()}"))["round"]["status"] == 2
        await chain.mine(3, time=START_TIME + 501)
        assert (await chain.get_json(f"{API_PREFIX}/tally-results/{round_id.hex()}"))["results"] == [
            {
                "vote_round_id": base64.b64encode(round_id).decode(),
                "proposal_id": 1,
                "vote_decision": 1,
                "total_value": sum(share.value for share in ballot.shares[:2]),
            }
        ]


async def test_round_end_control_starts_tally(chain: ChainFixture) -> None:
    round_id = await chain.create_round(vote_end_time=START_TIME + 500)
    ballot, _ = await chain.cast_vote(round_id, weight=77)
    reveals = [chain.create_stand_in_reveal(ballot, index) for index in range(16)]
    for reveal in reveals[:-1]:
        await chain.send_reveal(reveal)
    await chain.mine()

    ended = await chain.rest.post("/devnet/rounds/end", json={"round_id": round_id.hex()})
    assert ended.status_code == 200
    await chain.mine()
    shown = (await chain.get_json(f"{API_PREFIX}/round/{round_id.hex()}"))["round"]
    assert (shown["status"], shown["vote_end_time"]) == (2, START_TIME + 500)
    late = await chain.send_reveal(reveals[-1])
    assert "vote round is not active" in late.json()["log"]
    await chain.mine(3)

    (row,) = (await chain.get_json(f"{API_PREFIX}/tally-results/{round_id.hex()}"))["results"]
    assert row["total_value"] == 77 - ballot.shares[15].value, "the tally contains the counted reveals"


async def test_proof_with_flipped_bit_is_refused_and_checked_once() -> None:
    async with run_chain(stand_in=False) as chain:
        ballot, position = await chain.cast_vote(await chain.create_round())
        good = prove_reveal(chain, ballot, position, 3)
        bad = replace_fields(good, proof=bytes([*good.proof[:-1], good.proof[-1] ^ 1]))
        for _ in range(2):
            response = await chain.send_reveal(bad)
            assert response.status_code == 422
            assert response.json()["code"] == 1
            assert response.json()["log"].endswith("verify_proof failed: ConstraintSystemFailure")
        assert chain.devnet.verifier.checked_count == 1
        # The proof does not verify for another decision, proposal or ciphertext.
        for other in (replace_fields(good, vote_decision=0), replace_fields(good, proposal_id=2)):
            assert (await chain.send_reveal(other)).status_code == 422
        longer = replace_fields(good, proof=good.proof + b"\0")
        assert (await chain.send_reveal(longer)).status_code == 422
        assert (await chain.send_reveal(good)).status_code == 200


async def test_chain_refuses_proofs_of_other_circuit_until_upgrade() -> None:
    async with run_chain(stand_in=False) as chain:
        ballot, position = await chain.cast_vote(await chain.create_round())
        reveal = prove_reveal(chain, ballot, position, 0)
        await chain.set_faults(circuit="k11", version="v1.2.0")
        assert (await chain.send_reveal(reveal)).status_code == 422
        info = await chain.get_json("/cosmos/base/tendermint/v1beta1/node_info")
        assert info["application_version"]["version"] == "v1.2.0"
        await chain.set_faults(circuit="k10")
        assert (await chain.send_reveal(reveal)).status_code == 200


async def test_stand_in_proofs_are_accepted_only_when_enabled(chain: ChainFixture) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round())
    assert (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))).status_code == 200
    assert (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 1, proof_of=2))).status_code == 422
    chain.devnet.verifier.accepts_stand_ins = False
    assert (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 3))).status_code == 422


async def test_checks_run_in_chain_order(chain: ChainFixture) -> None:
    round_id = await chain.create_round(vote_end_time=START_TIME + 100)
    ballot, _ = await chain.cast_vote(round_id)
    spent, fresh = chain.create_stand_in_reveal(ballot, 0), chain.create_stand_in_reveal(ballot, 1)
    assert (await chain.send_reveal(spent)).status_code == 200
    await chain.mine()
    respent = replace_fields(spent, proof=b"\1")
    no_anchor = replace_fields(fresh, anchor_height=fresh.anchor_height + 1)

    async def log(reveal: Reveal) -> str:
        response = await chain.send_reveal(reveal)
        assert response.status_code == 422
        return str(response.json()["log"])

    assert await log(replace_fields(respent, round_id=bytes(32))) == "vote round not found"
    assert await log(replace_fields(respent, proposal_id=9)) == f"nullifier already spent: {spent.nullifier.hex()}"
    assert await log(replace_fields(no_anchor, proposal_id=9)) == "invalid proposal ID: 9"
    assert (await log(replace_fields(no_anchor, vote_decision=2))).startswith("invalid vote decision")
    assert (await log(no_anchor)).endswith(f"no commitment tree root at height {no_anchor.anchor_height}")
    await chain.mine(time=START_TIME + 100)
    assert await log(respent) == "vote round is not active: status is SESSION_STATUS_TALLYING"


async def test_reveal_counts_only_in_block_before_end(chain: ChainFixture) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round(vote_end_time=START_TIME + 100))
    sent = (await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))).json()
    await chain.mine(time=START_TIME + 100)
    late = await chain.rest.get(f"{API_PREFIX}/tx/{sent['tx_hash']}")
    assert late.status_code == 422
    assert (
        late.json()["log"]
        == f"vote round is not active: vote_end_time {START_TIME + 100} <= block_time {START_TIME + 100}"
    )
    results = await chain.rpc.get(f"/block_results?height={chain.devnet.chain.height}")
    assert results.json()["result"]["txs_results"][0]["events"] == []


async def test_rounds_wait_for_their_key_ceremony(chain: ChainFixture) -> None:
    response = await chain.rest.post("/devnet/rounds", json={"pending_blocks": 2})
    path = f"{API_PREFIX}/round/{response.json()['vote_round_id']}"
    await chain.mine()
    pending = (await chain.get_json(path))["round"]
    assert pending["status"] == 4
    assert "ea_pk" not in pending
    await chain.mine(2)
    assert (await chain.get_json(path))["round"]["status"] == 1
    stays = await chain.rest.post("/devnet/rounds", json={"status": 4})
    await chain.mine(20)
    assert (await chain.get_json(f"{API_PREFIX}/round/{stays.json()['vote_round_id']}"))["round"]["status"] == 4
    active = (await chain.get_json(f"{API_PREFIX}/rounds/active"))["round"]
    assert active["vote_round_id"] == pending["vote_round_id"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("share_nullifier", "AAAA", "share_nullifier must be 32 bytes, got 3"),
        ("vote_round_id", "", "vote_round_id must be 32 bytes, got 0"),
        ("proof", base64.b64encode(bytes(8193)).decode(), "proof must be 1..8192 bytes, got 8193"),
        ("enc_share", "!", "illegal base64"),
        ("vote_comm_tree_anchor_height", "7", "cannot unmarshal string into Go struct field"),
        ("proposal_id", -1, "cannot unmarshal number -1"),
    ],
)
async def test_malformed_reveals_are_bad_requests(chain: ChainFixture, field: str, value: object, message: str) -> None:
    body = {
        "share_nullifier": base64.b64encode(bytes(32)).decode(),
        "enc_share": base64.b64encode(bytes(64)).decode(),
        "proposal_id": 1,
        "vote_decision": 1,
        "proof": "AAAA",
        "vote_round_id": base64.b64encode(bytes(32)).decode(),
        "vote_comm_tree_anchor_height": 1,
    }
    response = await chain.rest.post(f"{API_PREFIX}/reveal-share", json={**body, field: value})
    assert response.status_code == 400
    assert message in response.json()["error"]
