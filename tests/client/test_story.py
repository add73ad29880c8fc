"""Both clients, the same story, the same answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvclient.values import Outcome
from own_process import told_by


@pytest.fixture(scope="module")
def told(serve: Any) -> dict[str, list[dict[str, Any]]]:
    """What each client's story printed, each on a server of its own."""
    transcripts = {}
    for flavour in ("sync", "aio"):
        lines = told_by("story.py", flavour, serve().target).splitlines()
        transcripts[flavour] = [json.loads(line) for line in lines]
    return transcripts


def test_both_clients_get_the_same_answers(told: dict[str, list[dict[str, Any]]]) -> None:
    assert told["sync"] == told["aio"]


def test_the_answers(told: dict[str, list[dict[str, Any]]]) -> None:
    answers = {what: answer for line in told["sync"] for what, answer in line.items()}
    assert answers["pool"] == [65, 4, "block", 2]
    assert answers["at first"] == []
    assert answers["lookup"] == {
        "num_computed_tokens": 0,
        "blocks": [[]],
        "handle": 1,
        "num_uncached_common_prefix_tokens": 0,
    }
    assert answers["slots"]["new_blocks"] == [[1, 2, 3]]
    assert answers["decode"]["new_blocks"] == [[]]
    assert answers["cache"] is True
    assert answers["cache unknown"] is False
    shared, salted = answers["step"]["admissions"]
    assert shared["hit_blocks"] == [[1, 2]]
    assert shared["new_blocks"] == [[4]]
    assert (shared["num_new_computed_tokens"], shared["num_new_tokens"]) == (8, 2)
    assert salted["hit_blocks"] == [[]]
    assert salted["new_blocks"] == [[5, 6]]
    assert salted["outcome"] == Outcome.OK
    assert answers["grown"] == [[7]]
    assert answers["free"]["free_tickets"][0] == 0
    assert answers["returned"] == 2
    assert answers["violations"] == []
    # Blocks 1 to 3 of request a, and the two that only the salt sets apart.
    assert len(answers["mirrored"]) == 5
    assert answers["pulled"] == [*[["READY", 512]] * 5, ["MISSING", 0]]
    assert answers["closed"] == 3
    assert answers["listed"] == [["story", "OPEN", 3, 1], ["hasty", "OPEN", 0, 0]]
    assert answers["pages"] == [["a", "b"], ["d"]]
    assert answers["evicted"] == 1
    assert answers["forced"] == 2
    assert answers["scoped"] == 1
    assert answers["workers"] == [1, 0]
    assert answers["closed again"] == 0


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("unknown ticket", ["NotFound", "UNKNOWN_TICKET", "ticket", False]),
        ("busy reset", ["BlocksInUse", "BLOCKS_IN_USE", "", True]),
        ("drain in vain", ["BlocksInUse", "DRAIN_ABANDONED", "", True]),
        ("no such mode", ["InvalidArgument", "INVALID_ARGUMENT", "mode", False]),
        ("no block", ["InvalidArgument", "INVALID_ARGUMENT", "block_ids[1]", False]),
        ("nobody's worker", ["CacheLost", "UNKNOWN_SESSION", "session_id", False]),
        ("while detached", ["FailedPrecondition", "DETACHED", "", False]),
        ("after its end", ["CacheLost", "SESSION_ENDED", "", False]),
        (
            "bad mark",
            ["InvalidArgument", "INVALID_ARGUMENT", "context.completed_step", False],
        ),
        ("bad token", ["InvalidArgument", "INVALID_ARGUMENT", "tokens", False]),
        ("odd bytes", ["InvalidArgument", "INVALID_ARGUMENT", "content.tokens", False]),
        ("no request", ["NotFound", "UNKNOWN_REQUEST", "request_id", False]),
        ("other tokens", ["AlreadyExists", "REQUEST_EXISTS", "content.tokens", False]),
        ("bad step", ["InvalidArgument", "INVALID_ARGUMENT", "runs.count", False]),
        (
            "bad fingerprint",
            ["FailedPrecondition", "FINGERPRINT_MISMATCH", "fingerprint", False],
        ),
        ("bad pull", ["InvalidArgument", "INVALID_ARGUMENT", "groups[0].block_hashes[0]", False]),
        ("old events", ["DataLoss", "EPOCH_CHANGED", "epoch", False]),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_errors_are_typed(
    told: dict[str, list[dict[str, Any]]], what: str, error: list[Any]
) -> None:
    answers = {name: answer for line in told["sync"] for name, answer in line.items()}
    assert answers[what] == error
