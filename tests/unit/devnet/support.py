"""A dev chain in the test process, with blocks on demand and a clock that does not advance."""

from __future__ import annotations

import base64
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

import proofs
from devnet.ballot import Ballot, seal_ballot
from devnet.network import DevNet, Options
from devnet.node import Node
from devnet.proof_verifier import statement_of
from devnet.stand_in_proofs import create_stand_in_proof
from devnet.tx import Reveal

START_TIME = 1_800_000_000
API_PREFIX = "/shielded-vote/v1"


@dataclass
class ChainFixture:
    devnet: DevNet
    nodes: list[Node]
    rest: httpx.AsyncClient
    rpc: httpx.AsyncClient
    other_clients: list[httpx.AsyncClient]
    now_ns: list[int] = field(default_factory=list)

    async def mine(self, blocks: int = 1, **options: Any) -> dict[str, Any]:
        """Produce blocks; by default a second apart."""
        for _ in range(blocks):
            self.now_ns[0] += 0 if options else 1_000_000_000
            response = await self.rest.post("/devnet/mine", json=options)
            assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()
        return result

    async def create_round(self, **fields: Any) -> bytes:
        """Create a round that is ACTIVE."""
        response = await self.rest.post("/devnet/rounds", json={"status": 1, "seconds": 1000, **fields})
        assert response.status_code == 200, response.text
        await self.mine()
        return bytes.fromhex(response.json()["vote_round_id"])

    async def cast_vote(self, round_id: bytes, *, weight: int = 100, decision: int = 1) -> tuple[Ballot, int]:
        """Include a vote on proposal 1 in a block; return it with its position."""
        ballot = seal_ballot(
            round_id=round_id,
            ea_pk=self.devnet.chain.rounds[round_id].ea_pk,
            proposal_id=1,
            vote_decision=decision,
            weight=weight,
            rng=random.Random(1),
        )
        body = {"round_id": round_id.hex(), "vote_commitment": ballot.commitment.hex()}
        sent = await self.rest.post("/devnet/cast", json=body)
        await self.mine()
        response = await self.rest.get(f"/devnet/cast/{sent.json()['tx_hash']}")
        return ballot, int(response.json()["vc_position"])

    async def send_reveal(self, reveal: Reveal, node: httpx.AsyncClient | None = None) -> httpx.Response:
        return await (node or self.rest).post(f"{API_PREFIX}/reveal-share", json=reveal_body(reveal))

    async def get_json(self, path: str) -> Any:
        response = await self.rest.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    async def set_faults(self, node: httpx.AsyncClient | None = None, **switches: Any) -> None:
        response = await (node or self.rest).post("/devnet/faults", json=switches)
        assert response.status_code == 200, response.text

    def create_stand_in_reveal(self, ballot: Ballot, index: int, *, proof_of: int | None = None) -> Reveal:
        """A reveal with a fake proof against the newest root (`proof_of`: the proof of another share)."""
        round_ = self.devnet.chain.rounds[ballot.round_id]
        block = round_.leaf_blocks[-1]
        reveal = create_unproven_reveal(ballot, index, block.height)
        proven = create_unproven_reveal(ballot, index if proof_of is None else proof_of, block.height)
        proof = create_stand_in_proof(statement_of(proven, block.root))
        return Reveal(**{**_fields(reveal), "proof": proof})


def prove_reveal(chain: ChainFixture, ballot: Ballot, position: int, index: int) -> Reveal:
    """A reveal with a real proof against the chain's current tree."""
    round_ = chain.devnet.chain.rounds[ballot.round_id]
    block, share = round_.leaf_blocks[-1], ballot.shares[index]
    proof_result = proofs.prove(
        chain.devnet.verifier.circuit,
        path=round_.tree.path(position, block.start + block.count),
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
    assert proof_result.nullifier == share.nullifier
    assert proof_result.root == block.root
    return Reveal(**{**_fields(create_unproven_reveal(ballot, index, block.height)), "proof": proof_result.proof})


def create_unproven_reveal(ballot: Ballot, index: int, anchor_height: int) -> Reveal:
    share = ballot.shares[index]
    return Reveal(
        nullifier=share.nullifier,
        enc_share=share.c1 + share.c2,
        proposal_id=ballot.proposal_id,
        vote_decision=ballot.vote_decision,
        proof=b"",
        round_id=ballot.round_id,
        anchor_height=anchor_height,
    )


def replace_fields(reveal: Reveal, **fields: Any) -> Reveal:
    return Reveal(**{**_fields(reveal), **fields})


def reveal_body(reveal: Reveal) -> dict[str, Any]:
    def b64(value: bytes) -> str:
        return base64.b64encode(value).decode()

    return {
        "share_nullifier": b64(reveal.nullifier),
        "enc_share": b64(reveal.enc_share),
        "proposal_id": reveal.proposal_id,
        "vote_decision": reveal.vote_decision,
        "proof": b64(reveal.proof),
        "vote_round_id": b64(reveal.round_id),
        "vote_comm_tree_anchor_height": reveal.anchor_height,
    }


def create_client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://chain")


@asynccontextmanager
async def run_chain(*, nodes: int = 1, db: Path | None = None, **options: Any) -> AsyncIterator[ChainFixture]:
    """Start a chain; it accepts fake proofs unless `stand_in` is False."""
    now = [START_TIME * 1_000_000_000]
    settings = Options(**{"block_seconds": 0, "stand_in": True, "db": db, **options})
    devnet = DevNet(settings, now_ns=lambda: now[0])
    await devnet.start()
    created_nodes = [Node(devnet, f"node{number}") for number in range(nodes)]
    clients = [create_client(node.rest) for node in created_nodes]
    try:
        yield ChainFixture(devnet, created_nodes, clients[0], create_client(created_nodes[0].rpc), clients[1:], now)
    finally:
        for client in clients:
            await client.aclose()
        await devnet.close()


def _fields(reveal: Reveal) -> dict[str, Any]:
    return {name: getattr(reveal, name) for name in Reveal.__dataclass_fields__}
