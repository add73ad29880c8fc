"""The server's configuration: parsed once, loudly, into one frozen value.

Flags win over ``KVDEPOT_*`` environment variables, those over the YAML file
(``--config FILE`` or ``KVDEPOT_CONFIG``), that over the defaults. An option has one name in
three spellings: ``--num-blocks``, ``KVDEPOT_NUM_BLOCKS``, ``num_blocks:``.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from kvcore.errors import KVDepotError
from kvcore.hashing import SCHEMES
from kvcore.spec import DTYPE_BYTES, DepotConfig, KVCacheConfig, KVCacheGroup, num_blocks_for
from kvserver import environment
from kvserver.groups import parse_groups
from kvserver.presets import MODELS
from kvserver.spelling import did_you_mean

_DEFAULT_CAPACITY_TOKENS = 65_536
_DEFAULT_MODEL = "tiny"


class ConfigError(ValueError):
    """An option that cannot be used; the message names it."""


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"must be a whole number, got {value!r}")
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"must be a whole number, got {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}, got {number}")
        return number

    return parse


def _real(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError(f"must be a number, got {value!r}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"must be a number, got {value!r}") from None
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}, got {number}")
        return number

    return parse


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"must be text, got {value!r}")
    return str(value)


def _choice(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}, got {value!r}")
        return str(value)

    return parse


def _one_of(*choices: str) -> str:
    return "{" + ",".join(choices) + "}"


def _boolean(value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"must be true or false, got {value!r}")
    return words[str(value).lower()]


def _groups(value: Any) -> tuple[KVCacheGroup, ...]:
    """Groups from a file's list, or from YAML in a flag or variable."""
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"is no YAML: {error}") from None
    return parse_groups(value)


def _option(default: Any, parse: Callable[[Any], Any], text: str, metavar: str = "") -> Any:
    return field(default=default, metadata={"parse": parse, "help": text, "metavar": metavar})


