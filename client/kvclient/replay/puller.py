"""Pulls random cached blocks as a peer would, and checks every byte of them."""

from __future__ import annotations

import random

from kvclient.client import Client
from kvclient.replay.follower import Follower
from kvclient.replay.pattern import WORD_BYTES, block_bytes, mix, salts
from kvclient.values import BlockStatus, PoolDescription

BLOCKS_A_ROUND_MAX = 64
BYTES_A_ROUND = 1 << 20


class Puller:
    """Draws from what the follower has seen; a block that is gone meanwhile is no error."""

    def __init__(
        self, client: Client, follower: Follower, pool: PoolDescription, seed: int = 0
    ) -> None:
        self.blocks_pulled = 0
        self.blocks_gone = 0
        self.bytes_pulled = 0
        self._client = client
        self._follower = follower
        self._rng = random.Random(seed)
        group = pool.groups[0]
        token_bytes = group.page_size_bytes // (2 * group.block_size)
        assert token_bytes % WORD_BYTES == 0
        block_nbytes = group.page_size_bytes * len(group.layer_names)
        self._blocks_a_round = min(BLOCKS_A_ROUND_MAX, max(1, BYTES_A_ROUND // block_nbytes))
        self._salts = salts(len(group.layer_names), token_bytes)

    def pull(self) -> list[str]:
        """One round; answers the blocks whose bytes are wrong."""
        with self._follower.lock:
            known = self._follower.contents.sums
            hashes = self._rng.sample(list(known), min(self._blocks_a_round, len(known)))
            expected = {block_hash: known[block_hash] for block_hash in hashes}
        if not hashes:
            return []
        wrong = []
        for pulled in self._client.pull_blocks(hashes, checksums=True):
            if pulled.status is not BlockStatus.READY:
                self.blocks_gone += 1
                continue
            self.blocks_pulled += 1
            self.bytes_pulled += len(pulled.data)
            sums = expected[pulled.block_hash]
            if block_bytes(mix(sums), self._salts).tobytes() != pulled.data:
                wrong.append(
                    f"pulled block {pulled.block_hash.hex()} holds other bytes than its prefix "
                    "demands"
                )
        return wrong
