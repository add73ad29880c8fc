"""What calls take and give. Names and numbers are those of the wire (kvdepot.v1).

Columns of a Step are little-endian arrays in bytes; where one is given, a sequence of
integers does too.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import compress

# Of a Content; for callers, who import nothing of kvcore.
from kvcore.hashing import ExtraKeys as ExtraKeys
from kvcore.hashing import MultimodalItem as MultimodalItem

BlockTables = tuple[list[int], ...]
"""Block ids, one list a KV cache group; 0, the null block, where nothing is kept."""
Tokens = bytes | Sequence[int]
"""Token ids, or the same as little-endian uint32."""
Column = bytes | Sequence[int]


def token_bytes(tokens: Tokens) -> bytes:
    """Token ids as the wire has them. OverflowError for ids outside uint32."""
    return tokens if isinstance(tokens, bytes) else _packed("I", tokens)


def int32_column(values: Column) -> bytes:
    """A column as the wire has it. OverflowError for values outside int32."""
    return values if isinstance(values, bytes) else _packed("i", values)


def int32s(column: bytes) -> list[int]:
    """The values of an int32 column."""
    values = array("i", column)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _packed(typecode: str, values: Sequence[int]) -> bytes:
    packed = array(typecode, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


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


class NoFitReason(IntEnum):
    """Why an allocation was refused: too few free blocks, or the hit is a Mamba state that
    the present step computes, and can be hit from the next one on.
    """

    BLOCKS = 1
    HIT_OF_THIS_STEP = 2


class FreeMode(IntEnum):
    """What becomes of a freed request: over, kept for re-admission, or detached."""

    FINISH = 1
    PREEMPT = 2
    DETACH = 3


class ResetMode(IntEnum):
    """What a reset does while blocks are in use: nothing, wait, or reset all the same."""

    REFUSE = 1
    DRAIN = 2
    FORCE = 3


class BlockStatus(IntEnum):
    """Whether a pulled block's bytes are here: yes, not written yet, or no."""

    READY = 1
    PENDING = 2
    MISSING = 3


# --- what calls take ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepMark:
    """The scheduler step a call belongs to, and the last one whose writes have ended."""

    step: int
    completed_step: int


@dataclass(frozen=True, slots=True)
class Content:
    """What is new about a request: its introduction (offset 0) or tokens from an offset on.

    An offset below what the server holds cuts the rest off first. ``extra_keys`` and
    what follows count only when the request is introduced.
    """

    tokens: Tokens = b""
    token_offset: int = 0
    extra_keys: ExtraKeys | None = None
    lora_id: int | None = None
    num_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Slots for one request; counts are in tokens, ``reserved_blocks`` in blocks.

    ``num_new_tokens`` None: all that are left after the hit, at most
    ``max_new_tokens``, a chunk that does not reach the end rounded down to
    ``new_tokens_alignment``. ``lookup``: look up now, instead of taking
    ``num_new_computed_tokens`` of the last lookup. ``num_encoder_tokens`` get slots in
    cross-attention groups.
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
    full_sequence_must_fit: bool = False
    reserved_blocks: int = 0
    has_scheduled_reqs: bool = True
    num_encoder_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Grow:
    """Columns of grow operations: int32; ``tokens`` are those of all, in order."""

    handles: Column = b""
    num_computed_tokens: Column = b""
    num_new_tokens: Column = b""
    token_offsets: Column = b""
    token_counts: Column = b""
    tokens: Tokens = b""
    num_lookahead_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cache:
    """Columns of cache operations, int32."""

    handles: Column = b""
    num_computed_tokens: Column = b""


@dataclass(frozen=True, slots=True)
class Free:
    """Columns of free operations: handles int32; modes and did_not_run one byte each."""

    handles: Column = b""
    modes: bytes | Sequence[FreeMode] = b""
    did_not_run: bytes | Sequence[bool] = b""


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduler step. ``runs`` are (kind, count), in the order to apply.

    ``on_no_fit_stop``: the first refusal stops, and what follows answers NOT_ATTEMPTED.
    ``token_budget`` limits the new tokens of all operations together.
    """

    runs: Sequence[tuple[OperationKind, int]]
    on_no_fit_stop: bool = True
    token_budget: int | None = None
    admissions: Sequence[SlotRequest] = ()
    grow: Grow = field(default_factory=Grow)
    cache: Cache = field(default_factory=Cache)
    free: Free = field(default_factory=Free)


# --- what calls give ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest cached prefix. ``handle`` names the request in Steps.

    ``num_uncached_common_prefix_tokens``: by how much it is shorter than the longest of a
    single kind of attention.
    """

    num_computed_tokens: int
    blocks: BlockTables
    handle: int
    num_uncached_common_prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SessionHold:
    """Blocks that a session keeps from the others; ``departed``: quarantined ones."""

    session_id: str
    name: str
    num_blocks: int
    departed: bool


