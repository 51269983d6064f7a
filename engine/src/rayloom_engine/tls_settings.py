"""The settings of TLS between gateways and engines: three files, and whether connections in clear text are accepted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rayloom_engine.errors import ConfigError

TlsMode = Literal["permissive", "strict"]


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """The paths of the three PEM files. `prefix`: beginning of the names of their settings, such as "front_tls"."""

    prefix: str
    cert: Path
    key: Path
    ca: Path


def tls_paths(prefix: str, cert: str | None, key: str | None, ca: str | None) -> TlsPaths | None:
    """Returns the paths; None if no file is given. Raises ConfigError if only one or two files are given."""
    given = {f"{prefix}_cert_file": cert, f"{prefix}_key_file": key, f"{prefix}_ca_file": ca}
    missing = [field for field, path in given.items() if path is None]
    if cert is None or key is None or ca is None:
        if len(missing) == len(given):
            return None
        raise ConfigError(
            f"{', '.join(missing)}: missing; TLS between gateways and engines needs {', '.join(given)}, so set all "
            "three or none"
        )
    return TlsPaths(prefix, Path(cert), Path(key), Path(ca))
