"""KV cache groups as an operator writes them: mappings with the fields of the specs.

A group is a mapping of its ``kind``, ``layer_names``, maybe ``is_eagle_group``, and the
fields of the kind's spec. Of kind ``uniform``, it has ``layers`` instead: a spec by layer
name. ``package.module:ClassName`` is a kind of one's own; importing the module registers it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from kvcore.errors import KVDepotError
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    TQFullAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from kvserver.option import yaml_value

KINDS: dict[str, type[KVCacheSpec]] = {
    "full_attention": FullAttentionSpec,
    "tq_full_attention": TQFullAttentionSpec,
    "mla_attention": MLAAttentionSpec,
    "hidden_state": HiddenStateCacheSpec,
    "sliding_window": SlidingWindowSpec,
    "sliding_window_mla": SlidingWindowMLASpec,
    "chunked_local_attention": ChunkedLocalAttentionSpec,
    "mamba": MambaSpec,
    "rswa": RSWASpec,
    "sink_full_attention": SinkFullAttentionSpec,
    "cross_attention": CrossAttentionSpec,
    "encoder_only_attention": EncoderOnlyAttentionSpec,
}
"""The kinds of attention by name; ``uniform`` is one more."""

UNIFORM = "uniform"


def groups_of(value: Any) -> tuple[KVCacheGroup, ...]:
    """Groups from a file's list, or from YAML in a flag or variable."""
    if isinstance(value, str):
        try:
            value = yaml_value(value)
        except ValueError as error:
            raise ValueError(f"is no YAML: {error}") from None
    return parse_groups(value)


def parse_groups(value: Any) -> tuple[KVCacheGroup, ...]:
    """Groups from what YAML gives. ValueError names the path of what is wrong."""
    if not isinstance(value, list):
        raise ValueError(f"must be a list of groups, got {_shown(value)}")
    return tuple(_group(item, f"[{index}]") for index, item in enumerate(value))


def _group(value: Any, path: str) -> KVCacheGroup:
    given = _mapping(value, path)
    kind = _kind(given, path)
    is_eagle = _plain(given.pop("is_eagle_group", False), bool, f"{path}.is_eagle_group")
    spec: KVCacheSpec
    if kind == UNIFORM:
        layers = _mapping(_taken(given, "layers", path), f"{path}.layers")
        _refuse_rest(given, path, f"a {UNIFORM} group has kind, layers and is_eagle_group")
        specs = {}
        for name, layer in layers.items():
            at = f"{path}.layers[{name}]"
            fields_of = _mapping(layer, at)
            specs[str(name)] = _spec(_kind(fields_of, at), fields_of, at)
        names = tuple(specs)
        first = next(iter(specs.values()), None)
        spec = _made(
            UniformTypeKVCacheSpecs,
            {"block_size": first.block_size if first else 1, "kv_cache_specs": specs},
            path,
        )
    else:
        names = _plain(_taken(given, "layer_names", path), tuple[str, ...], f"{path}.layer_names")
        spec = _spec(kind, given, path)
    group: KVCacheGroup = _made(
        KVCacheGroup, {"layer_names": names, "spec": spec, "is_eagle_group": is_eagle}, path
    )
    return group


def _spec(kind: str, given: dict[str, Any], path: str) -> KVCacheSpec:
    spec_class = KINDS.get(kind) or _own(kind, f"{path}.kind")
    hints = get_type_hints(spec_class)
    known = {field.name: field for field in fields(spec_class) if field.init}
    _refuse_rest(
        {name: value for name, value in given.items() if name not in known},
        path,
        f"{kind} has {', '.join(known)}",
    )
    arguments = {}
    for name, field in known.items():
        if name in given:
            value = given[name]
            if value is None and field.default is None:
                continue
            arguments[name] = _plain(value, hints[name], f"{path}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{path}.{name}: is needed for {kind}")
    spec: KVCacheSpec = _made(spec_class, arguments, path)
    return spec


def _kind(given: dict[str, Any], path: str) -> str:
    kind = _taken(given, "kind", path)
    if not isinstance(kind, str) or not (kind in KINDS or kind == UNIFORM or ":" in kind):
        raise ValueError(
            f"{path}.kind: must be one of {', '.join([*KINDS, UNIFORM])}, or module:Class, "
            f"got {_shown(kind)}"
        )
    return kind


def _own(kind: str, path: str) -> type[KVCacheSpec]:
    module, _, name = kind.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: cannot import {kind}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, KVCacheSpec)):
        raise ValueError(f"{path}: {kind} is no KVCacheSpec")
    return found


def _plain(value: Any, hint: Any, path: str) -> Any:
    """``value`` as a field's type wants it; types that YAML has no word for pass as they are."""
    if get_origin(hint) in (Union, UnionType):
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        if value is None and len(choices) < len(get_args(hint)):
            return None
        return _plain(value, choices[0], path)
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{path}: must be a list, got {_shown(value)}")
        inner = get_args(hint)[0]
        return tuple(_plain(item, inner, f"{path}[{i}]") for i, item in enumerate(value))
    words = {int: "a whole number", str: "text", bool: "true or false"}
    if hint in words and type(value) is not hint:
        raise ValueError(f"{path}: must be {words[hint]}, got {_shown(value)}")
    return value


def _made(make: Callable[..., Any], arguments: dict[str, Any], path: str) -> Any:
    try:
        return make(**arguments)
    except KVDepotError as error:
        at = f"{path}.{error.field}" if error.field else path
        raise ValueError(f"{at}: {error.message}") from error


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: must be a mapping, got {_shown(value)}")
    return dict(value)


def _taken(given: dict[str, Any], name: str, path: str) -> Any:
    if name not in given:
        raise ValueError(f"{path}.{name}: is needed")
    return given.pop(name)


def _refuse_rest(rest: Mapping[str, Any] | Sequence[str], path: str, known: str) -> None:
    for name in rest:
        raise ValueError(f"{path}.{name}: unknown field; {known}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
