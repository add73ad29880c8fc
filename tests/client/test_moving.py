"""Two real servers: what one has, the other imports and gives out, whatever the path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from random import Random

import pytest

from conftest import Serve, ServerProcess
from kvclient import Client
from kvclient.events import BlockStored
from kvclient.imports import ImportStatus, TransferPath
from kvclient.values import SlotRequest
from patience import until

NUM_TOKENS = 4 * 40 + 1


@pytest.fixture(scope="module")
def peers(serve: Serve) -> tuple[ServerProcess, ServerProcess]:
    """A server whose blocks hold random bytes under 40 hashes, and one in the other layout."""
    options = {"nixl_devices": "lo"}
    source, destination = serve(layout="block", **options), serve(layout="layer", **options)
    with source.client() as client, client.open_session() as session:
        pool = client.describe_pool()
        with Path(pool.mapping_path).open("r+b") as file:
            file.write(Random(1).randbytes(pool.mappings[0].nbytes))
        session.get_computed_blocks("r", list(range(NUM_TOKENS)))
        session.allocate_slots(SlotRequest("r", num_new_tokens=NUM_TOKENS))
        session.cache_blocks("r", NUM_TOKENS)
        session.free("r")
        until(lambda: offers_nixl(client))
    return source, destination


def offers_nixl(client: Client) -> bool:
    """Its agent is made once the server serves."""
    opened = client.open_transfer({0: []})
    client.close_transfer(opened.transfer_id)
    return bool(opened.reach.nixl_agent) or importlib.util.find_spec("nixl_cu12") is None


@pytest.mark.parametrize("path", [TransferPath.MAPPING, TransferPath.NIXL, TransferPath.GRPC])
@pytest.mark.parametrize("checksums", [False, True])
def test_an_import_brings_the_bytes(
    peers: tuple[ServerProcess, ServerProcess], path: TransferPath, checksums: bool
) -> None:
    if path is TransferPath.NIXL and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NIXL is not installed")
    source, destination = peers
    with source.client() as theirs, destination.client() as ours:
        hashes: list[bytes] = []
        with theirs.stream_events(snapshot=True) as batches:
            for event in next(batches).events:
                assert isinstance(event, BlockStored)
                hashes += event.block_hashes
        assert len(hashes) == 40
        running = ours.import_blocks(hashes, source.target, paths=[path], checksums=checksums)
        list(running)
        result = running.result()
        assert result.failures == ()
        assert result.statuses == {0: (ImportStatus.IMPORTED,) * 40}
        assert result.path is path
        expected = [block.data for block in theirs.pull_blocks(hashes, checksums=True)]
        assert [block.data for block in ours.pull_blocks(hashes, checksums=True)] == expected
        assert len(set(expected)) == 40
        assert ours.audit().violations == () and theirs.audit().violations == ()
        with ours.open_session() as session:
            hit = session.get_computed_blocks("r", list(range(NUM_TOKENS)))
            assert hit.num_computed_tokens == NUM_TOKENS - 1
            session.free("r")
            session.reset_prefix_cache()
