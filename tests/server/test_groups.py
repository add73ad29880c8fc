"""KV cache groups as an operator writes them, and what is refused, by its path."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from kvcore.memory import layer_layouts
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    DepotConfig,
    FullAttentionSpec,
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
from kvserver.config import ConfigError
from kvserver.sources import parse

HEADS = "block_size: 4, num_kv_heads: 2, head_size: 64"


def load(tmp_path: Path, text: str, *argv: str) -> DepotConfig:
    path = tmp_path / "kvdepot.yaml"
    path.write_text(text, encoding="utf-8")
    return parse(["--config", str(path), *argv], {}).depot_config()


@pytest.mark.parametrize(
    ("written", "spec"),
    [
        pytest.param(
            f"kind: full_attention, {HEADS}", FullAttentionSpec(4, 2, 64), id="full attention"
        ),
        pytest.param(
            f"kind: full_attention, {HEADS}, head_size_v: null, sliding_window: 8, dtype: float16",
            FullAttentionSpec(4, 2, 64, "float16", sliding_window=8),
            id="what may be left out",
        ),
        pytest.param(
            f"kind: full_attention, {HEADS}, dtype: int8, kv_quant_mode: int8_per_token_head",
            FullAttentionSpec(4, 2, 64, "int8", kv_quant_mode="int8_per_token_head"),
            id="quantised",
        ),
        pytest.param(
            f"kind: tq_full_attention, {HEADS}, dtype: uint8, tq_slot_size: 40",
            TQFullAttentionSpec(4, 2, 64, "uint8", tq_slot_size=40),
            id="TurboQuant",
        ),
        pytest.param(
            "kind: mla_attention, block_size: 64, num_kv_heads: 1, head_size: 576, "
            "dtype: uint8, cache_dtype_str: fp8_ds_mla",
            MLAAttentionSpec(64, 1, 576, "uint8", cache_dtype_str="fp8_ds_mla"),
            id="MLA",
        ),
        pytest.param(
            f"kind: sliding_window, {HEADS}, sliding_window: 8",
            SlidingWindowSpec(4, 2, 64, sliding_window=8),
            id="window",
        ),
        pytest.param(
            f"kind: sliding_window_mla, {HEADS}, sliding_window: 8, compress_ratio: 2",
            SlidingWindowMLASpec(4, 2, 64, sliding_window=8, compress_ratio=2),
            id="MLA window",
        ),
        pytest.param(
            f"kind: chunked_local_attention, {HEADS}, attention_chunk_size: 8",
            ChunkedLocalAttentionSpec(4, 2, 64, attention_chunk_size=8),
            id="chunks",
        ),
        pytest.param(
            "kind: mamba, block_size: 4, shapes: [[3, 8], [2, 4]], dtypes: [bfloat16, float32], "
            "mamba_cache_mode: align, num_speculative_blocks: 1",
            MambaSpec(
                4,
                shapes=((3, 8), (2, 4)),
                dtypes=("bfloat16", "float32"),
                mamba_cache_mode="align",
                num_speculative_blocks=1,
            ),
            id="Mamba",
        ),
        pytest.param(
            f"kind: rswa, {HEADS}, rswa_window: 8", RSWASpec(4, 2, 64, rswa_window=8), id="R-SWA"
        ),
        pytest.param(
            f"kind: sink_full_attention, {HEADS}, sink_len: 8",
            SinkFullAttentionSpec(4, 2, 64, sink_len=8),
            id="sinks",
        ),
    ],
)
def test_every_kind_can_be_written(tmp_path: Path, written: str, spec: KVCacheSpec) -> None:
    text = f"model: mine\ngroups:\n  - {{layer_names: [a, b], is_eagle_group: true, {written}}}\n"
    (group,) = load(tmp_path, text, "--no-prefix-caching").kv_cache.groups
    assert group.spec == spec
    assert type(group.spec) is type(spec)
    assert (group.layer_names, group.is_eagle_group) == (("a", "b"), True)


def test_layers_of_a_group_may_differ(tmp_path: Path) -> None:
    text = f"""
groups:
  - kind: uniform
    layers:
      a: {{kind: full_attention, {HEADS}}}
      b: {{kind: full_attention, {HEADS}, head_size_v: 32}}
