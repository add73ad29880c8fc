"""The pool's bytes as the options want them; what cannot be had is told by the option's name."""

from __future__ import annotations

import logging
import os
import secrets
from pathlib import Path

from kvcore.errors import ResourceExhausted
from kvcore.memory import FileMemory, PoolMemory, remove_abandoned
from kvcore.spec import DepotConfig
from kvserver.config import ConfigError, ServerConfig

logger = logging.getLogger(__name__)


def make_memory(config: ServerConfig, depot_config: DepotConfig) -> PoolMemory:
    """The pool's bytes, zeroed, where the options say. Raises ConfigError."""
    on_cpu = config.device[0].index is None
    directory = config.mapping_directory() if on_cpu else ""
    try:
        for path in remove_abandoned(directory) if on_cpu else ():
            logger.info("removed %s, which a server that died had left", path)
        return PoolMemory(
            depot_config,
            directory,
            name=f"{os.getpid()}-{secrets.token_hex(4)}",
            devices=config.device,
            huge_pages=not config.no_huge_pages,
        )
    except ResourceExhausted as error:
        where = "--mapping-dir" if on_cpu else "--device"
        raise ConfigError(
            f"{error.message} (--num-blocks, --capacity-tokens or --memory-bytes; {where})"
        ) from None
    except OverflowError:
        raise ConfigError(
            f"the pool would have {depot_config.kv_cache.pool_bytes} bytes, more than a file can: "
            "name fewer blocks"
        ) from None
    except OSError as error:
        reason = error.strerror if Path(directory).is_dir() else "there is no such directory"
        raise ConfigError(f"--mapping-dir: cannot keep the pool in {directory}: {reason}") from None


def tell_where(config: ServerConfig, memory: PoolMemory) -> None:
    """What was obtained, in the log."""
    first = memory.ranks[0]
    if not isinstance(first, FileMemory):
        logger.info(
            "the pool: %d bytes on each of %s", memory.nbytes, ", ".join(map(str, config.device))
        )
        return
    if first.huge_bytes:
        pages = f"{first.huge_bytes} of them in huge pages"
    elif config.no_huge_pages:
        pages = "no huge pages (--no-huge-pages)"
    else:
        pages = (
            "no huge pages: its filesystem gives none (a tmpfs does if mounted with huge=advise)"
        )
    logger.info("the pool: %d bytes in %s, %s", memory.nbytes, memory.path, pages)
