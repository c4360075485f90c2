"""Listening sockets and the applications on them.

The listener of the wallet API, a TCP port or a unix socket, also serves the admin API, the event stream for operators,
the chain gateway and the page. The control socket serves the operator API. A separate port serves the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import structlog
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from admin.api_models import AuditCheckResponse, AuditResponse, ChainFacts, UiConfig
from admin.config_refresh import ConfigFetcher
from admin.onboarding import AdminService
from admin.round_totals import GetAudit
from admin.url_policy import first_publishable
from helper.chain.chain_data import RoundAuthentication
from helper.chain.gateway_proxy import GatewayProxy
from helper.chain.node_pool import NodePool, ReadOnlyNodePool
from helper.chain.round_registry import RoundRegistry
from helper.clock import Clock
from helper.config.sections import Config
from helper.core.refusals import PauseReason
from helper.errors import HelperError
from helper.observability.queue_snapshot import HelperSnapshot, QueueObserver
from helper.observability.service_state import Check, StatusSource
from helper.observability.stats import Stats
from helper.observability.status_feed import StatusFeed
from helper.operations.archive_reader import AuditResults, open_archive_bucket
from helper.operations.archived_objects import StoredAudit
from helper.operations.operator_actions import OperatorActions
from helper.runtime.supervisor import AuxiliaryTasks
from helper.server.edge import Edge
from helper.server.gateway_routes import Gateway, GatewayLimits
from helper.server.health_routes import METRICS_LIMITS, CheckRunner, create_metrics_app, health_routes
from helper.server.listening import (
    GROUP_MODE,
    Server,
    base_url,
    bind_tcp,
    connection_limits,
    listen_unix,
)
from helper.server.openapi import ApiRoute
from helper.server.operator_routes import create_operator_app, live_rounds
from helper.server.page_routes import events_route, page_route, state_routes
from helper.server.wallet_routes import WalletApi, create_wallet_edge
from helper.store.store import Store

log = structlog.get_logger("helper.app")

MAX_REASON_CHARS: Final = 300
"""Maximum length of a check's reason on the page."""

BUILT_PAGE_DIR = Path(__file__).resolve().parents[2] / "ui_dist"
"""The page that is bundled with the helper."""


