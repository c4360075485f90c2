"""Validators with keys, and fake nodes that know some of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import AsyncMock

import httpx
from starlette.types import Message, Receive, Scope, Send

from admin import account_keys
from admin.api_models import AuditResponse, ChainFacts, UiConfig
from admin.config_refresh import ConfigFetcher
from admin.onboarding import AdminService
from admin.registration_request import RegistrationRequest
from helper.chain.chain_data import OptionTotal, Round, RoundList
from helper.chain.node_pool import ReadOnlyNodePool
from helper.chain.rest_client import ChainClient, parse_round, parse_rounds, parse_totals
from helper.core.text_forms import Network
from helper.errors import ChainResponseError, ChainUnavailable
from helper.server.edge import REQUEST_EXTENSION, Edge, json_application
from tests.support.clock import FakeClock
from tests.support.edge_client import create_edge_client

T = TypeVar("T")
NOW = 1_795_268_000
KEY = bytes(range(1, 33))


def sign_registration(key: bytes = KEY, *, url: str = "https://helper.example.org", **changed: Any) -> dict[str, Any]:
    """Sign a registration as a browser does; `changed` fields are replaced before signing."""
    signer, _, _ = account_keys.sign_data(b"", key)
    claim = RegistrationRequest(
        **{"operator_address": signer, "url": url, "moniker": "node", "timestamp": NOW, **changed}
    )
    _, pub_key, signature = account_keys.sign_data(claim.signed_text(), key)
    return {
        "operator_address": claim.operator_address,
        "url": claim.url,
        "moniker": claim.moniker,
        "timestamp": claim.timestamp,
        "signature": base64.b64encode(signature).decode(),
        "pub_key": base64.b64encode(pub_key).decode(),
    }


class FakeNodes:
    """Fake nodes: staking records, rounds, totals, and outages."""

    def __init__(self) -> None:
        self.validators: dict[str, str] = {}
        self.is_unreachable = False
        self.does_other_disagree = False
        self.queried_addresses: list[str] = []
        self.listed: list[dict[str, Any]] = []
        self.totals_by_round: dict[bytes, list[dict[str, Any]]] = {}
        self.lagging_rounds: set[bytes] = set()
        """Rounds listed as finalized by one node but not yet finalized on the next node queried."""
        self.listing_calls = 0
        self.queried_totals: list[bytes] = []
        self.max_concurrent = 0
        self._concurrent = 0

    async def rounds(self) -> RoundList:
        self.listing_calls += 1
        return parse_rounds({"rounds": self.listed})

    async def round(self, round_id: bytes) -> Round | None:
        name = base64.b64encode(round_id).decode()
        (known,) = [known for known in self.listed if known["vote_round_id"] == name]
        return parse_round({"round": {**known, "status": 2} if round_id in self.lagging_rounds else known})

    async def totals(self, round_id: bytes) -> list[OptionTotal]:
        self.queried_totals.append(round_id)
        self._concurrent += 1
        self.max_concurrent = max(self.max_concurrent, self._concurrent)
        await asyncio.sleep(0)
        self._concurrent -= 1
        if round_id not in self.totals_by_round:
            raise ChainResponseError("no totals")
        return parse_totals({"results": self.totals_by_round[round_id]})

    async def call_enough(self, fn: Callable[[ChainClient], Awaitable[T]]) -> list[T | None] | None:
        result = await self.call(fn)
        return [result, None if self.does_other_disagree else result]

    async def call(self, fn: Callable[[ChainClient], Awaitable[T]]) -> T:
        if self.is_unreachable:
            self.queried_addresses.append("unreachable")
            raise ChainUnavailable("away")
        return await fn(cast(ChainClient, self))

    async def validator_status(self, operator_address: str) -> str | None:
        self.queried_addresses.append(operator_address)
        return self.validators.get(operator_address)


class FakeWeb(httpx.AsyncBaseTransport):
    """Fake web server: responses by URL, for any address of the host."""

    def __init__(self) -> None:
        self.responses: dict[str, httpx.Response | Exception] = {}
        self.requested_urls: list[str] = []
        self.connections: list[tuple[str, str | None]] = []
        self.cookies: list[str | None] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = f"{request.url.scheme}://{request.headers['host']}{request.url.raw_path.decode()}"
        self.requested_urls.append(url)
        self.cookies.append(request.headers.get("cookie"))
        self.connections.append((request.url.host, request.extensions.get("sni_hostname")))
        response = self.responses.get(url, httpx.ConnectError("unknown host"))
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(response.content))


CONFIG_URL = "https://config.example.org/voting.json"


class AdminStack:
    def __init__(self, path: Path, *, mode: str = "production", trusted: Sequence[Network] = ()) -> None:
        self.clock = FakeClock(float(NOW))
        self.staking = FakeNodes()
        self.web = FakeWeb()
        self.addresses = {"public.example.org": ["93.184.216.34"], "inner.example.org": ["93.184.216.34", "10.0.0.7"]}
        self.fetcher = ConfigFetcher(CONFIG_URL, transport=self.web, resolve=self._resolve)
        self.audits: dict[bytes, AuditResponse] = {}
        self.shown: dict[bytes, str | None] = {}
        self.service = AdminService(
            db_path=path,
            fetcher=self.fetcher,
            ui=UiConfig(mode=mode),
            chain=cast(ReadOnlyNodePool, self.staking),
            get_chain_facts=lambda: ChainFacts("svote-test", "https://node.example.org", "", "stake"),
            clock=self.clock,
            trusted_networks=trusted,
            get_audit=self._get_audit,
        )
        self.store, self.config = self.service.store, self.service.config
        self.registry, self.rounds = self.service.registry, self.service.rounds
        self._app = json_application(self.service.routes())
        self.client = self.create_client("192.0.2.7")

    def _get_audit(self, round_id: bytes, shown: str | None) -> AuditResponse | None:
        self.shown[round_id] = shown
        return self.audits.get(round_id)

    async def _resolve(self, host: str, _port: int) -> list[str]:
        if host not in self.addresses:
            raise OSError("no such name")
        return self.addresses[host]

    def create_client(self, address: str) -> httpx.AsyncClient:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            await self._app({**scope, "client": (address, 1234)}, receive, send)

        client = create_edge_client(Edge(serve))
        client.base_url = httpx.URL("http://helper/api")
        return client

    async def register_from(self, address: str, body: Any, **headers: str) -> httpx.Response:
        """Register from this address; advances the clock so that no client reaches its rate limit."""
        self.clock.advance(10)
        self.clock.set_wall_clock(-10)
        async with self.create_client(address) as http:
            return await http.post("/register-validator", json=body, headers=headers)

    async def register(self, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.clock.advance(10)  # no client of these tests reaches its rate limit
        self.clock.set_wall_clock(-10)
        return await self.client.post("/register-validator", content=content)

    async def registration_status(self, body: bytes) -> int:
        """Return the status of a registration, bypassing the HTTP client, for thousands of calls."""
        statuses: list[int] = []
        self.clock.advance(10)  # as in `register`
        self.clock.set_wall_clock(-10)

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        path = "/api/register-validator"
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
        request = SimpleNamespace(is_body_complete=True, body=body, receive=AsyncMock(return_value=(body, False)))
        await self._app({**scope, "extensions": {REQUEST_EXTENSION: request}}, cast("Receive", None), send)
        (status,) = statuses
        return status

    async def fetch_pending(self) -> list[dict[str, Any]]:
        """All pending registrations, after one staking check and an update of the published list."""
        await self.registry.check_staking()
        await self.registry.publish()
        entries: list[dict[str, Any]] = []
        page: str | None = "/pending-validators"
        while page is not None:
            response = await self.client.get(page)
            entries += response.json()
            page = f"/pending-validators{response.links['next']['url']}" if "next" in response.links else None
        return entries


@contextlib.asynccontextmanager
async def open_admin_stack(
    path: Path, *, mode: str = "production", trusted: Sequence[Network] = ()
) -> AsyncIterator[AdminStack]:
    stack = AdminStack(path, mode=mode, trusted=trusted)
    await stack.store.open()
    try:
        await stack.config.restore()
        async with stack.client:
            yield stack
    finally:
        await stack.store.close()
