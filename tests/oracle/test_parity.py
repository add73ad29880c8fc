"""kvcore decides as vLLM 0.25.1 does, block for block, after every operation, with every kind
of attention (families.py).

KVDEPOT_ORACLE_SEEDS says how many sequences run (default 600), KVDEPOT_ORACLE_FIRST_SEED where
they begin.
"""

from __future__ import annotations

import os

import pytest

from harness import Local, Oracle, compare
from ours import KvcoreBackend
from sequence import make_sequence

pytestmark = pytest.mark.oracle

NUM_OPS = 200
SEEDS_PER_TEST = 30
FIRST_SEED = int(os.environ.get("KVDEPOT_ORACLE_FIRST_SEED", "0"))
NUM_SEEDS = int(os.environ.get("KVDEPOT_ORACLE_SEEDS", "600"))
LAST_SEED = FIRST_SEED + NUM_SEEDS
CHUNKS = [
    range(first, min(first + SEEDS_PER_TEST, LAST_SEED))
    for first in range(FIRST_SEED, LAST_SEED, SEEDS_PER_TEST)
]


@pytest.mark.parametrize("seeds", CHUNKS, ids=lambda seeds: f"{seeds.start}-{seeds.stop - 1}")
def test_random_sequences_agree(oracle: Oracle, seeds: range) -> None:
    ours = Local(KvcoreBackend)
    for seed in seeds:
        report, num_agreed = compare(ours, oracle, make_sequence(seed, NUM_OPS))
        if report is not None:
            pytest.fail(report, pytrace=False)
        assert num_agreed == NUM_OPS, f"seed {seed} draws too little that applies"