class Listeners:
    """The HTTP servers and their applications.

    Args:
        node_pool: the chain's nodes, used by the admin API (staking) and the gateway.
    """

    def __init__(self, config: Config, *, node_pool: NodePool, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._refusals: Counter[int] = Counter()  # by status
        self._read_only_pool = ReadOnlyNodePool(node_pool, timeout=config.chain.timeout_seconds)
        self._audits = _create_audit_results(config, clock)
        self._admin = _create_admin(config, node_pool, self._read_only_pool, clock, self._get_audit)
        self._page = _create_page(config, self._admin)
        self._gateway: Gateway | None = None
        if config.gateway.enable:
            limits = GatewayLimits()
            proxy = GatewayProxy(node_pool, timeout=config.chain.timeout_seconds, connections=limits.max_connections)
            self._gateway = Gateway(proxy, limits=limits)
        self._run_checks: CheckRunner = lambda: [
            Check("chain", None if node_pool.has_usable_node else PauseReason.NO_NODE_IN_SYNC)
        ]
        self._stats = Stats()
        self._read_for_scrape: Callable[[], Awaitable[HelperSnapshot]] = _read_no_queue
        self._feed: StatusFeed | None = None
        self._wallets: WalletApi | None = None
        self._operator_app: ASGIApp | None = None

    def add_queue(
        self,
        wallets: WalletApi | None,
        store: Store,
        round_registry: RoundRegistry,
        *,
        read_status: StatusSource,
        run_checks: CheckRunner,
        stats: Stats,
        operations: OperatorActions,
        tree_size: Callable[[bytes], int],
    ) -> None:
        """Add the wallet API, the operator API and the metrics of the queue.

        Args:
            wallets: None if this host admits no shares.
            store: the queue, for the operator API.
            tree_size: returns the number of known leaves of a round.
        """
        self._run_checks = run_checks
        observer = QueueObserver(store, round_registry, read_status, clock=self._clock)
        self._read_for_scrape, self._stats = observer.read_for_scrape, stats
        self._feed = StatusFeed(observer.read_overview, clock=self._clock)
        self._wallets = wallets
        self._operator_app = create_operator_app(
            store,
            partial(live_rounds, round_registry, tree_size, self.get_round_authentication, self._clock),
            operations=operations,
            service_status=read_status,
            more_routes=[*state_routes(self._feed, observer), *health_routes(run_checks)],
        )

    @cached_property
    def _wallet_edge(self) -> Edge:
        config, feed = self._config, self._feed
        token = config.operator.token
        routes: list[BaseRoute] = [events_route(feed, token, self._clock)] if feed is not None and token else []
        routes += health_routes(self._run_checks)
        if self._gateway is not None:
            routes += self._gateway.routes()
        if self._admin is not None:
            routes += self._admin.routes()
        if self._page is not None:
            routes.append(self._page)  # the last one, because it matches every path
        return create_wallet_edge(
            self._wallets,
            refusals=self._refusals,
            more_routes=routes,
            trace_clock=self._clock if config.server.trace_requests else None,
        )

    @property
    def auxiliary_tasks(self) -> AuxiliaryTasks:
        """Background tasks of the applications, by name."""
        return {
            **({} if self._admin is None else self._admin.tasks),
            **({} if self._audits is None else {"audit results": self._audits.run}),
            **({} if self._feed is None else {"feed": self._feed.run}),
        }

    def get_round_authentication(self, round_id: bytes) -> RoundAuthentication:
        """Return whether the published voting configuration authenticates a round."""
        return RoundAuthentication.UNKNOWN if self._admin is None else self._admin.config.get_authentication(round_id)

    @contextlib.asynccontextmanager
    async def open(
        self, on_started: Callable[[str], None], wallet_socket: socket.socket | None = None
    ) -> AsyncIterator[Sequence[asyncio.Task[None]]]:
        """Listen and serve until the last request is complete.

        Args:
            on_started: called with the base URL of the wallet API once the sockets listen.
            wallet_socket: the socket of the wallet API, if it is already open.

        Yields:
            The tasks of the servers.

        Raises:
            HelperError: an address cannot be bound, `wallet_socket` is not the one in the settings, or the registration
                database cannot be opened.
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._read_only_pool.aclose)
            if self._admin is not None:
                await stack.enter_async_context(self._admin.open_store())
            if self._gateway is not None:
                stack.push_async_callback(self._gateway.aclose)
            wallets = stack.enter_context(self._open_wallet_listener(wallet_socket))
            servers = [(Server(self._wallet_edge, trusted_networks=self._config.trusted_networks), wallets)]
            if self._operator_app is not None:
                control = stack.enter_context(listen_unix(self._config.socket_path))
                servers.append((Server(Edge(self._operator_app), connection_limits(evicts=False)), control))
            if self._config.metrics.enable:
                servers.append((self._metrics_server(), stack.enter_context(self._bind_metrics_listener())))
            tasks = [asyncio.create_task(server.serve([sock]), name="server") for server, sock in servers]
            on_started(base_url(wallets))
            try:
                yield tasks
            finally:
                if self._feed is not None:
                    self._feed.close()
                for server, _ in servers:
                    server.stop()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _open_wallet_listener(self, inherited: socket.socket | None) -> AbstractContextManager[socket.socket]:
        """The socket of the wallet API. With `[server] unix_socket`, no other address is used, even if inherited."""
        settings, path = self._config.helper, self._config.server.unix_socket
        if inherited is not None:
            if path and (inherited.family != socket.AF_UNIX or inherited.getsockname() != path):
                raise HelperError(
                    f"the service manager listens on {base_url(inherited)}, but [server] unix_socket is {path}",
                    advice="Disable the socket unit svote-helper.socket, or remove [server] unix_socket.",
                )
            return contextlib.closing(inherited)
        if path:
            return listen_unix(
                Path(path), name="socket of the wallet API", setting="[server] unix_socket", mode=GROUP_MODE
            )
        return contextlib.closing(bind_tcp(settings.host, settings.port))

    def _get_audit(self, round_id: bytes, shown: str | None) -> AuditResponse | None:
        """The audit of a round. One that passed belongs to no other result than the one that it has checked."""
        stored = None if self._audits is None else self._audits.get(round_id)
        if stored is None or (stored.verdict == "passed" and (shown is None or stored.result != shown)):
            return None
        return _audit_response(stored)

    def _metrics_server(self) -> Server:
        # Imported here, so that hosts without metrics do not load the library.
        from helper.observability.metrics import Metrics  # noqa: PLC0415

        metrics = Metrics(self._stats, self._read_for_scrape, refusals=self._refusals, clock=self._clock)
        return Server(Edge(create_metrics_app(metrics, self._run_checks)), METRICS_LIMITS)

    def _bind_metrics_listener(self) -> contextlib.closing[socket.socket]:
        settings = self._config.metrics
        listener = bind_tcp(settings.host, settings.port, section="metrics")
        log.info("metrics_listening", url=f"{base_url(listener)}/metrics")
        return contextlib.closing(listener)


async def _read_no_queue() -> HelperSnapshot:
    """What the metrics of a host without a queue show."""
    return HelperSnapshot()


def published_addresses(config: Config) -> tuple[str, str]:
    """Return the chain's REST and RPC URLs that `/api/chain` publishes; "" if there is none."""
    production = config.admin.mode == "production"
    return (
        config.ui.chain_rest or first_publishable(config.chain_endpoints, production=production),
        config.ui.chain_rpc or first_publishable([rpc for _, rpc in config.chain_nodes], production=production),
    )


def page_directory(config: Config) -> Path:
    """Return the directory of the page: as set, or the bundled one."""
    return Path(config.ui.dist_path) if config.ui.dist_path else BUILT_PAGE_DIR


def _create_page(config: Config, admin: AdminService | None) -> ApiRoute | None:
    if not config.ui.enable:
        return None
    directory = page_directory(config)
    if admin is None:
        return page_route(directory)
    return page_route(directory, connect_to=lambda: admin.config.origins)


def _create_audit_results(config: Config, clock: Clock) -> AuditResults | None:
    """The results of audits for the page; None without a page or an archive."""
    if not config.archive.place or not config.archive.audit or config.admin.disable:
        return None
    bucket = open_archive_bucket(config, clock)
    return AuditResults(bucket, clock=clock, interval_seconds=config.archive.check_seconds)


def _audit_response(stored: StoredAudit) -> AuditResponse:
    return {
        "at": stored.at,
        "verdict": stored.verdict,
        "passed": sum(check.verdict == "passed" for check in stored.checks),
        "others": [
            AuditCheckResponse(id=check.id, verdict=check.verdict, why=check.why[:MAX_REASON_CHARS])
            for check in stored.checks
            if check.verdict != "passed"
        ],
    }


def _create_admin(
    config: Config, node_pool: NodePool, read_only_pool: ReadOnlyNodePool, clock: Clock, get_audit: GetAudit
) -> AdminService | None:
    if config.admin.disable:
        return None
    ui = config.ui
    rest, rpc = published_addresses(config)
    return AdminService(
        db_path=config.admin_db_path,
        fetcher=ConfigFetcher(config.admin.config_url),
        ui=UiConfig(config.admin.mode, ui.dev_pir_controls, ui.precomputed_base_url),
        chain=read_only_pool,
        get_chain_facts=lambda: ChainFacts(node_pool.chain_id, rest, rpc, ui.chain_denom),
        clock=clock,
        trusted_networks=config.trusted_networks,
        get_audit=get_audit,
    )
