"""Installations by uv with pip's settings, or else by pip, as in `make venv`, the client tests and the images."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from pip_or_uv import NotByUv, install, uv_settings


def _wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing.py", "WORD = 'found'\n")
        wheel.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
        wheel.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("thing-1.0.dist-info/RECORD", "")


@pytest.mark.parametrize(
    "setting, reason",
    [
        (("PIP_NO_INDEX", "1"), "uv cannot be told pip's setting no-index"),
        (("PIP_INDEX_URL", "http://127.0.0.1:1/simple"), "`-m pip --disable-pip-version-check install` failed: "),
    ],
)
def test_pip_installs_where_uv_cannot(tmp_path, monkeypatch, capfd, setting, reason):
    _wheel(tmp_path)
    for name, value in (
        ("PIP_FIND_LINKS", str(tmp_path)),
        ("PIP_RETRIES", "0"),
        ("PIP_CONFIG_FILE", "/dev/null"),
        setting,
    ):
        monkeypatch.setenv(name, value)

    assert install(sys.executable, "--quiet", "--no-deps", "--target", tmp_path / "packages", "thing") == 0

    assert [path.name for path in (tmp_path / "packages").glob("*.py")] == ["thing.py"]
    assert f"pip installs, not uv, because {reason}" in capfd.readouterr().out
    assert not list(Path(sys.prefix).glob(".uv-*"))


def test_uv_gets_the_settings_of_pip(tmp_path):
    listed = rf"""
:env:.default-timeout='180'
:env:.disable-pip-version-check='1'
:env:.find-links='{tmp_path}\n/missing/folder https://links.example/'
global.cert='/etc/old.pem'
global.constraint='one.txt\ntwo.txt'
global.extra-index-url='https://b.example/simple\nhttps://c.example/simple'
global.index-url='https://a.example/simple'
install.cert='/etc/new.pem'
install.trusted-host='a.example b.example:8080'
"""
    variables, arguments = uv_settings(listed, {"REQUESTS_CA_BUNDLE": "/etc/other.pem"})

    assert variables == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://a.example/simple",
        "UV_EXTRA_INDEX_URL": "https://b.example/simple https://c.example/simple",
        "UV_FIND_LINKS": f"{tmp_path},https://links.example/",
        "UV_INSECURE_HOST": "a.example b.example:8080",
        "UV_HTTP_TIMEOUT": "180",
        "SSL_CERT_FILE": "/etc/new.pem",
    }
    assert arguments == ["-c", "one.txt", "-c", "two.txt"]


def test_the_certificates_of_pips_http_library_are_those_of_uv():
    assert uv_settings("", {"CURL_CA_BUNDLE": "/etc/c.pem"})[0]["SSL_CERT_FILE"] == "/etc/c.pem"
    assert "SSL_CERT_FILE" not in uv_settings("", {"CURL_CA_BUNDLE": ""})[0]


def test_a_setting_that_uv_does_not_have_is_not_dropped():
    with pytest.raises(NotByUv, match="setting client-cert"):
        uv_settings("install.client-cert='/etc/client.pem'\n", {})
    assert uv_settings("freeze.client-cert='x'\nglobal.progress-bar='off'\n", {})[1] == []
