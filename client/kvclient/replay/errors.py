"""What ends a replay."""

from __future__ import annotations


class ReplayError(Exception):
    """The replay cannot go on; the message says why."""


class WrongBytes(Exception):
    """A slot does not hold what its token prefix demands."""

    def __init__(
        self, request_id: str, group: int, position: int, block_id: int, what: str
    ) -> None:
        super().__init__(
            f"request {request_id}: group {group}: token {position}, block {block_id}: {what}"
        )
        self.request_id = request_id
        self.group = group
        self.position = position
        self.block_id = block_id
        self.what = what

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.request_id, self.group, self.position, self.block_id, self.what)
        return WrongBytes, arguments
