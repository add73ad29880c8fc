"""Whole replays: servers, schedulers, a peer and a follower, each in a process of its own."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvclient.client import Client
from kvclient.replay.errors import ReplayError
from kvclient.replay.server import own_server
from kvclient.replay.trace import TRACE_BLOCK_SIZE, TraceRequest, generate_trace, read_trace
from kvclient.values import Content, Outcome, SlotRequest
from replay_tools import kvdepot, server, serving
from wire import Wire

RPCS = {"AllocateSlots", "CacheBlocks", "Free", "GetComputedBlocks", "Step"}
REAL_TRACE = Path(
    os.environ.get("KVDEPOT_TRACE")
    or Path(__file__).parents[3] / "shared" / "data" / "conversation_trace.jsonl.gz"
)


def lru_hits(
    trace: list[TraceRequest], num_usable: int, num_output: Callable[[TraceRequest], int]
) -> int:
    """Trace blocks hit when each request is finished before the next, by a plain model.

    Blocks are as large as the trace's. The free queue is taken from the front; a request's
    blocks go back tail first, those without content to the front, the others to the back.
    """
    free = dict.fromkeys(range(1, num_usable + 1))
    content: dict[int, object] = {}
    copies: dict[object, dict[int, None]] = {}
    hits = 0
    for request in trace:
        num_tokens = request.input_length + num_output(request)
        prefixes: list[object] = []
        for index in range(num_tokens // TRACE_BLOCK_SIZE):
            if (index + 1) * TRACE_BLOCK_SIZE <= request.input_length:
                prefixes.append(hash(request.hash_ids[: index + 1]))
            else:
                prefixes.append((request.index, index))
        table: list[int] = []
        for prefix in prefixes[: (request.input_length - 1) // TRACE_BLOCK_SIZE]:
            if prefix not in copies:
                break
            table.append(next(iter(copies[prefix])))
        hits += len(table)
        for block_id in table:
            del free[block_id]
        for index in range(len(table), -(-num_tokens // TRACE_BLOCK_SIZE)):
            block_id = next(iter(free))
            del free[block_id]
            if block_id in content:
                evicted = content.pop(block_id)
                del copies[evicted][block_id]
                if not copies[evicted]:
                    del copies[evicted]
            table.append(block_id)
            if index < len(prefixes):
                content[block_id] = prefixes[index]
                copies.setdefault(prefixes[index], {})[block_id] = None
        table.reverse()
        empty = [block_id for block_id in table if block_id not in content]
        free = dict.fromkeys(empty) | free
        free |= dict.fromkeys(block_id for block_id in table if block_id in content)
    return hits


def computed_output(request: TraceRequest) -> int:
    """Output tokens that get slots: the last one is sampled, never computed."""
    return max(0, request.output_length - 1)


def test_two_schedulers_share_a_pool_under_pressure() -> None:
    finished = kvdepot("replay", "--requests", "60", "--capacity-tokens", "16000", "--json")
    assert finished.status == 0, finished.errors
    report = finished.json
    assert report["failures"] == []
    assert report["requests"] == 60
    assert report["mirror_equal"] is True
    assert report["audit_violations"] == 0
    assert 0.1 < report["hit_rate_tokens"] < 0.9
    assert set(report["latency_ms"]) == RPCS
    expected = sum(
        request.input_length + computed_output(request) for request in generate_trace(60)
    )
    assert report["query_tokens"] == sum(request.input_length for request in generate_trace(60))
    # What preemption threw away was computed or hit again.
    assert report["tokens_written"] + report["hit_tokens"] >= expected - 1
    for name in ("blocks_verified", "blocks_reread", "blocks_pulled", "events", "evictions"):
        assert report[name] > 0, name
    assert report["preemptions"] > 0
    assert report["refusals"] >= report["preemptions"] > 0


@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prompts-only"])
def test_one_by_one_hits_what_a_plain_model_hits(tmp_path: Path, decode: bool) -> None:
    trace = generate_trace(150, seed=5)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(request.to_json() + "\n" for request in trace), encoding="utf-8")
    finished = kvdepot(
        *("replay", str(path), "--schedulers", "1", "--one-by-one", "--layout", "layer"),
        *("--block-size", str(TRACE_BLOCK_SIZE), "--num-blocks", "121", "--json"),
        *(() if decode else ("--no-decode",)),
    )
    assert finished.status == 0, finished.errors
    report = finished.json
    num_output = computed_output if decode else lambda request: 0
    assert report["hit_trace_blocks"] == lru_hits(trace, 120, num_output)
    assert report["trace_blocks"] == sum(len(request.hash_ids) for request in trace)
    assert report["preemptions"] == report["refusals"] == 0


def test_wrong_bytes_are_caught_and_named(tmp_path: Path) -> None:
    options = ("--requests", "40", "--unary-every", "4", "--json")
    with serving("--mapping-dir", str(tmp_path), "--capacity-tokens", "200000") as target:
        arguments = ("replay", "--server", target, *options)
        assert kvdepot(*arguments).status == 0
        # All is cached now, and the second replay hits it: what somebody scribbled over.
        with Client(target) as client:
            description = client.describe_pool()
        with open(description.mapping_path, "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
            page = description.groups[0].spec.page_size_bytes
            for start in range(page - 8, len(mapping), page):
                mapping[start] ^= 1
            mapping.close()
        finished = kvdepot(*arguments)
        assert finished.status == 1
        assert finished.json["ok"] is False
        scheduler, peer = (
            [failure for failure in finished.json["failures"] if failure.startswith(start)]
            for start in ("request", "pulled")
        )
        assert scheduler + peer == finished.json["failures"]
        for failure in scheduler:
            assert "a hit holds other bytes than its prefix demands" in failure
            assert all(word in failure for word in ("trace-", "block ", "hash "))
        assert scheduler or peer
        assert "WRONG" in finished.errors
        # Only bytes were wrong; the books are in order.
        assert kvdepot("audit", "--server", target).status == 0


def test_others_may_use_the_server_too(tmp_path: Path) -> None:
    with serving("--mapping-dir", str(tmp_path), "--capacity-tokens", "200000") as target:
        with Client(target) as client, client.open_session("another") as session:
            slots = SlotRequest("a", Content(range(1000)), lookup=True)
            assert session.allocate_slots(slots).outcome is Outcome.OK
            session.free("a")  # cached, and no worker ever wrote it
        finished = kvdepot("replay", "--server", target, "--requests", "30", "--json")
        assert finished.status == 0, finished.errors
        assert finished.json["blocks_pulled"] > 0


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        pytest.param("KVDEPOT_IMPORT_PART_BLOCKS", True, id="how bytes move"),
        pytest.param("KVDEPOT_LISTEN", False, id="where it listens"),
    ],
)
def test_which_variables_own_servers_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_taken: bool
) -> None:
    monkeypatch.setenv("KVDEPOT_MAPPING_DIR", str(tmp_path))
    monkeypatch.setenv(name, "neither a number nor an address")
    options = ["--model", "tiny", "--num-blocks", "9"]
    if is_taken:
        with pytest.raises(ReplayError), own_server(options):
            pass
        return
    with own_server(options) as target, Client(target) as client:
        assert client.describe_pool().num_blocks == 9


def test_a_follower_that_cannot_begin_says_why(tmp_path: Path) -> None:
    options = ("--mapping-dir", str(tmp_path), "--capacity-tokens", "60000")
    with serving(*options) as target:
        wire = Wire(target, connections_max=1)  # the process that follows finds nobody
        finished = kvdepot("replay", "--server", wire.target, "--requests", "3")
        wire.close()
    assert finished.status == 1
    assert "Error: peer: failed to connect" in finished.errors


def test_schedulers_go_on_after_the_server_was_killed(tmp_path: Path) -> None:
    options = ("--mapping-dir", str(tmp_path), "--capacity-tokens", "60000")
    arguments = ("replay", "--requests", "120", "--reopen", "--lease-ttl-seconds", "120", "--json")
    with ThreadPoolExecutor() as threads:
        with server(*options) as (process, target):
            replay = threads.submit(kvdepot, *arguments, "--server", target)
            with Client(target) as client:
                while client.stats().prefix_cache_queries < 20_000:
                    time.sleep(0.02)
                    assert not replay.done(), replay.result().errors
            process.kill()
        with server(*options, "--listen", target):
            finished = replay.result()
    assert finished.status == 0, finished.errors
    report = finished.json
    assert report["failures"] == []
    assert report["requests"] == 120
    assert report["sessions_reopened"] >= 1
    assert report["requests_readmitted"] > 0
    assert report["blocks_verified"] > 0
    assert report["mirror_equal"] is True
    assert report["event_stream_resumed"] > 0


@pytest.mark.parametrize(
    ("model", "hits"),
    [
        pytest.param("gemma-like", (0.1, 0.9), id="windows"),
        pytest.param("mamba-hybrid", (0.1, 0.9), id="states"),
    ],
)
def test_groups_of_several_kinds_are_right_byte_for_byte(
    model: str, hits: tuple[float, float]
) -> None:
    options = ("--requests", "40", "--capacity-tokens", "6000", "--json")
    finished = kvdepot("replay", "--model", model, *options)
    assert finished.status == 0, finished.errors
    report = finished.json
    assert report["mirror_equal"] is True
    assert hits[0] < report["hit_rate_tokens"] < hits[1]
    for name in (
        *("blocks_verified", "blocks_in_windows", "blocks_reread", "blocks_pulled"),
        *("evictions", "refusals"),
    ):
        assert report[name] > 0, name


CONFIGS = {
    "states-at-steps, zeroed where poisoned": """
