"""Fields of a registration, and the exact text that is signed."""

from __future__ import annotations

import base64
import json
from typing import Any, Never

import pytest

from admin.published_config import parse_config
from admin.registration_request import RegistrationError, parse_registration
from admin.url_policy import UrlNotAllowedError, check_url
from tests.conftest import RECORDED
from tests.unit.admin.fixtures import NOW, sign_registration

ENTRIES = json.loads((RECORDED / "adr036.json").read_text())


SLOW_HOST = "\ufdfa" * 500
"""A host whose conversion to punycode takes more than 0.1 s."""


def parse(body: Any, *, production: bool = True) -> None:
    parse_registration(body if isinstance(body, bytes) else json.dumps(body).encode(), now=NOW, production=production)


@pytest.mark.rule("R16")
@pytest.mark.parametrize("entry", ENTRIES)
def test_signed_text_equals_recorded(entry: dict[str, str]) -> None:
    body = {**json.loads(entry["data"]), "signature": entry["signature"], "pub_key": entry["pub_key"]}
    request, _, signature = parse_registration(json.dumps(body).encode(), now=NOW, production=True)
    assert request.signed_text() == entry["data"].encode()
    assert signature == base64.b64decode(entry["signature"])


def test_parse_empty_url_and_unknown_fields_are_accepted() -> None:
    parse({**sign_registration(url=""), "more": [1]})


@pytest.mark.parametrize("field", ["operator_address", "url", "moniker", "timestamp", "signature", "pub_key"])
@pytest.mark.parametrize("value", [None, 1.5, True, [], {}, "\x00", "x" * 3000, "a\u2028b", "a\ud800b"])
def test_parse_invalid_field_is_named(field: str, value: object) -> None:
    with pytest.raises(RegistrationError, match=f"^{field}: "):
        parse({**sign_registration(), field: value})


@pytest.mark.parametrize("field", ["operator_address", "url", "moniker", "timestamp", "signature", "pub_key"])
def test_parse_missing_field_is_named(field: str) -> None:
    body = sign_registration()
    del body[field]
    with pytest.raises(RegistrationError, match=f"^{field}: is missing"):
        parse(body)


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 9000])
def test_parse_non_object_is_refused(body: bytes) -> None:
    with pytest.raises(RegistrationError, match=r"^body: "):
        parse(body)


@pytest.mark.parametrize("offset", [-301, 301, 10**30, -(10**30), 10**400, -(10**4000)])
def test_parse_old_or_future_timestamp_is_refused(offset: int) -> None:
    with pytest.raises(RegistrationError, match=r"^timestamp: "):
        parse(sign_registration(timestamp=NOW + offset))
    parse(sign_registration(timestamp=NOW - 300))
    parse(sign_registration(timestamp=NOW + 300))


@pytest.mark.parametrize("moniker", ["", "  ", "\u200b\u00a0", "a\u202eb", "a\u2066b", "a\u061cb", "a\nb", "a\x9b2Jb"])
def test_parse_misleading_moniker_is_refused(moniker: str) -> None:
    with pytest.raises(RegistrationError, match=r"^moniker: "):
        parse(sign_registration(moniker=moniker))


@pytest.mark.parametrize("moniker", ["Höhle <&> node", '"quoted\\"', "验证者", "🗳️"])
def test_parse_other_moniker_is_unchanged(moniker: str) -> None:
    parse(sign_registration(moniker=moniker))


PRIVATE_URLS = [
    "http://helper.example.org",
    "https://localhost",
    "https://a.localhost/",
    "https://127.0.0.1",
    "https://127.1",
    "https://2130706433",
    "https://0x7f.0.0.1",
    "https://0177.0.0.1",
    "https://10.1.2.3:8443",
    "https://10.0.0.1.",
    "https://192.168.0.1",
    "https://169.254.169.254/latest",
    "https://[::1]",
    "https://[::ffff:127.0.0.1]",
    "https://[64:ff9b::a00:1]",
    "https://[2002:a00:1::]",
    "https://[fd00::1]",
    "https://[fec0::1]",
    "https://[::127.0.0.1]",
    "https://[64:ff9b:1::a00:1]",
    "https://[3fff::1]",
    "https://0.0.0.0",
    "https://224.0.0.1",
    "https://intranet",
    "https://node.local",
    "https://node.internal.",
]


@pytest.mark.parametrize("url", PRIVATE_URLS)
def test_url_in_production_must_be_public(url: str) -> None:
    with pytest.raises(UrlNotAllowedError):
        check_url(url, production=True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8090", "http://localhost:8090/x", "https://node.local"])
def test_url_in_development_may_be_private(url: str) -> None:
    check_url(url, production=False)


@pytest.mark.parametrize("production", [True, False])
@pytest.mark.parametrize(
    "url",
    [
        "ftp://x.org",
        "javascript:alert(1)",
        "//x.org",
        "https://",
        "https:///x",
        "https://u@x.org",
        "https://u:p@x.org",
        "https://x.org#f",
        "https://x.org#",
        "https://x.org:0",
        "https://x.org:99999",
        "https://x.org:abc",
        "https://a..b.org",
        "https://-a.org",
        "https://a_b.org",
        "https://x.org\\@y.org",
        "https://x .org",
        "https://x.org/\n",
        "https://[::1",
        "https://[v1.x]",
        "https://x.org/" + "a" * 600,
        "https://höhle.example.org",
        "https://x.org/ö",
    ],
)
def test_url_malformed_is_refused_in_every_mode(url: str, production: bool) -> None:
    with pytest.raises(UrlNotAllowedError):
        check_url(url, production=production)


@pytest.mark.parametrize(
    "url",
    [
        "https://a.example.org",
        "https://a.example.org:8443/p?q=1",
        "https://1.1.1.1/",
        "https://[2606:4700::1111]/",
        "https://xn--hhle-5qa.example.org",
    ],
)
def test_url_public_is_accepted(url: str) -> None:
    check_url(url, production=True)


@pytest.mark.parametrize("slow", [f"https://{SLOW_HOST}", f"https://{SLOW_HOST[:200]}.org/"])
def test_international_host_is_not_converted(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = list[str]()

    def convert(host: str, **_: object) -> Never:
        converted.append(host)
        raise UnicodeError

    monkeypatch.setattr("encodings.idna.nameprep", convert)  # of the codec
    monkeypatch.setattr("idna.encode", convert)  # used by httpx
    with pytest.raises(RegistrationError, match=r"^url: .* punycode"):
        parse(sign_registration(url=slow))
    config = {"version": 1, "vote_servers": [{"url": slow}, {"url": "https://a.example.org"}]}
    assert parse_config(json.dumps(config).encode()).origins == ("https://a.example.org",)
    assert not converted
