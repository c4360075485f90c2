"""Validator onboarding: its composition, and its routes, which the service mounts under `/api`.

Errors are `{"error": "…"}`.
"""

from __future__ import annotations

import contextlib
import re
from base64 import b64encode
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any, Final

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount

from admin import api_models
from admin.admin_database import AdminStore, RegistryFullError
from admin.api_models import ChainFacts, UiConfig
from admin.config_refresh import ConfigFetcher, VotingConfig
from admin.pending_registrations import RegistrationRegistry
from admin.published_config import AUTH_VERSION, InvalidConfigError, parse_entry
from admin.registration_limit import RegistrationLimit, client_network
from admin.registration_request import MAX_REGISTRATION_BYTES, RegistrationError, SignatureRefusedError
from admin.round_totals import GetAudit, RoundsView
from helper.chain.chain_data import RoundAuthentication
from helper.chain.node_pool import ReadOnlyNodePool
from helper.clock import Clock
from helper.core.refusals import TemporaryRefusal, find_refusal
from helper.core.text_forms import Network
from helper.errors import ClientLeft, StoreError
from helper.runtime.supervisor import AuxiliaryTasks
from helper.server.body_reader import BodyReader
from helper.server.edge import JsonResponse, error_response, http_error_text, log_refusal, request_id_of, request_of
from helper.server.openapi import ApiRoute

log = structlog.get_logger("helper.admin")

_NO_CONFIG: Final = "no voting configuration has been fetched yet"
_NO_STORE: Final = {"Cache-Control": "no-store"}
_STATUS_TEXTS: Final = {404: "no such path", 405: "method not allowed"}


