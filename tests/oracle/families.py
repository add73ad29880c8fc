"""Families of configurations: what kinds of attention a pool serves, and under which rules.

A family draws its groups and rules from a random generator alone. What no family of vLLM's
models has (say chunked local attention beside blocks of another size) is not drawn here:
test_refusals.py shows that both sides refuse it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

Spec = dict[str, Any]
Config = dict[str, Any]

HEADS = {"num_kv_heads": 1, "head_size": 16, "dtype": "float16"}


def full(block_size: int, kind: str = "FullAttentionSpec", **fields: Any) -> Spec:
    return {"kind": kind, "block_size": block_size, **HEADS, **fields}


def sliding(block_size: int, window: int, kind: str = "SlidingWindowSpec", **fields: Any) -> Spec:
    return full(block_size, kind, sliding_window=window, **fields)


def chunked(block_size: int, chunk: int) -> Spec:
    return full(block_size, "ChunkedLocalAttentionSpec", attention_chunk_size=chunk)


def mamba(block_size: int, mode: str, num_speculative_blocks: int = 0) -> Spec:
    return {
        "kind": "MambaSpec",
        "block_size": block_size,
        "shapes": [[3, 8], [4, 4]],
        "dtypes": ["float16", "float32"],
        "mamba_cache_mode": mode,
        "num_speculative_blocks": num_speculative_blocks,
    }


def group(*specs: Spec, eagle: bool = False) -> list[dict[str, Any]]:
    """One group for each spec."""
    return [{"spec": spec, "eagle": eagle} for spec in specs]


def plain_config(groups: list[dict[str, Any]], **rules: Any) -> Config:
    """A configuration of these groups, with no rules but those given."""
    return {
        "groups": [{"layers": [f"layer.{number}"], **one} for number, one in enumerate(groups)],
        "num_blocks": 65,
        "max_model_len": 96,
        "max_num_batched_tokens": None,
        "hash_block_size": None,
        "enable_caching": True,
        "use_eagle": False,
        "retention_interval": None,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "events": True,
        "log_stats": True,
        "watermark": 0.0,
        "drain_every": 1,
        "encoder_max": 0,
        "partial": False,
        "ops_max": 100,
        **rules,
    }


def draw_config(rng: random.Random, family: str) -> Config:
    """A configuration of the family, of plain JSON values."""
    drawn = FAMILIES[family](rng)
    groups = drawn.pop("groups")
    for one in groups:
        if one["spec"]["kind"] == "UniformTypeKVCacheSpecs":
            one["layers"] = list(one["spec"]["kv_cache_specs"])
    sizes = [one["spec"]["block_size"] for one in groups]
    world = drawn.get("dcp_world_size", 1) * drawn.get("pcp_world_size", 1)
    unit = drawn.pop("unit", None) or math.lcm(*sizes) * world
    blocks_per_unit = sum(-(-unit // (size * world)) for size in sizes)
    num_units = rng.choice((3, 5, 9, 17, 17, 33))
    rules = {
        "family": family,
        "unit": unit,
        "num_blocks": max(8, 1 + num_units * blocks_per_unit),
        "max_model_len": rng.choice((6, 12, 24)) * unit + rng.choice((0, 1)),
        "max_num_batched_tokens": rng.choice((None, 2 * unit, 8 * unit)),
        "events": rng.random() < 0.8,
        "log_stats": rng.random() < 0.9,
        "watermark": rng.choice((0.0, 0.0, 0.05, 0.2)),
        "drain_every": rng.choice((1, 1, 3, 10)),
        "drafts_max": rng.choice((0, 0, 1, 4)),
    }
    config = plain_config(groups, **{**rules, **drawn})
    finer = len(groups) > 1 and config["enable_caching"] and config["hash_block_size"] is None
    if finer and rng.random() < 0.2:
        config["hash_block_size"] = rng.choice(_divisors(math.gcd(*sizes)))
    return config


def _size(rng: random.Random) -> int:
    return rng.choice((2, 4, 4, 8))


def _window(rng: random.Random, block_size: int) -> int:
    """A window of less than a block, of whole blocks, or beside them."""
    return rng.choice((1, 2, block_size, 2 * block_size, 3 * block_size + rng.randint(-1, 2)))


def _windows(rng: random.Random, block_sizes: list[int]) -> list[Spec]:
    specs = [sliding(size, _window(rng, size)) for size in block_sizes]
    if len(specs) > 1 and rng.random() < 0.3:
        specs[-1] = dict(specs[0])  # equal specs are looked up together
    return specs


def _sizes(rng: random.Random, count: int) -> list[int]:
    """Block sizes that differ, with a common multiple that stays small."""
    sizes = rng.choice(((2, 4), (4, 8), (2, 4, 8), (4, 6), (2, 6)))
    return [rng.choice(sizes) for _ in range(count)]


def _shuffled(rng: random.Random, specs: list[Spec]) -> list[Spec]:
    """The order of the groups is the model's: full attention need not be first."""
    if rng.random() < 0.4:
        rng.shuffle(specs)
    return specs


