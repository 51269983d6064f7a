"""Reads the validity times of a certificate. Python's ssl module has these times only for a peer's certificate."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

_FIRST_CERTIFICATE = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----")
_SEQUENCE = 0x30
_VERSION = 0xA0
_UTC_TIME = 0x17
_GENERALIZED_TIME = 0x18


@dataclass(frozen=True, slots=True)
class CertificateTimes:
    """The first and the last time at which a certificate is valid."""

    begin: datetime
    end: datetime


def certificate_times(pem: str) -> CertificateTimes:
    """Returns the times of the first certificate in a PEM file: the certificate of the file's owner.

    Raises ValueError if the file has no certificate.
    """
    begin, end = _FIRST_CERTIFICATE
    start = pem.find(begin)
    stop = pem.find(end, start)
    if start < 0 or stop < 0:
        raise ValueError(f"no line {begin}")
    try:
        return _times(ssl.PEM_cert_to_DER_cert(pem[start : stop + len(end)]))
    except (IndexError, ValueError) as error:
        raise ValueError(f"damaged certificate: {error}") from error


def _times(der: bytes) -> CertificateTimes:
    # RFC 5280: Certificate { tbsCertificate { [0] version, serial, signature, issuer, validity { begin, end }, ... } }
    _, certificate, _ = _element(der)
    _, fields, _ = _element(certificate)
    tag, _, rest = _element(fields)
    num_before_validity = 3 if tag == _VERSION else 2
    for _ in range(num_before_validity):
        _, _, rest = _element(rest)
    tag, validity, _ = _element(rest)
    if tag != _SEQUENCE:
        raise ValueError("no validity")
    begin_tag, begin, rest = _element(validity)
    end_tag, end, _ = _element(rest)
    return CertificateTimes(_time(begin_tag, begin), _time(end_tag, end))


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Returns tag and content of the first DER element, and the bytes after it."""
    size, start = data[1], 2
    if size & 0x80:
        start = 2 + (size & 0x7F)
        size = int.from_bytes(data[2:start], "big")
    content = data[start : start + size]
    if len(content) < size:
        raise ValueError("it is cut off")
    return data[0], content, data[start + size :]


def _time(tag: int, content: bytes) -> datetime:
    text = content.decode("ascii")
    if tag == _UTC_TIME:  # the year has two digits: 50 to 99 mean 1950 to 1999
        text = ("19" if text >= "50" else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError("no time of validity")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)
