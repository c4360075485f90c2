"""The routes under /api: response shapes, refusals, pending and approved validators."""

from __future__ import annotations

import base64
import json
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin import account_keys, config_refresh
from admin.admin_database import REGISTRATION_SECONDS
from admin.pending_registrations import MAX_CONCURRENT_QUERIES
from admin.published_config import MAX_SERVERS, PublishedConfig, StaticConfig, parse_config
from admin.registration_request import validator_address
from tests.unit.admin.fixtures import CONFIG_URL, KEY, NOW, AdminStack, open_admin_stack, sign_registration

pytestmark = pytest.mark.rule("R16")

DAY = 24 * 3600
VALID_CONFIG = {
    "version": 1,
    "vote_servers": [{"url": "https://a.example.org", "label": "A"}],
    "pir_endpoints": [],
    "new": {},
}


async def test_register_signed_is_pending_for_a_week(stack: AdminStack) -> None:
    body = sign_registration(moniker="Höhle <&> node")
    response = await stack.register(body)
    assert (response.status_code, response.json()) == (
        200,
        {"status": "pending", "expires_at": NOW + REGISTRATION_SECONDS},
    )
    assert await stack.fetch_pending() == [
        {
            "operator_address": body["operator_address"],
            "url": body["url"],
            "moniker": "Höhle <&> node",
            "requested_at": NOW,
            "expires_at": NOW + REGISTRATION_SECONDS,
        }
    ]
    stack.clock.advance(REGISTRATION_SECONDS)
    assert await stack.fetch_pending() == []
    assert await stack.store.addresses_after("", 10) == []


async def test_register_again_replaces_and_keeps_first_time(stack: AdminStack) -> None:
    first = sign_registration(moniker="first")
    await stack.register(first)
    stack.clock.advance(100)
    response = await stack.register(sign_registration(moniker="second", url="", timestamp=NOW + 100))
    assert response.json()["expires_at"] == NOW + 100 + REGISTRATION_SECONDS
    for older in (
        first,
        sign_registration(moniker="third", timestamp=NOW + 99),
        sign_registration(moniker="x", timestamp=NOW + 100),
    ):
        response = await stack.register(older)
        assert response.json() == {"status": "pending", "expires_at": NOW + 100 + REGISTRATION_SECONDS}, (
            "a replay changes nothing"
        )
    (waiting,) = await stack.fetch_pending()
    assert (waiting["moniker"], waiting["url"], waiting["requested_at"]) == ("second", "", NOW)


async def test_register_bonded_validator_is_not_pending(stack: AdminStack) -> None:
    body = sign_registration()
    await stack.register(body)
    assert len(await stack.fetch_pending()) == 1
    operator = validator_address(body["operator_address"])
    stack.staking.validators[operator] = "BOND_STATUS_UNBONDED"
    assert await stack.fetch_pending() == [], "regardless of its status"
    response = await stack.register(sign_registration(timestamp=NOW + 5))
    assert (response.status_code, response.json()) == (200, {"status": "registered"})
    assert set(stack.staking.queried_addresses) == {operator}


async def test_pending_with_chain_unreachable_keeps_all(stack: AdminStack) -> None:
    stack.staking.is_unreachable = True
    body = sign_registration()
    assert (await stack.register(body)).json()["status"] == "pending"
    stack.staking.validators[validator_address(body["operator_address"])] = "BOND_STATUS_BONDED"
    assert len(await stack.fetch_pending()) == 1
    stack.staking.is_unreachable = False
    assert await stack.fetch_pending() == []


async def test_staking_check_stops_after_unreachable_node(stack: AdminStack) -> None:
    for number in range(3 * MAX_CONCURRENT_QUERIES):
        await stack.register(sign_registration(bytes([number + 1]) * 32))
    stack.staking.is_unreachable = True
    stack.staking.queried_addresses.clear()
    assert len(await stack.fetch_pending()) == 3 * MAX_CONCURRENT_QUERIES
    assert len(stack.staking.queried_addresses) == MAX_CONCURRENT_QUERIES
    stack.staking.is_unreachable = False
    await stack.fetch_pending()
    assert len(stack.staking.queried_addresses) == 4 * MAX_CONCURRENT_QUERIES


