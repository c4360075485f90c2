"""The only endpoint goes away for a while, or was never there: shares wait, wallets are answered, nothing is spent."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from devnet import ballot
from devnet.wallet import CastVote
from tests.support.devnet import Chain
from tests.support.harness import STAND_IN, Helper, cast_vote, helping, soon


async def down(chain: Chain) -> None:
    """The node refuses every connection, on both ports."""
    await chain.faults(refuse=1)


async def noticed(helper: Helper) -> None:
    """Wait until the helper has seen it."""
    await helper.until("sees the outage", lambda facts: all(one["reason"] for one in facts["endpoints"]))


@pytest.mark.anyio
@pytest.mark.rule("R11")
async def test_a_short_outage_costs_nothing_and_wallets_do_not_feel_it(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    async with helping(tmp_path, http, chain) as helper:
        round_id = await chain.open_round()
        before = await cast_vote(chain, helper, round_id, times=ballot.same_second(soon(2)))
        async with helper.wallet() as wallet:
            sealed = await wallet.seal(round_id, 2, 0, weight=9)
            position = await wallet.cast(sealed)
            await helper.knows_leaf(round_id, position)
            await down(chain)
            await noticed(helper)
            meanwhile = await wallet.post(sealed, position, times=ballot.same_second(soon(1)))
        answers = {(post.status, post.answer, post.attempts) for share in meanwhile.shares for post in share.posts}
        assert answers == {(200, "queued", 1)}
        due = max(share.submit_at for share in (*before.shares, *meanwhile.shares))
        await helper.until("has seen all shares become due", lambda _: soon(0) > due + 1)
        assert await spent_attempts(helper) == 0
        await chain.mend()
        for vote in (before, meanwhile):
            await helper.confirmed(vote)
        assert (await helper.counts()).get("failures", 0) == 0
        assert sum((await chain.spent(round_id)).values()) == 32


async def spent_attempts(helper: Helper) -> int:
    """Over all shares that wait."""
    return sum(share["attempts"] for share in (await helper.operator("/queue"))["shares"])


@pytest.mark.anyio
async def test_a_chain_that_is_down_at_the_start_is_waited_for(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    round_id = await chain.open_round()
    await down(chain)
    helper = Helper(tmp_path, http, chain, program=STAND_IN)
    await helper.start()
    try:
        await noticed(helper)
        async with helper.wallet(chain.nodes[1]["rest"]) as wallet:
            sealed = await wallet.seal(round_id, 1, 1, weight=3)
            position = await wallet.cast(sealed)
        answer = await helper.post(ballot.post_body(sealed, sealed.shares[0], position, 0))
        assert answer.status_code == 503, answer.text
        assert answer.json()["status"] == "error"
        assert helper.rows("SELECT count(*) FROM shares") == [(0,)]
        await chain.mend()
        await helper.ready()
        async with helper.wallet() as wallet:
            await helper.confirmed(await wallet.post(sealed, position, times=ballot.immediate()))
    finally:
        await helper.kill()


async def all_duplicates(helper: Helper, *votes: CastVote) -> None:
    """Every share again, at once and at its time: known, whatever the chain says meanwhile."""
    for vote in votes:
        for share in vote.shares:
            for at in (0, share.submit_at):
                answer = await helper.post(
                    ballot.post_body(vote.ballot, vote.ballot.shares[share.index], vote.position, at)
                )
                assert (answer.status_code, answer.json()) == (200, {"status": "duplicate"})


@pytest.mark.anyio
@pytest.mark.rule("R10")
async def test_a_share_is_known_again_after_the_end_after_a_restart_and_without_a_node(
    tmp_path: Path, http: httpx.AsyncClient, chain: Chain
) -> None:
    helper = Helper(tmp_path, http, chain, program=STAND_IN)
    await helper.start()
    try:
        await helper.ready()
        end = soon(8)
        round_id = await chain.open_round(vote_end_time=end, tally_blocks=100_000)
        confirmed = await cast_vote(chain, helper, round_id)
        await helper.confirmed(confirmed)
        waiting = await cast_vote(chain, helper, round_id, proposal=2, times=ballot.same_second(end))
        await down(chain)
        await noticed(helper)
        await all_duplicates(helper, confirmed, waiting)
        await chain.mend()
        await helper.until("is in step", lambda facts: not any(one["reason"] for one in facts["endpoints"]))
        async with helper.patience("knows that the round is tallied"):
            while helper.rows("SELECT status FROM rounds ORDER BY seen_ms DESC LIMIT 1") != [(2,)]:
                await helper.until("goes on", lambda facts: facts["height"])
        await all_duplicates(helper, confirmed, waiting)
        assert await helper.stop() == 0
        await helper.start()
        await helper.ready()
        await all_duplicates(helper, confirmed, waiting)
        await down(chain)
        await noticed(helper)
        await all_duplicates(helper, confirmed, waiting)
        await chain.mend()
        assert await chain.spent(round_id) == {share.nullifier.hex(): 1 for share in confirmed.shares}
    finally:
        await helper.kill()
