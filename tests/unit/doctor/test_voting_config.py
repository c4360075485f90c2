"""The check of the published voting configuration: reachable, lists this helper, names trusted keys."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from admin.config_refresh import ConfigFetcher
from admin.published_config import PublishedConfig, parse_config, parse_static
from helper.doctor import CheckResult, Level
from helper.doctor.publication import MAX_SECONDS, check_voting_config, evaluate_voting_config
from tests.conftest import RECORDED

pytestmark = pytest.mark.anyio

PUBLISHED = RECORDED.parent / "voting-config"
PRODUCTION = (PUBLISHED / "production.json").read_bytes()
STATIC = (PUBLISHED / "static-v2.json").read_bytes()
AUTHENTICATED_ROUND = bytes.fromhex("16eef7ebc77e0e04fb1c7329abfcc390f4a0c002964671ebb360914a3e5a3f11")
PUBLISHED_KEYS = {
    bytes.fromhex(name): base64.b64decode(entry["ea_pk"]) for name, entry in json.loads(PRODUCTION)["rounds"].items()
}
CONFIG_URL = "https://config.example.org/static.json"


async def check(
    *responses: httpx.Response,
    public_url: str = "https://zvote.zfnd.org",
    chain_keys: Mapping[bytes, bytes] | None = None,
) -> dict[str, CheckResult]:
    """Results by subject; each request gets the next response. Nodes without `chain_keys` never respond."""

    async def query_chain_keys() -> Mapping[bytes, bytes]:
        if chain_keys is None:
            await asyncio.Event().wait()
        return chain_keys or {}

    async def resolve(_host: str, _port: int) -> list[str]:
        return ["93.184.216.34"]

    def respond(_request: httpx.Request) -> httpx.Response:
        response = remaining.pop(0)
        if not response.is_stream_consumed:
            return response
        # A transport must return a stream that was not read yet.
        return httpx.Response(response.status_code, stream=httpx.ByteStream(response.content))

    remaining, transport = list(responses), httpx.MockTransport(respond)
    fetcher = ConfigFetcher(CONFIG_URL, transport=transport, resolve=resolve)
    results = await check_voting_config(fetcher, public_url, query_chain_keys)
    assert fetcher._http.is_closed
    return {result.subject: result for result in results}


async def test_check_of_production_passes() -> None:
    documents = (httpx.Response(200, content=STATIC), httpx.Response(200, content=PRODUCTION))
    results = await check(*documents, chain_keys=PUBLISHED_KEYS | {bytes(32): b"k" * 32})
    assert {subject: (result.level, result.message) for subject, result in results.items()} == {
        "voting config": (Level.OK, "reachable, 10 vote servers"),
        "vote servers": (Level.OK, "the voting configuration lists https://zvote.zfnd.org"),
        "round keys": (
            Level.OK,
            "valargroup, tachyon, zodl, shielded-labs; 7 of 8 published rounds are authenticated",
        ),
    }


async def test_check_of_round_with_another_key_on_the_chain_warns() -> None:
    documents = (httpx.Response(200, content=STATIC), httpx.Response(200, content=PRODUCTION))
    results = await check(*documents, chain_keys=PUBLISHED_KEYS | {AUTHENTICATED_ROUND: b"k" * 32})
    result = results["authority keys"]
    assert (result.level, result.message) == (
        Level.WARN,
        "the published key of the election authority differs from the chain's in 1 rounds",
    )
    assert result.facts == {"rounds": [AUTHENTICATED_ROUND.hex()]}


async def test_check_while_nodes_do_not_respond_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = ConfigFetcher.fetch

    async def fetch_until_time_is_up(self: ConfigFetcher) -> PublishedConfig:
        config, loop = await fetch(self), asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda loop_time=loop.time: loop_time() + MAX_SECONDS)
        return config

    monkeypatch.setattr(ConfigFetcher, "fetch", fetch_until_time_is_up)
    documents = (httpx.Response(200, content=STATIC), httpx.Response(200, content=PRODUCTION))
    results = await check(*documents)
    assert results["voting config"].level is Level.OK
    assert "authority keys" not in results


async def test_check_of_unreachable_mirrors_names_reasons() -> None:
    results = await check(httpx.Response(200, content=STATIC), httpx.Response(404), httpx.Response(200, text="<html>"))
    (result,) = results.values()
    assert (result.level, result.message) == (
        Level.WARN,
        "cannot be fetched: mirror 1: HTTP 404; mirror 2: it is not JSON in UTF-8",
    )


async def test_check_of_slow_server_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("helper.doctor.publication.MAX_SECONDS", 0.05)

    async def hang() -> AsyncIterator[bytes]:
        await asyncio.sleep(60)
        yield b""

    (result,) = (await check(httpx.Response(200, content=hang()))).values()
    assert (result.level, result.message) == (Level.WARN, "cannot be fetched: no response within 0.05 s")


@pytest.mark.rule("W12")
@pytest.mark.parametrize(
    ("public_url", "level"),
    [
        ("https://ZVOTE.zfnd.org:443/", Level.OK),
        ("", Level.OK),
        ("https://zvote.zfnd.org/base", Level.WARN),
        ("http://zvote.zfnd.org", Level.WARN),
        ("https://other.example.org", Level.WARN),
        ("https://xn--0.example", Level.WARN),
    ],
)
async def test_check_compares_normalized_urls(public_url: str, level: Level) -> None:
    results = await check(httpx.Response(200, content=PRODUCTION), public_url=public_url, chain_keys={})
    assert results["vote servers"].level is level


def evaluate_keys(config: dict[str, Any], static: dict[str, Any] | None) -> CheckResult:
    parsed = None if static is None else parse_static(json.dumps(static).encode())
    return evaluate_voting_config(parse_config(json.dumps(config).encode(), parsed), "", {})[-1]


def test_check_of_keys_warns_without_keys_or_authenticated_rounds() -> None:
    static, config = json.loads(STATIC), json.loads(PRODUCTION)
    unknown = evaluate_keys(config, None)
    assert (unknown.level, unknown.message) == (Level.WARN, "the keys that sign rounds are not known")
    none = evaluate_keys(config, {**static, "trusted_keys": []})
    assert (none.level, none.message) == (Level.WARN, "the static configuration names no key")
    other = evaluate_keys(config, {**static, "trusted_keys": static["trusted_keys"][1:2]})
    assert (other.level, other.message) == (Level.WARN, "no signature of the 8 published rounds is valid")
    empty = evaluate_keys({**config, "rounds": {}}, static)
    assert empty.level is Level.OK


def test_check_with_unusual_vote_server_url_is_complete() -> None:
    config = parse_config(b'{"version":1,"vote_servers":[{"url":"https://[::1"}]}')
    assert evaluate_voting_config(config, "https://a.example.org", {})[1].level is Level.WARN
