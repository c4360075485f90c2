"""SOCKS5 client for Tor: opens a stream to a host name, which Tor resolves.

Only `CONNECT` without authentication (RFC 1928). The proxy may listen on a unix socket, which HTTP clients do not
support.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from typing import Final

_VERSION: Final = 5
_NO_AUTHENTICATION: Final = 0
_CONNECT: Final = 1
_ADDRESS_BYTES: Final = {1: 4, 4: 16}
"""Length of an address by its type; a host name (3) is preceded by its length."""
_HOST_NAME: Final = 3
REPLIES: Final = {
    1: "general failure",
    2: "connection not allowed",
    3: "network unreachable",
    4: "host unreachable",
    5: "connection refused",
    6: "TTL expired",
    0xF0: "the descriptor is not published",
    0xF1: "the descriptor is invalid",
    0xF2: "the introduction failed",
    0xF3: "the rendezvous failed",
    0xF4: "client authorization is required",
    0xF5: "client authorization is wrong",
    0xF6: "the onion address is invalid",
    0xF7: "the introduction timed out",
}
"""Failures by reply code. Tor sends codes from 0xF0 only on a port with `ExtendedErrors` (proposal 304)."""


class SocksError(Exception):
    """The proxy refuses the request, or is not a SOCKS5 proxy."""


async def open_socks_stream(proxy: str, host: str, port: int) -> tuple[StreamReader, StreamWriter]:
    """Open a stream through a proxy.

    Args:
        proxy: address of the proxy: `unix:PATH` or `HOST:PORT`.
        host: host name of at most 255 bytes.
        port: TCP port.

    Raises:
        OSError: the proxy cannot be reached.
        SocksError: the proxy cannot connect to the host.
    """
    if proxy.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(proxy.removeprefix("unix:"))
    else:
        proxy_host, _, proxy_port = proxy.rpartition(":")
        reader, writer = await asyncio.open_connection(proxy_host.strip("[]"), int(proxy_port))
    try:
        name = host.encode()
        writer.write(bytes([_VERSION, 1, _NO_AUTHENTICATION]))
        if await reader.readexactly(2) != bytes([_VERSION, _NO_AUTHENTICATION]):
            raise SocksError("not a SOCKS5 proxy without authentication")
        writer.write(bytes([_VERSION, _CONNECT, 0, _HOST_NAME, len(name)]) + name + port.to_bytes(2, "big"))
        _, code, _, address_type = await reader.readexactly(4)
        if code:
            raise SocksError(REPLIES.get(code, f"SOCKS error {code}"))
        length = _ADDRESS_BYTES.get(address_type) or (await reader.readexactly(1))[0]
        await reader.readexactly(length + 2)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
        raise SocksError("the proxy closed the connection") from None
    except BaseException:
        writer.close()
        raise
    return reader, writer
