"""Key ceremonies and threshold tallies: an audit of such a round passes, and finds what a node changes."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import httpx
import pytest

import proofs
from audit.auditor import Audit, audit_round
from audit.check_results import CHECKS, Verdict
from audit.node_source import NodeSource
from devnet.ceremony import Ceremony, default_threshold
from devnet.eras import ERAS
from devnet.frauds import Fraud
from helper.chain.node_pool import NodePool, ReadOnlyNodePool, create_nodes
from helper.clock import SystemClock
from tests.unit.devnet.support import API_PREFIX, ChainFixture, prove_reveal, run_chain

CEREMONY = {"validators": 4, "threshold": 2, "removed": [2], "absent": [3]}


@pytest.mark.parametrize(("validators", "threshold"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (9, 5)])
def test_default_threshold_is_that_of_the_chain(validators: int, threshold: int) -> None:
    assert default_threshold(validators) == threshold


def test_ceremony_shares_decrypt_together() -> None:
    ceremony = Ceremony(b"seed", 4, 3, removed=frozenset({2}))
    assert ceremony.commitments[0] == proofs.multiply_generator(ceremony.secret)
    ciphertext = b"".join(proofs.elgamal_encrypt(ceremony.commitments[0], 77))
    partials = [
        proofs.Partial(index, *proofs.decrypt_partially(ceremony.share_of(index), ciphertext))
        for index in ceremony.decrypting
    ]
    assert [partial.validator_index for partial in partials] == [1, 3, 4]
    arguments: dict[str, Any] = {"ciphertext": ciphertext, "commitments": ceremony.commitments, "threshold": 3}
    checked = proofs.check_tally(partials=partials, total=77, **arguments)
    assert checked == ([None, None, None], "matches")
    assert Ceremony.from_fields(ceremony.to_fields()) == ceremony


class _Hosts(httpx.AsyncBaseTransport):
    """The nodes of a chain by host name: node0.test, node1.test, …"""

    def __init__(self, chain: ChainFixture) -> None:
        self._transports = {f"node{at}.test": httpx.ASGITransport(node.rest) for at, node in enumerate(chain.nodes)}
        self._transports["rpc.test"] = httpx.ASGITransport(chain.nodes[0].rpc)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transports[request.url.host].handle_async_request(request)


class _ChainClock(SystemClock):
    def __init__(self, chain: ChainFixture) -> None:
        super().__init__()
        self._chain = chain

    def now(self) -> float:
        return self._chain.devnet.producer.now_ns() / 1e9


async def audit(chain: ChainFixture, round_id: bytes, *, rpc: bool = True) -> Audit:
    urls = [(f"http://node{at}.test", "http://rpc.test" if rpc and not at else "") for at in range(len(chain.nodes))]
    transport = _Hosts(chain)
    pool = NodePool(create_nodes(urls, transport=transport), clock=_ChainClock(chain))
    readers = ReadOnlyNodePool(pool, transport=transport)
    try:
        await pool.probe_all()
        return await audit_round(NodeSource(readers, round_id), round_id)
    finally:
        await readers.aclose()
        await pool.aclose()


def not_passed(result: Audit) -> dict[str, str]:
    return {
        f"{check.id} {check.verdict.value}": check.why
        for check in result.result.checks
        if check.verdict is not Verdict.PASSED
    }


@asynccontextmanager
async def tallied_round(**options: Any) -> AsyncIterator[tuple[ChainFixture, bytes]]:
    """A finalized round with two revealed shares on two nodes. The chain has real proofs of k10."""
    async with run_chain(nodes=2, stand_in=False, **options) as chain:
        round_id = await chain.create_round(**CEREMONY)
        await chain.rest.post("/devnet/delegate", json={"round_id": round_id.hex(), "count": 2, "separate": True})
        await chain.mine()
        ballot, position = await chain.cast_vote(round_id, weight=40)
        for index in (0, 1):
            response = await chain.send_reveal(prove_reveal(chain, ballot, position, index))
            assert response.status_code == 200, response.text
            await chain.mine()
        await chain.mine(advance_seconds=2000)
        await chain.mine(5)
        yield chain, round_id


async def test_audit_of_a_tallied_round_passes() -> None:
    async with tallied_round() as (chain, round_id):
        shown = (await chain.get_json(f"{API_PREFIX}/round/{round_id.hex()}"))["round"]
        assert [entry["shamir_index"] for entry in shown["ceremony_validators"]] == [1, 3, 4]
        assert (shown["threshold"], shown["status"]) == (2, 3)
        for rpc in (True, False):
            result = await audit(chain, round_id, rpc=rpc)
            assert not_passed(result) == {}
            counts = {check.id: check.count for check in result.result.checks}
            assert (counts["A3"], counts["C2"], counts["C3"], counts["D1"], counts["E"]) == (2, 4, 2, 4, 2)
        assert set(counts) == set(CHECKS)


FRAUDS: dict[str, str] = {
    "reveal_dropped": "A1",
    "reveal_repeated": "A2",
    "proof_altered": "A3",
    "reveals_late": "A4",
    "cast_dropped": "A5",
    "sum_altered": "B1",
    "sum_moved": "B2",
    "key_replaced": "C1",
    "commitment_altered": "C2",
    "partial_altered": "C3",
    "total_altered": "C4",
    "total_impossible": "C5",
    "summary_altered": "C6",
    "tally_early": "C7",
    "leaf_added": "D1",
    "root_altered": "D2",
    "round_altered": "D3",
    "vote_repeated": "D4",
    "state_altered": "E",
}


async def test_audit_finds_every_fraud_of_a_node() -> None:
    assert set(FRAUDS) == set(get_args(Fraud))
    async with tallied_round() as (chain, round_id):
        for fraud, check_id in FRAUDS.items():
            await chain.set_faults(fraud=fraud)
            failed = not_passed(await audit(chain, round_id))
            assert f"{check_id} failed" in failed, f"{fraud}: {failed}"
        await chain.set_faults(reset=True)
        assert not_passed(await audit(chain, round_id)) == {}


async def test_partial_decryptions_are_in_blocks_store_and_newer_rest() -> None:
    async with tallied_round(era=ERAS["1.4"]) as (chain, round_id):
        served = await chain.get_json(f"{API_PREFIX}/partial-decryptions/{round_id.hex()}")
        assert [entry["validator_index"] for entry in served["entries"]] == [1, 4]
        key = b"\x12" + round_id + b"".join(number.to_bytes(4, "big") for number in (4, 1, 1))
        params = {"path": '"/store/vote/key"', "data": f"0x{key.hex()}"}
        stored = (await chain.rpc.get("/abci_query", params=params)).json()["result"]["response"]["value"]
        assert base64.b64decode(stored)[:4] == b"\x08\x01\x10\x01"
        missing = key[:33] + (3).to_bytes(4, "big") + key[37:]
        params["data"] = f"0x{missing.hex()}"
        assert (await chain.rpc.get("/abci_query", params=params)).json()["result"]["response"]["value"] is None


async def test_ceremony_survives_a_restart(tmp_path: Any) -> None:
    path = tmp_path / "chain.db"
    async with run_chain(db=path) as chain:
        round_id = await chain.create_round(**CEREMONY)
        first = await chain.get_json(f"{API_PREFIX}/round/{round_id.hex()}")
    async with run_chain(db=path) as chain:
        assert await chain.get_json(f"{API_PREFIX}/round/{round_id.hex()}") == first


async def test_round_with_too_few_decrypting_validators_is_refused(chain: ChainFixture) -> None:
    body = {"validators": 3, "absent": [1, 2]}
    response = await chain.rest.post("/devnet/rounds", json=body)
    assert response.status_code == 400
    assert "cannot reach threshold 2" in response.text
