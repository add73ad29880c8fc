"""When a lease is renewed, and when it is gone: a table, without a clock."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvclient.errors import (
    CacheLost,
    DeadlineExceeded,
    FailedPrecondition,
    KVDepotError,
    NotFound,
    Unavailable,
    lost_by,
)
from kvclient.lease import Lease


def answered(error: KVDepotError) -> KVDepotError:
    """As the server itself says it."""
    error.answered = True
    return error


STALE = FailedPrecondition("gone", reason="STALE_EPOCH", current_epoch="e2")


def test_a_lease_is_renewed_after_a_third_of_it() -> None:
    lease = Lease(30.0, asked_at=100.0)
    assert (lease.due_at, lease.ends_at) == (110.0, 130.0)
    lease.renewed(105.0)
    assert (lease.due_at, lease.ends_at) == (115.0, 135.0)
    # The answer to a call that was sent before is no news.
    lease.renewed(101.0)
    assert (lease.due_at, lease.ends_at) == (115.0, 135.0)


def test_an_unreachable_server_is_asked_until_the_lease_must_be_gone() -> None:
    lease = Lease(30.0, asked_at=100.0)
    asked = []
    now, lost = lease.due_at, None
    while lost is None:
        asked.append(now)
        now += 0.2  # connection refused
        lost = lease.failed(Unavailable("no", reason="UNAVAILABLE"), now)
        now = max(now, lease.due_at)
    assert asked[0] == 110.0
    assert asked[-1] < 131.5
    assert all(after - before <= 1.3 for before, after in pairwise(asked))
    assert lost.reason == "LEASE_EXPIRED"
    assert "30 s" in lost.message


@pytest.mark.parametrize("ttl_s", [0.01, 0.3, 30.0, 600.0])
def test_there_is_time_for_a_second_attempt(ttl_s: float) -> None:
    lease = Lease(ttl_s, asked_at=0.0)
    assert lease.due_at + lease.attempt_s < max(ttl_s, 0.1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(answered(STALE), "STALE_EPOCH", id="restarted"),
        pytest.param(
            answered(NotFound("", reason="SESSION_EXPIRED")), "SESSION_EXPIRED", id="expired"
        ),
        pytest.param(
            answered(NotFound("", reason="UNKNOWN_SESSION")), "UNKNOWN_SESSION", id="unknown"
        ),
        pytest.param(answered(NotFound("", reason="UNKNOWN_TICKET")), None, id="another-matter"),
        pytest.param(NotFound("", reason="UNKNOWN_SESSION"), None, id="not-the-servers-word"),
        pytest.param(DeadlineExceeded("", reason="DEADLINE_EXCEEDED"), None, id="late"),
    ],
)
def test_what_ends_a_session_at_once(error: KVDepotError, reason: str | None) -> None:
    lost = Lease(30.0, asked_at=0.0).failed(error, now=11.0)
    assert (lost and lost.reason) == reason
    assert (lost_by(error) is None) == (reason is None)


def test_it_can_be_raised_again() -> None:
    lost = lost_by(answered(STALE))
    assert lost is not None
    again = lost.again()
    assert again is not lost
    assert isinstance(again, CacheLost)
    assert (again.reason, again.current_epoch, again.message) == ("STALE_EPOCH", "e2", "gone")