def _full_attention(rng: random.Random) -> Config:
    return {"groups": group(full(rng.choice((4, 4, 16))))}


def _full_sliding(rng: random.Random) -> Config:
    size = _size(rng)
    specs = [full(size), *_windows(rng, [size] * rng.randint(1, 3))]
    return {"groups": group(*_shuffled(rng, specs))}


def _block_sizes(rng: random.Random) -> Config:
    first, *sizes = _sizes(rng, rng.randint(2, 4))
    specs = [full(first), *_windows(rng, sizes)]
    if len({spec["block_size"] for spec in specs}) == 1 and len(specs) == 2:
        specs[1]["block_size"] = 2 * first
    return {
        "groups": group(*_shuffled(rng, specs)),
        "hash_block_size": rng.choice(
            (None, *_divisors(math.gcd(*(spec["block_size"] for spec in specs))))
        ),
    }


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def _sliding_alone(rng: random.Random) -> Config:
    size = _size(rng)
    return {"groups": group(sliding(size, _window(rng, size)))}


def _sliding_several(rng: random.Random) -> Config:
    size = _size(rng)
    first = _window(rng, size)
    specs = [sliding(size, first), sliding(size, first + size)]
    if rng.random() < 0.5:
        specs.append(sliding(2 * size, _window(rng, size)))
    return {"groups": group(*specs)}


def _chunked(rng: random.Random) -> Config:
    size = _size(rng)
    specs = [chunked(size, rng.choice((size, 2 * size, 3 * size, 2 * size + 1)))]
    if rng.random() < 0.8:
        specs.append(full(size))
        if rng.random() < 0.3:
            specs.append(sliding(size, _window(rng, size)))
    return {"groups": group(*_shuffled(rng, specs))}


def _mamba_all(rng: random.Random) -> Config:
    size = _size(rng)
    mode = rng.choice(("all", "all", "all", "none"))
    spec = mamba(size, mode, num_speculative_blocks=rng.choice((0, 0, 1, 2)))
    specs = [full(size * rng.choice((1, 1, 1, 2))), spec]
    if rng.random() < 0.3:
        specs.append(dict(spec) if rng.random() < 0.5 else sliding(size, _window(rng, size)))
    elif rng.random() < 0.2:
        specs = [spec]
    return {
        "groups": group(*_shuffled(rng, specs)),
        "drafts_max": spec["num_speculative_blocks"],
    }


def _mamba_align(rng: random.Random) -> Config:
    size = _size(rng)
    spec = mamba(size, "align", num_speculative_blocks=rng.choice((0, 0, 1, 3)))
    specs = [full(size), spec]
    if rng.random() < 0.3:
        specs.append(dict(spec) if rng.random() < 0.5 else sliding(size, _window(rng, size)))
    elif rng.random() < 0.2:
        specs = [spec]
    return {
        "groups": group(*_shuffled(rng, specs)),
        "drafts_max": spec["num_speculative_blocks"],
    }


def _mamba_none(rng: random.Random) -> Config:
    """Without a cache, a state is one block, as long as the longest request."""
    size = _size(rng)
    max_model_len = rng.choice((6, 12, 24)) * size + rng.choice((0, 1))
    spec = mamba(max_model_len, "none", num_speculative_blocks=rng.choice((0, 0, 1, 2)))
    return {
        "groups": group(*([full(size), spec] if rng.random() < 0.7 else [spec])),
        "max_model_len": max_model_len,
        "enable_caching": False,
        "drafts_max": spec["num_speculative_blocks"],
        "num_blocks": rng.choice((8, 17, 33, 65)),
        "unit": size,
    }


