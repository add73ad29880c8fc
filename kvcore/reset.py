"""Resets of the prefix cache: at once, when nothing is in use, or over what is in use.

Each begins a generation. What was computed before a reset is no hit after it: the
index loses it, and a request that held blocks at a forced one registers none any more
until it is preempted and admitted anew.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from kvcore.errors import FailedPrecondition, InvalidArgument, NotFound
from kvcore.hashing import ExtraKeys
from kvcore.holders import BlockHolder, block_holders, largest

if TYPE_CHECKING:
    from kvcore.depot import Depot

HOLDERS_NAMED = 5
DRAINS_KEPT = 64


class ResetMode(IntEnum):
    """What a reset does about blocks in use: refuse, wait for them, or go over them."""

    REFUSE = 1
    DRAIN = 2
    FORCE = 3


@dataclass(frozen=True, slots=True)
class ResetScope:
    """The content with this LoRA name, this cache salt, or both; "" is "with none"."""

    lora_name: str | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        if self.lora_name is None and self.cache_salt is None:
            raise InvalidArgument(
                "a scope names a LoRA, a cache salt or both; without scope the whole pool is reset",
                field="scope",
            )

    def matches(self, extra: ExtraKeys) -> bool:
        """Whether content with these extra keys is in the scope."""
        return self.lora_name in (None, extra.lora_name or "") and self.cache_salt in (
            None,
            extra.cache_salt or "",
        )


@dataclass(frozen=True, slots=True)
class ResetResult:
    """``done`` False: the drain ``drain_id`` is pending, or was abandoned.

    ``holders`` keep a drain waiting, or go on over a forced reset, which took the content
    of ``num_blocks_cleared`` blocks.
    """

    generation: int
    done: bool = True
    drain_id: int = 0
    abandoned: bool = False
    holders: tuple[BlockHolder, ...] = ()
    num_blocks_cleared: int = 0


@dataclass(frozen=True, slots=True)
class Drain:
    """A reset that waits until no block of its scope (None: no block) is in use."""

    drain_id: int
    scope: ResetScope | None

    def holds_off(self, extra: ExtraKeys) -> bool:
        """Whether requests with these extra keys are not admitted meanwhile."""
        return self.scope is None or self.scope.matches(extra)


class Resets:
    """The resets of one depot. ``generation`` counts them."""

    def __init__(self, depot: Depot) -> None:
        self._depot = depot
        self.generation = 0
        self.drain: Drain | None = None
        self._last_drain_id = 0
        # How drains ended: in a reset, or None.
        self._ended: OrderedDict[int, ResetResult | None] = OrderedDict()

    def reset(self, mode: ResetMode, scope: ResetScope | None) -> ResetResult:
        """See Depot.reset_prefix_cache."""
        if mode is ResetMode.FORCE:
            self._stop_registering(scope)
            holders = largest(block_holders(self._depot, scope))
            return replace(self._clear(scope), holders=holders)
        if mode is ResetMode.DRAIN:
            return self._begin_drain(scope)
        if self._in_use(scope):
            raise FailedPrecondition(
                f"blocks are in use: {self._holders_named(scope)}",
                reason="BLOCKS_IN_USE",
                retryable=True,
            )
        return self._clear(scope)

    def state(self, drain_id: int) -> ResetResult:
        """How a drain stands. NotFound if it is not known (any more)."""
        if self.drain is not None and self.drain.drain_id == drain_id:
            return ResetResult(
                self.generation,
                done=False,
                drain_id=drain_id,
                holders=largest(block_holders(self._depot, self.drain.scope)),
            )
        if drain_id not in self._ended:
            raise NotFound(
                f"drain {drain_id} is not known (any more)",
                reason="UNKNOWN_DRAIN",
                field="drain_id",
            )
        reset = self._ended[drain_id]
        if reset is None:
            return ResetResult(self.generation, done=False, drain_id=drain_id, abandoned=True)
        return replace(reset, drain_id=drain_id)

    def settle(self) -> None:
        """Reset, if a drain is pending and nothing is left for it to wait for."""
        if self.drain is not None and not self._in_use(self.drain.scope):
            self._clear(self.drain.scope)

    def abandon(self, drain_id: int) -> bool:
        """Give up a drain; False if it is not pending."""
        if self.drain is None or self.drain.drain_id != drain_id:
            return False
        self._end_drain(None)
        return True

    def _begin_drain(self, scope: ResetScope | None) -> ResetResult:
        if self.drain is not None and self.drain.scope != scope:
            raise FailedPrecondition(
                f"drain {self.drain.drain_id}, of another scope, is pending",
                reason="RESET_PENDING",
                field="scope",
                retryable=True,
            )
        if self.drain is None:
            self._last_drain_id += 1
            self.drain = Drain(self._last_drain_id, scope)
            self.settle()
        return self.state(self._last_drain_id)

    def _end_drain(self, reset: ResetResult | None) -> None:
        assert self.drain is not None
        self._ended[self.drain.drain_id] = reset
        self.drain = None
        if len(self._ended) > DRAINS_KEPT:
            self._ended.popitem(last=False)

    def _clear(self, scope: ResetScope | None) -> ResetResult:
        self.generation += 1
        if scope is None:
            num_blocks = self._depot.pool.clear(self.generation)
        else:
            num_blocks = self._depot.pool.forget_matching(scope.matches)
        reset = ResetResult(self.generation, num_blocks_cleared=num_blocks)
        if self.drain is not None and scope in (None, self.drain.scope):
            # What the drain wanted gone is gone.
            self._end_drain(reset)
        return reset

    def _stop_registering(self, scope: ResetScope | None) -> None:
        for session in self._depot.sessions.values():
            for request in session.requests.values():
                if (scope is None or scope.matches(request.extra)) and session.holds_blocks(
                    request
                ):
                    request.outlived_reset = True

    def _in_use(self, scope: ResetScope | None) -> bool:
        if scope is None:
            return self._depot.pool.num_used_blocks > 0
        return any(block_holders(self._depot, scope))

    def _holders_named(self, scope: ResetScope | None) -> str:
        holders = list(block_holders(self._depot, scope))
        named = "; ".join(map(str, largest(holders, HOLDERS_NAMED)))
        rest = len(holders) - HOLDERS_NAMED
        return f"{named}; and {rest} more" if rest > 0 else named
