"""Prefill and decode on two servers: what one scheduler of each does.

The prefill scheduler computes a prompt and keeps it until the decode scheduler says that it
has its blocks, or until a deadline of its own. The decode scheduler has its server import
them, into blocks that it allocated for external tokens, and goes on from there. What the
import did not bring it computes itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvclient.client import Client
from kvclient.errors import CacheLost, KVDepotError
from kvclient.imports import ImportResult, TransferPath
from kvclient.replay.engine import TOKEN_BUDGET, Engine
from kvclient.replay.job import Job

_WHOLE_BLOCK = 1 << 20  # a stride ends with its block anyway


@dataclass(frozen=True, slots=True)
class Prefilled:
    """What the prefill scheduler tells of request ``index`` of the trace.

    ``num_tokens`` are confirmed at ``peer``. ``began_at`` is of this host's monotonic clock.
    """

    index: int
    peer: str
    num_tokens: int
    began_at: float
    seconds: float


class Prefiller:
    """Computes prompts, and keeps each for at most ``keep_s``.

    ``peer``: where other servers find this one (default: where the client does).
    """

    def __init__(
        self,
        client: Client,
        *,
        keep_s: float = 30.0,
        lease_ttl_s: float | None = None,
        peer: str = "",
        name: str = "prefill",
    ) -> None:
        self.engine = Engine(client, name, lease_ttl_s=lease_ttl_s)
        self._peer = peer or client.target
        self._keep_s = keep_s
        self._kept: dict[str, float] = {}  # until when, oldest first

    @property
    def num_kept(self) -> int:
        """Prompts that wait for their decoders."""
        return len(self._kept)

    def prefill(self, job: Job) -> Prefilled:
        """Compute a prompt and confirm it."""
        began_at = time.monotonic()
        engine = self.engine
        engine.admit(job, engine.look_up(job))
        engine.finish_prompt(job)
        engine.confirm(job)
        now = time.monotonic()
        self._kept[job.request_id] = now + self._keep_s
        return Prefilled(job.request.index, self._peer, job.num_computed, began_at, now - began_at)

    def release(self, request_id: str) -> bool:
        """The decoder needs it no more. False if it was not kept any longer."""
        if self._kept.pop(request_id, None) is None:
            return False
        self.engine.session.free(request_id)
        return True

    def release_overdue(self) -> int:
        """Free those whose deadline has passed; how many.

        A transfer that still reads their blocks keeps them by its own lease.
        """
        now = time.monotonic()
        overdue = [request_id for request_id, until in self._kept.items() if until <= now]
        for request_id in overdue:
            self.release(request_id)
        return len(overdue)


@dataclass(slots=True)
class Decoded:
    """How one request went. ``seconds`` are by part of the time to its first token."""

    num_prompt_tokens: int
    num_hit_tokens: int = 0
    num_imported_tokens: int = 0
    num_output_tokens: int = 0
    result: ImportResult | None = None
    """Of the import; None: it raised ``error``, or there was none."""
    error: KVDepotError | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class Decoder:
    """Goes on with prompts that others have computed."""

    def __init__(
        self,
        client: Client,
        *,
        paths: Sequence[TransferPath] = (),
        checksums: bool = False,
        deadline_s: float = 10.0,
        lease_ttl_s: float | None = None,
        name: str = "decode",
    ) -> None:
        self.engine = Engine(client, name, lease_ttl_s=lease_ttl_s)
        self._paths = paths
        self._checksums = checksums
        self._deadline_s = deadline_s

    def decode(
        self, job: Job, prefilled: Prefilled, on_imported: Callable[[], None] = lambda: None
    ) -> Decoded:
        """Import the prompt, compute its end, and decode; every byte is read back.

        ``on_imported``: nothing is read from the peer any more. Raises WrongBytes,
        CacheLost, and what else this server answers, but not what becomes of the import.
        """
        engine = self.engine
        done = Decoded(job.request.input_length)
        clock = _Clock(done.seconds)
        num_hit = engine.look_up(job)
        clock.part("lookup")
        size = engine.session.pool.scheduler_block_size
        # The last token is computed here, for its logits.
        num_elsewhere = min(prefilled.num_tokens, job.num_known - 1) // size * size
        if num_elsewhere <= num_hit:
            on_imported()
            done.num_hit_tokens = engine.admit(job, num_hit)
        else:
            done.num_hit_tokens = engine.admit(job, num_hit, num_elsewhere)
            clock.part("allocate")
            self._import(job, prefilled.peer, done)
            clock.part("import")
            on_imported()
            if job.num_computed:
                engine.confirm(job)
                clock.part("confirm")
                engine.read(job)
                clock.part("check")
            else:
                # No part of it can be gone on with: as a request that nobody prefilled.
                engine.give_up(job)
                done.num_hit_tokens = engine.admit(job, engine.look_up(job))
        engine.finish_prompt(job)
        clock.part("compute")
        block_size = math.gcd(*engine.session.pool.table_block_sizes)
        while job.num_computed < job.num_final:
            count, appended = job.growth(TOKEN_BUDGET, _WHOLE_BLOCK, block_size)
            engine.grow(job, count, appended)
            done.num_output_tokens += appended
        engine.finish(job)
        return done

    def _import(self, job: Job, peer: str, done: Decoded) -> None:
        """Leaves ``job.num_computed`` where the request can go on."""
        running = self.engine.session.import_blocks(
            job.request_id,
            peer,
            paths=self._paths,
            checksums=self._checksums,
            deadline_s=self._deadline_s,
        )
        job.num_computed = 0
        try:
            with running:
                done.result = running.result()
        except CacheLost:
            raise
        except KVDepotError as error:
            done.error = error
        else:
            job.num_computed = done.result.num_tokens
            done.num_hit_tokens = min(done.num_hit_tokens, job.num_computed)
            done.num_imported_tokens = job.num_computed - done.num_hit_tokens


class _Clock:
    """Takes the time of consecutive parts."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def part(self, name: str) -> None:
        """What went by since the last part."""
        now = time.monotonic()
        self._seconds[name] = now - self._last
        self._last = now
