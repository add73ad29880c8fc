"""The values that calls take and give. Numbers of the enums are the wire's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from kvcore.errors import KVDepotError
from kvcore.hashing import ExtraKeys

BlockTables = tuple[list[int], ...]
"""Block ids, one list a KV cache group."""


class Outcome(IntEnum):
    """How one operation ended."""

    OK = 1
    NO_FIT = 2
    HIT_CHANGED = 3
    NOT_ATTEMPTED = 4
    UNKNOWN_HANDLE = 5
    INVALID = 6
    NO_BUDGET = 7
    RESETTING = 8


class OperationKind(IntEnum):
    """The kinds of operation a Step is made of."""

    ADMIT = 1
    GROW = 2
    CACHE = 3
    FREE = 4


class FreeMode(IntEnum):
    """What becomes of a freed request: over, kept for re-admission, or detached."""

    FINISH = 1
    PREEMPT = 2
    DETACH = 3


class Content(NamedTuple):
    """What is new about a request: its introduction (offset 0) or appended tokens.

    ``tokens`` are little-endian uint32. ``extra`` and what follows count only when
    the request is introduced.
    """

    token_offset: int = 0
    tokens: bytes = b""
    extra: ExtraKeys | None = None
    lora_id: int | None = None
    num_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False


class SlotRequest(NamedTuple):
    """Slots for one request; the fields are those of vLLM's ``allocate_slots``.

    ``num_new_tokens`` None: all that are left after the hit, at most
    ``max_new_tokens``. ``lookup``: look up now, instead of taking
    ``num_new_computed_tokens`` of the last lookup.
    """

    request_id: str
    content: Content | None = None
    num_computed_tokens: int = 0
    num_new_tokens: int | None = None
    max_new_tokens: int | None = None
    new_tokens_alignment: int = 0
    num_new_computed_tokens: int = 0
    lookup: bool = False
    num_lookahead_tokens: int = 0
    num_external_computed_tokens: int = 0
    delay_cache_blocks: bool = False
    num_encoder_tokens: int = 0
    full_sequence_must_fit: bool = False
    reserved_blocks: int = 0
    has_scheduled_reqs: bool = True


class NoFitReason(IntEnum):
    """Why an allocation was refused: blocks are missing, or the hit is a state that the
    present step computes, which can be used from the next step on.
    """

    BLOCKS = 1
    HIT_OF_THIS_STEP = 2


@dataclass(frozen=True, slots=True)
class SessionHold:
    """Blocks that a session keeps from the others: those in its tables and tickets, and
    what it freed in steps that may still write.

    ``departed``: the session is over, and workers attached under it may still write.
    """

    session_id: str
    name: str
    num_blocks: int
    departed: bool = False


@dataclass(frozen=True, slots=True)
class NoFit:
    """Why an allocation was refused, in blocks. ``holders`` hold the most, most first.

    What no session holds and is not free either: ``pinned_blocks`` are kept for transfers,
    ``in_transfer_blocks`` are being filled by imports.
    """

    needed_blocks: int
    free_blocks: int
    reserved_blocks: int
    watermark_blocks: int
    reason: NoFitReason = NoFitReason.BLOCKS
    holders: tuple[SessionHold, ...] = ()
    pinned_blocks: int = 0
    in_transfer_blocks: int = 0


class SlotResult(NamedTuple):
    """The answer to a SlotRequest; block tables are empty unless the outcome is OK."""

    outcome: Outcome
    num_new_computed_tokens: int = 0
    num_new_tokens: int = 0
    hit_blocks: BlockTables = ()
    new_blocks: BlockTables = ()
    handle: int = 0
    no_fit: NoFit | None = None


class Hit(NamedTuple):
    """The longest cached prefix of a request, in tokens and blocks.

    ``num_uncached_common_prefix_tokens``: by how much it is shorter than the longest of a
    single kind of attention.
    """

    num_computed_tokens: int
    blocks: BlockTables
    handle: int
    num_uncached_common_prefix_tokens: int = 0


class FreeResult(NamedTuple):
    """``ticket`` is 0 unless blocks were detached."""

    known: bool
    ticket: int = 0


class Grow(NamedTuple):
    """Columns of a Step's grow operations: int32 each, ``tokens`` uint32, little-endian."""

    handles: bytes = b""
    num_computed_tokens: bytes = b""
    num_new_tokens: bytes = b""
    token_offsets: bytes = b""
    token_counts: bytes = b""
    tokens: bytes = b""
    num_lookahead_tokens: int = 0


class Cache(NamedTuple):
    """Columns of a Step's cache operations: int32 each."""

    handles: bytes = b""
    num_computed_tokens: bytes = b""


class Free(NamedTuple):
    """Columns of a Step's free operations: handles int32, the rest uint8 or empty."""

    handles: bytes = b""
    modes: bytes = b""
    did_not_run: bytes = b""


NO_GROW, NO_CACHE, NO_FREE = Grow(), Cache(), Free()
"""The columns of a Step without such operations."""


class Step(NamedTuple):
    """One scheduler step. ``runs`` are (kind, count), in the order to apply."""

    runs: Sequence[tuple[int, int]]
    on_no_fit_stop: bool = True
    token_budget: int | None = None
    admissions: Sequence[SlotRequest] = ()
    grow: Grow = NO_GROW
    cache: Cache = NO_CACHE
    free: Free = NO_FREE


@dataclass(frozen=True, slots=True)
class OperationError:
    """Why the operation at ``index`` of a Step answered INVALID."""

    index: int
    error: KVDepotError


class StepResult(NamedTuple):
    """A Step's answer. An empty outcomes column means that all are OK.

    ``grow_counts`` and ``grow_ids`` are int32 columns, one of each a KV cache group.
    """

    admissions: list[SlotResult]
    grow_outcomes: bytes
    grow_counts: list[bytes]
    grow_ids: list[bytes]
    cache_outcomes: bytes
    free_outcomes: bytes
    free_tickets: bytes
    no_fit: NoFit | None
    errors: list[OperationError]
    free_blocks: int
