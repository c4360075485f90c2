"""Checks that the listen addresses are available; only run while no helper runs."""

from __future__ import annotations

import socket

from helper.doctor.result import CheckResult, fail, ok


def check_address(listener_name: str, host: str, port: int, setting: str) -> CheckResult:
    """Check that an address is free, by binding it without listening.

    Args:
        listener_name: the listener, for the message.
        host: host name or IP address.
        port: 0 is always free.
        setting: the section of the settings that sets it.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    if not addresses:
        advice = f"Set {setting} host to an address of this machine."
        return fail("address", f"{host} is not an address of this machine", advice, host=host, port=port)
    family, _, _, _, address = addresses[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            advice = f"Set {setting} host and port to a free address, or stop the program that uses it: see `ss -ltnp`."
            return fail(
                "address",
                f"{listener_name} cannot listen on {host}:{port}: {error.strerror}",
                advice,
                host=host,
                port=port,
            )
    return ok("address", f"{listener_name} can listen on {host}:{port}", host=host, port=port)
