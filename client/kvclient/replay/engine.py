"""A scheduler with its worker that runs a request at a time, by the five calls.

What prefill and decode have in common. No steps are in flight: what a call gave slots is
written before the next call, which therefore confirms it.
"""

from __future__ import annotations

from contextlib import suppress

from kvclient.client import Client
from kvclient.errors import KVDepotError
from kvclient.pool import map_pool
from kvclient.replay.errors import ReplayError
from kvclient.replay.job import Job
from kvclient.replay.rows import group_rows
from kvclient.replay.worker import StepWork, Worker
from kvclient.tables import RequestTables
from kvclient.values import Content, FreeMode, Outcome, SlotRequest, SlotResult

TOKEN_BUDGET = 8192
"""New tokens in one call."""


class Engine:
    """One session and one attached worker, on one server."""

    def __init__(self, client: Client, name: str, *, lease_ttl_s: float | None = None) -> None:
        self.session = client.open_session(name, lease_ttl_s=lease_ttl_s)
        session = self.session
        self._attachment = client.attach_worker(session.session_id, session.epoch, name)
        self.worker = Worker(map_pool(session.pool, self._attachment), attachment=self._attachment)
        self._rows = group_rows(session.pool)

    def look_up(self, job: Job) -> int:
        """Introduce the request, unless it is known; the tokens that are here."""
        content = None
        if not job.introduced:
            prompt = job.tokens_between(0, job.num_known)
            content = Content(prompt, num_prompt_tokens=job.request.input_length)
        hit = self.session.get_computed_blocks(job.request_id, content)
        job.introduced = True
        return hit.num_computed_tokens

    def admit(self, job: Job, num_hit: int, num_elsewhere: int = 0) -> int:
        """Slots behind a hit; how long that is by now.

        If more than the hit is computed elsewhere, ``num_elsewhere`` tokens, for those;
        they are not registered before they are confirmed. Else for the tokens to compute.
        """
        while True:
            num_external = max(0, num_elsewhere - num_hit)
            num_new = 0 if num_external else min(job.num_known - num_hit, TOKEN_BUDGET)
            slots = self.session.allocate_slots(
                SlotRequest(
                    job.request_id,
                    num_new_computed_tokens=num_hit,
                    num_new_tokens=num_new,
                    num_external_computed_tokens=num_external,
                    delay_cache_blocks=num_external > 0,
                )
            )
            if slots.outcome is not Outcome.HIT_CHANGED:
                break
            num_hit = slots.num_new_computed_tokens
        _require_slots(job, slots)
        num_computed = num_hit + num_external
        job.tables = RequestTables(self.session.pool, job.request.input_length)
        job.tables.admit(slots.hit_blocks, slots.new_blocks, num_computed, num_external)
        job.num_computed = num_hit
        if not num_external:
            self.read(job)
            self._write(job, num_new)
        return num_hit

    def read(self, job: Job) -> None:
        """Check every byte that the next token looks at. Raises WrongBytes."""
        if job.num_computed:
            hits = [span for rows in self._rows for span in job.reads(rows, job.num_computed)]
            self.worker.execute(StepWork(hits=hits))

    def grow(self, job: Job, count: int, appended: int = 0) -> None:
        """Compute ``count`` more tokens, of which the server does not know ``appended``."""
        known = job.num_known
        content = None
        if appended:
            content = Content(job.tokens_between(known, known + appended), known)
        slots = self.session.allocate_slots(
            SlotRequest(
                job.request_id,
                content,
                num_computed_tokens=job.num_computed,
                num_new_tokens=count,
            )
        )
        _require_slots(job, slots)
        job.num_known += appended
        assert job.tables is not None
        job.tables.skip(job.num_computed)
        job.tables.grow(slots.new_blocks)
        self._write(job, count)

    def finish_prompt(self, job: Job) -> None:
        """Compute what is left of the prompt."""
        while left := job.num_known - job.num_computed:
            self.grow(job, min(left, TOKEN_BUDGET))

    def confirm(self, job: Job) -> None:
        """Its computed tokens are written: register and confirm them."""
        if not self.session.cache_blocks(job.request_id, job.num_computed):
            raise ReplayError(f"{job.request_id} is unknown before it was freed")

    def give_up(self, job: Job) -> None:
        """The blocks are given back; it may be admitted anew."""
        self.session.free(job.request_id, FreeMode.PREEMPT, did_not_run=True)
        job.tables = None
        job.num_computed = 0

    def finish(self, job: Job) -> None:
        """Read all of it once more, confirm and free."""
        spans = [span for rows in self._rows for span in job.reads(rows, job.num_computed)]
        self.worker.execute(StepWork(finished=spans))
        self.confirm(job)
        self.session.free(job.request_id)

    def close(self) -> None:
        """The worker is gone, and the session with all it holds."""
        self._attachment.close()
        with suppress(KVDepotError):  # else its lease ends it
            self.session.close()

    def _write(self, job: Job, count: int) -> None:
        """The bytes of the next ``count`` tokens, once what they look at has been read."""
        start, stop = job.num_computed, job.num_computed + count
        self.worker.execute(
            StepWork(
                windows=[span for rows in self._rows for span in job.window(rows, start, stop)],
                writes=[job.writes(rows, start, stop) for rows in self._rows],
                num_tokens=count,
            )
        )
        job.num_computed = stop


def _require_slots(job: Job, slots: SlotResult) -> None:
    if slots.outcome is not Outcome.OK:
        raise ReplayError(f"{job.request_id} got no slots: {slots.outcome.name} {slots.no_fit}")