"""
    config = load(tmp_path, text)
    assert config.model == ""  # named by nobody
    (group,) = config.kv_cache.groups
    assert isinstance(group.spec, UniformTypeKVCacheSpecs)
    assert group.layer_names == ("a", "b")
    assert group.spec.page_size_bytes == 4 * 2 * (64 + 64 + 64 + 32) * 2


def test_what_counts_encoder_tokens_needs_caching_off(tmp_path: Path) -> None:
    text = f"groups: [{{kind: cross_attention, layer_names: [a], {HEADS}}}]"
    with pytest.raises(ConfigError, match="disable caching"):
        load(tmp_path, text)
    (group,) = load(tmp_path, text, "--no-prefix-caching").kv_cache.groups
    assert group.spec == CrossAttentionSpec(4, 2, 64)


@pytest.mark.parametrize(
    ("groups", "argv", "message"),
    [
        pytest.param(
            f"[{{kind: cross_attention, layer_names: [a], {HEADS}}}]",
            [],
            "^--no-prefix-caching: .* disable caching",
            id="needs another option",
        ),
        pytest.param(
            f"[{{kind: full_attention, layer_names: [a], {HEADS}}},"
            f" {{kind: full_attention, layer_names: [a], {HEADS}}}]",
            [],
            "^--groups: layer 'a' stands in two groups, 0 and 1",
            id="of all groups together",
        ),
        pytest.param(
            f"[{{kind: full_attention, layer_names: [a], {HEADS}}}]",
            ["--block-size", "8", "--num-kv-heads", "4"],
            "--num-kv-heads and --block-size cannot override groups",
            id="a preset's options",
        ),
    ],
)
def test_an_error_names_the_option_that_mends_it(
    groups: str, argv: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--groups", groups, *argv], {})


FULL = f"{{kind: full_attention, layer_names: [a], {HEADS}}}"
WINDOW = f"kind: sliding_window, layer_names: [b], {HEADS}"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        pytest.param("4", "groups: must be a list", id="no list"),
        pytest.param("[4]", r"groups\[0\]: must be a mapping", id="no mapping"),
        pytest.param("[{layer_names: [a]}]", r"groups\[0\]\.kind: is needed", id="no kind"),
        pytest.param(
            "[{kind: fuller}]", r"groups\[0\]\.kind: must be one of .*full_attention", id="kind"
        ),
        pytest.param(
            f"[{{kind: full_attention, {HEADS}}}]",
            r"groups\[0\]\.layer_names: is needed",
            id="no layers",
        ),
        pytest.param(
            f"[{{kind: full_attention, layer_names: a, {HEADS}}}]",
            r"groups\[0\]\.layer_names: must be a list",
            id="layers no list",
        ),
        pytest.param(
            f"[{{kind: full_attention, layer_names: [a, 7], {HEADS}}}]",
            r"groups\[0\]\.layer_names\[1\]: must be text",
            id="a layer no text",
        ),
        pytest.param(
            f"[{{kind: full_attention, layer_names: [a, a], {HEADS}}}]",
            r"groups\[0\]\.layer_names: layer 'a' stands in its group twice",
            id="a layer twice",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}, windw: 4}}]",
            r"groups\[1\]\.windw: unknown field; sliding_window has .*sliding_window",
            id="unknown field",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}}}]",
            r"groups\[1\]\.sliding_window: is needed for sliding_window",
            id="field left out",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}, sliding_window: wide}}]",
            r"groups\[1\]\.sliding_window: must be a whole number, got 'wide'",
            id="field of another type",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}, sliding_window: true}}]",
            r"groups\[1\]\.sliding_window: must be a whole number",
            id="a boolean as number",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}, sliding_window: -1}}]",
            r"groups\[1\]\.sliding_window: .*positive",
            id="field out of range",
        ),
        pytest.param(
            f"[{{kind: full_attention, layer_names: [a], {HEADS}, dtype: int12}}]",
            r"groups\[0\]\.dtype: .*int12",
            id="dtype",
        ),
        pytest.param(
            "[{kind: mamba, layer_names: [a], block_size: 4, shapes: [[3], [x]], dtypes: []}]",
            r"groups\[0\]\.shapes\[1\]\[0\]: must be a whole number",
            id="a shape",
        ),
        pytest.param(
            "[{kind: mamba, layer_names: [a], block_size: 4, shapes: [[3]], dtypes: []}]",
            r"groups\[0\]\.dtypes: 0 dtypes for 1 shapes",
            id="shapes without dtypes",
        ),
        pytest.param(
            f"[{{kind: uniform, layers: {{a: {{kind: full_attention, {HEADS}, dtype: 4}}}}}}]",
            r"groups\[0\]\.layers\[a\]\.dtype: must be text",
            id="a layer of a uniform group",
        ),
        pytest.param(
            "[{kind: uniform, layer_names: [a], layers: {}}]",
            r"groups\[0\]\.layer_names: unknown field",
            id="names of a uniform group",
        ),
        pytest.param(
            f"[{{kind: 'no.such:Spec', layer_names: [a], {HEADS}}}]",
            r"groups\[0\]\.kind: cannot import no\.such:Spec",
            id="no module",
        ),
        pytest.param(
            f"[{{kind: 'json:JSONDecoder', layer_names: [a], {HEADS}}}]",
            r"groups\[0\]\.kind: .* is no KVCacheSpec",
            id="no spec",
        ),
        pytest.param(
            f"[{FULL}, {FULL}]",
            "layer 'a' stands in two groups, 0 and 1",
            id="a layer in two groups",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}, sliding_window: 8}}]\nhash-block-size: 3",
            "hash_block_size 3 must divide",
            id="hashes",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}, sliding_window: 8}}]\nprefix-cache-retention-interval: 6",
            "prefix_cache_retention_interval 6 must be .* multiple of",
            id="retention",
        ),
        pytest.param(
            f"[{FULL}, {{{WINDOW}, sliding_window: 8}}]\ndcp-world-size: 2",
            "dcp_world_size: context parallelism needs a single KV cache group",
            id="context parallelism",
        ),
        pytest.param(
            f"[{FULL}]\nhead-size: 4", "--head-size cannot override groups", id="override"
        ),
    ],
)
def test_refused(tmp_path: Path, groups: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, f"model: mine\ngroups: {groups}\n")


def test_groups_in_a_flag_and_in_the_environment() -> None:
    config = parse(["--groups", f"[{FULL}]", "--model", "mine"], {}).depot_config()
    assert (
        config == parse([], {"KVDEPOT_GROUPS": f"[{FULL}]", "KVDEPOT_MODEL": "mine"}).depot_config()
    )
    with pytest.raises(ConfigError, match=r"--groups: is no YAML"):
        parse(["--groups", "[a"], {})
    with pytest.raises(ConfigError, match=r"KVDEPOT_GROUPS\[0\]: must be a mapping"):
        parse([], {"KVDEPOT_GROUPS": "[4]"})


@pytest.mark.parametrize(
    ("argv", "kinds"),
    [
        pytest.param([], ["full_attention"], id="tiny"),
        pytest.param(
            ["--model", "gemma-like"], ["full_attention", *["sliding_window"] * 2], id="gemma"
        ),
        pytest.param(
            ["--model", "gemma-like", "--num-layers", "3", "--head-size", "32"],
            ["full_attention", *["sliding_window"] * 2],
            id="another gemma",
        ),
        pytest.param(["--model", "mamba-hybrid"], ["full_attention", *["mamba"] * 2], id="hybrid"),
    ],
)
def test_presets(argv: list[str], kinds: list[str]) -> None:
    config = parse([*argv, "--capacity-tokens", "1600"], {}).depot_config()
    groups = config.kv_cache.groups
    assert [group.spec.kind for group in groups] == kinds
    # Groups of one size, whose pages share their places: nothing is wasted.
    assert len({(len(group.layer_names), group.spec.page_size_bytes) for group in groups}) == 1
    assert config.kv_cache.num_blocks == 100 * len(kinds) + 1


def test_a_preset_says_which_size_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="--model mamba-hybrid: page_size_padded"):
        parse(["--model", "mamba-hybrid", "--block-size", "1"], {})


@pytest.mark.parametrize(
    ("argv", "attribute", "value"),
    [
        pytest.param(["--use-eagle"], "use_eagle", True, id="EAGLE"),
        pytest.param(
            ["--prefix-cache-retention-interval", "0"],
            "prefix_cache_retention_interval",
            0,
            id="retention",
        ),
        pytest.param(["--hash-block-size", "8"], "hash_block_size", 8, id="hashes"),
        pytest.param(["--max-num-batched-tokens", "99"], "max_num_batched_tokens", 99, id="batch"),
        pytest.param(["--model", "tiny", "--dcp-world-size", "2"], "dcp_world_size", 2, id="dcp"),
        pytest.param(["--model", "tiny", "--pcp-world-size", "2"], "pcp_world_size", 2, id="pcp"),
    ],
)
def test_what_else_decides(argv: list[str], attribute: str, value: object) -> None:
    config = parse(["--model", "gemma-like", *argv], {}).depot_config()
    assert getattr(config, attribute) == value


def test_a_kind_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("my_attention")
    monkeypatch.setitem(sys.modules, "my_attention", module)

    @dataclass(frozen=True, slots=True)
    class NarrowSpec(SlidingWindowSpec):
        """A window that is described elsewhere."""

        flavour: str = "plain"

    module.NarrowSpec = NarrowSpec  # type: ignore[attr-defined]
    written = f"[{{kind: 'my_attention:NarrowSpec', layer_names: [a], {HEADS}, sliding_window: 6"
    config = parse(["--model", "mine", "--groups", written + ", flavour: odd}]"], {})
    (group,) = config.depot_config().kv_cache.groups
    assert group.spec == NarrowSpec(4, 2, 64, sliding_window=6, flavour="odd")


def test_the_example_of_the_readme_is_a_pool(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    config = load(tmp_path, example)
    assert [group.spec.kind for group in config.kv_cache.groups] == [
        "full_attention",
        "sliding_window",
        "mamba",
    ]
    layouts = layer_layouts(config)
    assert len({layout.offset_bytes for layout in layouts}) == 2
    # What it leaves out in comments is meant to work, too.
    options = re.findall(
        r"^# (use-eagle|prefix-cache-retention-interval|hash-block-size): (\S+)",
        example,
        re.MULTILINE,
    )
    assert len(options) == 3
    more = "\n".join(f"{name}: {value}" for name, value in options)
    assert load(tmp_path, f"{example}\n{more}").use_eagle
