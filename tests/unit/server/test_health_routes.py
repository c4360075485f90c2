"""`/livez` and `/readyz`: responses, and parsing of their text."""

from __future__ import annotations

import httpx
import pytest

from helper.observability.health_checks import Check, from_text, passed, to_text
from helper.server.application import wrapped
from helper.server.routes.health import health_routes

pytestmark = pytest.mark.anyio

WELL = [Check("store"), Check("chain")]
ILL = [Check("store"), Check("chain", "no chain node is in sync")]


async def get(checks: list[Check], path: str) -> httpx.Response:
    app = wrapped(health_routes(lambda: checks))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://helper") as client:
        answer = await client.get(path)
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    return answer


async def test_livez_responds_ok() -> None:
    answer = await get(ILL, "/livez")
    assert (answer.status_code, answer.text) == (200, "ok\n")


async def test_readyz_lists_checks_if_verbose_or_failed() -> None:
    assert (await get(WELL, "/readyz")).text == "ok\n"
    for path in ("/readyz?verbose", "/readyz?verbose=1"):
        answer = await get(WELL, path)
        assert (answer.status_code, answer.text) == (200, "[+]store ok\n[+]chain ok\nreadyz check passed\n")
    for path in ("/readyz", "/readyz?verbose"):
        answer = await get(ILL, path)
        assert answer.status_code == 503
        assert answer.text.splitlines() == [
            "[+]store ok",
            "[-]chain failed: no chain node is in sync",
            "readyz check failed",
        ]


def test_readyz_text_round_trips_to_checks() -> None:
    assert from_text(to_text(ILL)) == ILL
    assert from_text("<html>\n[+]\n[?]x ok\n[-]x ok\n") == [Check("x", "unknown reason")]
    assert passed(WELL)
    assert not passed(ILL)
