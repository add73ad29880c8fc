"""Transfers over the wire: what is pinned, for how long, and whether what was read counts."""

from __future__ import annotations

import asyncio
import struct
from functools import partial
from typing import Any

import grpc
import pytest

import kvcore.transfer
from fake_data_plane import FakeDataPlane
from kvcore.errors import KVDepotError, NotFound, Unavailable
from kvcore.memory import PoolMemory
from kvcore.transfer import GroupHashes
from kvdepot.v1 import admin_pb2, cache_pb2, transfer_pb2
from manual_clock import ManualClock
from serving import (
    BLOCK_BYTES,
    TIMEOUT_SECONDS,
    Scheduler,
    Serve,
    Served,
    ready_hashes,
    refused,
    tokens,
)

PROMPT = tokens(*range(1, 11))
READY, PENDING, MISSING = (
    transfer_pb2.BLOCK_STATUS_READY,
    transfer_pb2.BLOCK_STATUS_PENDING,
    transfer_pb2.BLOCK_STATUS_MISSING,
)
NOT_FOUND = grpc.StatusCode.NOT_FOUND
FAILED_PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION


def cached(served: Served, new: bytes = PROMPT) -> tuple[Scheduler, list[bytes]]:
    """A session whose request is confirmed and freed; the hashes that are here."""
    scheduler = served.open()
    scheduler.admit("a", new)
    scheduler.cache("a", len(new) // 4)
    scheduler.free("a")
    return scheduler, ready_hashes(served)


def open_transfer(served: Served, hashes: list[bytes] | None = None, **request: Any) -> Any:
    """OpenTransfer, of hashes of the first group unless ``request`` says what."""
    groups = None if hashes is None else [transfer_pb2.GroupHashes(block_hashes=hashes)]
    return served.transfer.OpenTransfer(
        transfer_pb2.OpenTransferRequest(groups=groups, **request), timeout=TIMEOUT_SECONDS
    )


def renew(served: Served, transfer_id: str) -> Any:
    return served.transfer.RenewTransfer(
        transfer_pb2.RenewTransferRequest(transfer_id=transfer_id), timeout=TIMEOUT_SECONDS
    )


def close(served: Served, transfer_id: str) -> Any:
    return served.transfer.CloseTransfer(
        transfer_pb2.CloseTransferRequest(transfer_id=transfer_id), timeout=TIMEOUT_SECONDS
    )


def num_pinned(served: Served) -> int:
    served.assert_clean()
    return int(served.stats().blocks.pinned)


def test_the_pool_is_described(served: Served) -> None:
    described = served.transfer.DescribePool(transfer_pb2.DescribePoolRequest())
    opened = served.open().opened
    assert described.pool == opened.pool
    assert described.epoch == opened.epoch


def test_hashes_are_answered_and_the_ready_ones_pinned(served: Served) -> None:
    scheduler, hashes = cached(served)
    # Registered in a step that has not completed.
    scheduler.admit("b", tokens(*range(50, 60)), step=9, completed_step=8)
    pending = served.server.node.depot.sessions[scheduler.opened.session_id].requests["b"]
    wanted = [hashes[0], b"?" * 32, pending.block_hashes[0], hashes[1]]
    opened = open_transfer(served, wanted, name="peer", contents=True)
    assert opened.epoch == scheduler.opened.epoch
    assert opened.lease_ttl_seconds == 30.0
    (group,) = opened.groups
    assert list(group.statuses) == [READY, MISSING, PENDING, READY]
    assert struct.unpack("<4I", group.block_ids) == (1, 0, 0, 2)
    assert not group.block_hashes
    # The second follows the first, and the start of a chain has no parent.
    assert list(group.contents) == [
        transfer_pb2.ContentRun(num_blocks=2, token_ids=PROMPT[:32], lora_id=None)
    ]
    assert opened.reach == served.data_plane.reach()
    assert served.data_plane.opened == {opened.transfer_id: {0: [1, 0, 0, 2]}}
    assert num_pinned(served) == 2
    assert close(served, opened.transfer_id).epoch == opened.epoch
    assert served.data_plane.opened == {}
    assert num_pinned(served) == 0


def test_checksums_are_computed_once(served: Served) -> None:
    _, hashes = cached(served)
    opened = open_transfer(served, [b"?" * 32, *hashes], checksums=True)
    assert struct.unpack("<2Q", opened.groups[0].checksums) == (0, 0)
    served.loop.call(lambda: served.data_plane.on_summed(opened.transfer_id, [2], [1 << 63]))
    close(served, opened.transfer_id)
    opened = open_transfer(served, [b"?" * 32, *hashes], checksums=True)
    assert struct.unpack("<2Q", opened.groups[0].checksums) == (0, 1 << 63)
    assert not open_transfer(served, hashes).groups[0].checksums


@pytest.mark.parametrize("how", ["whole", "cancelled", "expired"])
def test_a_transfer_is_opened_in_turns(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Others are served meanwhile."""
    monkeypatch.setattr(kvcore.transfer, "_TURN_BLOCKS", 1)
    clock = ManualClock()
    served = serve(clock=clock)
    _, hashes = cached(served, tokens(*range(1, 121)))
    node = served.server.node
    open_at_turns: list[int] = []

    async def act() -> str:
        opening = node.depot.transfers.opening_hashes("peer", [GroupHashes(0, hashes)])
        call = asyncio.ensure_future(node.transfers.open(opening, 5.0))
        while not call.done():
            await asyncio.sleep(0)
            open_at_turns.append(
                sum(len(each.pinned) for each in node.depot.transfers.by_id.values())
            )
            assert len(node.transfers.listed()) == len(node.transfers)
            if len(open_at_turns) == 3 and how == "cancelled":
                call.cancel()
            elif len(open_at_turns) == 3 and how == "expired":
                clock.advance(6.0)
        try:
            return "open" if call.result().transfer_id else ""
        except NotFound as error:
            return error.reason
        except asyncio.CancelledError:
            return "cancelled"

    outcome = served.loop.run(act())
    assert open_at_turns[:3] == [1, 2, 3]
    if how == "whole":
        assert outcome == "open" and num_pinned(served) == len(hashes) == 30
        assert len(served.data_plane.opened) == 1
    else:
        assert outcome == {"cancelled": "cancelled", "expired": "UNKNOWN_TRANSFER"}[how]
        assert num_pinned(served) == 0 and len(node.transfers) == 0
        assert served.data_plane.opened == {}


@pytest.mark.parametrize("how", ["closed", "twice", "cancelled", "expired", "lost"])
def test_a_transfer_is_closed_in_turns(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Others are served meanwhile; it goes on when nobody waits for it any more."""
    clock = ManualClock()
    served = serve(clock=clock)
    _, hashes = cached(served, tokens(*range(1, 121)))
    transfer_id = open_transfer(served, hashes, lease_ttl_seconds=5.0).transfer_id
    monkeypatch.setattr(kvcore.transfer, "_TURN_BLOCKS", 1)
    node = served.server.node
    if how == "lost":
        node.depot.evict_blocks([1])
    pinned: list[int] = []

    async def act() -> list[str]:
        calls = []
        if how == "expired":
            clock.advance(6.0)
        else:
            calls.append(asyncio.ensure_future(node.transfers.close(transfer_id)))
        if how == "twice":
            calls.append(asyncio.ensure_future(node.transfers.close(transfer_id)))
        while transfers := list(node.depot.transfers.by_id.values()):
            pinned.append(len(transfers[0].pinned))
            await asyncio.sleep(0)
            # It is open no more, from the start on.
            if len(pinned) > 1:
                assert not served.data_plane.opened
                assert not node.transfers.listed() and not len(node.transfers)
                with pytest.raises(NotFound):
                    node.transfers.renew(transfer_id)
            if len(pinned) == 5 and how == "cancelled":
                calls.pop().cancel()
        outcomes = []
        for call in calls or [asyncio.ensure_future(node.transfers.close(transfer_id))]:
            try:
                await call
                outcomes.append("OK")
            except KVDepotError as error:
                outcomes.append(error.reason)
        return outcomes

    outcomes = served.loop.run(act())
    assert pinned[-1] == 1 and len(set(pinned)) >= 29
    assert num_pinned(served) == 0
    assert outcomes == {
        "closed": ["OK"],
        "twice": ["OK", "OK"],
        "cancelled": ["OK"],
        "expired": ["TRANSFER_EXPIRED"],
        "lost": ["CONTENT_DROPPED"],
    }.get(how)
    ended = {"expired": "expired", "lost": "dropped"}.get(how, "closed")
    assert node.transfers.num_ended == {"closed": 0, "expired": 0, "dropped": 0} | {ended: 1}


def test_a_request_is_read_while_it_and_its_session_end(served: Served) -> None:
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.cache("a", 10)
    named = transfer_pb2.SessionRequest(
        session_id=scheduler.opened.session_id, epoch=scheduler.opened.epoch, request_id="a"
    )
    opened = open_transfer(served, request=named)
    (group,) = opened.groups
    assert list(group.statuses) == [READY, READY]
    assert list(group.block_hashes) == ready_hashes(served)
    scheduler.free("a")
    assert num_pinned(served) == 2
    scheduler.close()
    assert num_pinned(served) == 2
    close(served, opened.transfer_id)
    assert num_pinned(served) == 0
    assert served.stats().blocks.cached == 2


def test_salt_and_lora_are_told(served: Served) -> None:
    scheduler = served.open()
    extra = {"lora_name": "A", "cache_salt": "s"}
    slots = {"content": cache_pb2.RequestContent(tokens=PROMPT, extra_keys=extra)}
    scheduler.allocate("a", num_new_tokens=10, **slots)
    scheduler.cache("a", 10)
    opened = open_transfer(served, ready_hashes(served), contents=True)
    (run,) = opened.groups[0].contents
    assert (run.num_blocks, run.cache_salt, run.lora_name) == (2, "s", "A")
    assert [
        (told.first, told.num_blocks, [key.text for key in told.keys.keys])
        for told in run.extra_keys
    ] == [(0, 1, ["A", "s"]), (1, 1, ["A"])]


def test_a_lease_runs_out_while_the_peer_reads(serve: Serve) -> None:
    clock = ManualClock()
    served = serve(clock=clock)
    _, hashes = cached(served)
    opened = open_transfer(served, hashes, lease_ttl_seconds=5.0)
    served.loop.call(lambda: clock.advance(4.0))
    assert renew(served, opened.transfer_id).lease_ttl_seconds == 5.0
    served.loop.call(lambda: clock.advance(4.0))
    assert num_pinned(served) == 2
    served.loop.call(lambda: clock.advance(1.5))
    assert num_pinned(served) == 0
    assert served.data_plane.opened == {}
    for call in (renew, close, close):
        error = refused(partial(call, served, opened.transfer_id), NOT_FOUND)
        assert error.reason == "TRANSFER_EXPIRED"
    assert served.server.node.transfers.num_ended["expired"] == 1


def test_close_twice_answers_the_same_twice(served: Served) -> None:
    _, hashes = cached(served)
    opened = open_transfer(served, hashes)
    assert close(served, opened.transfer_id) == close(served, opened.transfer_id)
    assert refused(lambda: renew(served, opened.transfer_id), NOT_FOUND).reason == (
        "UNKNOWN_TRANSFER"
    )
    assert refused(lambda: close(served, "?"), NOT_FOUND).reason == "UNKNOWN_TRANSFER"


def test_what_is_reset_meanwhile_does_not_count(served: Served) -> None:
    scheduler, hashes = cached(served)
    opened = open_transfer(served, hashes, name="decode-0")
    error = refused(scheduler.reset, FAILED_PRECONDITION)
    assert error.reason == "BLOCKS_IN_USE"
    audit = served.admin.Audit(admin_pb2.AuditRequest(), timeout=TIMEOUT_SECONDS)
    (holder,) = audit.holders
    assert (holder.transfer, holder.session_name, holder.num_blocks) == (
        *(opened.transfer_id[:8], "decode-0"),
        2,
    )
    served.cache.ResetPrefixCache(
        cache_pb2.ResetPrefixCacheRequest(
            context=scheduler.context(), mode=cache_pb2.RESET_MODE_FORCE
        ),
        timeout=TIMEOUT_SECONDS,
    )
    assert num_pinned(served) == 2
    for call in (renew, close, close):
        error = refused(partial(call, served, opened.transfer_id), FAILED_PRECONDITION)
        assert error.reason == "CONTENT_DROPPED"
    assert num_pinned(served) == 0


def test_a_reset_that_waits_for_a_transfer_is_done_by_its_close(served: Served) -> None:
    scheduler, hashes = cached(served)
    opened = open_transfer(served, hashes)

    def drain(drain_id: int = 0) -> Any:
        return served.cache.ResetPrefixCache(
            cache_pb2.ResetPrefixCacheRequest(
                context=scheduler.context(),
                mode=cache_pb2.RESET_MODE_DRAIN,
                drain_id=drain_id,
            ),
            timeout=TIMEOUT_SECONDS,
        )

    pending = drain()
    assert not pending.done
    assert [holder.transfer for holder in pending.holders] == [opened.transfer_id[:8]]
    close(served, opened.transfer_id)
    assert drain(pending.drain_id).done
    assert ready_hashes(served) == []


def test_operators_see_transfers_but_not_their_ids(served: Served) -> None:
    _, hashes = cached(served)
    opened = open_transfer(served, hashes, name="decode-0", lease_ttl_seconds=60.0)
    listed = served.admin.ListTransfers(admin_pb2.ListTransfersRequest(), timeout=TIMEOUT_SECONDS)
    (info,) = listed.transfers
    assert info.transfer == opened.transfer_id[:8]
    assert info.name == "decode-0"
    assert info.direction == admin_pb2.TRANSFER_DIRECTION_OUT
    assert 50.0 < info.lease_remaining_seconds <= 60.0
    assert (info.num_blocks, info.num_bytes) == (2, 2 * BLOCK_BYTES)
    assert served.stats().num_transfers == 1
    assert opened.transfer_id not in str(listed)


@pytest.mark.parametrize(
    ("request_fields", "options", "code", "reason", "field"),
    [
        pytest.param(
            {"fingerprint": "other"},
            {},
            FAILED_PRECONDITION,
            "FINGERPRINT_MISMATCH",
            "fingerprint",
            id="another pool's",
        ),
        pytest.param(
            {"groups": [transfer_pb2.GroupHashes(group=1)]},
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "groups[0].group",
            id="group",
        ),
        pytest.param(
            {"groups": [transfer_pb2.GroupHashes(block_hashes=[b"h" * 32, b"short"])]},
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "groups[0].block_hashes[1]",
            id="short hash",
        ),
        pytest.param(
            {"groups": []},
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "groups",
            id="nothing named",
        ),
        pytest.param(
            {"request": transfer_pb2.SessionRequest()},
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "groups",
            id="both named",
        ),
        pytest.param(
            {"groups": [], "request": transfer_pb2.SessionRequest(session_id="?")},
            {},
            NOT_FOUND,
            "UNKNOWN_SESSION",
            "request.session_id",
            id="no such session",
        ),
        pytest.param(
            {"lease_ttl_seconds": 601.0},
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "lease_ttl_seconds",
            id="long lease",
        ),
        pytest.param(
            {"name": "n" * 1025},
            {},
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "name",
            id="long name",
        ),
        pytest.param(
            {"groups": [transfer_pb2.GroupHashes(block_hashes=[b"h" * 32] * 3)]},
            {"max_transfer_blocks": 2},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_BLOCKS",
            "groups",
            id="many blocks",
        ),
        pytest.param(
            {"groups": [transfer_pb2.GroupHashes(block_hashes=[b"h" * 32] * 3)], "contents": True},
            {"max_transfer_contents": 2},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_CONTENTS",
            "contents",
            id="many contents",
        ),
        pytest.param({}, {"no_memory": True}, FAILED_PRECONDITION, "NO_MEMORY", "", id="no bytes"),
    ],
)
def test_refused(
    serve: Serve,
    request_fields: dict[str, Any],
    options: dict[str, Any],
    code: grpc.StatusCode,
    reason: str,
    field: str,
) -> None:
    served = serve(**options)
    request = transfer_pb2.OpenTransferRequest(
        **{"groups": [transfer_pb2.GroupHashes()]} | request_fields
    )
    detail = refused(lambda: served.transfer.OpenTransfer(request, timeout=TIMEOUT_SECONDS), code)
    assert (detail.reason, detail.field) == (reason, field)
    assert num_pinned(served) == 0


def test_contents_larger_than_a_message_leave_no_transfer(serve: Serve) -> None:
    served = serve(num_blocks=400, block_size=64, max_message_bytes=1 << 16)
    scheduler = served.open()
    for name, first, num_blocks in (("a", 0, 230), ("b", 1, 160)):
        scheduler.admit(name, tokens(*range(first, first + 64 * num_blocks)))
        scheduler.cache(name, 64 * num_blocks)
    requests = served.server.node.depot.sessions[scheduler.opened.session_id].requests
    hashes = [*requests["a"].block_hashes, *requests["b"].block_hashes]
    assert len(hashes) == 390
    detail = refused(
        lambda: open_transfer(served, hashes, contents=True), grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    assert (detail.reason, detail.field) == ("CONTENTS_TOO_LARGE", "contents")
    assert num_pinned(served) == 0 and served.data_plane.opened == {}
    opened = open_transfer(served, hashes[:200], contents=True)
    assert [run.num_blocks for run in opened.groups[0].contents] == [200]
    assert opened.ByteSize() < 1 << 16
    few = [*hashes[:100], *(number.to_bytes(32, "big") for number in range(700))]
    opened = open_transfer(served, few, contents=True)
    assert [run.num_blocks for run in opened.groups[0].contents] == [100]
    assert opened.ByteSize() < 1 << 16
    named = transfer_pb2.SessionRequest(
        session_id=scheduler.opened.session_id, epoch=opened.epoch, request_id="a"
    )
    detail = refused(
        lambda: open_transfer(served, request=named, contents=True),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
    assert detail.reason == "CONTENTS_TOO_LARGE"


def test_transfers_are_bounded(serve: Serve) -> None:
    served = serve(max_transfers=2)
    _, hashes = cached(served)
    first = open_transfer(served, hashes)
    open_transfer(served, hashes)
    detail = refused(lambda: open_transfer(served, hashes), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert detail.reason == "TOO_MANY_TRANSFERS" and detail.retryable
    close(served, first.transfer_id)
    open_transfer(served, hashes)


def test_a_stopping_server_lets_transfers_end_and_opens_none(serve: Serve) -> None:
    served = serve(drain_grace_seconds=20.0)
    _, hashes = cached(served)
    node = served.server.node
    for session in list(node.depot.sessions.values()):
        served.loop.call(lambda session=session: node.close_session(session))
    opened = open_transfer(served, hashes)
    served.admin.Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT_SECONDS)
    detail = refused(lambda: open_transfer(served, hashes), grpc.StatusCode.UNAVAILABLE)
    assert detail.reason == "DRAINING"
    assert served.loop.call(lambda: node.is_in_use)
    close(served, opened.transfer_id)
    assert not served.loop.call(lambda: node.is_in_use)


def test_a_server_that_stops_ends_the_transfers_that_are_left(serve: Serve) -> None:
    served = serve(drain_grace_seconds=0.0)
    _, hashes = cached(served)
    open_transfer(served, hashes)
    data_plane = served.data_plane
    served.loop.run(served.server.stop())
    assert data_plane.opened == {}
    assert not data_plane.is_running
    assert served.server.node.depot.audit() == []


class NoDataPlane(FakeDataPlane):
    """Its process does not start."""

    async def start(self) -> None:
        """As DataPlane's."""
        raise Unavailable("it does not start", reason="NO_DATA_PLANE")


def test_a_pool_on_devices_does_without_what_moves_its_bytes(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolMemory, "path", property(lambda memory: ""))
    served = serve(make_data_plane=NoDataPlane)
    scheduler = served.open()
    scheduler.admit("a", PROMPT)
    scheduler.cache("a", 10)
    assert scheduler.lookup("b", PROMPT).num_computed_tokens == 8
    request = transfer_pb2.OpenTransferRequest(groups=[transfer_pb2.GroupHashes()])
    detail = refused(
        lambda: served.transfer.OpenTransfer(request, timeout=TIMEOUT_SECONDS), FAILED_PRECONDITION
    )
    assert detail.reason == "NO_DATA_PLANE"


def test_a_pool_in_a_file_does_not(serve: Serve) -> None:
    with pytest.raises(Unavailable):
        serve(make_data_plane=NoDataPlane)
