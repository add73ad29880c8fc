"""Imports through the clients and the command line, between two real servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from click.testing import CliRunner

from conftest import BLOCK_SIZE, Serve, ServerProcess
from kvclient import Client, aio
from kvclient.cli.command import main
from kvclient.errors import CacheLost, Cancelled, FailedPrecondition, NotFound, Unavailable
from kvclient.events import BlockStored
from kvclient.imports import ImportStatus, TransferPath
from kvclient.pool import map_pool
from kvclient.reports import TransferDirection
from kvclient.session import Session
from kvclient.values import Outcome, SlotRequest
from kvdepot.v1 import cache_pb2, types_pb2
from patience import until

IMPORTED, PRESENT, MISSING = ImportStatus.IMPORTED, ImportStatus.PRESENT, ImportStatus.MISSING
Run = Callable[..., tuple[int, str]]
PROMPT = list(range(100, 113))


@pytest.fixture(scope="module")
def source(serve: Serve) -> ServerProcess:
    """A server that caches three blocks of the prompt, each with bytes of its own."""
    server = serve()
    with server.client() as client, client.open_session("prefill") as session:
        session.get_computed_blocks("a", PROMPT)
        slots = session.allocate_slots(SlotRequest("a", num_new_tokens=len(PROMPT)))
        for number, block_id in enumerate(slots.new_blocks[0]):
            for layer in _layers(session):
                layer[block_id] = number + 1
        session.cache_blocks("a", len(PROMPT))
    return server


def _layers(session: Session):  # type: ignore[no-untyped-def]
    pool = map_pool(session.pool)
    return [pool.layer(layer.name) for layer in session.pool.layers]


def hashes_of(server: ServerProcess) -> list[bytes]:
    """What it caches."""
    with server.client() as client, client.stream_events(snapshot=True) as batches:
        return [
            block_hash
            for event in next(batches).events
            if isinstance(event, BlockStored)
            for block_hash in event.block_hashes
        ]


def test_hashes_become_hits(client: Client, source: ServerProcess) -> None:
    hashes = hashes_of(source)
    with client.import_blocks(hashes, source.target) as running:
        told = list(running)
        result = running.result()
    assert all(progress.num_blocks <= 3 for progress in told)
    assert result.statuses == {0: (IMPORTED,) * 3}
    assert result.is_complete
    assert result.path is not TransferPath.UNKNOWN
    with client.open_session() as session:
        hit = session.get_computed_blocks("a", PROMPT)
        assert hit.num_computed_tokens == 3 * BLOCK_SIZE
        for number, block_id in enumerate(hit.blocks[0]):
            assert all(bool((layer[block_id] == number + 1).all()) for layer in _layers(session))
        session.free("a")
    again = client.import_blocks({0: [*hashes, b"?" * 32]}, source.target).result()
    assert again.statuses == {0: (PRESENT, PRESENT, PRESENT, MISSING)}
    assert not again.is_complete


@pytest.mark.parametrize("path", [TransferPath.MAPPING, TransferPath.GRPC])
def test_a_request_is_handed_over(
    client: Client, source: ServerProcess, path: TransferPath
) -> None:
    with client.open_session("decode") as session:
        session.get_computed_blocks("a", PROMPT)
        slots = session.allocate_slots(
            SlotRequest(
                "a", num_new_tokens=0, num_external_computed_tokens=12, delay_cache_blocks=True
            )
        )
        assert slots.outcome is Outcome.OK
        running = session.import_blocks(
            "a", source.target, paths=[path], checksums=True, deadline_s=60.0
        )
        result = running.result()
        assert result.path is path
        assert result.num_tokens == 12
        assert session.cache_blocks("a", result.num_tokens)
        for number, block_id in enumerate(slots.new_blocks[0]):
            assert all(bool((layer[block_id] == number + 1).all()) for layer in _layers(session))
        grown = session.allocate_slots(SlotRequest("a", num_computed_tokens=12, num_new_tokens=1))
        assert grown.outcome is Outcome.OK


def test_asyncio(client: Client, server: ServerProcess, source: ServerProcess) -> None:
    hashes = hashes_of(source)

    async def story() -> None:
        async with aio.Client(server.target) as twin:
            async with twin.import_blocks(hashes[:1], source.target) as running:
                async for progress in running:
                    assert progress.num_blocks <= 1
                assert (await running.result()).statuses == {0: (IMPORTED,)}
            assert await twin.list_transfers() == ()
            async with await twin.open_session() as session:
                hit = await session.get_computed_blocks("a", PROMPT)
                assert hit.num_computed_tokens == BLOCK_SIZE
                with pytest.raises(FailedPrecondition) as caught:
                    await session.import_blocks("a", source.target).result()
                assert caught.value.reason == "NOT_DELAYED"

    asyncio.run(story())


def test_a_peer_that_tells_less_at_a_time_is_asked_for_less(serve: Serve) -> None:
    source, here = serve(max_transfer_contents=2, max_message_bytes=1 << 16), serve()
    prompt = list(range(41))
    with source.client() as client, client.open_session() as session:
        session.get_computed_blocks("a", prompt)
        session.allocate_slots(SlotRequest("a", num_new_tokens=len(prompt)))
        session.cache_blocks("a", len(prompt))
    with here.client() as client:
        result = client.import_blocks(hashes_of(source), source.target).result()
        assert result.statuses == {0: (IMPORTED,) * 10}
        assert result.failures == ()
        with client.open_session() as session:
            assert session.get_computed_blocks("a", prompt).num_computed_tokens == 40


def test_what_is_refused(client: Client, source: ServerProcess) -> None:
    hashes = hashes_of(source)
    with pytest.raises(Unavailable):
        client.import_blocks(hashes, "127.0.0.1:1").result()
    closed = client.import_blocks(hashes, source.target)
    closed.close()
    with pytest.raises(Cancelled):
        closed.result()
    # What its blocks are kept for ends a moment later.
    until(lambda: not client.stats().num_imports)
    session = client.open_session()
    with pytest.raises(NotFound) as caught:
        session.import_blocks("?", source.target).result()
    assert caught.value.reason == "UNKNOWN_REQUEST"
    session.close()
    with pytest.raises(FailedPrecondition):
        session.import_blocks("a", source.target)


def test_a_session_that_is_over_is_lost(client: Client, source: ServerProcess) -> None:
    session = client.open_session()
    context = types_pb2.CallContext(session_id=session.session_id, epoch=session.epoch)
    close = client._stubs.method("KVCacheService", "CloseSession")
    close(cache_pb2.CloseSessionRequest(context=context))  # not by the session itself
    with pytest.raises(CacheLost):
        session.import_blocks("a", source.target).result()
    assert session.lost is not None


def test_transfers_are_listed(source: ServerProcess) -> None:
    with source.client() as client:
        opened = client.open_transfer({0: hashes_of(source)}, name="decode-0")
        (info,) = client.list_transfers()
        assert info.transfer == opened.transfer_id[:8]
        assert info.direction is TransferDirection.OUT
        assert (info.name, info.num_blocks) == ("decode-0", 3)
        assert client.stats().num_transfers == 1
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(
            main, ["transfers", "--server", source.target]
        )
        assert "decode-0" in shown.output
        assert opened.transfer_id not in shown.output
        (listed,) = json.loads(
            CliRunner().invoke(main, ["transfers", "--server", source.target, "--json"]).output
        )["transfers"]
        assert listed["direction"] == "out"
        assert client.audit().holders[0].transfer == info.transfer
        assert f"transfer {info.transfer} of decode-0 (3 blocks)" in str(client.audit().holders[0])
        client.close_transfer(opened.transfer_id)
        assert client.list_transfers() == ()


@pytest.fixture
def run(client: Client, source: ServerProcess) -> Run:
    """``kvdepot import`` from the source."""

    def invoke(*arguments: str) -> tuple[int, str]:
        command = ["import", "--server", client.target, "--from", source.target, *arguments]
        result = CliRunner().invoke(main, command)
        return result.exit_code, result.output

    return invoke


def test_the_command(run: Run, source: ServerProcess) -> None:
    status, output = run("--all", "--checksums", "--path", "grpc", "--json")
    told = json.loads(output)
    assert (status, told["imported"], told["path"]) == (0, 3, "grpc")
    assert told["bytes"] > 0 and told["failures"] == []
    status, output = run(hashes_of(source)[0].hex(), "ff" * 32)
    assert status == 1
    assert output.startswith("0 imported, 1 present, 0 pending, 1 missing")
    assert run()[0] == 2
    assert run("--all", "ff" * 32)[0] == 2


def test_the_command_says_whose_parents_are_missing(
    client: Client, run: Run, source: ServerProcess
) -> None:
    first, second, third = hashes_of(source)
    result = client.import_blocks([second, third], source.target).result()
    assert result.statuses == {0: (ImportStatus.NOT_ATTEMPTED,) * 2}
    # Not the third's: it was asked for.
    assert result.missing_parents == {0: (first,)}
    status, output = run(second.hex(), third.hex())
    assert status == 1 and "2 not attempted" in output
    assert f"these parents are not here: {first.hex()}; name them too" in output
    told = json.loads(run(third.hex(), "--json")[1])
    assert told["missing_parents"] == {"0": [second.hex()]}
    assert client.import_blocks([first], source.target).result().missing_parents == {}


def test_the_command_says_that_more_parents_are_missing(client: Client, serve: Serve) -> None:
    source = serve()
    with source.client() as there, there.open_session() as session:
        for number in range(6):
            prompt = list(range(20 * number, 20 * number + 2 * BLOCK_SIZE + 1))
            session.get_computed_blocks(str(number), prompt)
            session.allocate_slots(SlotRequest(str(number), num_new_tokens=len(prompt)))
            session.cache_blocks(str(number), len(prompt))
        with there.stream_events(snapshot=True) as batches:
            children = [
                block_hash.hex()
                for event in next(batches).events
                if isinstance(event, BlockStored)
                for block_hash in event.block_hashes[event.parent_block_hash is None :]
            ]
    command = ["import", "--server", client.target, "--from", source.target, *children]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 1 and "6 not attempted" in result.output
    assert " and at least 2 more; name them too" in result.output


def test_the_command_says_what_is_wrong_with_the_peer(client: Client, serve: Serve) -> None:
    other = serve(model="gemma-like")
    for peer, told in (
        ("127.0.0.1:1", "the peer 127.0.0.1:1 (--from) cannot be asked"),
        (other.target, "its fingerprint is"),
    ):
        command = ["import", "--server", client.target, "--from", peer, "--all"]
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        assert told in result.output
