"""Makes the certificates of engines and gateway pods. Pure: equal arguments give equal bytes.

The private keys of the CA and of the certificates are derived from the operator's key, as admin tokens are. So the
operator stores no keys and reads no Secrets. After a restart, or after the deletion of a Secret, it writes the same
content again. Ed25519 permits this, because any 32 bytes are a key, and signatures have no random part.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

# A certificate is renewed at the beginning of each period, and is valid for three periods. So running pods can connect
# even if no operator runs for 20 days.
PERIOD = timedelta(days=10)
LIFE = 3 * PERIOD
_CLOCK_SKEW = timedelta(days=1)  # largest difference between the clocks of the operator's and of the pods' machines
_MOST_KEPT = 4096  # the largest number of cached results; each takes 3 kB


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a certificate. An engine's certificate is valid only for servers, a gateway's only for clients."""

    role: Literal["engine", "gateway"]
    name: str  # DNS name, with the namespace
    uid: str  # uid of the LLMService or LLMGateway


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM texts: a certificate, its private key, and the certificates of the CAs that its owner trusts."""

    cert: str
    key: str
    ca: str


def certificate_files(operator_key: bytes, previous_key: bytes, owner: Owner, now: datetime) -> CertificateFiles:
    """Returns the files of the current period. The time of day at which a period begins differs from owner to owner.

    `previous_key`: the operator's key before `operator_key`, or empty. As long as there is a previous key, the CA of
    the previous key signs the certificate, and both CAs are trusted. Pods read their new files at different times, so
    some pods know only the CA of the previous key.
    """
    return _files(operator_key, previous_key, owner, _begin(owner, now))


def _begin(owner: Owner, now: datetime) -> int:
    """Returns the Unix time in seconds at which the period of `now` began."""
    length = int(PERIOD.total_seconds())
    offset = int.from_bytes(hashlib.sha256(owner.uid.encode()).digest()[:8], "big") % length
    return (int(now.timestamp()) - offset) // length * length + offset


@lru_cache(maxsize=_MOST_KEPT)
def _files(operator_key: bytes, previous_key: bytes, owner: Owner, begin: int) -> CertificateFiles:
    trusted = [_ca_key(key) for key in (operator_key, previous_key) if key]
    key = _private_key(operator_key, f"{owner.role}/{owner.uid}/{begin}")
    usage = ExtendedKeyUsageOID.SERVER_AUTH if owner.role == "engine" else ExtendedKeyUsageOID.CLIENT_AUTH
    signer = trusted[-1]
    cert = (
        _builder(key, signer, _name(f"rayloom {owner.role}"), begin)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(owner.name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .sign(signer, None)
    )
    return CertificateFiles(
        cert=_pem(cert),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode(),
        ca="".join(_pem(_ca_certificate(each, begin)) for each in trusted),
    )


def _ca_certificate(key: Ed25519PrivateKey, begin: int) -> x509.Certificate:
    """Returns the CA's own certificate. Each period gets a new CA certificate with the same key and name."""
    return (
        _builder(key, key, _ca_name(key), begin)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(is_ca=True), critical=True)
        .sign(key, None)
    )


def _builder(
    key: Ed25519PrivateKey, signer: Ed25519PrivateKey, subject: x509.Name, begin: int
) -> x509.CertificateBuilder:
    first = datetime.fromtimestamp(begin, UTC)
    public = key.public_key()
    serial = hashlib.sha256(public.public_bytes_raw() + begin.to_bytes(8, "big")).digest()[:16]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(_ca_name(signer))
        .public_key(public)
        .serial_number(int.from_bytes(serial, "big") | 1)
        .not_valid_before(first - _CLOCK_SKEW)
        .not_valid_after(first + LIFE)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )


def _ca_key(operator_key: bytes) -> Ed25519PrivateKey:
    return _private_key(operator_key, "ca")


def _private_key(operator_key: bytes, of: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hmac.digest(operator_key, f"pod-tls/{of}".encode(), "sha256"))


def _ca_name(key: Ed25519PrivateKey) -> x509.Name:
    # CAs of different keys need different names. Otherwise a peer that trusts both CAs might try only one of them.
    return _name(f"rayloom pod CA {hashlib.sha256(key.public_key().public_bytes_raw()).hexdigest()[:8]}")


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(cert: x509.Certificate) -> str:
    return cert.public_bytes(Encoding.PEM).decode()
