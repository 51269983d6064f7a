"""Recognises addresses of loopback, which no other machine can reach. Pure."""

from __future__ import annotations

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """True for localhost and for a loopback address. False for other names, because they are not resolved."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
