"""Traces in the Mooncake project's format: read, generated, and turned into tokens.

A JSON line a request: ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and
``hash_ids``, one id per 512 tokens of the prompt, the last of them maybe fewer. Equal ids
mean equal tokens, so equal leading ids mean an equal prefix.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from kvclient.replay.pattern import mix

TRACE_BLOCK_SIZE = 512
VOCABULARY_SIZE = 1 << 17

Tokens = npt.NDArray[np.uint32]

_PROMPT_STREAM = np.uint64(0x5BF0_3635_D1A2_4E6F)
_OUTPUT_STREAM = np.uint64(0xC2B2_AE3D_27D4_EB4F)


class TraceError(ValueError):
    """A trace that cannot be read; the message names the file and line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace; ``index`` is its position there, from 0."""

    index: int
    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def request_id(self) -> str:
        """The name it goes by at the server."""
        return f"trace-{self.index}"

    def to_json(self) -> str:
        """The request's line."""
        return json.dumps(
            {
                "timestamp": self.timestamp_ms,
                "input_length": self.input_length,
                "output_length": self.output_length,
                "hash_ids": self.hash_ids,
            }
        )


def read_trace(path: str, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a ``.jsonl`` or ``.jsonl.gz`` file, at most ``limit``.

    TraceError for a file that cannot be read or a line that is no request.
    """
    requests: list[TraceRequest] = []
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_parse(line, len(requests), f"{path}:{number}"))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read {path}: {error}") from error
    if not requests:
        raise TraceError(f"{path} holds no request")
    return requests


def _open(path: str) -> IO[str]:
    if Path(path).suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def _parse(line: str, index: int, place: str) -> TraceRequest:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{place}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{place}: not an object")
    input_length = _whole(record, "input_length", 1, place)
    hash_ids = record.get("hash_ids")
    if not isinstance(hash_ids, list) or any(
        type(item) is not int or not 0 <= item < 1 << 63 for item in hash_ids
    ):
        raise TraceError(f"{place}: hash_ids must be a list of whole numbers from 0")
    num_blocks = -(-input_length // TRACE_BLOCK_SIZE)
    if len(hash_ids) != num_blocks:
        raise TraceError(
            f"{place}: {input_length} tokens have {num_blocks} hash_ids, got {len(hash_ids)}"
        )
    return TraceRequest(
        index,
        _whole(record, "timestamp", 0, place),
        input_length,
        _whole(record, "output_length", 0, place),
        tuple(hash_ids),
    )


def _whole(record: dict[str, Any], name: str, low: int, place: str) -> int:
    value = record.get(name)
    if type(value) is not int or not low <= value < 1 << 31:
        raise TraceError(f"{place}: {name} must be a whole number from {low}, got {value!r}")
    return value


def prompt_tokens(request: TraceRequest, seed: int = 0) -> Tokens:
    """The prompt, as its ``hash_ids`` determine it."""
    ids = np.array(request.hash_ids, np.uint64)[:, None]
    positions = np.arange(TRACE_BLOCK_SIZE, dtype=np.uint64)
    mixed = mix(mix(ids ^ mix(_PROMPT_STREAM + np.uint64(seed))) + positions)
    return _as_tokens(mixed.reshape(-1)[: request.input_length])


def first_tokens(request: TraceRequest, count: int, seed: int = 0) -> Tokens:
    """The first ``count`` tokens of prompt and answer together, or all if they are fewer."""
    num_prompt = min(count, request.input_length)
    hash_ids = request.hash_ids[: -(-num_prompt // TRACE_BLOCK_SIZE)]
    prompt = prompt_tokens(replace(request, input_length=num_prompt, hash_ids=hash_ids), seed)
    if num_prompt == count:
        return prompt
    return np.concatenate([prompt, output_tokens(request, seed)[: count - num_prompt]])


def output_tokens(request: TraceRequest, seed: int = 0) -> Tokens:
    """The answer: the request's own, shared with no other."""
    start = mix(np.uint64(request.index) ^ mix(_OUTPUT_STREAM + np.uint64(seed)))
    return _as_tokens(mix(start + np.arange(request.output_length, dtype=np.uint64)))


def _as_tokens(mixed: npt.NDArray[np.uint64]) -> Tokens:
    return (mixed % np.uint64(VOCABULARY_SIZE)).astype("<u4")


@dataclass(frozen=True, slots=True)
class ChatShape:
    """What a generated workload looks like; lengths are ranges, in tokens."""

    num_system_prompts: int = 5
    system_length: tuple[int, int] = (600, 2600)
    turns: tuple[int, int] = (1, 6)
    user_length: tuple[int, int] = (40, 700)
    output_length: tuple[int, int] = (20, 160)
    think_ms: tuple[int, int] = (2_000, 20_000)
    start_ms_max: int = 60_000


def generate_trace(
    num_requests: int, seed: int = 0, shape: ChatShape | None = None
) -> list[TraceRequest]:
    """Chats of several turns over a few system prompts, in order of time.

    A turn's prompt is the system prompt, all earlier turns and answers, and the user's
    new words.
    """
    shape = ChatShape() if shape is None else shape
    rng = random.Random(seed)
    systems = [rng.randint(*shape.system_length) for _ in range(shape.num_system_prompts)]
    ids: dict[tuple[object, ...], int] = {}
    turns: list[tuple[int, int, int, tuple[int, ...]]] = []
    chat = 0
    while len(turns) < num_requests:
        turns.extend(_chat(chat, systems, ids, rng, shape))
        chat += 1
    turns.sort(key=lambda turn: turn[0])
    return [TraceRequest(index, *turn) for index, turn in enumerate(turns[:num_requests])]


def _chat(
    chat: int,
    systems: list[int],
    ids: dict[tuple[object, ...], int],
    rng: random.Random,
    shape: ChatShape,
) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
    # The first system prompts are the popular ones.
    system = min(int(rng.expovariate(1.0)), len(systems) - 1)
    now = rng.randint(0, shape.start_ms_max)
    length = systems[system]
    for _ in range(rng.randint(*shape.turns)):
        length += rng.randint(*shape.user_length)
        output = rng.randint(*shape.output_length)
        keys: list[tuple[object, ...]] = []
        for start in range(0, length, TRACE_BLOCK_SIZE):
            end = start + TRACE_BLOCK_SIZE
            if end <= systems[system]:
                keys.append(("system", system, start))
            elif end <= length:
                keys.append(("chat", chat, start))
            else:  # a partial block is other content than the full one it grows into
                keys.append(("tail", chat, length))
        yield now, length, output, tuple(ids.setdefault(key, len(ids)) for key in keys)
        length += output
        now += rng.randint(*shape.think_ms)
