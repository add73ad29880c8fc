"""Who is given large replies, and who is told to read some first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from kvcore.errors import ResourceExhausted
from kvdepot.v1 import admin_pb2, cache_pb2, transfer_pb2
from kvserver.unread import SMALL, UnreadReplies


@dataclass(frozen=True)
class Context:
    """All that is asked of a call's context."""

    name: str

    def peer(self) -> str:
        """The connection."""
        return self.name


DEAF: Any = Context("deaf")
WELL: Any = Context("well")


def test_who_reads_nothing_waits_and_nobody_else() -> None:
    unread = UnreadReplies(100)
    first = unread.hold(DEAF, 60)
    unread.require_room(DEAF)
    second = unread.hold(DEAF, 60)
    with pytest.raises(ResourceExhausted, match=r"120 bytes .* of 120 on all; at most 100") as told:
        unread.require_room(DEAF)
    assert told.value.reason == "UNREAD_REPLIES"
    assert told.value.retryable
    unread.require_room(WELL)
    third = unread.hold(WELL, 10)
    with pytest.raises(ResourceExhausted, match=r"10 bytes .* of 130 on all"):
        unread.require_room(WELL)
    first(None)
    unread.require_room(DEAF)
    second(None)
    third(None)
    assert unread.nbytes == 0
    assert not unread._by_peer


def test_what_is_small_is_a_call_of_some_service() -> None:
    methods = {
        method.name
        for file in (admin_pb2, cache_pb2, transfer_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods >= SMALL - {"Check"}  # health's, which is not ours
