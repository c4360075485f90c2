"""Rate limits on refused requests, for helpers that limit by address: token buckets and their middleware.

With `[server] limit_by_address`, a refused request consumes a token; an accepted one is free. A flood of invalid
requests thus empties the client's bucket, whereas sixteen shares posted together consume none. A posted share that is
larger than any real share consumes a token per additional 16 KiB, even if it is accepted (`ShareSubmission`). A client
with an empty bucket is refused (`Situation.TOO_MANY_REFUSALS`) before its request body is read. Clients and buckets are
not logged or stored.

By default there are no clients and no buckets: many wallets share the address of a Tor exit or of a mobile network, and
a connection of a proxy carries the requests of many wallets. Refusals are only counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from helper.clock import Clock
from helper.core.refusals import Situation
from helper.server.client_address import Network, identify_client, is_trusted_proxy
from helper.server.middleware import refusal_response

BURST_TOKENS: Final = 800
"""Tokens of a full bucket."""
TOKENS_PER_SECOND: Final = 50.0
"""Tokens refilled per second."""
MAX_CLIENTS: Final = 1 << 16
"""Maximum number of buckets; about 10 MB."""
_RETAINED_FRACTION: Final = 0.9
"""Fraction of the buckets that an eviction retains, so that not every new client causes an eviction."""

_ADMITTED_KEY: Final = "svote-helper.admitted"
"""Scope key: whether the client had a token when the request arrived."""
_CLIENT_KEY: Final = "svote-helper.client"
"""Scope key: the client, once identified."""
_EXEMPT_KEY: Final = "svote-helper.exempt"
"""Scope key: whether the refusal costs no token."""

_ROUNDING_SECONDS: Final = 1e-6
"""Rounding error of sums of times, in seconds."""


class TokenBuckets:
    """A token bucket for each client. The time is a parameter, in seconds of a monotonic clock.

    A bucket is stored as the time at which it will be full again; a client without an entry has a full bucket.

    Args:
        burst: tokens of a full bucket.
        per_second: tokens refilled per second.
        max_clients: maximum number of buckets. Above it, full buckets are evicted, then those whose client was charged
            longest ago.
    """

    def __init__(
        self, burst: int = BURST_TOKENS, per_second: float = TOKENS_PER_SECOND, max_clients: int = MAX_CLIENTS
    ) -> None:
        self._seconds_per_token = 1 / per_second
        self._last_token_refill = (burst - 1) / per_second  # a bucket needs longer than this only if it is empty
        self._max_clients = max_clients
        self._full_at: dict[bytes, float] = {}  # in order of the latest charge

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._full_at)

    def wait_seconds(self, client: bytes, now: float) -> float:
        """Seconds until this client has a token; 0 if it has one."""
        missing = self._full_at.get(client, now) - now - self._last_token_refill
        return missing if missing > _ROUNDING_SECONDS else 0.0

    def charge(self, client: bytes, now: float, tokens: int = 1) -> None:
        """Take tokens. The balance may become negative, because a client may have several concurrent requests."""
        full_at = self._full_at.pop(client, now)
        self._full_at[client] = max(full_at, now) + tokens * self._seconds_per_token
        if len(self._full_at) > self._max_clients:
            self._evict_buckets(now)

    def _evict_buckets(self, now: float) -> None:
        retained = [(client, full_at) for client, full_at in self._full_at.items() if full_at > now]
        self._full_at = dict(retained[-max(1, int(self._max_clients * _RETAINED_FRACTION)) :])


class RefusalLimiter:
    """Identifies clients, charges them for refusals and counts refusals.

    Args:
        clock: source of monotonic time.
        burst: see `TokenBuckets`.
        per_second: see `TokenBuckets`.
        by_address: whether clients are identified, by their addresses; otherwise forwarding headers are not read.
        trusted_networks: networks of proxies, which forward requests of many clients.

    Attributes:
        by_address: as given.
        refusals: number of responses by status, from 400 on.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        burst: int = BURST_TOKENS,
        per_second: float = TOKENS_PER_SECOND,
        by_address: bool = True,
        trusted_networks: Sequence[Network] = (),
    ) -> None:
        self.by_address = by_address
        self._clock = clock
        self._buckets = TokenBuckets(burst, per_second)
        self._trusted_networks = tuple(trusted_networks)
        self.refusals: Counter[int] = Counter()

    def identify_request(self, scope: Scope) -> bytes | None:
        """The client of a request; None if it has no limits."""
        if not self.by_address:
            return None
        if _CLIENT_KEY not in scope:
            peer = scope.get("client")
            scope[_CLIENT_KEY] = identify_client(peer[0] if peer else None, scope["headers"], self._trusted_networks)
        client: bytes | None = scope[_CLIENT_KEY]
        return client

    def admit_request(self, scope: Scope) -> bool:
        """Whether the client of a request has a token. A positive result is valid until the request ends."""
        client = self.identify_request(scope)
        admitted = client is None or self.wait_seconds(client) <= 0
        if admitted:
            scope[_ADMITTED_KEY] = True
        return admitted

    def wait_seconds(self, client: bytes) -> float:
        """Seconds until this client may send a request; 0 if it may now."""
        return self._buckets.wait_seconds(client, self._clock.monotonic())

    def charge(self, client: bytes, tokens: int = 1) -> None:
        """Take tokens from a client's bucket."""
        self._buckets.charge(client, self._clock.monotonic(), tokens)

    def count_refusal(self, status: int) -> None:
        """Count a refusal with this status, whether or not it costs a token."""
        self.refusals[int(status)] += 1

    def is_trusted_proxy(self, peer_address: str | None) -> bool:
        """Whether a connection comes from a trusted proxy."""
        return is_trusted_proxy(peer_address, self._trusted_networks)

    def identify_connection(self, peer_address: str | None) -> bytes | None:
        """The client that opens a connection; None if it has no limits, as a trusted proxy and on a unix socket."""
        if not self.by_address or self.is_trusted_proxy(peer_address):
            return None
        return identify_client(peer_address, (), ())


class RateLimitMiddleware:
    """Refuses requests of clients without a token; charges clients for refused requests."""

    def __init__(self, app: ASGIApp, limiter: RefusalLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it without reading its body."""
        client = self._limiter.identify_request(scope)
        if client is not None and _ADMITTED_KEY not in scope and (wait := self._limiter.wait_seconds(client)) > 0:
            seconds = ceil(wait)
            response = refusal_response(scope, Situation.TOO_MANY_REFUSALS, seconds, wait_seconds=seconds)
            self._limiter.count_refusal(response.status_code)
            await response(scope, receive, send)
            return

        async def send_and_charge(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._limiter.count_refusal(message["status"])
                if client is not None and costs_token(message["status"]) and _EXEMPT_KEY not in scope:
                    self._limiter.charge(client)
            await send(message)

        await self._app(scope, receive, send_and_charge)


def exempt_from_charge(scope: Scope) -> None:
    """Exempt this request's refusal from the charge: it is expected in normal operation."""
    scope[_EXEMPT_KEY] = True


def costs_token(status: int) -> bool:
    """Whether a status costs a token: client errors do, except 429."""
    return 400 <= status < 500 and status != 429
