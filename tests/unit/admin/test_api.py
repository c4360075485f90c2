"""The routes under /api: shapes, refusals, who waits and who is in."""

from __future__ import annotations

import base64
import json
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin import adr036, voting_config
from admin.registry import AT_ONCE
from admin.store import LIFE
from admin.voting_config import LARGEST, MOST_SERVERS, BadConfigError, PublishedConfig, parse_config
from tests.conftest import RECORDED
from tests.unit.admin.fixtures import CONFIG_URL, KEY, NOW, open_desk, signed

pytestmark = [pytest.mark.anyio, pytest.mark.rule("R16")]

DAY = 24 * 3600
GOOD = {"version": 1, "vote_servers": [{"url": "https://a.example.org", "label": "A"}], "pir_endpoints": [], "new": {}}


async def test_a_signed_registration_waits_for_a_week(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        body = signed(moniker="Höhle <&> node")
        answer = await desk.register(body)
        assert (answer.status_code, answer.json()) == (200, {"status": "pending", "expires_at": NOW + LIFE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert await desk.pending() == [
            {
                "operator_address": body["operator_address"],
                "url": body["url"],
                "moniker": "Höhle <&> node",
                "requested_at": NOW,
                "expires_at": NOW + LIFE,
            }
        ]
        desk.clock.advance(LIFE)
        assert await desk.pending() == []
        assert await desk.store.addresses_after("", 10) == []


async def test_registering_again_replaces_and_keeps_when_it_first_asked(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        first = signed(moniker="first")
        await desk.register(first)
        desk.clock.advance(100)
        answer = await desk.register(signed(moniker="second", url="", timestamp=NOW + 100))
        assert answer.json()["expires_at"] == NOW + 100 + LIFE
        for older in (first, signed(moniker="third", timestamp=NOW + 99), signed(moniker="x", timestamp=NOW + 100)):
            answer = await desk.register(older)
            assert answer.json() == {"status": "pending", "expires_at": NOW + 100 + LIFE}, "a replay changes nothing"
        (waiting,) = await desk.pending()
        assert (waiting["moniker"], waiting["url"], waiting["requested_at"]) == ("second", "", NOW)


async def test_who_is_in_staking_is_registered_and_waits_no_more(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        body = signed()
        await desk.register(body)
        assert len(await desk.pending()) == 1
        operator = adr036.validator_address(body["operator_address"])
        desk.staking.inside[operator] = "BOND_STATUS_UNBONDED"
        assert await desk.pending() == [], "whatever its status"
        answer = await desk.register(signed(timestamp=NOW + 5))
        assert (answer.status_code, answer.json()) == (200, {"status": "registered"})
        assert set(desk.staking.asked) == {operator}


async def test_a_chain_that_is_away_drops_nobody(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.staking.away = True
        body = signed()
        assert (await desk.register(body)).json()["status"] == "pending"
        desk.staking.inside[adr036.validator_address(body["operator_address"])] = "BOND_STATUS_BONDED"
        assert len(await desk.pending()) == 1
        desk.staking.away = False
        assert await desk.pending() == []


async def test_where_no_node_can_say_not_all_who_wait_are_asked_about(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        for number in range(3 * AT_ONCE):
            await desk.register(signed(bytes([number + 1]) * 32))
        desk.staking.away = True
        desk.staking.asked.clear()
        assert len(await desk.pending()) == 3 * AT_ONCE
        assert len(desk.staking.asked) == AT_ONCE
        desk.staking.away = False
        await desk.pending()
        assert len(desk.staking.asked) == 4 * AT_ONCE


async def test_registrations_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "admin.db"
    async with open_desk(path) as desk:
        await desk.register(signed())
    assert path.stat().st_mode & 0o777 == 0o600
    async with open_desk(path) as desk:
        assert len(await desk.pending()) == 1


@pytest.mark.parametrize("field", ["operator_address", "url", "moniker", "timestamp"])
async def test_a_field_that_was_not_signed_is_refused(tmp_path: Path, field: str) -> None:
    other = {"operator_address": adr036.sign(b"", b"\x09" * 32)[0], "url": "", "moniker": "else", "timestamp": NOW + 1}
    async with open_desk(tmp_path / "admin.db") as desk:
        answer = await desk.register({**signed(), field: other[field]})
        assert answer.status_code == 401
        assert set(answer.json()) == {"error"}
        assert await desk.pending() == []


async def test_another_prefix_is_refused(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        _, pub_key, _ = adr036.sign(b"", KEY)
        answer = await desk.register(signed(operator_address=adr036.address_of(pub_key, "cosmos")))
        assert answer.status_code == 401
        assert "sv1" in answer.json()["error"]


async def test_private_places_are_for_development(tmp_path: Path) -> None:
    body = signed(url="http://127.0.0.1:8090")
    async with open_desk(tmp_path / "production.db") as desk:
        answer = await desk.register(body)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith("url: ")
    async with open_desk(tmp_path / "development.db", mode="development") as desk:
        assert (await desk.register(body)).status_code == 200


async def test_a_client_that_registers_without_end_is_told_to_wait(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        answers = [await desk.http.post("/register-validator", content=b"{}") for _ in range(25)]
        assert [answer.status_code for answer in answers] == [400] * 20 + [429] * 5
        wait = int(answers[-1].headers["retry-after"])
        desk.clock.advance(wait)
        assert (await desk.http.post("/register-validator", content=b"{}")).status_code == 400


async def test_what_was_mutated_is_never_taken_and_never_an_error_of_ours(tmp_path: Path) -> None:
    dice = random.Random(5)
    good = json.dumps(signed(), ensure_ascii=False).encode()
    async with open_desk(tmp_path / "admin.db") as desk:
        seen: dict[int, int] = {}
        for _ in range(10_000):
            status = await desk.refusal(mutated(good, dice))
            seen[status] = seen.get(status, 0) + 1
        assert set(seen) == {400, 401}, seen
        assert seen[401] > 1_000, "many are refused for their signature alone"
        assert await desk.pending() == []
        assert await desk.refusal(good) == 200, "the one that they come from is not"


ODD: list[Any] = [None, 0, -1, 2**64, 10**400, "", "A" * 88, [], {}, 1e300, True, "\u202e", "sv1", "https://[::1]"]


def mutated(body: bytes, dice: random.Random) -> bytes:
    """A registration with something changed that the signature is over, or without its form."""
    changed = bytearray(body)
    match dice.randrange(12):  # those that end in arithmetic on the curve are the dear ones: two in twelve
        case 0 | 1 | 2:
            flip(changed, dice)
        case 3 | 4:
            del changed[dice.randrange(len(changed)) :]
        case 5 | 6:
            at = dice.randrange(len(changed))
            changed[at:at] = dice.randbytes(dice.randrange(1, 20))
        case 7 | 8 | 9:
            fields = json.loads(body)
            fields[dice.choice(sorted(fields))] = dice.choice(ODD)
            changed = bytearray(json.dumps(fields).encode())
        case 10:
            fields = json.loads(body)
            name = dice.choice(["signature", "pub_key"])
            proof = bytearray(base64.b64decode(fields[name]))
            flip(proof, dice)
            changed = bytearray(json.dumps({**fields, name: base64.b64encode(proof).decode()}).encode())
        case _:
            fields = json.loads(body)
            name, value = dice.choice([("timestamp", NOW + dice.randrange(1, 300)), ("moniker", f"{dice.random()}")])
            changed = bytearray(json.dumps({**fields, name: value}).encode())
    return b"{}" if same_fields(bytes(changed), body) else bytes(changed)


def flip(changed: bytearray, dice: random.Random) -> None:
    """Turn one bit of it."""
    changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)


def same_fields(one: bytes, other: bytes) -> bool:
    """Whether two bodies say the same: a space more, or base64 with other bits where none count, changes nothing."""
    try:
        first, second = json.loads(one), json.loads(other)
        keys = ("signature", "pub_key")
        decoded = all(base64.b64decode(first[key]) == base64.b64decode(second[key]) for key in keys)
        return decoded and all(first[key] == second[key] for key in second if key not in keys)
    except (ValueError, KeyError, TypeError):
        return False


async def test_the_configuration_is_passed_through_as_published(tmp_path: Path) -> None:
    path = tmp_path / "admin.db"
    published = json.dumps(GOOD, indent=3).encode()
    async with open_desk(path) as desk:
        assert (await desk.http.get("/voting-config")).status_code == 502, "there never was one"
        desk.web.pages[CONFIG_URL] = httpx.Response(200, content=published)
        await desk.config.refresh()
        answer = await desk.http.get("/voting-config")
        assert (answer.status_code, answer.content) == (200, published)
        assert answer.headers["content-type"] == "application/json"
    async with open_desk(path) as desk:
        await desk.config.refresh()
        assert (await desk.http.get("/voting-config")).content == published, "the last good copy survives"


async def test_vote_server_origins_follow_the_configuration_and_survive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "admin.db"
    async with open_desk(path) as desk:
        assert list(desk.config.origins) == []
        desk.web.pages[CONFIG_URL] = httpx.Response(200, content=json.dumps(GOOD).encode())
        await desk.config.refresh()
        assert list(desk.config.origins) == ["https://a.example.org"]
    async with open_desk(path) as desk:
        assert list(desk.config.origins) == ["https://a.example.org"]


def origins_of(urls: list[str]) -> tuple[str, ...]:
    config = {"version": 1, "vote_servers": [{"url": url} for url in urls]}
    return parse_config(json.dumps(config).encode()).origins


@pytest.mark.parametrize(
    ("url", "origins"),
    [
        ("https://a.example.org/path?query", ("https://a.example.org",)),
        ("https://A.example.org:8443", ("https://a.example.org:8443",)),
        ("https://höhle.example.org", ("https://xn--hhle-5qa.example.org",)),
        ("https://user:password@a.example.org", ("https://a.example.org",)),
        ("http://127.0.0.1:8090", ("http://127.0.0.1:8090",)),
        ("http://a.example.org", ()),
        ("https://[2606:4700::1111]", ()),
        ("https://a.example.org; script-src *", ()),
        ("https://*", ()),
        ("https://a.example.org\r\nX: y", ()),
        ("https://", ()),
    ],
)
def test_vote_server_origins_of_a_url_are_safe_in_a_policy(url: str, origins: tuple[str, ...]) -> None:
    assert origins_of([url, url]) == origins


def test_vote_server_origins_of_many_servers_are_bounded() -> None:
    origins = origins_of([f"https://server-{number}.example.org" for number in range(1000)])
    assert 60 < len(origins) < 70
    assert len(" ".join(origins)) <= 2000


def test_vote_server_origins_after_many_unusable_urls_are_not_looked_for() -> None:
    unusable = [f"https://[2606:4700::{number:x}]" for number in range(MOST_SERVERS)]
    assert origins_of([*unusable[1:], "https://a.example.org"]) == ("https://a.example.org",)
    assert origins_of([*unusable, "https://a.example.org"]) == ()
    assert origins_of([f"https://a.example.org/{'x' * 512}", "https://b.example.org"]) == ("https://b.example.org",)


@pytest.mark.parametrize(("name", "servers"), [("production", 10), ("stage", 2)])
def test_parse_config_of_published_configuration_is_accepted(name: str, servers: int) -> None:
    published = (RECORDED.parent / "voting-config" / f"{name}.json").read_bytes()
    config = parse_config(published)
    assert (config.body, len(config.origins)) == (published, servers)


def test_parse_config_of_static_configuration_is_refused() -> None:
    with pytest.raises(BadConfigError):
        parse_config((RECORDED.parent / "voting-config" / "static.json").read_bytes())


async def test_refresh_parses_in_a_thread_and_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def record(body: bytes) -> PublishedConfig:
        threads.append(threading.current_thread())
        return parse_config(body)

    monkeypatch.setattr(voting_config, "parse_config", record)
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.web.pages[CONFIG_URL] = httpx.Response(200, content=json.dumps(GOOD).encode())
        for _ in range(3):
            desk.clock.advance(60)
            await desk.config.refresh()
        assert desk.config.fetched_at == NOW + 180
    async with open_desk(tmp_path / "admin.db") as desk:
        assert desk.config.origins == ("https://a.example.org",)
    assert len(threads) == 2, "once when it was new, once after the restart"
    assert threading.main_thread() not in threads


async def test_refresh_stores_no_cookies(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        cookies = [("set-cookie", f"name-{number}={'x' * 100}; Domain=example.org") for number in range(50)]
        moved = [*cookies, ("location", "https://public.example.org/x")]
        desk.web.pages[CONFIG_URL] = httpx.Response(302, headers=moved)
        desk.web.pages["https://public.example.org/x"] = httpx.Response(
            200, headers=cookies, content=json.dumps(GOOD).encode()
        )
        for _ in range(2):
            await desk.config.refresh()
        assert desk.config.body is not None
        assert len(desk.config._http.cookies.jar) == 0
        assert desk.web.cookies == [None] * 4


async def test_restore_of_damaged_copy_is_ignored(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        await desk.store.keep_config(CONFIG_URL, b'{"version":1,"vote_serv', now=NOW)
    async with open_desk(tmp_path / "admin.db") as desk:
        assert (desk.config.body, desk.config.origins) == (None, ())


BAD_PAGES = {
    "gone": httpx.Response(404),
    "html": httpx.Response(200, content=b"<html>"),
    "no servers": httpx.Response(200, content=b'{"version":1}'),
    "a server without url": httpx.Response(200, content=b'{"version":1,"vote_servers":[{}]}'),
    "a script for a url": httpx.Response(200, content=b'{"version":1,"vote_servers":[{"url":"javascript:alert(1)"}]}'),
    "height": httpx.Response(200, content=b'{"version":1,"vote_servers":[],"snapshot_height":"7"}'),
    "no browser's JSON": httpx.Response(200, content=b'{"version":NaN,"vote_servers":[]}'),
    "too large": httpx.Response(200, content=json.dumps(GOOD).encode() + b" " * LARGEST),
    "broken": httpx.ReadTimeout("slow"),
    "to a private name": httpx.Response(302, headers={"location": "https://node.internal/x"}),
    "to a private address": httpx.Response(302, headers={"location": "https://10.0.0.1/x"}),
    "to a name of a private address": httpx.Response(302, headers={"location": "https://inner.example.org/x"}),
    "to plain http": httpx.Response(302, headers={"location": "http://public.example.org/x"}),
    "to nowhere": httpx.Response(302),
    "to what is no name": httpx.Response(302, headers={"location": "https://xn--.org/"}),
    "to nobody": httpx.Response(302, headers={"location": "https://unknown.example.org/"}),
    "round and round": httpx.Response(302, headers={"location": "https://public.example.org/round"}),
}


@pytest.mark.parametrize("page", list(BAD_PAGES.values()), ids=list(BAD_PAGES))
async def test_a_bad_copy_never_takes_a_good_ones_place(tmp_path: Path, page: httpx.Response | Exception) -> None:
    published = json.dumps(GOOD).encode()
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.web.pages["https://public.example.org/round"] = httpx.Response(
            302, headers={"location": "https://public.example.org/round"}
        )
        desk.web.pages[CONFIG_URL] = httpx.Response(200, content=published)
        await desk.config.refresh()
        desk.web.pages[CONFIG_URL] = page
        await desk.config.refresh()
        assert (await desk.http.get("/voting-config")).content == published
        assert all(("example.org" in url and "inner" not in url) for url in desk.web.asked), "nobody private was asked"


async def test_a_redirect_to_a_public_place_is_followed(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        desk.web.pages[CONFIG_URL] = httpx.Response(302, headers={"location": "https://public.example.org/x"})
        desk.web.pages["https://public.example.org/x"] = httpx.Response(200, content=json.dumps(GOOD).encode())
        await desk.config.refresh()
        assert (await desk.http.get("/voting-config")).json() == GOOD
        # to the very address that was looked at: asked again, the name might mean one of a private network
        assert desk.web.connected == [("config.example.org", None), ("93.184.216.34", "public.example.org")]


async def test_the_page_is_told_its_mode(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        answer = await desk.http.get("/ui-config")
        assert answer.json() == {"mode": "production", "dev_pir_controls": False, "precomputed_base_url": ""}
        assert answer.headers["cache-control"] == "no-store"


async def test_preflights_wrong_methods_and_unknown_paths(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        preflight = await desk.http.options("/register-validator", headers={"Origin": "https://x.org"})
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-methods"] == "GET, POST, OPTIONS"
        assert (await desk.http.get("/register-validator")).json() == {"error": "method not allowed"}
        assert (await desk.http.get("/nothing")).json() == {"error": "no such path"}
        too_large = await desk.http.post("/register-validator", content=b"x" * (1 << 20))
        assert (too_large.status_code, set(too_large.json())) == (413, {"error"})


async def test_a_browser_wallet_is_told_of_the_chain(tmp_path: Path) -> None:
    async with open_desk(tmp_path / "admin.db") as desk:
        assert (await desk.http.get("/chain")).json() == {
            "chain_id": "svote-test",
            "rest": "https://node.example.org",
            "rpc": "",
            "denom": "stake",
            "bech32_prefix": "sv",
        }
