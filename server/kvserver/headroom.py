"""Whether the books fit the machine: they are plain objects, and a pool may have many blocks."""

from __future__ import annotations

from pathlib import Path

from kvcore.spec import DepotConfig
from kvserver.config import ConfigError

# Measured on 64-bit CPython 3.11: a block's own books, and with its hash, its entry in the
# prefix index and what events say of it, beside its tokens.
_EMPTY_BLOCK_BYTES = 200
_CACHED_BLOCK_BYTES = 584
_TOKEN_BYTES = 4


def require_room(config: DepotConfig, limit: int | None) -> None:
    """ConfigError if the books of a full pool take more than ``limit``, in bytes, or, without
    one, than the machine has.
    """
    needed = books_bytes(config)
    allowed = available_bytes() if limit is None else limit
    if allowed is not None and needed > allowed:
        whose = "the machine has" if limit is None else "--max-books-bytes allows"
        raise ConfigError(
            f"the books of {config.kv_cache.num_blocks} blocks take about {needed} bytes of "
            f"memory, {whose} {allowed}: name fewer blocks"
            + (", or the limit with --max-books-bytes" if limit is None else "")
        )


def books_bytes(config: DepotConfig) -> int:
    """About what the books of a full pool take."""
    block = _EMPTY_BLOCK_BYTES
    if config.enable_caching:
        num_tokens = max((group.spec.block_size for group in config.kv_cache.groups), default=0)
        block = _CACHED_BLOCK_BYTES + _TOKEN_BYTES * num_tokens
    return config.kv_cache.num_blocks * block


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that this process may still take; None where the system does not say.

    What Linux calls available, or less where a control group has a lower limit.
    """
    known = [*_control_group_limits(root), *_memory_available(root)]
    return min(known, default=None)


def _memory_available(root: Path) -> list[int]:
    for line in _text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return [int(rest.split()[0]) * 1024]
    return []


def _control_group_limits(root: Path) -> list[int]:
    """Of this process's group and those around it, of both versions of control groups."""
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, file = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and only the mount be seen.
        group = mount / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                text = _text(directory / file).strip()
                if text.isdigit():
                    limits.append(int(text))
    return limits


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
