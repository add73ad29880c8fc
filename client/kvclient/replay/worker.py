"""What a model worker does to the pool: writes computed tokens, reads hits and windows.

It stands for the forward pass. What a step finds is read before its tokens are written, and
steps run in order, as on a device.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from kvclient.attachment import Attachment
from kvclient.pool import Pool
from kvclient.replay.errors import WrongBytes
from kvclient.replay.pages import GroupPages, Span
from kvclient.replay.rows import group_rows

_WRONG_HIT = "a hit holds other bytes than its prefix demands"
_WRONG_WINDOW = "the window of a running request holds other bytes than its prefix demands"
_NOT_ZEROED = "other bytes than zeros lie behind its end"
_LOST = "its computed bytes were lost before its end"


@dataclass(slots=True)
class StepWork:
    """One step: what to verify, what to write, and then finished requests to read again.

    ``new_blocks`` are a group's, where they are to be zeroed before they are written.
    ``hits`` are those of admissions, ``windows`` what running requests still look at in the
    groups that recycle blocks. ``num_tokens`` are computed.
    """

    step: int = 0
    hits: list[Span] = field(default_factory=list)
    windows: list[Span] = field(default_factory=list)
    new_blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    writes: list[Span] = field(default_factory=list)
    finished: list[Span] = field(default_factory=list)
    num_tokens: int = 0


class Worker:
    """Executes steps on a mapped pool; ``attachment``: while it is attached.

    ValueError for rows that it cannot fill.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        attachment: Attachment | None = None,
        verify_sample: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.blocks_verified = 0
        self.blocks_in_windows = 0
        self.blocks_reread = 0
        self.tokens_written = 0
        self._pool = pool
        self._attachment = attachment
        rng = random.Random(seed)
        self._groups = {
            rows.group: GroupPages(pool, rows, verify_sample=verify_sample, rng=rng)
            for rows in group_rows(pool.description)
        }
        self._zeroed = {
            number
            for number, group in enumerate(pool.description.groups)
            if group.needs_zeroing and number in self._groups
        }
        self._null_block = self._read_null_block()

    def execute(self, work: StepWork) -> None:
        """Do one step. Raises WrongBytes, and what ``Attachment.check`` does.

        Blocks that this very step fills for one request and hits for another are read
        after the writes, as attention reads them; all other hits before.
        """
        if self._attachment is not None:
            self._attachment.check()
        filled = {block_id for span in work.writes for block_id in span.block_ids}
        late: list[Span] = []
        for span in work.hits:
            old, new = self._groups[span.group].split(span, filled)
            self.blocks_verified += self._verify(old, _WRONG_HIT)
            if new is not None:
                late.append(new)
        for span in work.windows:
            self.blocks_in_windows += self._verify(span, _WRONG_WINDOW)
        for group, block_ids in work.new_blocks:
            self._pool.zero_blocks(group, block_ids)
        for group, pages in self._groups.items():
            pages.write([span for span in work.writes if span.group == group])
        self.tokens_written += work.num_tokens
        for span in late:
            self.blocks_verified += self._verify(span, _WRONG_HIT)
        for span in work.finished:
            self.blocks_reread += self._verify(span, _LOST)
            if span.group in self._zeroed:
                self._groups[span.group].require_zeros_behind(span, _NOT_ZEROED)

    def check_null_block(self) -> None:
        """WrongBytes if anybody wrote the null block since the start."""
        if self._read_null_block() != self._null_block:
            raise WrongBytes("any", 0, 0, 0, "the null block was written")

    def _read_null_block(self) -> list[bytes]:
        return [pages.null_block() for pages in self._groups.values()]

    def _verify(self, span: Span, what: str) -> int:
        return self._groups[span.group].verify(span, what)
