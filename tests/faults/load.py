"""Load for a server, in processes that a test may kill: ``python load.py PROGRAM ...``.

    scheduler TARGET SEED LEASE_S         replays chats until SIGTERM; reads back every byte
    split TARGET SEED LEASE_S LINGER_S    the same, its worker in a process of its own, which
                                          goes on writing until SIGTERM, for at most LINGER_S,
                                          when its scheduler dies
    patient TARGET LEASE_S                holds a request, and calls once a line of SIGUSR1

The last line of output is a JSON object. Failures are in it, or in the status.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from kvclient import Client
from kvclient.errors import CacheLost, KVDepotError
from kvclient.pool import map_pool
from kvclient.replay.errors import WrongBytes
from kvclient.replay.pipeline import Pipeline
from kvclient.replay.scheduler import Scheduler
from kvclient.replay.settings import ReplaySettings
from kvclient.replay.tally import Tally
from kvclient.replay.trace import ChatShape, TraceRequest, generate_trace
from kvclient.replay.worker import StepWork, Worker
from kvclient.values import Content, SlotRequest

CHATS = ChatShape(system_length=(64, 400), user_length=(10, 120), output_length=(5, 40))
REQUESTS_A_ROUND = 64


def say(**values: Any) -> None:
    """A line for the test."""
    print(json.dumps(values), flush=True)


class Stop:
    """Set by SIGTERM."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def endless(seed: int, stop: Stop) -> Iterator[TraceRequest]:
    """The same system prompts over and over, with other chats."""
    number = 0
    while not stop.asked:
        for request in generate_trace(REQUESTS_A_ROUND, seed % 7 + number, CHATS):
            number += 1
            yield TraceRequest(
                number * 97 + seed,
                request.timestamp_ms,
                request.input_length,
                request.output_length,
                request.hash_ids,
            )
            if stop.asked:
                return


def settings() -> ReplaySettings:
    """Small steps, several in flight."""
    return ReplaySettings(token_budget=1024, max_running=8, steps_in_flight=3, seed=0)


def scheduler(target: str, seed: str, lease_s: str) -> None:
    """Schedules and writes until told to stop."""
    stop = Stop()
    with Client(target) as client:
        session = client.open_session(f"scheduler {seed}", lease_ttl_s=float(lease_s))
        with client.attach_worker(session.session_id, session.epoch):
            work(session, Worker(map_pool(session.pool), seed=int(seed)), int(seed), stop)
        session.close()


def work(session: Any, worker: Any, seed: int, stop: Stop) -> None:
    """The replay's scheduler over one session; says what it did."""
    tally = Tally()
    failure = None

    def on_step() -> bool:
        if tally.steps == 20:
            say(running=session.session_id)
        return True

    scheduler = Scheduler(session, worker, endless(seed, stop), settings(), tally)
    if isinstance(worker, RemoteWorker):
        announce_steps(scheduler._pipeline, worker)
    try:
        scheduler.run(on_step)
    except WrongBytes as wrong:
        failure = str(wrong)
    say(
        failure=failure,
        requests=tally.requests,
        verified=getattr(worker, "blocks_verified", 0),
        hit_tokens=tally.hit_tokens,
        preemptions=tally.preemptions,
    )


def announce_steps(pipeline: Pipeline, worker: RemoteWorker) -> None:
    """Have the worker know a step from when it is scheduled."""
    end_step = pipeline.end_step

    def announced() -> None:
        worker.schedule(pipeline.work)
        end_step()

    pipeline.end_step = announced  # type: ignore[method-assign]


class RemoteWorker:
    """Tells another process of steps as they are scheduled, and has them done later.

    So what that process may write at any time are the steps in flight, as on a device.
    """

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self._connection = connection

    def schedule(self, step: StepWork) -> None:
        """It will be done."""
        self._connection.send(step)

    def execute(self, step: StepWork) -> None:
        """As Worker.execute, of the step scheduled first."""
        self._connection.send(step.step)
        answer = self._connection.recv()
        if answer is not None:
            raise WrongBytes(*answer)


def remote_worker(
    connection: Connection[Any, Any], target: str, session_id: str, linger_s: float
) -> None:
    """Does steps; when its scheduler is dead, writes those in flight again and again."""
    with Client(target) as client:
        pool = map_pool(client.describe_pool())
        with client.attach_worker(session_id):
            worker = Worker(pool)
            stop = Stop()
            scheduled: deque[StepWork] = deque()
            connection.send(os.getpid())
            while True:
                try:
                    message = connection.recv()
                    if isinstance(message, StepWork):
                        scheduled.append(message)
                        continue
                    assert scheduled[0].step == message
                    worker.execute(scheduled[0])
                    scheduled.popleft()
                    connection.send(None)
                except WrongBytes as wrong:
                    connection.send(wrong.__reduce__()[1])
                except (EOFError, OSError):
                    break
            blocks = {i for step in scheduled for span in step.writes for i in span.block_ids}
            say(lingers=len(blocks))
            end = time.monotonic() + linger_s
            while not stop.asked and time.monotonic() < end:
                for step in scheduled:
                    worker.execute(StepWork(step.step, writes=step.writes))
    say(worker_ended=True)


def split(target: str, seed: str, lease_s: str, linger_s: str) -> None:
    """A scheduler, and its worker in another process."""
    stop = Stop()
    with Client(target) as client:
        session = client.open_session(f"split {seed}", lease_ttl_s=float(lease_s))
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=remote_worker, args=(theirs, target, session.session_id, float(linger_s))
        )
        process.start()
        theirs.close()
        say(worker=ours.recv())
        work(session, RemoteWorker(ours), int(seed), stop)
        ours.close()
        process.join()
        session.close()


def patient(target: str, lease_s: str) -> None:
    """Holds a request; after each SIGUSR1 tries to go on with it."""
    wanted = 0

    def want(*_: object) -> None:
        nonlocal wanted
        wanted += 1

    signal.signal(signal.SIGUSR1, want)
    with Client(target) as client:
        session = client.open_session("patient", lease_ttl_s=float(lease_s))
        session.allocate_slots(SlotRequest("r", Content(range(40)), lookup=True))
        say(running=session.session_id)
        while not wanted:
            time.sleep(0.01)
        calls = {
            "cache": lambda: session.cache_blocks("r", 40),
            "grow": lambda: session.allocate_slots(
                SlotRequest("r", Content([1], 40), num_computed_tokens=40, num_new_tokens=1)
            ),
            "free": lambda: session.free("r"),
            "reset": lambda: session.reset_prefix_cache("force"),
        }
        answers = {}
        for name, call in calls.items():
            try:
                call()
                answers[name] = "done"
            except CacheLost as lost:
                answers[name] = lost.reason
            except KVDepotError as error:
                answers[name] = type(error).__name__
        fresh = session.reopen()
        slots = fresh.allocate_slots(SlotRequest("r", Content(range(40)), lookup=True))
        say(answers=answers, after=slots.outcome.name, freed=fresh.close())


if __name__ == "__main__":
    programs = {"scheduler": scheduler, "split": split, "patient": patient}
    programs[sys.argv[1]](*sys.argv[2:])
