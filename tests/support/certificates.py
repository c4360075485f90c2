"""Certificate authorities and server certificates for tests of TLS."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class CertificateAuthority:
    """An authority whose certificate is in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file.stem)])
        certificate = (
            _builder(self._name, dt.timedelta(days=-1), dt.timedelta(days=365))
            .issuer_name(self._name)
            .public_key(self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, host: str, *, valid_seconds: float = 90 * 86_400.0) -> tuple[bytes, bytes]:
        """Issue a certificate for a host name. Returns it and its key, in PEM format.

        Args:
            valid_seconds: seconds until it expires; negative if it has expired.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        certificate = (
            _builder(subject, dt.timedelta(hours=-2), dt.timedelta(seconds=valid_seconds))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )


def _builder(subject: x509.Name, begin: dt.timedelta, end: dt.timedelta) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + begin)
        .not_valid_after(now + end)
    )
