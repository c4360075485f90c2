"""Trees, leaves, validators and the consensus RPC, beyond the recording."""

from __future__ import annotations

import asyncio
import base64

import pytest

import proofs
from tests.unit.devnet.support import API_PREFIX, run_chain

pytestmark = pytest.mark.anyio


async def test_block_has_one_root_over_all_leaves() -> None:
    async with run_chain() as net:
        round_id = await net.create_round()
        await net.rest.post("/devnet/delegate", json={"round_id": round_id.hex(), "count": 3})
        commitments = [proofs.random_field().hex() for _ in range(2)]
        body = {"round_id": round_id.hex(), "vote_commitments": commitments}
        sent = await net.rest.post("/devnet/cast", json=body)
        assert (await net.rest.get(f"/devnet/cast/{sent.json()['tx_hash']}")).status_code == 404
        await net.mine()
        cast = await net.get_json(f"/devnet/cast/{sent.json()['tx_hash']}")
        assert (cast["van_position"], cast["vc_positions"], cast["code"]) == (3, [4, 5], 0)
        tree_path = f"{API_PREFIX}/commitment-tree/{round_id.hex()}"
        tree = (await net.get_json(f"{tree_path}/latest"))["tree"]
        assert (tree["next_index"], tree["next_index_at_root"]) == (6, 6)
        leaves = (await net.get_json(f"{tree_path}/leaves?from_height=1&to_height=100"))["blocks"]
        assert len(leaves) == 1
        own = proofs.CommitmentTree()
        own.append(b"".join(base64.b64decode(leaf) for leaf in leaves[0]["leaves"]))
        assert base64.b64encode(own.root()).decode() == tree["root"]
        events = (await net.rpc.get("/block_results")).json()["result"]["finalize_block_events"]
        values = {entry["key"]: entry["value"] for entry in events[0]["attributes"]}
        assert values["tree_root"] == own.root().hex()
        assert values["block_height"] == str(tree["height"])
        await net.mine(2)
        assert (await net.get_json(f"{tree_path}/latest"))["tree"] == tree


async def test_newer_chain_pages_leaves() -> None:
    async with run_chain(page_leaves=4) as net:
        round_id = await net.create_round()
        for _ in range(5):
            await net.rest.post("/devnet/delegate", json={"round_id": round_id.hex(), "count": 2})
            await net.mine()
        start, pages, leaves = 1, 0, []
        while start:
            path = f"{API_PREFIX}/commitment-tree/{round_id.hex()}/leaves?from_height={start}&to_height=500"
            page = await net.get_json(path)
            leaves += [leaf for block in page["blocks"] for leaf in block["leaves"]]
            assert all(len(base64.b64decode(block["root"])) == 32 for block in page["blocks"])
            start, pages = page.get("next_from_height", 0), pages + 1
        assert (pages, len(leaves)) == (3, 10)
        tree = net.devnet.chain.rounds[round_id].tree
        assert [base64.b64decode(leaf) for leaf in leaves] == [tree.leaf(index) for index in range(10)]


async def test_vote_for_closed_or_unknown_round_fails_in_block() -> None:
    async with run_chain() as net:
        body = {"round_id": "11" * 32, "vote_commitment": "22" * 32, "wait": 0}
        sent = (await net.rest.post("/devnet/cast", json=body)).json()
        await net.mine()
        cast = await net.get_json(f"/devnet/cast/{sent['tx_hash']}")
        assert (cast["code"], cast["log"]) == (3, "vote round not found")
        assert "vc_position" not in cast


async def test_validators_join_and_leave_staking() -> None:
    async with run_chain() as net:
        path = "/cosmos/staking/v1beta1/validators"
        one = "svvaloper1qqqsyqcyq5rqwzqfpg9scrgwpugpzysnpuylqc"
        assert (await net.rest.get(f"{path}/{one}")).status_code == 404
        body = {"operator_address": one, "moniker": "new", "status": "BOND_STATUS_UNBONDED"}
        await net.rest.post("/devnet/validators", json=body)
        shown = (await net.get_json(f"{path}/{one}"))["validator"]
        assert (shown["status"], shown["description"]["moniker"]) == ("BOND_STATUS_UNBONDED", "new")
        assert (await net.get_json(path))["pagination"]["total"] == "2"
        await net.rest.post("/devnet/validators", json={"operator_address": one, "remove": True})
        assert (await net.rest.get(f"{path}/{one}")).json()["code"] == 5


async def test_wait_for_voting_configuration() -> None:
    async with run_chain() as net:
        assert (await net.rest.get("/devnet/voting-config")).status_code == 404
        waiting = asyncio.ensure_future(net.get_json("/devnet/voting-config?wait=30"))
        await asyncio.sleep(0)
        config = {"version": "1", "vote_servers": [], "unknown": {"passes": "through"}}
        assert (await net.rest.post("/devnet/voting-config", json=["no object"])).status_code == 400
        await net.rest.post("/devnet/voting-config", json=config)
        assert await waiting == config
        await net.rest.post("/devnet/voting-config", json={"version": "2"})
        assert await net.get_json("/devnet/voting-config") == {"version": "2"}


async def test_tx_search_is_paged_and_ordered() -> None:
    async with run_chain() as net:
        round_id = await net.create_round()
        ballot, _ = await net.cast_vote(round_id)
        for index in range(5):
            await net.send_reveal(net.create_stand_in_reveal(ballot, index))
            await net.mine()
        query = f"\"reveal_share.vote_round_id='{round_id.hex()}'\""
        down = {"query": query, "per_page": "2", "page": "1", "order_by": '"desc"'}
        result = (await net.rpc.get("/tx_search", params=down)).json()["result"]
        assert result["total_count"] == "5"
        heights = [int(row["height"]) for row in result["txs"]]
        assert heights == [net.devnet.chain.height, net.devnet.chain.height - 1]
        past = await net.rpc.get("/tx_search", params={**down, "page": "4"})
        assert past.status_code == 500
        assert past.json()["error"]["data"] == "page should be within [1, 3] range, given 4"
        none = f"\"reveal_share.vote_round_id='{'00' * 32}'\""
        assert (await net.rpc.get("/tx_search", params={"query": none})).json()["result"] == {
            "txs": [],
            "total_count": "0",
        }


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        (f"{API_PREFIX}/round/zz", 400, "round_id"),
        (f"{API_PREFIX}/tx/zz", 400, "hash"),
        (f"{API_PREFIX}/commitment-tree/{'11' * 32}/x", 400, "height"),
        (f"{API_PREFIX}/tally/{'11' * 32}/1", 500, "vote round not found"),
        (f"{API_PREFIX}/commitment-tree/{'11' * 32}/leaves?from_height=a&to_height=9", 400, "height"),
        ("/cosmos/base/tendermint/v1beta1/blocks/x", 400, "height"),
    ],
)
async def test_invalid_queries_are_refused(path: str, status: int, said: str) -> None:
    async with run_chain() as net:
        answer = await net.rest.get(path)
        assert answer.status_code == status
        assert said in answer.text


async def test_unknown_round_has_empty_tree_and_no_leaves() -> None:
    async with run_chain() as net:
        path = f"{API_PREFIX}/commitment-tree/{'11' * 32}"
        assert await net.get_json(f"{path}/latest") == {"tree": {}}
        assert await net.get_json(f"{path}/leaves?from_height=1&to_height=9") == {}
        assert await net.get_json(f"{API_PREFIX}/rounds") == {}
