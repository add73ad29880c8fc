"""A scheduler's calls, counted and timed."""

from __future__ import annotations

from kvclient.replay.tally import Tally
from kvclient.session import Session
from kvclient.values import (
    Content,
    FreeMode,
    Hit,
    SlotRequest,
    SlotResult,
    Step,
    StepMark,
    StepResult,
)


class TimedCalls:
    """A session and its StepStream; every operation of a Step counts as one."""

    def __init__(self, session: Session, tally: Tally) -> None:
        self._session = session
        self._stream = session.step_stream()
        self._tally = tally

    def step(self, step: Step, mark: StepMark) -> StepResult:
        """One message of the stream."""
        with self._tally.timed("Step", sum(count for _, count in step.runs)):
            return self._stream.call(step, mark=mark)

    def get_computed_blocks(self, request_id: str, content: Content | None, mark: StepMark) -> Hit:
        """GetComputedBlocks."""
        with self._tally.timed("GetComputedBlocks"):
            return self._session.get_computed_blocks(request_id, content, mark=mark)

    def allocate_slots(self, slots: SlotRequest, mark: StepMark) -> SlotResult:
        """AllocateSlots."""
        with self._tally.timed("AllocateSlots"):
            return self._session.allocate_slots(slots, mark=mark)

    def cache_blocks(self, request_id: str, num_computed_tokens: int, mark: StepMark) -> bool:
        """CacheBlocks."""
        with self._tally.timed("CacheBlocks"):
            return self._session.cache_blocks(request_id, num_computed_tokens, mark=mark)

    def free(self, request_id: str, mode: FreeMode, mark: StepMark) -> None:
        """Free; a preempted request did not run in the step of this call."""
        with self._tally.timed("Free"):
            did_not_run = mode is FreeMode.PREEMPT
            self._session.free(request_id, mode, did_not_run=did_not_run, mark=mark)

    def close(self) -> None:
        """Ends the stream."""
        self._stream.close()
