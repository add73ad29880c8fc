"""Pulls random cached blocks as a peer would, and checks every byte of them."""

from __future__ import annotations

import random

from kvclient.client import Client
from kvclient.description import PoolDescription
from kvclient.replay.follower import Follower
from kvclient.replay.pattern import Values, mix, page_words
from kvclient.replay.rows import GroupRows, group_rows
from kvclient.values import BlockStatus

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
        self._groups = {rows.group: rows for rows in group_rows(pool)}
        block_nbytes = max(
            (sum(layer.page_bytes for layer in rows.layers) for rows in self._groups.values()),
            default=1,
        )
        self._blocks_a_round = min(BLOCKS_A_ROUND_MAX, max(1, BYTES_A_ROUND // block_nbytes))

    def pull(self) -> list[str]:
        """One round; answers the blocks whose bytes are wrong."""
        with self._follower.lock:
            known = self._follower.contents.sums
            drawn = self._rng.sample(list(known), min(self._blocks_a_round, len(known)))
            expected = {key: known[key] for key in drawn}
        wrong = []
        for group, rows in self._groups.items():
            hashes = [block_hash for at, block_hash in drawn if at == group]
            if not hashes:
                continue
            for pulled in self._client.pull_blocks(hashes, group, checksums=True):
                if pulled.status is not BlockStatus.READY:
                    self.blocks_gone += 1
                    continue
                self.blocks_pulled += 1
                self.bytes_pulled += len(pulled.data)
                if not holds(rows, pulled.data, expected[group, pulled.block_hash]):
                    wrong.append(
                        f"pulled block {pulled.block_hash.hex()} of group {group} holds other "
                        "bytes than its prefix demands"
                    )
        return wrong


def holds(rows: GroupRows, data: bytes, sums: Values) -> bool:
    """Whether the pages of a block hold what its tokens' sums demand."""
    values = mix(sums[rows.tokens_per_row - 1 :: rows.tokens_per_row])
    start = 0
    for layer in rows.layers:
        page = page_words(values, layer.salts).tobytes()
        if data[start : start + layer.used_bytes] != page:
            return False
        start += layer.page_bytes
    return start == len(data)
