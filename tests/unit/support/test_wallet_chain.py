"""A wallet of library version 5.3.0 votes with or without batches, and finds a vote whose response was lost."""

from __future__ import annotations

import random

import httpx
import pytest

from devnet.clients.wallet_http import WalletHttp
from devnet.eras import BATCH_CAST, ERAS
from tests.support.wallets import chain as wallet_chain
from tests.support.wallets.chain import ChainVoter, WalletError
from tests.unit.devnet.support import ChainFixture, run_chain

CHOICES = [(1, 0, 70), (2, 1, 30)]


class LossyNode(httpx.AsyncBaseTransport):
    """A node without sockets that includes each transaction at once, and loses its responses to some routes."""

    def __init__(self, chain: ChainFixture, *lost_routes: str, is_reached: bool = True) -> None:
        self._chain = chain
        self._node = httpx.ASGITransport(chain.nodes[0].rest)
        self._lost_routes = lost_routes
        self._is_reached = is_reached

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        is_lost = request.url.path.rpartition("/")[2] in self._lost_routes
        if is_lost and not self._is_reached:
            return httpx.Response(502, json={"error": "lost"})
        response = await self._node.handle_async_request(request)
        if request.method == "POST":
            await self._chain.mine()
        return httpx.Response(502, json={"error": "lost"}) if is_lost else response


async def vote(chain: ChainFixture, node: LossyNode) -> tuple[list[int], list[str]]:
    """Cast two votes in a new round. Returns their positions and the routes of all POSTs."""
    round_id = await chain.create_round()
    http = WalletHttp(node)
    voter = ChainVoter(http, "http://chain", random.Random(1))
    round_ = await voter.load_round(round_id, created_at=0)
    votes = await voter.cast_votes(round_, CHOICES)
    tree = chain.devnet.chain.rounds[round_id].tree
    assert [tree.leaf(position) for _, position in votes] == [ballot.commitment for ballot, _ in votes]
    assert [(ballot.proposal_id, ballot.vote_decision, ballot.weight) for ballot, _ in votes] == CHOICES
    return [position for _, position in votes], [attempt.route for attempt in http.attempts]


async def test_wallet_casts_one_batch_if_the_chain_has_batches() -> None:
    async with run_chain(era=ERAS["1.6"]) as chain:
        assert await vote(chain, LossyNode(chain)) == ([2, 3], ["delegate-vote", BATCH_CAST])


@pytest.mark.parametrize("era", ["0.5", "1.4"])
async def test_wallet_casts_single_votes_if_the_chain_has_no_batches(era: str) -> None:
    async with run_chain(era=ERAS[era]) as chain:
        assert await vote(chain, LossyNode(chain)) == ([2, 4], ["delegate-vote", BATCH_CAST, "cast-vote", "cast-vote"])


async def test_wallet_finds_votes_in_the_tree_if_all_responses_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wallet_chain, "CHAIN_WAITS", (0.0, 0.0))
    async with run_chain(era=ERAS["1.6"], page_leaves=2) as chain:
        positions, routes = await vote(chain, LossyNode(chain, BATCH_CAST))
        assert routes == ["delegate-vote", *[BATCH_CAST] * 3]
        assert positions[1] == positions[0] + 1


async def test_wallet_reports_a_vote_that_never_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wallet_chain, "CHAIN_WAITS", (0.0, 0.0))
    async with run_chain(era=ERAS["1.6"]) as chain:
        with pytest.raises(WalletError, match="not in the commitment tree"):
            await vote(chain, LossyNode(chain, BATCH_CAST, is_reached=False))
