"""Which host this is, for peers that might map each other's memory."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def host_id() -> str:
    """Equal in every process of one boot of one kernel; empty where that is not known.

    Containers of one host share it and need not share a path: whoever maps one makes sure
    that it is the peer's (mapping.py).
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