def _latent(rng: random.Random) -> Config:
    """MLA, alone or beside sliding windows in MLA's format and other block sizes."""
    size = rng.choice((4, 8))
    model = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4", "alignment": 576}
    if rng.random() < 0.3:
        return {"groups": group(full(size, "MLAAttentionSpec"))}
    fields = model if rng.random() < 0.5 else {}
    specs = [
        full(size, "MLAAttentionSpec", **fields, compress_ratio=rng.choice((1, 2, 4))),
        sliding(size, _window(rng, size), "SlidingWindowMLASpec", **fields),
    ]
    if rng.random() < 0.6:
        half = size // 2
        specs.append(
            sliding(half, _window(rng, half), "SlidingWindowMLASpec", compress_ratio=2, **fields)
        )
    groups = group(*specs)
    if rng.random() < 0.4:
        groups[-1]["eagle"] = True
    return {"groups": groups, "drafts_max": 1}


def _full_kinds(rng: random.Random) -> Config:
    """Specs that are managed as full attention, beside another one or beside windows.

    Not two of them beside a third spec: vLLM then cuts only the first to the hit that all
    groups agree on, which kvcore does to all.
    """
    size = _size(rng)
    specs = [
        full(size, "TQFullAttentionSpec", tq_slot_size=24),
        full(size, "HiddenStateCacheSpec"),
        full(size, "MLAAttentionSpec"),
        full(size, sliding_window=2 * size),
    ]
    if rng.random() < 0.5:
        chosen = rng.sample(specs, rng.randint(1, 2))
        if len(chosen) == 2 and rng.random() < 0.4:
            chosen[0]["block_size"] *= rng.choice((2, 3))
        return {"groups": group(*chosen)}
    return {"groups": group(rng.choice(specs), *_windows(rng, [size] * rng.randint(1, 2)))}


def _eagle_fallback(rng: random.Random) -> Config:
    """No group is flagged: all of them drop a block."""
    kind = rng.choice((_full_attention, _sliding_alone, _full_sliding, _full_sliding, _block_sizes))
    return {**kind(rng), "use_eagle": True, "drafts_max": rng.choice((1, 3))}


def _eagle_flagged(rng: random.Random) -> Config:
    drawn = rng.choice((_full_sliding, _full_sliding, _block_sizes, _sliding_several))(rng)
    for one in rng.sample(drawn["groups"], rng.randint(1, 2)):
        one["eagle"] = True
    return {**drawn, "use_eagle": rng.random() < 0.8, "drafts_max": rng.choice((1, 3))}


def _eagle_mamba(rng: random.Random) -> Config:
    """Attention groups are flagged, as states of a draft model are where the sides differ."""
    attention: list[dict[str, Any]] = []
    while not attention:  # states alone have no draft model
        drawn = rng.choice((_mamba_all, _mamba_align))(rng)
        attention = [one for one in drawn["groups"] if one["spec"]["kind"] != "MambaSpec"]
    rng.choice(attention)["eagle"] = True
    return {**drawn, "use_eagle": rng.random() < 0.8}


def _retention(rng: random.Random) -> Config:
    kinds = (_full_sliding, _block_sizes, _sliding_alone, _sliding_several, _mamba_all, _latent)
    kind = rng.choice((*kinds, _mamba_align, _eagle_flagged))
    drawn = kind(rng)
    if not any(
        one["spec"]["kind"] in ("SlidingWindowSpec", "SlidingWindowMLASpec", "MambaSpec")
        for one in drawn["groups"]
    ):
        drawn = _full_sliding(rng)
    sizes = [one["spec"]["block_size"] for one in drawn["groups"]]
    return {**drawn, "retention_interval": rng.choice((0, 0, 1, 2, 4)) * math.lcm(*sizes)}


def _reference_window(rng: random.Random) -> Config:
    size = _size(rng)
    spec = full(size, "RSWASpec", rswa_window=_window(rng, size))
    specs = [spec]
    if rng.random() < 0.3:
        specs.append(rng.choice((full(size), sliding(size, _window(rng, size)))))
    return {"groups": group(*specs)}


