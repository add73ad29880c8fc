"""The ``kvdepot`` command: its small commands against a real server, and its refusals."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from kvclient.cli import main
from kvclient.cli.pull import cached_hashes
from kvclient.client import Client
from kvclient.session import Session
from kvclient.values import Content, ExtraKeys, SlotRequest
from replay_tools import server, serving

PROMPT = list(range(40))


def kvdepot(*arguments: str, columns: int = 80) -> Result:
    runner = CliRunner(env={"COLUMNS": str(columns)})
    return runner.invoke(main, list(arguments), catch_exceptions=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that has two blocks of 16 tokens cached."""
    mapping_dir = str(tmp_path_factory.mktemp("pool"))
    with serving("--mapping-dir", mapping_dir, "--num-blocks", "9") as address:
        with Client(address) as client, client.open_session("scheduler") as session:
            session.get_computed_blocks("a", PROMPT)
            session.allocate_slots(SlotRequest("a"))
            session.cache_blocks("a", len(PROMPT))
            session.free("a")
        yield address


def test_help_lists_the_commands() -> None:
    result = kvdepot("--help")
    assert result.exit_code == 0
    for name in (
        *("serve", "replay", "demo", "stat", "sessions", "requests"),
        *("audit", "transfers", "pull", "import", "evict", "reset", "drain"),
    ):
        assert f"\n  {name} " in result.output
    assert not re.search(r"\.\.\.$", result.output.partition("Commands:")[2], re.MULTILINE)


def commands(group: click.Group) -> Iterator[click.Command]:
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from commands(command)


@pytest.mark.parametrize("command", [pytest.param(each, id=each.name) for each in commands(main)])
def test_help_says_of_each_option_what_it_is(command: click.Command) -> None:
    assert command.help
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, option.opts
            # N or SECONDS, or the choices; not the name of a type.
            chosen = option.is_flag or isinstance(option.type, click.Choice)
            assert chosen or option.metavar, option.opts


def test_stat(target: str) -> None:
    shown = kvdepot("stat", "--server", target)
    assert shown.exit_code == 0
    assert "cached" in shown.output
    stats = json.loads(kvdepot("stat", "--server", target, "--json").output)
    assert stats["num_blocks"] == 9
    pool = stats["pool"]
    for words in (
        *(pool["model"], pool["fingerprint"], f"{9 * 16 * 128:,}"),
        "full_attention, 2 layers, 16 tokens a block",
    ):
        assert words in shown.output
    assert (pool["model"], pool["device"], pool["bytes"]) == ("tiny", "cpu", 9 * 16 * 128)
    assert pool["groups"] == [{"kind": "full_attention", "num_layers": 2, "block_size": 16}]
    assert stats["blocks"] == {
        "live": 0,
        "cached": 2,
        "pinned": 0,
        "in_transfer": 0,
        "quarantined": 0,
        "free": 6,
    }
    assert stats["prefix_cache_queries"] == len(PROMPT)


def test_audit(target: str) -> None:
    assert "0 violations" in kvdepot("audit", "--server", target).output
    report = json.loads(kvdepot("audit", "--server", target, "--json").output)
    assert report == {
        "violations": [],
        "num_blocks_checked": 9,
        "num_requests_checked": 0,
        "holders": [],
    }