class AdminRoutes:
    """Routes of validator onboarding.

    Args:
        registry: pending registrations.
        config: the published configuration.
        rounds: the chain's rounds.
        ui: configuration of the page.
        chain: returns the chain's data for wallets; called on each request.
        clock: the time.
        trusted_networks: networks of proxies whose forwarding headers are trusted.
    """

    def __init__(
        self,
        registry: RegistrationRegistry,
        config: VotingConfig,
        rounds: RoundsView,
        ui: UiConfig,
        *,
        get_chain_facts: Callable[[], ChainFacts],
        clock: Clock,
        trusted_networks: Sequence[Network] = (),
    ) -> None:
        self._limit = RegistrationLimit()
        self._clock = clock
        self._trusted_networks = tuple(trusted_networks)
        self._registry = registry
        self._config = config
        self._rounds = rounds
        self._ui = ui
        self._get_chain_facts = get_chain_facts
        self._body_reader = BodyReader(max_bytes=MAX_REGISTRATION_BYTES)

    def app(self) -> Starlette:
        """Return the ASGI application, for mounting under `/api`."""
        routes = self.routes()
        handlers: dict[Any, Any] = {
            HTTPException: _handle_http_exception,
            StoreError: _handle_store_error,
            TemporaryRefusal: _handle_temporary_refusal,
            ClientLeft: _handle_disconnect,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    def routes(self) -> list[ApiRoute]:
        """Return the routes with their OpenAPI descriptions."""
        return [
            ApiRoute("/voting-config", self.voting_config, "GET", api_models.VOTING_CONFIG),
            ApiRoute("/round-authentication", self.round_authentication, "GET", api_models.ROUND_AUTHENTICATION),
            ApiRoute("/sign-config-entry", self.sign_config_entry, "POST", api_models.SIGN_CONFIG_ENTRY),
            ApiRoute("/register-validator", self.register, "POST", api_models.REGISTER),
            ApiRoute("/pending-validators", self.pending, "GET", api_models.PENDING),
            ApiRoute("/ui-config", self.ui_config, "GET", api_models.UI_CONFIG),
            ApiRoute("/chain", self.chain, "GET", api_models.CHAIN),
            ApiRoute("/rounds", self.rounds, "GET", api_models.ROUNDS),
        ]

    async def voting_config(self, _request: Request) -> Response:
        """Return the published configuration unchanged; 502 if none has been fetched yet."""
        if self._config.body is None:
            return _error_response(502, _NO_CONFIG)
        return Response(self._config.body, media_type="application/json")

    async def round_authentication(self, _request: Request) -> Response:
        """Return which rounds of the configuration are authenticated; 502 if none has been fetched yet."""
        if self._config.authentication_body is None:
            return _error_response(502, _NO_CONFIG, _NO_STORE)
        return Response(self._config.authentication_body, headers=_NO_STORE, media_type="application/json")

    async def sign_config_entry(self, request: Request) -> Response:
        """Return what a manager signs for an entry of the configuration. Nothing is stored."""
        body = await self._body_reader.read(request_of(request.scope))
        try:
            message = parse_entry(body)
        except InvalidConfigError as error:
            return _error_response(400, str(error))
        return JsonResponse(
            {
                "canonical_payload_b64": b64encode(message).decode(),
                "signed_payload_hash": sha256(message).hexdigest(),
                "auth_version": AUTH_VERSION,
            }
        )

    async def register(self, request: Request) -> Response:
        """Register a validator."""
        peer = None if request.client is None else request.client.host
        network = client_network(peer, request.scope["headers"], self._trusted_networks)
        if (wait := self._limit.take(network, self._clock.monotonic())) > 0:
            return _error_response(429, "too many registrations; retry later", {"Retry-After": str(ceil(wait))})
        body = await self._body_reader.read(request_of(request.scope))
        try:
            result = await self._registry.register(body, production=self._ui.mode == "production", network=network)
        except (RegistrationError, SignatureRefusedError) as error:
            status = 400 if isinstance(error, RegistrationError) else 401
            log_refusal(request_id_of(request), status, str(error))
            return _error_response(status, str(error))
        except RegistryFullError as error:
            return _error_response(429, str(error), {"Retry-After": "3600"})
        if result is None:
            return JsonResponse({"status": "registered"})
        return JsonResponse({"status": "pending", "expires_at": result.expires_at})

    async def pending(self, request: Request) -> Response:
        """Return a page of the pending registrations. The `Link` header points to the next page."""
        number = request.query_params.get("page", "1")
        page = int(number) if re.fullmatch(r"[0-9]{1,6}", number) else 0
        if not 1 <= page <= api_models.MAX_PAGES:
            return _error_response(400, f"page: must be a number from 1 to {api_models.MAX_PAGES}")
        published = self._registry.published
        headers = {**_NO_STORE, "X-Total-Count": str(published.total)}
        if page < len(published.pages):
            headers["Link"] = f'<?page={page + 1}>; rel="next"'
        body = published.pages[page - 1] if page <= len(published.pages) else b"[]"
        return Response(body, headers=headers, media_type="application/json")

    async def chain(self, _request: Request) -> Response:
        """Return the chain's data that a browser wallet needs to add it."""
        return JsonResponse(asdict(self._get_chain_facts()), headers=_NO_STORE)

    async def rounds(self, _request: Request) -> Response:
        """Return the chain's rounds as last read; 502 if none have been read yet."""
        if self._rounds.body is None:
            return _error_response(502, "no rounds have been read from the chain yet", _NO_STORE)
        return Response(self._rounds.body, headers=_NO_STORE, media_type="application/json")

    async def ui_config(self, _request: Request) -> Response:
        """Return the page's configuration."""
        return JsonResponse(asdict(self._ui), headers=_NO_STORE)


def _error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return error_response(status, message, headers, is_bare=True)


async def _handle_http_exception(request: Request, error: HTTPException) -> Response:
    text = http_error_text(error, _STATUS_TEXTS)
    log_refusal(request_id_of(request), error.status_code, text)
    return _error_response(error.status_code, text, error.headers)


async def _handle_disconnect(_request: Request, _error: ClientLeft) -> Response:
    return _error_response(400, "client disconnected before the end of the request")


async def _handle_store_error(request: Request, error: StoreError) -> Response:
    name = request_id_of(request)
    log.error("registrations_unavailable", error=str(error), advice=error.advice, request_id=name)
    return _error_response(503, "registrations cannot be stored now; retry later")


async def _handle_temporary_refusal(_request: Request, error: TemporaryRefusal) -> Response:
    refusal = find_refusal(error.situation, *error.details, names_attempt=False)
    return _error_response(refusal.status, refusal.text, error.headers)


class AdminService:
    """Registrations, published configuration and rounds.

    Args:
        db_path: database file of the registrations.
        config_url: URL of the published voting configuration, empty for none.
        ui: configuration of the page.
        chain: the nodes, queried for staking records and rounds.
        get_chain_facts: returns the chain's data for browser wallets.
        clock: the time.
        trusted_networks: networks of proxies whose forwarding headers are trusted.
        get_audit: returns the helper's audit of a finalized round.
    """

    def __init__(
        self,
        *,
        db_path: Path,
        config_url: str,
        ui: UiConfig,
        chain: ReadOnlyNodePool,
        get_chain_facts: Callable[[], ChainFacts],
        clock: Clock,
        trusted_networks: Sequence[Network] = (),
        get_audit: GetAudit = lambda *_: None,
    ) -> None:
        self._store = AdminStore(db_path)
        self._config = VotingConfig(config_url, self._store, ConfigFetcher(config_url), clock=clock)
        self._registry = RegistrationRegistry(self._store, chain, clock=clock)
        self._rounds = RoundsView(chain, clock=clock, report_keys=self._config.compare_keys, get_audit=get_audit)
        routes = AdminRoutes(
            self._registry,
            self._config,
            self._rounds,
            ui,
            get_chain_facts=get_chain_facts,
            clock=clock,
            trusted_networks=trusted_networks,
        )
        self.mount = Mount("/api", routes.app())

    @property
    def vote_server_origins(self) -> Sequence[str]:
        """Origins of the published vote servers, which the page connects to."""
        return self._config.origins

    def get_round_authentication(self, round_id: bytes) -> RoundAuthentication:
        """Return whether the published configuration authenticates a round."""
        return self._config.get_authentication(round_id)

    @contextlib.asynccontextmanager
    async def open_store(self) -> AsyncIterator[None]:
        """Open the database file for the duration of the context.

        Raises:
            StoreError: the file cannot be opened.
        """
        await self._store.open()
        try:
            await self._config.restore()
            await self._registry.publish()
            yield
        finally:
            await self._config.aclose()
            await self._store.close()

    @property
    def tasks(self) -> AuxiliaryTasks:
        """Background tasks by name: they fetch the configuration, check registrations and read the rounds."""
        return {
            "voting configuration": self._config.run,
            "registrations": self._registry.run,
            "rounds view": self._rounds.run,
        }
