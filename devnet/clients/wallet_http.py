"""HTTP attempts of a wallet: total time limits, and a log of all POSTs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from devnet.clients.responses import MAX_SHARE_RESPONSE_BYTES, ChainOutcome, ShareOutcome, WalletResponse

PREFIX: Final = "/shielded-vote/v1"
ATTEMPT_HEADER: Final = "X-Vote-Ingress-Attempt-V1"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A logged POST: route, base URL, HTTP status (None: no complete response) and outcome."""

    route: str
    url: str
    status: int | None
    outcome: ShareOutcome | ChainOutcome

    @property
    def is_unknown(self) -> bool:
        """Whether the wallet cannot tell the effect of this attempt."""
        return self.outcome in (ShareOutcome.UNKNOWN, ChainOutcome.UNKNOWN)


class WalletHttp:
    """Makes HTTP attempts.

    Args:
        transport: the connections; None opens one for each attempt, as over Tor.
        silence_seconds: for the response to begin, from the last byte of the request; None for no such limit.
        follows_redirects: whether a redirect is followed; a POST then becomes a GET, as in browsers.
        ends_late_requests: whether a request ends at its time limit, or goes on although nobody waits for it any more.
    """

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        silence_seconds: float | None = None,
        follows_redirects: bool = False,
        ends_late_requests: bool = True,
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, read=silence_seconds)
        self._client = httpx.AsyncClient(
            timeout=timeout, limits=limits, transport=transport, trust_env=False, follow_redirects=follows_redirects
        )
        self._ends_late_requests = ends_late_requests
        self._late: set[asyncio.Task[WalletResponse]] = set()
        self.attempts: list[Attempt] = []

    async def aclose(self) -> None:
        """End all requests, and close the connections."""
        for task in self._late:
            task.cancel()
        await self._client.aclose()

    async def get(
        self,
        url: str,
        path: str,
        seconds: float,
        limit: int = MAX_SHARE_RESPONSE_BYTES,
        headers: Mapping[str, str] | None = None,
    ) -> WalletResponse:
        """Send a GET. `seconds` limit it from its start to the last byte of the response, `limit` its bytes."""
        return await self._exchange("GET", f"{url}{PREFIX}/{path}", seconds, limit, headers=headers)

    async def post(
        self, url: str, route: str, content: bytes, seconds: float, headers: Mapping[str, str]
    ) -> WalletResponse:
        """Send a POST. `seconds` limit how long the wallet waits for the response."""
        target, headers = f"{url}{PREFIX}/{route}", {"Content-Type": "application/json", **headers}
        limit = seconds if self._ends_late_requests else None
        attempt = self._exchange("POST", target, limit, MAX_SHARE_RESPONSE_BYTES, content=content, headers=headers)
        if limit is not None:
            return await attempt
        task = asyncio.ensure_future(attempt)
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        done, _ = await asyncio.wait({task}, timeout=seconds)
        return task.result() if done else WalletResponse(None)

    async def _exchange(
        self, method: str, url: str, seconds: float | None, limit: int, **request: Any
    ) -> WalletResponse:
        was_sent = False

        async def trace(event: str, _: object) -> None:
            nonlocal was_sent
            was_sent = was_sent or event.endswith(".send_request_headers.started")

        try:
            stream = self._client.stream(method, url, extensions={"trace": trace}, **request)
            async with asyncio.timeout(seconds), stream as response:
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > limit:
                        break
        except (httpx.HTTPError, TimeoutError):
            return WalletResponse(None, was_sent=was_sent)
        content = bytes(body) if len(body) <= limit else None
        headers = response.headers
        return WalletResponse(
            response.status_code, headers.get("content-type", ""), content, retry_after=headers.get("retry-after")
        )


def normalize_base_url(text: str) -> str:
    """Normalize a base URL: http or https, with a mount path, without credentials, query and fragment."""
    url = httpx.URL(text)
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ValueError(f"not a base URL: {text}")
    return str(url).rstrip("/")
