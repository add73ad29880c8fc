"""vLLM's KVCacheManager over a session: its method names, integer block ids, its decisions.

Every call is sent (strict): on one StepStream what a Step can say, as unary calls the
rest. Answers that follow from earlier ones (block tables, common prefixes, statistics)
come from this side. A vLLM 0.25.1 Scheduler takes it as its ``kv_cache_manager``.

CacheLost passes through: make a new one over the reopened session, and admit the
requests again.

Not here: events come from the server's stream, so ``take_events`` has none;
``coordinator`` has only what a Scheduler without connectors reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvclient.errors import BlocksInUse, InternalError, InvalidArgument, NotFound
from kvclient.introduce import introduction
from kvclient.session import Session
from kvclient.session_tables import SessionTables
from kvclient.tables import RequestTables
from kvclient.values import (
    BlockTables,
    Cache,
    Content,
    Free,
    FreeMode,
    Grow,
    OperationKind,
    Outcome,
    ResetMode,
    SlotRequest,
    Step,
    StepMark,
    StepResult,
)

_EXPECTED = (Outcome.OK, Outcome.NO_FIT, Outcome.HIT_CHANGED, Outcome.RESETTING)
_KINDS_NOT_BY_TOKEN = ("mamba", "cross_attention", "encoder_only_attention")


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Block ids of one request, one list a KV cache group; 0 is the null block."""

    blocks: BlockTables

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """The blocks of both, group by group."""
        return KVCacheBlocks(
            tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True))
        )

    def get_block_ids(self, allow_none: bool = False) -> BlockTables | None:
        """The block ids; with ``allow_none``, None when there are none."""
        return None if allow_none and not any(self.blocks) else self.blocks

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, of as many groups."""
        return KVCacheBlocks(tuple([] for _ in self.blocks))


@dataclass(frozen=True, slots=True)
class DetachedBlock:
    """A block that waits, off the pool, for its ticket to be returned."""

    block_id: int
    ticket: int


@dataclass(slots=True)
class PrefixCacheStats:
    """Lookups since the last report; queries and hits are in tokens."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    reset: bool = False

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Counts one lookup."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


@dataclass(slots=True)
class _Known:
    """What the server holds of a request."""

    handle: int
    num_tokens: int
    # Admitted: it grows by its handle.
    running: bool = False
    # None while it holds no blocks.
    tables: RequestTables | None = field(default=None)


