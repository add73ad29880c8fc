"""Where kvcore decides otherwise than vLLM 0.25.1 on purpose: what each of them does."""

from __future__ import annotations

from typing import Any

import pytest

from families import full, group, mamba, plain_config, sliding
from harness import Local, Oracle, run_both
from ours import KvcoreBackend
from sequence import Operation

pytestmark = pytest.mark.oracle

ALL = 64


def _run(
    oracle: Oracle, config: dict[str, Any], ops: list[Operation]
) -> tuple[list[Any], list[Any]]:
    return run_both(Local(KvcoreBackend), oracle, config, ops, full=True)


def test_every_full_attention_group_is_cut_to_the_hit(oracle: Oracle) -> None:
    """vLLM cuts the first one; a second one's table begins with blocks that are no part of the
    hit, and that the request writes to while others read them.
    """
    config = plain_config(
        group(full(4), full(4, "TQFullAttentionSpec", tq_slot_size=24), sliding(4, 4))
    )
    ops: list[Operation] = [
        {"op": "add", "who": "r0", "tokens": [[0, 12]]},
        {"op": "admit", "who": "r0", "chunk": ALL},
        {"op": "evict", "blocks": [8, 9]},  # of the window, all but the first
        {"op": "add", "who": "r1", "tokens": [[0, 12], [50, 4]]},
        {"op": "lookup", "who": "r1"},
    ]
    ours, theirs = _run(oracle, config, ops)
    assert ours[:-1] == theirs[:-1]
    assert ours[1]["result"][-1] == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert ours[-1]["result"] == [4, [[1], [4], [7]], 8]
    assert theirs[-1]["result"] == [4, [[1], [4, 5, 6], [7]], 8]


def test_states_look_no_block_ahead_for_a_draft_model(oracle: Oracle) -> None:
    """With EAGLE, vLLM lets a Mamba group match one block more without dropping it again: the
    hit is of 12 tokens then, of which full attention has 8, and the rest is never computed.
    """
    config = plain_config(group(full(4), mamba(4, "align")), use_eagle=True)
    ops: list[Operation] = [
        {"op": "add", "who": "r0", "tokens": [[0, 17]]},
        {"op": "admit", "who": "r0", "chunk": 16},
        {"op": "new_step"},
        {"op": "add", "who": "r1", "tokens": [[0, 17], [50, 4]]},
        {"op": "lookup", "who": "r1"},
    ]
    ours, theirs = _run(oracle, config, ops)
    assert ours[:-1] == theirs[:-1]
    assert theirs[-1]["result"][:2] == [12, [[1, 2], [0, 0, 4]]]
    assert ours[-1]["result"][:2] == [0, [[], []]]


def test_external_state_that_does_not_fit_is_refused(oracle: Oracle) -> None:
    """Mamba in align mode: vLLM does not count the block of a state that is brought from
    elsewhere. It admits the request, and raises in the middle of the allocation.
    """
    ops: list[Operation] = [
        {"op": "add", "who": "r0", "tokens": [[0, 8]]},
        {"op": "admit", "who": "r0", "chunk": ALL, "external": 4, "scarce": True},
    ]
    for num_blocks in (4, 5):
        config = plain_config(group(full(4), mamba(4, "align")), num_blocks=num_blocks)
        ours, theirs = _run(oracle, config, ops)
        if num_blocks == 4:
            assert ours[-1]["result"] == [0, [[], []], 0, 4, 4, None]
            assert ours[-1]["queue"] == [1, 2, 3]
            assert theirs[-1] == {"raised": "ValueError: Cannot get 1 free blocks from the pool"}
        else:
            assert ours == theirs
            assert ours[-1]["queue"] == []
