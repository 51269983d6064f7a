"""Certificates for TLS between gateways and engines: a CA, and certificates that it signs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from rayloom_engine.tls_settings import TlsPaths

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, as PEM."""

    cert: bytes
    key: bytes


class Authority:
    """A CA with a new key."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rayloom test CA")])
        now = datetime.now(UTC)
        built = (
            _builder(self._name, self._name, self._key.public_key(), now - DAY, now + 3 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.cert = built.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, name: str, *, is_engine: bool, begin: datetime | None = None, end: datetime | None = None
    ) -> Issued:
        """A certificate for a host name or an IP address; by default from yesterday until tomorrow."""
        now = datetime.now(UTC)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternative = x509.IPAddress(ip_address(name)) if name[0].isdigit() else x509.DNSName(name)
        usage = ExtendedKeyUsageOID.SERVER_AUTH if is_engine else ExtendedKeyUsageOID.CLIENT_AUTH
        built = (
            _builder(subject, self._name, key.public_key(), begin or now - DAY, end or now + DAY)
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Issued(built.public_bytes(serialization.Encoding.PEM), _pem(key))


def write_tls(folder: Path, prefix: str, issued: Issued, ca: bytes) -> TlsPaths:
    """Writes the three files into a folder, each by a rename, like a kubelet."""
    folder.mkdir(exist_ok=True)
    paths = TlsPaths(prefix, folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    for path, content in ((paths.cert, issued.cert), (paths.key, issued.key), (paths.ca, ca)):
        part = path.with_suffix(".part")
        part.write_bytes(content)
        os.replace(part, path)
    return paths


def tls_flags(paths: TlsPaths, mode: str = "strict") -> list[str]:
    """The flags of `rayloom-engine serve` or `gateway` for these files."""
    flag = "--" + paths.prefix.replace("_", "-")
    given = {"cert-file": paths.cert, "key-file": paths.key, "ca-file": paths.ca, "mode": mode}
    return [part for name, value in given.items() for part in (f"{flag}-{name}", str(value))]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