_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every option of the server; see each one's help."""

    listen: str = _option(
        "127.0.0.1:50051", _text, "serve there; port 0 takes a free one", "HOST:PORT"
    )
    uds: str = _option("", _text, "serve on this Unix socket as well", "PATH")
    metrics_port: int = _option(
        9464, _integer(0, 65535), "port of /metrics; 0 takes a free one", "PORT"
    )
    metrics_host: str = _option(
        "", _text, "address of /metrics (default: the host of --listen)", "HOST"
    )
    no_metrics: bool = _option(False, _boolean, "serve no /metrics")
    insecure_bind: bool = _option(
        False, _boolean, "allow an address that is not loopback, without encryption"
    )
    model: str | None = _option(
        None,
        _text,
        f"shape preset: {', '.join(MODELS)} (default {_DEFAULT_MODEL}); with --groups any name",
        "NAME",
    )
    groups: tuple[KVCacheGroup, ...] | None = _option(
        None, _groups, "KV cache groups, instead of a preset's: a list of mappings", "YAML"
    )
    weights_revision: str = _option(
        "", _text, "revision of the weights, part of the fingerprint", "NAME"
    )
    num_layers: int | None = _option(
        None, _integer(1, 4096), "layers, instead of the preset's", "N"
    )
    num_kv_heads: int | None = _option(
        None, _integer(1, 4096), "KV heads, instead of the preset's", "N"
    )
    head_size: int | None = _option(
        None, _integer(1, 65536), "head size, instead of the preset's", "N"
    )
    dtype: str | None = _option(
        None, _choice(*DTYPE_BYTES), "dtype, instead of the preset's", _one_of(*DTYPE_BYTES)
    )
    block_size: int = _option(16, _integer(1, 65536), "tokens a block of a preset", "TOKENS")
    num_blocks: int | None = _option(
        None, _integer(2, _INT32_MAX), "size of the pool in blocks, the null block among them", "N"
    )
    capacity_tokens: int | None = _option(
        None,
        _integer(1, 1 << 50),
        f"size of the pool in tokens (default {_DEFAULT_CAPACITY_TOKENS})",
        "TOKENS",
    )
    memory_bytes: int | None = _option(
        None, _integer(1, 1 << 62), "size of the pool in bytes", "BYTES"
    )
    max_books_bytes: int | None = _option(
        None,
        _integer(1, 1 << 62),
        "most memory that the books of a full pool may take, by an estimate "
        "(default: what the machine has available)",
        "BYTES",
    )
    layout: str = _option(
        "block",
        _choice("block", "layer"),
        "what lies together: the layers of a block, or the blocks of a layer",
        _one_of("block", "layer"),
    )
    mapping_dir: str = _option("", _text, "directory of the pool's file (default: /dev/shm)", "DIR")
    no_memory: bool = _option(False, _boolean, "keep the books only, no bytes")
    no_prefix_caching: bool = _option(False, _boolean, "never hit")
    hash_scheme: str = _option(
        SCHEMES[0], _choice(*SCHEMES), "how blocks are hashed", _one_of(*SCHEMES)
    )
    hash_seed: str = _option("0", _text, "seed of the block hashes", "TEXT")
    watermark: float = _option(
        0.0, _real(0.0, 0.99), "share of blocks kept free of admissions", "SHARE"
    )
    max_model_len: int = _option(
        131_072, _integer(1, _INT32_MAX), "longest sequence, in tokens", "TOKENS"
    )
    max_num_batched_tokens: int | None = _option(
        None, _integer(1, _INT32_MAX), "most tokens of a step (default: --max-model-len)", "TOKENS"
    )
    use_eagle: bool = _option(
        False, _boolean, "a draft model reads the cache: hits leave out their last block"
    )
    hash_block_size: int | None = _option(
        None,
        _integer(1, 1 << 20),
        "tokens a hash (default: what all groups' block sizes are multiples of)",
        "TOKENS",
    )
    prefix_cache_retention_interval: int | None = _option(
        None,
        _integer(0, _INT32_MAX),
        "keep windows and states at every so many tokens; 0: at the prompt's end only "
        "(default: at every boundary)",
        "TOKENS",
    )
    dcp_world_size: int = _option(1, _integer(1, 4096), "ranks of decode context parallelism", "N")
    pcp_world_size: int = _option(1, _integer(1, 4096), "ranks of prefill context parallelism", "N")
    max_sessions: int = _option(1024, _integer(1, 1 << 20), "sessions that are open at a time", "N")
    max_requests_per_session: int = _option(
        65_536, _integer(1, 1 << 24), "requests that a session has at a time", "N"
    )
    max_tokens_per_session: int = _option(
        1 << 26, _integer(1, 1 << 40), "tokens of all requests of a session together", "TOKENS"
    )
    max_workers_per_session: int = _option(
        256, _integer(1, 65_536), "workers attached under a session", "N"
    )
    max_concurrent_streams: int = _option(
        16_384,
        _integer(1, 1 << 20),
        "open streams of all methods together: StepStream, StreamEvents, AttachWorker, PullBlocks, "
        "health's Watch",
        "N",
    )
    lease_ttl_seconds: float = _option(
        30.0,
        _real(0.01, 86_400),
        "how long a session lives after its last call, unless it asks for another time",
        "SECONDS",
    )
    lease_ttl_seconds_max: float = _option(
        600.0, _real(0.01, 86_400), "the longest lease that a session may ask for", "SECONDS"
    )
    quarantine_seconds: float = _option(
        60.0,
        _real(0.0, 86_400),
        "how long the blocks of an ended session are held back, at most, while workers attached "
        "under it remain",
        "SECONDS",
    )
    worker_heartbeat_s: float = _option(
        5.0, _real(0.01, 3600), "time between the messages of AttachWorker", "SECONDS"
    )
    reset_deadline_seconds: float = _option(
        300.0,
        _real(0.01, 86_400),
        "how long a draining reset waits before it is abandoned; callers may ask for less",
        "SECONDS",
    )
    residency_sample_rate: float = _option(
        0.01, _real(0.0, 1.0), "share of blocks whose lifetimes are sampled", "SHARE"
    )
    max_message_bytes: int = _option(
        64 << 20,
        _integer(1 << 16, _INT32_MAX),
        "largest message received or sent; a larger one is RESOURCE_EXHAUSTED",
        "BYTES",
    )
    reply_window: int = _option(
        64, _integer(1, 65_536), "replies a session can replay by op_seq", "N"
    )
    event_history: int = _option(65_536, _integer(0, 1 << 24), "events kept for resuming", "N")
    event_queue: int = _option(1024, _integer(1, 1 << 20), "batches a subscriber may lag", "N")
    event_heartbeat_s: float = _option(
        5.0, _real(0.01, 3600), "idle time before a heartbeat", "SECONDS"
    )
    max_subscribers: int = _option(1024, _integer(0, 1 << 20), "event subscribers", "N")
    max_pulls: int = _option(64, _integer(1, 1 << 16), "PullBlocks at a time", "N")
    pull_stall_s: float = _option(
        30.0, _real(0.01, 3600), "how long a pull waits for a peer that reads nothing", "SECONDS"
    )
    drain_grace_s: float = _option(
        10.0, _real(0.0, 3600), "how long a stop waits for sessions", "SECONDS"
    )

    def kv_cache_groups(self) -> tuple[KVCacheGroup, ...]:
        """The groups given, or the preset's with what options override. Raises ConfigError."""
        names = ("num_layers", "num_kv_heads", "head_size", "dtype")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.groups is not None:
            if given:
                raise ConfigError(f"{' and '.join(given)} cannot override groups: change them")
            return self.groups
        name = _DEFAULT_MODEL if self.model is None else self.model
        shape = MODELS.get(name)
        if shape is None:
            raise ConfigError(
                f"--model: must be one of {', '.join(MODELS)}, or come with --groups; got {name!r}"
            )
        try:
            return replace(shape, **given).groups(self.block_size)  # type: ignore[type-var]
        except KVDepotError as error:
            raise ConfigError(f"--model {name}: {error.field}: {error.message}") from error

    def depot_config(self) -> DepotConfig:
        """What the core is built from. Raises ConfigError."""
        groups = self.kv_cache_groups()
        try:
            num_blocks = self.num_blocks
            if self.memory_bytes is not None:
                num_blocks = num_blocks_for(self.memory_bytes, groups)
            elif num_blocks is None:
                tokens = self.capacity_tokens or _DEFAULT_CAPACITY_TOKENS
                num_blocks = _num_blocks_of(tokens, groups)
                if not num_blocks:
                    raise ConfigError(f"{tokens} tokens are less than one block of every group")
                num_blocks += 1
            return DepotConfig(
                KVCacheConfig(num_blocks, groups),
                max_model_len=self.max_model_len,
                enable_caching=not self.no_prefix_caching,
                hash_scheme=self.hash_scheme,
                hash_seed=self.hash_seed,
                watermark=self.watermark,
                model=self.model or ("" if self.groups is not None else _DEFAULT_MODEL),
                weights_revision=self.weights_revision,
                layout=self.layout,
                residency_sample_rate=self.residency_sample_rate,
                max_sessions=self.max_sessions,
                max_requests_per_session=self.max_requests_per_session,
                max_tokens_per_session=self.max_tokens_per_session,
                max_workers_per_session=self.max_workers_per_session,
                max_num_batched_tokens=self.max_num_batched_tokens,  # type: ignore[arg-type]
                hash_block_size=self.hash_block_size,  # type: ignore[arg-type]
                use_eagle=self.use_eagle,
                prefix_cache_retention_interval=self.prefix_cache_retention_interval,
                dcp_world_size=self.dcp_world_size,
                pcp_world_size=self.pcp_world_size,
            )
        except KVDepotError as error:
            raise ConfigError(error.message) from error

    def mapping_directory(self) -> str:
        """Where the pool's file goes: the option, else /dev/shm, else the temporary directory."""
        if self.mapping_dir:
            return self.mapping_dir
        return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def _num_blocks_of(num_tokens: int, groups: tuple[KVCacheGroup, ...]) -> int:
    """Blocks that hold so many tokens, were every group to keep them all."""
    sizes = [group.spec.block_size for group in groups if group.holds_blocks]
    return num_tokens // min(sizes) * len(sizes) if sizes else 1