poison: true
groups:
  - {kind: full_attention, layer_names: [a], block_size: 16, num_kv_heads: 1, head_size: 16}
  - kind: mamba
    layer_names: [b]
    block_size: 16
    shapes: [[8, 16]]
    dtypes: [float32]
    page_size_padded: 1024
    mamba_cache_mode: align
""",
    "chunks, poisoned": """
poison: true
layout: layer
groups:
  - {kind: full_attention, layer_names: [a, b], block_size: 16, num_kv_heads: 1, head_size: 16}
  - kind: chunked_local_attention
    layer_names: [c, d]
    block_size: 16
    num_kv_heads: 1
    head_size: 16
    attention_chunk_size: 256
""",
    "block-sizes-and-compression": """
groups:
  - {kind: mla_attention, layer_names: [a], block_size: 64, num_kv_heads: 1, head_size: 64,
     compress_ratio: 4}
  - {kind: sliding_window, layer_names: [b], block_size: 32, num_kv_heads: 1, head_size: 16,
     head_size_v: 32, sliding_window: 200}
""",
    "a-window-of-what-is-generated": """
prefix-cache-retention-interval: null
groups:
  - {kind: rswa, layer_names: [a], block_size: 16, num_kv_heads: 1, head_size: 16, rswa_window: 20}
