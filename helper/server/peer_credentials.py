"""Who is at the other end of a unix socket, by the kernel's word."""

from __future__ import annotations

import asyncio
import pwd
import socket
import struct
from typing import Final, NamedTuple

KEY: Final = "peer"
"""Under which a request's state has it."""
_CREDENTIALS: Final = struct.Struct("3i")


class Peer(NamedTuple):
    """A process: its number, its user and its group, as they were when it connected."""

    pid: int
    uid: int
    gid: int


def peer_of(transport: asyncio.BaseTransport) -> Peer | None:
    """The process behind a connection, None where it is none of this machine's."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    return Peer(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


def user_name(uid: int) -> str:
    """A user's name, or the number where it has none; may ask the machine's directory service."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
