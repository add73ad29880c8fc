"""Prefill on one server, decode on another: told whole, and with each of the four parts lost.

Every byte that is read is checked. After each story nobody holds a block, the audits are
clean, and nothing is a hit whose bytes were not verified.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvclient import Client
from kvclient.errors import CacheLost, KVDepotError, Unavailable
from kvclient.imports import TransferPath
from kvclient.pool import map_pool
from kvclient.replay.errors import WrongBytes
from kvclient.replay.handover import Decoded, Decoder, Prefiller
from kvclient.replay.job import Job
from pd_load import OUTPUT_TOKENS, handed, prompt
from processes import (
    HERE,
    SLACK_SECONDS,
    Process,
    Processes,
    assert_empty,
    processes_in,
    wait_for,
)

MAPPING, NIXL, GRPC = TransferPath.MAPPING, TransferPath.NIXL, TransferPath.GRPC
PATHS = [
    pytest.param(MAPPING, id="mapping"),
    pytest.param(
        NIXL,
        id="nixl",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed"
        ),
    ),
    pytest.param(GRPC, id="grpc"),
]
TWO_BLOCK_SIZES = """
- {kind: full_attention, layer_names: [a, b], block_size: 32, num_kv_heads: 1, head_size: 16,
   dtype: bfloat16}
- {kind: sliding_window, layer_names: [c, d], block_size: 16, num_kv_heads: 2, head_size: 16,
   dtype: bfloat16, sliding_window: 100}
"""
MODELS: dict[str, dict[str, Any]] = {
    "blocks of 64": {"block_size": 64},
    "gemma-like": {"model": "gemma-like", "block_size": 16},
    "mamba-hybrid": {"model": "mamba-hybrid"},
    "two block sizes": {"model": "two", "groups": TWO_BLOCK_SIZES},
}
# 64 blocks, 12.6 MB, which take twelve seconds.
NUM_TOKENS = 1030
NUM_FULL_BLOCKS = 64
LARGE = {"model": "qwen2-0.5b", "num_blocks": 200}
SLOW = {"import_bandwidth_bytes": 1 << 20}
DEADLINE_SECONDS = 8.0
# A machine that stands still for two seconds ends none.
LEASE_SECONDS = 4.0
TRANSFER_SECONDS = 8.0
KEEP_SECONDS = 3.0

pytestmark = pytest.mark.timeout(600)


class Pair:
    """Two servers, the second of which decodes, and a client of each."""

    def __init__(self, processes: Processes, a: dict[str, Any], b: dict[str, Any]) -> None:
        self.processes = processes
        with ThreadPoolExecutor(2) as pool:
            self.a, self.b = pool.map(lambda options: processes.serve(**options), (a, b))
        self.client_a, self.client_b = Client(self.a.target), Client(self.b.target)
        start_importing(self.client_b, self.a.target)

    def prefiller(self, **options: Any) -> Prefiller:
        """A prefill scheduler."""
        return Prefiller(self.client_a, **options)

    def decoder(self, **options: Any) -> Decoder:
        """A decode scheduler."""
        return Decoder(self.client_b, **{"deadline_s": 60.0} | options)

    def load(self, *arguments: object) -> Process:
        """A scheduler in a process of its own."""
        return self.processes.python(str(HERE / "pd_load.py"), *map(str, arguments))

    def wait_for_bytes(self) -> None:
        """Until an import is in the middle."""
        wait_for(lambda: any(info.num_blocks_done for info in self.client_b.list_transfers()))
        assert self.client_b.stats().num_imports == 1

    def close(self) -> None:
        """Ends the clients."""
        self.client_a.close()
        self.client_b.close()


@pytest.fixture
def pair(processes: Processes) -> Iterator[Pair]:
    """Servers of large blocks, the second of which imports slowly."""
    made = Pair(processes, LARGE | {"transfer_ttl_seconds": TRANSFER_SECONDS}, LARGE | SLOW)
    yield made
    made.close()


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Small servers that tests share."""
    with processes_in(tmp_path_factory.mktemp("fast")) as processes:
        made = Pair(processes, {"capacity_tokens": 40_000}, {"capacity_tokens": 40_000})
        yield made
        made.close()


def start_importing(client: Client, peer: str) -> None:
    """Of a hash that nobody has: the first import starts a process, which may take seconds."""
    client.import_blocks([bytes(32)], peer).result()


def assert_nothing_is_held(client: Client) -> None:
    """No session, request, transfer, import or block of anybody is left; the audit is clean."""
    assert_empty(client)
    stats = client.stats()
    assert (stats.num_transfers, stats.num_imports) == (0, 0)


def answers(client: Client) -> bool:
    """Whether the server can be reached."""
    try:
        client.describe_pool()
    except Unavailable:
        return False
    return True


