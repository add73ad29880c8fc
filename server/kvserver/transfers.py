"""The transfers that peers have open: their leases, and what the data plane may send."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.errors import FailedPrecondition, InvalidArgument, NotFound
from kvcore.transfer import ID_SHOWN, Transfer

if TYPE_CHECKING:
    from kvserver.node import Node

logger = logging.getLogger(__name__)

# Of those that ended lately, so that late calls are told what happened.
_ENDED_KEPT = 4096


@dataclass(frozen=True, slots=True)
class ListedTransfer:
    """A transfer or an import as operators see it; an import's lease is its deadline."""

    shown_id: str
    name: str
    is_import: bool
    age_seconds: float
    lease_remaining_seconds: float
    num_blocks: int
    num_bytes: int
    # Of an import, so far.
    num_blocks_done: int = 0
    num_bytes_done: int = 0


class Transfers:
    """Open transfers of one node, each until it is closed or its lease is over."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._opened_at: dict[str, float] = {}
        # Those that are being let go of, in turns.
        self._ending: dict[str, asyncio.Task[None]] = {}
        # So that a CloseTransfer sent again is answered again.
        self._closed: OrderedDict[str, FailedPrecondition | None] = OrderedDict()
        self._expired: OrderedDict[str, float] = OrderedDict()
        # How transfers ended: "closed", "expired" or "dropped" (its content was).
        self.num_ended = dict.fromkeys(("closed", "expired", "dropped"), 0)
        # Pinned for transfers since the start.
        self.num_blocks = 0

    def __len__(self) -> int:
        return len(self._opened_at)

    async def open(
        self, opening: Generator[Transfer, None, Transfer], lease_ttl_seconds: float | None
    ) -> Transfer:
        """What ``opening`` returns, open for as long as its lease lives; others between its parts.

        Nothing is left of it if it fails, or the call is cancelled.
        """
        policy = self._node.transfer_policy
        ttl = policy.lease_ttl_seconds if lease_ttl_seconds is None else lease_ttl_seconds
        if not 0.0 < ttl <= policy.lease_ttl_seconds_max:
            raise InvalidArgument(
                f"a transfer's lease is above 0 and at most {policy.lease_ttl_seconds_max:g} "
                f"seconds, not {ttl:g}",
                field="lease_ttl_seconds",
            )
        transfer: Transfer | None = None
        try:
            while True:
                try:
                    transfer = next(opening)
                except StopIteration as done:
                    transfer = done.value
                    break
                self._begin(transfer.transfer_id, ttl)
                await asyncio.sleep(0)
        except BaseException:
            if transfer is not None and transfer.transfer_id in self._opened_at:
                self._expire(transfer.transfer_id, ttl)
            raise
        assert transfer is not None
        self._begin(transfer.transfer_id, ttl)
        self.num_blocks += len(transfer.pinned)
        self._node.require_data_plane().open_transfer(
            transfer.transfer_id, {group.group: group.block_ids for group in transfer.groups}
        )
        return transfer

    def _begin(self, transfer_id: str, ttl: float) -> None:
        if transfer_id not in self._opened_at:
            self._opened_at[transfer_id] = time.monotonic()
            self._node.deadlines.set(
                ("transfer", transfer_id), ttl, lambda: self._run_out(transfer_id, ttl)
            )

    def renew(self, transfer_id: str) -> float:
        """Begin the lease anew; its seconds. As close, if what was read does not count."""
        self._require(transfer_id)
        transfers = self._node.depot.transfers
        transfers.require_content(transfers.by_id[transfer_id])
        deadlines = self._node.deadlines
        deadlines.renew(("transfer", transfer_id))
        return deadlines.seconds(("transfer", transfer_id))

    def lease_ttl_seconds(self, transfer_id: str) -> float:
        """How long the transfer lives after it was opened or renewed."""
        return self._node.deadlines.seconds(("transfer", transfer_id))

    async def close(self, transfer_id: str) -> None:
        """End it. Returns only if what was read under it counts: its lease had not run out.

        Closing it again answers the same again.
        """
        self.end(transfer_id)
        if (ending := self._ending.get(transfer_id)) is not None:
            await asyncio.shield(ending)  # goes on, whatever becomes of the call
        if transfer_id not in self._closed:
            self._require(transfer_id)
        if (error := self._closed[transfer_id]) is not None:
            raise type(error)(error.message, reason=error.reason, field=error.field)

    def end(self, transfer_id: str) -> None:
        """As close, if it is open; nobody asks whether what was read counts."""
        if transfer_id in self._opened_at:
            self._let_go(transfer_id, self._count_closed)

    def end_all(self) -> None:
        """The server stops: nothing is read any more."""
        for transfer_id in list(self._opened_at):
            self._expire(transfer_id, self.lease_ttl_seconds(transfer_id))

    def listed(self) -> list[ListedTransfer]:
        """Every open one, oldest first."""
        now = time.monotonic()
        depot = self._node.depot
        num_ranks = depot.config.num_ranks
        group_bytes = [num_ranks * group.block_bytes for group in depot.config.kv_cache.groups]
        return [
            ListedTransfer(
                transfer_id[:ID_SHOWN],
                transfer.name,
                is_import=False,
                age_seconds=now - self._opened_at[transfer_id],
                lease_remaining_seconds=self._node.deadlines.remaining_seconds(
                    ("transfer", transfer_id)
                ),
                num_blocks=len(transfer.pinned),
                num_bytes=sum(
                    group_bytes[group.group] * len(set(group.block_ids) - {0})
                    for group in transfer.groups
                ),
            )
            for transfer_id, transfer in depot.transfers.by_id.items()
            if transfer_id in self._opened_at
        ]

    def _run_out(self, transfer_id: str, ttl: float) -> None:
        logger.info("transfer %s: its lease of %g s ran out", transfer_id[:ID_SHOWN], ttl)
        self._expire(transfer_id, ttl)

    def _expire(self, transfer_id: str, ttl: float) -> None:
        self._expired[transfer_id] = ttl
        if len(self._expired) > _ENDED_KEPT:
            self._expired.popitem(last=False)
        self.num_ended["expired"] += 1
        self._let_go(transfer_id, lambda *_: None)

    def _count_closed(self, transfer_id: str, error: FailedPrecondition | None) -> None:
        self.num_ended["closed" if error is None else "dropped"] += 1
        self._closed[transfer_id] = error
        if len(self._closed) > _ENDED_KEPT:
            self._closed.popitem(last=False)

    def _let_go(
        self, transfer_id: str, ended: Callable[[str, FailedPrecondition | None], None]
    ) -> None:
        """It is open no more; most have let go of their blocks when this returns."""
        node = self._node
        del self._opened_at[transfer_id]
        node.deadlines.drop(("transfer", transfer_id))
        node.require_data_plane().close_transfer(transfer_id)
        closing = node.depot.transfers.closing(transfer_id)

        def is_over() -> bool:
            error: FailedPrecondition | None = None
            try:
                next(closing)
                return False
            except StopIteration:
                pass
            except FailedPrecondition as dropped:
                error = dropped
            finally:
                node.publish()
            ended(transfer_id, error)
            return True

        async def go_on() -> None:
            try:
                while not is_over():
                    await asyncio.sleep(0)
            finally:
                del self._ending[transfer_id]

        if not is_over():
            self._ending[transfer_id] = asyncio.ensure_future(go_on())

    def _require(self, transfer_id: str) -> None:
        if transfer_id in self._opened_at:
            return
        if not transfer_id:
            raise InvalidArgument("a transfer id is needed", field="transfer_id")
        ttl = self._expired.get(transfer_id)
        if ttl is not None:
            raise NotFound(
                f"the transfer's lease of {ttl:g} seconds ran out: what was read does not count",
                reason="TRANSFER_EXPIRED",
                field="transfer_id",
            )
        raise NotFound("no such transfer is open", reason="UNKNOWN_TRANSFER", field="transfer_id")
