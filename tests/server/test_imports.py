"""ImportBlocks over the wire, between two servers of this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvcore.imports
from block_pages import block_pages
from fake_data_plane import write_pages
from kvcore.errors import KVDepotError, NotFound
from kvcore.import_job import ImportResult, Ready
from kvcore.reset import ResetMode
from kvcore.transfer import GroupHashes
from kvdepot.v1 import admin_pb2, cache_pb2, transfer_pb2
from serving import (
    BLOCK_BYTES,
    TIMEOUT_SECONDS,
    Scheduler,
    Serve,
    Served,
    eventually,
    ready_hashes,
    refused,
    tokens,
)

PROMPT = tokens(*range(1, 14))
PEER = "peer:1"
IMPORTED, PRESENT, MISSING, FAILED, NO_FIT, NOT_ATTEMPTED = (
    transfer_pb2.IMPORT_STATUS_IMPORTED,
    transfer_pb2.IMPORT_STATUS_PRESENT,
    transfer_pb2.IMPORT_STATUS_MISSING,
    transfer_pb2.IMPORT_STATUS_FAILED,
    transfer_pb2.IMPORT_STATUS_NO_FIT,
    transfer_pb2.IMPORT_STATUS_NOT_ATTEMPTED,
)


class Pair:
    """A server with three blocks of a prompt, and one that has none yet."""

    def __init__(self, serve: Serve, **options: Any) -> None:
        self.source = serve()
        self.here = serve(**options)
        scheduler = self.source.open()
        scheduler.admit("a", PROMPT)
        memory = self.source.data_plane.memory
        self.pages = [bytes([block_id]) * BLOCK_BYTES for block_id in range(4)]
        for block_id in (1, 2, 3):
            write_pages(memory, block_id, 0, self.pages[block_id])
        scheduler.cache("a", 13)
        self.hashes = ready_hashes(self.source)
        self.here.data_plane.peers[PEER] = self.source.server

    def call(self, hashes: list[bytes] | None = None, **request: Any) -> Any:
        """The stream of ImportBlocks."""
        groups = None
        if "request" not in request:
            wanted = self.hashes if hashes is None else hashes
            groups = [transfer_pb2.GroupHashes(block_hashes=wanted)]
        fields = {"peer": PEER, "groups": groups} | request
        return self.here.transfer.ImportBlocks(
            transfer_pb2.ImportBlocksRequest(**fields), timeout=TIMEOUT_SECONDS
        )

    def run(self, hashes: list[bytes] | None = None, **request: Any) -> Any:
        """The last message."""
        *others, last = list(self.call(hashes, **request))
        assert last.done
        assert not any(message.done for message in others)
        assert last.epoch == self.here.server.node.depot.epoch
        return last

    def page(self, block_id: int) -> bytes:
        """What lies in a block here."""
        return block_pages(self.here.data_plane.memory, block_id)

    def states(self) -> dict[str, int]:
        """Blocks by state, here."""
        self.here.assert_clean()
        states = self.here.stats().blocks
        return {field.name: value for field, value in states.ListFields()}

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it holds, on the event loop."""
        eventually(lambda: self.here.loop.call(condition))

    def delayed(self, scheduler: Scheduler, name: str, new: bytes, external: int) -> Any:
        """Slots for external tokens; names the request."""
        slots = scheduler.allocate(
            name,
            content=cache_pb2.RequestContent(tokens=new),
            num_new_tokens=0,
            num_external_computed_tokens=external,
            delay_cache_blocks=True,
        )
        assert slots.outcome == cache_pb2.OUTCOME_OK
        return transfer_pb2.SessionRequest(session_id=scheduler.opened.session_id, request_id=name)


@pytest.fixture
def pair(serve: Serve) -> Pair:
    return Pair(serve)