""",
    "few-windows-kept, poisoned": """
poison: true
prefix-cache-retention-interval: 512
use-eagle: true
groups:
  - {kind: full_attention, layer_names: [a], block_size: 16, num_kv_heads: 1, head_size: 16}
  - {kind: sliding_window, layer_names: [b], block_size: 16, num_kv_heads: 1, head_size: 16,
     sliding_window: 100}
""",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_groups_of_ones_own(tmp_path: Path, config: str) -> None:
    path = tmp_path / "kvdepot.yaml"
    path.write_text("model: mine\n" + CONFIGS[config], encoding="utf-8")
    finished = kvdepot(
        *("replay", "--config", str(path), "--requests", "24", "--json"),
        *("--capacity-tokens", "20000", "--token-budget", "2048"),
    )
    assert finished.status == 0, finished.errors
    report = finished.json
    assert report["mirror_equal"] is True
    for name in ("hit_tokens", "blocks_verified", "blocks_reread", "blocks_pulled"):
        assert report[name] > 0, name
    assert report["blocks_in_windows"] > 0


def test_the_demo_says_what_one_saw() -> None:
    finished = kvdepot("demo", "--requests", "30")
    assert finished.status == 0, finished.errors
    for words in ("all right", "GetComputedBlocks", "30 chat turns", "it equals the server's"):
        assert words in " ".join(finished.output.split())


def test_the_demo_of_prefill_and_decode() -> None:
    finished = kvdepot("demo", "pd", "--requests", "6", "--path", "grpc", "--json")
    assert finished.status == 0, finished.errors
    report = finished.json
    assert report["ok"] is True
    assert report["requests"] == 6
    assert set(report["imports_by_path"]) == {"grpc"}
    # What is left to compute is the end of each prompt.
    assert 6 <= report["prompt_tokens_computed"] <= 6 * 16
    assert report["imported_tokens"] > 0
    assert report["hit_tokens"] + report["imported_tokens"] < report["prompt_tokens"]
    assert (report["prompts_released"], report["prompts_overdue"]) == (6, 0)
    assert report["blocks_verified"] >= report["blocks_imported"] > 0
    assert report["wrong_bytes"] == 0
    assert report["audit_violations"] == {"prefill": 0, "decode": 0}
    assert {"prefill", "import", "compute", "first token"} <= set(report["first_token_ms"])


def test_options_of_one_demo_are_not_those_of_another() -> None:
    finished = kvdepot("demo", "--requests", "6", "pd")
    assert finished.status == 2
    assert "put --requests behind pd" in finished.errors


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the real trace is not here")
def test_the_real_trace_hits_what_the_real_manager_hits() -> None:
    trace = read_trace(str(REAL_TRACE))
    assert lru_hits(trace, 5859, computed_output) == 39_780
    finished = kvdepot(
        *("replay", str(REAL_TRACE), "--schedulers", "1", "--one-by-one", "--json"),
        *("--block-size", "512", "--num-blocks", "5860"),
        timeout_seconds=1400,
    )
    assert finished.status == 0, finished.errors
    report = finished.json
    assert report["trace_blocks"] == 288_500
    assert report["hit_rate_blocks"] == pytest.approx(0.1379, abs=0.001)
    assert report["blocks_verified"] == report["hit_trace_blocks"]
    assert report["mirror_equal"] is True


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the real trace is not here")
def test_two_schedulers_on_the_real_trace() -> None:
    finished = kvdepot(
        *("replay", str(REAL_TRACE), "--limit", "300", "--capacity-tokens", "600000", "--json"),
        timeout_seconds=800,
    )
    assert finished.status == 0, finished.errors
    assert finished.json["mirror_equal"] is True
    assert finished.json["blocks_verified"] > 0
