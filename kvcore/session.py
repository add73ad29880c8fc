"""One connected scheduler: its requests, their tables, and the steps in flight."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvcore.block import KVCacheBlock
from kvcore.errors import InvalidArgument, ResourceExhausted
from kvcore.growth import Later
from kvcore.hashing import ExtraKeys
from kvcore.manager import KVCacheBlocks, KVCacheManager
from kvcore.request import Request, RequestStatus
from kvcore.spec import DepotConfig

# Reading a member off its enum costs 0.1 us and more on Python 3.11.
_RUNNING = RequestStatus.RUNNING

STEP_MAX = (1 << 63) - 1


class DetachedBlocks(NamedTuple):
    """Blocks of a request that is over, in table order, and what its extra keys were."""

    blocks: list[KVCacheBlock]
    extra: ExtraKeys


class Session:
    """Request ids are a session's own; handles are the server's."""

    def __init__(
        self, session_id: str, name: str, *, manager: KVCacheManager, config: DepotConfig
    ) -> None:
        self.session_id = session_id
        self.name = name
        self.manager = manager
        self.view = manager.view
        self.config = config
        self.requests: dict[str, Request] = {}
        self.by_handle: dict[int, Request] = {}
        self.tickets: dict[int, DetachedBlocks] = {}
        # Of all requests.
        self.num_tokens = 0
        # Empty between calls; None where that cannot wait.
        self.later: Later | None = None
        coordinator = manager.coordinator
        self._finishes_late = coordinator.grows_by_table and coordinator.registers_all
        self._later = Later()
        # Attached under this session; they may write to its blocks.
        self.num_workers = 0
        # Whether the last call said which step it belongs to.
        self.names_steps = False

    def begin(self, step: int | None, completed_step: int | None) -> None:
        """A call of ``step`` comes in; the writes of ``completed_step`` have ended.

        Without the two, every call completes the step before it; but of a session that has
        named steps, which may be in flight, it is one more of the present step.
        """
        view = self.view
        if step is None and completed_step is None and self.names_steps:
            step, completed_step = view.step, view.completed_step
        if step is None and completed_step is None:
            view.begin_step(view.step + 1, view.step, is_synchronous=True)
            self.manager.new_step_starts()
            self.later = self._later if self._finishes_late else None
            return
        if step is None or completed_step is None:
            missing = "step" if step is None else "completed_step"
            raise InvalidArgument("step and completed_step go together", field=f"context.{missing}")
        if completed_step > step:
            raise InvalidArgument(
                f"completed_step {completed_step} is beyond step {step}",
                field="context.completed_step",
            )
        if step > STEP_MAX:
            raise InvalidArgument(f"a step is at most {STEP_MAX}", field="context.step")
        if step < view.step or completed_step < view.completed_step:
            unnamed = "" if self.names_steps else "; each call before, which named none, was one"
            raise InvalidArgument(
                f"steps only rise: step {step}, completed {completed_step} after "
                f"step {view.step}, completed {view.completed_step}{unnamed}",
                field="context.step" if step < view.step else "context.completed_step",
            )
        self.names_steps = True
        if step > view.step:
            self.manager.new_step_starts()
        view.begin_step(step, completed_step)
        # What counts as written at once is told at once.
        self.later = self._later if self._finishes_late and step > completed_step else None

    @property
    def num_blocks(self) -> int:
        """Blocks in its tables and tickets; the null block is none. Costs little time a request."""
        num_blocks = sum(
            not block.is_null for detached in self.tickets.values() for block in detached.blocks
        )
        if self.requests:
            for manager in self.manager.coordinator.managers:
                num_blocks += manager.num_blocks_held()
        return num_blocks

    def require_room(self) -> None:
        """ResourceExhausted if no request can be added."""
        if len(self.requests) >= self.config.max_requests_per_session:
            raise ResourceExhausted(
                f"the session holds {len(self.requests)} requests, its maximum",
                reason="TOO_MANY_REQUESTS",
                field="request_id",
                retryable=True,
            )

    def require_token_room(self, num_tokens: int) -> None:
        """ResourceExhausted if ``num_tokens`` more are too many."""
        if self.num_tokens + num_tokens > self.config.max_tokens_per_session:
            raise ResourceExhausted(
                f"the session's requests hold {self.num_tokens} tokens; {num_tokens} more exceed "
                f"its maximum of {self.config.max_tokens_per_session}",
                reason="TOO_MANY_TOKENS",
                field="content.tokens",
                retryable=True,
            )

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether ``num_tokens`` more are too many neither for the request nor in all."""
        return (
            request.num_tokens + num_tokens <= self.config.max_request_tokens
            and self.num_tokens + num_tokens <= self.config.max_tokens_per_session
        )

    def add(self, request: Request) -> None:
        """Know a new request."""
        self.requests[request.request_id] = request
        self.by_handle[request.handle] = request

    def remove(self, request: Request) -> None:
        """Know it no more; its blocks are gone already."""
        request.importing = None
        self.num_tokens -= request.num_tokens
        del self.requests[request.request_id]
        del self.by_handle[request.handle]

    def forget_all(self) -> None:
        """The session is over; its blocks are gone already."""
        for request in self.requests.values():
            request.importing = None
        self.requests.clear()
        self.by_handle.clear()
        self.tickets.clear()
        self.num_tokens = 0

    def allocate(
        self,
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        hit: KVCacheBlocks | None = None,
        **options: Any,
    ) -> KVCacheBlocks | None:
        """The manager's allocate_slots, remembering when it was.

        ``options`` are the manager's. None leaves the request as it was.
        """
        before = request.num_computed_tokens
        request.num_computed_tokens = num_computed_tokens
        new_blocks = self.manager.allocate_slots(
            request, num_new_tokens, num_new_computed_tokens, hit, **options
        )
        if new_blocks is None:
            request.num_computed_tokens = before
        else:
            request.registered_step = self.view.step
        return new_blocks

    def finish_growth(self) -> None:
        """Evict what growth has taken; hash and register the blocks that it has filled.

        No answer to growth depends on it, so that it can wait until the answer is sent.
        Everything else does.
        """
        later = self.later
        if later is None:
            return
        if later.taken:
            self.manager.block_pool.evict(later.taken)
            later.taken.clear()
        if later.filled:
            cache_blocks = self.manager.coordinator.cache_blocks
            for request, num_to_cache in later.filled.values():
                request.hash_full_blocks()
                if num_to_cache:
                    cache_blocks(request, num_to_cache)
            later.filled.clear()

    def num_slots(self, request: Request) -> int:
        """Token slots the request holds, in the group that holds the fewest.

        Without groups there is nothing to hold: as many as a request may have.
        """
        return min(
            [
                len(manager.req_to_blocks.get(request.request_id, ())) * manager.block_size
                for manager in self.manager.coordinator.token_managers
            ],
            default=self.config.max_model_len,
        )

    def forget_unwritten(self, request: Request) -> None:
        """The request did not run: what its last allocation registered holds no bytes.

        Nor do blocks of this session that build on it, whether their requests are over or
        not.
        """
        if self.names_steps and request.registered_step != self.view.step:
            return
        pool = self.manager.block_pool
        managers = self.manager.coordinator.managers
        unwritten: set[int] = set()
        lost: set[bytes] = set()
        is_shared = False
        for manager in managers:
            step, first = manager.registered.get(request.request_id, (-1, 0))
            if step != request.registered_step:
                continue  # it registered nothing here
            # What CacheBlocks confirmed is written all the same.
            first = max(first, request.num_confirmed_tokens // manager.block_size)
            for block in manager.req_to_blocks.get(request.request_id, ())[first:]:
                if block.block_hash is not None:
                    unwritten.add(block.block_id)
                    is_shared = is_shared or block.ref_cnt > 1
                    lost.add(block.block_hash)
                    pool.forget(block)
        # To look through all tables would take a long time, and mostly in vain.
        for other in self.requests if is_shared else ():
            # A window may have passed the block already, so one group speaks for all.
            tainted = min(
                (
                    position * manager.block_size
                    for manager in managers
                    for position, block in enumerate(manager.req_to_blocks.get(other, ()))
                    if block.block_id in unwritten
                ),
                default=None,
            )
            if tainted is not None:
                for manager in managers:
                    table = manager.req_to_blocks.get(other, ())
                    for block in table[tainted // manager.block_size :]:
                        if block.pending_view is self.view:
                            assert block.block_hash is not None
                            lost.add(block.block_hash)
                            pool.forget(block)
        num_lost = 0
        while num_lost < len(lost):
            num_lost = len(lost)
            # What builds on it was registered with it, or later.
            for block in self.view.pending_blocks(request.registered_step):
                run = block.content
                if run is not None and run.parent_of(block.content_position) in lost:
                    assert block.block_hash is not None
                    lost.add(block.block_hash)
                    pool.forget(block)

    def confirm(self, request: Request, num_tokens: int) -> None:
        """The bytes of the request's first ``num_tokens`` tokens are written."""
        before = request.num_confirmed_tokens
        # What lies behind the last boundary of all groups was not registered before.
        boundary = self.config.scheduler_block_size
        start = before // boundary * boundary
        for manager in self.manager.coordinator.managers:
            table = manager.req_to_blocks.get(request.request_id, ())
            size = manager.block_size
            written = table[start // size : num_tokens // size]
            self.manager.block_pool.confirm(
                [block for block in written if block.pending is not None]
            )
        request.num_confirmed_tokens = max(before, num_tokens)

    def holds_blocks(self, request: Request) -> bool:
        """Whether the request has a table."""
        if request.status is _RUNNING:
            return True
        for manager in self.manager.coordinator.managers:
            if request.request_id in manager.req_to_blocks:
                return True
        return False
