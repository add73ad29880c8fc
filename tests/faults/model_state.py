"""What the model keeps of blocks, requests and sessions, and how it says what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

Key = tuple[str, tuple[int, ...]]
"""What a block holds: the salt, and all tokens up to the block's end."""

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXISTS = grpc.StatusCode.ALREADY_EXISTS
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION

INFINITE = float("inf")
HOLDERS_MAX = 8

Answer = Any
"""The reply's message, or the status code of an error."""


class Divergence(AssertionError):
    """The server did what the model does not allow."""


class Refusal(Exception):
    """The model predicts an error."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


def agree(what: str, found: object, expected: object) -> None:
    """Raise Divergence unless the two are equal."""
    if found != expected:
        raise Divergence(f"{what}: the server says {found}, the model {expected}")


def ids_of(tables: Iterable[Any]) -> list[int]:
    """The block ids of a reply with one KV cache group."""
    return [block_id for table in tables for block_id in table.ids]


def tokens_of(raw: bytes) -> list[int]:
    """Tokens as numbers."""
    return list(struct.unpack(f"<{len(raw) // 4}I", raw))


def ints_of(column: bytes) -> list[int]:
    """A column of int32."""
    return list(struct.unpack(f"<{len(column) // 4}i", column))


Scope = str | None
"""What a reset is of: the contents with this salt; None: all."""


@dataclass(slots=True)
class Drain:
    """A reset that waits."""

    drain_id: int
    scope: Scope
    deadline: float


@dataclass(eq=False, slots=True)
class Block:
    """``writer`` has not confirmed its bytes; ``keepers`` freed it in steps that may still run."""

    block_id: int
    refs: int = 0
    key: Key | None = None
    writer: Session | None = None
    written_in: int = 0
    keepers: dict[Session, int] = field(default_factory=dict)

    def is_free_for(self, session: Session) -> bool:
        """Whether the session can be given the block."""
        return not self.refs and not self.keepers.keys() - {session}

    def is_kept_by(self, session: Session) -> bool:
        """Whether it is the only one that keeps the block from the others."""
        return not self.refs and self.keepers.keys() == {session}


@dataclass(eq=False, slots=True)
class Request:
    """A request of one session."""

    request_id: str
    tokens: list[int]
    salt: str
    handle: int
    table: list[Block] = field(default_factory=list)
    holds: bool = False
    running: bool = False
    computed: int = 0
    registered: int = 0
    confirmed: int = 0
    remembered: int = 0
    preemptions: int = 0
    # The step that registered last, and its first block; the step of the last allocation.
    registered_in: int = -1
    registered_from: int = 0
    allocated_in: int = 0
    outlived_reset: bool = False

    def key(self, position: int, block_size: int) -> Key:
        """What belongs in the block at ``position`` of the table."""
        return self.salt, tuple(self.tokens[: (position + 1) * block_size])


class Detached(list[Block]):
    """Blocks of a detached request."""

    salt = ""


@dataclass(eq=False, slots=True)
class Session:
    """What one scheduler holds."""

    name: str
    requests: dict[str, Request] = field(default_factory=dict)
    tickets: dict[int, Detached] = field(default_factory=dict)
    step: int = 0
    completed: int = 0
    # The last step that may use what is freed now.
    last_use: int = 0
    names_steps: bool = False
    workers: int = 0
    lease_seconds: float = INFINITE
    heard_at: float = 0.0
    ended_at: float = INFINITE

    @property
    def ended(self) -> bool:
        """Whether it is over; its workers may remain."""
        return self.ended_at < INFINITE

    @property
    def num_blocks(self) -> int:
        """Entries of its tables and tickets."""
        tables = [request.table for request in self.requests.values()]
        return sum(map(len, [*tables, *self.tickets.values()]))

    def by_handle(self, handle: int) -> Request | None:
        """A request by its number."""
        found = [request for request in self.requests.values() if request.handle == handle]
        return found[0] if found else None
