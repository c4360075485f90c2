"""The dev chain as a process: real ports, proofs and kills."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import proofs
from devnet.ballot import Ballot
from devnet.tx import Reveal
from devnet.wallet import Wallet
from tests.unit.devnet.support import API_PREFIX, create_unproven_reveal, replace_fields, reveal_body

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def run_devnet(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """Run a dev chain on free ports, with blocks on demand; stop it and wait afterwards."""
    command = [sys.executable, "-m", "devnet", "--rest-port", "0", "--rpc-port", "0", "--block-seconds", "0", *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 120)
        yield process, json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def mine_block(http: httpx.AsyncClient, **options: Any) -> dict[str, Any]:
    result: dict[str, Any] = (await http.post("/devnet/mine", json=options)).json()
    return result


async def cast_vote(http: httpx.AsyncClient, ready: dict[str, Any], round_id: bytes, weight: int) -> tuple[Ballot, int]:
    """Include a vote by a real wallet in a block."""
    async with Wallet(ready["rest"], [], rng=random.Random(3)) as wallet:
        ballot = await wallet.seal_ballot(round_id, 2, 0, weight=weight)
        casting = asyncio.create_task(wallet.cast_ballot(ballot))
        while not casting.done():
            await mine_block(http)
        return ballot, casting.result()


async def prove_reveal(http: httpx.AsyncClient, ballot: Ballot, position: int, index: int) -> Reveal:
    """A reveal with a real proof, made only from the chain's REST API."""
    path = f"{API_PREFIX}/commitment-tree/{ballot.round_id.hex()}"
    latest = (await http.get(f"{path}/latest")).json()["tree"]
    blocks = (await http.get(f"{path}/leaves?from_height=1&to_height=900")).json()["blocks"]
    tree = proofs.CommitmentTree()
    tree.append(b"".join(base64.b64decode(leaf) for block in blocks for leaf in block["leaves"]))
    share = ballot.shares[index]
    proof_result = await asyncio.to_thread(
        proofs.prove,
        "k10",
        path=tree.path(position, latest["next_index_at_root"]),
        position=position,
        share_comms=b"".join(ballot.share_comms),
        primary_blind=share.blind,
        c1=share.c1,
        c2=share.c2,
        share_index=index,
        proposal_id=ballot.proposal_id,
        vote_decision=ballot.vote_decision,
        round_id=ballot.round_id,
    )
    assert base64.b64encode(proof_result.root).decode() == latest["root"]
    return replace_fields(create_unproven_reveal(ballot, index, latest["height"]), proof=proof_result.proof)


async def test_devnet_process_tallies_a_proven_vote() -> None:
    async with run_devnet() as (_, ready), httpx.AsyncClient(base_url=ready["rest"], timeout=60) as http:
        created = (await http.post("/devnet/rounds", json={"status": 1, "seconds": 900})).json()
        await mine_block(http)
        round_id = bytes.fromhex(created["vote_round_id"])
        ballot, position = await cast_vote(http, ready, round_id, weight=2500)
        reveals = [await prove_reveal(http, ballot, position, index) for index in range(3)]
        first = reveals[0]
        flipped = replace_fields(first, proof=bytes([first.proof[0] ^ 1, *first.proof[1:]]))
        refused = await http.post(f"{API_PREFIX}/reveal-share", json=reveal_body(flipped))
        assert (refused.status_code, refused.json()["code"]) == (422, 1)
        for reveal in reveals:
            assert (await http.post(f"{API_PREFIX}/reveal-share", json=reveal_body(reveal))).status_code == 200
        at = await mine_block(http)
        resent = replace_fields(first, proof=flipped.proof)
        spent = await http.post(f"{API_PREFIX}/reveal-share", json=reveal_body(resent))
        assert spent.json()["log"] == f"nullifier already spent: {first.nullifier.hex()}"
        async with httpx.AsyncClient(base_url=ready["rpc"]) as rpc:
            results = (await rpc.get(f"/block_results?height={at['height']}")).json()["result"]
        assert [row["code"] for row in results["txs_results"]] == [0, 0, 0]
        for _ in range(4):
            await mine_block(http, time=created["vote_end_time"])
        tally = (await http.get(f"{API_PREFIX}/tally-results/{round_id.hex()}")).json()["results"]
        revealed = sum(share.value for share in ballot.shares[:3])
        assert [(row["proposal_id"], row.get("vote_decision", 0), row["total_value"]) for row in tally] == [
            (2, 0, revealed)
        ]
        stats = (await http.get("/devnet/stats")).json()
        assert stats["proofs_checked"] == 4
        assert stats["cpu_seconds"] >= stats["verify_cpu_seconds"] > 0