def _cross(rng: random.Random) -> Config:
    size = _size(rng)
    specs = [full(size), full(rng.choice((size, 8)), "CrossAttentionSpec")]
    if rng.random() < 0.3:
        specs.append(sliding(size, _window(rng, size)))
    return {"groups": group(*specs), "enable_caching": False, "encoder_max": 6 * size}


def _uncached(rng: random.Random) -> Config:
    kinds = (_full_sliding, _block_sizes, _chunked, _mamba_all, _mamba_align, _latent)
    drawn = rng.choice(kinds)(rng)
    return {**drawn, "enable_caching": False, "hash_block_size": None}


def _no_groups(rng: random.Random) -> Config:
    return {"groups": [], "num_blocks": 2, "enable_caching": False, "unit": 4}


def _context_parallel(rng: random.Random) -> Config:
    kind = rng.choice(("FullAttentionSpec", "MLAAttentionSpec", "TQFullAttentionSpec"))
    return {
        "groups": group(full(rng.choice((2, 4)), kind)),
        "dcp_world_size": rng.choice((1, 2, 4)),
        "pcp_world_size": rng.choice((1, 2)),
        "use_eagle": rng.random() < 0.2,
    }


def _partial(rng: random.Random) -> Config:
    """Hashes finer than blocks, so that a block can be found from inside."""
    size = rng.choice((4, 8))
    specs = [full(size), *_windows(rng, [size] * rng.randint(1, 2))]
    if rng.random() < 0.3:
        specs[-1] = mamba(size, "all")
    return {
        "groups": group(*specs),
        "hash_block_size": rng.choice((size // 4, size // 2)),
        "partial": True,
    }


def _uniform(rng: random.Random) -> Config:
    """Layers of one type and different sizes share a group."""
    size = _size(rng)
    layers = {
        f"layer.{heads}": full(size, head_size_v=rng.choice((None, 8)), num_kv_heads=heads)
        for heads in (1, 2)
    }
    for spec in layers.values():
        if spec["head_size_v"] is None:
            del spec["head_size_v"]
    spec = {"kind": "UniformTypeKVCacheSpecs", "block_size": size, "kv_cache_specs": layers}
    return {"groups": group(spec)}


def _mixed(rng: random.Random) -> Config:
    """Any kinds together, with equal block sizes, and any rules that go with them."""
    size = _size(rng)
    mode = rng.choice(("all", "align"))
    whole = rng.choice((full(size), full(size, "RSWASpec", rswa_window=2 * size)))
    specs = [
        whole,
        dict(whole),
        sliding(size, _window(rng, size)),
        sliding(size, _window(rng, size)),
        mamba(size, mode, num_speculative_blocks=1),
        chunked(size, rng.choice((size, 3 * size))),
    ]
    groups = group(*rng.sample(specs, rng.randint(2, 5)))
    kinds = [one["spec"]["kind"] for one in groups]
    if len({str(one["spec"]) for one in groups}) == 1:
        groups.append(*group(sliding(size, size + 1)))
        kinds.append("SlidingWindowSpec")
    retention = None
    if rng.random() < 0.3 and {"SlidingWindowSpec", "MambaSpec"} & set(kinds):
        retention = rng.choice((0, size, 3 * size))
    if rng.random() < 0.4:
        for one in groups:
            one["eagle"] = one["spec"]["kind"] in ("FullAttentionSpec", "RSWASpec")
    return {"groups": groups, "retention_interval": retention, "drafts_max": 1}


FAMILIES: dict[str, Callable[[random.Random], Config]] = {
    "full attention": _full_attention,
    "full and sliding": _full_sliding,
    "block sizes": _block_sizes,
    "sliding alone": _sliding_alone,
    "sliding several": _sliding_several,
    "chunked local": _chunked,
    "mamba all": _mamba_all,
    "mamba align": _mamba_align,
    "mamba none": _mamba_none,
    "latent": _latent,
    "kinds of full": _full_kinds,
    "eagle fallback": _eagle_fallback,
    "eagle flagged": _eagle_flagged,
    "eagle mamba": _eagle_mamba,
    "retention": _retention,
    "reference window": _reference_window,
    "cross": _cross,
    "uncached": _uncached,
    "no groups": _no_groups,
    "context parallel": _context_parallel,
    "partial": _partial,
    "uniform": _uniform,
    "mixed": _mixed,
}
