"""Sessions over real gRPC that retry, die, expire and reset at random, against the model."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from judge import Judge, Judged
from kvdepot.v1 import admin_pb2, cache_pb2, transfer_pb2
from manual_clock import ManualClock
from model import Model
from model_state import agree
from serving import TIMEOUT_SECONDS, serving
from traffic import Planned, context_of, plan

BLOCK_SIZE = 2
NUM_BLOCKS = 17
NUM_SESSIONS = 3
MAX_MODEL_LEN = 64
LEASE_SECONDS = 10.0
QUARANTINE_SECONDS = 25.0
RESET_SECONDS = 40.0
REPLY_WINDOW = 4

SEEDS = st.integers(0, (1 << 32) - 1)
WHO = st.integers(0, NUM_SESSIONS - 1)

# The long versions, on a busy machine.
pytestmark = pytest.mark.timeout(900)


class Live:
    """One scheduler, as far as its client knows."""

    def __init__(self, opened: Any, judged: Judged, *, pipelines: bool) -> None:
        self.opened = opened
        self.judged = judged
        self.pipelines = pipelines
        self.sent: list[tuple[str, Any]] = []
        self.workers: list[Any] = []


class Sessions(RuleBasedStateMachine):
    """Every call is judged, and every state compared."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.resources = contextlib.ExitStack()
        directory = self.resources.enter_context(tempfile.TemporaryDirectory())
        self.served = self.resources.enter_context(serving(Path(directory)))(
            clock=self.clock,
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            no_memory=True,
            lease_ttl_seconds=LEASE_SECONDS,
            quarantine_seconds=QUARANTINE_SECONDS,
            reset_deadline_seconds=RESET_SECONDS,
            reply_window=REPLY_WINDOW,
        )
        self.model = Model(
            NUM_BLOCKS,
            BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            quarantine_seconds=QUARANTINE_SECONDS,
            reset_deadline_seconds=RESET_SECONDS,
        )
        self.model.pass_time(self.clock.now)
        self.judge = Judge(self.model)
        self.live: list[Live] = []
        self.gone: list[Live] = []
        for number in range(NUM_SESSIONS):
            self.live.append(self._open(pipelines=number > 0))

    def teardown(self) -> None:
        for live in (*self.live, *self.gone):
            for worker in live.workers:
                worker.cancel()
        self.resources.close()

    # --- rules ------------------------------------------------------------------------

    @rule(who=WHO, seed=SEEDS)
    def calls(self, who: int, seed: int) -> None:
        """Some, of one scheduler."""
        chance = Random(seed)
        for _ in range(chance.randint(1, 4)):
            self._plan_and_send(self.live[who], chance)
            self.nothing_diverges()

    @rule(seed=SEEDS)
    def calls_of_all(self, seed: int) -> None:
        """Of all in turn; the reply to each may be lost, and is asked for again."""
        chance = Random(seed)
        for live in self.live:
            self._plan_and_send(live, chance)
            self.nothing_diverges()
            if chance.random() < 0.3:
                self._send(live, *live.sent[-1])
                self.nothing_diverges()

    @rule(who=WHO, back=st.integers(1, 2 * REPLY_WINDOW))
    def late_duplicate(self, who: int, back: int) -> None:
        """Within the window, or long out of it."""
        live = self.live[who]
        if live.sent:
            self._send(live, *live.sent[-min(back, len(live.sent))])

    @rule(who=WHO, seed=SEEDS)
    def call_out_of_order(self, who: int, seed: int) -> None:
        """One number too early."""
        live = self.live[who]
        planned = plan(Random(seed), self.model, live.judged.session, pipelines=live.pipelines)
        self._send(live, planned.method, self._numbered(live, planned, 1))

    @rule(seed=SEEDS)
    def something_ends(self, seed: int) -> None:
        """A session by its own will, or its scheduler: it calls no more, its workers go on."""
        chance = Random(seed)
        who = chance.randrange(NUM_SESSIONS)
        if chance.random() < 0.5:
            self._do(self.live[who], Planned("CloseSession", cache_pb2.CloseSessionRequest(), None))
        self._replace(who)

    @precondition(lambda self: self.gone)
    @rule(seed=SEEDS)
    def zombie_calls(self, seed: int) -> None:
        """One that was thought dead, was stopped only, or sends what it sent before."""
        chance = Random(seed)
        live = chance.choice(self.gone)
        if live.sent and chance.random() < 0.5:
            self._send(live, *chance.choice(live.sent[-2:]))
        elif live.judged.session in self.model.sessions:
            self._plan_and_send(live, chance)
        else:
            planned = Planned("Free", cache_pb2.FreeRequest(request_id="a", mode=1), None)
            self._send(live, "Free", self._numbered(live, planned, 0))

    @rule(seconds=st.sampled_from((0.1, 1.0, LEASE_SECONDS / 2, LEASE_SECONDS)))
    def time_passes(self, seconds: float) -> None:
        """Those that live renew their leases, mostly."""
        if seconds < LEASE_SECONDS:
            for who in range(NUM_SESSIONS):
                self.keep_alive(who)
        self.served.loop.call(lambda: self.clock.advance(seconds))
        self.model.pass_time(self.clock.now)
        for who, live in enumerate(self.live):
            if live.judged.session not in self.model.sessions:
                self._replace(who)

    @rule(who=WHO)
    def keep_alive(self, who: int) -> None:
        opened = self.live[who].opened
        request = cache_pb2.KeepAliveRequest(session_id=opened.session_id, epoch=opened.epoch)
        answer = self.served.cache.KeepAlive(request, timeout=TIMEOUT_SECONDS)
        self.judge.see("KeepAlive", request, answer)

    @rule(who=WHO)
    def worker_attaches(self, who: int) -> None:
        live = self.live[who]
        if len(live.workers) == 2:
            return
        opened = live.opened
        worker = self.served.transfer.AttachWorker(
            transfer_pb2.AttachWorkerRequest(session_id=opened.session_id, epoch=opened.epoch)
        )
        next(worker)
        live.workers.append(worker)
        live.judged.session.heard_at = self.model.now
        self.model.attach(live.judged.session)

    @precondition(lambda self: any(live.workers for live in (*self.live, *self.gone)))
    @rule(seed=SEEDS)
    def worker_ends(self, seed: int) -> None:
        live = Random(seed).choice([live for live in (*self.live, *self.gone) if live.workers])
        live.workers.pop().cancel()
        self.model.detach(live.judged.session)
        expected = sum(s.workers for s in (*self.model.sessions, *self.model.departed))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while self.served.stats().num_workers != expected and time.monotonic() < deadline:
            time.sleep(0.001)

    @invariant()
    def nothing_diverges(self) -> None:
        audit = self.served.admin.Audit(admin_pb2.AuditRequest(), timeout=TIMEOUT_SECONDS)
        self.judge.check_stats(self.served.stats(), list(audit.violations))
        self._check_lists()

    def _check_lists(self) -> None:
        """ListSessions and ListRequests say who holds what."""
        admin = self.served.admin
        sessions = admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=TIMEOUT_SECONDS)
        requests = admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=TIMEOUT_SECONDS)
        named = {session_id: judged.session for session_id, judged in self.judge.sessions.items()}
        found = {info.session_id: info for info in sessions.sessions}
        expected = [*self.model.sessions, *self.model.departed]
        agree("sessions", [named[session_id] for session_id in found], expected)
        for session_id, info in found.items():
            session = named[session_id]
            agree("departed", info.state == admin_pb2.SESSION_STATE_DEPARTED, session.ended)
            agree("blocks", info.num_blocks, session.num_blocks)
            agree("workers", info.num_workers, session.workers)
        agree(
            "requests",
            [(r.request_id, r.handle, r.num_tokens, r.num_blocks) for r in requests.requests],
            [
                (r.request_id, r.handle, len(r.tokens), len(r.table))
                for r in sorted(
                    (r for s in self.model.sessions for r in s.requests.values()),
                    key=lambda r: r.handle,
                )
            ],
        )

    # --- inside -----------------------------------------------------------------------

    def _open(self, *, pipelines: bool) -> Live:
        reply = self.served.cache.OpenSession(
            cache_pb2.OpenSessionRequest(name="scheduler"), timeout=TIMEOUT_SECONDS
        )
        return Live(reply, self.judge.opened("scheduler", reply), pipelines=pipelines)

    def _replace(self, who: int) -> None:
        old = self.live[who]
        self.gone.append(old)
        self.live[who] = self._open(pipelines=not old.pipelines)

    def _plan_and_send(self, live: Live, chance: Random) -> None:
        self._do(live, plan(chance, self.model, live.judged.session, pipelines=live.pipelines))

    def _do(self, live: Live, planned: Planned) -> None:
        request = self._numbered(live, planned, 0)
        live.sent.append((planned.method, request))
        self._send(live, planned.method, request)

    def _numbered(self, live: Live, planned: Planned, ahead: int) -> Any:
        op_seq = live.judged.expected + ahead
        planned.request.context.CopyFrom(context_of(planned, live.opened, op_seq))
        return planned.request

    def _send(self, live: Live, method: str, request: Any) -> None:
        """Over the wire, Steps by either way, and to the judge."""
        stub = self.served.cache
        try:
            if method == "Step" and request.context.op_seq % 2:
                (answer,) = stub.StepStream(iter([request]), timeout=TIMEOUT_SECONDS)
            else:
                answer = getattr(stub, method)(request, timeout=TIMEOUT_SECONDS)
        except grpc.RpcError as error:
            answer = error.code()
        self.judge.see(method, request, answer)


@pytest.mark.parametrize(
    ("runs", "steps"),
    [
        pytest.param(20, 40, id="20-runs-of-40-steps"),
        pytest.param(200, 60, id="200-runs-of-60-steps", marks=pytest.mark.slow),
    ],
)
def test_sessions_against_the_model(runs: int, steps: int) -> None:
    run_state_machine_as_test(
        Sessions,
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            deadline=None,
            # A plan is drawn from a seed: a failing run is printed, there is little to shrink.
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
