"""Whether a worker may still write, by what it heard and when. No clock, no wire."""

from __future__ import annotations

import pytest

from kvclient.attachment import AttachmentState
from kvclient.errors import CacheLost, FailedPrecondition, NotFound, Unavailable
from kvdepot.v1 import transfer_pb2

HEARTBEAT = transfer_pb2.AttachWorkerResponse(heartbeat_seconds=5.0)
ENDED = transfer_pb2.AttachWorkerResponse(heartbeat_seconds=5.0, session_ended=True)


def test_it_may_write_while_the_server_is_heard() -> None:
    state = AttachmentState()
    state.heard(HEARTBEAT, now=100.0)
    assert state.error(105.0) is None
    assert state.error(115.0) is None
    silent = state.error(115.1)
    assert isinstance(silent, Unavailable)
    assert (silent.reason, silent.retryable) == ("SERVER_SILENT", True)
    # The server stood still, and goes on.
    state.heard(HEARTBEAT, now=120.0)
    assert state.error(120.0) is None


def test_a_process_that_stood_still_does_not_write_before_it_hears_again() -> None:
    state = AttachmentState()
    state.heard(HEARTBEAT, now=100.0)
    assert state.error(1000.0) is not None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(
            Unavailable("gone", reason="UNAVAILABLE"), (Unavailable, "UNAVAILABLE"), id="gone"
        ),
        pytest.param(
            NotFound("no", reason="UNKNOWN_SESSION"), (CacheLost, "UNKNOWN_SESSION"), id="unknown"
        ),
        pytest.param(
            FailedPrecondition("no", reason="STALE_EPOCH", current_epoch="e2"),
            (CacheLost, "STALE_EPOCH"),
            id="restarted",
        ),
    ],
)
def test_the_first_reason_stays(error: Exception, expected: tuple[type, str]) -> None:
    error.answered = True  # type: ignore[attr-defined]
    state = AttachmentState()
    state.heard(HEARTBEAT, now=100.0)
    state.ended(error)  # type: ignore[arg-type]
    state.ended(FailedPrecondition("closed", reason="DETACHED"))
    for _ in range(2):
        found = state.error(100.0)
        assert found is not None
        assert (type(found), found.reason) == expected


def test_the_sessions_end_is_final() -> None:
    state = AttachmentState()
    state.heard(HEARTBEAT, now=100.0)
    state.heard(ENDED, now=101.0)
    state.heard(HEARTBEAT, now=102.0)
    found = state.error(102.0)
    assert isinstance(found, CacheLost)
    assert found.reason == "SESSION_ENDED"