def num_hit_tokens(client: Client, job: Job) -> int:
    """What another scheduler would find of the prompt."""
    with client.open_session("probe") as session:
        tokens = job.tokens_between(0, job.request.input_length)
        return session.get_computed_blocks("probe", tokens).num_computed_tokens


class Running:
    """A request that is decoded in a thread."""

    def __init__(self, decoder: Decoder, peer: str, job: Job) -> None:
        self.began_at = time.monotonic()
        self.ended_at = 0.0
        self._outcome: list[Decoded | KVDepotError] = []
        self._thread = threading.Thread(target=self._run, args=(decoder, peer, job), daemon=True)
        self._thread.start()

    def _run(self, decoder: Decoder, peer: str, job: Job) -> None:
        try:
            self._outcome.append(decoder.decode(job, handed(job, peer)))
        except KVDepotError as error:
            self._outcome.append(error)
        self.ended_at = time.monotonic()

    @property
    def seconds(self) -> float:
        """From its begin to its end."""
        return self.ended_at - self.began_at

    def outcome(self) -> Decoded | KVDepotError:
        """How it went, waited for."""
        self._thread.join(60.0)
        assert self._outcome, "it does not end, or bytes were wrong"
        return self._outcome[0]

    def decoded(self) -> Decoded:
        """That it came to its end, with all bytes right, and how."""
        outcome = self.outcome()
        assert isinstance(outcome, Decoded), outcome
        assert outcome.num_output_tokens == OUTPUT_TOKENS - 1
        return outcome


# --- all goes well --------------------------------------------------------------------


def hand_over_two(pair: Pair, path: TransferPath, numbers: tuple[int, int]) -> list[Decoded]:
    """Two prompts that begin alike; the second finds that part on the decode side."""
    prefiller, decoder = pair.prefiller(), pair.decoder(paths=[path], checksums=True)
    done = []
    for number, num_tokens in zip(numbers, (1500, 1100), strict=True):
        prefilled = prefiller.prefill(prompt(num_tokens, number))
        assert prefilled.num_tokens == num_tokens
        job = prompt(num_tokens, number)
        done.append(
            decoder.decode(job, prefilled, lambda job=job: prefiller.release(job.request_id))
        )
        assert prefiller.num_kept == 0
    decoder.engine.worker.check_null_block()
    assert decoder.engine.worker.blocks_verified > 0
    assert decoder.engine.worker.blocks_reread > 0
    prefiller.engine.close()
    decoder.engine.close()
    return done


