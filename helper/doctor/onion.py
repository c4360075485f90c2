"""Checks through Tor that the onion service is published and reaches the helper."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Final

from helper.clock import Clock
from helper.doctor.result import CheckResult, fail, ok, warn
from helper.runtime.network_clients import SocksError, open_socks_stream

ONION_SECONDS: Final = 12.0
"""Time limit in seconds. Tor fetches the descriptor and builds two circuits, which takes up to 10 s."""
_SUBJECT: Final = "onion service"
_PORT: Final = 80
_MAX_RESPONSE_BYTES: Final = 64 << 10
_TOR_ADVICE: Final = (
    "Check that tor runs (`systemctl status tor@default`) and its log. After a start, tor needs up to a minute to"
    " publish the service."
)


async def check_onion_service(address: str, proxy: str, clock: Clock, *, seconds: float = ONION_SECONDS) -> CheckResult:
    """Request the status of the helper through Tor.

    Args:
        address: onion address; empty if it is not set.
        proxy: SOCKS port of tor: `unix:PATH` or `HOST:PORT`.
        clock: measures the time.
        seconds: time limit.
    """
    if not address:
        return ok(_SUBJECT, "not checked: [server] onion_address is not set")
    started_at, problem = clock.monotonic(), ""
    try:
        async with asyncio.timeout(seconds):
            status, is_helper = await _request_status(address, proxy)
    except TimeoutError:
        problem = f"no response within {seconds:.0f} s"
    except SocksError as error:
        problem = str(error)
    except OSError as error:
        advice = "Start tor, or set [server] tor_socks to a SOCKS port of a running tor that this user can use."
        return warn(_SUBJECT, f"not checked: cannot use tor at {proxy}: {error.strerror or error}", advice)
    if problem:
        return fail(_SUBJECT, f"{address} is not reachable: {problem}", _TOR_ADVICE)
    took = clock.monotonic() - started_at
    if not is_helper:
        advice = "Check that HiddenServicePort in the torrc points to [server] unix_socket."
        return fail(_SUBJECT, f"{address} is published, but does not reach a helper (HTTP {status})", advice)
    if status != 200:
        advice = "See the other checks: the helper is not ready or is paused."
        return warn(_SUBJECT, f"{address} is published, but the helper responds HTTP {status}", advice)
    return ok(_SUBJECT, f"{address} is published and reaches a helper, in {took:.1f} s", seconds=round(took, 2))


async def _request_status(address: str, proxy: str) -> tuple[int, bool]:
    """Return the HTTP status of the helper's status route, and whether the response is that of a helper.

    Raises:
        OSError: the proxy cannot be reached.
        SocksError: Tor cannot reach the service.
    """
    reader, writer = await open_socks_stream(proxy, address, _PORT)
    try:
        writer.write(
            b"GET /shielded-vote/v1/status HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % address.encode()
        )
        response = b""
        with contextlib.suppress(ConnectionError):
            while len(response) <= _MAX_RESPONSE_BYTES and (data := await reader.read(_MAX_RESPONSE_BYTES)):
                response += data
    finally:
        writer.close()
    if not response:
        raise SocksError("the service closed the connection; nothing listens behind it")
    return _parse_response(response)


def _parse_response(response: bytes) -> tuple[int, bool]:
    head, _, body = response.partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return 0, False
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    return int(words[1]), isinstance(status, dict) and "status" in status