async def test_devnet_process_can_cut_connections() -> None:
    async with run_devnet("--stand-in-proofs") as (_, ready), httpx.AsyncClient(base_url=ready["rest"]) as http:
        for switch in ("refuse", "drop_reply"):
            await http.post("/devnet/faults", json={"routes": ["syncing"], switch: 1, "times": 1})
            with pytest.raises(httpx.TransportError):
                await http.get("/cosmos/base/tendermint/v1beta1/syncing")
        assert (await http.get("/cosmos/base/tendermint/v1beta1/syncing")).status_code == 200
        logged = (await http.get("/devnet/requests")).json()["requests"]
        assert [entry["status"] for entry in logged] == [None, None, 200]
        assert [entry["faults"] for entry in logged] == [["refuse"], ["drop_reply"], []]


async def test_devnet_process_resumes_after_kill(tmp_path: Path) -> None:
    flags = ["--stand-in-proofs", "--db", str(tmp_path / "chain.db"), "--ready-file", str(tmp_path / "ready")]
    async with run_devnet(*flags) as (process, ready), httpx.AsyncClient(base_url=ready["rest"]) as http:
        assert json.loads((tmp_path / "ready").read_text()) == ready
        created = (await http.post("/devnet/rounds", json={"status": 1})).json()
        await mine_block(http)
        await http.post("/devnet/delegate", json={"round_id": created["vote_round_id"], "count": 100})
        at = await mine_block(http)
        path = f"{API_PREFIX}/commitment-tree/{created['vote_round_id']}/latest"
        tree = (await http.get(path)).json()
        process.send_signal(signal.SIGKILL)
        await process.wait()
    async with run_devnet(*flags) as (_, ready), httpx.AsyncClient(base_url=ready["rest"]) as http:
        assert (await http.get(path)).json() == tree
        latest = (await http.get("/cosmos/base/tendermint/v1beta1/blocks/latest")).json()
        assert int(latest["block"]["header"]["height"]) == at["height"] + 1


async def test_devnet_extra_nodes_have_own_ports_and_faults() -> None:
    async with run_devnet("--stand-in-proofs", "--extra-nodes", "1") as (_, ready):
        first_node, second_node = ready["nodes"]
        assert (first_node["rest"], first_node["rpc"]) == (ready["rest"], ready["rpc"])
        async with httpx.AsyncClient() as http:
            await http.post(second_node["rest"] + "/devnet/faults", json={"catching_up": True})
            statuses = [
                (await http.get(f"{node['rpc']}/status")).json()["result"] for node in (first_node, second_node)
            ]
        assert [result["sync_info"]["catching_up"] for result in statuses] == [False, True]
        assert statuses[0]["node_info"]["network"] == ready["chain_id"]


async def test_devnet_timer_produces_blocks() -> None:
    async with run_devnet("--stand-in-proofs", "--block-seconds", "0.05") as (_, ready):
        async with httpx.AsyncClient(base_url=ready["rest"]) as http:
            created = (await http.post("/devnet/rounds", json={"status": 1})).json()
            body = {"round_id": created["vote_round_id"], "vote_commitment": "11" * 32, "wait": 30}
            # The first vote may be sent before the round's block; either way the response arrives with a block.
            responses = [(await http.post("/devnet/cast", json=body)).json() for _ in range(2)]
        assert responses[1]["height"] > responses[0]["height"]
        assert responses[1]["code"] == 0
