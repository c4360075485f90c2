"""Between CheckTx and a block: cache, competing reveals, mempool limit, restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from devnet.journal import JournalError
from devnet.tx import Reveal
from helper.clock import SystemClock
from helper.store.sqlite.opening import open_database
from tests.unit.devnet.support import API_PREFIX, START_TIME, ChainFixture, replace_fields, run_chain


async def test_two_reveals_of_one_share_are_admitted_and_second_fails(chain: ChainFixture) -> None:
    round_id = await chain.create_round()
    ballot, position = await chain.cast_vote(round_id)
    first = chain.create_stand_in_reveal(ballot, 0)
    await chain.cast_vote(round_id)  # a newer root leads to another proof of the same share
    second = chain.create_stand_in_reveal(ballot, 0)
    assert position == 1
    hashes = [(await chain.send_reveal(reveal)).json()["tx_hash"] for reveal in (first, second)]
    await chain.mine()
    winner, loser = [await chain.rest.get(f"{API_PREFIX}/tx/{digest}") for digest in hashes]
    assert winner.status_code == 200
    assert loser.status_code == 422
    assert loser.json()["log"] == f"nullifier already spent: {first.nullifier.hex()}"
    results = (await chain.rpc.get(f"/block_results?height={chain.devnet.chain.height}")).json()["result"]
    assert [row["code"] for row in results["txs_results"]] == [0, 1]
    assert chain.devnet.stats()["reveals_counted"] == 1


async def test_newer_chain_drops_second_reveal_from_block() -> None:
    async with run_chain(duplicates="filter") as chain:
        round_id = await chain.create_round()
        ballot, _ = await chain.cast_vote(round_id)
        first = chain.create_stand_in_reveal(ballot, 0)
        await chain.cast_vote(round_id)
        await chain.send_reveal(first)
        response = await chain.send_reveal(chain.create_stand_in_reveal(ballot, 0))
        assert response.status_code == 200
        assert response.json()["log"] == "tx pending in mempool (duplicate submission)"
        await chain.mine(3)
        assert (await chain.rest.get(f"{API_PREFIX}/tx/{response.json()['tx_hash']}")).status_code == 404


async def test_same_bytes_are_admitted_again_while_round_is_open(chain: ChainFixture) -> None:
    ballot, _ = await chain.cast_vote(await chain.create_round(vote_end_time=START_TIME + 60))
    reveal = chain.create_stand_in_reveal(ballot, 0)
    responses = [(await chain.send_reveal(reveal)).json() for _ in range(2)]
    await chain.mine()
    responses.append((await chain.send_reveal(reveal)).json())
    assert responses == [responses[0]] * 3
    assert len(chain.devnet.chain.blocks[-1].results) == 1
    await chain.mine()
    assert not chain.devnet.chain.blocks[-1].results
    await chain.mine(time=START_TIME + 60)
    assert (await chain.send_reveal(reveal)).status_code == 422


async def test_block_size_is_limited_and_other_reveals_stay_in_mempool() -> None:
    async with run_chain(max_reveals=5) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        await asyncio.gather(*(chain.send_reveal(chain.create_stand_in_reveal(ballot, index)) for index in range(16)))
        sizes = []
        for _ in range(4):
            await chain.mine()
            sizes.append(len(chain.devnet.chain.blocks[-1].results))
        assert sizes == [5, 5, 5, 1]


async def test_mempool_is_rechecked_after_each_block() -> None:
    async with run_chain(max_reveals=1) as chain:
        round_id = await chain.create_round()
        ballot, _ = await chain.cast_vote(round_id)
        first = chain.create_stand_in_reveal(ballot, 0)
        await chain.cast_vote(round_id)
        second = chain.create_stand_in_reveal(ballot, 0)
        await chain.send_reveal(first)
        dropped = (await chain.send_reveal(second)).json()["tx_hash"]
        await chain.mine(3)
        assert (await chain.rest.get(f"{API_PREFIX}/tx/{dropped}")).status_code == 404
        assert (await chain.send_reveal(second)).json()["log"].startswith("nullifier already spent")


async def test_slow_check_refuses_reveal_spent_during_check(
    chain: ChainFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    round_id = await chain.create_round()
    ballot, _ = await chain.cast_vote(round_id)
    first = chain.create_stand_in_reveal(ballot, 0)
    await chain.cast_vote(round_id)
    second = chain.create_stand_in_reveal(ballot, 0)
    checking, resume = asyncio.Event(), asyncio.Event()
    check = chain.devnet.verifier.check

    async def slow(digest: bytes, reveal: Reveal, root: bytes) -> str | None:
        checking.set()
        await resume.wait()
        return await check(digest, reveal, root)

    await chain.send_reveal(first)
    monkeypatch.setattr(chain.devnet.verifier, "check", slow)
    sending = asyncio.create_task(chain.send_reveal(second))
    await checking.wait()
    await chain.mine()
    resume.set()
    assert (await sending).json()["log"].startswith("nullifier already spent")


async def test_restored_chain_has_empty_mempool(tmp_path: Path) -> None:
    path = tmp_path / "chain.db"
    async with run_chain(db=path) as chain:
        round_id = await chain.create_round(vote_end_time=START_TIME + 50)
        ballot, _ = await chain.cast_vote(round_id, weight=77)
        for index in range(15):
            await chain.send_reveal(chain.create_stand_in_reveal(ballot, index))
        await chain.mine()
        lost = chain.create_stand_in_reveal(ballot, 15)
        sent = (await chain.send_reveal(lost)).json()["tx_hash"]
        before = chain.devnet.chain
        # Not closed: the file is in the state after a kill.
        async with run_chain(db=path) as restored:
            restored_chain = restored.devnet.chain
            # The first block after the restart follows the stored ones.
            assert [block.hash for block in restored_chain.blocks[: before.height]] == [
                block.hash for block in before.blocks
            ]
            assert restored_chain.blocks[-1].last_hash == before.blocks[-1].hash
            assert restored_chain.rounds[round_id].tree.root() == before.rounds[round_id].tree.root()
            assert (await restored.rest.get(f"{API_PREFIX}/tx/{sent}")).status_code == 404
            await restored.send_reveal(lost)
            await restored.mine()
            assert (await restored.rest.get(f"{API_PREFIX}/tx/{sent}")).status_code == 200
            await restored.mine(4, time=START_TIME + 60)
            results = (await restored.get_json(f"{API_PREFIX}/tally-results/{round_id.hex()}"))["results"]
            assert results[0]["total_value"] == 77
    async with run_chain(db=path) as third:
        # The totals are read from the file, not decrypted again.
        assert third.devnet.chain.rounds[round_id].totals == {(1, 1): 77}
    with pytest.raises(JournalError, match="contains chain"):
        async with run_chain(db=path, chain_id="another-1"):
            pass


@pytest.mark.parametrize("content", ["queue", "text"])
async def test_file_of_another_program_is_refused_and_unchanged(tmp_path: Path, content: str) -> None:
    path = tmp_path / "queue.db"
    if content == "queue":
        open_database(path, SystemClock()).close()
    else:
        path.write_text("text" * 100)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"queue\.db"):
        async with run_chain(db=path):
            pass
    assert path.read_bytes() == before


async def test_reveal_of_another_helper_counts_and_is_listed(chain: ChainFixture) -> None:
    round_id = await chain.create_round()
    ballot, _ = await chain.cast_vote(round_id)
    own, other = (chain.create_stand_in_reveal(ballot, index) for index in (0, 1))
    await chain.send_reveal(own)
    body = {
        "round_id": round_id.hex(),
        "nullifier": other.nullifier.hex(),
        "enc_share": other.enc_share.hex(),
        "proposal_id": 1,
        "vote_decision": 1,
    }
    for _ in range(2):
        assert (await chain.rest.post("/devnet/reveals", json=body)).status_code == 200
    await chain.mine()
    height = chain.devnet.chain.height
    rows = (await chain.get_json(f"/devnet/reveals/{round_id.hex()}"))["reveals"]
    assert {row["nullifier"] for row in rows} == {own.nullifier.hex(), other.nullifier.hex()}
    assert len(rows) == 2, "the second reveal of a share does not count"
    (row,) = [row for row in rows if row["nullifier"] == other.nullifier.hex()]
    assert (row["enc_share"], row["proposal_id"], row["vote_decision"]) == (other.enc_share.hex(), 1, 1)
    assert (row["height"], row["time"]) == (height, chain.devnet.chain.blocks[-1].time_ns / 1e9)
    assert (await chain.get_json(f"/devnet/reveals/{'00' * 32}"))["reveals"] == []


async def test_reveal_with_invalid_statement_is_refused() -> None:
    async with run_chain(stand_in=False) as chain:
        ballot, _ = await chain.cast_vote(await chain.create_round())
        response = await chain.send_reveal(
            replace_fields(chain.create_stand_in_reveal(ballot, 0), proof=bytes(4992), enc_share=bytes(64))
        )
        assert response.status_code == 422
        assert "invalid zero-knowledge proof" in response.json()["log"]
