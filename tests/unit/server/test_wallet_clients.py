"""Every client that posts shares, against the service under virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import httpx
import pytest

from devnet.clients.client_wallet import ClientWallet, HelperState, SentShare
from devnet.clients.known_clients import (
    ANDROID,
    ANDROID_NEWER,
    CLIENTS,
    CUSTODY,
    IOS,
    LIBRARY,
    VIZOR,
    ZAFU,
    ZKOOL,
    Client,
)
from helper.chain.chain_data import Proposal
from helper.core.refusals import PauseReason
from helper.ingest import admission
from tests.simulation.store import SimDisk, SimStore
from tests.support.wallets import outcomes
from tests.support.wallets.network import WalletNetwork
from tests.support.wallets.outcomes import (
    ANSWERS,
    OURS,
    SITUATIONS,
    START,
    LoopClock,
    TestHelper,
    create_network,
    create_shares,
    create_wallet,
    run_virtual,
)
from tests.unit.ingest.admission_fixtures import COMMITMENT, POSITION, ROUND_ID
from tests.unit.server.gateway_fixtures import running_gateway

T = TypeVar("T")


@dataclass
class Trial:
    """A wallet and the only helper that it knows.

    Attributes:
        helper: the service.
        network: the wallet's connections.
        wallet: the wallet.
        shares: its vote of 16 shares.
    """

    helper: TestHelper
    network: WalletNetwork
    wallet: ClientWallet
    shares: list[SentShare]

    @property
    def statuses(self) -> list[int | None]:
        return [attempt.status for attempt in self.wallet.attempts]

    def words(self) -> list[str]:
        return [response.json()["status"] for response, _ in self.network.exchanges]


def try_client(client: Client, test: Callable[[Trial], Awaitable[T]], *, count: int = 16, **settings: Any) -> T:
    """Run a test with a wallet of a client."""

    async def run() -> T:
        helper = TestHelper(**settings)
        network = create_network(client, {"ours": helper.server}, connect_seconds=0.05)
        async with create_wallet(client, network, [OURS]) as wallet:
            result = await test(Trial(helper, network, wallet, create_shares(count, [OURS])))
        await helper.aclose()
        return result

    return run_virtual(run())


# ---------------------------------------------------------------------- tables


def test_refusals_are_the_best_answers_of_every_client() -> None:
    """Only a slow connection of the client itself is left out."""
    refusals = {name: answer for name, answer in ANSWERS.items() if not name.startswith("200") and "120" not in name}
    late: set[str] = set()
    for client in CLIENTS:
        best = max((outcomes.mark_answer(client, answer) for answer in refusals.values()), key="✗▲✓".index)
        for name, situation in SITUATIONS.items():
            mark = outcomes.deliver_in(client, situation).mark(has_ours=True)
            assert mark != "✗", (client.name, name)
            assert "✗▲✓".index(mark) >= "✗▲✓".index(best) or situation.link, (client.name, name)
            late.update({name} if mark == "▲" else ())
    assert late == outcomes.BEST.keys(), "the document says of each why no answer is better"


# ---------------------------------------------------------------------- posted shares


def test_body_with_escaped_slashes_is_the_same_share() -> None:
    async def deliver(trial: Trial) -> None:
        (sent,) = trial.shares
        # The outer index is not required.
        fields = {name: value for name, value in sent.fields.items() if name != "share_index"}
        bodies = [ANDROID.encode(fields), ZKOOL.encode(fields)]
        assert [b"\\/" in body for body in bodies] == [True, False]
        trial.wallet.client = replace(ANDROID, encode=lambda _: bodies.pop(0))
        await trial.wallet.deliver([sent])
        await trial.wallet.deliver([sent])
        assert trial.words() == ["queued", "duplicate"]

    try_client(ANDROID, deliver, count=1)


@pytest.mark.rule("N9", "W4", "W13")
@pytest.mark.parametrize(
    ("client", "seconds", "refusals"),
    [
        (IOS, 3.0, []),
        (IOS, 8.0, [503]),
        (ANDROID, 8.0, [503]),
        (ANDROID_NEWER, 8.0, [503]),
        (VIZOR, 8.0, [503, 503]),
        (ZKOOL, 8.0, [503]),
        (ZAFU, 8.0, []),
        (CUSTODY, 14.0, []),
        (LIBRARY, 3.0, []),
        (LIBRARY, 14.0, []),
        (LIBRARY, 18.0, [429]),
    ],
    ids=lambda value: value.name if isinstance(value, Client) else None,
)
def test_share_whose_leaf_is_late_is_held(client: Client, seconds: float, refusals: list[int]) -> None:
    async def deliver(trial: Trial) -> None:
        leaves, late = trial.helper.chain.leaves, (ROUND_ID, POSITION + 1)
        trial.helper.chain.changes.append((seconds, lambda: leaves.update({late: COMMITMENT})))
        trial.shares[6].fields = {**trial.shares[6].fields, "tree_position": POSITION + 1}
        await trial.wallet.deliver(trial.shares)
        assert all(trial.wallet.is_delivered(sent) for sent in trial.shares)
        assert (trial.wallet.failure, [status for status in trial.statuses if status != 200]) == ("", refusals)
        assert len(trial.helper.app.store.shares) == 16
        for response, waited in trial.network.exchanges:
            assert waited <= {LIBRARY.name: 15.0, CUSTODY.name: 15.0, ZAFU.name: 8.0}.get(client.name, 3.5)
            assert isinstance(response.json(), dict)
            assert response.status_code == 200 or response.headers["retry-after"] == "2"

    try_client(client, deliver)


def test_vote_posted_again_with_other_times_keeps_the_first_ones() -> None:
    async def deliver(trial: Trial) -> None:
        for submit_at in (int(START) + 50, int(START) + 90):
            for sent in trial.shares:
                sent.submit_at = submit_at
            await trial.wallet.deliver(trial.shares)
        assert trial.words() == ["queued"] * 16 + ["duplicate"] * 16
        assert {share.submit_at for share in trial.helper.app.store.shares} == {int(START) + 50}

    try_client(IOS, deliver)


@pytest.mark.parametrize("client", [ANDROID, VIZOR], ids=lambda client: client.name)
def test_share_whose_response_is_late_is_stored_once(client: Client) -> None:
    """The wallet gives up after 5 s, while the share is being stored, and posts it again."""
    disk = SimDisk(cast(random.Random, SimpleNamespace(random=lambda: 1.0)))
    disk.max_commit_delay = 8.0
    store = SimStore(disk, LoopClock())

    async def deliver(trial: Trial) -> None:
        await store.open()
        await trial.wallet.deliver(trial.shares)
        assert trial.statuses == [None, 200]
        assert "duplicate" in trial.words()
        assert disk.query_rows("SELECT count(*) FROM shares") == [(1,)]

    try_client(client, deliver, count=1, queue=store)
    disk.close()


def test_share_that_nobody_accepts_ends_the_requests_of_the_others() -> None:
    """They go out again two seconds later, those that were accepted too."""
    indices: list[int] = []

    async def answer(request: httpx.Request) -> httpx.Response:
        index = json.loads(request.content)["share_index"]
        indices.append(index)
        if len(indices) > 16 or index < 5:
            return httpx.Response(200, json={"status": "queued"})
        await asyncio.sleep(1.0 if index == 5 else 4.0)
        return httpx.Response(503)

    async def deliver() -> None:
        network = create_network(ANDROID_NEWER, {"ours": answer})
        async with create_wallet(ANDROID_NEWER, network, [OURS]) as wallet:
            await wallet.deliver(create_shares(16, [OURS]))
            assert sorted(indices) == sorted(2 * list(range(16)))
            assert [attempt.status for attempt in wallet.attempts] == [200] * 5 + [503] + [200] * 16
            assert (wallet.failure, asyncio.get_running_loop().time()) == ("", 3.0)

    run_virtual(deliver())


def test_share_without_all_its_copies_is_the_last_that_is_sent() -> None:
    bodies: list[bytes] = []

    def encode(fields: Mapping[str, Any]) -> bytes:
        bodies.append(CUSTODY.encode(fields))
        return bodies[-1]

    async def deliver() -> None:
        network = create_network(CUSTODY, {"ours": outcomes.respond(503)})
        async with create_wallet(replace(CUSTODY, encode=encode), network, [OURS]) as wallet:
            await wallet.deliver(create_shares(16, [OURS]))
            assert len(bodies) == 1

    run_virtual(deliver())


def test_592_shares_on_a_connection_each_are_accepted() -> None:
    async def deliver(trial: Trial) -> None:
        chain = trial.helper.chain
        proposals = tuple(Proposal(number, (0, 1)) for number in range(1, 38))
        chain.rounds[ROUND_ID] = replace(chain.rounds[ROUND_ID], proposals=proposals)
        for proposal in proposals:
            shares = create_shares(16, [OURS])
            for sent in shares:
                sent.fields = {**sent.fields, "proposal_id": proposal.id}
            await trial.wallet.deliver(shares)
        assert Counter(trial.statuses) == {200: 592}
        assert (trial.network.opened, len(trial.helper.app.store.shares)) == ({"ours": 592}, 592)
        assert trial.network.exchanges[0][0].request.headers["user-agent"] == "zkool/1.0"

    try_client(ZKOOL, deliver)


def test_pause_of_a_second_costs_one_repetition() -> None:
    async def deliver(trial: Trial) -> None:
        app = trial.helper.app
        app.pause_reason = PauseReason.NO_NODE_IN_SYNC
        asyncio.get_running_loop().call_later(1.0, lambda: setattr(app, "pause_reason", None))
        await trial.wallet.deliver(trial.shares)
        assert trial.statuses == [503] + [200] * 16

    try_client(ZKOOL, deliver)


@pytest.mark.parametrize(("client", "status"), [(VIZOR, 503), (replace(LIBRARY, sends_first_alone=False), 429)])
def test_shares_beyond_the_limit_are_repeated_and_stored_once(
    client: Client, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_IN_FLIGHT", 12)

    async def deliver(trial: Trial) -> None:
        await trial.wallet.deliver(trial.shares)
        assert trial.statuses == [status] * 4 + [200] * 16
        assert len(trial.helper.app.store.shares) == 16

    try_client(client, deliver)


def test_browser_posts_eight_shares_on_six_connections() -> None:
    async def deliver(trial: Trial) -> None:
        await trial.wallet.deliver(trial.shares)
        assert trial.statuses == [200] * 8
        assert trial.network.opened == {"ours": 6}
        assert {response.headers["access-control-allow-origin"] for response, _ in trial.network.exchanges} == {"*"}

    try_client(ZAFU, deliver, count=8)


@pytest.mark.parametrize("seconds", [3.0, 60.0])
def test_server_that_stops_answers_all_shares_that_wait(seconds: float) -> None:
    async def deliver(trial: Trial) -> None:
        trial.helper.chain.hide_leaf(seconds)
        posts = [asyncio.ensure_future(trial.wallet.deliver([sent])) for sent in trial.shares * 4]
        await asyncio.sleep(2.0)
        await trial.helper.server.shutdown()
        assert trial.statuses == [200 if seconds < 5 else 503] * 64
        assert len(trial.helper.app.store.shares) == (16 if seconds < 5 else 0)
        for response, _ in trial.network.exchanges:
            assert (response.headers["connection"], response.headers.get("retry-after", "2")) == ("close", "2")
        await asyncio.gather(*posts)

    # It sends all at once, and asks no other helper.
    try_client(replace(ZAFU, connections=None), deliver)


# ---------------------------------------------------------------------- status


@pytest.mark.rule("R12", "N7", "W7")
@pytest.mark.parametrize("client", [client for client in CLIENTS if client.confirmations], ids=lambda c: c.name)
def test_share_is_taken_for_confirmed_only_after_it_is_counted(client: Client) -> None:
    """Also by a helper that never had the share."""
    counted_at, end = 4000.0, START + 50_000

    async def run() -> None:
        helpers = [TestHelper(api_token=""), TestHelper()]
        urls = [OURS, "http://other"]
        servers = dict(zip(("ours", "other"), (helper.server for helper in helpers), strict=True))
        network = create_network(client, servers)
        (sent,) = create_shares(1, urls, submit_at=int(START) + 100)
        loop = asyncio.get_running_loop()
        async with create_wallet(client, network, urls) as wallet:
            await wallet.deliver([sent])
            for helper in helpers:
                spent = helper.app.store.spent
                loop.call_at(counted_at, spent.add, (ROUND_ID, sent.nullifier))
            assert await wallet.watch(sent, end, earliest=START + 1)
            assert counted_at <= loop.time() <= counted_at + client.poll_seconds + 5
        statuses = [response for response, _ in network.exchanges if response.request.method == "GET"]
        words = {(response.status_code, response.json()["status"]) for response in statuses}
        assert words == {(202, "pending"), (200, "confirmed")}
        assert {response.headers["cache-control"] for response in statuses} == {"no-store"}
        assert all(sent.helpers[url] is HelperState.ACCEPTED for url in sent.confirmed_by) or client.asks_all_helpers

    run_virtual(run())


async def test_operators_tools_find_the_helper_up_at_its_base_url() -> None:
    api, block = "/shielded-vote/v1", "/cosmos/base/tendermint/v1beta1/blocks/latest"
    async with running_gateway() as harness:

        async def probe() -> list[int]:
            return [(await harness.client.get(path)).status_code for path in (f"{api}/rounds", f"{api}/status", block)]

        assert await probe() == [200, 200, 200]
        height = (await harness.client.get(block)).json()["block"]["header"]["height"]
        assert isinstance(height, str)
        assert int(height) > 0
        harness.wallets.pause_reason = PauseReason.NO_NODE_IN_SYNC
        assert await probe() == [200, 503, 200]
