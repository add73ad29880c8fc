"""The worker that stands for the forward pass, over a pool in this process's memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from kvclient.description import KVCacheSpec, LayerLayout, PoolDescription
from kvclient.pool import Pool, row_shape
from kvclient.replay.errors import WrongBytes
from kvclient.replay.job import Job, aligned
from kvclient.replay.pages import Span
from kvclient.replay.pattern import page_words, prefix_values, salts
from kvclient.replay.rows import group_rows
from kvclient.replay.trace import TraceRequest
from kvclient.replay.worker import StepWork, Worker
from kvclient.tables import RequestTables
from pools import MAMBA_ALIGN, MAMBA_ALL, describe, full, window

BLOCK_SIZE = 4
VALUES = prefix_values(np.arange(10, dtype=np.uint32))
OTHER_VALUES = prefix_values(np.arange(1, 11, dtype=np.uint32))


@dataclass
class FakePool:
    """Eight blocks of 4 tokens in 2 layers of one group, 16 bytes for K and for V."""

    description: PoolDescription = field(default_factory=lambda: describe(full(2)))

    def __post_init__(self) -> None:
        self.layers: dict[str, Any] = {}
        for layout in self.description.layers:
            shape = (self.description.num_blocks, *row_shape(layout))
            self.layers[layout.name] = np.zeros(shape, np.uint8)

    def layer_bytes(self, name: str) -> Any:
        return self.layers[name]

    def zero_blocks(self, group: int, block_ids: list[int]) -> None:
        for layout in self.description.layers:
            if layout.name in self.description.groups[group].layer_names:
                self.layers[layout.name][block_ids] = 0

    def words(self, name: str) -> Any:
        return self.layers[name].view(np.uint64)


def make_worker(pool: FakePool, **options: float) -> Worker:
    return Worker(cast(Pool, pool), **options)


def test_writes_every_slot_and_no_other() -> None:
    pool = FakePool()
    worker = make_worker(pool)
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:6], [5, 2])], num_tokens=6))
    worker.execute(StepWork(2, writes=[Span("a", 6, VALUES[6:9], [2, 7])], num_tokens=3))
    for number, name in enumerate(pool.layers):
        written, constants = pool.words(name), salts(2, 16, 4 * number)
        assert (written[5] == page_words(VALUES[:4], constants)).all()
        assert (written[2] == page_words(VALUES[4:8], constants)).all()
        assert (written[7, :, 0] == page_words(VALUES[8:9], constants)[:, 0]).all()
        assert not written[7, :, 1:].any()
        assert not written[[0, 1, 3, 4, 6]].any()
    worker.execute(StepWork(3, finished=[Span("a", 0, VALUES[:9], [5, 2, 7])]))
    assert (worker.tokens_written, worker.blocks_reread) == (9, 3)
    worker.check_null_block()


@pytest.mark.parametrize(
    ("layer", "half", "position"),
    [(0, 0, 0), (0, 1, 3), (1, 0, 4), (1, 1, 7)],
)
def test_one_wrong_byte_is_found(layer: int, half: int, position: int) -> None:
    pool = FakePool()
    worker = make_worker(pool)
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:8], [5, 2])]))
    block_id = (5, 2)[position // BLOCK_SIZE]
    pool.layers[f"full.{layer}"][block_id, half, position % BLOCK_SIZE, 15] ^= 1
    with pytest.raises(WrongBytes) as caught:
        worker.execute(StepWork(2, hits=[Span("b", 0, VALUES[:8], [5, 2])]))
    wrong = caught.value
    assert (wrong.request_id, wrong.position, wrong.block_id) == ("b", position, block_id)


def test_a_hit_on_another_prefix_is_found() -> None:
    worker = make_worker(FakePool())
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:4], [3])]))
    with pytest.raises(WrongBytes, match="request b: group 0: token 0, block 3"):
        worker.execute(StepWork(2, hits=[Span("b", 0, OTHER_VALUES[:4], [3])]))


def test_a_hit_on_what_the_same_step_fills_is_read_after_the_writes() -> None:
    worker = make_worker(FakePool())
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:4], [3])]))
    worker.execute(
        StepWork(
            2,
            hits=[Span("b", 0, VALUES[:8], [3, 6])],
            writes=[Span("a", 4, VALUES[4:8], [6])],
        )
    )
    assert worker.blocks_verified == 2


def test_reads_the_old_bytes_before_the_step_takes_the_block() -> None:
    """A hit of this step on a block that this step also fills must fail after all."""
    worker = make_worker(FakePool())
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:4], [3])]))
    with pytest.raises(WrongBytes):
        worker.execute(
            StepWork(
                2,
                hits=[Span("b", 0, VALUES[:4], [3])],
                writes=[Span("c", 0, OTHER_VALUES[:4], [3])],
            )
        )


def test_a_sample_reads_some_blocks_whole() -> None:
    pool = FakePool()
    worker = make_worker(pool, verify_sample=0.5)
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:8], [5, 2])]))
    for _ in range(50):
        worker.execute(StepWork(2, hits=[Span("b", 0, VALUES[:8], [5, 2])]))
    assert 25 < worker.blocks_verified < 75


def test_the_null_block_is_never_read_or_written() -> None:
    pool = FakePool()
    worker = make_worker(pool)
    with pytest.raises(WrongBytes, match="token 4, block 0: the null block would be written"):
        worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:8], [3, 0])]))
    with pytest.raises(WrongBytes, match="token 0, block 0: the null block stands where"):
        worker.execute(StepWork(1, hits=[Span("a", 0, VALUES[:8], [0, 3])]))
    pool.layers["full.1"][0, 0, 0, 0] = 1
    with pytest.raises(WrongBytes, match="the null block was written"):
        worker.check_null_block()


def test_new_blocks_are_zeroed_before_they_are_written() -> None:
    plain = describe(full(1), MAMBA_ALL)
    groups = (dataclasses.replace(plain.groups[0], needs_zeroing=True), plain.groups[1])
    pool = FakePool(dataclasses.replace(plain, groups=groups))
    worker = make_worker(pool)
    pages = pool.layers["full.0"]
    pages[1:] = 0xFF
    span = Span("a", 0, VALUES[:6], [5, 2])
    worker.execute(StepWork(1, new_blocks=[(0, [5, 2])], writes=[span]))
    assert not pages[2, :, 2:].any()
    assert (pages[3] == 0xFF).all()
    worker.execute(StepWork(2, finished=[span]))
    pages[2, 1, 3, 7] = 1
    with pytest.raises(WrongBytes, match="token 6, block 2: other bytes than zeros"):
        worker.execute(StepWork(3, finished=[span]))


# --- which rows a request touches -----------------------------------------------------


def a_job(pool: PoolDescription, num_tokens: int, tables: list[list[int]]) -> Job:
    values = prefix_values(np.arange(num_tokens, dtype=np.uint32))
    request = TraceRequest(0, 0, num_tokens, 0, ())
    job = Job(request, b"", values, False, num_tokens, num_tokens)
    job.tables = RequestTables(pool, num_tokens)
    job.tables.admit((), tables, 0)
    return job


@pytest.mark.parametrize(
    ("spec", "num_tokens", "rows"),
    [
        pytest.param(full(1), 10, (0, 10), id="full"),
        pytest.param(window(1, 6), 10, (5, 10), id="window"),
        pytest.param(window(1, 6), 3, (0, 3), id="less than a window"),
        pytest.param(MAMBA_ALL, 10, (2, 3), id="state"),
        pytest.param(MAMBA_ALL, 8, (1, 2), id="state at a boundary"),
    ],
)
def test_what_the_next_token_looks_at(
    spec: tuple[KVCacheSpec, tuple[LayerLayout, ...]], num_tokens: int, rows: tuple[int, int]
) -> None:
    pool = describe(spec)
    job = a_job(pool, 10, [[4, 5, 6]])
    (group,) = group_rows(pool)
    (span,) = job.reads(group, num_tokens)
    assert (span.start, span.start + len(span.values)) == rows
    ends = [min((row + 1) * group.tokens_per_row, num_tokens) - 1 for row in range(*rows)]
    assert list(span.values) == list(job.values[ends])
    first, last = rows[0] // group.rows_per_block, -(-rows[1] // group.rows_per_block)
    assert list(span.block_ids) == [4, 5, 6][first:last]


@pytest.mark.parametrize(
    ("spec", "start", "stop", "rows"),
    [
        pytest.param(full(1), 3, 10, (3, 10), id="every token"),
        pytest.param(MAMBA_ALL, 0, 10, (0, 3), id="a state a block"),
        pytest.param(MAMBA_ALL, 9, 10, (2, 3), id="the running state"),
        pytest.param(MAMBA_ALIGN, 0, 10, (2, 3), id="the state at the step's end"),
    ],
)
def test_what_computing_tokens_writes(
    spec: Any, start: int, stop: int, rows: tuple[int, int]
) -> None:
    pool = describe(spec)
    job = a_job(pool, 10, [[4, 5, 6]])
    (group,) = group_rows(pool)
    span = job.writes(group, start, stop)
    assert (span.start, span.start + len(span.values)) == rows
    assert span.values[-1] == job.values[stop - 1]


def test_groups_of_two_kinds_hold_bytes_of_their_own() -> None:
    pool = FakePool(describe(full(1), window(1, 6), MAMBA_ALL))
    worker = make_worker(pool)
    job = a_job(pool.description, 10, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    rows = group_rows(pool.description)
    worker.execute(StepWork(1, writes=[job.writes(group, 0, 10) for group in rows], num_tokens=10))
    hits = [span for group in rows for span in job.reads(group, 8)]
    with pytest.raises(WrongBytes, match="group 2: token 4, block 7"):
        # The state at 8 tokens, where the table says another block.
        worker.execute(StepWork(2, hits=[dataclasses.replace(hits[2], block_ids=[7])]))
    worker.execute(StepWork(3, hits=hits))
    # Three blocks hold 8 tokens and 6 in a window, two of a state's.
    assert worker.blocks_verified == 2 + 2 + 1
    with pytest.raises(WrongBytes, match="group 1"):
        worker.execute(StepWork(4, hits=[dataclasses.replace(hits[1], block_ids=[1, 2])]))


@pytest.mark.parametrize(
    ("start", "count", "num_known", "cut"),
    [
        pytest.param(0, 100, 200, 96, id="down to a boundary"),
        pytest.param(0, 10, 200, 0, id="less than a block"),
        pytest.param(0, 200, 200, 192, id="the last boundary"),
        pytest.param(192, 8, 200, 8, id="what is behind it"),
        pytest.param(0, 10, 10, 10, id="less than a block in all"),
        pytest.param(96, 96, 192, 96, id="to the end, which is a boundary"),
    ],
)
def test_steps_end_where_states_are_kept(start: int, count: int, num_known: int, cut: int) -> None:
    assert aligned(start, count, num_known, 16) == cut
    assert aligned(start, count, num_known, 0) == count