def test_hashes_become_hits_with_their_bytes_and_are_told(pair: Pair) -> None:
    last = pair.run(checksums=True)
    assert [list(group.statuses) for group in last.groups] == [[IMPORTED] * 3]
    assert (last.num_blocks, last.num_bytes) == (3, 3 * BLOCK_BYTES)
    assert last.path == transfer_pb2.TRANSFER_PATH_GRPC
    assert ready_hashes(pair.here) == pair.hashes
    hit = pair.here.open().lookup("b", PROMPT)
    assert hit.num_computed_tokens == 12
    assert [pair.page(block_id) for block_id in hit.blocks[0].ids] == pair.pages[1:]
    (job,) = pair.here.data_plane.jobs
    assert job.fingerprint == pair.source.server.node.pool.fingerprint
    assert job.checksums and job.contents and job.deadline_seconds == 300.0
    assert pair.states() == {"cached": 3, "free": 29}

    again = pair.run()
    assert list(again.groups[0].statuses) == [PRESENT] * 3
    assert len(pair.here.data_plane.jobs) == 1


def test_a_block_that_the_peer_lost_ends_the_chain(pair: Pair) -> None:
    pair.source.admin.EvictBlocks(admin_pb2.EvictBlocksRequest(block_ids=[2]))
    last = pair.run()
    assert list(last.groups[0].statuses) == [IMPORTED, MISSING, NOT_ATTEMPTED]
    assert ready_hashes(pair.here) == pair.hashes[:1]
    assert pair.states() == {"cached": 1, "free": 31}


def test_for_a_request_the_answer_is_what_cache_blocks_may_confirm(pair: Pair) -> None:
    scheduler = pair.here.open()
    named = pair.delayed(scheduler, "b", PROMPT, 13)
    last = pair.run(request=named)
    assert last.num_tokens == 12
    assert list(last.groups[0].statuses) == [IMPORTED] * 3
    assert not pair.here.data_plane.jobs[0].contents
    assert ready_hashes(pair.here) == []  # nothing is published
    scheduler.cache("b", last.num_tokens)
    assert ready_hashes(pair.here) == pair.hashes
    assert [pair.page(block_id) for block_id in (1, 2, 3)] == pair.pages[1:]
    assert pair.states() == {"live": 4, "free": 28}


@pytest.mark.parametrize("how", ["request freed", "session closed", "session expired"])
def test_abort_midway(pair: Pair, how: str) -> None:
    here = pair.here
    here.data_plane.mode = "hang"
    scheduler = here.open()
    named = pair.delayed(scheduler, "b", PROMPT, 12)
    stream = pair.call(request=named)
    assert next(stream).num_blocks == 3
    node = here.server.node
    if how == "request freed":
        scheduler.free("b")
    elif how == "session closed":
        scheduler.close()
    else:
        session = node.depot.sessions[scheduler.opened.session_id]
        here.loop.call(lambda: node._expire(session, 1.0))
    # Bytes may still land there: they are nobody's, whoever asks.
    assert pair.states() == {"in_transfer": 3, "free": 29}
    other = here.open()
    large = other.allocate("large", content=cache_pb2.RequestContent(tokens=tokens(*range(120))))
    assert large.outcome == cache_pb2.OUTCOME_NO_FIT
    # No session holds them, so the refusal says who does.
    assert (large.no_fit.in_transfer_blocks, large.no_fit.pinned_blocks) == (3, 0)
    assert list(large.no_fit.holders) == []
    here.loop.call(lambda: here.data_plane.settled.clear())
    stream.cancel()
    assert pair.states() == {"in_transfer": 3, "free": 29}
    here.loop.call(lambda: here.data_plane.settled.set())
    pair.wait(lambda: len(node.imports) == 0)
    assert pair.states() == {"free": 32}
    assert here.data_plane.num_ended == 1


