"""Whether an address can be had, asked before gRPC is: its own complaint names no flag."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from kvserver.config import ConfigError


def require_port(host: str, port: int, *, option: str, advice: str) -> None:
    """ConfigError with ``option`` and ``advice`` if no server can listen there."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
        )
    except OSError as error:
        raise ConfigError(f"{option}: cannot resolve {host}: {error.strerror}") from None
    errors = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
                probe.listen(1)
        except OSError as error:
            errors.append(error)
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if any(error.errno == errno.EADDRINUSE for error in errors):
        raise ConfigError(f"{option}: {shown} is in use: {advice}")
    if len(errors) == len(found):  # a name may stand for more than this host has
        raise ConfigError(f"{option}: cannot listen on {shown}: {errors[0].strerror}")


def require_path(path: Path) -> None:
    """ConfigError if no server can listen on this Unix socket.

    A socket left behind by a dead server is no obstacle; a live server's, or a file, is.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ConfigError(
                f"--uds: there is no directory {path.parent}: create it, or name another path"
            ) from None
    except OSError as error:
        raise ConfigError(f"--uds: cannot use {path}: {error.strerror}") from None
    else:
        if not stat.S_ISSOCK(mode):
            raise ConfigError(f"--uds: {path} exists and is not a socket")
        _remove_if_dead(path)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
            path.unlink()
    except OSError as error:
        # Too long a path has no errno.
        reason = error.strerror or f"{error}: it has {len(os.fsencode(path))} bytes"
        raise ConfigError(f"--uds: cannot listen on {path}: {reason}") from None


def _remove_if_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"--uds: cannot use {path}: {error.strerror}") from None
        else:
            raise ConfigError(f"--uds: {path} is served already: stop that server first")
