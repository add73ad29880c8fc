"""The worker that stands for the forward pass, over a pool in this process's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from kvclient.pool import Pool
from kvclient.replay.pattern import block_bytes, prefix_values, salts
from kvclient.replay.worker import Span, StepWork, Worker, WrongBytes

BLOCK_SIZE = 4
VALUES = prefix_values(np.arange(10, dtype=np.uint32))
OTHER_VALUES = prefix_values(np.arange(1, 11, dtype=np.uint32))


@dataclass
class FakePool:
    """Eight blocks of 4 tokens in 2 layers, 16 bytes for K and for V."""

    block_size: int = BLOCK_SIZE
    layer_names: tuple[str, ...] = ("0", "1")
    layers: Any = field(default_factory=lambda: np.zeros((2, 8, 2, BLOCK_SIZE, 16), np.uint8))

    def layer_bytes(self, name: str) -> Any:
        return self.layers[int(name)]


def make_worker(pool: FakePool, **options: float) -> Worker:
    return Worker(cast(Pool, pool), **options)


def test_writes_every_slot_and_no_other() -> None:
    pool = FakePool()
    worker = make_worker(pool)
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:6], [5, 2])]))
    worker.execute(StepWork(2, writes=[Span("a", 6, VALUES[6:9], [2, 7])]))
    written = pool.layers.view(np.uint64)
    constants = salts(2, 16)
    assert (written[:, 5] == block_bytes(VALUES[:4], constants)).all()
    assert (written[:, 2] == block_bytes(VALUES[4:8], constants)).all()
    assert (written[:, 7, :, 0] == block_bytes(VALUES[8:9], constants)[:, :, 0]).all()
    assert not written[:, 7, :, 1:].any()
    assert not written[:, [0, 1, 3, 4, 6]].any()
    worker.execute(StepWork(3, finished=[Span("a", 0, VALUES[:9], [5, 2, 7])]))
    assert (worker.tokens_written, worker.blocks_reread) == (9, 3)


@pytest.mark.parametrize(
    ("layer", "half", "position"),
    [(0, 0, 0), (0, 1, 3), (1, 0, 4), (1, 1, 7)],
)
def test_one_wrong_byte_is_found(layer: int, half: int, position: int) -> None:
    pool = FakePool()
    worker = make_worker(pool)
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:8], [5, 2])]))
    block_id = (5, 2)[position // BLOCK_SIZE]
    pool.layers[layer, block_id, half, position % BLOCK_SIZE, 15] ^= 1
    with pytest.raises(WrongBytes) as caught:
        worker.execute(StepWork(2, hits=[Span("b", 0, VALUES[:8], [5, 2])]))
    wrong = caught.value
    assert (wrong.request_id, wrong.position, wrong.block_id) == ("b", position, block_id)


def test_a_hit_on_another_prefix_is_found() -> None:
    worker = make_worker(FakePool())
    worker.execute(StepWork(1, writes=[Span("a", 0, VALUES[:4], [3])]))
    with pytest.raises(WrongBytes, match="request b: token 0, block 3"):
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
