"""The check of the onion service, with a fake SOCKS port of tor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from helper.clock import SystemClock
from helper.doctor import CheckResult, Level
from helper.doctor.publication import check_onion_service

pytestmark = pytest.mark.anyio

ADDRESS = "a2" * 28 + ".onion"
READY = b'HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{"status":"ok"}'
NOT_READY = b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"status":"error","error":"starting"}'
CONNECTED = b"\x05\x00\x00\x01" + bytes(6)
CONNECTED_TO_NAME = b"\x05\x00\x00\x03\x04name" + bytes(2)


@contextlib.asynccontextmanager
async def run_tor(directory: Path, reply: bytes, response: bytes = b"") -> AsyncIterator[str]:
    """A SOCKS port that sends this reply to CONNECT, then this response. Without a reply, it is silent."""

    handlers: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.ensure_future(handle(reader, writer)))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(3) == b"\x05\x01\x00"
        writer.write(b"\x05\x00")
        host = ADDRESS.encode()
        assert await reader.readexactly(7 + len(host)) == b"\x05\x01\x00\x03" + bytes([len(host)]) + host + b"\x00\x50"
        writer.write(reply)
        if not reply:
            await reader.read()
        elif response:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /shielded-vote/v1/status HTTP/1.1\r\n")
            writer.write(response)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, str(directory / "socks"))
    try:
        yield f"unix:{directory}/socks"
    finally:
        server.close()
        await asyncio.gather(*handlers)


async def check(directory: Path, reply: bytes, response: bytes = b"", *, seconds: float = 30) -> CheckResult:
    async with run_tor(directory, reply, response) as proxy:
        return await check_onion_service(ADDRESS, proxy, SystemClock(), seconds=seconds)


@pytest.mark.parametrize("reply", [CONNECTED, CONNECTED_TO_NAME])
async def test_onion_service_that_reaches_the_helper_is_ok(tmp_path: Path, reply: bytes) -> None:
    result = await check(tmp_path, reply, READY)
    assert (result.level, f"{ADDRESS} is published" in result.message) == (Level.OK, True)


@pytest.mark.parametrize(
    ("reply", "response", "level", "message"),
    [
        (b"\x05\xf0\x00\x01" + bytes(6), b"", Level.FAIL, "not reachable: the descriptor is not published"),
        (b"\x05\x63\x00\x01" + bytes(6), b"", Level.FAIL, "not reachable: SOCKS error 99"),
        (b"\x05\x00", b"", Level.FAIL, "the proxy closed the connection"),
        (CONNECTED, b"", Level.FAIL, "nothing listens behind it"),
        (CONNECTED, NOT_READY, Level.WARN, "is published, but the helper responds HTTP 503"),
        (CONNECTED, b"HTTP/1.1 200 OK\r\n\r\n<html>", Level.FAIL, "does not reach a helper (HTTP 200)"),
        (CONNECTED, b"SSH-2.0-x\r\n", Level.FAIL, "does not reach a helper (HTTP 0)"),
    ],
)
async def test_onion_service_problem_is_named(
    tmp_path: Path, reply: bytes, response: bytes, level: Level, message: str
) -> None:
    result = await check(tmp_path, reply, response)
    assert (result.level, bool(result.advice)) == (level, True)
    assert message in result.message


async def test_onion_service_that_does_not_respond_fails_in_time(tmp_path: Path) -> None:
    result = await check(tmp_path, b"", seconds=0.1)
    assert (result.level, "no response within" in result.message) == (Level.FAIL, True)


async def test_onion_service_without_address_or_tor_is_not_checked(tmp_path: Path) -> None:
    unset = await check_onion_service("", "unix:/run/tor/socks", SystemClock())
    assert (unset.level, "onion_address is not set" in unset.message) == (Level.OK, True)
    missing = await check_onion_service(ADDRESS, f"unix:{tmp_path}/none", SystemClock())
    assert (missing.level, "[server] tor_socks" in missing.advice) == (Level.WARN, True)
