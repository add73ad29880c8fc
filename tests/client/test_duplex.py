"""The call below a StepStream: what of it is told, and that nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from kvclient.duplex import Duplex
from patience import until

METHOD = "/test.Echo/Talk"
HOLD, END, FAIL = b"hold", b"end", b"fail"


def talk(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """Answers what it is sent, but for the words above."""
    for message in messages:
        if message == END:
            return
        if message == FAIL:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "too far")
        if message != HOLD:
            yield message


@contextmanager
def echo() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    handler = grpc.stream_stream_rpc_method_handler(talk)
    service = grpc.method_handlers_generic_handler("test.Echo", {"Talk": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def duplex() -> Iterator[Duplex]:
    with echo() as target, grpc.insecure_channel(target) as channel:
        yield Duplex(channel, METHOD)


def received(duplex: Duplex) -> bytes:
    while not duplex.received:
        assert not duplex.is_over
        duplex.wait()
    return duplex.received.popleft()


def test_messages_come_in_order(duplex: Duplex) -> None:
    sent = [bytes([number]) * size for number, size in enumerate((0, 1, 70_000, 3_000_000, 2))]
    for message in sent:
        duplex.send(message)
    assert [received(duplex) for _ in sent] == sent
    duplex.send(b"more")
    assert received(duplex) == b"more"
    duplex.cancel()
    duplex.hear_out()
    assert duplex.is_over


@pytest.mark.parametrize(
    ("word", "code"),
    [(END, None), (FAIL, grpc.StatusCode.OUT_OF_RANGE)],
)
def test_how_it_ends_is_told_behind_what_came(
    duplex: Duplex, word: bytes, code: grpc.StatusCode | None
) -> None:
    duplex.send(b"first")
    duplex.send(word)
    duplex.hear_out()
    assert list(duplex.received) == [b"first"]
    error: Any = duplex.error
    assert (error.code() if error is not None else None) is code
    if error is not None:
        assert error.details() == "too far"
    # Over is over, and no later call waits or fails.
    for call in (duplex.wait, duplex.wake, duplex.cancel, duplex.hear_out):
        call()
    duplex.send(b"late")
    assert duplex.is_over


def test_one_way_until_the_end(duplex: Duplex) -> None:
    duplex.send(b"first")
    duplex.send(b"last")
    duplex.end()
    assert [duplex.receive(), duplex.receive(), duplex.receive()] == [b"first", b"last", None]
    assert duplex.is_over and duplex.receive() is None


def test_it_takes_no_longer_than_it_may() -> None:
    with echo() as target, grpc.insecure_channel(target) as channel:
        duplex = Duplex(channel, METHOD, timeout_s=0.3)
        duplex.send(b"first")
        duplex.send(HOLD)
        assert duplex.receive() == b"first"
        with pytest.raises(grpc.RpcError) as caught:
            duplex.receive()
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and duplex.is_over


def test_a_wake_ends_the_wait_of_another_thread(duplex: Duplex) -> None:
    duplex.send(b"first")
    assert received(duplex) == b"first"
    duplex.send(HOLD)
    rounds = []

    def wait() -> None:
        while not duplex.is_over:
            duplex.wait()
            rounds.append(len(duplex.received))

    waiting = threading.Thread(target=wait)
    waiting.start()
    # It was sent: nothing more comes by itself.
    until(lambda: len(rounds) >= 1)
    for number in range(2, 200):
        duplex.wake()
        until(lambda number=number: len(rounds) >= number)  # type: ignore[misc]
    assert not any(rounds)
    duplex.cancel()
    waiting.join(60)
    assert duplex.is_over


def test_who_cancels_need_not_be_who_waits(duplex: Duplex) -> None:
    duplex.send(HOLD)
    timer = threading.Timer(0.1, duplex.cancel)
    timer.start()
    duplex.hear_out()
    error: Any = duplex.error
    assert error.code() is grpc.StatusCode.CANCELLED and not duplex.received
    timer.join()


def test_nothing_of_cancelled_calls_stays() -> None:
    """Of each, gRPC keeps some 20 KiB until all is told that was begun on it."""

    def grown(num_calls: int) -> int:
        before = resident()
        for number in range(num_calls):
            duplex = Duplex(channel, METHOD)
            duplex.send((b"", HOLD)[number % 2])
            if number % 2 == 0:
                received(duplex)
            duplex.wake()
            duplex.cancel()
            duplex.hear_out()
        return resident() - before

    with echo() as target, grpc.insecure_channel(target) as channel:
        grown(200)
        assert grown(400) < 400 * 8192


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


INTERRUPTED = f"""
import grpc, os, signal, sys, threading
from kvclient.duplex import Duplex
with grpc.insecure_channel(sys.argv[1]) as channel:
    duplex = Duplex(channel, {METHOD!r})
    duplex.send({HOLD!r})
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            duplex.wait()
    except KeyboardInterrupt:
        pass
    assert duplex.is_over
    for call in (duplex.wait, duplex.wake, duplex.cancel, duplex.hear_out):
        call()
    duplex.send(b"late")
    again = Duplex(channel, {METHOD!r})
    again.send(b"again")
    while not again.received:
        again.wait()
    again.cancel()
    again.hear_out()
print("well")
"""


def test_a_signal_ends_a_wait() -> None:
    """In a process of its own, whose main thread is interrupted."""
    with echo() as target:
        told = subprocess.run(
            [sys.executable, "-c", INTERRUPTED, target],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": ":".join(filter(None, sys.path))},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    assert (told.returncode, told.stdout) == (0, "well\n"), told.stderr
