"""Web page: files, index fallback, and separation from the API."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from helper.errors import ConfigError
from helper.server.edge import Edge, json_application
from helper.server.page_routes import RESERVED, page_route
from tests.support.edge_client import create_edge_client
from tests.unit.server.wallet_fixtures import WalletApp

pytestmark = pytest.mark.rule("R17")


async def status(_request: Request) -> Response:
    return Response(b"the API's own")


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "dist" / "assets").mkdir(parents=True)
    (tmp_path / "dist" / "index.html").write_text("<!doctype html>the page")
    (tmp_path / "dist" / "assets" / "app-1a2b.js").write_text("script")
    (tmp_path / "dist" / "icon.svg").write_text("<svg/>")
    (tmp_path / "secret.txt").write_text("not to be served")
    (tmp_path / "dist" / "way-out").symlink_to(tmp_path / "secret.txt")
    shares = Route("/shielded-vote/v1/shares", status, methods=["POST"])
    app = json_application([Route("/shielded-vote/v1/status", status), shares, page_route(tmp_path / "dist")])
    async with create_edge_client(Edge(app)) as client:
        yield client


async def test_page_serves_files_with_immutable_assets(http: httpx.AsyncClient) -> None:
    script = await http.get("/assets/app-1a2b.js")
    assert (script.text, script.headers["cache-control"]) == ("script", "public, max-age=31536000, immutable")
    assert "javascript" in script.headers["content-type"]
    icon = await http.get("/icon.svg")
    assert (icon.headers["content-type"], icon.headers["cache-control"]) == ("image/svg+xml", "no-cache")


@pytest.mark.parametrize("path", ["/", "/join", "/rounds/7a86", "/nowhere.html", "/%2e%2e/secret.txt", "/way-out"])
async def test_page_serves_index_for_other_paths(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path)
    assert (response.status_code, response.text) == (200, "<!doctype html>the page")
    assert response.headers["cache-control"] == "no-cache"
    assert "script-src 'self'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


async def test_page_connects_to_itself_and_the_given_origins_only(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>the page")
    origins = ["https://a.example.org"]
    edge = Edge(json_application([page_route(tmp_path, connect_to=lambda: origins)]))
    async with create_edge_client(edge) as client:
        assert connect_src(await client.get("/network")) == ["'self'", "https://a.example.org"]
        origins.append("https://b.example.org:8443")
        assert connect_src(await client.get("/")) == ["'self'", *origins]


async def test_page_without_origins_connects_to_itself_only(http: httpx.AsyncClient) -> None:
    assert connect_src(await http.get("/")) == ["'self'"]


def connect_src(response: httpx.Response) -> list[str]:
    directives = [directive.split() for directive in response.headers["content-security-policy"].split(";")]
    ((_, *sources),) = [directive for directive in directives if directive[0] == "connect-src"]
    return sources


async def test_page_missing_asset_is_404(http: httpx.AsyncClient) -> None:
    response = await http.get("/assets/app-old.js")
    assert (response.status_code, response.json()["status"]) == (404, "error")


@pytest.mark.parametrize("reserved", RESERVED)
async def test_page_does_not_serve_api_paths(http: httpx.AsyncClient, reserved: str) -> None:
    for path in (f"/{reserved}", f"/{reserved}/nothing"):
        response = await http.get(path)
        assert (response.status_code, response.headers["content-type"]) == (404, "application/json")
    assert (await http.get("/shielded-vote/v1/status")).text == "the API's own"


@pytest.mark.rule("N5")
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT"])
@pytest.mark.parametrize(
    "path",
    [
        "/shielded-vote",
        "/shielded-vote/",
        "/shielded-vote/v1/status/",
        "/shielded-vote/v1/shares/",
        "/shielded-vote/v1/rounds",
        "/shielded-vote/v1/cast-vote",
        "/shielded-vote/v2/status",
        "http://helper//shielded-vote/v1/nothing",
        "/shielded-vote%2Fv1%2Fnothing",
        "/shielded-vote/%2e%2e/index.html",
        "/shielded-vote/v1/nothing?redirect=/",
    ],
)
async def test_page_and_redirects_are_never_served_below_the_wallet_api(tmp_path: Path, method: str, path: str) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>the page")
    async with WalletApp(more_routes=[page_route(tmp_path)]).create_client() as client:
        response = await client.request(method, path)
    assert response.status_code in {404, 405}
    assert response.headers["content-type"] == "application/json"
    assert b"<" not in response.content


async def test_page_wrong_method_of_api_path_is_405(http: httpx.AsyncClient) -> None:
    response = await http.get("/shielded-vote/v1/shares")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/assets/app-1a2b.js", "/icon.svg", "/join"])
@pytest.mark.parametrize(
    "value",
    [
        "bytes=0-1",
        "bytes=9999-",
        "bytes=5-1",
        "bytes=-0",
        "bytes=",
        "bytes",
        "lines=1-2",
        "bytes=0-0,2-3",
        "bytes=-²",
        "",
    ],
)
async def test_page_range_header_is_ignored(http: httpx.AsyncClient, path: str, value: str) -> None:
    complete = await http.get(path)
    response = await http.get(path, headers=[(b"range", value.encode())])
    assert (response.status_code, response.content) == (200, complete.content)
    assert "content-range" not in response.headers


async def test_page_accepts_only_get(http: httpx.AsyncClient) -> None:
    assert (await http.post("/join")).status_code == 405
    assert (await http.head("/join")).status_code == 200


async def test_page_opens_no_file_for_a_request(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>the page")
    page = page_route(tmp_path)
    (tmp_path / "index.html").unlink()
    async with create_edge_client(Edge(json_application([page]))) as client:
        assert [(await client.get(path)).text for path in ("/", "/join")] == ["<!doctype html>the page"] * 2


def test_page_with_unreadable_file_raises_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    (tmp_path / "index.html").touch()
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*index\.html: Permission denied"):
        page_route(tmp_path)


def test_page_without_index_raises_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index\.html"):
        page_route(tmp_path)
