"""The only node becomes unreachable, or always was: shares wait, wallets get responses, no attempt is spent."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from devnet import ballot
from tests.support.devnet import DevChain
from tests.support.harness import HelperProcess, cast_vote, run_helper, unix_time_in


async def refuse_connections(chain: DevChain) -> None:
    await chain.set_faults(refuse=1)


async def wait_until_noticed(helper: HelperProcess) -> None:
    await helper.wait_until("sees the outage", lambda facts: all(endpoint["reason"] for endpoint in facts["endpoints"]))


@pytest.mark.rule("R11")
async def test_short_outage_spends_no_attempt_and_accepts_shares(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    async with run_helper(tmp_path, http, chain) as helper:
        round_id = await chain.open_round()
        before = await cast_vote(chain, helper, round_id, times=ballot.same_second_times(unix_time_in(2)))
        async with helper.create_wallet() as wallet:
            sealed = await wallet.seal_ballot(round_id, 2, 0, weight=9)
            position = await wallet.cast_ballot(sealed)
            await helper.wait_for_leaf(round_id, position)
            await refuse_connections(chain)
            await wait_until_noticed(helper)
            meanwhile = await wallet.post_shares(sealed, position, times=ballot.same_second_times(unix_time_in(1)))
        responses = {(post.status, post.outcome, post.attempts) for share in meanwhile.shares for post in share.posts}
        assert responses == {(200, "queued", 1)}
        due = max(share.submit_at for share in (*before.shares, *meanwhile.shares))
        await helper.wait_until("has seen all shares become due", lambda _: unix_time_in(0) > due + 1)
        assert await count_spent_attempts(helper) == 0
        await chain.clear_faults()
        for vote in (before, meanwhile):
            await helper.wait_until_confirmed(vote)
        assert (await helper.service_counts()).get("failures", 0) == 0
        assert sum((await chain.spent_nullifiers(round_id)).values()) == 32


async def count_spent_attempts(helper: HelperProcess) -> int:
    return sum(share["attempts"] for share in (await helper.operator_get("/queue"))["shares"])


async def test_service_started_without_chain_waits_for_it(
    tmp_path: Path, http: httpx.AsyncClient, chain: DevChain
) -> None:
    round_id = await chain.open_round()
    await refuse_connections(chain)
    async with run_helper(tmp_path, http, chain, until="listening") as helper:
        await wait_until_noticed(helper)
        async with helper.create_wallet(chain.nodes[1]["rest"]) as wallet:
            sealed = await wallet.seal_ballot(round_id, 1, 1, weight=3)
            position = await wallet.cast_ballot(sealed)
        response = await helper.post_share(ballot.post_body(sealed, sealed.shares[0], position, 0))
        assert response.status_code == 503, response.text
        assert response.json()["status"] == "error"
        assert helper.query_rows("SELECT count(*) FROM shares") == [(0,)]
        await chain.clear_faults()
        await helper.wait_until_ready()
        async with helper.create_wallet() as wallet:
            await helper.wait_until_confirmed(
                await wallet.post_shares(sealed, position, times=ballot.immediate_times())
            )
