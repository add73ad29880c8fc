"""What all imports of a process share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

from kvcore.memory import Span
from kvdepot.v1 import transfer_pb2 as pb
from kvdepot.v1 import types_pb2
from kvserver.mover import mapping
from kvserver.mover.bucket import Bucket
from kvserver.mover.channel import Message
from kvserver.mover.lease import Leases
from kvserver.mover.nixl import ReadingAgent
from kvserver.mover.pages import spans_of
from kvserver.mover.parts import Part, parts_of
from kvserver.mover.peer import Channels, Peer
from kvserver.mover.store import Store

_DESCRIBED_MAX = 64
# Of an answer, for each hash: its status and the block's id; and what is known of the block
# beside its tokens, mostly: its own hash and the parent's.
_ANSWER_BYTES, _CONTENT_BYTES = 5, 256


@dataclass(frozen=True)
class PeerPool:
    """What a peer has said of its pool in one epoch."""

    epoch: str
    pool: types_pb2.PoolDescription

    @cached_property
    def spans(self) -> list[list[Span]]:
        """By group, as spans_of; InvalidArgument if it cannot be so."""
        return spans_of(self.pool)


class Importer:
    """The pool that is filled, and what is known of peers."""

    def __init__(self, start: Message, pool: types_pb2.PoolDescription, store: Store) -> None:
        self.pool = pool
        self.store = store
        self.bucket = Bucket(start["bandwidth_bytes"])
        self.channels = Channels()
        self.leases = Leases()
        self.peer_files = mapping.PeerFiles()
        # For all imports together; they start when they are needed.
        self.num_copiers: int = start["copy_threads"]
        self.copiers = ThreadPoolExecutor(self.num_copiers, "kvdepot-copy")
        self._part_blocks: int = start["part_blocks"]
        self._part_bytes: int = start["part_bytes"]
        self._described: dict[str, PeerPool] = {}
        self._devices: str = start["nixl_devices"]
        self._agent: ReadingAgent | None = None
        self._lock = threading.Lock()

    def parts(self, num_hashes: dict[int, int], *, contents: bool) -> list[Part]:
        """How an import of so many hashes, by group, is divided."""
        hash_bytes = [
            _ANSWER_BYTES + (_CONTENT_BYTES + self.token_bytes(group) if contents else 0)
            for group in num_hashes
        ]
        return parts_of(
            list(num_hashes.values()),
            hash_bytes,
            max_blocks=self._part_blocks,
            max_bytes=self._part_bytes,
        )

    def token_bytes(self, group: int) -> int:
        """Of the token ids of one block."""
        pool = self.pool
        ranks = max(1, pool.decode_context_parallel_size * pool.prefill_context_parallel_size)
        return 4 * pool.groups[group].spec.block_size * ranks

    def pool_of(self, peer: Peer, epoch: str, seconds: float) -> PeerPool:
        """The pool of a peer in this epoch of its; asked for once."""
        described = self._described.get(peer.target)
        if described is None or described.epoch != epoch:
            answer = peer.call("DescribePool", pb.DescribePoolRequest(), seconds)
            described = PeerPool(answer.epoch, answer.pool)
            if len(self._described) >= _DESCRIBED_MAX:
                self._described.clear()
            self._described[peer.target] = described
        return described

    def agent(self) -> ReadingAgent:
        """Made when first asked for."""
        with self._lock:
            if self._agent is None:
                self._agent = ReadingAgent(self.store, self._devices)
            return self._agent