@pytest.mark.parametrize("path", PATHS)
def test_each_path(fast: Pair, path: TransferPath) -> None:
    pair = fast
    if path is NIXL:
        wait_for_nixl(pair)
    first, second = hand_over_two(pair, path, (10 * path + 1, 10 * path + 2))
    assert first.error is None and first.result is not None
    assert (first.result.path, first.result.failures) == (path, ())
    # The first 512 tokens of every prompt are the same.
    assert first.num_hit_tokens in (0, 512)
    assert first.num_hit_tokens + first.num_imported_tokens == 1500 // 16 * 16
    assert (second.num_hit_tokens, second.num_imported_tokens) == (512, 1099 // 16 * 16 - 512)
    for client in (pair.client_a, pair.client_b):
        assert_nothing_is_held(client)


def wait_for_nixl(pair: Pair) -> None:
    """Until the source offers it: its agent is made once it serves."""

    def offers() -> bool:
        opened = pair.client_a.open_transfer({0: []})
        pair.client_a.close_transfer(opened.transfer_id)
        return bool(opened.reach.nixl_agent)

    wait_for(offers)


@pytest.mark.parametrize(
    ("model", "size"),
    [("blocks of 64", 64), ("gemma-like", 16), ("mamba-hybrid", 16), ("two block sizes", 32)],
)
def test_each_kind_of_model(processes: Processes, model: str, size: int) -> None:
    options = {"capacity_tokens": 40_000} | MODELS[model]
    pair = Pair(processes, options, options)
    first, second = hand_over_two(pair, GRPC, (1, 2))
    assert (first.num_hit_tokens, first.num_imported_tokens) == (0, 1499 // size * size)
    assert second.num_hit_tokens + second.num_imported_tokens == 1099 // size * size
    assert second.num_imported_tokens > 0
    for client in (pair.client_a, pair.client_b):
        assert_nothing_is_held(client)
    pair.close()


def test_what_nobody_asks_for_is_released(fast: Pair) -> None:
    pair = fast
    prefiller = pair.prefiller(keep_s=KEEP_SECONDS)
    job = prompt(1000, 91)
    began = time.monotonic()
    prefilled = prefiller.prefill(job)
    assert pair.client_a.stats().blocks.live == 63
    seconds = wait_for(prefiller.release_overdue)
    assert time.monotonic() - began >= KEEP_SECONDS
    assert seconds < KEEP_SECONDS + SLACK_SECONDS
    assert pair.client_a.stats().blocks.live == 0
    # What it computed is a hit as long as nobody needs the blocks.
    decoder = pair.decoder()
    done = decoder.decode(prompt(1000, 91), prefilled)
    assert done.num_hit_tokens + done.num_imported_tokens == 999 // 16 * 16
    assert not prefiller.release(job.request_id)
    prefiller.engine.close()
    decoder.engine.close()


def test_other_bytes_than_the_prompts_are_seen(fast: Pair) -> None:
    """So that the other tests prove something."""
    pair = fast
    prefiller, decoder = pair.prefiller(), pair.decoder()
    job = prompt(1000, 95)
    prefilled = prefiller.prefill(job)
    assert job.tables is not None
    pool = map_pool(prefiller.engine.session.pool)
    pool.layer_bytes(pool.description.layers[1].name)[job.tables.blocks[0][40]] ^= 1
    with pytest.raises(WrongBytes, match=r"token 64\d, block \d+: a hit"):
        decoder.decode(prompt(1000, 95), prefilled)
    prefiller.engine.close()
    decoder.engine.close()


# --- a part is lost in the middle -----------------------------------------------------


@pytest.mark.slow
def test_the_decode_server_is_killed(pair: Pair) -> None:
    prefiller = pair.prefiller()
    prefiller.prefill(prompt(NUM_TOKENS))
    decoder = pair.decoder(paths=[GRPC], deadline_s=DEADLINE_SECONDS)
    running = Running(decoder, pair.a.target, prompt(NUM_TOKENS))
    pair.wait_for_bytes()
    assert pair.client_a.stats().num_transfers == 1
    killed_at = time.monotonic()
    pair.b.kill()
    # The prefill scheduler lets go; the transfer keeps the blocks until its lease ends.
    prefiller.release("trace-0")
    blocks = pair.client_a.stats().blocks
    assert (blocks.live, blocks.pinned + blocks.in_transfer) == (0, NUM_FULL_BLOCKS)
    assert isinstance(running.outcome(), CacheLost | Unavailable)
    assert running.ended_at - killed_at < DEADLINE_SECONDS + SLACK_SECONDS
    seconds = wait_for(lambda: pair.client_a.stats().num_transfers == 0)
    assert seconds < TRANSFER_SECONDS + SLACK_SECONDS
    # It comes again, empty, and is handed the prompt once more.
    pair.b = pair.processes.again(pair.b)
    with Client(pair.b.target) as client:
        # Channels to one address share their pauses between attempts to connect.
        wait_for(lambda: answers(client))
        assert num_hit_tokens(client, prompt(NUM_TOKENS)) == 0
        decoder = Decoder(client, deadline_s=60.0)
        done = Running(decoder, pair.a.target, prompt(NUM_TOKENS)).decoded()
        assert done.num_imported_tokens == 16 * NUM_FULL_BLOCKS
        decoder.engine.close()
        prefiller.engine.close()
        assert_nothing_is_held(client)
    assert_nothing_is_held(pair.client_a)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_prefill_server_is_killed(processes: Processes, path: TransferPath) -> None:
    """What came is not vouched for: the decode side computes it, and no byte is wrong."""
    num_tokens, large, slow, deadline = NUM_TOKENS, LARGE, SLOW, DEADLINE_SECONDS
    if path is NIXL:  # reads 48 MiB ahead, and its agent takes seconds to come up
        num_tokens, large = 9 * NUM_TOKENS, LARGE | {"num_blocks": 700}
        slow, deadline = {"import_bandwidth_bytes": 10 << 20}, 30.0
    pair = Pair(processes, large, large | slow)
    if path is NIXL:
        wait_for_nixl(pair)
    # With checksums it copies 2 MiB at a time from a mapping, without 32.
    decoder = pair.decoder(paths=[path], deadline_s=deadline, checksums=path is MAPPING)
    prefiller = pair.prefiller()
    prefiller.prefill(prompt(num_tokens))
    running = Running(decoder, pair.a.target, prompt(num_tokens))
    pair.wait_for_bytes()
    assert num_hit_tokens(pair.client_b, prompt(num_tokens)) == 0
    os.killpg(pair.a.pid, signal.SIGKILL)
    done = running.decoded()
    assert running.seconds < deadline + SLACK_SECONDS
    assert done.num_imported_tokens == 0
    assert done.error is not None or (done.result is not None and done.result.failures)
    decoder.engine.close()
    assert_nothing_is_held(pair.client_b)
    # It was computed here after all.
    assert num_hit_tokens(pair.client_b, prompt(num_tokens)) == (num_tokens - 1) // 16 * 16
    pair.close()


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["its books", "the books and the bytes"])
def test_the_prefill_server_hangs(pair: Pair, whole: bool) -> None:
    """SIGSTOP for the process that answers RPCs, or for those that send bytes as well."""

    def tell(number: int) -> None:
        if whole:
            os.killpg(pair.a.pid, number)
        else:
            pair.a.signal(number)

    prefiller = pair.prefiller()
    decoder = pair.decoder(paths=[GRPC], deadline_s=DEADLINE_SECONDS)
    prefiller.prefill(prompt(NUM_TOKENS))
    running = Running(decoder, pair.a.target, prompt(NUM_TOKENS))
    pair.wait_for_bytes()
    tell(signal.SIGSTOP)
    try:
        done = running.decoded()
    finally:
        tell(signal.SIGCONT)
    assert running.seconds < DEADLINE_SECONDS + SLACK_SECONDS
    assert done.num_imported_tokens == 0
    decoder.engine.close()
    assert_nothing_is_held(pair.client_b)
    # It goes on as if nothing had been; the transfer that nobody closed ends by its lease.
    wait_for(lambda: pair.client_a.stats().num_transfers == 0)
    assert prefiller.release("trace-0")
    prefiller.engine.close()
    assert_nothing_is_held(pair.client_a)
    assert num_hit_tokens(pair.client_a, prompt(NUM_TOKENS)) == 16 * NUM_FULL_BLOCKS


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_decode_scheduler_is_lost(pair: Pair, number: signal.Signals) -> None:
    """Its session ends, and its blocks are free once no byte can land in them any more."""
    prefiller = pair.prefiller(keep_s=2.0)
    prefiller.prefill(prompt(NUM_TOKENS))
    scheduler = pair.load("decode", pair.b.target, pair.a.target, NUM_TOKENS, LEASE_SECONDS, "GRPC")
    pair.wait_for_bytes()
    scheduler.signal(number)
    seconds = wait_for(lambda: pair.client_b.stats().num_sessions == 0)
    assert seconds < LEASE_SECONDS + SLACK_SECONDS
    if number == signal.SIGSTOP:
        # Its call is still there: the import goes on, and keeps the blocks from everybody.
        stats = pair.client_b.stats()
        assert stats.num_imports == 1
        assert (stats.blocks.live, stats.blocks.in_transfer) == (0, NUM_FULL_BLOCKS)
    wait_for(lambda: pair.client_b.stats().num_imports == 0)
    if number == signal.SIGSTOP:
        scheduler.signal(signal.SIGCONT)
        assert scheduler.report()["lost"] in ("SESSION_EXPIRED", "LEASE_EXPIRED")
    wait_for(lambda: pair.client_b.stats().num_workers == 0)
    wait_for(lambda: pair.client_b.stats().num_departed_sessions == 0)
    assert num_hit_tokens(pair.client_b, prompt(NUM_TOKENS)) == 0
    assert_nothing_is_held(pair.client_b)
    assert pair.client_b.stats().blocks.free == LARGE["num_blocks"] - 1
    # No notice comes: the prefill scheduler's own deadline ends it there.
    wait_for(prefiller.release_overdue)
    prefiller.engine.close()
    wait_for(lambda: pair.client_a.stats().num_transfers == 0)
    assert_nothing_is_held(pair.client_a)


@pytest.mark.slow
def test_the_prefill_scheduler_is_killed(pair: Pair) -> None:
    """Its session ends; the open transfer keeps the blocks, and the import comes to its end."""
    scheduler = pair.load("prefill", pair.a.target, NUM_TOKENS, LEASE_SECONDS)
    scheduler.said("prefilled")
    decoder = pair.decoder(paths=[GRPC])
    running = Running(decoder, pair.a.target, prompt(NUM_TOKENS))
    pair.wait_for_bytes()
    scheduler.kill()
    seconds = wait_for(lambda: pair.client_a.stats().num_sessions == 0)
    assert seconds < LEASE_SECONDS + SLACK_SECONDS
    stats = pair.client_a.stats()
    assert stats.num_transfers == 1
    assert stats.blocks.live == 0
    assert stats.blocks.pinned + stats.blocks.in_transfer == NUM_FULL_BLOCKS
    done = running.decoded()
    assert (done.num_imported_tokens, done.error) == (16 * NUM_FULL_BLOCKS, None)
    assert done.result is not None and done.result.failures == ()
    decoder.engine.close()
    assert_nothing_is_held(pair.client_b)
    assert_nothing_is_held(pair.client_a)
