"""What one client may have refused: a bucket of tokens for each, and the layer around the application that asks it.

A refused request costs its client a token, a good one costs nothing: a flood of rubbish empties the bucket of who sends
it, and sixteen shares posted at once empty none. A posted share that is larger than any real one costs a token for each
further 16 KiB, also where it is taken (`helper.server.routes.wallet.Taking`). With an empty bucket a client is answered
429, before anything of a body is read, and told when the next token is there. Nothing of this is logged or written
anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helper.clock import Clock
from helper.server.client_address import Network, client_of, is_trusted
from helper.server.middleware import error_response

BURST: Final = 800
"""Refused requests that a client may have at once."""
PER_SECOND: Final = 50.0
"""Tokens that come back each second."""
MAX_CLIENTS: Final = 1 << 16
"""Clients that are remembered: some 10 MB."""
_KEPT: Final = 0.9
"""The share of them that is left when room is made, so that it is not made again for each newcomer."""

_ADMITTED: Final = "svote-helper.admitted"
_CLIENT: Final = "svote-helper.client"
"""The key of a request's scope under which its client is stored once it is known."""
"""The key of a request's scope under which it is noted that its client had a token left when it came."""
_SPARED: Final = "svote-helper.spared"
"""The key of a request's scope under which it is noted that its refusal costs nothing."""

_ROUNDING: Final = 1e-6
"""Seconds that sums of times may be off."""


class TokenBuckets:
    """A bucket of tokens for each client; the time is a parameter (seconds of a clock that never jumps back).

    A bucket is one number, the time at which it will be full again; who has no number has a full one.

    Args:
        burst: tokens of a full bucket.
        per_second: tokens that come back each second.
        clients: how many are remembered. Beyond it full buckets are forgotten, then those whose client
            was refused longest ago.
    """

    def __init__(self, burst: int = BURST, per_second: float = PER_SECOND, clients: int = MAX_CLIENTS) -> None:
        self._refill = 1 / per_second
        self._patience = (burst - 1) / per_second
        self._clients = clients
        self._full_at: dict[bytes, float] = {}  # in the order in which they last paid

    def __len__(self) -> int:
        """How many clients are remembered."""
        return len(self._full_at)

    def wait(self, client: bytes, now: float) -> float:
        """Seconds until this client has a token; 0 when it has one."""
        missing = self._full_at.get(client, now) - now - self._patience
        return missing if missing > _ROUNDING else 0.0

    def pay(self, client: bytes, now: float, tokens: int = 1) -> None:
        """Take tokens, also those that are not there yet: requests under way at once may owe some."""
        full_at = self._full_at.pop(client, now)
        self._full_at[client] = max(full_at, now) + tokens * self._refill
        if len(self._full_at) > self._clients:
            self._make_room(now)

    def _make_room(self, now: float) -> None:
        kept = [(client, full_at) for client, full_at in self._full_at.items() if full_at > now]
        self._full_at = dict(kept[-max(1, int(self._clients * _KEPT)) :])


class RefusalLimiter:
    """Who may still ask.

    Args:
        clock: the time.
        burst: see `TokenBuckets`.
        per_second: see `TokenBuckets`.
        trusted: the networks of proxies that are believed when they say whom they speak for.

    Attributes:
        refusals: how often each status from 400 on was answered, to whomever.
    """

    def __init__(
        self, clock: Clock, *, burst: int = BURST, per_second: float = PER_SECOND, trusted: Sequence[Network] = ()
    ) -> None:
        self._clock = clock
        self._buckets = TokenBuckets(burst, per_second)
        self._trusted = tuple(trusted)
        self.refusals: Counter[int] = Counter()

    def client(self, scope: Scope) -> bytes | None:
        """Who sends a request; None for nobody, who has no limits."""
        if _CLIENT not in scope:
            peer = scope.get("client")
            scope[_CLIENT] = client_of(peer[0] if peer else None, scope["headers"], self._trusted)
        client: bytes | None = scope[_CLIENT]
        return client

    def admits(self, scope: Scope) -> bool:
        """Whether the client of a request has a token left; where it has, that holds for the whole request."""
        client = self.client(scope)
        admitted = client is None or self.wait(client) <= 0
        if admitted:
            scope[_ADMITTED] = True
        return admitted

    def wait(self, client: bytes) -> float:
        """Seconds until this client may ask again, 0 for now."""
        return self._buckets.wait(client, self._clock.monotonic())

    def pay(self, client: bytes, tokens: int = 1) -> None:
        """Charge a client: one token for a refused request, others for what a request costs."""
        self._buckets.pay(client, self._clock.monotonic(), tokens)

    def refused(self, status: int) -> None:
        """Something was answered with this status, whether or not it costs anybody anything."""
        self.refusals[int(status)] += 1

    def who(self, peer: str | None) -> bytes | None:
        """Who opens a connection; a trusted proxy opens it for many, and does not pay for any of them."""
        return None if is_trusted(peer, self._trusted) else client_of(peer, (), ())


class RateLimitMiddleware:
    """The application, for clients with a token left."""

    def __init__(self, app: ASGIApp, limits: RefusalLimiter) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it unread."""
        client = self._limits.client(scope)
        if client is not None and _ADMITTED not in scope and (wait := self._limits.wait(client)) > 0:
            self._limits.refused(429)
            await _too_many(ceil(wait))(scope, receive, send)
            return

        async def watch(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._limits.refused(message["status"])
                if client is not None and costs(message["status"]) and _SPARED not in scope:
                    self._limits.pay(client)
            await send(message)

        await self._app(scope, receive, watch)


def exempt_from_charge(scope: Scope) -> None:
    """Let this request's answer cost its client nothing: it was refused in the ordinary course of things."""
    scope[_SPARED] = True


def costs(status: int) -> bool:
    """Whether an answer costs its client a token: it was the client's doing, and not that it came too early."""
    return 400 <= status < 500 and status != 429


def _too_many(seconds: int) -> ASGIApp:
    message = f"too many refused requests, come again in {seconds} s"
    return error_response(429, message, {"Retry-After": str(seconds)})
