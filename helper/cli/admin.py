"""`svote-helper admin`: register as a validator, and list pending registrations."""

from __future__ import annotations

import asyncio
import json as jsonlib
from base64 import b64encode
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import httpx
import typer
from pydantic import TypeAdapter, ValidationError

from admin import account_keys
from admin.account_keys import KeyArmorError, PassphraseError, open_key_armor
from admin.admin_database import MAX_REGISTRATIONS, Registration
from admin.registration_request import RegistrationError, RegistrationRequest, parse_registration
from helper.cli.conventions import ExitCode, JsonOption, emit, emit_json, fail, print_message
from helper.cli.terminal import emit_table
from helper.clock import SystemClock
from helper.core.json_records import fact
from helper.core.text_forms import format_time
from helper.runtime.network_clients import create_async_client

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
"""Time limit of a command's requests in seconds, whatever the server sends."""
_ARMOR_PREFIX = b"-----BEGIN"

ToOption = Annotated[str, typer.Option("--to", help="Base URL of the helper.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """Response of the helper to a registration."""

    status: Literal["pending", "registered"] = fact(
        "`registered` if the validator is already on the chain, else `pending`."
    )
    expires_at: float | None = fact("Time in Unix seconds at which the pending registration expires.", optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredValidator(_Answer):
    """`admin register`."""

    operator_address: str = fact("Registered operator address.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingList:
    """`admin pending`."""

    pending: Sequence[Registration] = fact("Pending registrations.")


def register(
    key_file: Annotated[
        Path,
        typer.Option(
            help="Private key of the operator account: 32 bytes in hex, or an armored export of the chain's "
            "key tool (prompts for its passphrase)."
        ),
    ],
    moniker: Annotated[str, typer.Option(help="Display name of the validator.")],
    url: Annotated[str, typer.Option(help="Public URL of the validator's helper; may be empty.")] = "",
    to: ToOption = "http://127.0.0.1:8090",
    show: Annotated[bool, typer.Option("--show", help="Print the request without sending it.")] = False,
    json: JsonOption = False,
) -> None:
    """Sign a registration on this machine and send it. The private key is not sent."""
    key = _read_key(key_file)
    now = SystemClock().now()
    try:
        signer, pub_key, _ = account_keys.sign_data(b"", key)
        registration = RegistrationRequest(operator_address=signer, url=url, moniker=moniker, timestamp=int(now))
        _, _, signature = account_keys.sign_data(registration.signed_text(), key)
        body = _registration_body(registration, pub_key, signature)
        parse_registration(jsonlib.dumps(body).encode(), now=now, production=False)
    except UnicodeEncodeError:
        fail("--moniker and --url must be UTF-8", ExitCode.USAGE)
    except (RegistrationError, ValueError) as error:
        fail(str(error), ExitCode.USAGE)
    if show:
        emit_json(body)
        return
    answer = _parse(_Answer, _run(_request("POST", f"{to.rstrip('/')}/api/register-validator", body)))
    until = "" if answer.expires_at is None else f" until {format_time(answer.expires_at)} UTC"
    text = "registered: it is already a validator" if answer.status == "registered" else f"pending{until}"
    emit(RegisteredValidator(operator_address=signer, **asdict(answer)), f"{signer} is {text}", json=json)


def pending(to: ToOption = "http://127.0.0.1:8090", json: JsonOption = False) -> None:
    """List pending registrations."""
    registrations = _run(_fetch_pending(f"{to.rstrip('/')}/api/pending-validators"))
    emit(PendingList(pending=registrations), _print_pending, json=json)


def _print_pending(response: Mapping[str, Any]) -> None:
    times = ("requested_at", "expires_at")
    emit_table(
        ("operator", "moniker", "url", "since", "until"),
        [
            (row["operator_address"], row["moniker"], row["url"], *(f"{format_time(row[name])} UTC" for name in times))
            for row in response["pending"]
        ],
    )


def _registration_body(registration: RegistrationRequest, pub_key: bytes, signature: bytes) -> dict[str, Any]:
    return {
        **jsonlib.loads(registration.signed_text()),
        "signature": b64encode(signature).decode(),
        "pub_key": b64encode(pub_key).decode(),
    }


def _read_key(path: Path) -> bytes:
    try:
        content = path.read_bytes().strip()
    except OSError as error:
        fail(f"{path}: {error.strerror}", ExitCode.NOT_FOUND)
    if content.startswith(_ARMOR_PREFIX):
        return _open_armor(content.decode(errors="replace"))
    try:
        return bytes.fromhex(content.decode().removeprefix("0x"))
    except ValueError:
        fail(f"{path} contains no key: neither hex nor an export of the chain's key tool", ExitCode.USAGE)


def _open_armor(text: str) -> bytes:
    try:
        return open_key_armor(text, typer.prompt("Passphrase of the key", hide_input=True, err=True))
    except PassphraseError as error:
        fail(str(error), ExitCode.NOT_AUTHORIZED)
    except KeyArmorError as error:
        fail(str(error), ExitCode.USAGE)


def _run(requests: Coroutine[Any, Any, T]) -> T:
    """Run requests. Ends the command if they take too long."""
    try:
        return asyncio.run(asyncio.wait_for(requests, TIMEOUT_SECONDS))
    except TimeoutError:
        fail(f"no complete response within {TIMEOUT_SECONDS:g} s", ExitCode.UNREACHABLE)


async def _fetch_pending(url: str) -> list[Registration]:
    """Fetch the registrations of all pages."""
    rows: list[Registration] = []
    for page in count(1):
        response = await _request("GET", f"{url}?page={page}")
        found = _parse(list[Registration], response)
        rows += found
        if "next" not in response.links or not found or len(rows) >= MAX_REGISTRATIONS:
            break
    return rows


def _parse(kind: type[T], response: httpx.Response) -> T:
    """Parse the body of a response. Ends the command if it is not of this kind."""
    try:
        return TypeAdapter(kind).validate_json(response.content)
    except ValidationError:
        fail(f"the response of {response.url} is not that of a helper", ExitCode.UNREACHABLE)


async def _request(method: str, url: str, body: dict[str, Any] | None = None) -> httpx.Response:
    """Return a 200 response with a JSON body. Anything else ends the command."""
    try:
        async with create_async_client(timeout=TIMEOUT_SECONDS) as client:
            response = await client.request(method, url, json=body)
        content = response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        fail(f"request to {url} failed: {type(error).__name__}", ExitCode.UNREACHABLE)
    if response.status_code == 200:
        return response
    print_message(
        f"HTTP {response.status_code}: {content.get('error', content) if isinstance(content, dict) else content}"
    )
    raise typer.Exit(ExitCode.NOT_AUTHORIZED if response.status_code == 401 else ExitCode.FAILURE)
