"""HTTP attempts of a wallet of library version 5.3.0: total time limits, attempt tokens, and a log of all POSTs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import httpx

from tests.support.wallet_responses import MAX_SHARE_RESPONSE_BYTES, ChainOutcome, ShareOutcome, WalletResponse

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
    """Makes HTTP attempts. It opens a connection for each, as over Tor, and follows no redirect."""

    def __init__(self, transport: httpx.AsyncBaseTransport | None = None) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=None, limits=limits, transport=transport, trust_env=False)
        self.attempts: list[Attempt] = []

    async def aclose(self) -> None:
        await self._client.aclose()

    async def get(self, url: str, path: str, seconds: float, limit: int = MAX_SHARE_RESPONSE_BYTES) -> WalletResponse:
        """Send a GET. `seconds` limit it from its start to the last byte of the response, `limit` its bytes."""
        return await self._exchange("GET", f"{url}{PREFIX}/{path}", seconds, limit)

    async def post(self, url: str, route: str, content: bytes, token: str, seconds: float) -> WalletResponse:
        headers = {"Content-Type": "application/json", ATTEMPT_HEADER: token}
        target = f"{url}{PREFIX}/{route}"
        return await self._exchange("POST", target, seconds, MAX_SHARE_RESPONSE_BYTES, content=content, headers=headers)

    async def _exchange(self, method: str, url: str, seconds: float, limit: int, **request: Any) -> WalletResponse:
        was_sent = False

        async def trace(event: str, _: object) -> None:
            nonlocal was_sent
            was_sent = was_sent or event.endswith(".send_request_headers.started")

        try:
            stream = self._client.stream(method, url, extensions={"trace": trace}, follow_redirects=False, **request)
            async with asyncio.timeout(seconds), stream as response:
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > limit:
                        break
        except (httpx.HTTPError, TimeoutError):
            return WalletResponse(None, was_sent=was_sent)
        content = bytes(body) if len(body) <= limit else None
        return WalletResponse(response.status_code, response.headers.get("content-type", ""), content)


def normalize_base_url(text: str) -> str:
    """Normalize a base URL: http or https, with a mount path, without credentials, query and fragment."""
    url = httpx.URL(text)
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ValueError(f"not a base URL: {text}")
    return str(url).rstrip("/")
