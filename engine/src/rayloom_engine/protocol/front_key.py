"""The service's key, which fronts and cores prove to each other (front_auth.py). Read at the start of each process."""

from __future__ import annotations

from pathlib import Path

from rayloom_engine.errors import ConfigError

MIN_KEY_CHARS = 16  # an attacker who has recorded a handshake can try keys offline, and would find a short key


def load_front_key(path: str, field: str) -> str:
    """Returns the key in a file. Raises ConfigError with `field` if the file is unreadable or the key too short."""
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{field}: cannot read {path}: {error}") from error
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(
            f"{field}: the key in {path} has {len(key)} characters, at least {MIN_KEY_CHARS} are needed; "
            "write 32 random hexadecimal digits into the file"
        )
    return key
