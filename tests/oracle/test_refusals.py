"""Configurations that vLLM 0.25.1 refuses, or that fail when used, are refused when given.

vLLM raises in its engine's configuration, when the manager is made, or not before the first
lookup; kvcore raises InvalidArgument, naming the field, before there is a pool.
"""

from __future__ import annotations

from typing import Any

import pytest

from families import chunked, full, group, mamba, plain_config, sliding
from harness import Local, Oracle, run_both
from kvcore.errors import InvalidArgument
from ours import KvcoreBackend
from sequence import Operation

pytestmark = pytest.mark.oracle

USE: list[Operation] = [
    {"op": "describe"},
    {"op": "add", "who": "r0", "tokens": [[0, 40]]},
    {"op": "admit", "who": "r0", "chunk": 40},
    {"op": "finish", "who": "r0"},
    {"op": "add", "who": "r1", "tokens": [[0, 40]]},
    {"op": "lookup", "who": "r1"},
]


FULL, WINDOW, STATE = full(4), sliding(4, 8), mamba(4, "all")
CROSS = full(4, "CrossAttentionSpec")

REFUSED = {
    "caching without groups": (plain_config([]), "enable_caching"),
    "caching with cross attention": (plain_config(group(FULL, CROSS)), "enable_caching"),
    "one spec in several groups": (plain_config(group(FULL, FULL)), "groups"),
    "hash size between": (
        plain_config(group(full(4), sliding(6, 8)), hash_block_size=4),
        "hash_block",
    ),
    "hash size too large": (
        plain_config(group(FULL, WINDOW), hash_block_size=8),
        "hash_block_size",
    ),
    "state larger than a block": (plain_config(group(FULL, mamba(8, "all"))), "block_size"),
    "state larger, hash size given": (
        plain_config(group(FULL, mamba(8, "all")), hash_block_size=4),
        "block_size",
    ),
    "chunks beside other sizes": (plain_config(group(chunked(4, 8), full(8))), "block_size"),
    "chunks and a draft model": (
        plain_config(group(chunked(4, 8), FULL), use_eagle=True),
        "use_eagle",
    ),
    "chunks alone and a draft model": (
        plain_config(group(chunked(4, 8)), use_eagle=True),
        "use_eagle",
    ),
    "chunks of a draft model": (plain_config(group(chunked(4, 8), FULL, eagle=True)), "use_eagle"),
    "retention without a window": (plain_config(group(FULL), retention_interval=0), "retention"),
    "retention of chunks": (
        plain_config(group(FULL, chunked(4, 8)), retention_interval=8),
        "retention",
    ),
    "retention below zero": (plain_config(group(FULL, WINDOW), retention_interval=-4), "retention"),
    "retention between boundaries": (
        plain_config(group(FULL, sliding(8, 8)), retention_interval=4),
        "retention",
    ),
    "retention between, without caching": (
        plain_config(group(FULL, WINDOW), retention_interval=5, enable_caching=False),
        "retention",
    ),
    "decode ranks and two groups": (
        plain_config(group(FULL, WINDOW), dcp_world_size=2),
        "dcp_world",
    ),
    "prefill ranks and two groups": (
        plain_config(group(FULL, STATE), pcp_world_size=2),
        "pcp_world",
    ),
    "decode ranks and a window": (plain_config(group(WINDOW), dcp_world_size=2), "dcp_world_size"),
    "prefill ranks and a window": (plain_config(group(WINDOW), pcp_world_size=2), "pcp_world_size"),
    "decode ranks and states": (plain_config(group(STATE), dcp_world_size=2), "dcp_world_size"),
    "decode ranks and chunks": (
        plain_config(group(chunked(4, 8)), dcp_world_size=2),
        "dcp_world_size",
    ),
    "negative watermark": (plain_config(group(FULL), watermark=-0.1), "watermark"),
    "padding too small": (plain_config(group(full(4, page_size_padded=8))), "page_size_padded"),
    "state padded too small": (
        plain_config(group({**STATE, "page_size_padded": 8})),
        "page_size_padded",
    ),
    "no blocks": (plain_config(group(FULL), num_blocks=0), "num_blocks"),
}

STRICTER = {
    "a hash size beside the only group's": (
        plain_config(group(FULL), hash_block_size=2),
        "hash_block_size",
    ),
    "reference window beside full attention in one group": (
        plain_config(
            [
                {
                    "layers": ["a", "b"],
                    "eagle": False,
                    "spec": {
                        "kind": "UniformTypeKVCacheSpecs",
                        "block_size": 4,
                        "kv_cache_specs": {"a": full(4, "RSWASpec", rswa_window=8), "b": FULL},
                    },
                }
            ]
        ),
        "kv_cache_specs",
    ),
}
"""Only kvcore refuses these. vLLM ignores the first's size, and frees what the second's full
attention still looks at.
"""


@pytest.mark.parametrize(("config", "field"), REFUSED.values(), ids=REFUSED)
def test_both_refuse(oracle: Oracle, config: dict[str, Any], field: str) -> None:
    _, theirs = run_both(Local(KvcoreBackend), oracle, config, USE, full=True)
    assert "raised" in theirs[-1], theirs[-1]
    _assert_refused(config, field)


@pytest.mark.parametrize(("config", "field"), STRICTER.values(), ids=STRICTER)
def test_only_kvcore_refuses(oracle: Oracle, config: dict[str, Any], field: str) -> None:
    _, theirs = run_both(Local(KvcoreBackend), oracle, config, USE, full=True)
    assert not any(record is not None and "raised" in record for record in theirs), theirs[-1]
    _assert_refused(config, field)


def _assert_refused(config: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        KvcoreBackend(config)
    assert field in str(refusal.value.field)
