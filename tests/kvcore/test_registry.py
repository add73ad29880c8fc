"""A kind of attention of one's own, beside those of the house."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import kvcore.single_type.registry as registry
from building import content, full, groups_config
from kvcore.depot import Depot
from kvcore.errors import InvalidArgument
from kvcore.feed import events_of
from kvcore.operation import FreeMode, Outcome, SlotRequest
from kvcore.single_type import (
    FullAttentionManager,
    SlidingWindowManager,
    manager_class_for,
    register_kv_cache_spec,
)
from kvcore.spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RequestLimits,
    SlidingWindowMLASpec,
)


@dataclass(frozen=True, slots=True)
class FirstBlockSpec(FullAttentionSpec):
    """Keeps the KV of the first block only; all of it counts for a hit."""

    @property
    def kind(self) -> str:
        return "first_block"


class FirstBlockManager(FullAttentionManager):
    def remove_skipped_blocks(
        self, request_id: str, total_computed_tokens: int, num_prompt_tokens: int | None
    ) -> None:
        self._remove_range(request_id, 1, total_computed_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class UnservedSpec(AttentionSpec):
    @property
    def kind(self) -> str:
        return "unserved"

    def max_memory_usage_bytes(self, limits: RequestLimits) -> int:
        return 0


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MANAGERS", dict(registry._MANAGERS))
    register_kv_cache_spec(FirstBlockSpec, FirstBlockManager)


def test_a_spec_of_ones_own_is_served(registered: None) -> None:
    spec = FirstBlockSpec(4, num_kv_heads=1, head_size=16)
    depot = Depot(groups_config(20, full(), spec))
    session = depot.open_session("s")
    session.begin(None, None)
    depot.allocate_slots(session, SlotRequest("a", content(range(10)), lookup=True))
    session.begin(None, None)
    slots = SlotRequest("a", content([10], 10), num_computed_tokens=10, num_new_tokens=1)
    assert depot.allocate_slots(session, slots).outcome is Outcome.OK
    assert session.manager.get_block_ids("a") == ([1, 2, 3], [4, 0, 6])
    assert {event.spec_kind for event in events_of(depot.snapshot())} == {
        "full_attention",
        "first_block",
    }
    hit = SlotRequest("b", content(range(10)), lookup=True)
    assert depot.allocate_slots(session, hit).hit_blocks == ([1, 2], [4, 5])
    for request_id in "ab":
        depot.free(session, request_id, FreeMode.FINISH, did_not_run=False)
    assert depot.audit() == []
    # To register it again changes nothing; another manager for it is a mistake.
    register_kv_cache_spec(FirstBlockSpec, FirstBlockManager)
    with pytest.raises(InvalidArgument, match="FirstBlockManager already"):
        register_kv_cache_spec(FirstBlockSpec, SlidingWindowManager)


def test_a_derived_spec_has_its_bases_manager() -> None:
    spec: KVCacheSpec = SlidingWindowMLASpec(4, 1, 16, sliding_window=8)
    assert manager_class_for(spec) is SlidingWindowManager
    with pytest.raises(InvalidArgument, match="register_kv_cache_spec"):
        Depot(groups_config(20, UnservedSpec(4, 1, 16)))
