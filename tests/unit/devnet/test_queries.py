"""Trees, leaves, validators and the consensus RPC, in cases that the recording does not cover."""

from __future__ import annotations

import asyncio
import base64

import pytest

import proofs
from tests.unit.devnet.support import API_PREFIX, ChainFixture, run_chain


async def test_block_has_one_root_over_all_leaves(chain: ChainFixture) -> None:
    round_id = await chain.create_round()
    await chain.rest.post("/devnet/delegate", json={"round_id": round_id.hex(), "count": 3})
    commitments = [proofs.random_field().hex() for _ in range(2)]
    body = {"round_id": round_id.hex(), "vote_commitments": commitments}
    sent = await chain.rest.post("/devnet/cast", json=body)
    assert (await chain.rest.get(f"/devnet/cast/{sent.json()['tx_hash']}")).status_code == 404
    await chain.mine()
    cast = await chain.get_json(f"/devnet/cast/{sent.json()['tx_hash']}")
    assert (cast["van_position"], cast["vc_positions"], cast["code"]) == (3, [4, 5], 0)
    tree_path = f"{API_PREFIX}/commitment-tree/{round_id.hex()}"
    tree = (await chain.get_json(f"{tree_path}/latest"))["tree"]
    assert (tree["next_index"], tree["next_index_at_root"]) == (6, 6)
    leaves = (await chain.get_json(f"{tree_path}/leaves?from_height=1&to_height=100"))["blocks"]
    assert len(leaves) == 1
    own = proofs.CommitmentTree()
    own.append(b"".join(base64.b64decode(leaf) for leaf in leaves[0]["leaves"]))
    assert base64.b64encode(own.root()).decode() == tree["root"]
    events = (await chain.rpc.get("/block_results")).json()["result"]["finalize_block_events"]
    values = {entry["key"]: entry["value"] for entry in events[0]["attributes"]}
    assert values["tree_root"] == own.root().hex()
    assert values["block_height"] == str(tree["height"])
    await chain.mine(2)
    assert (await chain.get_json(f"{tree_path}/latest"))["tree"] == tree


async def test_newer_chain_pages_leaves() -> None:
    async with run_chain(page_leaves=4) as chain:
        round_id = await chain.create_round()
        for _ in range(5):
            await chain.rest.post("/devnet/delegate", json={"round_id": round_id.hex(), "count": 2})
            await chain.mine()
        start, pages, leaves = 1, 0, []
        while start:
            path = f"{API_PREFIX}/commitment-tree/{round_id.hex()}/leaves?from_height={start}&to_height=500"
            page = await chain.get_json(path)
            leaves += [leaf for block in page["blocks"] for leaf in block["leaves"]]
            assert all(len(base64.b64decode(block["root"])) == 32 for block in page["blocks"])
            start, pages = page.get("next_from_height", 0), pages + 1
        assert (pages, len(leaves)) == (3, 10)
        tree = chain.devnet.chain.rounds[round_id].tree
        assert [base64.b64decode(leaf) for leaf in leaves] == [tree.leaf(index) for index in range(10)]


async def test_vote_for_closed_or_unknown_round_fails_in_block(chain: ChainFixture) -> None:
    body = {"round_id": "11" * 32, "vote_commitment": "22" * 32, "wait": 0}
    sent = (await chain.rest.post("/devnet/cast", json=body)).json()
    await chain.mine()
    cast = await chain.get_json(f"/devnet/cast/{sent['tx_hash']}")
    assert (cast["code"], cast["log"]) == (3, "vote round not found")
    assert "vc_position" not in cast


async def test_validators_join_and_leave_staking(chain: ChainFixture) -> None:
    path = "/cosmos/staking/v1beta1/validators"
    address = "svvaloper1qqqsyqcyq5rqwzqfpg9scrgwpugpzysnpuylqc"
    assert (await chain.rest.get(f"{path}/{address}")).status_code == 404
    body = {"operator_address": address, "moniker": "new", "status": "BOND_STATUS_UNBONDED"}
    await chain.rest.post("/devnet/validators", json=body)
    shown = (await chain.get_json(f"{path}/{address}"))["validator"]
    assert (shown["status"], shown["description"]["moniker"]) == ("BOND_STATUS_UNBONDED", "new")
    assert (await chain.get_json(path))["pagination"]["total"] == "2"
    await chain.rest.post("/devnet/validators", json={"operator_address": address, "remove": True})
    assert (await chain.rest.get(f"{path}/{address}")).json()["code"] == 5


async def test_wait_for_voting_configuration(chain: ChainFixture) -> None:
    assert (await chain.rest.get("/devnet/voting-config")).status_code == 404
    waiting = asyncio.ensure_future(chain.get_json("/devnet/voting-config?wait=30"))
    await asyncio.sleep(0)
    config = {"version": "1", "vote_servers": [], "unknown": {"passes": "through"}}
    assert (await chain.rest.post("/devnet/voting-config", json=["no object"])).status_code == 400
    await chain.rest.post("/devnet/voting-config", json=config)
    assert await waiting == config
    await chain.rest.post("/devnet/voting-config", json={"version": "2"})
    assert await chain.get_json("/devnet/voting-config") == {"version": "2"}


async def test_tx_search_is_paged_and_ordered(chain: ChainFixture) -> None:
    round_id = await chain.create_round()
    ballot, _ = await chain.cast_vote(round_id)
    for index in range(5):
        await chain.send_reveal(chain.create_stand_in_reveal(ballot, index))
        await chain.mine()
    query = f"\"reveal_share.vote_round_id='{round_id.hex()}'\""
    down = {"query": query, "per_page": "2", "page": "1", "order_by": '"desc"'}
    result = (await chain.rpc.get("/tx_search", params=down)).json()["result"]
    assert result["total_count"] == "5"
    heights = [int(row["height"]) for row in result["txs"]]
    assert heights == [chain.devnet.chain.height, chain.devnet.chain.height - 1]
    past = await chain.rpc.get("/tx_search", params={**down, "page": "4"})
    assert past.status_code == 500
    assert past.json()["error"]["data"] == "page should be within [1, 3] range, given 4"
    no_match = f"\"reveal_share.vote_round_id='{'00' * 32}'\""
    assert (await chain.rpc.get("/tx_search", params={"query": no_match})).json()["result"] == {
        "txs": [],
        "total_count": "0",
    }


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        (f"{API_PREFIX}/round/zz", 400, "round_id"),
        (f"{API_PREFIX}/tx/zz", 400, "hash"),
        (f"{API_PREFIX}/commitment-tree/{'11' * 32}/x", 400, "height"),
        (f"{API_PREFIX}/tally/{'11' * 32}/1", 500, "vote round not found"),
        (f"{API_PREFIX}/commitment-tree/{'11' * 32}/leaves?from_height=a&to_height=9", 400, "height"),
        ("/cosmos/base/tendermint/v1beta1/blocks/x", 400, "height"),
    ],
)
async def test_invalid_queries_are_refused(chain: ChainFixture, path: str, status: int, message: str) -> None:
    response = await chain.rest.get(path)
    assert response.status_code == status
    assert message in response.text


async def test_unknown_round_has_empty_tree_and_no_leaves(chain: ChainFixture) -> None:
    path = f"{API_PREFIX}/commitment-tree/{'11' * 32}"
    assert await chain.get_json(f"{path}/latest") == {"tree": {}}
    assert await chain.get_json(f"{path}/leaves?from_height=1&to_height=9") == {}
    assert await chain.get_json(f"{API_PREFIX}/rounds") == {}
