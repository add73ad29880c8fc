"""The reply window: a table of op_seq against what it does."""

from __future__ import annotations

import gc
from weakref import WeakSet

import pytest

from kvcore.errors import FailedPrecondition, InvalidArgument
from kvserver.replies import ReplyWindow


def filled(count: int, size: int = 4) -> tuple[ReplyWindow, list[int]]:
    """A window that answered calls 1 to ``count``, and the log of what executed."""
    window, log = ReplyWindow(size), []
    for number in range(1, count + 1):
        run(window, log, number)
    return window, log


def run(window: ReplyWindow, log: list[int], op_seq: int, method: str = "Free") -> bytes:
    def execute() -> bytes:
        log.append(op_seq)
        return b"reply %d" % op_seq

    return window.answer(op_seq, method, execute)


@pytest.mark.parametrize(
    ("answered", "op_seq", "expected"),
    [
        pytest.param(0, 1, "executes", id="first"),
        pytest.param(3, 4, "executes", id="next"),
        pytest.param(3, 3, "replays", id="last again"),
        pytest.param(6, 3, "replays", id="oldest in the window"),
        pytest.param(6, 2, "refused", id="older than the window"),
        pytest.param(6, 8, "refused", id="a gap"),
        pytest.param(0, 0, "refused", id="zero"),
        pytest.param(2, 0, "refused", id="zero later"),
        pytest.param(2, (1 << 64) - 1, "refused", id="largest"),
    ],
)
def test_number_decides(answered: int, op_seq: int, expected: str) -> None:
    window, log = filled(answered)
    before = list(log)
    if expected == "refused":
        with pytest.raises(FailedPrecondition) as caught:
            run(window, log, op_seq)
        assert caught.value.expected_op_seq == answered + 1
        assert caught.value.field == "context.op_seq"
    else:
        assert run(window, log, op_seq) == b"reply %d" % op_seq
    assert log == before + ([op_seq] if expected == "executes" else [])
    assert window.expected == answered + 1 + (expected == "executes")


def test_an_error_takes_its_number_and_is_answered_again() -> None:
    window, runs = ReplyWindow(4), []

    def execute() -> bytes:
        runs.append(1)
        raise InvalidArgument("no", field="mode")

    for _ in range(2):
        with pytest.raises(InvalidArgument, match="no"):
            window.answer(1, "Free", execute)
    assert runs == [1]
    assert run(window, [], 2) == b"reply 2"


def test_a_kept_error_keeps_nothing_of_its_call_alive() -> None:
    class Payload:
        pass

    window, left = ReplyWindow(4), WeakSet[Payload]()

    def fail() -> None:
        payload = Payload()
        left.add(payload)

        def execute() -> bytes:
            raise InvalidArgument(f"no {id(payload)}", field="mode")

        with pytest.raises(InvalidArgument):
            window.answer(1, "Free", execute)
        with pytest.raises(InvalidArgument, match=f"no {id(payload)}"):
            window.answer(1, "Free", execute)

    fail()
    gc.collect()
    assert not left


def test_a_number_belongs_to_its_method() -> None:
    window, log = filled(1)
    with pytest.raises(FailedPrecondition) as caught:
        run(window, log, 1, method="Step")
    assert caught.value.reason == "OP_SEQ_REUSED"
    assert window.keeps(1, "Free")
    assert not window.keeps(1, "Step")
    assert not window.keeps(2, "Free")
