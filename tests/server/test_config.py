"""Where an option's value comes from, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from kvserver import headroom
from kvserver.address import is_loopback, split_address
from kvserver.config import ConfigError, ServerConfig
from kvserver.sources import parse


@pytest.mark.parametrize(
    ("flag", "env", "file", "expected"),
    [
        pytest.param(None, None, None, None, id="default"),
        pytest.param(None, None, "8", 8, id="file"),
        pytest.param(None, "32", "8", 32, id="environment over file"),
        pytest.param("64", "32", "8", 64, id="flag over environment"),
        pytest.param("64", None, "8", 64, id="flag over file"),
        pytest.param("64", None, None, 64, id="flag"),
        pytest.param(None, "32", None, 32, id="environment"),
    ],
)
def test_precedence(
    tmp_path: Path, flag: str | None, env: str | None, file: str | None, expected: int | None
) -> None:
    argv = [] if flag is None else ["--block-size", flag]
    environ = {} if env is None else {"KVDEPOT_BLOCK_SIZE": env}
    if file is not None:
        path = tmp_path / "kvdepot.yaml"
        path.write_text(f"block-size: {file}\n")
        argv += ["--config", str(path)]
    assert parse(argv, environ).block_size == expected


@pytest.mark.parametrize(
    ("argv", "environ", "named"),
    [
        pytest.param(["--block-size", "none"], {}, "--block-size", id="not a number"),
        pytest.param(["--block-size", "0"], {}, "--block-size", id="below its range"),
        pytest.param([], {"KVDEPOT_NUM_BLOCKS": "1"}, "KVDEPOT_NUM_BLOCKS", id="environment"),
        pytest.param(["--watermark", "nan"], {}, "--watermark", id="not a real number"),
        pytest.param(["--model", "gpt-9"], {}, "--model", id="unknown preset"),
        pytest.param(
            ["--poison"], {"KVDEPOT_NO_MEMORY": "1"}, "--poison: there are no", id="no bytes"
        ),
        pytest.param(["--device", "gpu"], {}, "--device: must be cpu, cuda:N", id="no device"),
        pytest.param([], {"KVDEPOT_DEVICE": "cuda:1,1"}, "KVDEPOT_DEVICE", id="a device twice"),
        pytest.param(
            ["--device", "cuda:0,1", "--tensor-parallel-size", "2", "--tensor-parallel-rank", "1"],
            {},
            "--tensor-parallel-rank: a pool of 2 ranks",
            id="ranks beyond the group",
        ),
        pytest.param([], {"KVDEPOT_NO_MEMORY": "maybe"}, "KVDEPOT_NO_MEMORY", id="boolean"),
        pytest.param(["--listen", "50051"], {}, "--listen", id="no host"),
        pytest.param(["--listen", "::1:5"], {}, "--listen", id="bare IPv6"),
        pytest.param(["--listen", "localhost:99999"], {}, "--listen", id="port too large"),
        pytest.param(["--listen", "0.0.0.0:1"], {}, "--insecure-bind", id="not loopback"),
        pytest.param(["--listen", "example.org:1"], {}, "--insecure-bind", id="a name"),
        pytest.param(["--metrics-host", "0.0.0.0"], {}, "--insecure-bind", id="metrics"),
        pytest.param(
            ["--num-blocks", "9"],
            {"KVDEPOT_MEMORY_BYTES": "9"},
            "--num-blocks and KVDEPOT_MEMORY_BYTES exclude each other",
            id="two sizes",
        ),
        pytest.param(
            ["--memory-bytes", "100"], {}, "--memory-bytes: .* at least 2", id="too little memory"
        ),
        pytest.param(
            ["--capacity-tokens", "15"],
            {},
            "--capacity-tokens: 15 .* at least 16",
            id="half a block",
        ),
        pytest.param(["--capacity-tokens", "0"], {}, "must be at least 1, got 0", id="no tokens"),
        pytest.param(["--capacity-tokens", "-5"], {}, "a number of tokens", id="less than none"),
        pytest.param(["--capacity-tokens", "3MiB"], {}, "a number of tokens.* 3M,", id="not bytes"),
        pytest.param(["--memory-bytes", "4 gigs"], {}, "such as 512MiB, 4GiB", id="no unit"),
        pytest.param(["--memory-bytes", "0.1KiB"], {}, "a number of bytes", id="part of a byte"),
        pytest.param(["--memory-bytes", "9999999T"], {}, "must be at most", id="too many bytes"),
        pytest.param(["--groups", "[{"], {}, "--groups: is no YAML: line 1, col", id="no YAML"),
        pytest.param(
            [], {"KVDEPOT_CAPACITY_TOKENS": str(1 << 50)}, "KVDEPOT_CAP.*int32", id="endless"
        ),
        pytest.param(["--block-size"], {}, "--block-size: expected one", id="no value"),
        pytest.param(["--num-block", "9"], {}, "did you mean --num-blocks", id="misspelt flag"),
        pytest.param(["--num-block=9"], {}, "did you mean --num-blocks", id="misspelt with value"),
        pytest.param(["--zork"], {}, "--zork is no option; see `kvdepot serve --help`", id="none"),
        pytest.param(["stray"], {}, "stray is no option", id="stray word"),
        pytest.param(
            ["--transfer-ttl-seconds-max", "5"],
            {},
            "--transfer-ttl-seconds 30 is more than --transfer-ttl-seconds-max 5",
            id="a lease longer than the longest",
        ),
        pytest.param([], {"KVDEPOT_LISTEN": "tcp://10.0.0.1:5"}, "KVDEPOT_LISTEN", id="a URL"),
        pytest.param(["--config", "/nonexistent.yaml"], {}, "--config", id="no such file"),
    ],
)
def test_refused(argv: list[str], environ: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse(argv, environ)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param("blok-size: 8", "'blok-size'; did you mean block-size", id="unknown option"),
        pytest.param("- 8", "mapping", id="a list"),
        pytest.param("groups:\n- [a", "is no YAML: line 2, column 5: expected", id="cut off"),
        pytest.param("a: \x07", "is no YAML: unacceptable character", id="no text"),
        pytest.param("block-size: [8]", "block-size", id="a list as value"),
        pytest.param("block-size: true", "block-size", id="a boolean as number"),
        pytest.param(
            "a: b: c", r"/kvdepot.yaml is no YAML: line 1, column 5: mapping", id="not YAML"
        ),
    ],
)
def test_refused_file(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "kvdepot.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        parse([], {"KVDEPOT_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        pytest.param("KVDEPOT_NUM_BLOKS", "9", "did you mean KVDEPOT_NUM_BLOCKS?", id="misspelt"),
        pytest.param("KVDEPOT_num_blocks", "9", "did you mean KVDEPOT_NUM_BLOCKS?", id="small"),
        pytest.param("KVDEPOT_ZORK", "9", "KVDEPOT_ZORK is no variable of kvdepot", id="like none"),
        pytest.param(
            "KVDEPOT_METRICS_PORT", "tcp://10.0.0.1:9464", "the Service kvdepot-metrics", id="link"
        ),
        pytest.param("KVDEPOT_PORT", "tcp://10.0.0.1:50051", None, id="Service kvdepot"),
        pytest.param("KVDEPOT_PORT_50051_TCP_ADDR", "10.0.0.1", None, id="its address"),
        pytest.param("KVDEPOT_SERVICE_HOST", "10.0.0.1", None, id="its host"),
        pytest.param("KVDEPOT_SERVICE_PORT_GRPC", "50051", None, id="its named port"),
        pytest.param("KVDEPOT_METRICS_SERVICE_HOST", "10.0.0.1", None, id="another Service"),
        pytest.param("KVDEPOT_SERVER", "127.0.0.1:1", None, id="the commands' variable"),
        pytest.param("KVDEPOT_SERVR", "9", "did you mean KVDEPOT_SERVER?", id="misspelt command's"),
        pytest.param("KVDEPOT_ORACLE_VENV", "/v", None, id="the tests' variable"),
        pytest.param("KUBERNETES_PORT", "tcp://10.0.0.1:443", None, id="not ours"),
    ],
)
def test_variables_that_are_no_options(
    caplog: pytest.LogCaptureFixture, variable: str, value: str, told: str | None
) -> None:
    assert parse([], {variable: value}) == parse([], {})
    if told is None:
        assert caplog.messages == []
    else:
        (message,) = caplog.messages
        assert told in message and variable in message


def test_help_says_what_to_write_and_what_wins(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("--listen HOST:PORT", "--layout {block,layer}", "--drain-grace-seconds SECONDS"):
        assert words in text
    assert "VALUE" not in text
    assert "Flags win over variables, variables over the file" in text


@pytest.mark.parametrize(
    ("files", "available"),
    [
        pytest.param({}, None, id="nothing known"),
        pytest.param({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  7 kB\n"}, 7168, id="memory"),
        pytest.param(
            {
                "proc/meminfo": "MemAvailable: 7 kB\n",
                "proc/self/cgroup": "0::/pod/box\n",
                "sys/fs/cgroup/pod/box/memory.max": "max\n",
                "sys/fs/cgroup/pod/memory.max": "5000\n",
            },
            5000,
            id="the group around",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu:/a\n2:memory:/unseen\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "6000\n",
            },
            6000,
            id="version 1 in a container",
        ),
    ],
)
def test_available_memory(tmp_path: Path, files: dict[str, str], available: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert headroom.available_bytes(tmp_path) == available


@pytest.mark.parametrize(
    ("argv", "num_blocks"),
    [
        pytest.param(["--num-blocks", "100"], 100, id="blocks"),
        pytest.param(["--capacity-tokens", "3000000", "--block-size", "512"], 5860, id="tokens"),
        # 16 tokens of 128 bytes a block.
        pytest.param(["--memory-bytes", str(100 * 2048)], 100, id="bytes"),
        pytest.param(["--capacity-tokens", "3M", "--block-size", "512"], 5860, id="in millions"),
        pytest.param(["--capacity-tokens", "2Ki"], 129, id="in powers of two"),
        pytest.param(["--memory-bytes", "0.5MiB"], 256, id="half of a MiB"),
        pytest.param(["--memory-bytes", "1 mib"], 512, id="written otherwise"),
        pytest.param(["--memory-bytes", "2_048MB"], 1_000_000, id="powers of ten"),
        pytest.param([], 4097, id="default"),
    ],
)
def test_pool_size(argv: list[str], num_blocks: int) -> None:
    assert parse(argv, {}).depot_config().kv_cache.num_blocks == num_blocks


def test_a_shape_of_ones_own() -> None:
    config = parse(["--model", "qwen2-0.5b", "--num-layers", "3", "--dtype", "float32"], {})
    (group,) = config.depot_config().kv_cache.groups
    assert len(group.layer_names) == 3
    assert group.spec.page_size_bytes == 16 * 2 * 2 * 64 * 4


def test_an_open_bind_is_possible_when_asked_for() -> None:
    assert parse(["--listen", "0.0.0.0:1", "--insecure-bind"], {}).insecure_bind
    assert parse(["--listen", "[::1]:1"], {"KVDEPOT_NO_METRICS": "true"}).no_metrics


@pytest.mark.parametrize(
    ("address", "split", "loopback"),
    [
        pytest.param("127.0.0.1:0", ("127.0.0.1", 0), True, id="IPv4"),
        pytest.param("127.8.0.1:9", ("127.8.0.1", 9), True, id="another loopback"),
        pytest.param("[::1]:65535", ("::1", 65535), True, id="IPv6"),
        pytest.param("localhost:1", ("localhost", 1), True, id="name"),
        pytest.param("[::]:1", ("::", 1), False, id="any IPv6"),
        pytest.param("10.0.0.1:1", ("10.0.0.1", 1), False, id="private"),
    ],
)
def test_addresses(address: str, split: tuple[str, int], loopback: bool) -> None:
    assert split_address(address, option="--listen") == split
    assert is_loopback(split[0]) is loopback


def test_a_device_is_a_rank() -> None:
    flags = ["--device", "cuda:2,0", "--tensor-parallel-size", "4", "--tensor-parallel-rank", "2"]
    config = parse(flags, {}).depot_config()
    assert (config.tensor_parallel_size, config.tensor_parallel_rank, config.num_ranks) == (4, 2, 2)
    assert parse(flags[:2], {}).depot_config().tensor_parallel_size == 2
    assert config.medium == "GPU"
    assert parse([], {}).depot_config().medium == "CPU"


def test_every_number_of_bytes_takes_units() -> None:
    for option in fields(ServerConfig):
        if option.metadata.get("metavar") == "BYTES" and option.default:
            assert option.metadata["parse"](f"{option.default / 1024}KiB") == option.default
