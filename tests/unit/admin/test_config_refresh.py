"""The voting configuration through a static document: mirrors in order, authentication, the last valid copy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin.config_refresh import FETCH_TIMEOUT_SECONDS, ConfigFetcher
from admin.published_config import InvalidConfigError
from tests.conftest import RECORDED
from tests.unit.admin.fixtures import CONFIG_URL, AdminStack, FakeWeb, open_admin_stack

pytestmark = pytest.mark.rule("R16")

PUBLISHED = RECORDED.parent / "voting-config"
PRODUCTION = (PUBLISHED / "production.json").read_bytes()
OLDER = (PUBLISHED / "production-older.json").read_bytes()
STATIC_1 = (PUBLISHED / "static.json").read_bytes()
STATIC_2 = (PUBLISHED / "static-v2.json").read_bytes()
FIRST, SECOND = json.loads(STATIC_2)["dynamic_config_urls"]
AUTHENTICATED_ROUND = bytes.fromhex("16eef7ebc77e0e04fb1c7329abfcc390f4a0c002964671ebb360914a3e5a3f11")


def ok(body: bytes) -> httpx.Response:
    return httpx.Response(200, content=body)


async def resolve(_host: str, _port: int) -> list[str]:
    return ["93.184.216.34"]


def publish(stack: AdminStack, static: bytes = STATIC_2, **mirrors: httpx.Response | Exception) -> None:
    """Publish the static document, and responses of the mirrors `first` and `second`."""
    stack.addresses |= {FIRST.split("/")[2]: ["93.184.216.34"], SECOND.split("/")[2]: ["93.184.216.35"]}
    stack.web.responses = {CONFIG_URL: ok(static)}
    stack.web.responses |= {{"first": FIRST, "second": SECOND}[name]: response for name, response in mirrors.items()}


async def authentication_of(stack: AdminStack) -> dict[str, Any]:
    response = await stack.client.get("/round-authentication")
    assert (response.status_code, response.headers["cache-control"]) == (200, "no-store")
    body: dict[str, Any] = response.json()
    return body


@pytest.mark.rule("N1", "N2", "Q1")
@pytest.mark.parametrize("static", [STATIC_1, STATIC_2], ids=["version 1", "version 2"])
async def test_voting_config_of_static_document_is_served_unchanged(tmp_path: Path, static: bytes) -> None:
    path = tmp_path / "admin.db"
    async with open_admin_stack(path) as stack:
        for route in ("/voting-config", "/round-authentication"):
            assert (await stack.client.get(route)).status_code == 502, "there is no previous copy"
        assert list(stack.config.origins) == []
        assert stack.config.get_authentication(AUTHENTICATED_ROUND) == "unknown"
        publish(stack, static, first=ok(PRODUCTION))
        await stack.config.refresh()
        response = await stack.client.get("/voting-config")
        assert (response.headers["content-type"], response.content) == ("application/json", PRODUCTION)
        assert len(stack.config.origins) == 10
        assert stack.web.requested_urls == [CONFIG_URL, FIRST]
        before = await authentication_of(stack)
        assert before["trusted_keys"] == ["valargroup", "tachyon", "zodl", "shielded-labs"]
        assert before["rounds"][AUTHENTICATED_ROUND.hex()] == "authenticated"
        assert sorted(before["rounds"].values()) == ["authenticated"] * 7 + ["unsupported_version"]
    async with open_admin_stack(path) as stack:
        assert len(stack.config.origins) == 10
        await stack.config.refresh()
        assert (await stack.client.get("/voting-config")).content == PRODUCTION, "the last valid copy is kept"
        assert await authentication_of(stack) == before
        assert stack.config.get_authentication(AUTHENTICATED_ROUND) == "authenticated"
        assert stack.config.get_authentication(bytes(32)) == "not_listed"


async def test_voting_config_of_dynamic_document_has_no_keys(stack: AdminStack) -> None:
    stack.web.responses[CONFIG_URL] = ok(PRODUCTION)
    await stack.config.refresh()
    assert await authentication_of(stack) == {"trusted_keys": None, "rounds": {}}
    assert stack.config.get_authentication(AUTHENTICATED_ROUND) == "unknown"


UNUSABLE: dict[str, httpx.Response | Exception] = {
    "unreachable": httpx.ConnectError("no route"),
    "broken": httpx.ReadError("reset"),
    "server error": httpx.Response(503),
    "expired": httpx.Response(410),
    "html": httpx.Response(200, content=b"<html>"),
    "another static document": ok(STATIC_1),
    "a redirect to a private network": httpx.Response(302, headers={"location": "https://10.0.0.1/"}),
    "wrong types": ok(b'{"config_version":1,"vote_servers":{}}'),
    "no authenticated round": ok(OLDER),
}


@pytest.mark.rule("N1")
@pytest.mark.parametrize("case", UNUSABLE)
async def test_refresh_after_unusable_mirror_uses_the_next_one(stack: AdminStack, case: str) -> None:
    publish(stack, first=UNUSABLE[case], second=ok(PRODUCTION))
    await stack.config.refresh()
    assert stack.config.body == PRODUCTION
    assert stack.web.requested_urls == [CONFIG_URL, FIRST, SECOND]


async def test_refresh_without_authenticated_round_uses_first_valid_mirror(stack: AdminStack) -> None:
    publish(stack, first=ok(OLDER), second=ok(OLDER + b"\n"))
    await stack.config.refresh()
    assert stack.config.body == OLDER


async def test_fetch_of_unchanged_documents_returns_the_previous_copy(stack: AdminStack) -> None:
    publish(stack, first=ok(PRODUCTION))
    await stack.config.refresh()
    config = await stack.fetcher.fetch(stack.config._config)
    assert config is stack.config._config
    publish(stack, STATIC_1, first=ok(PRODUCTION))
    assert await stack.fetcher.fetch(config) is not config, "the trusted keys may have changed"


BAD_STATIC = {
    "version 1 with a field of version 2": {**json.loads(STATIC_1), "dynamic_config_urls": [FIRST]},
    "duplicate mirrors": {**json.loads(STATIC_2), "dynamic_config_urls": [FIRST, FIRST]},
    "wrong types": {**json.loads(STATIC_2), "trusted_keys": {}},
}


@pytest.mark.rule("N2")
@pytest.mark.parametrize("case", BAD_STATIC)
async def test_refresh_with_invalid_static_document_keeps_valid_copy(stack: AdminStack, case: str) -> None:
    publish(stack, first=ok(PRODUCTION))
    await stack.config.refresh()
    publish(stack, json.dumps(BAD_STATIC[case]).encode(), first=ok(OLDER))
    await stack.config.refresh()
    assert stack.config.body == PRODUCTION
    assert stack.config.get_authentication(AUTHENTICATED_ROUND) == "authenticated"


async def test_fetch_without_usable_mirror_names_each_reason(stack: AdminStack) -> None:
    publish(stack, first=httpx.Response(404), second=httpx.ConnectError("no route"))
    with pytest.raises(InvalidConfigError) as raised:
        await stack.fetcher.fetch()
    assert str(raised.value) == "mirror 1: HTTP 404; mirror 2: fetch failed: ConnectError"


@pytest.mark.rule("N1")
@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("https://10.0.0.1/config.json", "private network"),
        ("https://inner.example.org/config.json", "private network"),
        ("http://public.example.org/config.json", "must begin with https"),
        ("https://user:password@public.example.org/", "contains credentials"),
        ("https://config.example.org:444/config.json", "no such name"),
    ],
)
async def test_fetch_contacts_only_public_mirrors(stack: AdminStack, url: str, text: str) -> None:
    static = json.dumps({**json.loads(STATIC_1), "dynamic_config_url": url}).encode()
    publish(stack, static)
    with pytest.raises(InvalidConfigError, match=f"mirror 1: not fetched: .*{text}"):
        await stack.fetcher.fetch()
    assert stack.web.requested_urls == [CONFIG_URL]


async def test_fetch_accepts_mirror_on_configured_origin_and_uses_checked_address(stack: AdminStack) -> None:
    own = "https://config.example.org/dynamic.json"
    static = json.dumps({**json.loads(STATIC_2), "dynamic_config_urls": [own, FIRST]}).encode()
    publish(stack, static, first=ok(PRODUCTION))
    stack.web.responses[own] = ok(OLDER)
    assert (await stack.fetcher.fetch()).body == PRODUCTION
    assert stack.web.connections == [
        ("config.example.org", None),
        ("config.example.org", None),
        ("93.184.216.34", "voting.valargroup.dev"),
    ]


@pytest.mark.rule("N1")
async def test_fetch_limits_each_document_to_one_mebibyte(stack: AdminStack) -> None:
    largest = PRODUCTION + b" " * (2**20 - len(PRODUCTION))
    publish(stack, STATIC_1, first=ok(largest))
    assert (await stack.fetcher.fetch()).body == largest
    publish(stack, STATIC_1, first=ok(largest + b" "))
    with pytest.raises(InvalidConfigError, match="mirror 1: it is larger than 1048576 bytes"):
        await stack.fetcher.fetch()
    publish(stack, STATIC_1 + b" " * (2**20 + 1 - len(STATIC_1)), first=ok(PRODUCTION))
    with pytest.raises(InvalidConfigError, match=r"^it is larger than 1048576 bytes"):
        await stack.fetcher.fetch()


@pytest.mark.rule("N1")
async def test_fetch_with_checksum_takes_only_that_static_document() -> None:
    web = FakeWeb()
    web.responses = {CONFIG_URL: ok(STATIC_1), FIRST: ok(PRODUCTION)}

    pinned = f"{CONFIG_URL}?checksum=sha256:{sha256(STATIC_1).hexdigest()}"
    fetcher = ConfigFetcher(pinned, transport=web, resolve=resolve)
    config = await fetcher.fetch()
    assert config.body == PRODUCTION
    assert web.requested_urls == [CONFIG_URL, FIRST], "the checksum is not sent"
    web.responses[CONFIG_URL] = ok(STATIC_1 + b"\n")
    with pytest.raises(InvalidConfigError, match="its SHA-256 is not the checksum in the URL"):
        await fetcher.fetch(config)
    assert web.requested_urls == [CONFIG_URL, FIRST, CONFIG_URL], "its mirrors are not contacted"
    await fetcher.aclose()


class DrippingWeb(FakeWeb):
    """A web server whose first mirror sends a byte per second of the event loop's time, which is `seconds` ahead."""

    seconds = 0.0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if self.requested_urls[-1] != FIRST:
            return response

        async def drip() -> AsyncIterator[bytes]:
            for byte in PRODUCTION:
                self.seconds += 1
                await asyncio.sleep(0)
                yield bytes([byte])

        return httpx.Response(200, content=drip())


@pytest.mark.rule("N1")
async def test_fetch_from_mirror_that_drips_times_out_and_uses_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    web, loop = DrippingWeb(), asyncio.get_running_loop()
    monkeypatch.setattr(loop, "time", lambda loop_time=loop.time: loop_time() + web.seconds)
    web.responses = {CONFIG_URL: ok(STATIC_2), FIRST: ok(b""), SECOND: ok(PRODUCTION)}

    fetcher = ConfigFetcher(CONFIG_URL, transport=web, resolve=resolve)
    assert (await fetcher.fetch()).body == PRODUCTION
    del web.responses[SECOND]
    with pytest.raises(InvalidConfigError, match=r"^mirror 1: timed out after 30 s; mirror 2: "):
        await fetcher.fetch()
    await fetcher.aclose()
    assert FETCH_TIMEOUT_SECONDS == 30, "as in wallets"
