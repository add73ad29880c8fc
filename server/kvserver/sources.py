"""Where options come from.

Flags win over ``KVDEPOT_*`` environment variables, those over the YAML file
(``--config FILE`` or ``KVDEPOT_CONFIG``), that over the defaults. An option has one name in
three spellings: ``--num-blocks``, ``KVDEPOT_NUM_BLOCKS``, ``num_blocks:``.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, NoReturn

from kvcore.errors import KVDepotError
from kvserver import environment
from kvserver.address import is_loopback, split_address
from kvserver.config import ConfigError, ServerConfig
from kvserver.option import bytes_shown, flag_of, yaml_value
from kvserver.spelling import did_you_mean

# Where, in the order of ServerConfig, a section of the help begins.
_SECTIONS = {
    "listen": "addresses",
    "model": "the model's shape",
    "num_blocks": "the pool's size (one of three) and place",
    "no_prefix_caching": "prefix caching and scheduling",
    "max_sessions": "limits of sessions",
    "lease_ttl_seconds": "leases and resets",
    "max_message_bytes": "messages and replies",
    "event_history": "events",
    "max_pulls": "transfers and imports",
    "drain_grace_seconds": "the end",
}


class _HelpFormatter(argparse.HelpFormatter):
    def _split_lines(self, text: str, width: int) -> list[str]:
        """No option or preset is broken in two."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


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
        "a flag takes true or false there. Flags win over variables, variables over the file. "
        "BYTES may have a unit, as 512MiB, 4GiB or 3MB, and most TOKENS too, as 3M or 128Ki.",
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "--config",
        default=argparse.SUPPRESS,
        help=f"YAML file of options (or {environment.PREFIX}CONFIG)",
        metavar="FILE",
    )
    section: argparse._ActionsContainer = parser
    for option in fields(ServerConfig):
        if option.name in _SECTIONS:
            section = parser.add_argument_group(_SECTIONS[option.name])
        flag, text = flag_of(option.name), option.metadata["help"]
        if option.default is False:
            section.add_argument(
                flag, action="store_const", const=True, default=argparse.SUPPRESS, help=text
            )
            continue
        if option.default not in (None, "") and "default" not in text:
            text += f" (default {_shown(option)})"
        section.add_argument(
            flag,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            metavar=option.metadata["metavar"],
        )
    return parser


def _shown(option: Field[Any]) -> str:
    """Its default."""
    default: Any = option.default
    if option.metadata["metavar"] == "BYTES":
        return bytes_shown(default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def option_names() -> tuple[str, ...]:
    """Of every option, with underscores."""
    return tuple(option.name for option in fields(ServerConfig))


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
        content = yaml_value(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # no UTF-8, or no YAML
        raise ConfigError(f"--config: {path} is no YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold a mapping of options")
    given = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options:
            hint = did_you_mean(
                str(key).replace("_", "-"), [name.replace("_", "-") for name in options]
            )
            raise ConfigError(f"--config: {path}: unknown option {key!r}{hint}")
        if value is not None:
            given[name] = _parsed(options[name], value, f"{path}: {key}")
    return given


# What the core calls otherwise than the options do.
_OPTION_OF = {"enable_caching": "no_prefix_caching", "layer_names": "groups"}


def _check(config: ServerConfig, sources: Mapping[str, str]) -> None:
    """What only several options together can break; ``sources`` is where each was given."""
    sizes = ("num_blocks", "capacity_tokens", "memory_bytes")
    given = [sources[name] for name in sizes if getattr(config, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: give one")
    host, _ = split_address(config.listen, option=sources.get("listen", "--listen"))
    data_host = host
    if config.data_listen:
        option = sources.get("data_listen", "--data-listen")
        data_host, _ = split_address(config.data_listen, option=option)
    bounds = {"listen": host, "metrics_host": config.metrics_host or host, "data_listen": data_host}
    for name, bound in bounds.items():
        if not is_loopback(bound) and not config.insecure_bind:
            raise ConfigError(
                f"{sources.get(name, flag_of(name))}: {bound} is not loopback; the server is not "
                "encrypted, so that needs --insecure-bind"
            )
    for low, high in (
        ("lease_ttl_seconds", "lease_ttl_seconds_max"),
        ("transfer_ttl_seconds", "transfer_ttl_seconds_max"),
        ("max_message_bytes", "reply_windows_bytes"),
    ):
        less, more = getattr(config, low), getattr(config, high)
        if less > more:
            low, high = (sources.get(name, flag_of(name)) for name in (low, high))
            raise ConfigError(f"{low} {less:.12g} is more than {high} {more:.12g}")
    if config.poison and config.no_memory:
        raise ConfigError(
            f"{sources['poison']}: there are no bytes to poison with {sources['no_memory']}"
        )
    config.kv_cache_groups()  # whose errors say where
    try:
        config.depot_config()
    except ConfigError as error:
        cause = error.__cause__
        name = cause.field if isinstance(cause, KVDepotError) else ""
        name = _OPTION_OF.get(name, name)
        if config.groups is not None and name == "block_size":
            name = "groups"
        if name in config.__slots__ and name != "num_blocks":
            source = sources.get(name, flag_of(name))
        else:  # of its size
            source = (*given, sources.get("block_size", "--capacity-tokens"))[0]
        raise ConfigError(f"{source}: {error}") from error
