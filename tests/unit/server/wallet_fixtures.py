"""The wallets' application with fake dependencies, and a client without a socket."""

from __future__ import annotations

from typing import Any

import httpx

from helper.core.pause import PauseReason
from helper.ingest.admission import AdmissionController
from helper.ingest.validator import ShareValidator
from helper.server.application import create_app
from helper.server.routes.wallet import WalletView
from tests.unit.ingest.admission_fixtures import FakeChain, FakeChecks, FakeClock, FakeStore

SHARES = "/shielded-vote/v1/shares"
STATUS = "/shielded-vote/v1/status"
QUEUE_STATUS = "/shielded-vote/v1/queue-status"


class Wallets:
    """An application with its dependencies."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.chain = FakeChain(self.clock)
        self.store = FakeStore()
        self.checks = FakeChecks()
        self.ready = True
        self.pause: PauseReason | None = None
        intake = AdmissionController(
            store=self.store,
            rounds=self.chain.registry,
            trees=self.chain.trees,
            checker=ShareValidator(self.checks),
            clock=self.clock,
            wake=lambda _due: None,
            paused=lambda: self.pause,
            round_paused=lambda _: None,
        )
        self.view = WalletView(
            intake=intake,
            store=self.store,
            rounds=self.chain.registry,
            trees=self.chain.trees,
            ready=lambda: self.ready,
            paused=lambda: self.pause,
        )
        self.app = create_app(self.view, **settings)

    def client(self) -> httpx.AsyncClient:
        """Create a client of this application."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://helper")


def is_error(response: httpx.Response) -> str:
    """Return the text of an error; asserts the documented JSON shape."""
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert set(answer) == {"status", "error"}
    assert answer["status"] == "error"
    assert isinstance(answer["error"], str)
    return str(answer["error"])