@dataclass(frozen=True, slots=True)
class NoFit:
    """Why an allocation was refused, counts in blocks, and who holds the most of them.

    What no session holds and is not free either: ``pinned_blocks`` are kept for transfers
    that peers read, ``in_transfer_blocks`` are being filled by imports.
    """

    needed_blocks: int
    free_blocks: int
    reserved_blocks: int
    watermark_blocks: int
    reason: NoFitReason = NoFitReason.BLOCKS
    holders: tuple[SessionHold, ...] = ()
    pinned_blocks: int = 0
    in_transfer_blocks: int = 0


@dataclass(frozen=True, slots=True)
class SlotResult:
    """The answer to a SlotRequest.

    HIT_CHANGED carries the new hit, NO_FIT the reason; blocks of what is not OK are empty.
    """

    outcome: Outcome
    num_new_computed_tokens: int
    num_new_tokens: int
    hit_blocks: BlockTables
    new_blocks: BlockTables
    handle: int
    no_fit: NoFit | None


@dataclass(frozen=True, slots=True)
class FreeResult:
    """``known`` False: nothing was done. ``ticket`` is 0 unless blocks were detached."""

    known: bool
    ticket: int


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """Blocks in use by a request of a session, or detached under a ticket (else 0), or kept by
    a transfer or an import (how its id begins), with the peer's name for the session's.
    """

    session_id: str
    session_name: str
    request_id: str
    ticket: int
    num_blocks: int
    transfer: str = ""

    def __str__(self) -> str:
        if self.transfer:
            who = f" of {self.session_name}" if self.session_name else ""
            return f"transfer {self.transfer}{who} ({self.num_blocks} blocks)"
        held_by = f"ticket {self.ticket}" if self.ticket else f"request {self.request_id}"
        return (
            f"session {self.session_name or self.session_id} {held_by} ({self.num_blocks} blocks)"
        )


@dataclass(frozen=True, slots=True)
class ResetResult:
    """How a reset stands. Not ``done``: a drain waits for ``holders``, or was ``abandoned``.

    ``num_blocks_cleared``: whose content it took. ``holders`` of a forced one go on with
    their blocks.
    """

    generation: int
    done: bool
    holders: tuple[BlockHolder, ...]
    drain_id: int
    abandoned: bool
    num_blocks_cleared: int


@dataclass(frozen=True, slots=True)
class GrowResults:
    """An empty ``outcomes`` means that all are OK; else one byte each.

    ``counts`` and ``ids`` are int32 columns of the new blocks, one a KV cache group.
    """

    outcomes: bytes
    counts: tuple[bytes, ...]
    ids: tuple[bytes, ...]

    def new_blocks(self, group: int = 0) -> list[list[int]]:
        """The new block ids of each operation."""
        if group >= len(self.counts):
            return []
        ids = int32s(self.ids[group])
        counts = int32s(self.counts[group])
        blocks: list[list[int]] = [[] for _ in counts]
        start = 0
        for index in compress(range(len(counts)), counts):  # few: most growth needs no block
            stop = start + counts[index]
            blocks[index] = ids[start:stop]
            start = stop
        return blocks


@dataclass(frozen=True, slots=True)
class OperationError:
    """Why the operation at ``index`` of a Step answered INVALID.

    ``code`` is a gRPC status code; 0 from a server that does not tell it.
    ``kvclient.errors.of_operation`` makes an error of it.
    """

    index: int
    reason: str
    message: str
    code: int = 0
    field: str = ""
    retryable: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """A Step's answer. An empty outcomes column means that all are OK.

    ``no_fit`` is that of the first refusal to grow; ``free_blocks`` are those free for
    this session after the Step; ``free_tickets`` one a free operation, empty when none
    detached.
    """

    admissions: list[SlotResult]
    grow: GrowResults
    cache_outcomes: bytes
    free_outcomes: bytes
    free_tickets: tuple[int, ...]
    no_fit: NoFit | None
    errors: list[OperationError]
    free_blocks: int


@dataclass(frozen=True, slots=True)
class PulledBlock:
    """The answer for one hash; ``data`` holds its pages, layer by layer, if it is READY."""

    block_hash: bytes
    status: BlockStatus
    data: bytes
