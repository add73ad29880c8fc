"""What the facade sends and has an answer to later: growth, and admissions nobody asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvclient.facade.known import KnownRequest
from kvclient.values import BlockTables, Outcome, SlotRequest, SlotResult


class Ask:
    """One request's growth: to ``num_computed`` + ``num_new`` tokens, and the lookahead.

    ``tokens`` (as the wire has them) begin at ``offset``. ``outcome`` is None until it is
    answered. Of an ask ahead, ``num_scheduled`` of the new tokens are of this step, and
    ``registers`` says whether a block is full with them. ``end`` are the slots that the
    request then has in every group.
    """

    # Set where they are something else: asks are made by the dozen.
    is_ahead = registers = False
    end = 0
    outcome: Outcome | None = None
    new_blocks: BlockTables = ()

    def __init__(
        self,
        known: KnownRequest,
        num_computed: int,
        num_new: int,
        lookahead: int,
        offset: int,
        tokens: bytes,
    ) -> None:
        self.known = known
        self.life = known.life
        self.num_computed = num_computed
        self.num_new = num_new
        self.lookahead = lookahead
        self.offset = offset
        self.tokens = tokens
        self.num_scheduled = num_new


@dataclass(frozen=True, slots=True)
class Offer:
    """Slots that a request of ``num_tokens`` has on the server, if its scheduler asks for them."""

    request_id: str
    num_tokens: int
    slots: SlotRequest
    result: SlotResult

    def fits(self, asked: SlotRequest) -> bool:
        """Whether ``asked`` would have been answered just so. What was harder to get does, too."""
        offered, result = self.slots, self.result
        return (
            asked.num_new_tokens == result.num_new_tokens
            and asked.num_new_computed_tokens == result.num_new_computed_tokens
            and asked.num_lookahead_tokens == offered.num_lookahead_tokens
            and asked.full_sequence_must_fit <= offered.full_sequence_must_fit
            and asked.has_scheduled_reqs <= offered.has_scheduled_reqs
            and not asked.num_computed_tokens
            and not asked.num_external_computed_tokens
            and not asked.delay_cache_blocks
            and not asked.reserved_blocks
            and not asked.num_encoder_tokens
        )


class Introduction:
    """A request that the server is told of before it is looked up; nothing is allocated."""

    __slots__ = ("is_sent", "num_tokens", "on_answer", "request", "slots")

    def __init__(
        self, request: Any, slots: SlotRequest, on_answer: Callable[[Introduction, int], None]
    ) -> None:
        self.request = request
        self.num_tokens: int = request.num_tokens
        # None once it was answered, or need not be sent any more.
        self.slots: SlotRequest | None = slots
        self.is_sent = False
        # Told the handle, 0 if the server refused it: whoever needs it then introduces it.
        self.on_answer = on_answer

    @property
    def is_open(self) -> bool:
        """Whether it is to be sent, or was and has no answer."""
        return self.slots is not None

    def close(self) -> SlotRequest | None:
        """It was answered, or is not sent; what it was."""
        slots, self.slots = self.slots, None
        return slots
