"""Blocks are filled before they are handed out, and never while they may still be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from building import config, content, full, groups_config, mamba, window
from kvcore.block_pool import BlockPool
from kvcore.check import check
from kvcore.depot import Depot
from kvcore.errors import DataLoss
from kvcore.memory import PoolMemory
from kvcore.operation import FreeMode, Outcome, SlotRequest
from kvcore.poison import make_block_pool
from kvcore.session import Session


def admit(depot: Depot, session: Session, name: str, tokens: range) -> tuple[int, list[int]]:
    """Tokens hit, and the blocks that are new."""
    slots = SlotRequest(name, content(tokens), lookup=True)
    result = depot.allocate_slots(session, slots)
    assert result.outcome is Outcome.OK
    (new,) = result.new_blocks
    return result.num_new_computed_tokens, new


def test_what_is_new_is_filled_and_what_is_hit_is_not() -> None:
    filled: list[list[int]] = []
    depot = Depot(config(9), poison=lambda block_ids: filled.append(list(block_ids)))
    session = depot.open_session("s")
    session.begin(None, None)
    assert admit(depot, session, "a", range(12)) == (0, [1, 2, 3])
    assert filled == [[1, 2, 3]]
    depot.free(session, "a", FreeMode.FINISH, False)
    session.begin(None, None)
    filled.clear()
    assert admit(depot, session, "b", range(16)) == (12, [4])
    assert filled == [[4]]
    assert check(depot) == []


def test_a_refused_allocation_fills_nothing() -> None:
    filled: list[list[int]] = []
    depot = Depot(config(3), poison=lambda block_ids: filled.append(list(block_ids)))
    session = depot.open_session("s")
    session.begin(None, None)
    slots = SlotRequest("a", content(range(12)), lookup=True)
    assert depot.allocate_slots(session, slots).outcome is Outcome.NO_FIT
    assert filled == []


def test_what_a_step_in_flight_may_read_is_left_alone() -> None:
    filled: list[list[int]] = []
    depot = Depot(config(5), poison=lambda block_ids: filled.append(list(block_ids)))
    mine, other = depot.open_session("mine"), depot.open_session("other")
    mine.begin(1, 0)
    assert admit(depot, mine, "a", range(12)) == (0, [1, 2, 3])
    mine.begin(2, 0)
    depot.free(mine, "a", FreeMode.FINISH, True)
    filled.clear()
    # Block 3 is taken back while step 1 runs, which may read it still.
    assert admit(depot, mine, "b", range(100, 108)) == (0, [4, 3])
    assert filled == [[4]]
    depot.free(mine, "b", FreeMode.FINISH, True)
    # Others cannot have what is held back; when they can, no step reads it any more.
    other.begin(None, None)
    slots = SlotRequest("c", content(range(200, 216)), lookup=True)
    assert depot.allocate_slots(other, slots).outcome is Outcome.NO_FIT
    assert filled == [[4]]
    mine.begin(3, 2)
    (taken,) = depot.allocate_slots(other, slots).new_blocks
    assert sorted(taken) == sorted(filled[-1]) == [1, 2, 3, 4]


def test_it_costs_nothing_when_it_is_off() -> None:
    pool = make_block_pool(config(3).kv_cache, None)
    assert type(pool) is BlockPool


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_every_float_of_the_block_is_nan_and_no_other(tmp_path: Path, layout: str) -> None:
    torch = pytest.importorskip("torch")
    pools = groups_config(6, full(), window(8), layout=layout)
    with PoolMemory(pools, str(tmp_path), name="test") as memory:
        memory.poison([2, 5])
        for name in ("layer.0", "layer.1"):
            is_nan = torch.isnan(memory.layer(name)).flatten(1)
            assert is_nan.all(dim=1).tolist() == [False, False, True, False, False, True]
            assert is_nan.any(dim=1).tolist() == is_nan.all(dim=1).tolist()


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"]
)
def test_one_byte_is_nan_in_every_dtype(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from kvcore.memory.device import POISON

    filled = torch.full((8,), POISON, dtype=torch.uint8).view(getattr(torch, dtype))
    assert filled.to(torch.float32).isnan().all()


def test_a_file_cut_short_is_data_loss(tmp_path: Path) -> None:
    with PoolMemory(config(5), str(tmp_path), name="test") as memory:
        Path(memory.path).write_bytes(b"")
        with pytest.raises(DataLoss, match="cut short"):
            memory.poison([1])


@pytest.mark.parametrize(
    ("specs", "zeroed"),
    [
        pytest.param((full(), mamba("all")), {0}, id="full attention beside states"),
        pytest.param((full(), window(8), mamba("align")), {0}, id="windows are not"),
        pytest.param((full(), window(8)), set(), id="no states"),
        pytest.param((mamba("all"),), set(), id="states alone"),
    ],
)
def test_which_groups_are_zeroed(specs: tuple[object, ...], zeroed: set[int]) -> None:
    assert groups_config(9, *specs).kv_cache.zeroed_group_ids == zeroed  # type: ignore[arg-type]