def split_address(address: str, *, option: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not port.isascii():
        raise ConfigError(f"{option}: must be HOST:PORT, got {address!r}")
    if not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{option}: port must be between 0 and 65535, got {port!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address bound to ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        raise ConfigError(f"{message}; see `kvdepot serve --help`")


def _parser() -> _Parser:
    parser = _Parser(
        prog="kvdepot serve",
        usage="%(prog)s [OPTION]...",
        description="Serve a KV-cache pool.",
        epilog="Each option is also an environment variable, and a key of the YAML file: "
        f"--num-blocks is {environment.PREFIX}NUM_BLOCKS and `num-blocks:`; what takes no value as "
        "a flag takes true or false there. Flags win over variables, variables over the file.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        help=f"YAML file of options (or {environment.PREFIX}CONFIG)",
        metavar="FILE",
    )
    for option in fields(ServerConfig):
        flag, text = flag_of(option.name), option.metadata["help"]
        if option.default is False:
            parser.add_argument(
                flag, action="store_const", const=True, default=argparse.SUPPRESS, help=text
            )
            continue
        if option.default not in (None, "") and "default" not in text:
            text += f" (default {option.default})"
        parser.add_argument(
            flag,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            metavar=option.metadata["metavar"],
        )
    return parser


def flag_of(name: str) -> str:
    """The flag of the option ``name``."""
    return "--" + name.replace("_", "-")


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServerConfig:
    """The configuration from parsed flags (by option name), environment and file.

    Variables that are misspelt, or Kubernetes' own, are told in the log.
    """
    options = {option.name: option for option in fields(ServerConfig)}
    path = flags.get("config") or environ.get(environment.PREFIX + "CONFIG")
    variables = environment.read(environ, options)
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if path:
        given.update(_read_file(str(path), options))
        sources.update({name: f"{path}: {name}" for name in given})
    for name, option in options.items():
        if name in flags and flags[name] is not None:
            value, sources[name] = flags[name], flag_of(name)
        elif name in variables:
            value, sources[name] = variables[name], environment.variable_of(name)
        else:
            continue
        given[name] = _parsed(option, value, sources[name])
    config = ServerConfig(**given)
    _check(config, sources)
    return config


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """The configuration from a command line (without the program's name).

    ``--help`` exits; an unknown flag or an unusable value raises ConfigError.
    """
    flags, unknown = _parser().parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        known = [flag_of(option.name) for option in fields(ServerConfig)] + ["--config"]
        hint = did_you_mean(word, known)
        raise ConfigError(f"{word} is no option{hint or '; see `kvdepot serve --help`'}")
    return load(vars(flags), os.environ if environ is None else environ)


def _parsed(option: Field[Any], value: Any, source: str) -> Any:
    try:
        return option.metadata["parse"](value)
    except ValueError as error:
        text = str(error)  # may begin with a path within the option
        raise ConfigError(source + ("" if text.startswith("[") else ": ") + text) from None


def _read_file(path: str, options: Mapping[str, Field[Any]]) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold a mapping of options")
    given = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options:
            hint = did_you_mean(name, options)
            raise ConfigError(f"--config: {path}: unknown option {key!r}{hint}")
        if value is not None:
            given[name] = _parsed(options[name], value, f"{path}: {key}")
    return given


def _check(config: ServerConfig, sources: Mapping[str, str]) -> None:
    """What only several options together can break; ``sources`` is where each was given."""
    sizes = ("num_blocks", "capacity_tokens", "memory_bytes")
    given = [sources[name] for name in sizes if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: give one")
    host, _ = split_address(config.listen, option=sources.get("listen", "--listen"))
    for name, bound in (("listen", host), ("metrics_host", config.metrics_host or host)):
        if not is_loopback(bound) and not config.insecure_bind:
            raise ConfigError(
                f"{sources.get(name, flag_of(name))}: {bound} is not loopback; the server is not "
                "encrypted, so that needs --insecure-bind"
            )
    if config.lease_ttl_seconds > config.lease_ttl_seconds_max:
        ttl, most = (
            sources.get(name, flag_of(name))
            for name in ("lease_ttl_seconds", "lease_ttl_seconds_max")
        )
        raise ConfigError(
            f"{ttl} {config.lease_ttl_seconds:g} is more than {most} "
            f"{config.lease_ttl_seconds_max:g}"
        )
    config.kv_cache_groups()  # whose errors say where
    try:
        config.depot_config()
    except ConfigError as error:
        cause = error.__cause__
        name = cause.field if isinstance(cause, KVDepotError) else ""
        if name in config.__slots__ and name != "num_blocks":
            source = sources.get(name, flag_of(name))
        else:  # of its size
            source = (*given, sources.get("block_size", "--capacity-tokens"))[0]
        raise ConfigError(f"{source}: {error}") from error
