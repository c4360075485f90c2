"""Everything that listens, and what stands behind it beside the queue: the wallets' port with the admin API, the
operators' events, the chain's own routes and the page on it; the control socket; the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from admin.about import ChainFacts, UiConfig
from admin.desk import AdminDesk
from helper.api.app import described, make_app, wrapped
from helper.api.events import events_route, overview_routes
from helper.api.gateway import AT_ONCE, Gateway
from helper.api.health import Checks, health_routes
from helper.api.limits import RefusalLimits
from helper.api.operator import make_operator_app
from helper.api.page import Page
from helper.api.wallet import WalletView
from helper.chain.failover import Endpoints
from helper.chain.onlooker import Onlooker
from helper.chain.passage import Passage
from helper.clock import Clock
from helper.config import Config
from helper.rounds import RoundBook
from helper.server import Server, base_url, bind_tcp, control_limits, make_server, unix_listener
from helper.store.base import Queue
from helper.telemetry.checks import Check
from helper.telemetry.feed import Feed
from helper.telemetry.reading import Facts, Figures, ObservedStore, Reading
from helper.telemetry.stats import Stats

log = structlog.get_logger("helper.doors")

BUILT_PAGE = Path(__file__).resolve().parent.parent / "ui_dist"
"""The page that comes along."""


class QueueStore(Queue, ObservedStore, Protocol):
    """What operators may look at."""


class Doors:
    """What is served, and where.

    Args:
        config: the settings.
        endpoints: the chain's nodes, which the admin part asks about staking and the gateway passes requests to.
        clock: the time.
    """

    def __init__(self, config: Config, *, endpoints: Endpoints, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._limits = RefusalLimits(
            clock,
            burst=config.helper.refused_burst,
            per_second=config.helper.refused_per_second,
            trusted=config.trusted_networks,
        )
        self._page = _page(config)
        self._onlooker = Onlooker(endpoints, timeout=config.chain.timeout_seconds)
        self._desk = _desk(config, endpoints, self._onlooker, clock)
        self._gateway = self._make_gateway(endpoints) if config.gateway.enable else None
        self._checks: Checks = lambda: [Check("chain", None if endpoints.usable else "no node is in step")]
        self._stats = Stats()
        self._read: Callable[[], Awaitable[Figures]] = self._refusals_alone
        self._feed: Feed | None = None
        self._wallets: ASGIApp = wrapped(described([], self._more()), self._limits)
        self._operators: ASGIApp | None = None

    def join_queue(
        self,
        view: WalletView | None,
        store: QueueStore,
        rounds: RoundBook,
        *,
        facts: Facts,
        checks: Checks,
        stats: Stats,
        operators: Sequence[BaseRoute] = (),
    ) -> None:
        """Serve the queue too: to wallets, to operators, and its figures.

        Args:
            view: what wallets may ask of; None where no share is taken.
            store: what operators may look at.
            rounds: the rounds known.
            facts: what only the running service knows.
            checks: looks at all that must be well.
            stats: what the service counts.
            operators: routes for operators alone.
        """
        self._checks = checks
        reading = Reading(store, rounds, facts, refusals=self._limits.refusals, clock=self._clock)
        self._read, self._stats = reading.figures, stats
        self._feed = Feed(reading.overview, clock=self._clock, name=secrets.token_hex(4))
        settings = self._config.helper
        others = [events_route(self._feed, self._config.operator.token), *self._more()]
        if view is None:
            token = self._config.operator.token
            self._wallets = wrapped(described([], others, operator_token=token), self._limits)
        else:
            self._wallets = make_app(
                view,
                api_token=settings.api_token,
                expose_queue_status=settings.expose_queue_status,
                limits=self._limits,
                more=others,
                operator_token=self._config.operator.token,
            )
        more = [*operators, *overview_routes(self._feed, reading.overview), *health_routes(checks)]
        self._operators = make_operator_app(store, facts, more=more)

    @property
    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What has to run for ever behind the doors, by name."""
        found: dict[str, Coroutine[Any, Any, None]] = {}
        if self._desk is not None:
            found["admin desk"] = self._desk.run()
        if self._feed is not None:
            found["feed"] = self._feed.run()
        return found

    @contextlib.asynccontextmanager
    async def open(
        self, started: Callable[[str], None], listener: socket.socket | None = None
    ) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
        """All of it, from listening to the end of the last request; yields the servers' tasks.

        Args:
            started: called with the wallets' base URL once the sockets listen.
            listener: the wallets' socket, where it is open already.

        Raises:
            HelperError: an address cannot be had, or the registrations' file cannot be opened.
        """
        settings = self._config.helper
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._onlooker.aclose)
            if self._desk is not None:
                await stack.enter_async_context(self._desk.opened())
            if self._gateway is not None:
                stack.push_async_callback(self._gateway.aclose)
            wallets = stack.enter_context(contextlib.closing(listener or bind_tcp(settings.host, settings.port)))
            servers: list[tuple[Server, Any]] = [(make_server(self._wallets, door=self._limits), wallets)]
            if self._operators is not None:
                control = stack.enter_context(unix_listener(self._config.socket_path))
                servers.append((make_server(self._operators, control_limits()), control))
            if self._config.metrics.enable:
                servers.append((self._metrics_server(), stack.enter_context(self._metrics_listener())))
            tasks = [asyncio.create_task(server.serve(sockets=[sock]), name="server") for server, sock in servers]
            started(base_url(wallets))
            try:
                yield tasks
            finally:
                if self._feed is not None:
                    self._feed.close()
                for server, _ in servers:
                    server.should_exit = True
                await asyncio.gather(*tasks, return_exceptions=True)

    def _more(self) -> list[BaseRoute]:
        """The routes beside the queue's; the page is the last, as it answers every path."""
        routes: list[BaseRoute] = [*health_routes(self._checks)]
        if self._gateway is not None:
            routes += self._gateway.routes()
        if self._desk is not None:
            routes.append(self._desk.mount)
        if self._page is not None:
            routes.append(self._page.route())
        return routes

    def _metrics_server(self) -> Server:
        # loaded here: who does not want figures need not wait for their library
        from helper.api.metrics import LIMITS, make_metrics_app  # noqa: PLC0415
        from helper.telemetry.metrics import Metrics  # noqa: PLC0415

        metrics = Metrics(self._stats, self._read, clock=self._clock)
        return make_server(make_metrics_app(metrics, self._checks), LIMITS)

    def _metrics_listener(self) -> contextlib.closing[socket.socket]:
        settings = self._config.metrics
        listener = bind_tcp(settings.host, settings.port, section="metrics")
        log.info("figures are served", url=f"{base_url(listener)}/metrics")
        return contextlib.closing(listener)

    async def _refusals_alone(self) -> Figures:
        """The figures where there is no queue."""
        return Figures(now=self._clock.now(), refusals=self._limits.refusals)

    def _make_gateway(self, endpoints: Endpoints) -> Gateway:
        passage = Passage(endpoints, timeout=self._config.chain.timeout_seconds, connections=AT_ONCE)
        return Gateway(passage, client=self._limits.client)


def _page(config: Config) -> Page | None:
    if not config.ui.enable:
        return None
    return Page(Path(config.ui.dist_path) if config.ui.dist_path else BUILT_PAGE)


def _desk(config: Config, endpoints: Endpoints, onlooker: Onlooker, clock: Clock) -> AdminDesk | None:
    if config.admin.disable:
        return None
    ui = config.ui
    rpc = next((url for url in config.chain_rpc if url), "")

    def facts() -> ChainFacts:
        return ChainFacts(
            chain_id=endpoints.chain_id,
            rest=ui.chain_rest or config.chain_endpoints[0],
            rpc=ui.chain_rpc or rpc,
            denom=ui.chain_denom,
        )

    return AdminDesk(
        db_path=config.admin_db_path,
        config_url=config.admin.config_url,
        ui=UiConfig(config.admin.mode, ui.dev_pir_controls, ui.precomputed_base_url),
        chain=onlooker,
        facts=facts,
        clock=clock,
        trusted=config.trusted_networks,
    )
