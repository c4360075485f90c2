"""Validators with keys, and nodes that know some of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from starlette.types import Message

from admin import adr036
from admin.api import AdminRoutes
from admin.registration import RegistrationRequest
from admin.registry import Registry
from admin.rounds import RoundsView
from admin.schemas import ChainFacts, UiConfig
from admin.store import AdminStore
from admin.voting_config import VotingConfig
from helper.chain.models import Round, parse_round
from helper.chain.rest_client import ChainClient
from helper.chain.round_listing import ListedRound, Total, parse_listing, parse_totals
from helper.errors import ChainAnswerError, ChainUnavailable
from helper.server.client_address import Network
from tests.support.clock import FakeClock

T = TypeVar("T")
NOW = 1_795_268_000
KEY = bytes(range(1, 33))


def signed(key: bytes = KEY, *, url: str = "https://helper.example.org", **changed: Any) -> dict[str, Any]:
    """A registration as a browser sends it; `changed` fields are changed before it is signed."""
    signer, _, _ = adr036.sign(b"", key)
    claim = RegistrationRequest(
        **{"operator_address": signer, "url": url, "moniker": "node", "timestamp": NOW, **changed}
    )
    _, pub_key, signature = adr036.sign(claim.signed_text(), key)
    return {
        "operator_address": claim.operator_address,
        "url": claim.url,
        "moniker": claim.moniker,
        "timestamp": claim.timestamp,
        "signature": base64.b64encode(signature).decode(),
        "pub_key": base64.b64encode(pub_key).decode(),
    }


class Staking:
    """Takes the nodes' place: who has a staking record, and whether anybody answers."""

    def __init__(self) -> None:
        self.inside: dict[str, str] = {}
        self.away = False
        self.asked: list[str] = []
        self.rounds: list[dict[str, Any]] = []
        self.results: dict[bytes, list[dict[str, Any]]] = {}
        self.behind: set[bytes] = set()
        """Rounds that are listed as finalized by one node, and not finalized yet on the node that is asked next."""
        self.listed = 0
        self.totals_asked: list[bytes] = []
        self.most_at_once = 0
        self._at_once = 0

    async def listing(self) -> list[ListedRound]:
        self.listed += 1
        return parse_listing({"rounds": self.rounds})

    async def round(self, round_id: bytes) -> Round | None:
        name = base64.b64encode(round_id).decode()
        (known,) = [known for known in self.rounds if known["vote_round_id"] == name]
        return parse_round({"round": {**known, "status": 2} if round_id in self.behind else known})

    async def totals(self, round_id: bytes) -> list[Total]:
        self.totals_asked.append(round_id)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0)
        self._at_once -= 1
        if round_id not in self.results:
            raise ChainAnswerError("no totals")
        return parse_totals({"results": self.results[round_id]})

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        if self.away:
            self.asked.append("nobody")
            raise ChainUnavailable("away")
        return await fn(cast(ChainClient, self))

    async def validator(self, operator_address: str) -> str | None:
        self.asked.append(operator_address)
        return self.inside.get(operator_address)


class Web(httpx.AsyncBaseTransport):
    """Takes the network's place: answers by URL, whichever address of its host is asked."""

    def __init__(self) -> None:
        self.pages: dict[str, httpx.Response | Exception] = {}
        self.asked: list[str] = []
        self.connected: list[tuple[str, str | None]] = []
        self.cookies: list[str | None] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = f"{request.url.scheme}://{request.headers['host']}{request.url.raw_path.decode()}"
        self.asked.append(url)
        self.cookies.append(request.headers.get("cookie"))
        self.connected.append((request.url.host, request.extensions.get("sni_hostname")))
        found = self.pages.get(url, httpx.ConnectError("nobody"))
        if isinstance(found, Exception):
            raise found
        return httpx.Response(found.status_code, headers=found.headers, stream=httpx.ByteStream(found.content))


CONFIG_URL = "https://config.example.org/voting.json"


class Desk:
    """The whole admin part over stand-ins, and a client for it."""

    def __init__(self, path: Path, *, mode: str = "production", trusted: Sequence[Network] = ()) -> None:
        self.clock = FakeClock(float(NOW))
        self.store = AdminStore(path)
        self.staking = Staking()
        self.web = Web()
        self.addresses = {"public.example.org": ["93.184.216.34"], "inner.example.org": ["93.184.216.34", "10.0.0.7"]}
        self.registry = Registry(self.store, self.staking, clock=self.clock)
        self.config = VotingConfig(CONFIG_URL, self.store, clock=self.clock, transport=self.web, resolve=self._resolve)
        self.rounds = RoundsView(self.staking, clock=self.clock)
        routes = AdminRoutes(
            self.registry,
            self.config,
            self.rounds,
            UiConfig(mode=mode),
            chain=lambda: ChainFacts("svote-test", "https://node.example.org", "", "stake"),
            clock=self.clock,
            trusted=trusted,
        )
        self._app = routes.app()
        self.http = self.http_from("192.0.2.7")

    async def _resolve(self, host: str, _port: int) -> list[str]:
        if host not in self.addresses:
            raise OSError("no such name")
        return self.addresses[host]

    def http_from(self, address: str) -> httpx.AsyncClient:
        """A client with this address."""
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self._app, client=(address, 1234)), base_url="http://helper"
        )

    async def register_from(self, address: str, body: Any, **headers: str) -> httpx.Response:
        """A registration from this address; time passes, so that no client reaches its rate limit."""
        self.clock.advance(10)
        self.clock.jump(-10)
        async with self.http_from(address) as http:
            return await http.post("/register-validator", json=body, headers=headers)

    async def register(self, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.clock.advance(10)  # so that no client of these tests runs out of registrations
        self.clock.jump(-10)
        return await self.http.post("/register-validator", content=content)

    async def refusal(self, body: bytes) -> int:
        """The status that a registration is answered, without the cost of a client between: for thousands."""
        told: list[int] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": body}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                told.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": "/register-validator", "headers": [], "query_string": b""}
        await self._app(scope, receive, send)
        (status,) = told
        return status

    async def pending(self) -> list[dict[str, Any]]:
        """All pending registrations, after one staking check and an update of the published list."""
        await self.registry.check_staking()
        await self.registry.publish()
        found: list[dict[str, Any]] = []
        page: str | None = "/pending-validators"
        while page is not None:
            answer = await self.http.get(page)
            found += answer.json()
            page = f"/pending-validators{answer.links['next']['url']}" if "next" in answer.links else None
        return found


@contextlib.asynccontextmanager
async def open_desk(path: Path, *, mode: str = "production", trusted: Sequence[Network] = ()) -> AsyncIterator[Desk]:
    """A desk on an open file."""
    desk = Desk(path, mode=mode, trusted=trusted)
    await desk.store.open()
    try:
        await desk.config.restore()
        async with desk.http:
            yield desk
    finally:
        await desk.store.close()
