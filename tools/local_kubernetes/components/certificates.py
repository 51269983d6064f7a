"""The cluster's certificate authority, the certificates that it issues, and kubeconfig files with them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from local_kubernetes.machine.shell import run

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_DAYS = 365


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    certificate: Path
    key: Path


class Authority:
    """A certificate authority with its files in `folder`. A file gets its final name only when it is complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.ca = self._pair("ca")
        if not self.ca.certificate.exists():
            partial = self._pair("ca.partial")
            out = ("-keyout", partial.key, "-out", partial.certificate)
            run("openssl", "req", "-x509", *_NEW_KEY, *out, "-days", _DAYS, "-subj", "/CN=rayloom-test-cluster")
            _rename(partial, self.ca)

    def issue(self, name: str, subject: str, alternative_names: Sequence[str] = ()) -> Certificate:
        """Returns a certificate for servers and clients, with its key. Creates both if the certificate is missing.

        Examples: subject `/O=GROUP/CN=USER`, alternative name `IP:127.0.0.1`.
        """
        pair = self._pair(name)
        if pair.certificate.exists():
            return pair
        partial = self._pair(f"{name}.partial")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        run("openssl", "req", *_NEW_KEY, "-keyout", partial.key, "-out", request, "-subj", subject)
        lines = ["keyUsage=digitalSignature", "extendedKeyUsage=serverAuth,clientAuth"]
        if alternative_names:
            lines.append(f"subjectAltName={','.join(alternative_names)}")
        extensions.write_text("\n".join(lines) + "\n")
        ca = ("-CA", self.ca.certificate, "-CAkey", self.ca.key, "-CAcreateserial")
        out = ("-out", partial.certificate, "-days", _DAYS, "-extfile", extensions)
        run("openssl", "x509", "-req", "-in", request, *ca, *out)
        _rename(partial, pair)
        return pair

    def signing_key(self, name: str) -> Certificate:
        """A key pair without a certificate: the result's `certificate` is the file of the public key."""
        pair = self._pair(name)
        if not pair.certificate.exists():
            partial = self._pair(f"{name}.partial")
            run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", partial.key)
            run("openssl", "ec", "-in", partial.key, "-pubout", "-out", partial.certificate)
            _rename(partial, pair)
        return pair

    def kubeconfig(self, path: Path, server: str, user: Certificate) -> Path:
        """Writes a kubeconfig that needs no other file."""
        cluster = {"server": server, "certificate-authority-data": _base64(self.ca.certificate)}
        identity = {"client-certificate-data": _base64(user.certificate), "client-key-data": _base64(user.key)}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "rayloom", "cluster": cluster}],
            "users": [{"name": "user", "user": identity}],
            "contexts": [{"name": "rayloom", "context": {"cluster": "rayloom", "user": "user"}}],
            "current-context": "rayloom",
        }
        content = json.dumps(document, indent=1)
        if not path.exists() or path.read_text() != content:
            path.touch(mode=0o600)
            path.write_text(content)
        return path

    def _pair(self, name: str) -> Certificate:
        return Certificate(certificate=self._folder / f"{name}.crt", key=self._folder / f"{name}.key")


def _rename(partial: Certificate, final: Certificate) -> None:
    # The certificate is renamed last, so if a certificate exists, its key exists, too.
    partial.key.rename(final.key)
    partial.certificate.rename(final.certificate)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