async def test_pending_survives_restart(tmp_path: Path) -> None:
    path = tmp_path / "admin.db"
    async with open_admin_stack(path) as stack:
        await stack.register(sign_registration())
    assert path.stat().st_mode & 0o777 == 0o600
    async with open_admin_stack(path) as stack:
        assert len(await stack.fetch_pending()) == 1


@pytest.mark.parametrize("field", ["operator_address", "url", "moniker", "timestamp"])
async def test_register_unsigned_field_is_refused(stack: AdminStack, field: str) -> None:
    other = {
        "operator_address": account_keys.sign_data(b"", b"\x09" * 32)[0],
        "url": "",
        "moniker": "else",
        "timestamp": NOW + 1,
    }
    response = await stack.register({**sign_registration(), field: other[field]})
    assert response.status_code == 401
    assert set(response.json()) == {"error"}
    assert await stack.fetch_pending() == []


async def test_register_with_other_prefix_is_refused(stack: AdminStack) -> None:
    _, pub_key, _ = account_keys.sign_data(b"", KEY)
    response = await stack.register(sign_registration(operator_address=account_keys.address_of(pub_key, "cosmos")))
    assert response.status_code == 401
    assert "sv1" in response.json()["error"]


async def test_register_private_url_is_accepted_only_in_development(tmp_path: Path) -> None:
    body = sign_registration(url="http://127.0.0.1:8090")
    async with open_admin_stack(tmp_path / "production.db") as stack:
        response = await stack.register(body)
        assert response.status_code == 400
        assert response.json()["error"].startswith("url: ")
    async with open_admin_stack(tmp_path / "development.db", mode="development") as stack:
        assert (await stack.register(body)).status_code == 200


@pytest.mark.parametrize("address", ["192.0.2.7", "a unix socket"])
async def test_register_above_rate_limit_is_refused(tmp_path: Path, address: str) -> None:
    async with open_admin_stack(tmp_path / "admin.db") as stack, stack.create_client(address) as client:
        responses = [await client.post("/register-validator", content=b"{}") for _ in range(25)]
        assert [response.status_code for response in responses] == [400] * 20 + [429] * 5
        wait = int(responses[-1].headers["retry-after"])
        stack.clock.advance(wait)
        assert (await client.post("/register-validator", content=b"{}")).status_code == 400


async def test_register_mutated_body_is_refused_without_server_error(stack: AdminStack) -> None:
    rng = random.Random(5)
    good = json.dumps(sign_registration(), ensure_ascii=False).encode()
    counts: dict[int, int] = {}
    for _ in range(2000):
        status = await stack.registration_status(mutate(good, rng))
        counts[status] = counts.get(status, 0) + 1
    assert set(counts) == {400, 401}, counts
    assert counts[401] > 200, "many are refused only for their signature"
    assert await stack.fetch_pending() == []
    assert await stack.registration_status(good) == 200, "the original is accepted"


ODD_VALUES: list[Any] = [
    None,
    0,
    -1,
    2**64,
    10**400,
    "",
    "A" * 88,
    [],
    {},
    1e300,
    True,
    "\u202e",
    "sv1",
    "https://[::1]",
]


def mutate(body: bytes, rng: random.Random) -> bytes:
    """Change a signed field of a registration, or make the registration malformed."""
    changed = bytearray(body)
    match rng.randrange(12):  # Curve arithmetic is expensive: only two cases in twelve reach it.
        case 0 | 1 | 2:
            flip_byte(changed, rng)
        case 3 | 4:
            del changed[rng.randrange(len(changed)) :]
        case 5 | 6:
            at = rng.randrange(len(changed))
            changed[at:at] = rng.randbytes(rng.randrange(1, 20))
        case 7 | 8 | 9:
            fields = json.loads(body)
            fields[rng.choice(sorted(fields))] = rng.choice(ODD_VALUES)
            changed = bytearray(json.dumps(fields).encode())
        case 10:
            fields = json.loads(body)
            name = rng.choice(["signature", "pub_key"])
            proof = bytearray(base64.b64decode(fields[name]))
            flip_byte(proof, rng)
            changed = bytearray(json.dumps({**fields, name: base64.b64encode(proof).decode()}).encode())
        case _:
            fields = json.loads(body)
            name, value = rng.choice([("timestamp", NOW + rng.randrange(1, 300)), ("moniker", f"{rng.random()}")])
            changed = bytearray(json.dumps({**fields, name: value}).encode())
    return b"{}" if have_same_fields(bytes(changed), body) else bytes(changed)


