"""What the answers of a helper do to the votes of each client, as tables. Runs under virtual time.

Each client gives a vote of four shares to four helpers. The first one is asked first; the others accept every share.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import httpx
from structlog.testing import capture_logs

from devnet.clients.client_wallet import ClientWallet, HelperState, SentShare
from devnet.clients.known_clients import CLIENTS, AsksOn, Client
from helper.core.refusals import PauseReason
from helper.errors import StoreFull
from helper.ingest import admission
from helper.server.connection_limits import ConnectionLimits
from helper.server.listening import Server
from tests.simulation.virtual_loop import SimLoop
from tests.support.wallets.network import Script, WalletNetwork
from tests.unit.ingest.admission_fixtures import PAYLOADS, POSITION, ROUND_ID, FakeChain, FakeClock
from tests.unit.server.wallet_fixtures import WalletApp

T = TypeVar("T")
OURS: Final = "http://ours"
OTHERS: Final = ("http://other1", "http://other2", "http://other3")
SHARES: Final = 4
START: Final = 1_795_268_000.0
SOON_SECONDS: Final = 25.0
"""Seconds from its first attempt within which a share is delivered soon. Longer than the longest hold with repeats."""
CONNECT_SECONDS: Final = 1.4
"""Seconds for a connection over a slow mobile network."""
LEAF: Final = (ROUND_ID, POSITION)


class LoopClock(FakeClock):
    """The time of the event loop."""

    def now(self) -> float:
        return START + asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()


@dataclass
class TimedChain(FakeChain):
    """A chain with a sync each second.

    Attributes:
        changes: by loop second; the next sync makes them.
    """

    clock: FakeClock = field(default_factory=LoopClock)
    changes: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    async def wait_for_news(self, _round_id: bytes, _position: int, timeout: float) -> None:
        now = asyncio.get_running_loop().time()
        wait = math.floor(now) + 1.0 - now
        await asyncio.sleep(min(wait, timeout))
        if wait <= timeout:
            self.make_changes()

    def make_changes(self) -> None:
        now = asyncio.get_running_loop().time()
        due = [change for at, change in self.changes if at <= now]
        self.changes = [(at, change) for at, change in self.changes if at > now]
        for change in due:
            change()

    def hide_leaf(self, seconds: float = math.inf) -> None:
        """Let the leaf of all shares appear later."""
        leaf = self.leaves.pop(LEAF)
        self.changes.append((seconds, partial(self.leaves.__setitem__, LEAF, leaf)))


class TestHelper:
    """The service with a fake queue, on its own listener.

    Attributes:
        app: the service.
        server: its server.
    """

    __test__ = False

    def __init__(self, limits: ConnectionLimits | None = None, **settings: Any) -> None:
        self.chain = TimedChain()
        self.app = WalletApp(chain=self.chain, **settings)
        self.server: Server = Server(self.app.edge, limits or ConnectionLimits())

    async def aclose(self) -> None:
        """End all connections."""
        self.server.abort()
        await self.server.wait_ended()


def run_virtual(test: Awaitable[T]) -> T:
    """Run under virtual time."""
    result: T = SimLoop(random.Random("loop")).run_until_complete(test)
    return result


def create_shares(count: int, urls: Sequence[str], *, submit_at: int = 0) -> list[SentShare]:
    """Shares of one vote, from the recorded round."""
    return [
        SentShare(
            {
                **{name: payload[name] for name in payload.keys() - {"submit_at", "all_enc_shares"}},
                "share_index": index,
            },
            bytes([index]) * 32,
            submit_at,
            dict.fromkeys(urls, HelperState.UNTRIED),
        )
        for index, payload in enumerate(PAYLOADS[:count])
    ]


def create_wallet(client: Client, network: WalletNetwork, urls: Sequence[str]) -> ClientWallet:
    """A wallet that asks the first helper first."""
    wallet = ClientWallet(client, urls, rng=random.Random(1), now=LoopClock().now, transport=network)
    wallet.ranking.prefer(urls[0])
    return wallet


def create_network(client: Client, servers: dict[str, Any], **link: Any) -> WalletNetwork:
    return WalletNetwork(servers, keeps_connections=client.keeps_connections, connections=client.connections, **link)


async def accept(_request: httpx.Request) -> httpx.Response:
    """Answer like a helper that accepts every share."""
    return httpx.Response(200, json={"status": "queued"})


# ---------------------------------------------------------------------- one client and one answer


@dataclass(frozen=True)
class Delivery:
    """How a vote was delivered.

    Attributes:
        wallet: the wallet.
        shares: its shares.
    """

    wallet: ClientWallet
    shares: list[SentShare]

    @property
    def statuses(self) -> set[int | None]:
        """The statuses of our helper."""
        return {attempt.status for attempt in self.wallet.attempts if attempt.url == OURS}

    def mark(self, *, has_ours: bool) -> str:
        """✓, ▲ or ✗, as `LEGEND` says. `has_ours`: whether the first helper has what it seemed to accept."""
        client = self.wallet.client
        for sent in self.shares:
            taken = set(sent.with_state(HelperState.ACCEPTED)) - (set() if has_ours else {OURS})
            if self.wallet.failure or sent.is_given_up:
                return "✗"
            if not taken or (client.max_copies > 1 and not has_ours and sent.helpers[OURS] is HelperState.ACCEPTED):
                return "✗"
        if any(sent.times[1] - sent.times[0] > SOON_SECONDS for sent in self.shares):
            return "▲"
        is_complete = all(len(sent.with_state(HelperState.ACCEPTED)) > 1 for sent in self.shares)
        return "▲" if client.asks_on is AsksOn.NEVER and not is_complete else "✓"


async def deliver(client: Client, first: Server | Script | None, **link: Any) -> Delivery:
    """Deliver a vote; the first helper may refuse connections (None)."""
    urls = (OURS, *OTHERS)
    servers: dict[str, Any] = {url.removeprefix("http://"): accept for url in OTHERS}
    if first is not None:
        servers["ours"] = first
    shares = create_shares(SHARES, urls)
    async with create_wallet(client, create_network(client, servers, **link), urls) as wallet:
        await wallet.deliver(shares)
        return Delivery(wallet, shares)


# ---------------------------------------------------------------------- table of answers


def respond(status: int, retry_after: str | None = None, *, seconds: float = 0.0) -> Script:
    async def answer(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(seconds)
        headers = {} if retry_after is None else {"Retry-After": retry_after}
        return httpx.Response(status, json={"status": "queued" if status == 200 else "error"}, headers=headers)

    return answer


async def reset(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("reset", request=request)


async def give_receipt(request: httpx.Request) -> httpx.Response:
    token = request.headers.get("X-Vote-Ingress-Attempt-V1", "")
    fields = {"version": 1, "code": "request_body_timeout", "dispatch": "not_started", "attempt": token}
    return httpx.Response(408, json={"error": fields})


async def show_page(_request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, html="<p>hello")


ANSWERS: Final[dict[str, Script | None]] = {
    "200 after 3.5 s": respond(200, seconds=3.5),
    "429 with `Retry-After: 2`": respond(429, "2"),
    "503 without `Retry-After`": respond(503),
    "503 with `Retry-After: 2`": respond(503, "2"),
    "503 with `Retry-After: 120`": respond(503, "120"),
    "502": respond(502),
    "connection reset": reset,
    "connection refused": None,
    "400": respond(400),
    "408 with a receipt": give_receipt,
    "307 without a location": respond(307),
    "200 with a page": show_page,
}
"""Answers of any helper. A page means that the share is not stored."""


def mark_answer(client: Client, answer: Script | None) -> str:
    """The mark of a client and an answer."""
    return run_virtual(deliver(client, answer)).mark(has_ours=answer is not show_page)


# ---------------------------------------------------------------------- table of situations


def hide_leaf(helper: TestHelper, seconds: float = math.inf) -> None:
    helper.chain.hide_leaf(seconds)


def hide_round(helper: TestHelper) -> None:
    helper.chain.rounds.clear()


def pause(helper: TestHelper) -> None:
    helper.app.pause_reason = PauseReason.NO_NODE_IN_SYNC


def start(helper: TestHelper, seconds: float = math.inf) -> None:
    helper.app.pause_reason = PauseReason.CHAIN_NOT_READ
    helper.chain.changes.append((seconds, partial(setattr, helper.app, "pause_reason", None)))


def hide_proposals(helper: TestHelper) -> None:
    helper.chain.proposal_reports.add(ROUND_ID)
    helper.chain.rounds[ROUND_ID] = replace(helper.chain.rounds[ROUND_ID], proposals=())


def doubt_status(helper: TestHelper) -> None:
    helper.chain.status_reports.add(ROUND_ID)


def overload(helper: TestHelper) -> None:
    helper.app.intake._in_flight = admission.MAX_IN_FLIGHT


def fill_waiting(helper: TestHelper) -> None:
    helper.chain.hide_leaf()
    helper.app.intake._waiting = admission.WaitingShares(0)


def fail_writes(helper: TestHelper) -> None:
    helper.app.store.error = StoreFull("no space")


def fail(helper: TestHelper) -> None:
    helper.app.store.error = ZeroDivisionError()


def stop(helper: TestHelper) -> None:
    """Stop the service while shares wait for the chain."""
    helper.chain.hide_leaf()

    async def end() -> None:
        helper.app.intake.stop_waits()
        await helper.server.shutdown()

    asyncio.get_running_loop().call_later(1.0, lambda: asyncio.ensure_future(end()))


def know_shares(helper: TestHelper) -> None:
    """Let all shares be known, and pause."""
    helper.app.store.known_keys = _EveryKey()
    pause(helper)


class _EveryKey(set[Any]):
    def __contains__(self, _key: object) -> bool:
        return True


@dataclass(frozen=True)
class Situation:
    """A state of the service.

    Attributes:
        prepare: brings it about.
        link: arguments of the client's network.
        limits: limits of connections.
    """

    prepare: Callable[[TestHelper], None] = lambda _: None
    link: dict[str, Any] = field(default_factory=dict)
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


SITUATIONS: Final = {
    "accepts shares": Situation(),
    "leaf 3 s late, slow mobile network": Situation(
        partial(hide_leaf, seconds=4.0), {"connect_seconds": CONNECT_SECONDS}
    ),
    "leaf 8 s late": Situation(partial(hide_leaf, seconds=8.0)),
    "leaf missing": Situation(hide_leaf),
    "round missing": Situation(hide_round),
    "no node in sync": Situation(pause),
    "starts within 3 s": Situation(partial(start, seconds=3.0)),
    "starting": Situation(start),
    "known share, no node in sync": Situation(know_shares),
    "proposals not agreed": Situation(hide_proposals),
    "round's status not agreed": Situation(doubt_status),
    "too many requests": Situation(overload),
    "too many shares wait": Situation(fill_waiting),
    "too many connections": Situation(limits=ConnectionLimits(max_connections=0)),
    "body stalls": Situation(link={"bytes_per_second": 4.0}),
    "queue not writable": Situation(fail_writes),
    "internal error": Situation(fail),
    "stops while shares wait": Situation(stop),
}


def deliver_in(client: Client, situation: Situation) -> Delivery:
    """Deliver a vote while the first helper is in a situation."""

    async def run() -> Delivery:
        helper = TestHelper(situation.limits)
        situation.prepare(helper)
        try:
            return await deliver(client, helper.server, **situation.link)
        finally:
            await helper.aclose()

    with capture_logs():
        return run_virtual(run())


BEST: Final = {
    "leaf missing": "held for 8 s; a share must not be stored before it can be checked",
    "round missing": "the same",
    "no node in sync": "begins only 90 s after the newest block; holding would save shares of its last 8 s alone",
    "starting": "held for 8 s; a start takes about one",
    "proposals not agreed": "held for 8 s; a share must not be stored before it can be checked",
    "round's status not agreed": "the same",
    "too many requests": "holding it would take a place from another share",
    "too many shares wait": "the same",
    "too many connections": "the same",
    "body stalls": "the client's own connection; also for zkool and the library",
    "queue not writable": "200 is for shares on disk",
    "internal error": "the same",
    "stops while shares wait": "refused at once: the chain is not read any more",
}
"""Why no answer is better where a client has ▲."""


# ---------------------------------------------------------------------- the document

LEGEND: Final = (
    f"✓ each share is with a helper within {SOON_SECONDS:.0f} s; ▲ later, or the copy that this helper has not taken "
    "goes to no other; ✗ the voter must act, or a share is lost."
)


def _render(title: str, rows: dict[str, list[str]]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(client.name for client in CLIENTS)} |"
    yield f"|---|{'---|' * len(CLIENTS)}"
    for name, cells in rows.items():
        yield f"| {name} | {' | '.join(cells)} |"


def render_answers() -> list[str]:
    """The table of answers."""
    return list(
        _render("answer", {name: [mark_answer(c, answer) for c in CLIENTS] for name, answer in ANSWERS.items()})
    )


def render_reasons() -> list[str]:
    """The reasons of each ▲."""
    return ["| this helper | why ▲ is the best |", "|---|---|", *(f"| {name} | {why} |" for name, why in BEST.items())]


def render_situations() -> list[str]:
    """The table of situations, with the statuses that each client gets."""
    rows: dict[str, list[str]] = {}
    for name, situation in SITUATIONS.items():
        rows[name] = []
        for client in CLIENTS:
            delivery = deliver_in(client, situation)
            statuses = ", ".join(str(status or "–") for status in sorted(delivery.statuses, key=lambda s: s or 0))
            rows[name].append(f"{delivery.mark(has_ours=True)} {statuses}")
    return list(_render("this helper", rows))
