"""A scheduler's loop: continuous batching with chunked prefill, decode and preemption.

It does as an engine's scheduler does, one Step a scheduler step: free what finished, grow
what runs, admit what waits; a refusal to grow preempts the request admitted last. Every few
requests one is admitted, prefilled, confirmed and freed by unary calls instead, so that
those are exercised and timed as well.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvclient.replay.calls import TimedCalls
from kvclient.replay.errors import ReplayError
from kvclient.replay.job import Job, aligned, make_job
from kvclient.replay.pipeline import Pipeline
from kvclient.replay.rows import group_rows
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.tally import Tally
from kvclient.replay.trace import TRACE_BLOCK_SIZE, TraceRequest
from kvclient.replay.worker import Worker
from kvclient.session import Session
from kvclient.tables import RequestTables
from kvclient.values import (
    Content,
    Free,
    FreeMode,
    Grow,
    OperationKind,
    Outcome,
    SlotRequest,
    SlotResult,
    Step,
)

_ADMISSIONS_MAX = 16  # in one Step
_IDLE_SECONDS = 0.002  # before a pool that others filled is asked again


class Scheduler:
    """Runs requests over one session, with a worker (None: no bytes)."""

    def __init__(
        self,
        session: Session,
        worker: Worker | None,
        requests: Iterator[TraceRequest],
        settings: ReplaySettings,
        tally: Tally,
    ) -> None:
        self.running: list[Job] = []
        self._calls = TimedCalls(session, tally)
        self._pipeline = Pipeline(worker, settings.steps_in_flight)
        self._requests = requests
        self._settings = settings
        self._tally = tally
        pool = session.pool
        self._pool = pool
        self._rows = [] if worker is None else group_rows(pool)
        # No step of decoding crosses a boundary of any group.
        self._block_size = math.gcd(*pool.table_block_sizes)
        # Mamba states that are kept where a step ends: steps end where hits can.
        self._alignment = (
            pool.scheduler_block_size
            if any(group.spec.mamba_cache_mode == "align" for group in pool.groups)
            else 0
        )
        self._rng = random.Random(settings.seed)
        self._waiting: deque[Job] = deque()
        self._finished: list[Job] = []  # in the last step, by Steps
        self._finished_unary: list[Job] = []

    def run(self, on_step: Callable[[], bool]) -> None:
        """Everything, to the end; stops early once ``on_step`` answers False.

        Raises WrongBytes, ReplayError, and what the client raises.
        """
        while self._fill() or self.running or self._finished or self._finished_unary:
            if not on_step():
                return
            self.step()
        self._pipeline.drain()
        self._calls.close()

    def move_to(self, session: Session, worker: Worker | None) -> None:
        """Go on over another session: what is not finished is admitted anew from its tokens.

        Steps in flight are given up; what they would have written is computed again.
        """
        self._calls.close()
        self._calls = TimedCalls(session, self._tally)
        self._pipeline = Pipeline(worker, self._settings.steps_in_flight)
        # These were done but for their freeing.
        self._finished.clear()
        self._finished_unary.clear()
        self._tally.reopened += 1
        self._tally.readmitted += len(self.running)
        self._waiting.extendleft(reversed(self.running))
        self.running = []
        for job in self._waiting:
            job.lose()

    def step(self) -> None:
        """One scheduler step."""
        pipeline = self._pipeline
        pipeline.begin_step(drained=bool(self._finished_unary))
        self._tally.steps += 1
        for job in self._finished_unary:
            self._end_unary(job)
        self._finished_unary.clear()

        budget, refused = self._grow_and_admit(self._settings.token_budget)
        budget = self._prefill_unary(budget)
        if not refused:
            self._admit_unary(budget)
        self._collect_finished()
        pipeline.end_step()
        if not (pipeline.work.num_tokens or self.running):
            # Others hold the pool: let them go on, and meet them in another order.
            time.sleep(_IDLE_SECONDS * (1 + self._rng.random()))

    # --- by Steps ---------------------------------------------------------------------

    def _grow_and_admit(self, budget: int) -> tuple[int, bool]:
        """Frees, growth and admissions in one Step, and more while growth is refused.

        Answers the budget left, and whether something was refused.
        """
        frees = [(job, FreeMode.FINISH) for job in self._finished]
        self._finished = []
        plan = self._growth_plan(budget)
        admit = self._candidates(budget - sum(count for _, count, _ in plan))
        refused = False
        while frees or plan or admit:
            num_grown, spent, ok = self._call(frees, plan, admit, budget)
            budget -= spent
            refused = refused or not ok
            frees, admit, plan = [], [], plan[num_grown:]
            if plan:  # the first of them was refused
                victim = self.running.pop()
                plan = [item for item in plan if item[0] is not victim]
                self._preempted(victim)
                if victim.unary:
                    self._calls.free(victim.request_id, FreeMode.PREEMPT, self._pipeline.mark)
                else:
                    frees = [(victim, FreeMode.PREEMPT)]
        return budget, refused

    def _growth_plan(self, budget: int) -> list[tuple[Job, int, int]]:
        """Job, tokens to compute and tokens new to the server, in order of admission."""
        plan = []
        for job in self.running:
            if job.prefills_by_calls or budget <= 0:
                continue
            count, appended = job.growth(
                budget, self._settings.decode_stride, self._block_size, self._alignment
            )
            if count:
                plan.append((job, count, appended))
                budget -= count
        return plan

    def _candidates(self, budget: int) -> list[Job]:
        """Waiting jobs that the budget may reach, were nothing of them cached.

        None while one admitted before them still waits for its share of the budget.
        """
        jobs: list[Job] = []
        if any(job.prefills_by_calls for job in self.running):
            return jobs
        room = min(self._settings.max_running - len(self.running), _ADMISSIONS_MAX)
        for job in self._waiting:
            if len(jobs) >= room or budget <= 0 or job.unary:
                break
            jobs.append(job)
            budget -= job.num_known
        return jobs

    def _call(
        self,
        frees: list[tuple[Job, FreeMode]],
        plan: list[tuple[Job, int, int]],
        admit: list[Job],
        budget: int,
    ) -> tuple[int, int, bool]:
        """One Step. Answers how many of the plan grew, tokens spent, and whether all fitted."""
        runs = (
            (OperationKind.FREE, len(frees)),
            (OperationKind.GROW, len(plan)),
            (OperationKind.ADMIT, len(admit)),
        )
        step = Step(
            runs=[run for run in runs if run[1]],
            token_budget=budget,
            free=Free(
                [job.handle for job, _ in frees],
                [mode for _, mode in frees],
                [mode is FreeMode.PREEMPT for _, mode in frees],
            ),
            grow=_grow_columns(plan),
            admissions=[self._admission(job, bool(self.running)) for job in admit],
        )
        result = self._calls.step(step, self._pipeline.mark)
        if result.errors or any(outcome != Outcome.OK for outcome in result.free_outcomes):
            raise ReplayError(f"a Step broke a rule: {result.errors or result.free_outcomes!r}")

        ok = True
        num_grown = spent = 0
        outcomes = result.grow.outcomes or bytes([Outcome.OK]) * len(plan)
        groups = [result.grow.new_blocks(group) for group in range(len(self._pool.groups))]
        for index, ((job, count, appended), outcome) in enumerate(zip(plan, outcomes, strict=True)):
            if outcome != Outcome.OK:
                ok = False
                self._tally.refusals += outcome == Outcome.NO_FIT
                if outcome not in (Outcome.NO_FIT, Outcome.NOT_ATTEMPTED):
                    raise ReplayError(f"{job.request_id} cannot grow: {Outcome(outcome).name}")
                continue
            num_grown += 1
            job.num_known += appended
            self._computed(job, count, [blocks[index] for blocks in groups])
            spent += count
        for job, answer in zip(admit, result.admissions, strict=True):
            if self._admitted(job, answer):
                spent += answer.num_new_tokens
            else:
                ok = ok and answer.outcome == Outcome.NO_BUDGET
        return num_grown, spent, ok

    # --- by unary calls ---------------------------------------------------------------

    def _prefill_unary(self, budget: int) -> int:
        """Chunks by AllocateSlots; a refused request is preempted itself."""
        mark = self._pipeline.mark
        for job in [job for job in self.running if job.prefills_by_calls]:
            if budget <= 0:
                break
            count, _ = job.growth(budget, 1, self._block_size, self._alignment)
            if not count:
                break
            result = self._calls.allocate_slots(
                SlotRequest(
                    job.request_id, num_computed_tokens=job.num_computed, num_new_tokens=count
                ),
                mark,
            )
            if result.outcome == Outcome.OK:
                self._computed(job, result.num_new_tokens, result.new_blocks)
                budget -= result.num_new_tokens
            else:
                self._tally.refusals += 1
                self.running.remove(job)
                self._preempted(job)
                self._calls.free(job.request_id, FreeMode.PREEMPT, mark)
        return budget

    def _admit_unary(self, budget: int) -> None:
        """GetComputedBlocks and AllocateSlots for the first in line, if it goes that way."""
        job = self._waiting[0] if self._waiting else None
        if (
            job is None
            or not job.unary
            or budget <= 0
            or len(self.running) >= self._settings.max_running
        ):
            return
        mark = self._pipeline.mark
        hit = self._calls.get_computed_blocks(job.request_id, self._content(job), mark)
        job.introduced = True
        claimed = hit.num_computed_tokens
        while True:
            count = aligned(
                claimed, min(job.num_known - claimed, budget), job.num_known, self._alignment
            )
            if not count:
                return
            result = self._calls.allocate_slots(
                SlotRequest(
                    job.request_id,
                    num_new_computed_tokens=claimed,
                    num_new_tokens=count,
                    has_scheduled_reqs=bool(self.running),
                ),
                mark,
            )
            if result.outcome != Outcome.HIT_CHANGED:
                break
            # Another session took blocks of the hit meanwhile; what is left will do.
            self._tally.hits_changed += 1
            claimed = result.num_new_computed_tokens
        self._admitted(job, result)

    def _end_unary(self, job: Job) -> None:
        """Confirm what was written, all of it by now, and free."""
        mark = self._pipeline.mark
        if not self._calls.cache_blocks(job.request_id, job.num_computed, mark):
            raise ReplayError(f"{job.request_id} is unknown before it was freed")
        self._calls.free(job.request_id, FreeMode.FINISH, mark)

    # --- both -------------------------------------------------------------------------

    def _fill(self) -> bool:
        """Bring the next requests of the trace in line; whether anyone waits."""
        while len(self._waiting) < _ADMISSIONS_MAX:
            request = next(self._requests, None)
            if request is None:
                break
            self._waiting.append(make_job(request, self._settings))
        return bool(self._waiting)

    def _content(self, job: Job) -> Content | None:
        """What the server needs to hear before a lookup."""
        if job.introduced:
            # A refused growth may have left tokens there that were not sampled yet.
            return Content(b"", job.num_known) if job.preemptions else None
        return Content(
            job.tokens_between(0, job.num_known), num_prompt_tokens=job.request.input_length
        )

    def _admission(self, job: Job, others_run: bool) -> SlotRequest:
        # A step of its own for what lies behind the last boundary that keeps a state.
        last = self._alignment and job.num_known - job.num_known % self._alignment
        return SlotRequest(
            job.request_id,
            self._content(job),
            lookup=True,
            max_new_tokens=last or None,
            new_tokens_alignment=self._alignment,
            has_scheduled_reqs=others_run,
        )

    def _admitted(self, job: Job, answer: SlotResult) -> bool:
        """Take the answer to an admission in; whether the job runs now."""
        job.introduced = job.introduced or answer.handle != 0
        if answer.outcome != Outcome.OK:
            self._tally.refusals += answer.outcome == Outcome.NO_FIT
            return False
        tally = self._tally
        self._waiting.remove(job)
        self.running.append(job)
        num_hit = answer.num_new_computed_tokens
        if job.preemptions:
            tally.preempted_query_tokens += job.num_known
            tally.preempted_hit_tokens += num_hit
        else:
            tally.query_tokens += job.num_known
            tally.hit_tokens += num_hit
            tally.trace_blocks += len(job.request.hash_ids)
            tally.hit_trace_blocks += num_hit // TRACE_BLOCK_SIZE
        job.handle = answer.handle
        job.tables = RequestTables(self._pool, job.request.input_length)
        job.tables.admit(answer.hit_blocks, answer.new_blocks, num_hit)
        self._zero(answer.new_blocks)
        job.num_computed = num_hit
        for rows in self._rows if num_hit else ():
            self._pipeline.work.hits.extend(job.reads(rows, num_hit))
        self._written(job, answer.num_new_tokens)
        return True

    def _computed(self, job: Job, count: int, new_blocks: Sequence[list[int]]) -> None:
        """``count`` more tokens of a running request are computed in this step."""
        assert job.tables is not None
        start = job.num_computed
        job.tables.skip(start)
        job.tables.grow(new_blocks)
        self._zero(new_blocks)
        for rows in self._rows:
            self._pipeline.work.windows.extend(job.window(rows, start, start + count))
        self._written(job, count)

    def _zero(self, new_blocks: Sequence[list[int]]) -> None:
        """The worker zeroes them where the group needs it."""
        for group, block_ids in enumerate(new_blocks):
            if block_ids and self._pool.groups[group].needs_zeroing:
                self._pipeline.work.new_blocks.append((group, block_ids))

    def _written(self, job: Job, count: int) -> None:
        start, stop = job.num_computed, job.num_computed + count
        work = self._pipeline.work
        work.writes.extend(job.writes(rows, start, stop) for rows in self._rows)
        work.num_tokens += count
        job.num_computed = stop

    def _preempted(self, job: Job) -> None:
        job.tables = None
        job.num_computed = 0
        job.preemptions += 1
        self._tally.preemptions += 1
        self._waiting.appendleft(job)

    def _collect_finished(self) -> None:
        """Jobs that are done with this step; they are freed in the next."""
        done = [job for job in self.running if job.num_computed == job.num_final]
        if not done:
            return
        self.running = [job for job in self.running if job.num_computed < job.num_final]
        for job in done:
            for rows in self._rows:
                self._pipeline.work.finished.extend(job.reads(rows, job.num_final))
            (self._finished_unary if job.unary else self._finished).append(job)
        self._tally.requests += len(done)


def _grow_columns(plan: list[tuple[Job, int, int]]) -> Grow:
    if not plan:
        return Grow()
    appended = any(extra for _, _, extra in plan)
    return Grow(
        handles=[job.handle for job, _, _ in plan],
        num_computed_tokens=[job.num_computed for job, _, _ in plan],
        num_new_tokens=[count for _, count, _ in plan],
        token_offsets=[job.num_known for job, _, _ in plan] if appended else b"",
        token_counts=[extra for _, _, extra in plan] if appended else b"",
        tokens=b"".join(
            job.tokens_between(job.num_known, job.num_known + extra) for job, _, extra in plan
        ),
    )
