"""`/livez` and `/readyz`: responses, and parsing of their text."""

from __future__ import annotations

import httpx

from helper.observability.service_state import Check, all_passed, format_checks, parse_checks
from helper.server.edge import Edge, json_application
from helper.server.health_routes import health_routes
from tests.support.edge_client import create_edge_client

PASSING_CHECKS = [Check("store"), Check("chain")]
FAILING_CHECKS = [Check("store"), Check("chain", "no chain node is in sync")]


async def get(checks: list[Check], path: str) -> httpx.Response:
    async with create_edge_client(Edge(json_application(health_routes(lambda: checks)))) as client:
        response = await client.get(path)
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    return response


async def test_livez_responds_ok() -> None:
    response = await get(FAILING_CHECKS, "/livez")
    assert (response.status_code, response.text) == (200, "ok\n")


async def test_readyz_lists_checks_if_verbose_or_failed() -> None:
    assert (await get(PASSING_CHECKS, "/readyz")).text == "ok\n"
    for path in ("/readyz?verbose", "/readyz?verbose=1"):
        response = await get(PASSING_CHECKS, path)
        assert (response.status_code, response.text) == (200, "[+]store ok\n[+]chain ok\nreadyz check passed\n")
    for path in ("/readyz", "/readyz?verbose"):
        response = await get(FAILING_CHECKS, path)
        assert response.status_code == 503
        assert response.text.splitlines() == [
            "[+]store ok",
            "[-]chain failed: no chain node is in sync",
            "readyz check failed",
        ]


def test_readyz_text_round_trips_to_checks() -> None:
    assert parse_checks(format_checks(FAILING_CHECKS)) == FAILING_CHECKS
    assert parse_checks("<html>\n[+]\n[?]x ok\n[-]x ok\n") == [Check("x", "unknown reason")]
    assert all_passed(PASSING_CHECKS)
    assert not all_passed(FAILING_CHECKS)
