"""Transfers, and what is pulled under one: the part that both clients share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from kvclient.calls import Call
from kvclient.convert import uint32
from kvclient.errors import DataLoss, InternalError
from kvclient.frame import parse
from kvclient.values import BlockStatus, PulledBlock
from kvdepot.v1 import transfer_pb2 as pb

HELD_BYTES_MAX = 64 << 20
"""Of a pull, held until the server has said that the lease still ran."""
_RENEWALS_A_LEASE = 3


@dataclass(frozen=True, slots=True)
class Reach:
    """How a pool's bytes can be had; what is empty is not offered."""

    host_id: str
    data_address: str
    nixl_agent: bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks that nobody writes to until ``close_transfer``, or ``lease_ttl_s`` from now.

    By group: a status a hash asked for, and a block id, 0 unless it is ready.
    """

    transfer_id: str
    epoch: str
    lease_ttl_s: float
    statuses: Mapping[int, tuple[BlockStatus, ...]]
    block_ids: Mapping[int, tuple[int, ...]]
    reach: Reach


def open_transfer(
    groups: Mapping[int, Sequence[bytes]],
    *,
    fingerprint: str = "",
    lease_ttl_s: float | None = None,
    name: str = "",
) -> Call[Transfer]:
    """OpenTransfer, of hashes by group."""
    request = pb.OpenTransferRequest(
        fingerprint=fingerprint,
        groups=[
            pb.GroupHashes(group=uint32(group, "group"), block_hashes=hashes)
            for group, hashes in groups.items()
        ],
        lease_ttl_seconds=lease_ttl_s,
        name=name,
    )
    return Call("KVTransferService", "OpenTransfer", request, _transfer)


def renew_transfer(transfer_id: str) -> Call[float]:
    """RenewTransfer; answers the lease's seconds from now."""
    request = pb.RenewTransferRequest(transfer_id=transfer_id)
    return Call(
        "KVTransferService",
        "RenewTransfer",
        request,
        lambda reply: float(reply.lease_ttl_seconds),
    )


def close_transfer(transfer_id: str) -> Call[None]:
    """CloseTransfer."""
    request = pb.CloseTransferRequest(transfer_id=transfer_id)
    return Call("KVTransferService", "CloseTransfer", request, lambda reply: None)


def _transfer(reply: pb.OpenTransferResponse) -> Transfer:
    return Transfer(
        reply.transfer_id,
        reply.epoch,
        reply.lease_ttl_seconds,
        {answer.group: tuple(map(BlockStatus, answer.statuses)) for answer in reply.groups},
        {answer.group: tuple(memoryview(answer.block_ids).cast("I")) for answer in reply.groups},
        Reach(reply.reach.host_id, reply.reach.data_address, reply.reach.nixl_agent),
    )


@dataclass(slots=True)
class Pull:
    """Hashes of a group, what came of their blocks, and what of it is proven.

    Bytes are given out only after the server has answered RenewTransfer or CloseTransfer
    with OK: then the blocks were pinned until that moment.
    """

    block_hashes: Sequence[bytes]
    group: int
    checksums: bool
    ends_at: float
    _statuses: Sequence[BlockStatus] = ()
    _next: int = 0
    _held: list[memoryview] = field(default_factory=list)
    _held_bytes: int = 0
    _received: int = 0
    _num_ready: int = 0
    _renew_at: float = 0.0

    def seconds_left(self) -> float:
        """For the next call; never nothing, so that it says itself that it is too late."""
        return max(0.001, self.ends_at - time.monotonic())

    def request(self, transfer: Transfer) -> pb.PullBlocksRequest | None:
        """PullBlocks for the ready ones; None if there are none."""
        self._statuses = transfer.statuses.get(self.group, ())
        if len(self._statuses) != len(self.block_hashes):
            raise InternalError("the statuses do not match the hashes", reason="BAD_REPLY")
        self._num_ready = self._statuses.count(BlockStatus.READY)
        self.renewed(transfer.lease_ttl_s)
        if not self._num_ready:
            return None
        return pb.PullBlocksRequest(
            transfer_id=transfer.transfer_id, group=self.group, checksums=self.checksums
        )

    def take(self, message: bytes) -> bool:
        """A message of PullBlocks; whether the lease is to be renewed now.

        DataLoss when a checksum does not match.
        """
        frame = parse(message)
        if frame.first != self._received:
            raise InternalError("blocks are missing", reason="BAD_REPLY")
        size = frame.block_bytes
        blocks = [frame.data[n * size : (n + 1) * size] for n in range(frame.num_blocks)]
        if self.checksums:
            if len(frame.checksums) != len(blocks):
                raise InternalError("checksums are missing", reason="BAD_REPLY")
            for block, checksum in zip(blocks, frame.checksums, strict=True):
                if xxhash.xxh3_64_intdigest(block) != checksum:
                    raise DataLoss(
                        "a block came damaged", reason="CHECKSUM_MISMATCH", retryable=True
                    )
        self._held += blocks
        self._held_bytes += len(frame.data)
        self._received += frame.num_blocks
        return self._held_bytes >= HELD_BYTES_MAX or time.monotonic() >= self._renew_at

    def renewed(self, lease_ttl_s: float) -> None:
        """The lease runs for so long from now."""
        self._renew_at = time.monotonic() + lease_ttl_s / _RENEWALS_A_LEASE

    def proven(self, *, last: bool = False) -> Iterator[PulledBlock]:
        """The answers up to what is held, in order; with ``last`` all that remain."""
        if last and self._received != self._num_ready:
            raise InternalError("blocks are missing", reason="BAD_REPLY")
        held, self._held, self._held_bytes = self._held, [], 0
        for data in held:
            yield from self._others()
            yield self._answer(bytes(data))
        if last:
            yield from self._others()

    def _others(self) -> Iterator[PulledBlock]:
        """The answers before the next ready block."""
        while self._next < len(self._statuses):
            if self._statuses[self._next] is BlockStatus.READY:
                return
            yield self._answer(b"")

    def _answer(self, data: bytes) -> PulledBlock:
        number, self._next = self._next, self._next + 1
        return PulledBlock(self.block_hashes[number], self._statuses[number], data)
