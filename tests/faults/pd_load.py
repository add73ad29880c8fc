"""One side of a prefill/decode pair in a process: ``python pd_load.py PROGRAM ...``.

prefill TARGET NUM_TOKENS LEASE_S           computes a prompt, says so, and keeps it
decode TARGET PEER NUM_TOKENS LEASE_S PATH  imports that prompt, and says how it went
"""

from __future__ import annotations

import json
import sys
import time

from kvclient import Client
from kvclient.errors import CacheLost
from kvclient.imports import TransferPath
from kvclient.replay.handover import Decoder, Prefilled, Prefiller
from kvclient.replay.job import Job, make_job
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.trace import TRACE_BLOCK_SIZE, TraceRequest

OUTPUT_TOKENS = 20


def prompt(num_tokens: int, number: int = 0) -> Job:
    """A request; those of another number have another prompt, but for its first 512 tokens."""
    tail = [1000 * number + place for place in range(1, -(-num_tokens // TRACE_BLOCK_SIZE))]
    request = TraceRequest(number, 0, num_tokens, OUTPUT_TOKENS, (0, *tail))
    return make_job(request, ReplaySettings())


def handed(job: Job, peer: str) -> Prefilled:
    """What a prefill scheduler would tell of it."""
    return Prefilled(job.request.index, peer, job.request.input_length, time.monotonic(), 0.0)


def prefill(target: str, num_tokens: str, lease_s: str) -> None:
    """Computes and waits for its end."""
    with Client(target) as client:
        prefiller = Prefiller(client, lease_ttl_s=float(lease_s))
        prefiller.prefill(prompt(int(num_tokens)))
        print(json.dumps({"prefilled": num_tokens}), flush=True)
        time.sleep(600)


def decode(target: str, peer: str, num_tokens: str, lease_s: str, path: str) -> None:
    """Decodes one prompt."""
    with Client(target) as client:
        decoder = Decoder(
            client, lease_ttl_s=float(lease_s), deadline_s=60.0, paths=[TransferPath[path]]
        )
        job = prompt(int(num_tokens))
        try:
            done = decoder.decode(job, handed(job, peer))
        except CacheLost as lost:
            print(json.dumps({"lost": lost.reason}), flush=True)
            return
        decoder.engine.close()
        print(json.dumps({"imported": done.num_imported_tokens}), flush=True)


if __name__ == "__main__":
    {"prefill": prefill, "decode": decode}[sys.argv[1]](*sys.argv[2:])
