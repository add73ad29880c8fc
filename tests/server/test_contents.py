"""What is known of a block besides its bytes, to peers and from them."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.content_run import ContentRun
from kvcore.errors import ResourceExhausted
from kvcore.transfer import BlockStatus, TransferGroup
from kvdepot.v1 import event_pb2
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.contents import add_contents, chosen, content_message, content_run, misfit

HASH, PARENT = b"h" * 32, b"p" * 32
HASHES = [bytes([number]) * 32 for number in range(6)]
IMAGE = ("image", -3)


def sent(run: ContentRun) -> pb.ContentRun:
    """The message, as it arrives."""
    return pb.ContentRun.FromString(content_message(run).SerializeToString())


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(ContentRun(1, None, b"tttt"), id="the start of a chain"),
        pytest.param(ContentRun(2, PARENT, b"ttttuuuu"), id="a parent"),
        pytest.param(ContentRun(1, b"", b"tttt"), id="an empty parent, which is no start"),
        pytest.param(ContentRun(3, None, b""), id="nothing is known"),
        pytest.param(
            ContentRun(1, PARENT, b"t" * 4, lora_id=0, lora_name="A", cache_salt="s"), id="names"
        ),
        pytest.param(
            ContentRun(
                6,
                None,
                b"t" * 24,
                [("A", "s"), ("A",), ("A",), None, ("A", IMAGE, b"digest"), None],
            ),
            id="extra keys",
        ),
    ],
)
def test_a_run_arrives_as_it_was_sent(run: ContentRun) -> None:
    assert content_run(sent(run)) == run


def test_equal_extra_keys_are_told_once() -> None:
    message = sent(ContentRun(6, None, b"t" * 24, [None, ("A",), ("A",), ("A",), ("B",), None]))
    ranges = [(keys.first, keys.num_blocks) for keys in message.extra_keys]
    assert ranges == [(1, 3), (4, 1)]


@pytest.mark.parametrize(
    ("is_chosen", "expected"),
    [
        pytest.param(
            [1, 1, 1, 1, 1, 1], [(2, b"p", b"aabb", 0), (4, None, b"ccddeeff", 2)], id="all"
        ),
        pytest.param([0] * 6, [], id="none"),
        pytest.param(
            [0, 1, 1, 1, 0, 1],
            [(1, HASHES[0], b"bb", 0), (2, None, b"ccdd", 1), (1, HASHES[4], b"ff", 1)],
            id="some",
        ),
    ],
)
def test_a_part_of_the_blocks(is_chosen: list[int], expected: list[Any]) -> None:
    runs = [
        sent(ContentRun(2, b"p", b"aabb")),
        sent(ContentRun(4, None, b"ccddeeff", [None, ("A",), None, ("B",)])),
    ]
    found = chosen(runs, HASHES, [bool(each) for each in is_chosen])
    assert [
        (
            run.num_blocks,
            run.parent_hash if run.HasField("parent_hash") else None,
            run.token_ids,
            len(run.extra_keys),
        )
        for run in found
    ] == expected
    assert misfit(found, sum(is_chosen), 2) == ""


def keys(first: int, num_blocks: int) -> pb.ExtraKeyRange:
    return pb.ExtraKeyRange(
        first=first,
        num_blocks=num_blocks,
        keys=event_pb2.ExtraKeyList(keys=[event_pb2.ExtraKey(text="A")]),
    )


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        pytest.param([{"num_blocks": 2}], "contents are of 2 blocks, 3 are ready", id="too few"),
        pytest.param([{"num_blocks": 4}], "contents are of 4 blocks, 3 are ready", id="too many"),
        pytest.param([{"num_blocks": 3}, {}], "contents are of 3 blocks", id="an empty run"),
        pytest.param(
            [{"num_blocks": 2**32 - 1}, {"num_blocks": 4}], "contents are of", id="far too many"
        ),
        pytest.param(
            [{"num_blocks": 3, "token_ids": b"t" * 11}], "contents.token_ids are 11", id="tokens"
        ),
        pytest.param(
            [{"num_blocks": 3, "extra_keys": [keys(1, 1), keys(1, 1)]}],
            "contents.extra_keys do not ascend",
            id="keys of a block twice",
        ),
        pytest.param(
            [{"num_blocks": 3, "extra_keys": [keys(1, 0)]}],
            "contents.extra_keys do not ascend",
            id="keys of no block",
        ),
        pytest.param(
            [{"num_blocks": 3, "extra_keys": [keys(2, 2)]}],
            "contents.extra_keys are of more blocks",
            id="keys of another run's",
        ),
        pytest.param([{"num_blocks": 3, "token_ids": b"t" * 12}], "", id="good"),
        pytest.param([{"num_blocks": 3, "extra_keys": [keys(0, 3)]}], "", id="good keys"),
    ],
)
def test_what_a_peer_cannot_mean(runs: list[dict[str, Any]], told: str) -> None:
    why = misfit([pb.ContentRun(**run) for run in runs], 3, 4)
    assert why.startswith(told) and bool(why) == bool(told)


@pytest.mark.parametrize("max_bytes", [-1, 0, 4999, 5100])
def test_hashes_that_are_missing_take_little_room(max_bytes: int) -> None:
    """They have no contents, but a status and an id, and are counted to the last."""
    statuses = bytes([BlockStatus.MISSING]) * 1000
    missing = TransferGroup(0, [HASH] * 1000, statuses, [None] * 1000)
    answer = pb.GroupBlocks(statuses=statuses, block_ids=bytes(4000))

    class NoContents:
        extras, partial = (), type("Partial", (), {"content": None})

    pool: Any = NoContents()
    if max_bytes < 5000:
        with pytest.raises(ResourceExhausted) as caught:
            add_contents(answer, pool, missing, max_bytes=max_bytes)
        assert caught.value.reason == "CONTENTS_TOO_LARGE"
    else:
        assert add_contents(answer, pool, missing, max_bytes=max_bytes) == answer.ByteSize()
