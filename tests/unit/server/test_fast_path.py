"""The fast path: for every request its behaviour equals that of the regular route."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_network

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from helper.chain.models import RoundStatus
from helper.core.pause import PauseCause
from helper.errors import ShareRefused, StoreError, StoreFull
from helper.ingest.schema import WireError
from proofs import InvalidShare
from tests.unit.ingest.admission_fixtures import END, POSITION, ROUND_ID, body, make_round
from tests.unit.server.fast_path_fixtures import LONGEST, Story, chunked, head, play, post
from tests.unit.server.wallet_fixtures import SHARES, STATUS, Wallets

pytestmark = pytest.mark.anyio

GOOD, BAD = post(body()), post(b"{")
OTHER = post(body(submit_at=END - 5))
TOKEN = "tøken of a closed set-up"
PADDED = body()[:-1] + b" " * (20 << 10) + b"}"
"""A valid body that is processed as a large one."""
CHUNKED = "Transfer-Encoding: chunked"
EXPECT = "Expect: 100-continue"


def check_fails(error: Exception) -> Callable[[Wallets], None]:
    """Make validation return or raise this."""

    def change(wallets: Wallets) -> None:
        wallets.checks.error = error

    return change


def check_returns(invalid: InvalidShare) -> Callable[[Wallets], None]:
    """Make validation return this."""

    def change(wallets: Wallets) -> None:
        wallets.checks.invalid = invalid

    return change


def store_fails(error: Exception) -> Callable[[Wallets], None]:
    """Make the store return or raise this."""

    def change(wallets: Wallets) -> None:
        wallets.store.error = error

    return change


def paused(wallets: Wallets) -> None:
    wallets.pause = PauseCause.NO_NODE_IN_SYNC.reason()


def starting(wallets: Wallets) -> None:
    wallets.ready = False


def behind(wallets: Wallets) -> None:
    wallets.chain.leaves.clear()


def foreign_leaf(wallets: Wallets) -> None:
    wallets.chain.leaves[(ROUND_ID, POSITION)] = bytes(32)


def round_over(wallets: Wallets) -> None:
    wallets.chain.rounds[ROUND_ID] = make_round(RoundStatus.TALLYING)


def closed_by_another_host(wallets: Wallets) -> None:
    wallets.store.over = True


def line(text: str, *headers: str) -> bytes:
    """A valid share with another request line."""
    return post(body(), *headers, line=text)


REFUSALS = [
    Story(f"refused with {status}", [GOOD], [status], check_fails(ShareRefused(status, "no", field="submit_at")))
    for status in (400, 401, 404, 408, 409, 413, 422, 429, 500, 503)
]
ERRORS = [
    Story("an error of the server's own", [GOOD], [503], store_fails(StoreError("no"))),
    Story("a full disk", [GOOD], [503], store_fails(StoreFull("no"))),
    Story("an internal error", [GOOD], [500], store_fails(ZeroDivisionError())),
    Story("an internal error, and then others", [GOOD, BAD, GOOD], [500, 400, 500], store_fails(ZeroDivisionError())),
    Story("an exception of another kind", [GOOD], [409], check_fails(HTTPException(409, "no", {"X-Odd": "one"}))),
    Story("an exception with the status's own text", [GOOD], [405], check_fails(HTTPException(405))),
    Story("a field that is wrong, late", [GOOD], [400], check_fails(WireError("submit_at", "is wrong"))),
    Story("a client said to be gone", [GOOD], [400], check_fails(ClientDisconnect())),
    Story("a point that is none", [GOOD], [400], check_returns(InvalidShare("enc_share.c2", "identity"))),
    Story("paused", [GOOD], [503], paused),
    Story("paused, and a body that is none", [BAD, GOOD], [400, 503], paused),
    Story("starting", [head(line=f"GET {STATUS} HTTP/1.1"), GOOD], [503, 200], starting),
    Story("a node that is behind", [GOOD], [429], behind),
    Story("another leaf", [GOOD], [400], foreign_leaf),
    Story("a round that is over", [GOOD], [400], round_over),
    Story("a round that another host closed", [GOOD], [400], closed_by_another_host),
]
BODIES = [
    Story("queued", [GOOD], [200]),
    Story("queued, and twice a duplicate", [GOOD, GOOD, OTHER], [200, 200, 200]),
    Story("no JSON", [BAD], [400]),
    Story("a field that is wrong", [post(body(proposal_id="1"))], [400]),
    Story("too late", [post(body(submit_at=END + 1))], [400]),
    Story("an empty body", [post()], [400]),
    Story("no body", [head()], [400]),
    Story("a body in pieces", [GOOD[:-900], GOOD[-900:-1], GOOD[-1:]], [200]),
    Story("a head in pieces", [GOOD[:9], GOOD[9:60], GOOD[60:]], [200]),
    Story("a large body", [post(PADDED)], [200]),
    Story("a large body, and then a small one", [post(PADDED), GOOD], [200, 200]),
    Story("large bodies that cost more than there is", [post(PADDED), GOOD], [200, 429], settings={"burst": 1}),
    Story("a large body that is refused", [post(PADDED[:-1])], [400]),
    Story("large bodies beyond the budget", [post(PADDED)], [429], settings={"budget": 1000}),
    Story("a body in chunks", [head(CHUNKED) + chunked(body())], [200]),
    Story("a body in chunks that come late", [head(CHUNKED), chunked(body()[:90], body()[90:])], [200]),
    Story("chunks that are none", [head(CHUNKED), b"no number\r\n"], []),
    Story("too large", [post(b" " * (LONGEST + 1))], [413]),
    Story("too large in chunks", [head(CHUNKED) + chunked(*[b" " * LONGEST] * 2)], [413]),
    Story("asked whether to go on", [post(b"", EXPECT, size=len(body())), body()], [100, 200]),
    Story("asked, and sent all the same", [post(body(), EXPECT)], [100, 200]),
    Story("asked, and it is too large", [post(b"", EXPECT, size=LONGEST + 1)], [413]),
    Story("asked, without the token", [post(b"", EXPECT, size=100)], [401], settings={"token": TOKEN}),
    Story("too slow", [GOOD[:-9]], [408]),
    Story("gone in the midst of it", [GOOD[:-9]], [], hangs_up=True),
    Story("gone before the answer", [GOOD], [], hangs_up=True),
    Story("gone before the refusal", [BAD], [], hangs_up=True),
]
REQUESTS = [
    Story("GET", [head(line=f"GET {SHARES} HTTP/1.1")], [405]),
    Story("HEAD", [head(line=f"HEAD {SHARES} HTTP/1.1")], [405]),
    Story("a preflight", [head("Origin: null", line=f"OPTIONS {SHARES} HTTP/1.1")], [204]),
    Story("PUT", [line(f"PUT {SHARES} HTTP/1.1")], [405]),
    Story("a slash too many", [line(f"POST {SHARES}/ HTTP/1.1")], [404]),
    Story("two slashes", [line(f"POST /{SHARES} HTTP/1.1")], [404]),
    Story("a query", [line(f"POST {SHARES}?wallet=1&x HTTP/1.1")], [200]),
    Story("a path with escapes", [line(f"POST {SHARES[:-1]}%73 HTTP/1.1")], [200]),
    Story("a path with a line's end", [line(f"POST {SHARES}%0A HTTP/1.1")], [200]),
    Story("a path in capitals", [line(f"POST {SHARES.upper()} HTTP/1.1")], [404]),
    Story("a whole address", [line(f"POST http://helper{SHARES} HTTP/1.1")], [200]),
    Story("HTTP/1.0", [line(f"POST {SHARES} HTTP/1.0")], [200]),
    Story("the last of its connection", [post(body(), "Connection: close")], [200]),
    Story("a refusal that is the last", [post(b"{", "Connection: close")], [400]),
    Story("an upgrade", [post(body(), "Connection: Upgrade", "Upgrade: websocket")], [200]),
    Story("two at once", [GOOD + OTHER], [200, 200]),
    Story("five at once", [GOOD + BAD + OTHER + head(line=f"GET {STATUS} HTTP/1.1") + GOOD], [200, 400, 200, 200, 200]),
    Story("a name that is given", [post(body(), "X-Request-Id: proxy-0123.4567:89_a")], [200]),
    Story("a name that is given to a refusal", [post(b"{", "X-Request-Id: proxy-0123.4567:89_a")], [400]),
    Story("odd headers", [post(body(), "Content-Type: text/ÿ", "X-Odd:", "x-odd: 2", "Origin: null")], [200]),
    Story("a length that contradicts", [post(body(), "Content-Length: 7")], [400]),
    Story("no HTTP", [b"\x16\x03\x01 hello\r\n\r\n"], [400]),
]
TOKENS = [
    Story(name, [post(body(), *headers)], [status], settings={"token": TOKEN})
    for name, headers, status in (
        ("no token", (), 401),
        ("a wrong token", ("X-Helper-Token: wrong",), 401),
        ("the token", (f"X-Helper-Token: {TOKEN.encode().decode('latin-1')}",), 200),
        ("the token in small letters", (f"x-helper-token: {TOKEN.encode().decode('latin-1')}",), 200),
        ("the token, first", (f"X-Helper-Token: {TOKEN.encode().decode('latin-1')}", "X-Helper-Token: wrong"), 200),
        ("the token, second", ("X-Helper-Token: wrong", f"X-Helper-Token: {TOKEN.encode().decode('latin-1')}"), 401),
    )
]
PROXY = {"burst": 2, "trusted": [ip_network("127.0.0.0/8")]}
HOME, FOREIGN = "X-Forwarded-For: 192.0.2.1", "X-Forwarded-For: 203.0.113.9"
LIMITS = [
    Story("good ones cost nothing", [GOOD] * 4, [200] * 4, settings={"burst": 1}),
    Story("refused until nothing is left", [BAD, GOOD, BAD, GOOD], [400, 200, 400, 429], settings={"burst": 2}),
    Story("come again costs nothing", [GOOD] * 3, [429] * 3, behind, settings={"burst": 1}),
    Story("our own errors cost nothing", [GOOD] * 3, [500] * 3, store_fails(KeyError()), settings={"burst": 1}),
    Story("all at once", [BAD * 3 + GOOD], [400, 400, 429, 429], settings={"burst": 2}),
    Story(
        "clients behind a proxy",
        [post(b"{", FOREIGN), post(b"{", FOREIGN), post(body(), FOREIGN), post(body(), HOME)],
        [400, 400, 429, 200],
        settings=PROXY,
    ),
    Story("somebody who claims to be another", [BAD, post(body(), HOME)], [400, 429], settings={"burst": 1}),
    Story("without the token", [GOOD, GOOD], [401, 429], settings={"burst": 1, "token": TOKEN}),
]
STORIES = [*BODIES, *REFUSALS, *ERRORS, *REQUESTS, *TOKENS, *LIMITS]


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
async def test_fast_path_behaves_as_regular_route(story: Story) -> None:
    layers = await play(story, lane=False)
    assert layers.statuses == list(story.statuses), "the story is what it says"
    assert await play(story, lane=True) == layers


async def test_fast_path_counts_each_outcome_once() -> None:
    story = Story("of each kind", [GOOD, GOOD, BAD, head(line=f"GET {SHARES} HTTP/1.1")], [200, 200, 400, 405])
    counted = {"post_queued": 1, "post_duplicate": 1, "post_refused": 1}
    for lane in (False, True):
        seen = await play(story, lane=lane)
        assert (seen.statuses, seen.counts, seen.kept) == (story.statuses, counted, 1)
