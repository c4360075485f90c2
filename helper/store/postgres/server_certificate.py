"""Reads and verifies the certificate of a database server, because libpq does not state why it refused one.

libpq reports "certificate verify failed" for an expired certificate as well as for an unknown authority, and does not
tell when a valid certificate expires.
"""

from __future__ import annotations

import socket
import ssl
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psycopg.conninfo import conninfo_to_dict

CERTIFICATE_REFUSED: Final = "certificate verify failed"
"""Part of libpq's message for a certificate that it refused, whatever the reason."""
SYSTEM_AUTHORITIES: Final = "system"
"""Value of `sslrootcert` for the certificate authorities of the system."""
_SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
"""SSLRequest message, see "Message Formats" in the documentation of PostgreSQL."""
_SSL_ACCEPTED: Final = b"S"
_DEFAULT_PORT: Final = "5432"
_AUTHORITY_FILES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Arch, Alpine
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",
)


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """The certificate of a server.

    Attributes:
        host: name or address of the server.
        problem: why it does not pass verification, None if it does. The host name is not compared.
        expires_at: Unix seconds of its expiry, None if it does not pass verification.
    """

    host: str
    problem: str | None = None
    expires_at: float | None = None


def find_system_authorities() -> str:
    """Return the file with the certificate authorities of the system, "system" if there is none.

    The libpq of psycopg's wheels does not find them, because its OpenSSL looks in a directory of its own.
    `SSL_CERT_FILE` overrides the file, as in OpenSSL.
    """
    known = (ssl.get_default_verify_paths().cafile, *_AUTHORITY_FILES)
    return next((path for path in known if path is not None and Path(path).is_file()), SYSTEM_AUTHORITIES)


def read_server_certificates(conninfo: str, *, seconds: float) -> list[ServerCertificate]:
    """Connect to each server of a connection string that uses verified TLS, and verify its certificate.

    A server that cannot be reached or has no TLS is omitted: libpq reports that clearly.

    Args:
        conninfo: connection string, as completed by `create_connection_settings`.
        seconds: time limit for each server.
    """
    params = {name: str(value) for name, value in conninfo_to_dict(conninfo).items() if value is not None}
    authorities = params.get("sslrootcert", "")
    if not params.get("sslmode", "").startswith("verify-") or params.get("sslnegotiation") == "direct":
        return []
    names = params.get("host", "").split(",")
    addresses = params.get("hostaddr", "").split(",") if params.get("hostaddr") else names
    ports = params.get("port", _DEFAULT_PORT).split(",")
    ports = ports * len(names) if len(ports) == 1 else ports
    certificates = []
    for name, address, port in zip(names, addresses, ports, strict=False):
        if address and not address.startswith(("/", "@")):
            certificate = _read_certificate(name or address, address, int(port or _DEFAULT_PORT), authorities, seconds)
            certificates += [] if certificate is None else [certificate]
    return certificates


def _read_certificate(name: str, address: str, port: int, authorities: str, seconds: float) -> ServerCertificate | None:
    try:
        context = ssl.create_default_context(cafile=None if authorities == SYSTEM_AUTHORITIES else authorities)
        context.check_hostname = False  # libpq states clearly that a name differs
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # libpq does not require it
        with socket.create_connection((address, port), timeout=seconds) as connection:
            connection.sendall(_SSL_REQUEST)
            if connection.recv(1) != _SSL_ACCEPTED:
                return None
            with context.wrap_socket(connection, server_hostname=name) as encrypted:
                not_after = str((encrypted.getpeercert() or {})["notAfter"])
    except ssl.SSLCertVerificationError as error:
        return ServerCertificate(name, problem=error.verify_message)
    except (OSError, ValueError):
        return None
    return ServerCertificate(name, expires_at=float(ssl.cert_time_to_seconds(not_after)))