def test_pull_everything_and_then_by_name(target: str, tmp_path: Path) -> None:
    output = tmp_path / "blocks"
    result = kvdepot("pull", "--server", target, "--all", "--output", str(output), "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["ready"] == 2
    assert answer["bytes"] == output.stat().st_size == 2 * 16 * 128
    names = list(answer["blocks"])
    again = kvdepot("pull", "--server", target, *names)
    assert again.exit_code == 0
    assert again.stdout.splitlines()[:2] == [f"{name} ready" for name in names]
    missing = kvdepot("pull", "--server", target, names[0], "00" * (len(names[0]) // 2))
    assert missing.exit_code == 1
    assert "1 ready, 0 pending, 1 missing" in missing.stdout


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[tuple[str, Session]]:
    """A server, and a session of it with a waiting and a running request and a worker."""
    with (
        serving("--mapping-dir", str(tmp_path), "--num-blocks", "33") as target,
        Client(target) as client,
        client.open_session("engine-0", lease_ttl_s=20) as session,
        client.attach_worker(session.session_id),
    ):
        salted = Content(PROMPT, extra_keys=ExtraKeys(lora_name="adapter"))
        session.allocate_slots(SlotRequest("runs", salted, lookup=True))
        session.get_computed_blocks("waits", [1, 2, 3])
        yield target, session


def test_sessions(at_work: tuple[str, Session]) -> None:
    target, session = at_work
    text = kvdepot("sessions", "--server", target, columns=200).output
    for words in (session.session_id, "engine-0", "open", "s ago", "of 20 s"):
        assert words in text
    narrow = kvdepot("sessions", "--server", target).output
    names = ["id", "name", "lease", "requests", "tokens", "blocks", "held", "workers"]
    assert_in_columns(narrow, names)
    short, name, *_, num_requests, num_tokens, num_blocks, held, workers = narrow.splitlines()[
        2
    ].split()
    assert (short, name) == (session.session_id[:8], "engine-0")
    assert [num_requests, num_tokens, num_blocks, held, workers] == ["2", "43", "3", "0", "1"]
    listed = json.loads(kvdepot("sessions", "--server", target, "--json").output)["sessions"]
    assert [(info["name"], info["state"]) for info in listed] == [("engine-0", "open")]
    assert (listed[0]["num_requests"], listed[0]["num_tokens"]) == (2, len(PROMPT) + 3)
    assert (listed[0]["num_blocks"], listed[0]["num_workers"]) == (3, 1)
    session.close()
    text = kvdepot("sessions", "--server", target, columns=200).output
    assert "departed" in text and "over" in text
    stats = json.loads(kvdepot("stat", "--server", target, "--json").output)
    assert (stats["num_sessions"], stats["num_departed_sessions"]) == (0, 1)


def assert_in_columns(text: str, names: list[str], columns: int = 80) -> None:
    assert text.splitlines()[0].split() == names
    assert all(len(line) <= columns and "…" not in line for line in text.splitlines())


def test_requests(at_work: tuple[str, Session]) -> None:
    target, session = at_work
    text = kvdepot("requests", "--server", target, columns=200).output
    for words in ("runs", "running", "waits", "waiting", "adapter", f"{len(PROMPT)}"):
        assert words in text
    session.get_computed_blocks("chatcmpl-" + "0123456789abcdef" * 3, [1])
    narrow = kvdepot("requests", "--server", target).output
    assert_in_columns(narrow, ["session", "id", "state", "tokens", "computed", "blocks"])
    assert [session.session_id[:8], "runs", "running", "40", "0", "3"] in [
        line.split() for line in narrow.splitlines()
    ]
    # What callers name is folded, not cut.
    column = narrow.index("id")
    assert "0123456789abcdef" * 3 in "".join(
        line[column : column + 37].strip() for line in narrow.splitlines()[4:]
    )
    one = kvdepot("requests", "--server", target, "--limit", "1", "--json")
    answer = json.loads(one.output)
    assert [info["request_id"] for info in answer["requests"]] == ["runs"]
    assert answer["more"] is True
    of_session = ("requests", "--server", target, "--session", session.session_id, "--json")
    answer = json.loads(kvdepot(*of_session).output)
    assert [info["state"] for info in answer["requests"]] == ["running", "waiting", "waiting"]
    assert answer["more"] is False
    of_session = (*of_session[:4], session.session_id[:8], "--json")
    assert json.loads(kvdepot(*of_session).output) == answer
    # Of 17 ids two begin alike.
    others = [session.client.open_session() for _ in range(16)]
    begin = Counter(one.session_id[0] for one in (session, *others)).most_common(1)[0][0]
    ambiguous = kvdepot("requests", "--server", target, "--session", begin)
    assert ambiguous.exit_code == 2 and "give more of the id" in ambiguous.stderr
    for other in others:
        other.close()
    nobody = kvdepot("requests", "--server", target, "--session", "nobody")
    assert nobody.exit_code == 1
    assert "UNKNOWN_SESSION" in nobody.stderr


def test_reset_and_evict(at_work: tuple[str, Session]) -> None:
    target, session = at_work
    refused = kvdepot("reset", "--server", target)
    assert refused.exit_code == 1
    assert "session engine-0 request runs (3 blocks)" in refused.stderr
    assert "BLOCKS_IN_USE" in refused.stderr
    in_vain = kvdepot("reset", "--server", target, "--mode", "drain", "--timeout-seconds", "0.05")
    assert "session engine-0 request runs (3 blocks) (DRAIN_ABANDONED)" in in_vain.stderr
    other = kvdepot("reset", "--server", target, "--cache-salt", "another")
    assert other.output == "reset: 0 blocks lost their content; generation 1 has begun\n"
    evicted = kvdepot("evict", "--server", target, "1", "2", "3")
    assert evicted.output == "2 of 3 blocks had content and lost it\n"
    out_of_range = kvdepot("evict", "--server", target, "33")
    assert out_of_range.exit_code == 1
    assert "from 1 to 32, not 33" in out_of_range.stderr
    forced = kvdepot("reset", "--server", target, "--mode", "force", "--json")
    answer = json.loads(forced.output)
    assert (answer["generation"], answer["blocks"]) == (2, 0)
    assert [(one["request_id"], one["num_blocks"]) for one in answer["holders"]] == [("runs", 3)]
    again = kvdepot("reset", "--server", target, "--mode", "force").output
    assert "still in use, but no hits any more: session engine-0 request runs (3 blocks)" in again
    assert (
        "in use: session engine-0 request runs (3 blocks)"
        in kvdepot("audit", "--server", target).output
    )
    session.free("runs")
    assert json.loads(kvdepot("evict", "--server", target, "1", "--json").output) == {"evicted": 0}


def test_drain(tmp_path: Path) -> None:
    with server("--mapping-dir", str(tmp_path), "--num-blocks", "9") as (process, target):
        drained = kvdepot("drain", "--server", target)
        assert drained.output == (
            "the server stops; within its grace it waits for 0 sessions and 0 transfers and "
            "imports\n"
        )
        assert process.wait(60) == 0


_NAMES = ["[/INST]", "[red]a", ":warning:", "a\nb", "\x1b[2J", "\u202ertl"]


@pytest.mark.parametrize("name", _NAMES, ids=ascii)
def test_names_are_shown_as_they_are_and_on_one_line(target: str, name: str) -> None:
    """Callers choose them: they are no markup, and no commands to a terminal."""
    plain = name.encode("unicode_escape").decode()
    with (
        Client(target) as client,
        client.open_session(name) as session,
    ):
        session.allocate_slots(SlotRequest(name, Content(PROMPT), lookup=True))
        transfer = client.open_transfer({0: [bytes(32)]}, name=name)
        for command in ("sessions", "requests", "transfers", "audit"):
            for columns in (80, 200):
                result = kvdepot(command, "--server", target, columns=columns)
                assert result.exit_code == 0
                assert plain in result.output
        refused = kvdepot("reset", "--server", target)
        assert f"session {plain} request {plain} (3 blocks)" in refused.output
        client.close_transfer(transfer.transfer_id)


def test_a_drain_says_what_it_waits_for(tmp_path: Path) -> None:
    flags = ("--mapping-dir", str(tmp_path), "--num-blocks", "9", "--drain-grace-seconds", "20")
    with server(*flags) as (process, target), Client(target) as client:
        session = client.open_session("engine-0")
        session.allocate_slots(SlotRequest("runs", Content(PROMPT), lookup=True))
        session.cache_blocks("runs", len(PROMPT))
        transfer = client.open_transfer(cached_hashes(client), name="decode-7")
        lines = kvdepot("drain", "--server", target).output.splitlines()
        assert lines[0].endswith("waits for 1 sessions and 1 transfers and imports")
        assert lines[1] == "session engine-0 (1 requests)"
        assert lines[2].startswith(f"transfer {transfer.transfer_id[:8]} (decode-7, 2 blocks, ends")
        client.close_transfer(transfer.transfer_id)
        session.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        pytest.param(["pull"], 2, "hashes of blocks, or --all", id="pull-nothing"),
        pytest.param(["pull", "ab"], 2, "'ab' is no hash: one has 64 hex digits", id="pull-short"),
        pytest.param(["evict"], 2, "Missing argument", id="evict-nothing"),
        pytest.param(
            ["evict", "0"],
            2,
            "'0' is no block id: they are whole numbers from 1",
            id="evict-the-null-block",
        ),
        pytest.param(["evict", "abc"], 2, "'abc' is no block id", id="evict-a-word"),
        pytest.param(["evict", "3", "ab" * 32], 2, "and no hashes", id="evict-a-hash"),
        pytest.param(["reset", "--mode", "gently"], 2, "'refuse', 'drain', 'force'", id="mode"),
        pytest.param(["requests", "--limit", "0"], 2, "--limit", id="no-requests"),
        pytest.param(["sessions", "--server", "127.0.0.1:1"], 1, "UNAVAILABLE", id="sessions"),
        pytest.param(["pull", "--all", "00"], 2, "hashes of blocks, or --all", id="pull-both"),
        pytest.param(["pull", "xy" * 32], 2, "is no hash", id="pull-no-hash"),
        pytest.param(["replay", "/no/such/trace"], 2, "does not exist", id="no-trace"),
        pytest.param(["replay", "--one-by-one"], 2, "--schedulers 1", id="one-by-one-of-two"),
        pytest.param(
            ["replay", "--num-blocks", "9", "--capacity-tokens", "9"], 2, "exclude", id="two-sizes"
        ),
        pytest.param(
            ["replay", "--server", "127.0.0.1:1", "--block-size", "8"], 2, "omit", id="not-its-own"
        ),
        pytest.param(["replay", "--limit", "0"], 2, "--limit", id="zero-limit"),
        pytest.param(["replay", "--verify-sample", "2"], 2, "--verify-sample", id="too-large"),
        pytest.param(["stat", "--server", "127.0.0.1:1"], 1, "UNAVAILABLE", id="no-server"),
        pytest.param(
            ["replay", "--server", "127.0.0.1:1"], 1, "UNAVAILABLE", id="replay-no-server"
        ),
    ],
)
def test_refusals_are_one_clear_message(arguments: list[str], status: int, message: str) -> None:
    result = kvdepot(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_replay_names_the_bad_line_of_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0}\n', encoding="utf-8")
    result = kvdepot("replay", str(trace))
    assert result.exit_code == 1
    assert f"{trace}:1" in result.stderr


def test_replay_says_how_large_the_pool_must_be() -> None:
    replay = ("replay", "--requests", "3", "--no-bytes", "--schedulers", "1", "--json")
    refused = kvdepot(*replay, "--num-blocks", "5")
    assert refused.exit_code == 1
    assert refused.stdout == ""
    assert "trace-2, the largest request" in refused.stderr
    (size,) = re.findall(r"--num-blocks (\d+)", refused.stderr)
    assert kvdepot(*replay, "--num-blocks", size).exit_code == 0


def test_replay_needs_bytes_to_write() -> None:
    with serving("--no-memory", "--num-blocks", "5000") as address:
        replay = ("replay", "--requests", "3", "--server", address)
        refused = kvdepot(*replay)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "add --no-bytes" in refused.stderr
        assert kvdepot(*replay, "--no-bytes").exit_code == 0


def test_progress_is_for_terminals(target: str) -> None:
    for arguments in (("audit",), ("pull", "--all")):
        assert kvdepot(*arguments, "--server", target).stderr == ""


@pytest.mark.parametrize(
    ("name", "with_server", "told"),
    [
        pytest.param("KVDEPOT_SERVR", True, "did you mean KVDEPOT_SERVER?", id="misspelt"),
        pytest.param("KVDEPOT_SERVERS", False, "did you mean KVDEPOT_SERVER?", id="client only"),
        pytest.param("KVDEPOT_NUM_BLOKS", True, "did you mean KVDEPOT_NUM_BLOCKS?", id="option"),
        pytest.param("KVDEPOT_NUM_BLOCKS", True, None, id="the server's"),
        pytest.param("KVDEPOT_NUM_BLOCKS", False, None, id="the server's, client only"),
        pytest.param("KVDEPOT_ORACLE_VENV", True, None, id="the tests'"),
        pytest.param("KVDEPOT_SERVER_PORT", False, None, id="Kubernetes'"),
    ],
)
def test_a_variable_that_is_none_is_told(
    target: str, monkeypatch: pytest.MonkeyPatch, name: str, with_server: bool, told: str | None
) -> None:
    for variable in [name for name in os.environ if name.startswith("KVDEPOT_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv(name, "9")
    if not with_server:
        without_the_server(monkeypatch)
    result = kvdepot("stat", "--server", target)
    assert result.exit_code == 0
    if told is None:
        assert result.stderr == ""
    else:
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"Warning: {name} is no variable of kvdepot") and told in line


def without_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvserver"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kvserver", None)


def test_serve_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without_the_server(monkeypatch)
    result = kvdepot("serve")
    assert result.exit_code == 1
    assert "pip install 'kvdepot[server]'" in result.stderr


def test_serve_has_the_servers_options() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--help"])
    assert caught.value.code == 0
