"""Nodes of a dev chain as ASGI applications: a REST port and an RPC port each."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from devnet import control, cosmos, rest, rpc, votes
from devnet.faults import FaultRules
from devnet.gojson import GoJsonError
from devnet.lies import Liar
from devnet.network import DevNet
from devnet.request_gate import FaultMiddleware
from devnet.responses import (
    QueryError,
    ResponseError,
    handle_http_error,
    handle_json_error,
    handle_query_error,
    handle_response_error,
)

_TREE = {"latest": "tree-latest", "leaves": "tree-leaves"}
_COSMOS = ("syncing", "blocks", "node_info", "validators")


class Node:
    """One node. All nodes share the chain; each has its own faults and lies."""

    def __init__(self, devnet: DevNet, name: str) -> None:
        self.name = name
        self.faults = FaultRules()
        self.liar = Liar(devnet.chain)
        rest_routes = [*rest.ROUTES, *votes.ROUTES, *cosmos.ROUTES]
        newer_routes = {**rest.ERA_ROUTES, **votes.ERA_ROUTES}
        rest_routes += [route for name, route in newer_routes.items() if name in devnet.era.routes]
        self.rest = self._create_app(devnet, "rest", [*rest_routes, *control.ROUTES])
        self.rpc = self._create_app(devnet, "rpc", rpc.ROUTES)

    def _create_app(self, devnet: DevNet, port: str, routes: list[Route]) -> ASGIApp:
        """Create the application of one port."""
        handlers = {
            ResponseError: handle_response_error,
            QueryError: handle_query_error,
            GoJsonError: handle_json_error,
            HTTPException: handle_http_error,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.state.devnet = devnet
        app.state.faults = self.faults
        app.state.liar = self.liar
        return FaultMiddleware(
            app,
            chain=devnet.chain,
            faults=self.faults,
            liar=self.liar,
            log=devnet.request_log,
            node=self.name,
            port=port,
            era=devnet.era,
            route_of=rest_route_name if port == "rest" else rpc_route_name,
            height_before=devnet.height_before,
            now_ns=devnet.machine_time_ns,
        )


def rest_route_name(path: str) -> str:
    """The name of a REST route: round, rounds, vote-summary, tally, tally-results, tree-latest, tree-leaves,
    tree-height, tx, reveal-share, cast-vote, cast-vote-batch, delegate-vote, delegate-and-cast-vote-batch, readiness,
    syncing, blocks, node_info, validators.
    """
    parts = path.strip("/").split("/")
    if parts[0] == "cosmos":
        return next((name for name in _COSMOS if name in parts), "other")
    kind = parts[2] if len(parts) > 2 else "other"
    return _TREE.get(parts[-1], "tree-height") if kind == "commitment-tree" else kind


def rpc_route_name(path: str) -> str:
    """The name of an RPC route: status, block_results, tx_search, abci_query."""
    return path.strip("/").split("/")[0] or "other"
