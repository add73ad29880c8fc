"""What is known of a block besides its bytes, to peers and from them."""

from __future__ import annotations

import pytest

from kvdepot.v1 import transfer_pb2 as pb
from kvserver.contents import imported_content

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