class BlockPool:
    """What a Scheduler does with popped blocks."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def free_blocks(self, ordered_blocks: Iterable[DetachedBlock]) -> None:
        """Returns the tickets of these blocks, whole, each once."""
        for ticket in dict.fromkeys(block.ticket for block in ordered_blocks):
            self._manager.return_ticket(ticket)


@dataclass(slots=True)
class Coordinator:
    """By how much the last hit was shorter than the longest of a single kind of attention."""

    num_uncached_common_prefix_tokens: int = 0


class KVCacheManager:
    """The cache of one scheduler, kept by a server.

    ``request`` is a vLLM Request or has its attributes. ``steps_in_flight`` is how many
    steps the scheduler runs ahead (1: synchronous, 2: vLLM's AsyncScheduler); other
    sessions hit a block when its step has ended. None: each call ends what was before
    it, which a scheduler that waits for its workers may say; not one with Mamba groups, whose
    states of the present step must not be hit yet.
    """

    def __init__(
        self, session: Session, *, log_stats: bool = True, steps_in_flight: int | None = None
    ) -> None:
        if steps_in_flight is not None and steps_in_flight < 1:
            raise InvalidArgument("at least one step is in flight", field="steps_in_flight")
        groups = session.pool.groups
        self.session = session
        self.log_stats = log_stats
        self.num_kv_cache_groups = len(groups)
        self.enable_caching = session.pool.enable_prefix_caching
        self.max_model_len = session.pool.max_model_len
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple([] for _ in groups))
        self.prefix_cache_stats: PrefixCacheStats | None = PrefixCacheStats() if log_stats else None
        self.block_pool = BlockPool(self)
        self.coordinator = Coordinator()
        self._block_sizes = session.pool.table_block_sizes
        self._stream = session.step_stream()
        self._steps_in_flight = steps_in_flight
        self._step = 0
        self._known: dict[str, _Known] = {}
        self._tables = SessionTables(session.pool)
        self._detached: dict[int, BlockTables] = {}
        self._num_free_blocks: int | None = None

    def close(self) -> None:
        """Ends the stream; the session, and what it holds, stay."""
        self._stream.close()

    # --- what is sent -----------------------------------------------------------------

    def new_step_starts(self) -> None:
        """The next scheduler step begins."""
        self._step += 1

    def get_computed_blocks(self, request: Any) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix, at most ``num_tokens - 1``. Takes no reference."""
        hit = self.session.get_computed_blocks(
            request.request_id, self._content(request), mark=self._mark()
        )
        self._sent(request, hit.handle)
        self.coordinator.num_uncached_common_prefix_tokens = hit.num_uncached_common_prefix_tokens
        stats = self.prefix_cache_stats
        if stats is not None and self.enable_caching and not request.skip_reading_prefix_cache:
            stats.record(request.num_tokens, hit.num_computed_tokens, request.num_preemptions > 0)
        if not any(hit.blocks):
            return self.empty_kv_cache_blocks, hit.num_computed_tokens
        return KVCacheBlocks(hit.blocks), hit.num_computed_tokens

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """The new blocks, or None when they do not fit now.

        None as well when the hit has changed meanwhile, or a reset waits for what runs.
        """
        known = self._known.get(request.request_id)
        plain = not (
            num_external_computed_tokens
            or delay_cache_blocks
            or full_sequence_must_fit
            or reserved_blocks
            or num_encoder_tokens
        )
        if known is not None and known.running and plain:
            return self._grow(request, known, num_new_tokens, num_lookahead_tokens)
        slots = SlotRequest(
            request.request_id,
            self._content(request),
            num_computed_tokens=request.num_computed_tokens,
            num_new_tokens=num_new_tokens,
            num_new_computed_tokens=num_new_computed_tokens if new_computed_blocks else 0,
            num_lookahead_tokens=num_lookahead_tokens,
            num_external_computed_tokens=num_external_computed_tokens,
            delay_cache_blocks=delay_cache_blocks,
            full_sequence_must_fit=full_sequence_must_fit,
            reserved_blocks=reserved_blocks,
            has_scheduled_reqs=has_scheduled_reqs,
            num_encoder_tokens=num_encoder_tokens,
        )
        reply = self._call(Step(((OperationKind.ADMIT, 1),), admissions=(slots,)))
        result = reply.admissions[0]
        self._check(result.outcome, reply)
        self._sent(request, result.handle)
        known = self._known[request.request_id]
        num_computed = (
            request.num_computed_tokens
            + slots.num_new_computed_tokens
            + num_external_computed_tokens
        )
        if known.tables is not None:
            known.tables.skip(num_computed)
        if result.outcome is not Outcome.OK:
            return None
        known.running = known.running or not delay_cache_blocks
        num_held = [len(blocks) for blocks in result.hit_blocks] or [0] * len(self._block_sizes)
        if known.tables is None:
            known.tables = self._tables.begin(
                request.num_prompt_tokens,
                result.hit_blocks,
                result.new_blocks,
                num_computed,
                num_external_computed_tokens,
            )
        else:
            self._tables.grow(known.tables, result.new_blocks)
        if num_external_computed_tokens == 0:
            return self._blocks(result.new_blocks)
        # Blocks for external tokens are in the table; new ones are those for what follows.
        return self._blocks(
            tuple(
                blocks[max(0, -(-num_computed // block_size) - held) :]
                for blocks, block_size, held in zip(
                    result.new_blocks, self._block_sizes, num_held, strict=True
                )
            )
        )

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Makes the full blocks within ``num_computed_tokens`` hits, as written."""
        known = self._known.get(request.request_id)
        if known is None:
            return
        content = self._content(request)
        if content is not None:
            self.session.cache_blocks(
                request.request_id, num_computed_tokens, content, mark=self._mark()
            )
            self._sent(request, known.handle)
            return
        cache = Cache(handles=(known.handle,), num_computed_tokens=(num_computed_tokens,))
        reply = self._call(Step(((OperationKind.CACHE, 1),), cache=cache))
        self._check_column(reply.cache_outcomes, reply)

    def free(self, request: Any) -> None:
        """Gives the blocks back. A request that has not finished keeps its tokens there."""
        mode = FreeMode.FINISH if request.is_finished() else FreeMode.PREEMPT
        known = self._known.get(request.request_id)
        if known is None:
            return
        self._free(known, mode)
        if mode is FreeMode.FINISH:
            del self._known[request.request_id]
        self._tables.drop(self._end_table(known))

    def pop_blocks_for_free(self, request: Any) -> list[DetachedBlock]:
        """Ends the request, and keeps its blocks off the pool until they are freed."""
        known = self._known.pop(request.request_id, None)
        if known is None:
            return []
        ticket = self._free(known, FreeMode.DETACH)
        table = self._end_table(known)
        if not ticket:
            return []
        self._detached[ticket] = table
        return [DetachedBlock(block_id, ticket) for group in table for block_id in group]

    def return_ticket(self, ticket: int) -> None:
        """Gives popped blocks back to the pool, tail first."""
        table = self._detached.pop(ticket)
        self.session.return_blocks(ticket, mark=self._mark())
        self._tables.drop(table)
        self._num_free_blocks = None

    def reset_prefix_cache(
        self, mode: ResetMode | str = ResetMode.REFUSE, timeout_s: float | None = None
    ) -> bool:
        """Empties the prefix cache; False, and nothing is done, while blocks are in use.

        See ``Session.reset_prefix_cache`` for the other modes; a drain that takes longer
        than ``timeout_s`` answers False too.
        """
        try:
            self.session.reset_prefix_cache(mode, timeout_s=timeout_s, mark=self._mark())
        except BlocksInUse:
            return False
        self._num_free_blocks = None
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes these blocks out of the prefix cache; who holds one keeps it."""
        # The null block has no content, and is in tables all the same.
        self.session.client.evict_blocks(block_id for block_id in block_ids if block_id)

    @property
    def usage(self) -> float:
        """Share of the pool that is in use, from 0 to 1, at the last Step."""
        if self._num_free_blocks is None:
            self._call(Step(()))
        assert self._num_free_blocks is not None
        return 1.0 - self._num_free_blocks / (self.session.pool.num_blocks - 1)

    # --- what this side knows ---------------------------------------------------------

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's blocks."""
        return self._blocks(self.get_block_ids(request_id))

    def get_block_ids(self, request_id: str) -> BlockTables:
        """The request's block table, by group."""
        known = self._known.get(request_id)
        if known is None or known.tables is None:
            return tuple([] for _ in self._block_sizes)
        return tuple(list(blocks) for blocks in known.tables.blocks)

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> BlockTables:
        """The part of the block table that holds ``num_computed_tokens``, by group.

        Blocks of states and of encoder tokens are answered in full.
        """
        return tuple(
            blocks
            if group.kind in _KINDS_NOT_BY_TOKEN
            else blocks[: -(-num_computed_tokens // group.block_size)]
            for blocks, group in zip(
                self.get_block_ids(request_id), self.session.pool.groups, strict=True
            )
        )

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Leading blocks that all this session's requests share, by group.

        None where blocks leave the tables of running requests.
        """
        return self._tables.num_common_prefix_blocks(self.get_block_ids(running_request_id))

    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Drops from the tables what no attention looks at any more.

        On this side only: the server frees these blocks with the request's next call.
        """
        known = self._known.get(request_id)
        if known is not None and known.tables is not None:
            known.tables.skip(total_computed_tokens)

    def take_new_block_ids(self) -> list[int]:
        """Ids of the blocks taken since the last call, for zeroing."""
        return self._tables.take_new_block_ids()

    def take_events(self) -> list[Any]:
        """None: the server publishes them itself."""
        return []

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The statistics since the last call; None when they are not kept."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def create_kv_cache_blocks(self, blocks: Sequence[Sequence[int]]) -> KVCacheBlocks:
        """``blocks`` as a result."""
        return self._blocks(tuple(list(group) for group in blocks))

    # --- inside -----------------------------------------------------------------------

    def _grow(
        self, request: Any, known: _Known, num_new_tokens: int, num_lookahead_tokens: int
    ) -> KVCacheBlocks | None:
        content = self._content(request) or Content(token_offset=known.num_tokens)
        assert isinstance(content.tokens, bytes)
        grow = Grow(
            handles=(known.handle,),
            num_computed_tokens=(request.num_computed_tokens,),
            num_new_tokens=(num_new_tokens,),
            token_offsets=(content.token_offset,),
            token_counts=(len(content.tokens) // 4,),
            tokens=content.tokens,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        reply = self._call(Step(((OperationKind.GROW, 1),), grow=grow))
        outcome = self._check_column(reply.grow.outcomes, reply)
        self._sent(request, known.handle)
        if known.tables is not None:
            known.tables.skip(request.num_computed_tokens)
        if outcome is not Outcome.OK:
            return None
        new_blocks = tuple(
            reply.grow.new_blocks(group)[0] for group in range(self.num_kv_cache_groups)
        )
        assert known.tables is not None
        self._tables.grow(known.tables, new_blocks)
        return self._blocks(new_blocks)

    def _free(self, known: _Known, mode: FreeMode) -> int:
        free = Free(handles=(known.handle,), modes=(mode,))
        reply = self._call(Step(((OperationKind.FREE, 1),), free=free))
        self._check_column(reply.free_outcomes, reply)
        return reply.free_tickets[0] if reply.free_tickets else 0

    def _call(self, step: Step) -> StepResult:
        reply = self._stream.call(step, mark=self._mark())
        self._num_free_blocks = reply.free_blocks
        return reply

    def _mark(self) -> StepMark | None:
        if self._steps_in_flight is None:
            return None
        return StepMark(self._step, max(0, self._step - self._steps_in_flight))

    def _check(self, outcome: Outcome, reply: StepResult) -> None:
        if outcome is Outcome.INVALID:
            error = reply.errors[0]
            raise InvalidArgument(error.message, reason=error.reason)
        if outcome is Outcome.UNKNOWN_HANDLE:
            raise NotFound("the server does not know the request", reason="UNKNOWN_HANDLE")
        if outcome not in _EXPECTED:
            raise InternalError(f"a lone operation answered {outcome.name}", reason="BAD_REPLY")

    def _check_column(self, outcomes: bytes, reply: StepResult) -> Outcome:
        outcome = Outcome(outcomes[0]) if outcomes else Outcome.OK
        self._check(outcome, reply)
        return outcome

    def _content(self, request: Any) -> Content | None:
        """What the server does not have of the request's tokens."""
        known = self._known.get(request.request_id)
        return introduction(
            request,
            None if known is None else known.num_tokens,
            self.session.pool.hash_block_size,
        )

    def _sent(self, request: Any, handle: int) -> None:
        known = self._known.setdefault(request.request_id, _Known(handle, 0))
        known.num_tokens = request.num_tokens

    def _end_table(self, known: _Known) -> BlockTables:
        tables, known.tables, known.running = known.tables, None, False
        return self.empty_kv_cache_blocks.blocks if tables is None else self._tables.end(tables)

    def _blocks(self, blocks: BlockTables) -> KVCacheBlocks:
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks
