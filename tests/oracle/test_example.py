"""The published worked example, in the form that the null block and front insertion give it."""

from __future__ import annotations

from typing import Any

import pytest

from families import full, group, plain_config
from harness import Local, Oracle, run_both
from ours import KvcoreBackend
from sequence import Operation

pytestmark = pytest.mark.oracle

CONFIG = plain_config(group(full(4)), num_blocks=11, max_model_len=64)
ALL = 64
STORY: list[tuple[str, Operation, Any]] = [
    ("request 0 has 15 tokens", {"op": "add", "who": "r0", "tokens": [[0, 15]]}, 15),
    (
        "four blocks, the last not full",
        {"op": "admit", "who": "r0", "chunk": ALL},
        [0, [[]], 0, 0, 15, [[1, 2, 3, 4]]],
    ),
    ("a token is sampled", {"op": "output", "who": "r0", "accepted": 0, "variant": 0}, 1),
    ("and fills block 4", {"op": "grow", "who": "r0", "chunk": ALL}, [1, [[]]]),
    ("another is sampled", {"op": "output", "who": "r0", "accepted": 0, "variant": 0}, 1),
    ("and begins block 5", {"op": "grow", "who": "r0", "chunk": ALL}, [1, [[5]]]),
    ("request 1 shares 10", {"op": "add", "who": "r1", "tokens": [[0, 10], [100, 4]]}, 14),
    (
        "of which two full blocks are hits",
        {"op": "admit", "who": "r1", "chunk": ALL},
        [8, [[1, 2]], 0, 0, 6, [[6, 7]]],
    ),
    ("request 0 ends", {"op": "finish", "who": "r0"}, None),
    ("request 1 ends", {"op": "finish", "who": "r1"}, None),
    ("request 2 shares 12", {"op": "add", "who": "r2", "tokens": [[0, 12], [200, 17]]}, 29),
    (
        "hits three blocks and evicts none of the cached",
        {"op": "admit", "who": "r2", "chunk": ALL},
        [12, [[1, 2, 3]], 0, 0, 17, [[7, 5, 8, 9, 10]]],
    ),
]
QUEUE_AFTER = {
    8: [5, 8, 9, 10, 4, 3],
    9: [7, 5, 8, 9, 10, 4, 3, 6, 2, 1],
    11: [4, 6],
}


def test_worked_example(oracle: Oracle) -> None:
    ours, theirs = run_both(
        Local(KvcoreBackend), oracle, CONFIG, [operation for _, operation, _ in STORY], full=True
    )
    assert ours == theirs
    for number, (what, _, result) in enumerate(STORY):
        assert ours[number]["result"] == result, what
        if number in QUEUE_AFTER:
            assert ours[number]["queue"] == QUEUE_AFTER[number], what
