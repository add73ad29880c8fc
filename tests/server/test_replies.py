"""Reply windows: what an op_seq does, and what is kept."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from weakref import WeakSet

import pytest
from google.rpc.status_pb2 import Status
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import FailedPrecondition, InvalidArgument, KVDepotError
from kvdepot.v1 import types_pb2
from kvserver.errors import failure
from kvserver.replies import Replies, ReplyWindow


def filled(count: int, size: int = 4) -> tuple[ReplyWindow, list[int]]:
    """A window that answered calls 1 to ``count``, and the log of what executed."""
    window, log = ReplyWindow(size, 1 << 20), []
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
    window, runs = ReplyWindow(4, 1 << 20), []

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

    window, left = ReplyWindow(4, 1 << 20), WeakSet[Payload]()

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


KIB = 1 << 10


@pytest.mark.parametrize(
    ("kib", "kept"),
    [
        pytest.param([1, 1, 1], [1, 2, 3], id="few"),
        pytest.param([1] * 6, [3, 4, 5, 6], id="more than the count"),
        pytest.param([4, 4, 4], [2, 3], id="more than the bytes"),
        pytest.param([1, 9, 1], [2, 3], id="one is nearly all"),
        pytest.param([1, 1, 20], [3], id="the last is more than all"),
        pytest.param([20, 1, 1], [2, 3], id="and goes with the next"),
        pytest.param([20, 20], [2], id="each is more than all"),
        pytest.param([0, 0, 0, 0], [1, 2, 3, 4], id="empty"),
    ],
)
def test_bytes_bound_a_window_too(kib: list[int], kept: list[int]) -> None:
    window = ReplyWindow(4, 11 * KIB)
    for number, size in enumerate(kib, start=1):
        window.answer(number, "Step", lambda size=size: bytes(size * KIB))
    found = [number for number in range(len(kib) + 1) if window.keeps(number, "Step")]
    assert found == kept
    assert window.nbytes - 128 * len(window) == KIB * sum(kib[number - 1] for number in kept)
    if kept[0] > 1:
        with pytest.raises(FailedPrecondition) as caught:
            window.answer(kept[0] - 1, "Step", bytes)
        assert caught.value.reason == "OP_SEQ_OUT_OF_WINDOW"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(InvalidArgument("x" * 100_000, field="mode"), id="a long message"),
        pytest.param(InvalidArgument("\U0001f600" * 512, field="mode"), id="just not cut"),
        pytest.param(
            FailedPrecondition("y" * 600, reason="STALE", retryable=True, expected_op_seq=7),
            id="all its fields",
        ),
        pytest.param(KeyError("z" * 100_000), id="nobody's doing"),
    ],
)
def test_a_kept_error_is_small_and_answered_alike(error: Exception) -> None:
    window = ReplyWindow(4, 1 << 20)

    def execute() -> bytes:
        raise error

    told = []
    for _ in range(2):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            window.answer(1, "Free", execute)
        told.append(failure(caught.value, method="Free", epoch="e"))
    assert told[0] == told[1]
    detail = types_pb2.ErrorDetail()
    assert Status.FromString(told[0].details).details[0].Unpack(detail)
    assert detail.took_op_seq
    assert isinstance(caught.value, KVDepotError) == isinstance(error, KVDepotError)
    assert len(str(caught.value)) < 520
    assert 1024 < window.nbytes < 4096


Act = Callable[[Replies, str], None]


def answered(*kib: int) -> Act:
    """A session opens and gets replies of such sizes."""

    def act(replies: Replies, name: str) -> None:
        replies.open(name)
        for number, size in enumerate(kib, start=1):
            replies.answer(name, number, "Step", lambda size=size: bytes(size * KIB))

    return act


def then(first: Act, *more: Callable[[Replies, str], object]) -> Act:
    """One after the other."""

    def act(replies: Replies, name: str) -> None:
        first(replies, name)
        for after in more:
            after(replies, name)

    return act


@pytest.mark.parametrize(
    ("acts", "kept"),
    [
        pytest.param([answered(9, 9), answered(9, 9)], {0: [1, 2], 1: [1, 2]}, id="all fits"),
        pytest.param(
            [then(answered(9), Replies.close), then(answered(9), Replies.close), answered(9, 9, 3)],
            {0: [], 1: [1], 2: [1, 2, 3]},
            id="the longest closed goes first",
        ),
        pytest.param(
            [then(answered(9), Replies.drop), answered(9, 9, 9)],
            {1: [1, 2, 3]},
            id="an expired session keeps nothing",
        ),
        pytest.param(
            [answered(1, 1, 1), answered(9, 9, 9), answered(9)],
            {0: [1, 2, 3], 1: [2, 3], 2: [1]},
            id="who keeps the most loses older ones",
        ),
        pytest.param(
            [answered(1, 1, 1), answered(25), answered(3, 3), answered(9)],
            {0: [3], 1: [], 2: [2], 3: [1]},
            id="last ones go last, the largest first",
        ),
        pytest.param(
            [answered(1, 1), answered(60), answered(1)],
            {0: [2], 1: [], 2: [1]},
            id="one that is more than all",
        ),
    ],
)
def test_bytes_bound_all_windows_together(acts: list[Act], kept: dict[int, list[int]]) -> None:
    most = 38 * KIB
    replies = Replies(size=4, window_bytes_max=1 << 20, total_bytes_max=most, closed_max=2)
    for number, act in enumerate(acts):
        act(replies, str(number))
        assert replies.nbytes <= most
    windows = {**replies._open, **replies._closed}
    assert replies.nbytes == sum(window.nbytes for window in windows.values())
    found = {
        number: [op_seq for op_seq in range(1, 5) if windows[str(number)].keeps(op_seq, "Step")]
        if str(number) in windows
        else []
        for number in kept
    }
    assert found == kept


def test_closed_windows_are_counted_too() -> None:
    replies = Replies(size=4, window_bytes_max=KIB, total_bytes_max=1 << 20, closed_max=2)
    for name in "abc":
        replies.open(name)

        def execute(name: str = name) -> bytes:
            replies.close(name)
            return b"closed"

        replies.answer(name, 1, "CloseSession", execute)
    answers = [replies.of_closed(name, 1, "CloseSession") for name in "abc"]
    assert answers == [None, b"closed", b"closed"]
    assert replies.of_closed("c", 1, "Free") is None
    assert replies.nbytes == 2 * (128 + len(b"closed"))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["answer", "answer", "answer", "answer", "close", "drop"]),
            st.integers(0, 4),
            st.sampled_from([0, 100, 1000, 3000, 9000]),
        ),
        max_size=60,
    )
)
def test_whatever_happens_the_count_is_right_and_bounded(
    acts: list[tuple[str, int, int]],
) -> None:
    most = 12_000
    replies = Replies(size=3, window_bytes_max=5000, total_bytes_max=most, closed_max=2)
    live: dict[int, str] = {}
    sent: dict[str, deque[tuple[int, int]]] = {}
    for number, (act, slot, size) in enumerate(acts):
        if slot not in live:
            live[slot] = f"{number}"
            sent[live[slot]] = deque(maxlen=3)
            replies.open(live[slot])
        name = live[slot]
        expected = replies._open[name].expected
        if act == "drop":
            replies.drop(live.pop(slot))
            del sent[name]
        else:

            def execute(name: str = name, act: str = act, size: int = size) -> bytes:
                if act == "close":
                    replies.close(name)
                return bytes(size)

            assert len(replies.answer(name, expected, "m", execute)) == size
            sent[name].append((expected, size))
            if act == "close":
                del live[slot]
        windows = {**replies._open, **replies._closed}
        assert replies.nbytes == sum(window.nbytes for window in windows.values()) <= most
        # What is kept are the last replies, and unaltered.
        for kept, window in windows.items():
            for op_seq, nbytes in list(sent[kept])[len(sent[kept]) - len(window) :]:
                assert len(window.again(op_seq, "m")) == nbytes
