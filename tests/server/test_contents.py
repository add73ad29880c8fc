"""What is known of a block besides its bytes, to peers and from them."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore.errors import ResourceExhausted
from kvcore.transfer import BlockStatus, TransferGroup
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.contents import add_contents, imported_content

HASH, PARENT = b"h" * 32, b"p" * 32


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"parent_block_hash": PARENT}, PARENT, id="a parent"),
        pytest.param({"parent_block_hash": b""}, b"", id="an empty one, which is no start"),
    ],
)
def test_a_peer_tells_the_parent(told: dict[str, bytes], expected: bytes | None) -> None:
    message = pb.BlockContent()
    message.stored.MergeFrom(type(message.stored)(block_hashes=[HASH], token_ids=b"t", **told))
    content = imported_content(pb.BlockContent.FromString(message.SerializeToString()), HASH)
    assert content is not None
    assert (content.parent_hash, content.tokens) == (expected, b"t")


@pytest.mark.parametrize("max_bytes", [-1, 0, 4999, 5100])
def test_hashes_that_are_missing_take_little_room(max_bytes: int) -> None:
    """They have no contents, but a status and an id, and are counted to the last."""
    statuses = bytes([BlockStatus.MISSING]) * 1000
    missing = TransferGroup(0, [HASH] * 1000, statuses, [None] * 1000)
    answer = pb.GroupBlocks(statuses=statuses, block_ids=bytes(4000))
    pool: Any = None  # it knows of none of them
    if max_bytes < 5000:
        with pytest.raises(ResourceExhausted) as caught:
            add_contents(answer, pool, missing, max_bytes=max_bytes)
        assert caught.value.reason == "CONTENTS_TOO_LARGE"
    else:
        assert add_contents(answer, pool, missing, max_bytes=max_bytes) == answer.ByteSize()