def test_cancelled_while_the_copy_cannot_be_ended(pair: Pair) -> None:
    here = pair.here
    here.data_plane.mode = "hang"
    stream = pair.call()
    next(stream)
    here.loop.call(lambda: here.data_plane.settled.clear())
    stream.cancel()
    pair.wait(lambda: here.data_plane.num_ending == 1)
    assert pair.states() == {"in_transfer": 3, "free": 29}
    assert here.stats().num_imports == 1
    here.loop.call(lambda: here.data_plane.settled.set())
    pair.wait(lambda: len(here.server.node.imports) == 0)
    assert pair.states() == {"free": 32}
    assert here.server.node.imports.outcomes == {"cancelled": 1}
    here.data_plane.mode = "copy"
    assert list(pair.run().groups[0].statuses) == [IMPORTED] * 3


def test_cancelled_before_its_first_step(pair: Pair) -> None:
    here, node = pair.here, pair.here.server.node

    def begin_and_stop() -> None:
        found = node.depot.imports.begin_hashes(PEER, [GroupHashes(0, pair.hashes)])
        node.imports.start(found, paths=(), checksums=False, deadline_seconds=1.0).stop()

    here.loop.call(begin_and_stop)
    pair.wait(lambda: len(node.imports) == 0)
    assert pair.states() == {"free": 32}
    assert here.data_plane.jobs == []


