"""Whether the addresses that the helper is to listen on can be had. Only asked where no helper runs."""

from __future__ import annotations

import socket

from helper.doctor.result import CheckResult, fail, ok


def look_at_address(what: str, host: str, port: int, setting: str) -> CheckResult:
    """Bind an address for a moment, without listening on it.

    Args:
        what: is to listen there.
        host: the address.
        port: 0 is always free.
        setting: the section that names it.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        found = []
    if not found:
        advice = f"Set {setting} host to an address of this machine."
        return fail("address", f"{host} is no address to listen on", advice, host=host, port=port)
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            advice = f"Set {setting} host and port to what is free, or stop who has it: `ss -ltnp` tells."
            return fail(
                "address", f"{what} cannot listen on {host}:{port}: {error.strerror}", advice, host=host, port=port
            )
    return ok("address", f"{what} can listen on {host}:{port}", host=host, port=port)
