"""One of two servers dies, or resets, while bytes go from one to the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvclient import Client
from kvclient.errors import KVDepotError
from kvclient.events import BlockStored
from kvclient.imports import ImportResult, ImportStatus, TransferPath
from kvclient.values import Outcome, SlotRequest
from processes import SLACK_SECONDS, Processes, ServerProcess, wait_for

NUM_BLOCKS = 300
POOL: dict[str, Any] = {"model": "qwen2-0.5b", "block_size": 16, "num_blocks": NUM_BLOCKS + 101}
# An import of the 59 MB takes many seconds.
SLOW = {"import_bandwidth_bytes": 4 << 20}
# A machine that stands still for two seconds ends none.
LEASE_SECONDS = 4.0
TOKENS = range(16 * NUM_BLOCKS)

pytestmark = pytest.mark.timeout(600)


def filled(processes: Processes) -> tuple[ServerProcess, list[bytes]]:
    """A server that caches blocks, and their hashes."""
    server = processes.serve(**POOL, transfer_ttl_seconds=LEASE_SECONDS)
    with Client(server.target) as client, client.open_session("prefill") as session:
        session.get_computed_blocks("a", TOKENS)
        slots = session.allocate_slots(SlotRequest("a", num_new_tokens=len(TOKENS)))
        assert slots.outcome is Outcome.OK
        session.cache_blocks("a", len(TOKENS))
        session.free("a")
        hashes: list[bytes] = []
        with client.stream_events(snapshot=True) as batches:
            for batch in batches:
                for event in batch.events:
                    assert isinstance(event, BlockStored)
                    hashes += event.block_hashes
                if batch.snapshot_end:
                    return server, hashes
    raise AssertionError("the snapshot did not end")


def in_thread(work: Callable[[], ImportResult]) -> Callable[[], ImportResult | KVDepotError]:
    """Begin ``work``; what it answers waits for its end, and gives its result or error."""
    ended: list[ImportResult | KVDepotError] = []

    def run() -> None:
        try:
            ended.append(work())
        except KVDepotError as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def outcome() -> ImportResult | KVDepotError:
        thread.join(60.0)
        return ended[0]

    return outcome


def assert_nothing_is_kept(client: Client) -> None:
    """No block is kept for a transfer or an import, and the books are right."""
    stats = client.stats()
    assert (stats.num_transfers, stats.num_imports) == (0, 0)
    assert (stats.blocks.pinned, stats.blocks.in_transfer) == (0, 0)
    assert client.audit().violations == ()


@pytest.mark.parametrize(
    "path", [pytest.param(TransferPath.MAPPING, marks=pytest.mark.slow), TransferPath.GRPC]
)
def test_the_source_is_killed(processes: Processes, path: TransferPath) -> None:
    source, hashes = filled(processes)
    here = processes.serve(**POOL, **SLOW)
    with Client(here.target) as client:
        running = client.import_blocks(hashes, source.target, paths=[path])
        outcome = in_thread(running.result)
        wait_for(lambda: any(info.num_blocks_done for info in client.list_transfers()))
        assert client.stats().blocks.in_transfer == NUM_BLOCKS
        source.kill()
        result = outcome()
        # Nobody vouches for what had come: none of it is a hit.
        assert isinstance(result, ImportResult), result
        assert ImportStatus.IMPORTED not in result.statuses[0]
        assert client.stats().blocks.cached == 0
        assert_nothing_is_kept(client)


@pytest.mark.slow
def test_the_source_resets_by_force(processes: Processes) -> None:
    source, hashes = filled(processes)
    here = processes.serve(**POOL, **SLOW)
    with Client(here.target) as client, Client(source.target) as other:
        outcome = in_thread(client.import_blocks(hashes, source.target).result)
        wait_for(lambda: any(info.num_blocks_done for info in client.list_transfers()))
        with other.open_session("update") as session:
            session.reset_prefix_cache("force")
        assert other.stats().blocks.pinned == NUM_BLOCKS
        result = outcome()
        assert isinstance(result, ImportResult), result
        assert ImportStatus.IMPORTED not in result.statuses[0]
        reasons = " ".join(failure.reason for failure in result.failures)
        # By then the lease that could not be renewed may have run out.
        assert "CONTENT_DROPPED" in reasons or "TRANSFER_EXPIRED" in reasons
        for one in (client, other):
            assert_nothing_is_kept(one)
            assert one.stats().blocks.cached == 0


def test_the_importer_is_killed(processes: Processes) -> None:
    source, hashes = filled(processes)
    here = processes.serve(**POOL, **SLOW)
    with Client(source.target) as client:
        with Client(here.target) as importer:
            in_thread(importer.import_blocks(hashes, source.target).result)
            wait_for(lambda: client.stats().blocks.pinned == NUM_BLOCKS)
            # Renewed for as long as the other side lives.
            wait_for(lambda: client.list_transfers()[0].age_seconds > 1.5 * LEASE_SECONDS)
            here.kill()
        seconds = wait_for(lambda: client.stats().blocks.pinned == 0)
        assert seconds < LEASE_SECONDS + SLACK_SECONDS
        assert client.stats().blocks.cached == NUM_BLOCKS
        assert_nothing_is_kept(client)


def test_the_scheduler_leaves_in_the_middle(processes: Processes) -> None:
    source, _ = filled(processes)
    here = processes.serve(**POOL, **SLOW)
    with Client(here.target) as client:
        with Client(here.target) as decode:
            session = decode.open_session("decode", lease_ttl_s=LEASE_SECONDS)
            session.get_computed_blocks("a", TOKENS)
            session.allocate_slots(
                SlotRequest(
                    "a",
                    num_new_tokens=0,
                    num_external_computed_tokens=len(TOKENS),
                    delay_cache_blocks=True,
                )
            )
            in_thread(session.import_blocks("a", source.target).result)
            wait_for(lambda: any(info.num_blocks_done for info in client.list_transfers()))
            assert client.stats().blocks.live == NUM_BLOCKS
        # Its connection goes, and with its lease the session and the request.
        wait_for(lambda: client.stats().num_sessions == 0)
        wait_for(lambda: client.stats().num_imports == 0)
        assert_nothing_is_kept(client)
        assert client.stats().blocks.free == POOL["num_blocks"] - 1
    with Client(source.target) as client:
        wait_for(lambda: client.stats().num_transfers == 0)
        assert_nothing_is_kept(client)
