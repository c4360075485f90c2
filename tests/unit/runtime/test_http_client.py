"""HTTP clients: no cookies, and one module that creates them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from helper.runtime.http_client import create_async_client, create_client

REPO_ROOT = Path(__file__).parents[3]
CREATION_PATTERN = re.compile(r"\bhttpx\.(Client|AsyncClient|get|post|put|patch|delete|head|options|request|stream)\(")
"""Expressions that create a client, or use one that httpx creates."""


def respond_with_cookie(request: httpx.Request) -> httpx.Response:
    assert "cookie" not in request.headers
    if request.url.path == "/moved":
        return httpx.Response(302, headers={"location": "/", "set-cookie": "moved=1"})
    return httpx.Response(200, headers=[("set-cookie", f"name-{number}=1; Path=/") for number in range(100)])


@pytest.mark.anyio
async def test_client_ignores_set_cookie() -> None:
    transport = httpx.MockTransport(respond_with_cookie)
    async with create_async_client(timeout=5, transport=transport, base_url="http://node") as http:
        assert [(await http.get(path)).status_code for path in ("/", "/moved", "/")] == [200, 302, 200]
        assert len(http.cookies.jar) == 0
    with create_client(timeout=5, transport=transport, base_url="http://node") as blocking:
        assert [blocking.get(path).status_code for path in ("/", "/moved", "/")] == [200, 302, 200]
        assert len(blocking.cookies.jar) == 0


def test_http_clients_are_created_in_one_module() -> None:
    files = [path for package in ("helper", "admin") for path in (REPO_ROOT / package).rglob("*.py")]
    assert len(files) > 100
    creators = {str(path.relative_to(REPO_ROOT)) for path in files if CREATION_PATTERN.search(path.read_text("utf-8"))}
    assert creators == {"helper/runtime/http_client.py"}
