"""PullBlocks against a copy of the same bytes in memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random
from time import perf_counter

from benchmarks.pairs import Row, Samples, Settings, compare
from benchmarks.workloads import BLOCK_SIZE, VOCABULARY
from kvclient import Client
from kvclient.replay.server import own_server
from kvclient.values import SlotRequest
from kvcore.hashing import ExtraKeys, make_scheme

MODEL = "qwen2-0.5b"
NUM_BLOCKS = 256
NUM_SAMPLES = 4


def rows(settings: Settings) -> Iterator[Row]:
    """The row, once measured."""
    tokens = array("I", Random(0).choices(range(VOCABULARY), k=NUM_BLOCKS * BLOCK_SIZE)).tobytes()
    chain = make_scheme("kvd_sha256", "0").chain(BLOCK_SIZE, ExtraKeys())
    chain.extend(tokens, NUM_BLOCKS * BLOCK_SIZE)
    options = ["--model", MODEL, "--block-size", str(BLOCK_SIZE), "--num-blocks", "512"]
    with own_server(options) as target, Client(target) as client, client.open_session() as session:
        session.get_computed_blocks("r", tokens)
        session.allocate_slots(SlotRequest("r", num_new_tokens=NUM_BLOCKS * BLOCK_SIZE))
        session.cache_blocks("r", NUM_BLOCKS * BLOCK_SIZE)
        num_bytes = sum(len(block.data or b"") for block in client.pull_blocks(chain.hashes))
        source = bytearray(num_bytes)
        assert num_bytes

        def pull() -> list[Samples]:
            samples = []
            for _ in range(NUM_SAMPLES):
                began = perf_counter()
                for _ in client.pull_blocks(chain.hashes):
                    pass
                samples.append(perf_counter() - began)
            return [samples]

        def copy() -> list[Samples]:
            samples = []
            for _ in range(NUM_SAMPLES):
                began = perf_counter()
                bytes(source)
                samples.append(perf_counter() - began)
            return [samples]

        yield from compare(
            [f"pull: {num_bytes >> 20} MiB by PullBlocks (memcpy)"],
            pull,
            copy,
            settings,
            unit="ms",
        )
