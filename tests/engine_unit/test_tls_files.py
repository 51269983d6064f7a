"""The files for TLS: messages that name the wrong file, and the validity of certificates."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given, settings
from hypothesis import strategies as st

from rayloom_engine.config import parse_config
from rayloom_engine.errors import ConfigError
from rayloom_engine.front.gateway.gateway_config import parse_gateway_config
from rayloom_engine.front.gateway.link_tls import link_tls
from rayloom_engine.protocol.tls.certificate_times import CertificateTimes, certificate_times
from rayloom_engine.protocol.tls.files import TlsFiles
from rayloom_engine.tls_settings import TlsPaths
from rt_tls import DAY, Authority, write_tls

AUTHORITY = Authority()
ISSUED = AUTHORITY.issue("engine", is_engine=True)
OTHER = AUTHORITY.issue("engine", is_engine=True)


def _with_passphrase() -> bytes:
    key = serialization.load_pem_private_key(ISSUED.key, None)
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda paths: paths.cert.unlink(), r"front_tls_cert_file: cannot read .*tls.crt: .*No such file"),
        (lambda paths: paths.key.unlink(), r"front_tls_key_file: cannot read .*tls.key: .*No such file"),
        (lambda paths: paths.ca.unlink(), r"front_tls_ca_file: cannot read .*ca.crt: .*No such file"),
        (lambda paths: paths.cert.write_bytes(b"?"), r"front_tls_cert_file: .*tls.crt has no certificate in PEM"),
        (
            lambda paths: paths.cert.write_bytes(ISSUED.cert.replace(b"MII", b"MIj", 1)),
            r"front_tls_cert_file: .*tls.crt has no certificate in PEM format \(damaged certificate",
        ),
        (lambda paths: paths.key.write_bytes(b"?"), r"front_tls_key_file: .*tls.key has no private key that can be"),
        (lambda paths: paths.key.write_bytes(_with_passphrase()), r"front_tls_key_file: .* without a passphrase"),
        (lambda paths: paths.key.write_bytes(OTHER.key), r"tls.key is not the private key of the certificate in .*crt"),
        (lambda paths: paths.ca.write_bytes(b""), r"front_tls_ca_file: .*ca.crt has no certificate that can be read"),
    ],
)
def test_the_error_names_the_file_that_cannot_be_used(
    tmp_path: Path, damage: Callable[[TlsPaths], object], message: str
) -> None:
    paths = write_tls(tmp_path, "front_tls", ISSUED, AUTHORITY.cert)
    TlsFiles(paths, is_server=True)
    damage(paths)
    with pytest.raises(ConfigError, match=message):
        TlsFiles(paths, is_server=True)


def test_a_certificate_that_has_expired_is_logged_and_does_not_prevent_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The renewal of the certificate must not need a restart."""
    old = AUTHORITY.issue("engine", is_engine=True, end=datetime.now(UTC) - DAY / 2)
    files = TlsFiles(write_tls(tmp_path, "tls", old, AUTHORITY.cert), is_server=False)
    [record] = caplog.records
    assert "tls_cert_file: the certificate in" in record.message
    assert "has expired at 20" in record.message
    write_tls(tmp_path, "tls", ISSUED, AUTHORITY.cert)
    files.context()
    assert len(caplog.records) == 1


def test_a_certificate_of_tomorrow_names_the_clocks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    early = AUTHORITY.issue("engine", is_engine=True, begin=datetime.now(UTC) + DAY / 2)
    TlsFiles(write_tls(tmp_path, "tls", early, AUTHORITY.cert), is_server=False)
    assert "check the clocks" in caplog.text


_SECONDS = st.integers(0, int((datetime(2400, 1, 1) - datetime(1950, 1, 1)).total_seconds()))


@settings(max_examples=50, deadline=None)
@given(begin=_SECONDS, seconds=st.integers(1, 10**9))
def test_the_times_are_those_of_the_certificate(begin: int, seconds: int) -> None:
    """X.509 writes two digits of years before 2050, and four digits of later years."""
    first = datetime(1950, 1, 1, tzinfo=UTC) + timedelta(seconds=begin)
    last = first + timedelta(seconds=seconds)
    pem = AUTHORITY.issue("engine", is_engine=True, begin=first, end=last).cert
    assert certificate_times(pem.decode()) == CertificateTimes(first, last)
    parsed = x509.load_pem_x509_certificate(pem)
    assert (parsed.not_valid_before_utc, parsed.not_valid_after_utc) == (first, last)


@given(cut=st.integers(0, 2000), noise=st.binary(max_size=60))
def test_bytes_that_are_no_certificate_are_a_value_error(cut: int, noise: bytes) -> None:
    whole = ISSUED.cert.decode()
    damaged = whole[: cut % (len(whole) - 30)] + noise.hex()
    with pytest.raises(ValueError, match=r"no line|damaged certificate"):
        certificate_times(damaged)


ENGINE = {"model": "m", "front_port": 8003, "front_key_file": "/key"}
GATEWAY = {"served_model_name": "m", "engines_dns": "chat-engines:8003", "key_file": "/key", "cache_dir": "/cache"}


def test_some_of_the_files_are_not_enough() -> None:
    with pytest.raises(ConfigError, match=r"front_tls_key_file, front_tls_ca_file: missing; .* set all three or none"):
        parse_config({**ENGINE, "front_tls_cert_file": "/cert"})
    with pytest.raises(ConfigError, match=r"tls_cert_file: missing; .* set all three or none"):
        parse_gateway_config({**GATEWAY, "tls_key_file": "/key.pem", "tls_ca_file": "/ca"})


def test_tls_without_the_port_for_gateways_is_refused() -> None:
    files = {f"front_tls_{kind}_file": f"/{kind}" for kind in ("cert", "key", "ca")}
    with pytest.raises(ConfigError, match="front_port is not set"):
        parse_config({"model": "m", **files})
    assert parse_config({**ENGINE, **files}).front_tls_mode == "strict"


def test_a_mode_is_permissive_or_strict() -> None:
    with pytest.raises(ConfigError, match="front_tls_mode: Input should be 'permissive' or 'strict', given 'on'"):
        parse_config({**ENGINE, "front_tls_mode": "on"})


@pytest.mark.parametrize(
    ("document", "name"),
    [
        ({}, "chat-engines"),
        ({"engines_dns": "chat-engines.default.svc.cluster.local.:8003"}, "chat-engines.default.svc.cluster.local"),
        ({"tls_server_name": "chat-engines.default.svc"}, "chat-engines.default.svc"),
        ({"engines_dns": None, "engines": {"a": "10.0.0.7:8003"}}, ""),
    ],
)
def test_engines_are_named_by_dns_or_by_their_addresses(tmp_path: Path, document: dict[str, object], name: str) -> None:
    paths = write_tls(tmp_path, "tls", AUTHORITY.issue("gateway", is_engine=False), AUTHORITY.cert)
    files = {f"tls_{kind}_file": str(getattr(paths, kind)) for kind in ("cert", "key", "ca")}
    settings = parse_gateway_config({**GATEWAY, **document, **files}).gateway
    tls = link_tls(settings)
    assert tls is not None
    assert (tls.server_name, tls.is_strict) == (name, True)
    assert link_tls(parse_gateway_config(GATEWAY).gateway) is None
