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
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from kvcore.errors import KVDepotError
from kvcore.hashing import SCHEMES
from kvcore.spec import DTYPE_BYTES, DepotConfig, KVCacheConfig, KVCacheGroup, num_blocks_for
from kvserver.groups import parse_groups
from kvserver.presets import MODELS

ENV_PREFIX = "KVDEPOT_"
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


def _option(default: Any, parse: Callable[[Any], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text})


_INT32_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Every option of the server; see each one's help."""

    listen: str = _option(
        "127.0.0.1:50051", _text, "HOST:PORT to serve on; port 0 takes a free one"
    )
    uds: str = _option("", _text, "also serve on this Unix socket")
    metrics_port: int = _option(9464, _integer(0, 65535), "port of /metrics; 0 takes a free one")
    metrics_host: str = _option("", _text, "address of /metrics (default: the host of --listen)")
    no_metrics: bool = _option(False, _boolean, "serve no /metrics")
    insecure_bind: bool = _option(
        False, _boolean, "allow an address that is not loopback, without encryption"
    )
    model: str | None = _option(
        None,
        _text,
        f"shape preset: {', '.join(MODELS)} (default {_DEFAULT_MODEL}); with --groups any name",
    )
    groups: tuple[KVCacheGroup, ...] | None = _option(
        None, _groups, "KV cache groups, instead of a preset's: a list of mappings, in YAML"
    )
    weights_revision: str = _option("", _text, "revision of the weights, part of the fingerprint")
    num_layers: int | None = _option(None, _integer(1, 4096), "layers, instead of the preset's")
    num_kv_heads: int | None = _option(None, _integer(1, 4096), "KV heads, instead of the preset's")
    head_size: int | None = _option(None, _integer(1, 65536), "head size, instead of the preset's")
    dtype: str | None = _option(None, _choice(*DTYPE_BYTES), "dtype, instead of the preset's")
    block_size: int = _option(16, _integer(1, 65536), "tokens a block of a preset")
    num_blocks: int | None = _option(
        None, _integer(2, _INT32_MAX), "blocks of the pool, the null block among them"
    )
    capacity_tokens: int | None = _option(
        None,
        _integer(1, 1 << 50),
        f"size of the pool in tokens (default {_DEFAULT_CAPACITY_TOKENS})",
    )
    memory_bytes: int | None = _option(None, _integer(1, 1 << 62), "size of the pool in bytes")
    layout: str = _option("block", _choice("block", "layer"), "block: a block's layers together")
    mapping_dir: str = _option("", _text, "directory of the pool's file (default: /dev/shm)")
    no_memory: bool = _option(False, _boolean, "keep the books only, no bytes")
    no_prefix_caching: bool = _option(False, _boolean, "never hit")
    hash_scheme: str = _option(SCHEMES[0], _choice(*SCHEMES), f"one of {', '.join(SCHEMES)}")
    hash_seed: str = _option("0", _text, "seed of the block hashes")
    watermark: float = _option(0.0, _real(0.0, 0.99), "share of blocks kept free of admissions")
    max_model_len: int = _option(131_072, _integer(1, _INT32_MAX), "longest sequence, in tokens")
    max_num_batched_tokens: int | None = _option(
        None, _integer(1, _INT32_MAX), "most tokens of a step (default: --max-model-len)"
    )
    use_eagle: bool = _option(
        False, _boolean, "a draft model reads the cache: hits leave out their last block"
    )
    hash_block_size: int | None = _option(
        None,
        _integer(1, 1 << 20),
        "tokens a hash (default: what all groups' block sizes are multiples of)",
    )
    prefix_cache_retention_interval: int | None = _option(
        None,
        _integer(0, _INT32_MAX),
        "keep windows and states at every so many tokens; 0: at the prompt's end only "
        "(default: at every boundary)",
    )
    dcp_world_size: int = _option(1, _integer(1, 4096), "ranks of decode context parallelism")
    pcp_world_size: int = _option(1, _integer(1, 4096), "ranks of prefill context parallelism")
    max_sessions: int = _option(1024, _integer(1, 1 << 20), "open sessions")
    max_requests_per_session: int = _option(65_536, _integer(1, 1 << 24), "requests of a session")
    residency_sample_rate: float = _option(
        0.01, _real(0.0, 1.0), "share of blocks whose lifetimes are sampled"
    )
    max_message_bytes: int = _option(
        64 << 20, _integer(1 << 16, _INT32_MAX), "largest message received or sent"
    )
    reply_window: int = _option(64, _integer(1, 65_536), "replies a session can replay by op_seq")
    event_history: int = _option(65_536, _integer(0, 1 << 24), "events kept for resuming")
    event_queue: int = _option(1024, _integer(1, 1 << 20), "batches a subscriber may lag")
    event_heartbeat_s: float = _option(5.0, _real(0.01, 3600), "idle time before a heartbeat")
    max_subscribers: int = _option(1024, _integer(0, 1 << 20), "event subscribers")
    drain_grace_s: float = _option(10.0, _real(0.0, 3600), "how long a stop waits for sessions")

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
                num_blocks = _num_blocks_of(tokens, groups) + 1
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
                max_num_batched_tokens=self.max_num_batched_tokens,  # type: ignore[arg-type]
                hash_block_size=self.hash_block_size,  # type: ignore[arg-type]
                use_eagle=self.use_eagle,
                prefix_cache_retention_interval=self.prefix_cache_retention_interval,
                dcp_world_size=self.dcp_world_size,
                pcp_world_size=self.pcp_world_size,
            )
        except KVDepotError as error:
            is_option = error.field in self.__slots__ and error.field not in error.message
            named = f"{error.field}: " if is_option else ""
            raise ConfigError(named + error.message) from error

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag an option; those left out leave no trace in the namespace."""
    parser.add_argument("--config", default=argparse.SUPPRESS, help="YAML file of options")
    for option in fields(ServerConfig):
        flag = "--" + option.name.replace("_", "-")
        text = option.metadata["help"]
        if option.default is False:
            parser.add_argument(
                flag, action="store_const", const=True, default=argparse.SUPPRESS, help=text
            )
            continue
        if option.default not in (None, "", MISSING) and "default" not in text:
            text += f" (default {option.default})"
        parser.add_argument(
            flag, default=argparse.SUPPRESS, help=text.replace("%", "%%"), metavar="VALUE"
        )


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> ServerConfig:
    """The configuration from parsed flags (by option name), environment and file."""
    options = {option.name: option for option in fields(ServerConfig)}
    path = flags.get("config") or environ.get(ENV_PREFIX + "CONFIG")
    given: dict[str, Any] = {}
    if path:
        given.update(_read_file(str(path), options))
    for name, option in options.items():
        if name in flags and flags[name] is not None:
            given[name] = _parsed(option, flags[name], "--" + name.replace("_", "-"))
        elif (variable := ENV_PREFIX + name.upper()) in environ:
            given[name] = _parsed(option, environ[variable], variable)
    config = ServerConfig(**given)
    _check(config)
    return config


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServerConfig:
    """The configuration from a command line (without the program's name).

    An unknown flag exits with a usage message; an unusable value raises ConfigError.
    """
    parser = argparse.ArgumentParser(
        prog="kvdepot serve", description="Serve a KV-cache pool.", allow_abbrev=False
    )
    add_arguments(parser)
    return load(vars(parser.parse_args(argv)), os.environ if environ is None else environ)


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
            raise ConfigError(f"--config: {path}: unknown option {key!r}")
        if value is not None:
            given[name] = _parsed(options[name], value, f"{path}: {key}")
    return given


def _check(config: ServerConfig) -> None:
    """What only several options together can break."""
    sizes = ("num_blocks", "capacity_tokens", "memory_bytes")
    given = [name for name in sizes if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: give one")
    host, _ = split_address(config.listen, option="--listen")
    for name, bound in (("--listen", host), ("--metrics-host", config.metrics_host or host)):
        if not is_loopback(bound) and not config.insecure_bind:
            raise ConfigError(
                f"{name}: {bound} is not loopback; the server is not encrypted, "
                "so that needs --insecure-bind"
            )
    config.depot_config()
