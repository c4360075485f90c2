"""Static and dynamic documents of the voting configuration: published ones, and each kind of error."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from admin.published_config import MAX_MIRRORS, InvalidConfigError, parse_config, parse_static
from helper.chain.chain_data import RoundAuthentication
from tests.conftest import RECORDED

pytestmark = pytest.mark.rule("R16")

PUBLISHED = RECORDED.parent / "voting-config"
KEY = {"key_id": "one", "alg": "ed25519", "pubkey": base64.b64encode(bytes(range(32))).decode()}
MIRRORS = ["https://a.example.org/config.json", "https://b.example.org/config.json"]
VERSION_1 = {"static_config_version": 1, "dynamic_config_url": MIRRORS[0], "trusted_keys": [KEY]}
VERSION_2 = {"static_config_version": 2, "dynamic_config_urls": MIRRORS, "trusted_keys": [KEY]}
DYNAMIC: dict[str, Any] = {"config_version": 1, "vote_servers": [], "pir_endpoints": []}
KEY_IDS = ["valargroup", "tachyon", "zodl", "shielded-labs"]


def encode(config: Any) -> bytes:
    return json.dumps(config).encode()


@pytest.mark.rule("N1")
@pytest.mark.parametrize(
    ("name", "hosts", "key_ids"),
    [
        ("static", ["voting.valargroup.dev"], KEY_IDS),
        ("static-v2", ["voting.valargroup.dev", "raw.githubusercontent.com"], KEY_IDS),
        (
            "stage-static-v2",
            ["voting.valargroup.dev", "raw.githubusercontent.com"],
            ["zodl-stage-vote-manager", "valar-test", "valar-test-keplr-derived"],
        ),
    ],
)
def test_parse_static_of_published_document(name: str, hosts: list[str], key_ids: list[str]) -> None:
    body = (PUBLISHED / f"{name}.json").read_bytes()
    config = parse_static(body)
    assert config is not None
    assert config.body == body
    assert [url.split("/")[2] for url in config.mirrors] == hosts
    assert list(config.keys) == key_ids
    assert {len(key) for key in config.keys.values()} == {32}


@pytest.mark.parametrize("name", ["production", "production-older", "stage"])
def test_parse_static_of_dynamic_document_is_none(name: str) -> None:
    assert parse_static((PUBLISHED / f"{name}.json").read_bytes()) is None


STATIC_ERRORS: dict[str, tuple[Any, str]] = {
    "no object": ([VERSION_1], "it is not an object"),
    "version 3": ({**VERSION_2, "static_config_version": 3}, "static_config_version is not 1 or 2"),
    "version as text": ({**VERSION_2, "static_config_version": "2"}, "static_config_version is not 1 or 2"),
    "version true": ({**VERSION_1, "static_config_version": True}, "static_config_version is not 1 or 2"),
    "version 1 with the field of 2": (
        {**VERSION_1, "dynamic_config_urls": MIRRORS},
        "dynamic_config_urls does not belong into static_config_version 1",
    ),
    "version 2 with the field of 1": (
        {**VERSION_2, "dynamic_config_url": None},
        "dynamic_config_url does not belong into static_config_version 2",
    ),
    "duplicate mirrors": ({**VERSION_2, "dynamic_config_urls": [*MIRRORS, MIRRORS[0]]}, "contains a URL twice"),
    "no mirrors": ({**VERSION_2, "dynamic_config_urls": []}, "is missing or not a list"),
    "mirrors as text": ({**VERSION_2, "dynamic_config_urls": MIRRORS[0]}, "is missing or not a list"),
    "no url": ({"static_config_version": 1, "trusted_keys": []}, "something other than a web URL"),
    "a number as url": ({**VERSION_1, "dynamic_config_url": 7}, "something other than a web URL"),
    "a file as url": ({**VERSION_1, "dynamic_config_url": "file:///etc/passwd"}, "something other than a web URL"),
    "a very long url": ({**VERSION_1, "dynamic_config_url": f"https://{'a' * 600}"}, "something other than a web URL"),
    "too many mirrors": (
        {**VERSION_2, "dynamic_config_urls": [f"https://h{n}.example.org" for n in range(MAX_MIRRORS + 1)]},
        "has more than 16 entries",
    ),
    "no keys": ({"static_config_version": 1, "dynamic_config_url": MIRRORS[0]}, "trusted_keys is missing"),
    "keys as object": ({**VERSION_1, "trusted_keys": {}}, "trusted_keys is missing or not a list"),
    "a key that is no object": ({**VERSION_1, "trusted_keys": ["one"]}, "no valid key_id"),
    "a key without id": ({**VERSION_1, "trusted_keys": [{**KEY, "key_id": ""}]}, "no valid key_id"),
    "a key with a surrogate": ({**VERSION_1, "trusted_keys": [{**KEY, "key_id": "\ud800"}]}, "no valid key_id"),
    "the same key id twice": ({**VERSION_1, "trusted_keys": [KEY, KEY]}, "contains a key_id twice"),
    "a short key": ({**VERSION_1, "trusted_keys": [{**KEY, "pubkey": "AAAA"}]}, "not 32 bytes in base64"),
    "a key as number": ({**VERSION_1, "trusted_keys": [{**KEY, "pubkey": 7}]}, "not 32 bytes in base64"),
}


@pytest.mark.rule("N1")
@pytest.mark.parametrize("case", STATIC_ERRORS)
def test_parse_static_with_error_is_refused(case: str) -> None:
    document, text = STATIC_ERRORS[case]
    with pytest.raises(InvalidConfigError, match=text):
        parse_static(encode(document))


@pytest.mark.rule("N1")
def test_parse_static_accepts_extra_fields_and_omits_other_algorithms() -> None:
    other = {"key_id": "two", "alg": "ml-dsa", "pubkey": "short", "notes": None}
    config = parse_static(encode({**VERSION_2, "trusted_keys": [other, KEY], "more": [1]}))
    assert config is not None
    assert config.mirrors == tuple(MIRRORS)
    assert config.keys == {"one": bytes(range(32))}


@pytest.mark.rule("N1")
@pytest.mark.parametrize(
    "versions", [{"config_version": 1}, {"version": "7"}, {"version": 1, "config_version": 1}, {"config_version": 9}]
)
def test_parse_config_accepts_either_version_and_extra_fields(versions: dict[str, Any]) -> None:
    config = {"vote_servers": [{"url": "https://a.example.org", "more": {}}], "extensions": {}, **versions}
    assert parse_config(encode(config)).vote_servers == ("https://a.example.org",)


@pytest.mark.rule("N1")
@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"config_version": None}, "config_version is not a version"),
        ({"config_version": True}, "config_version is not a version"),
        ({"version": [1]}, "version is not a version"),
        ({"vote_servers": {}}, "vote_servers is not a list"),
        ({"vote_servers": [{"url": 7}]}, "an entry of vote_servers has no url"),
        ({"pir_endpoints": "x"}, "pir_endpoints is not a list"),
        ({"rounds": []}, "rounds is not an object"),
        ({"rounds": None}, "rounds is not an object"),
        ({"pir_layout": []}, "pir_layout is not an object"),
        ({"pir_layout": {"pir_depth": 19}}, "pir_layout is not four numbers of 32 bits"),
        ({"pir_layout": {"pir_depth": 1, "tier0_layers": 1, "tier1_layers": 1, "poly_len": 2**32}}, "of 32 bits"),
        ({"pir_layout": {"pir_depth": 1, "tier0_layers": 1, "tier1_layers": True, "poly_len": 1}}, "of 32 bits"),
        ({"pir_layout": {"pir_depth": 1, "tier0_layers": 1, "tier1_layers": 1, "poly_len": 1.0}}, "of 32 bits"),
    ],
)
def test_parse_config_with_wrong_type_is_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidConfigError, match=text):
        parse_config(encode({**DYNAMIC, **changed}))


def test_get_authentication_without_keys_is_unknown() -> None:
    body, static = encode(DYNAMIC), parse_static(encode(VERSION_1))
    assert parse_config(body).get_authentication(bytes(32), b"") is RoundAuthentication.UNKNOWN
    assert parse_config(body, static).get_authentication(bytes(32), b"k" * 32) is RoundAuthentication.NOT_LISTED


def test_get_authentication_compares_the_key_with_the_chain() -> None:
    static, config = (PUBLISHED / "static.json").read_bytes(), (PUBLISHED / "production.json").read_bytes()
    parsed, other = parse_config(config, parse_static(static)), b"k" * 32
    results = {name: parsed.get_authentication(name, key) for name, key in parsed.authority_keys.items()}
    assert results == parsed.rounds
    assert {parsed.get_authentication(name, b"") for name in parsed.rounds} == set(parsed.rounds.values())
    results = {name: parsed.get_authentication(name, other) for name in parsed.rounds}
    assert sorted(results.values()) == ["key_mismatch"] * 7 + ["unsupported_version"]
    assert parsed.authenticates_a_round, "the choice of the mirror does not depend on nodes"
