"""Credentials of the peer process of a unix socket, as the kernel reports them."""

from __future__ import annotations

import asyncio
import pwd
import socket
import struct
from typing import Final, NamedTuple

PEER_KEY: Final = "peer"
"""Key of the peer's credentials in the request state."""
_CREDENTIALS: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """Process id, user id and group id at the time of the connection."""

    pid: int
    uid: int
    gid: int


def read_peer(transport: asyncio.BaseTransport) -> Peer | None:
    """The peer process of a connection; None if it is not over a unix socket."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return Peer(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def user_name(uid: int) -> str:
    """The name of a user, or the user id if it has none. May block on a directory service."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
