"""SIGKILL at exact moments of a share's life: no share is lost or confirmed twice."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from devnet import ballot
from devnet.wallet import CastVote, Wallet
from helper.reveal.send_policy import REPROVE_BLOCKS
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, cast_vote, run_helper, unix_time_in

ONE_PROOF = {"max_concurrent_proofs": 1}
KILL_MOMENTS = (
    "enqueue:before",  # request received, nothing on disk
    "enqueue:after",  # on disk, no response sent
    "claim_due:after:2",  # claimed
    "prove:before",  # before a worker starts
    "prove:after:3",  # proven, message not on disk
    "prepare:before",
    "prepare:after",  # message on disk, not sent
    "mark_sending:after:4",  # marked as sending, no byte sent
    "broadcast:after",  # sent, no response
    "record_outcome:after:5",  # outcome recorded
    "apply_blocks:before:6",  # block with or without our reveal not yet applied
    "apply_blocks:after:6",
)


async def post_until_killed(chain: DevChain, helper: HelperProcess, round_id: bytes) -> CastVote:
    """Vote, and post the shares to a helper that starts and is killed meanwhile."""
    async with Wallet(chain.url, [], mode="parallel") as wallet:
        sealed = await wallet.seal_ballot(round_id, 1, 1, weight=1234)
        position = await wallet.cast_ballot(sealed)
    await helper.wait_until_listening()
    await helper.wait_until_ready()
    async with helper.create_wallet() as wallet:
        vote = await wallet.post_shares(sealed, position, times=ballot.same_second_times(unix_time_in(0.5)))
    assert await helper.wait_for_exit() == -9, "the service was killed at the chosen moment"
    return vote


async def post_again(helper: HelperProcess, vote: CastVote) -> dict[int, str]:
    """Post all shares again, as wallets do with those that were not accepted. Returns the statuses by index."""
    due, known = vote.shares[0].submit_at, {}
    for share in vote.ballot.shares:
        response = await helper.post_share(ballot.post_body(vote.ballot, share, vote.position, due))
        known[share.index] = str(response.json()["status"])
    return known


@pytest.mark.rule("R9")
@pytest.mark.parametrize("moment", KILL_MOMENTS)
async def test_kill_loses_no_share_and_counts_none_twice(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain, moment: str
) -> None:
    round_id = await chain.open_round()
    async with run_helper(tmp_path, http, chain, until="spawned", env={"KILL_AT": moment}, helper=ONE_PROOF) as helper:
        vote = await post_until_killed(chain, helper, round_id)
        nullifiers = [share.nullifier.hex() for share in vote.shares]
        acknowledged = {share.index for share in vote.shares if share.is_accepted}
        await helper.start()
        await helper.wait_until_ready()
        known = await post_again(helper, vote)
        assert {index for index, status in known.items() if status == "duplicate"} >= acknowledged
        await helper.wait_until_confirmed(vote)
        assert await chain.spent_nullifiers(round_id) == dict.fromkeys(nullifiers, 1)
        first_sent = min(sent["time"] for sent in await chain.broadcasts() if sent["nullifier"] in nullifiers)
        assert first_sent >= vote.shares[0].submit_at
        counts = await helper.service_counts()
        assert counts.get("failures", 0) == counts.get("failed", 0) == 0


async def test_helper_killed_before_it_has_the_keys_of_every_circuit_reveals(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    round_id = await chain.open_round()
    slow = {"STANDIN_SECONDS": "3600"}
    async with run_helper(tmp_path, http, chain, env=slow, helper=ONE_PROOF) as helper:
        vote = await cast_vote(chain, helper, round_id)
        await helper.kill()
        assert await chain.spent_nullifiers(round_id) == {}
        helper.spawn(STANDIN_KILL_AT_KEYS="1")
        assert await helper.wait_for_exit() == -9
        await chain.mine()
        assert await chain.spent_nullifiers(round_id) == {share.nullifier.hex(): 1 for share in vote.shares}


@pytest.mark.rule("R9")
async def test_restart_resends_sent_message_before_new_proof(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    """The number of blocks during the interruption does not matter."""
    round_id = await chain.open_round()
    env = {"KILL_AT": "mark_sending:after"}
    async with run_helper(tmp_path, http, chain, until="spawned", env=env, helper=ONE_PROOF) as helper:
        vote = await post_until_killed(chain, helper, round_id)
        query = "SELECT field(witness, 'nullifier'), substr(message, 1, 32) FROM shares JOIN reveals ON share_id = id"
        stored = {nullifier.hex(): tx_hash for nullifier, tx_hash in helper.query_rows(query)}
        assert stored
        await chain.delegate(round_id, 1)  # a new proof would use another root
        await chain.mine(REPROVE_BLOCKS + 1)
        await helper.start()
        await helper.wait_until_ready()
        await post_again(helper, vote)
        await helper.wait_until_confirmed(vote)
        counted = await chain.transaction_hashes(round_id)
        assert {nullifier: counted[nullifier] for nullifier in stored} == stored
