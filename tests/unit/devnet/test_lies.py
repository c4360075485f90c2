"""Each lie of a node changes exactly the answers that it names, on REST and RPC alike."""

from __future__ import annotations

import base64
from typing import Any, cast
from unittest.mock import patch

import httpx
import pytest

import proofs
from devnet.lies import LIES, Lie
from tests.unit.devnet.support import API_PREFIX, ChainFixture, create_client, run_chain

BLOCKS = "/cosmos/base/tendermint/v1beta1/blocks"
HEAD, BLOCK, TIME, FUTURE = "head", "block", "block time", "block above the head"
ROUNDS, TREE, SPENT, RESULT, SEARCH, SEND = "rounds", "tree", "spent", "result", "search", "forwarded reveal"
CHANGED: dict[Lie, set[str]] = {
    "ahead": {HEAD},
    "ahead_briefly": {HEAD},
    "ahead_growing": {HEAD},
    "one_height": {HEAD},
    "empty_blocks": {BLOCK},
    "future_blocks": {HEAD, FUTURE},
    "forged_time": {HEAD, TIME},
    "false_end": {ROUNDS},
    "false_proposals": {ROUNDS},
    "false_created": {ROUNDS},
    "false_status": {ROUNDS},
    "false_tree": {TREE},
    "extended_tree": {TREE},
    "false_spent": {SPENT, RESULT, SEND},
    "error_texts": {BLOCK, TIME, FUTURE},
    "invented_block": {HEAD, FUTURE, SEND},
    "extra_round": {ROUNDS},
    "dispute": {BLOCK},
    "index_gaps": {RESULT, SEARCH},
    "twin": {BLOCK, TREE, RESULT, SEARCH, SEND},
    "swallow": {SEND},
}
"""Which answers each lie changes."""


async def observe(
    chain: ChainFixture, node: httpx.AsyncClient, rpc: httpx.AsyncClient, counted: Any, spare: Any
) -> dict[str, Any]:
    """The answers of a node about a round with votes, and whether it forwards a reveal."""
    newest, round_id = chain.devnet.chain.height, counted.round_id
    block = await node.get(f"{BLOCKS}/{newest}")
    results = (await rpc.get("/block_results", params={"height": newest})).json()
    if block.status_code == 200:
        txs = block.json()["block"]["data"]["txs"]
        assert len(txs) == len(results["result"]["txs_results"] or [])
        content, time = txs, block.json()["block"]["header"]["time"]
    else:
        content = time = [block.json()["message"], results["error"]["data"]]
    head = (await node.get(f"{BLOCKS}/latest")).json()["block"]["header"]
    status = (await rpc.get("/status")).json()["result"]["sync_info"]
    assert (status["latest_block_height"], status["latest_block_time"]) == (head["height"], head["time"])
    tree = (await node.get(f"{API_PREFIX}/commitment-tree/{round_id.hex()}/latest")).json()["tree"]
    at = await node.get(f"{API_PREFIX}/commitment-tree/{round_id.hex()}/{tree['height']}")
    assert at.json()["tree"]["root"] == tree["root"]
    bounds = {"from_height": 1, "to_height": tree["height"]}
    leaves = (await node.get(f"{API_PREFIX}/commitment-tree/{round_id.hex()}/leaves", params=bounds)).json()
    own = proofs.CommitmentTree()
    own.append(b"".join(base64.b64decode(leaf) for entry in leaves["blocks"] for leaf in entry["leaves"]))
    assert base64.b64encode(own.root()).decode() == tree["root"], "leaves match their root"
    hashes = [tx.hash.hex() for tx in chain.devnet.chain.transactions.values() if tx.action == "MsgRevealShare"]
    query = {"data": f"0x0102{round_id.hex()}{spare.nullifier.hex()}", "path": '"/store/vote/key"'}
    search = {"query": f"\"reveal_share.vote_round_id='{round_id.hex()}'\""}
    answers = {
        HEAD: (head["height"], head["time"]),
        BLOCK: content,
        TIME: time,
        FUTURE: (await node.get(f"{BLOCKS}/{newest + 20}")).json().get("message"),
        ROUNDS: (await node.get(f"{API_PREFIX}/rounds")).json(),
        TREE: tree,
        SPENT: (await rpc.get("/abci_query", params=query)).json()["result"]["response"]["value"],
        RESULT: [(await node.get(f"{API_PREFIX}/tx/{digest}")).json() for digest in [*hashes, "00" * 32]],
        SEARCH: (await rpc.get("/tx_search", params=search)).json(),
    }
    admission = chain.devnet.admission
    with patch.object(admission, "submit_reveal", wraps=admission.submit_reveal) as submit:
        sent = await chain.send_reveal(spare, node)
    assert sent.status_code in (200, 422)
    return answers | {SEND: submit.called}


