"""A reset that waits: the requests to send until a drain is done. Knows no clock."""

from __future__ import annotations

from kvclient import calls
from kvclient.calls import Call
from kvclient.errors import BlocksInUse, InvalidArgument
from kvclient.values import BlockHolder, ResetMode, ResetResult, StepMark

_PAUSES_S = (0.01, 0.5)
"""Between polls: at first, and at most."""


class DrainPolls:
    """The calls of one ``reset_prefix_cache``; in the other modes than drain it is one.

    ``scope`` is a LoRA name and a cache salt; neither: the whole pool.
    """

    def __init__(
        self,
        mode: ResetMode | str,
        scope: tuple[str | None, str | None],
        timeout_s: float | None,
    ) -> None:
        try:
            self._mode = ResetMode[mode.upper()] if isinstance(mode, str) else mode
        except KeyError:
            names = ", ".join(mode.name.lower() for mode in ResetMode)
            raise InvalidArgument(f"mode must be one of {names}", field="mode") from None
        self._scope = scope
        self._timeout_s = timeout_s
        self._drain_id = 0
        self._holders: tuple[BlockHolder, ...] = ()
        self._pause_s = _PAUSES_S[0]

    def call(self, mark: StepMark | None) -> Call[ResetResult]:
        """What to send next."""
        lora_name, cache_salt = self._scope
        return calls.reset_prefix_cache(
            mark,
            mode=self._mode,
            lora_name=lora_name,
            cache_salt=cache_salt,
            deadline_s=self._timeout_s,
            drain_id=self._drain_id,
        )

    def is_done(self, result: ResetResult) -> bool:
        """Whether the reset is done. BlocksInUse when the drain took too long."""
        if result.done:
            return True
        # Of a drain that is over the server names none.
        self._holders = result.holders or self._holders
        if result.abandoned:
            error = BlocksInUse(
                f"the drain was given up, blocks are still in use: {_names(self._holders)}",
                reason="DRAIN_ABANDONED",
                retryable=True,
            )
            error.holders = self._holders
            raise error
        self._drain_id = result.drain_id
        return False

    def next_pause(self) -> float:
        """Seconds to wait before the next call; longer each time."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _PAUSES_S[1])
        return pause_s


def _names(holders: tuple[BlockHolder, ...]) -> str:
    return "; ".join(map(str, holders)) or "holders are not known"
