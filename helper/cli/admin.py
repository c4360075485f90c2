"""`svote-helper admin`: join as a validator without a browser, and see who waits."""

from __future__ import annotations

import json as jsonlib
from base64 import b64encode
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from admin import adr036
from admin.key_armor import KeyArmorError, PassphraseError, open_key_armor
from admin.registration import RegistrationError, RegistrationRequest, parse_registration
from helper.cli.output import Exit, emit_json, emit_table, fail, say
from helper.cli.settings import JsonOption
from helper.clock import SystemClock
from helper.core.time_text import format_time
from helper.runtime.http_client import create_client

app = typer.Typer(help="Join as a validator without a browser, and see who waits.")

PATIENCE = 30.0
_ARMOUR = b"-----BEGIN"

ToOption = Annotated[str, typer.Option("--to", help="Base URL of the helper.")]


@app.callback()
def admin() -> None:
    """Join as a validator without a browser, and see who waits."""


@app.command()
def register(
    key_file: Annotated[
        Path,
        typer.Option(
            help="The operator account's private key: 32 bytes in hex, or as the chain's key tool exports it "
            "(armoured; its passphrase is asked for)."
        ),
    ],
    moniker: Annotated[str, typer.Option(help="The validator's name for people.")],
    url: Annotated[str, typer.Option(help="Where its helper serves; may be left empty.")] = "",
    to: ToOption = "http://127.0.0.1:8090",
    show: Annotated[bool, typer.Option("--show", help="Print what would be sent, and send nothing.")] = False,
    json: JsonOption = False,
) -> None:
    """Sign a registration here and send it; the key never leaves this machine."""
    key = _read_key(key_file)
    now = SystemClock().now()
    try:
        signer, pub_key, _ = adr036.sign(b"", key)
        claim = RegistrationRequest(operator_address=signer, url=url, moniker=moniker, timestamp=int(now))
        _, _, signature = adr036.sign(claim.signed_text(), key)
        body = _body(claim, pub_key, signature)
        parse_registration(jsonlib.dumps(body).encode(), now=now, production=False)
    except UnicodeEncodeError:
        fail("--moniker and --url must be UTF-8", Exit.USAGE)
    except (RegistrationError, ValueError) as error:
        fail(str(error), Exit.USAGE)
    if show:
        emit_json(body)
        return
    answer = _request("POST", f"{to.rstrip('/')}/api/register-validator", body).json()
    if json:
        emit_json({"operator_address": signer, **answer})
    elif answer["status"] == "registered":
        typer.echo(f"{signer} is registered: it is in staking already")
    else:
        typer.echo(f"{signer} waits until {format_time(answer['expires_at'])} UTC")


@app.command()
def pending(to: ToOption = "http://127.0.0.1:8090", json: JsonOption = False) -> None:
    """Who waits to join."""
    waiting = _fetch_pending(f"{to.rstrip('/')}/api/pending-validators")
    if json:
        emit_json({"pending": waiting})
        return
    columns = ("operator", "moniker", "url", "since", "until")
    times = ("requested_at", "expires_at")
    emit_table(
        columns,
        [
            (row["operator_address"], row["moniker"], row["url"], *(f"{format_time(row[name])} UTC" for name in times))
            for row in waiting
        ],
    )


def _body(claim: RegistrationRequest, pub_key: bytes, signature: bytes) -> dict[str, Any]:
    return {
        **jsonlib.loads(claim.signed_text()),
        "signature": b64encode(signature).decode(),
        "pub_key": b64encode(pub_key).decode(),
    }


def _read_key(path: Path) -> bytes:
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        fail(f"{path}: {error.strerror}", Exit.NOT_FOUND)
    if content.startswith(_ARMOUR):
        return _open_armour(content.decode(errors="replace"))
    try:
        return bytes.fromhex(content.decode().removeprefix("0x"))
    except ValueError:
        fail(f"{path} holds no key: neither hex nor what the chain's key tool exports", Exit.USAGE)


def _open_armour(text: str) -> bytes:
    try:
        return open_key_armor(text, typer.prompt("Passphrase of the key", hide_input=True, err=True))
    except PassphraseError as error:
        fail(str(error), Exit.NOT_AUTHORISED)
    except KeyArmorError as error:
        fail(str(error), Exit.USAGE)


def _fetch_pending(url: str) -> list[dict[str, Any]]:
    """The registrations of all pages."""
    found: list[dict[str, Any]] = []
    for page in count(1):
        answer = _request("GET", f"{url}?page={page}")
        found += answer.json()
        if "next" not in answer.links or not answer.json():
            break
    return found


def _request(method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """A 200 response with a JSON body; anything else ends the command."""
    try:
        with create_client(timeout=PATIENCE) as client:
            answer = client.request(method, url, json=body)
        told = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fail(f"{url} could not be asked: {type(error).__name__}", Exit.UNREACHABLE)
    if answer.status_code == 200:
        return answer
    say(f"HTTP {answer.status_code}: {told.get('error', told) if isinstance(told, dict) else told}")
    raise typer.Exit(Exit.NOT_AUTHORISED if answer.status_code == 401 else Exit.FAILURE)