async def prepare(chain: ChainFixture) -> tuple[Any, Any, httpx.AsyncClient, httpx.AsyncClient]:
    """A round with a vote and five counted reveals; return one of them, one that is not sent, and the other node."""
    ballot, _ = await chain.cast_vote(await chain.create_round())
    for index in range(4):
        await chain.send_reveal(chain.create_stand_in_reveal(ballot, index))
    await chain.mine()
    return (
        chain.create_stand_in_reveal(ballot, 4),
        chain.create_stand_in_reveal(ballot, 5),
        chain.other_clients[0],
        create_client(chain.nodes[1].rpc),
    )


async def continue_chain(chain: ChainFixture, counted: Any) -> None:
    """One more vote and one more counted reveal, in one block."""
    rng_leaf = proofs.random_field().hex()
    await chain.rest.post("/devnet/cast", json={"round_id": counted.round_id.hex(), "vote_commitment": rng_leaf})
    await chain.send_reveal(counted)
    await chain.mine()


@pytest.mark.parametrize("lie", LIES)
async def test_lie_changes_exactly_the_answers_that_it_names(lie: Lie) -> None:
    async with run_chain(nodes=2) as chain:
        counted, spare, liar, rpc = await prepare(chain)
        await chain.set_faults(liar, lies=[lie])
        assert (await liar.get("/devnet/faults")).json()["lies"] == [lie]
        await continue_chain(chain, counted)
        truth = await observe(chain, chain.rest, chain.rpc, counted, spare)
        told = await observe(chain, liar, rpc, counted, spare)
        assert {name for name in truth if truth[name] != told[name]} == CHANGED[lie]
        await chain.set_faults(liar, reset=True)
        assert await observe(chain, liar, rpc, counted, spare) == truth


async def test_false_block_contains_the_reveals_that_were_sent_to_the_node() -> None:
    for lie in ("invented_block", "twin"):
        async with run_chain(nodes=2) as chain:
            _, spare, liar, rpc = await prepare(chain)
            await chain.set_faults(liar, lies=[lie])
            sent = (await chain.send_reveal(spare, liar)).json()
            assert sent["code"] == 0
            await chain.mine()
            head = (await liar.get(f"{BLOCKS}/latest")).json()["block"]
            assert len(head["data"]["txs"]) == 1
            results = (await rpc.get("/block_results", params={"height": head["header"]["height"]})).json()["result"]
            attributes = {pair["key"]: pair["value"] for pair in results["txs_results"][0]["events"][1]["attributes"]}
            assert attributes["share_nullifier"] == spare.nullifier.hex()
            assert (await liar.get(f"{API_PREFIX}/tx/{sent['tx_hash']}")).json()["height"] == head["header"]["height"]
            assert (await chain.rest.get(f"{API_PREFIX}/tx/{sent['tx_hash']}")).status_code == 404
            assert chain.devnet.stats()["reveals_counted"] == 4


async def test_false_heads_are_constant_brief_or_growing(chain: ChainFixture) -> None:
    for lie, first, later in (("ahead", 60, 60), ("ahead_briefly", 90, 0), ("ahead_growing", 0, 5)):
        await chain.set_faults(lies=[lie])
        for expected in (first, later):
            head = (await chain.get_json(f"{BLOCKS}/latest"))["block"]["header"]
            assert int(head["height"]) - chain.devnet.chain.height == expected, lie
            await chain.mine(5)
        await chain.mine()


async def test_unknown_lie_is_refused(chain: ChainFixture) -> None:
    response = await chain.rest.post("/devnet/faults", json={"lies": ["late"]})
    assert response.status_code == 400
    assert cast(dict[str, Any], response.json())["error"]
