"""Mappings of peers' files are kept, but not of peers that have ended."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.memory import FileMapping, layer_layouts
from kvserver import convert_pool
from kvserver.config import ServerConfig
from kvserver.mover.copying import PathFailed
from kvserver.mover.mapping import PeerFiles


class Peer:
    """A server's pool, of which it holds the lock until it ends."""

    def __init__(self, path: Path) -> None:
        config = ServerConfig(num_blocks=9).depot_config()
        nbytes = config.kv_cache.pool_bytes
        path.write_bytes(bytes(nbytes))
        mapping = FileMapping(str(path), nbytes)
        self.pool: Any = convert_pool.pool_description(config, layer_layouts(config), [mapping])
        self._fd = os.open(path, os.O_RDWR)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def end(self) -> None:
        """Its process is gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(tmp_path / "kvdepot-peer.pool")
    yield made
    made.end()


def test_a_file_is_kept_until_it_is_old_or_its_server_has_ended(peer: Peer) -> None:
    files = PeerFiles()
    with files.mapped(peer.pool) as first:
        files._drop(time.monotonic() + 1)  # in use
        with files.mapped(peer.pool) as again:
            assert again is first
    files._drop(time.monotonic() - 60)
    with files.mapped(peer.pool) as again:
        assert again is first
    files._drop(time.monotonic() + 1)  # old
    with files.mapped(peer.pool) as second:
        assert second is not first
    assert first.mapping.closed
    peer.end()
    files._drop(time.monotonic() - 60)
    assert second.mapping.closed


def test_the_file_of_a_server_that_has_ended_is_not_copied_from(peer: Peer) -> None:
    files = PeerFiles()
    with files.mapped(peer.pool):
        pass
    peer.end()
    with pytest.raises(PathFailed, match="its server is gone"), files.mapped(peer.pool):
        pass
