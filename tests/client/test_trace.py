"""Reading, generating and spelling out traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvclient.replay.trace import (
    TRACE_BLOCK_SIZE,
    VOCABULARY_SIZE,
    TraceError,
    TraceRequest,
    first_tokens,
    generate_trace,
    output_tokens,
    prompt_tokens,
    read_trace,
)

LINE = {"timestamp": 7, "input_length": 700, "output_length": 5, "hash_ids": [3, 9]}


def write(path: Path, lines: list[str]) -> str:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_reads_plain_and_compressed(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [json.dumps(LINE), "", json.dumps(LINE | {"timestamp": 8})])
    first, second = read_trace(path)
    assert first == TraceRequest(0, 7, 700, 5, (3, 9))
    assert (second.index, second.timestamp_ms) == (1, 8)
    assert read_trace(path, limit=1) == [first]
    assert read_trace(write(tmp_path / "again.jsonl", [first.to_json()])) == [first]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("{", "not JSON", id="not-json"),
        pytest.param("[]", "not an object", id="not-an-object"),
        pytest.param(json.dumps(LINE | {"input_length": 0}), "input_length", id="empty-prompt"),
        pytest.param(json.dumps(LINE | {"input_length": True}), "input_length", id="boolean"),
        pytest.param(json.dumps(LINE | {"output_length": -1}), "output_length", id="negative"),
        pytest.param(json.dumps(LINE | {"timestamp": "0"}), "timestamp", id="text"),
        pytest.param(json.dumps(LINE | {"hash_ids": [1]}), "have 2 hash_ids", id="too-few-ids"),
        pytest.param(json.dumps(LINE | {"hash_ids": [1, -2]}), "from 0", id="negative-id"),
        pytest.param(json.dumps(LINE | {"hash_ids": None}), "must be a list", id="no-ids"),
    ],
)
def test_names_the_bad_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", [json.dumps(LINE), line])
    with pytest.raises(TraceError, match=message) as caught:
        read_trace(path)
    assert f"{path}:2" in str(caught.value)


@pytest.mark.parametrize("count", [1, 512, 513, 700, 703, 999])
def test_first_tokens_are_those_of_prompt_and_answer(count: int) -> None:
    request = TraceRequest(4, 7, 700, 5, (3, 9))
    both = np.concatenate([prompt_tokens(request, 2), output_tokens(request, 2)])
    assert first_tokens(request, count, 2).tolist() == both[:count].tolist()


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"\x1f\x8b broken"])
def test_refuses_a_file_that_is_no_trace(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trace.jsonl.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=r"trace\.jsonl\.gz"):
        read_trace(str(path))


def test_equal_ids_are_equal_tokens() -> None:
    size = TRACE_BLOCK_SIZE
    one = prompt_tokens(TraceRequest(0, 0, 3 * size, 1, (4, 5, 6)))
    other = prompt_tokens(TraceRequest(1, 0, 2 * size + 10, 1, (4, 7, 6)))
    assert one.dtype == np.dtype("<u4")
    assert len(one) == 3 * size and len(other) == 2 * size + 10
    assert (one[:size] == other[:size]).all()
    assert (one[size : 2 * size] == other[size : 2 * size]).mean() < 0.01
    assert (one[2 * size : 2 * size + 10] == other[2 * size :]).all()
    assert one.max() < VOCABULARY_SIZE


def test_outputs_are_a_requests_own_and_repeatable() -> None:
    outputs = [output_tokens(TraceRequest(index, 0, 1, 64, (0,))) for index in (0, 1)]
    assert (outputs[0] != outputs[1]).any()
    assert (outputs[0] == output_tokens(TraceRequest(0, 5, 9, 64, (0,)))).all()
    assert (outputs[0] != output_tokens(TraceRequest(0, 0, 1, 64, (0,)), seed=1)).any()


def test_a_generated_trace_is_chats_over_shared_system_prompts(tmp_path: Path) -> None:
    trace = generate_trace(80, seed=3)
    assert trace == generate_trace(80, seed=3) != generate_trace(80, seed=4)
    assert len(trace) == 80
    assert [request.index for request in trace] == list(range(80))
    assert sorted(trace, key=lambda request: request.timestamp_ms) == trace
    path = write(tmp_path / "generated.jsonl", [request.to_json() for request in trace])
    assert read_trace(path) == trace
    all_ids = [item for request in trace for item in request.hash_ids]
    assert 0.3 < 1 - len(set(all_ids)) / len(all_ids) < 0.9
    # An id names one place in a prompt and one length.
    places = {
        (item, position, min(TRACE_BLOCK_SIZE, request.input_length - position * TRACE_BLOCK_SIZE))
        for request in trace
        for position, item in enumerate(request.hash_ids)
    }
    assert len(places) == len(set(all_ids))
