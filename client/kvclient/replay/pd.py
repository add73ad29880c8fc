"""Prefill on one server, decode on another: a scheduler each, in processes of their own.

The two schedulers talk over a pipe: what is prefilled one way, what is imported the other.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from kvclient.client import Client
from kvclient.errors import KVDepotError
from kvclient.imports import TransferPath
from kvclient.replay.errors import ReplayError, WrongBytes
from kvclient.replay.handover import Decoder, Prefiller
from kvclient.replay.job import make_job
from kvclient.replay.pd_report import DecodeTally, PDReport, PrefillTally
from kvclient.replay.settings import ReplaySettings

_END_SECONDS = 120.0
_NIXL_SECONDS = 30.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PDSettings:
    """What a run does; ``paths`` are those allowed, none: all."""

    num_requests: int = 32
    seed: int = 0
    paths: tuple[TransferPath, ...] = ()
    checksums: bool = False
    deadline_s: float = 10.0
    keep_s: float = 30.0
    """How long the prefill scheduler keeps a prompt that nobody asks for."""
    num_kept_max: int = 2
    """Prompts that it keeps at a time."""

    @property
    def workload(self) -> ReplaySettings:
        """Chats, as the other replays have them."""
        return ReplaySettings(num_requests=self.num_requests, seed=self.seed)


def prefill_process(
    result: Connection[Any, Any], channel: Connection[Any, Any], target: str, settings: PDSettings
) -> None:
    """Prefills every request; at last sends None to the decoder, and its tally."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run stops its processes itself
    tally = PrefillTally()
    try:
        with Client(target) as client:
            prefiller = Prefiller(client, keep_s=settings.keep_s)
            try:
                for request in settings.workload.load_trace():
                    _hear(channel, prefiller, tally, settings.num_kept_max - 1)
                    channel.send(prefiller.prefill(make_job(request, settings.workload)))
                    tally.requests += 1
                channel.send(None)
                _hear(channel, prefiller, tally, 0)
            finally:
                tally.tokens_written = prefiller.engine.worker.tokens_written
                prefiller.engine.close()
    except (KVDepotError, ReplayError, WrongBytes) as error:
        tally.failures.append(f"prefill: {error}")
    except (EOFError, OSError):
        tally.failures.append("prefill: the decode scheduler is gone")
    channel.close()
    result.send(tally)


def _hear(
    channel: Connection[Any, Any], prefiller: Prefiller, tally: PrefillTally, num_kept: int
) -> None:
    """Release what the decoder has, or nobody asks for, until so few are kept."""
    # When none is kept, nothing is to be heard but the other's end, which is no failure then.
    while prefiller.num_kept > num_kept or (prefiller.num_kept and channel.poll()):
        if channel.poll(_POLL_SECONDS):
            tally.released += prefiller.release(channel.recv())
        tally.overdue += prefiller.release_overdue()


def decode_process(
    result: Connection[Any, Any], channel: Connection[Any, Any], target: str, settings: PDSettings
) -> None:
    """Decodes what the prefill scheduler hands over, until it sends None; then its tally.

    Sends ``result`` the number of requests done, now and then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tally = DecodeTally()
    try:
        requests = settings.workload.load_trace()
        with Client(target) as client:
            decoder = Decoder(
                client,
                paths=settings.paths,
                checksums=settings.checksums,
                deadline_s=settings.deadline_s,
            )
            worker = decoder.engine.worker
            try:
                while (prefilled := channel.recv()) is not None:
                    arrived_at = time.monotonic()
                    job = make_job(requests[prefilled.index], settings.workload)
                    imported = partial(channel.send, job.request_id)
                    done = decoder.decode(job, prefilled, imported)
                    tally.add(done, prefilled, arrived_at)
                    result.send(tally.requests)
                worker.check_null_block()
            finally:
                tally.tokens_written = worker.tokens_written
                tally.blocks_verified = worker.blocks_verified + worker.blocks_in_windows
                tally.blocks_reread = worker.blocks_reread
                decoder.engine.close()
    except WrongBytes as wrong:
        tally.wrong_bytes += 1
        tally.failures.append(f"decode: {wrong}")
    except (KVDepotError, ReplayError) as error:
        tally.failures.append(f"decode: {error}")
    except (EOFError, OSError):
        tally.failures.append("decode: the prefill scheduler is gone")
    channel.close()
    result.send(tally)


def run(
    targets: Sequence[str], settings: PDSettings, on_progress: Callable[[int], None]
) -> PDReport:
    """Prefill on the first server, decode on the second.

    ReplayError, or what the client raises, if it cannot be run.
    """
    prefill_target, decode_target = targets
    if TransferPath.NIXL in settings.paths:
        _require_nixl(targets)
    context = multiprocessing.get_context("spawn")
    one_end, other_end = context.Pipe()
    processes: list[BaseProcess] = []

    def start(work: Callable[..., None], *arguments: object) -> Connection[Any, Any]:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        return ours

    began = time.monotonic()
    try:
        prefilling = start(prefill_process, one_end, prefill_target, settings)
        decoding = start(decode_process, other_end, decode_target, settings)
        one_end.close()
        other_end.close()
        while isinstance(said := _receive(decoding), int):
            on_progress(said)
        seconds = time.monotonic() - began
        prefill = _receive(prefilling)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
    assert isinstance(said, DecodeTally)
    assert isinstance(prefill, PrefillTally)
    violations, left = {}, {}
    for side, target in (("prefill", prefill_target), ("decode", decode_target)):
        with Client(target) as client:
            violations[side] = list(client.audit().violations)
            left[side] = held(client)
    return PDReport(seconds, prefill, said, violations, left)


def held(client: Client) -> str:
    """Blocks that a server still keeps for somebody, and what for; empty if none."""
    stats = client.stats()
    blocks = stats.blocks
    counts = {
        "live blocks": blocks.live,
        "pinned blocks": blocks.pinned,
        "blocks in transfer": blocks.in_transfer,
        "quarantined blocks": blocks.quarantined,
        "transfers": stats.num_transfers,
        "imports": stats.num_imports,
    }
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _receive(end: Connection[Any, Any]) -> Any:
    try:
        if end.poll(_END_SECONDS):
            return end.recv()
    except EOFError:
        pass
    raise ReplayError("a process of the run ended without a result; see its message above")


def _require_nixl(targets: Sequence[str]) -> None:
    """Wait until both servers offer it: their agents are made once they serve."""
    until = time.monotonic() + _NIXL_SECONDS
    for target in targets:
        with Client(target) as client:
            while True:
                opened = client.open_transfer({0: []})
                client.close_transfer(opened.transfer_id)
                if opened.reach.nixl_agent:
                    break
                if time.monotonic() > until:
                    raise ReplayError(
                        "the servers offer no NIXL: pip install 'kvdepot[nixl]', on Linux"
                    )
                time.sleep(_POLL_SECONDS)