def flip_byte(changed: bytearray, rng: random.Random) -> None:
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)


def have_same_fields(first_body: bytes, other: bytes) -> bool:
    """Whether two bodies are equivalent, ignoring whitespace and unused base64 bits."""
    try:
        first, second = json.loads(first_body), json.loads(other)
        keys = ("signature", "pub_key")
        decoded = all(base64.b64decode(first[key]) == base64.b64decode(second[key]) for key in keys)
        return decoded and all(first[key] == second[key] for key in second if key not in keys)
    except (ValueError, KeyError, TypeError):
        return False


def origins_of(urls: list[str]) -> tuple[str, ...]:
    config = {"version": 1, "vote_servers": [{"url": url} for url in urls]}
    return parse_config(json.dumps(config).encode()).origins


@pytest.mark.parametrize(
    ("url", "origins"),
    [
        ("https://a.example.org/path?query", ("https://a.example.org",)),
        ("https://A.example.org:8443", ("https://a.example.org:8443",)),
        ("https://xn--hhle-5qa.example.org", ("https://xn--hhle-5qa.example.org",)),
        ("https://höhle.example.org", ()),
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
def test_vote_server_origins_are_safe_in_content_security_policy(url: str, origins: tuple[str, ...]) -> None:
    assert origins_of([url, url]) == origins


def test_vote_server_origins_are_bounded() -> None:
    origins = origins_of([f"https://server-{number}.example.org" for number in range(1000)])
    assert 60 < len(origins) < 70
    assert len(" ".join(origins)) <= 2000


def test_vote_server_origins_after_many_unusable_urls_stops() -> None:
    unusable = [f"https://[2606:4700::{number:x}]" for number in range(MAX_SERVERS)]
    assert origins_of([*unusable[1:], "https://a.example.org"]) == ("https://a.example.org",)
    assert origins_of([*unusable, "https://a.example.org"]) == ()
    assert origins_of([f"https://a.example.org/{'x' * 512}", "https://b.example.org"]) == ("https://b.example.org",)


async def test_refresh_parses_in_a_thread_and_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def record(body: bytes, static: StaticConfig | None = None) -> PublishedConfig:
        threads.append(threading.current_thread())
        return parse_config(body, static)

    monkeypatch.setattr(config_refresh, "parse_config", record)
    async with open_admin_stack(tmp_path / "admin.db") as stack:
        stack.web.responses[CONFIG_URL] = httpx.Response(200, content=json.dumps(VALID_CONFIG).encode())
        for _ in range(3):
            stack.clock.advance(60)
            await stack.config.refresh()
    async with open_admin_stack(tmp_path / "admin.db") as stack:
        assert stack.config.origins == ("https://a.example.org",)
    assert len(threads) == 2, "once when it was new, once after the restart"
    assert threading.main_thread() not in threads


async def test_refresh_stores_no_cookies(stack: AdminStack) -> None:
    cookies = [("set-cookie", f"name-{number}={'x' * 100}; Domain=example.org") for number in range(50)]
    redirect_headers = [*cookies, ("location", "https://public.example.org/x")]
    stack.web.responses[CONFIG_URL] = httpx.Response(302, headers=redirect_headers)
    stack.web.responses["https://public.example.org/x"] = httpx.Response(
        200, headers=cookies, content=json.dumps(VALID_CONFIG).encode()
    )
    for _ in range(2):
        await stack.config.refresh()
    assert stack.config.body is not None
    assert len(stack.fetcher._http.cookies.jar) == 0
    assert stack.web.cookies == [None] * 4


async def test_restore_of_damaged_copy_is_ignored(tmp_path: Path) -> None:
    async with open_admin_stack(tmp_path / "admin.db") as stack:
        await stack.store.save_config(CONFIG_URL, b'{"version":1,"vote_serv', b"", now=NOW)
    async with open_admin_stack(tmp_path / "admin.db") as stack:
        assert (stack.config.body, stack.config.origins) == (None, ())


BAD_RESPONSES = {
    "html": httpx.Response(200, content=b"<html>"),
    "no servers": httpx.Response(200, content=b'{"version":1}'),
    "a script for a url": httpx.Response(200, content=b'{"version":1,"vote_servers":[{"url":"javascript:alert(1)"}]}'),
    "height": httpx.Response(200, content=b'{"version":1,"vote_servers":[],"snapshot_height":"7"}'),
    "not strict JSON": httpx.Response(200, content=b'{"version":NaN,"vote_servers":[]}'),
    "to a private name": httpx.Response(302, headers={"location": "https://node.internal/x"}),
    "to a private address": httpx.Response(302, headers={"location": "https://10.0.0.1/x"}),
    "to a name of a private address": httpx.Response(302, headers={"location": "https://inner.example.org/x"}),
    "to plain http": httpx.Response(302, headers={"location": "http://public.example.org/x"}),
    "redirect without location": httpx.Response(302),
    "to an international name": httpx.Response(302, headers=[(b"location", "https://höhle.example.org".encode())]),
    "to an invalid name": httpx.Response(302, headers={"location": "https://xn--.org/"}),
    "to an unknown host": httpx.Response(302, headers={"location": "https://unknown.example.org/"}),
    "redirect loop": httpx.Response(302, headers={"location": "https://public.example.org/round"}),
}


@pytest.mark.parametrize("page", list(BAD_RESPONSES.values()), ids=list(BAD_RESPONSES))
async def test_refresh_invalid_response_keeps_valid_copy(stack: AdminStack, page: httpx.Response | Exception) -> None:
    published = json.dumps(VALID_CONFIG).encode()
    stack.web.responses["https://public.example.org/round"] = httpx.Response(
        302, headers={"location": "https://public.example.org/round"}
    )
    stack.web.responses[CONFIG_URL] = httpx.Response(200, content=published)
    await stack.config.refresh()
    stack.web.responses[CONFIG_URL] = page
    await stack.config.refresh()
    assert (await stack.client.get("/voting-config")).content == published
    assert all(("example.org" in url and "inner" not in url) for url in stack.web.requested_urls), (
        "no private address is contacted"
    )


async def test_refresh_follows_redirect_to_public_address(stack: AdminStack) -> None:
    stack.web.responses[CONFIG_URL] = httpx.Response(302, headers={"location": "https://public.example.org/x"})
    stack.web.responses["https://public.example.org/x"] = httpx.Response(200, content=json.dumps(VALID_CONFIG).encode())
    await stack.config.refresh()
    assert (await stack.client.get("/voting-config")).json() == VALID_CONFIG
    # The connection uses the address that was checked: a second lookup could resolve to a private network.
    assert stack.web.connections == [("config.example.org", None), ("93.184.216.34", "public.example.org")]


async def test_ui_config_contains_mode(stack: AdminStack) -> None:
    response = await stack.client.get("/ui-config")
    assert response.json() == {"mode": "production", "dev_pir_controls": False, "precomputed_base_url": ""}
    assert response.headers["cache-control"] == "no-store"


async def test_wrong_method_unknown_path_and_large_body(stack: AdminStack) -> None:
    assert (await stack.client.get("/register-validator")).json() == {"error": "method not allowed"}
    assert (await stack.client.get("/nothing")).json() == {"error": "not found"}
    too_large = await stack.client.post("/register-validator", content=b"x" * (1 << 20))
    assert (too_large.status_code, set(too_large.json())) == (413, {"error"})


async def test_ui_config_contains_chain_facts(stack: AdminStack) -> None:
    assert (await stack.client.get("/chain")).json() == {
        "chain_id": "svote-test",
        "rest": "https://node.example.org",
        "rpc": "",
        "denom": "stake",
        "bech32_prefix": "sv",
    }