@pytest.mark.parametrize(
    ("mode", "code", "reason"),
    [
        pytest.param("refuse", grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", id="no peer"),
        pytest.param("die", grpc.StatusCode.INTERNAL, "INTERNAL", id="the process dies"),
    ],
)
def test_what_fails_leaves_nothing(
    pair: Pair, mode: str, code: grpc.StatusCode, reason: str
) -> None:
    pair.here.data_plane.mode = mode
    assert refused(lambda: list(pair.call()), code).reason == reason
    assert pair.states() == {"free": 32}
    assert pair.here.server.node.imports.outcomes == {"refused": 1}


def test_a_peer_that_does_not_vouch_for_its_bytes(pair: Pair, monkeypatch: Any) -> None:
    # The source's lease runs out before the close, at which all is in doubt.
    transfers = pair.source.server.node.depot.transfers

    def expired(transfer_id: str) -> None:
        transfers.end(transfer_id)
        raise NotFound("over", reason="TRANSFER_EXPIRED")

    monkeypatch.setattr(transfers, "close", expired)
    last = pair.run()
    assert list(last.groups[0].statuses) == [FAILED] * 3
    assert [failure.reason for failure in last.failures] == ["TRANSFER_EXPIRED"]
    assert pair.states() == {"free": 32}
    imports = pair.here.server.node.imports
    assert imports.failures == {("grpc", "transfer_expired"): 1}
    assert imports.outcomes == {"nothing": 1}


def test_a_reset_meanwhile_registers_nothing(pair: Pair) -> None:
    here = pair.here
    here.data_plane.mode = "chatter"
    stream = pair.call()
    next(stream)
    scheduler = here.open()
    here.cache.ResetPrefixCache(
        cache_pb2.ResetPrefixCacheRequest(
            context=scheduler.context(), mode=cache_pb2.RESET_MODE_FORCE
        )
    )
    here.data_plane.mode = "copy"
    *_, last = list(stream)
    assert list(last.groups[0].statuses) == [FAILED] * 3
    assert pair.states() == {"free": 32}


def test_a_part_that_has_come_is_a_hit_and_stays_one(pair: Pair) -> None:
    here = pair.here
    here.data_plane.mode, here.data_plane.first_part = "hang", 2
    stream = pair.call()
    next(stream)
    pair.wait(lambda: here.server.node.depot.pool.pins.filling == {3})
    assert pair.states() == {"pinned": 2, "in_transfer": 1, "free": 29}
    assert ready_hashes(here) == pair.hashes[:2]
    assert here.open().lookup("b", PROMPT).num_computed_tokens == 8
    stream.cancel()
    pair.wait(lambda: len(here.server.node.imports) == 0)
    assert pair.states() == {"cached": 2, "free": 30}
    # The rest comes with the next one, behind them.
    here.data_plane.mode = "copy"
    last = pair.run()
    assert list(last.groups[0].statuses) == [PRESENT, PRESENT, IMPORTED]
    assert [pair.page(block_id) for block_id in (1, 2)] == pair.pages[1:3]


def test_a_reset_ends_an_import_at_once(pair: Pair) -> None:
    here = pair.here
    here.data_plane.mode, here.data_plane.first_part = "hang", 2
    stream = pair.call()
    next(stream)
    pair.wait(lambda: here.server.node.depot.pool.pins.filling == {3})
    here.cache.ResetPrefixCache(
        cache_pb2.ResetPrefixCacheRequest(
            context=here.open().context(), mode=cache_pb2.RESET_MODE_FORCE
        )
    )
    *_, last = list(stream)  # nobody else ends it
    assert list(last.groups[0].statuses) == [FAILED] * 3
    (failure,) = last.failures
    assert failure.reason.startswith("RESET: ")
    assert pair.states() == {"free": 32}
    assert here.server.node.imports.outcomes == {"cancelled": 1}


def test_a_reset_leaves_an_import_for_a_request_alone(pair: Pair) -> None:
    """Its blocks are the request's, which registers none of them."""
    here = pair.here
    here.data_plane.mode = "chatter"
    scheduler = here.open()
    stream = pair.call(request=pair.delayed(scheduler, "b", PROMPT, 12))
    next(stream)
    here.cache.ResetPrefixCache(
        cache_pb2.ResetPrefixCacheRequest(
            context=scheduler.context(), mode=cache_pb2.RESET_MODE_FORCE
        )
    )
    here.data_plane.mode = "copy"
    *_, last = list(stream)
    assert last.num_tokens == 12


def test_what_does_not_fit_is_said(serve: Serve) -> None:
    pair = Pair(serve, num_blocks=3)
    last = pair.run()
    assert list(last.groups[0].statuses) == [IMPORTED, IMPORTED, NO_FIT]
    assert ready_hashes(pair.here) == pair.hashes[:2]


def test_an_import_does_not_wait_for_a_client_that_reads_nothing(pair: Pair) -> None:
    here = pair.here
    here.data_plane.mode = "chatter"
    stream = pair.call()
    next(stream)
    time.sleep(0.2)
    here.data_plane.mode = "copy"
    pair.wait(lambda: len(here.server.node.imports) == 0)
    assert pair.states() == {"cached": 3, "free": 29}
    *_, last = list(stream)
    assert list(last.groups[0].statuses) == [IMPORTED] * 3


def test_an_import_ends_whose_cancellation_was_lost_on_the_way(pair: Pair) -> None:
    pair.here.data_plane.mode = "deaf"
    stream = pair.call()
    next(stream)
    stream.cancel()
    pair.wait(lambda: len(pair.here.server.node.imports) == 0)
    assert pair.states() == {"free": 32}
    assert pair.here.server.node.imports.outcomes == {"cancelled": 1}


def test_imports_are_bounded_and_listed(serve: Serve) -> None:
    pair = Pair(serve, max_imports=1)
    pair.here.data_plane.mode = "hang"
    stream = pair.call(deadline_seconds=100.0)
    next(stream)
    detail = refused(lambda: list(pair.call()), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert detail.reason == "TOO_MANY_IMPORTS" and detail.retryable
    listed = pair.here.admin.ListTransfers(admin_pb2.ListTransfersRequest())
    (info,) = listed.transfers
    assert (info.name, info.direction) == (PEER, admin_pb2.TRANSFER_DIRECTION_IN)
    assert (info.num_blocks, info.num_bytes) == (3, 3 * BLOCK_BYTES)
    assert (info.num_blocks_done, info.num_bytes_done) == (3, 3 * BLOCK_BYTES)
    assert 90.0 < info.lease_remaining_seconds <= 100.0
    stream.cancel()


def test_a_server_that_stops_ends_its_imports(pair: Pair) -> None:
    here = pair.here
    here.data_plane.mode = "hang"
    stream = pair.call()
    next(stream)
    path = Path(here.data_plane.memory.path)
    here.loop.run(here.server.stop())
    assert refused(lambda: list(stream), grpc.StatusCode.UNAVAILABLE).reason == "DRAINING"
    assert here.server.node.depot.audit() == []
    assert here.data_plane.num_ended == 1
    assert not path.exists()


@pytest.mark.parametrize("streams_end", [False, True], ids=["drains", "ends"])
def test_an_import_that_begins_as_the_server_stops(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, streams_end: bool
) -> None:
    """What began before a drain has its grace, and does not begin when that is over."""
    monkeypatch.setattr(kvcore.imports, "_TURN_BLOCKS", 1)
    node = pair.here.server.node
    beginning = node.depot.imports.beginning_hashes(PEER, [GroupHashes(0, pair.hashes)])

    async def act() -> str:
        call = asyncio.ensure_future(node.imports.begin(beginning))
        await asyncio.sleep(0)
        assert node.is_in_use
        node.drain()
        if streams_end:
            node.end_streams()
        try:
            node.depot.imports.finish(await call)
        except KVDepotError as error:
            return error.reason
        return "begun"

    assert pair.here.loop.run(act()) == ("DRAINING" if streams_end else "begun")
    assert not node.is_in_use
    assert pair.states() == {"free": 32}


@pytest.mark.parametrize("reset", [ResetMode.DRAIN, ResetMode.FORCE])
def test_a_reset_while_an_import_begins(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, reset: ResetMode
) -> None:
    """Nothing is taken after it. What was here stays until the import has ended, or is gone."""
    monkeypatch.setattr(kvcore.imports, "_TURN_BLOCKS", 1)
    pair.run(pair.hashes[:1])
    node = pair.here.server.node
    imports = node.depot.imports
    beginning = imports.beginning_hashes(PEER, [GroupHashes(0, pair.hashes)])
    ready = {0: Ready(0, [1, 1])}

    async def act() -> tuple[Any, ImportResult]:
        call = asyncio.ensure_future(node.imports.begin(beginning))
        await asyncio.sleep(0)
        done = node.reset_prefix_cache(reset, None, None).done
        assert done is (reset is ResetMode.FORCE)
        found = await call
        taken = imports.take(found, ready)
        assert imports.is_void(found)
        return taken, imports.finish(found)

    taken, result = pair.here.loop.run(act())
    assert taken == {0: [0, 0]}
    was_here = PRESENT if reset is ResetMode.DRAIN else FAILED
    assert result.statuses == {0: bytes([was_here, FAILED, FAILED])}
    assert node.depot.generation == 1 and node.depot.resets.drain is None
    assert pair.states() == {"free": 32}


@pytest.mark.parametrize(
    ("request_fields", "code", "field"),
    [
        pytest.param({"peer": ""}, grpc.StatusCode.INVALID_ARGUMENT, "peer", id="no peer"),
        pytest.param(
            {"paths": [99]}, grpc.StatusCode.INVALID_ARGUMENT, "paths[0]", id="unknown path"
        ),
        pytest.param(
            {"deadline_seconds": 301.0},
            grpc.StatusCode.INVALID_ARGUMENT,
            "deadline_seconds",
            id="long",
        ),
        pytest.param(
            {"groups": []}, grpc.StatusCode.INVALID_ARGUMENT, "groups", id="nothing named"
        ),
        pytest.param(
            {"request": transfer_pb2.SessionRequest(session_id="?")},
            grpc.StatusCode.NOT_FOUND,
            "request.session_id",
            id="no session",
        ),
    ],
)
def test_refused(
    pair: Pair, request_fields: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    assert refused(lambda: list(pair.call(**request_fields)), code).field == field
    assert pair.states() == {"free": 32}


def test_without_bytes_there_is_nothing_to_import(serve: Serve) -> None:
    served: Served = serve(no_memory=True)
    request = transfer_pb2.ImportBlocksRequest(peer=PEER)
    detail = refused(
        lambda: list(served.transfer.ImportBlocks(request, timeout=TIMEOUT_SECONDS)),
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    assert detail.reason == "NO_MEMORY"
