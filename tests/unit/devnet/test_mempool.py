"""What happens between CheckTx and a block: the cache, races for one share, the cap, and restarts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from devnet.journal import JournalError
from devnet.tx import Reveal
from tests.unit.devnet.support import API, START, changed, running

pytestmark = pytest.mark.anyio


async def test_two_reveals_of_one_share_are_both_taken_and_the_second_fails() -> None:
    async with running() as net:
        round_id = await net.new_round()
        ballot, position = await net.vote(round_id)
        first = net.stand_in(ballot, 0)
        await net.vote(round_id)  # a newer root makes another proof of the same share
        second = net.stand_in(ballot, 0)
        assert position == 1
        hashes = [(await net.send(reveal)).json()["tx_hash"] for reveal in (first, second)]
        await net.mine()
        winner, loser = [await net.rest.get(f"{API}/tx/{digest}") for digest in hashes]
        assert winner.status_code == 200
        assert loser.status_code == 422
        assert loser.json()["log"] == f"nullifier already spent: {first.nullifier.hex()}"
        results = (await net.rpc.get(f"/block_results?height={net.devnet.chain.height}")).json()["result"]
        assert [row["code"] for row in results["txs_results"]] == [0, 1]
        assert net.devnet.stats()["reveals_counted"] == 1


async def test_newer_chains_filter_the_second_reveal_out() -> None:
    async with running(duplicates="filter") as net:
        round_id = await net.new_round()
        ballot, _ = await net.vote(round_id)
        first = net.stand_in(ballot, 0)
        await net.vote(round_id)
        await net.send(first)
        answer = await net.send(net.stand_in(ballot, 0))
        assert answer.status_code == 200
        assert answer.json()["log"] == "tx pending in mempool (duplicate submission)"
        await net.mine(3)
        assert (await net.rest.get(f"{API}/tx/{answer.json()['tx_hash']}")).status_code == 404


async def test_the_same_bytes_again_are_taken_while_the_round_is_open() -> None:
    async with running() as net:
        ballot, _ = await net.vote(await net.new_round(vote_end_time=START + 60))
        reveal = net.stand_in(ballot, 0)
        answers = [(await net.send(reveal)).json() for _ in range(2)]
        await net.mine()
        answers.append((await net.send(reveal)).json())
        assert answers == [answers[0]] * 3
        assert len(net.devnet.chain.blocks[-1].results) == 1
        await net.mine()
        assert not net.devnet.chain.blocks[-1].results
        await net.mine(time=START + 60)
        assert (await net.send(reveal)).status_code == 422


async def test_a_block_takes_only_so_many_reveals_and_the_rest_wait() -> None:
    async with running(max_reveals=5) as net:
        ballot, _ = await net.vote(await net.new_round())
        await asyncio.gather(*(net.send(net.stand_in(ballot, index)) for index in range(16)))
        sizes = []
        for _ in range(4):
            await net.mine()
            sizes.append(len(net.devnet.chain.blocks[-1].results))
        assert sizes == [5, 5, 5, 1]


async def test_what_still_waits_is_checked_again_after_each_block() -> None:
    async with running(max_reveals=1) as net:
        round_id = await net.new_round()
        ballot, _ = await net.vote(round_id)
        first = net.stand_in(ballot, 0)
        await net.vote(round_id)
        second = net.stand_in(ballot, 0)
        await net.send(first)
        dropped = (await net.send(second)).json()["tx_hash"]
        await net.mine(3)
        assert (await net.rest.get(f"{API}/tx/{dropped}")).status_code == 404
        assert (await net.send(second)).json()["log"].startswith("nullifier already spent")


async def test_a_slow_check_does_not_admit_what_was_spent_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as net:
        round_id = await net.new_round()
        ballot, _ = await net.vote(round_id)
        first = net.stand_in(ballot, 0)
        await net.vote(round_id)
        second = net.stand_in(ballot, 0)
        checking, go_on = asyncio.Event(), asyncio.Event()
        check = net.devnet.verifier.check

        async def slow(digest: bytes, reveal: Reveal, root: bytes) -> str | None:
            checking.set()
            await go_on.wait()
            return await check(digest, reveal, root)

        await net.send(first)
        monkeypatch.setattr(net.devnet.verifier, "check", slow)
        sending = asyncio.create_task(net.send(second))
        await checking.wait()
        await net.mine()
        go_on.set()
        assert (await sending).json()["log"].startswith("nullifier already spent")


async def test_a_chain_comes_back_from_its_file_without_its_mempool(tmp_path: Path) -> None:
    path = tmp_path / "chain.db"
    async with running(db=path) as net:
        round_id = await net.new_round(vote_end_time=START + 50)
        ballot, _ = await net.vote(round_id, weight=77)
        for index in range(15):
            await net.send(net.stand_in(ballot, index))
        await net.mine()
        lost = net.stand_in(ballot, 15)
        sent = (await net.send(lost)).json()["tx_hash"]
        before = net.devnet.chain
        # No closing: the file is as a kill leaves it.
        async with running(db=path) as again:
            chain = again.devnet.chain
            # The first block after the restart follows what was there.
            assert [block.hash for block in chain.blocks[: before.height]] == [block.hash for block in before.blocks]
            assert chain.blocks[-1].last_hash == before.blocks[-1].hash
            assert chain.rounds[round_id].tree.root() == before.rounds[round_id].tree.root()
            assert (await again.rest.get(f"{API}/tx/{sent}")).status_code == 404
            await again.send(lost)
            await again.mine()
            assert (await again.rest.get(f"{API}/tx/{sent}")).status_code == 200
            await again.mine(4, time=START + 60)
            results = (await again.get(f"{API}/tally-results/{round_id.hex()}"))["results"]
            assert results[0]["total_value"] == 77
    async with running(db=path) as third:
        # The totals come from the file, not from another decryption.
        assert third.devnet.chain.rounds[round_id].totals == {(1, 1): 77}
    with pytest.raises(JournalError, match="contains chain"):
        async with running(db=path, chain_id="another-1"):
            pass


async def test_reveals_that_cannot_be_statements_are_refused() -> None:
    async with running(stand_in=False) as net:
        ballot, _ = await net.vote(await net.new_round())
        answer = await net.send(changed(net.stand_in(ballot, 0), proof=bytes(4992), enc_share=bytes(64)))
        assert answer.status_code == 422
        assert "invalid zero-knowledge proof" in answer.json()["log"]
