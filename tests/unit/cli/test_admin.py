"""`svote-helper admin`: a registration signed on this machine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from admin import account_keys
from admin.admin_database import MAX_REGISTRATIONS
from helper.cli.main import main
from tests.unit.admin.test_account_keys import ARGON2_ARMOR, PASSPHRASE

KEY = bytes(range(1, 33))
SIGNER = account_keys.sign_data(b"", KEY)[0]


def run_admin_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["admin", *arguments])
    return int(ended.value.code or 0)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(KEY.hex() + "\n")
    return path


def test_admin_register_dry_run_prints_verifiable_registration(
    key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("register", "--key-file", str(key_file), "--moniker", "Höhle", "--url", "https://a.example.org")
    assert run_admin_command(*arguments, "--show") == 0
    out = capsys.readouterr().out
    body = json.loads(out)
    text = json.dumps(
        {name: body[name] for name in ("operator_address", "url", "moniker", "timestamp")},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    assert body["operator_address"] == SIGNER
    account_keys.verify_signature(
        text.encode(),
        signer=SIGNER,
        pub_key=base64.b64decode(body["pub_key"]),
        signature=base64.b64decode(body["signature"]),
    )
    assert KEY.hex() not in out


@pytest.mark.parametrize(
    ("status", "expected_json", "code", "expected_message"),
    [
        (200, {"status": "registered"}, 0, "is registered: it is already a validator"),
        (200, {"status": "pending", "expires_at": 1_795_872_800}, 0, "2026-11-28 13:33:20 UTC"),
        (401, {"error": "signature: does not verify"}, 4, "does not verify"),
        (400, {"error": "url: refers to a host in a private network"}, 1, "private network"),
    ],
)
def test_admin_register_prints_server_response(
    key_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: int,
    expected_json: dict[str, Any],
    code: int,
    expected_message: str,
) -> None:
    requests: list[tuple[str, str]] = []

    async def respond(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        requests.append((request.method, str(request.url)))
        return httpx.Response(status, json=expected_json)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", respond)
    arguments = ("register", "--key-file", str(key_file), "--moniker", "m", "--to", "http://helper.example.org/")
    assert run_admin_command(*arguments) == code
    captured = capsys.readouterr()
    assert expected_message in captured.out + captured.err
    assert requests == [("POST", "http://helper.example.org/api/register-validator")]


def test_admin_pending_with_several_pages_prints_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = [
        {"operator_address": SIGNER, "url": "", "moniker": f"node {number}", "requested_at": 1, "expires_at": 2}
        for number in range(3)
    ]

    async def respond(_: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        page = int(request.url.params["page"])
        link = {"Link": f'<?page={page + 1}>; rel="next"'} if page < len(waiting) else {}
        return httpx.Response(200, json=[waiting[page - 1]], headers=link)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", respond)
    assert run_admin_command("pending", "--to", "http://helper.example.org", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"pending": waiting}


@pytest.mark.parametrize("body", ["[1]", '{"status": "gone"}', "[{}]", "3"])
def test_admin_with_response_of_another_server_exits_unreachable(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], body: str
) -> None:
    async def respond(*_: object) -> httpx.Response:
        return httpx.Response(200, text=body)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", respond)
    for arguments in (("pending",), ("register", "--key-file", str(key_file), "--moniker", "m")):
        assert run_admin_command(*arguments, "--to", "http://helper.example.org") == 6
        assert "is not that of a helper" in capsys.readouterr().err


def test_admin_pending_ends_although_the_pages_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"operator_address": SIGNER, "url": "", "moniker": "m", "requested_at": 1, "expires_at": 2}

    async def respond(*_: object) -> httpx.Response:
        return httpx.Response(200, json=[row] * 500, headers={"Link": '<?page=2>; rel="next"'})

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", respond)
    assert run_admin_command("pending", "--to", "http://helper.example.org", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["pending"]) == MAX_REGISTRATIONS


class EndlessBody(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0)


def test_admin_ends_although_the_response_does_not(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def respond(*_: object) -> httpx.Response:
        return httpx.Response(200, stream=EndlessBody())

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", respond)
    monkeypatch.setattr("helper.cli.admin.TIMEOUT_SECONDS", 0.05)
    for arguments in (("pending",), ("register", "--key-file", str(key_file), "--moniker", "m")):
        assert run_admin_command(*arguments, "--to", "http://helper.example.org") == 6
        assert "no complete response within 0.05 s" in capsys.readouterr().err


@pytest.mark.parametrize(("passphrase", "code"), [(PASSPHRASE, 0), ("another", 4)])
def test_admin_with_armored_key_prompts_for_passphrase(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    passphrase: str,
    code: int,
) -> None:
    (path := tmp_path / "key.asc").write_text(ARGON2_ARMOR)
    monkeypatch.setattr("typer.prompt", lambda *_, hide_input, **__: passphrase if hide_input else "")
    assert run_admin_command("register", "--key-file", str(path), "--moniker", "node", "--show") == code
    out, err = capsys.readouterr()
    if code == 0:
        assert json.loads(out)["operator_address"] == SIGNER
    else:
        assert "passphrase" in err
        assert out == ""


def test_admin_without_server_exits_unreachable(key_file: Path) -> None:
    assert (
        run_admin_command("register", "--key-file", str(key_file), "--moniker", "m", "--to", "http://127.0.0.1:9") == 6
    )
    assert run_admin_command("pending", "--to", "http://127.0.0.1:9") == 6


def test_admin_with_invalid_text_is_refused(key_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_admin_command("register", "--key-file", str(key_file), "--moniker", "a\udc9bb") == 2
    assert "UTF-8" in capsys.readouterr().err


def test_admin_with_file_without_key_is_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert run_admin_command("register", "--key-file", str(path), "--moniker", "m") == 5
    for content in ("", "zz", "00" * 32, "11" * 31):
        path.write_text(content)
        assert run_admin_command("register", "--key-file", str(path), "--moniker", "m", "--show") == 2


def test_admin_register_invalid_name_is_not_sent(key_file: Path) -> None:
    assert run_admin_command("register", "--key-file", str(key_file), "--moniker", " ", "--show") == 2
