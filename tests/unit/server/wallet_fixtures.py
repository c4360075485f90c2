"""The wallet application with fake dependencies, and a client without a socket."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import httpx

from helper.ingest.admission import AdmissionController
from helper.ingest.validator import Checks, ShareValidator
from helper.server.wallet_routes import WalletApi, create_wallet_edge
from helper.store.store import Store
from tests.support.edge_client import create_edge_client
from tests.unit.ingest.admission_fixtures import FakeChain, FakeChecks, FakeClock, FakeStore

SHARES_PATH = "/shielded-vote/v1/shares"
STATUS_PATH = "/shielded-vote/v1/status"
QUEUE_STATUS_PATH = "/shielded-vote/v1/queue-status"


class WalletApp:
    """An application with its dependencies.

    Args:
        queue: an open store, None for a fake one.
        leaves: leaves of the trees by round and position, None for the one that fake checks accept.
        chain: the chain, None for one that is moved by hand.
        native: native checks instead of fake ones.
        settings: those of `WalletApi` and `create_wallet_edge`.
    """

    def __init__(
        self,
        queue: Store | None = None,
        leaves: dict[tuple[bytes, int], bytes] | None = None,
        native: Checks | None = None,
        chain: FakeChain | None = None,
        **settings: Any,
    ) -> None:
        self.chain = chain or (FakeChain(FakeClock()) if leaves is None else FakeChain(FakeClock(), leaves=leaves))
        self.clock = self.chain.clock
        self.store = FakeStore()
        self.checks = FakeChecks()
        self.is_ready = True
        self.pause_reason: str | None = None
        store = self.store if queue is None else queue
        self.intake = AdmissionController(
            store=store,
            rounds=self.chain.registry,
            trees=self.chain.trees,
            validator=ShareValidator(native or self.checks),
            clock=self.clock,
            wake=lambda _due: None,
            get_pause_reason=lambda: self.pause_reason,
            get_round_pause_reason=lambda _: None,
        )
        own = {each.name: settings.pop(each.name) for each in fields(WalletApi) if each.name in settings}
        self.api = WalletApi(admission=self.intake, is_ready=lambda: self.is_ready, **own)
        self.edge = create_wallet_edge(self.api, **settings)

    def create_client(self) -> httpx.AsyncClient:
        return create_edge_client(self.edge)


def no_route_text(response: httpx.Response) -> str:
    """Return the text of a 404 or 405 of the wallet API; asserts that it has only the field `error`."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    return str(body["error"])


def error_text(response: httpx.Response) -> str:
    """Return the text of an error; asserts the documented JSON shape."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"status", "error"}
    assert body["status"] == "error"
    assert isinstance(body["error"], str)
    return str(body["error"])
