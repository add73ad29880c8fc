"""The client renews leases by itself; what is lost is said at once, and opened anew."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvclient import CacheLost, Client, Session
from kvclient.errors import BlocksInUse, FailedPrecondition, KVDepotError, Unavailable
from kvclient.pool import map_pool
from kvclient.reports import SessionInfo
from kvclient.values import Content, OperationKind, SlotRequest, Step
from own_process import run_python, told_by
from patience import TTL_S, is_up, until


def keepers() -> list[str]:
    """The threads that renew leases in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name == "kvdepot-leases"]


@contextmanager
def stopped(server: Any) -> Iterator[None]:
    """The server stands still."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def admit(request_id: str, *tokens: int) -> Step:
    slots = SlotRequest(request_id, Content(tokens), lookup=True)
    return Step(runs=[(OperationKind.ADMIT, 1)], admissions=[slots])


def test_a_scheduler_that_is_busy_or_idle_keeps_its_sessions(client: Client) -> None:
    sessions = [client.open_session(f"s{i}", lease_ttl_s=TTL_S) for i in range(3)]
    for session in sessions:
        session.step(admit("a", *range(8)))
    assert keepers() == ["kvdepot-leases"]
    busy_until = time.monotonic() + 1.25 * TTL_S
    while time.monotonic() < busy_until:
        sum(range(1000))
    time.sleep(1.25 * TTL_S)
    for session in sessions:
        assert session.lost is None
        assert session.free("a").known
        session.close()
    until(lambda: not keepers())


def test_a_client_without_a_session_renews_nothing(client: Client) -> None:
    session = client.open_session(lease_ttl_s=TTL_S)
    session.step(admit("a", 1, 2, 3))
    client._keeper.close()  # as when its process hangs
    until(lambda: client.stats().num_sessions == 0)
    assert client.stats().num_requests == 0
    with pytest.raises(CacheLost) as caught:
        session.free("a")
    assert caught.value.reason == "SESSION_EXPIRED"


def test_a_session_that_nobody_refers_to_ends(client: Client) -> None:
    session = client.open_session(lease_ttl_s=TTL_S)
    session.step_stream().call(admit("a", 1, 2, 3))
    assert client.stats().num_requests == 1
    del session
    gc.collect()
    until(lambda: client.stats().num_sessions == 0)
    until(lambda: not keepers())


def test_closing_the_client_ends_the_thread(server: Any) -> None:
    client = server.client()
    client.open_session(lease_ttl_s=TTL_S)
    session = client.open_session(lease_ttl_s=TTL_S)
    client.close()
    assert not keepers()
    with pytest.raises(FailedPrecondition, match="client is closed"):
        session.free("a")


def test_an_unclosed_client_keeps_no_process_alive(server: Any) -> None:
    code = (
        "import sys; from kvclient import Client; "
        "client = Client(sys.argv[1]); session = client.open_session(lease_ttl_s=3); "
        "client.attach_worker(session.session_id); session.step_stream(); print('end')"
    )
    run = run_python("-W", "error", "-X", "dev", "-c", code, server.target)
    assert (run.returncode, run.stdout, run.stderr) == (0, "end\n", "")


def test_a_lost_session_says_so_without_asking_and_is_opened_anew(serve: Any) -> None:
    first = serve()
    with first.client() as client:
        session = client.open_session("engine", lease_ttl_s=60)
        stream = session.step_stream()
        stream.call(admit("a", *range(8)))
        first.stop()
        with pytest.raises(Unavailable) as gone:
            stream.call(admit("b", 1))
        assert not isinstance(gone.value, CacheLost)
        second = serve(listen=first.target)
        until(lambda: is_up(client))
        with pytest.raises(CacheLost) as stale:
            stream.call(admit("c", 1))
        assert stale.value.reason == "STALE_EPOCH"
        assert stale.value.current_epoch == second.epoch
        assert session.lost is not None

        with stopped(second):  # so nobody could be asked
            for call in (
                lambda: session.free("a"),
                lambda: stream.call(admit("d", 1)),
                session.settle,
                session.reset_prefix_cache,
            ):
                began = time.monotonic()
                with pytest.raises(CacheLost) as again:
                    call()
                assert time.monotonic() - began < 8.0  # asking takes half a minute
                assert again.value.current_epoch == second.epoch
            assert session.close() == 0

        with session.reopen() as fresh:
            assert fresh.epoch == second.epoch
            assert fresh.lease_ttl_s == 60
            assert fresh.free("a").known is False
            assert fresh.step(admit("a", 1)).admissions[0].handle == 1
            assert "engine" in [one.name for one in client.list_sessions()]
        with pytest.raises(FailedPrecondition, match="session is closed"):
            session.free("a")


def test_reopening_an_open_session_closes_it(client: Client) -> None:
    session = client.open_session("reopened")
    session.step(admit("a", 1))
    with session.reopen() as fresh:
        assert client.stats().num_requests == 0
        # Sessions of other tests may not have ended yet.
        named = [one for one in client.list_sessions() if one.name == "reopened"]
        assert [one.session_id for one in named] == [fresh.session_id]


def test_a_server_that_cannot_be_reached_ends_a_session_when_the_lease_must_be_gone(
    serve: Any,
) -> None:
    server = serve()
    with server.client() as client:
        sessions = [client.open_session(lease_ttl_s=TTL_S) for _ in range(2)]
        server.stop()

        def is_lost(session: Session) -> bool:
            lost = session.lost is not None
            assert not lost or session._lease.ends_at <= time.monotonic()
            return lost

        until(lambda: all(is_lost(session) for session in sessions))
        for session in sessions:
            with pytest.raises(CacheLost) as caught:
                session.free("a")
            assert caught.value.reason == "LEASE_EXPIRED"
            assert caught.value.current_epoch is None
        with pytest.raises(Unavailable):
            sessions[0].reopen()


def test_a_short_outage_is_survived(wire: Any, client: Client) -> None:
    with Client(wire.target, timeout_s=20) as far, far.open_session(lease_ttl_s=TTL_S) as session:
        session.step(admit("a", 1))
        for _ in range(10):  # for longer than the lease
            wire.cut()
            time.sleep(0.5)
        assert session.lost is None
        assert session.free("a").known


def test_a_long_request_is_sent_again_by_the_policy(wire: Any, client: Client) -> None:
    prompt = list(range(200)) * 1000  # 800 KB
    with Client(wire.target, timeout_s=20) as far, far.open_session() as session:
        session.free("z")
        wire.losing = True
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(session.get_computed_blocks("a", prompt[:131_000]))
        )
        thread.start()
        until(lambda: client.stats().num_requests == 1)
        wire.cut()
        thread.join(60)
        assert answers[0].handle > 0
        assert session.free("a").known


@pytest.mark.parametrize("by_stream", [False, True], ids=["unary", "stream"])
def test_an_answer_that_is_late_is_asked_for_again(
    client: Client, wire: Any, by_stream: bool
) -> None:
    """Nothing breaks, answers just do not come: the call is sent again and done once."""
    with Client(wire.target, timeout_s=10) as far, far.open_session() as session:
        session.free("z")
        wire.losing = True
        # The connection that loses is dropped after the first try, during the second.
        timer = threading.Timer(6.0, wire.cut)
        timer.start()
        step = admit("a", *range(8))
        reply = session.step_stream().call(step) if by_stream else session.step(step)
        timer.join()
        assert len(reply.admissions[0].new_blocks[0]) == 2
        assert client.stats().blocks.live == 2
        assert session.close() == 1


def _of(client: Client, session: Session) -> list[SessionInfo]:
    """Sessions of other tests may not have ended yet."""
    return [one for one in client.list_sessions() if one.session_id == session.session_id]


def test_a_worker_is_attached_for_as_long_as_its_mapping_lives(client: Client) -> None:
    session = client.open_session()
    session.step(admit("a", *range(8)))
    attachment = client.attach_worker(session.session_id, session.epoch, "worker")
    pool = map_pool(session.pool, attachment)
    view = pool.layer_bytes(0)
    del pool
    gc.collect()
    session.close()
    until(lambda: _says(attachment.check) == "SESSION_ENDED")
    (departed,) = _of(client, session)
    assert (departed.state.name, departed.num_workers) == ("DEPARTED", 1)
    assert departed.num_quarantined_blocks == 2
    view[:] = 0
    del view
    gc.collect()
    until(lambda: not _of(client, session))
    assert _says(attachment.check) == "SESSION_ENDED"


def test_a_worker_hears_of_the_servers_end(serve: Any) -> None:
    server = serve()
    with server.client() as client:
        session = client.open_session()
        with client.attach_worker(session.session_id, session.epoch) as attachment:
            attachment.check()
            server.stop()
            until(lambda: _says(attachment.check) == "UNAVAILABLE")
        assert _says(attachment.check) == "UNAVAILABLE"


def _says(check: Callable[[], None]) -> str | None:
    try:
        check()
    except KVDepotError as error:
        return error.reason
    return None


def test_a_drain_waits_for_what_runs(client: Client) -> None:
    with client.open_session("runs") as runs, client.open_session("resets") as resets:
        runs.step(admit("a", *range(8)))
        timer = threading.Timer(0.3, runs.free, ("a",))
        timer.start()
        before = client.stats().generation
        assert resets.reset_prefix_cache("drain", timeout_s=20).generation == before + 1
        timer.join()
        runs.step(admit("b", *range(8)))
        with pytest.raises(BlocksInUse) as caught:
            resets.reset_prefix_cache("drain", timeout_s=0.1)
        assert caught.value.reason == "DRAIN_ABANDONED"
        (holder,) = caught.value.holders
        assert (holder.session_name, holder.request_id, holder.num_blocks) == ("runs", "b", 2)
        assert "session runs request b (2 blocks)" in str(caught.value)
        runs.free("b")


def test_the_asyncio_client_keeps_its_sessions_too(serve: Any) -> None:
    told_by("keeping_story.py", serve().target)
