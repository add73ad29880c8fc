"""Addresses as options name them."""

from __future__ import annotations

import ipaddress

from kvserver.config import ConfigError


def split_address(address: str, *, option: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not port.isascii():
        raise ConfigError(f"{option}: must be HOST:PORT, got {address!r}")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option}: port must be between 0 and 65535, got {port!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address bound to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
