"""The pool's bytes: written through the mapping, read in other processes, pulled over gRPC."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvclient import Client
from kvclient.description import PoolDescription
from kvclient.errors import FailedPrecondition, InvalidArgument, NotFound
from kvclient.events import BlockStored
from kvclient.pool import Pool, map_pool
from kvclient.slots import slot_mapping
from kvclient.values import BlockStatus, Content, SlotRequest
from own_process import run_python

torch = pytest.importorskip("torch")

LOOK = """
import sys
from kvclient import Client
from kvclient.pool import Pool, map_pool
from kvclient.slots import slot_mapping
pool = map_pool(Client(sys.argv[1]).describe_pool())
slots = slot_mapping([int(block) for block in sys.argv[2].split(",")], pool.block_size, 0, 10)
for number in range(len(pool.layer_names)):
    key, value = pool.read_slots(number, slots)
    assert key[:, 0, 0].tolist() == [token + 16 * number for token in range(10)], key[:, 0, 0]
    assert value[:, 0, 15].tolist() == [-1.0] * 10
    pool.layer(number)[0, 0, 0, 0, 0] = 77 + number
"""


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_three_see_the_same_bytes(serve: Any, layout: str) -> None:
    server = serve(layout=layout)
    with server.client() as client, client.open_session() as session:
        pool = map_pool(session.pool)
        result = session.allocate_slots(SlotRequest("a", Content(range(10)), lookup=True))
        (table,) = result.new_blocks
        slots = slot_mapping(table, pool.block_size, 0, 10, pad_to=12)
        for number, name in enumerate(pool.layer_names):
            key = torch.arange(12, dtype=torch.bfloat16).add(16 * number)
            pool.write_slots(
                name,
                slots,
                key[:, None, None].expand(12, 1, 16),
                torch.full((12, 1, 16), -1, dtype=torch.bfloat16),
            )
        session.cache_blocks("a", 10)

        looked = run_python("-c", LOOK, server.target, ",".join(map(str, table)))
        assert looked.returncode == 0, looked.stderr
        assert [float(pool.layer(i)[0, 0, 0, 0, 0]) for i in (0, 1)] == [77, 78]

        with client.stream_events(snapshot=True) as events:
            stored = [event for event in next(events).events if isinstance(event, BlockStored)]
        hashes = [block_hash for event in stored for block_hash in event.block_hashes]
        assert len(hashes) == 2
        pulled = list(client.pull_blocks([*hashes, bytes(32)], checksums=True))
        assert [block.status for block in pulled] == [
            BlockStatus.READY,
            BlockStatus.READY,
            BlockStatus.MISSING,
        ]
        for block, block_id in zip(pulled[:2], table, strict=False):
            pages = b"".join(pool.layer_bytes(number)[block_id].tobytes() for number in (0, 1))
            assert block.data == pages


def test_views(server: Any) -> None:
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    view = pool.layer(1)
    assert view.shape == (65, 2, 4, 1, 16)
    assert pool.layer(1, kv_first=True).shape == (2, 65, 4, 1, 16)
    view[7, 1, 2, 0, :] = 1
    assert bool((pool.layer(pool.layer_names[1], kv_first=True)[1, 7, 2] == 1).all())
    assert pool.layer_bytes(1).shape == (65, 2, 4, 32)
    assert pool.layer_bytes(1)[7, 1, 2].tobytes() == b"\x80\x3f" * 16
    view[7] = 0
    assert pool.block_table([[3, 4], [5]]).tolist() == [[3, 4], [5, 0]]


KINDS: dict[str, tuple[dict[str, Any], list[tuple[int, ...]], str]] = {
    "window": ({"kind": "sliding_window", "sliding_window": 8}, [(9, 2, 4, 2, 64)], "bfloat16"),
    "chunks": (
        {"kind": "chunked_local_attention", "attention_chunk_size": 8},
        [(9, 2, 4, 2, 64)],
        "bfloat16",
    ),
    "heads of two sizes": (
        {"kind": "full_attention", "head_size_v": 32},
        [(9, 4, 2, 96)],
        "bfloat16",
    ),
    "mla": ({"kind": "mla_attention", "num_kv_heads": 1}, [(9, 4, 64)], "bfloat16"),
    "mla compressed": (
        {"kind": "mla_attention", "num_kv_heads": 1, "compress_ratio": 2},
        [(9, 2, 64)],
        "bfloat16",
    ),
    "mamba": (
        {
            "kind": "mamba",
            "shapes": [[3, 8], [2, 4]],
            "dtypes": ["float32", "float32"],
            "mamba_cache_mode": "all",
        },
        [(9, 3, 8), (9, 2, 4)],
        "float32",
    ),
    "int8 with scales": (
        {"kind": "full_attention", "dtype": "int8", "kv_quant_mode": "int8_per_token_head"},
        [(9, 2, 4, 2, 68)],
        "int8",
    ),
}


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_mapped_in_its_shape(serve: Any, kind: str, layout: str) -> None:
    fields, shapes, dtype = KINDS[kind]
    heads = {} if kind == "mamba" else {"num_kv_heads": 2, "head_size": 64}
    full = {"kind": "full_attention", "num_kv_heads": 2, "head_size": 64, "block_size": 4}
    other = {"block_size": 4} | heads | fields
    groups = [full | {"layer_names": ["f0", "f1"]}, other | {"layer_names": ["o0", "o1"]}]
    server = serve(model="mine", groups=json.dumps(groups), num_blocks=9, layout=layout)
    with server.client() as client:
        description = client.describe_pool()
        pool = map_pool(description)
    assert pool.layer_names == ["f0", "f1", "o0", "o1"]
    found = pool.layer("o1")
    tensors = list(found) if isinstance(found, tuple) else [found]
    assert isinstance(found, tuple) is (kind == "mamba")
    assert [tuple(tensor.shape) for tensor in tensors] == shapes
    for number, tensor in enumerate(tensors, 1):
        assert tensor.dtype is getattr(torch, dtype)
        assert not tensor.any()
        tensor[7].fill_(number)
    # Nothing but block 7 of the layer, and of those at its place, was written.
    for name in pool.layer_names:
        written = pool.layer_bytes(name).any(axis=(1, 2, 3)).nonzero()[0].tolist()
        assert written == ([7] if name in ("f1", "o1") else [])
    rows = pool.layer_bytes("o1")
    assert rows.shape[0] == 9
    assert rows[7].tobytes() == b"".join(
        tensor[7].contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors
    )
    if len(shapes[0]) == 5:
        assert pool.layer("o1", kv_first=True).shape[:2] == (2, 9)
    else:
        with pytest.raises(InvalidArgument):
            pool.layer("o1", kv_first=True)
    assert sorted(pool.parts("o1")) == (["k_scale", "v_scale"] if "int8" in kind else [])


@pytest.mark.parametrize("kind", ["window", "heads of two sizes", "mla", "mamba"])
def test_slots_are_written_and_read_in_every_kind(serve: Any, kind: str) -> None:
    fields, _, _ = KINDS[kind]
    heads = {} if kind == "mamba" else {"num_kv_heads": 2, "head_size": 64}
    group = {"layer_names": ["a"], "block_size": 4} | heads | fields
    server = serve(model="mine", groups=json.dumps([group]), num_blocks=9)
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    slots = slot_mapping([0, 3, 5], 4, 2, 8)
    assert slots == [-1, -1, 12, 13, 14, 15, 20, 21]
    if kind == "mamba":
        with pytest.raises(InvalidArgument, match="states"):
            pool.read_slots("a", slots)
        return
    key = torch.arange(8, dtype=torch.bfloat16)[:, None, None].expand(8, 2, 64)
    value = -key[..., : fields.get("head_size_v", 64)]
    if kind == "mla":
        pool.write_slots("a", slots, key[:, 0])
        read, same = pool.read_slots("a", slots[2:])
        assert torch.equal(read, key[2:, 0]) and torch.equal(same, read)
    else:
        pool.write_slots("a", slots, key, value)
        for found, written in zip(pool.read_slots("a", slots[2:]), (key, value), strict=True):
            assert torch.equal(found, written[2:])
    assert not pool.layer_bytes("a")[0].any()


def three_groups(serve: Any, layout: str) -> Any:
    """Full attention, a window and a Mamba state: one layer each at the same place."""
    heads = {"block_size": 4, "num_kv_heads": 1, "head_size": 16}
    groups = [
        heads | {"kind": "full_attention", "layer_names": ["f0", "f1"]},
        heads | {"kind": "sliding_window", "layer_names": ["w"], "sliding_window": 8},
        {"kind": "mamba", "layer_names": ["m"], "block_size": 4, "shapes": [[4]]}
        | {"dtypes": ["float32"], "page_size_padded": 256, "mamba_cache_mode": "all"},
    ]
    return serve(model="mine", groups=json.dumps(groups), num_blocks=9, layout=layout)


def test_what_a_kernel_is_given(serve: Any) -> None:
    with three_groups(serve, "block").client() as client:
        pool = map_pool(client.describe_pool())
    table = pool.block_table([[0, 0, 5], [3]], width=4)
    assert table.dtype is torch.int32
    assert table.tolist() == [[0, 0, 5, 0], [3, 0, 0, 0]]
    # Two requests: three tokens across the end of a window's null blocks, and one.
    slots = pool.slot_mapping([[0, 0, 5], [3]], [7, 2], [3, 1], group=1, pad_to=6)
    assert slots.dtype is torch.int64
    assert slots.tolist() == [-1, 20, 21, 14, -1, -1]
    assert pool.slot_mapping([], [], []).tolist() == []
    for group, tables, pad_to, field in (
        (2, [[1]], None, "group"),
        (3, [[1]], None, "group"),
        (0, [[1]], 1, "pad_to"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            pool.slot_mapping(tables, [0], [2], group=group, pad_to=pad_to)
        assert caught.value.field == field


@pytest.fixture(scope="module")
def pool_of_groups(serve: Any) -> Pool:
    """Nine blocks of 4 tokens, of three groups."""
    with three_groups(serve, "block").client() as client:
        return map_pool(client.describe_pool())


@pytest.mark.parametrize(
    ("tables", "width", "field", "fix"),
    [
        pytest.param([1, 2], None, "tables[0]", "list of rows, a request each", id="one row"),
        pytest.param([([1, 2], [3, 4])], None, "tables[0]", "take one, tables[group]", id="deep"),
        pytest.param([[1], [2.0]], None, "tables[1]", "whole block ids", id="floats"),
        pytest.param(["12"], None, "tables[0]", "list of rows", id="text"),
        pytest.param(7, None, "tables", "list of rows", id="a number"),
        pytest.param({"a": [1]}, None, "tables", "list of rows", id="by name"),
        pytest.param([[1, 9]], None, "tables[0]", "block 9 is not one of 0 to 8", id="too high"),
        pytest.param([[1], [-1]], None, "tables[1]", "block -1 is not one", id="padded"),
        pytest.param([[1], [2, 3]], 1, "width", "tables[1] has 2 blocks", id="too narrow"),
    ],
)
def test_tables_of_another_shape(
    pool_of_groups: Pool, tables: Any, width: int | None, field: str, fix: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pool_of_groups.block_table(tables, width)
    assert caught.value.field == field and fix in caught.value.message
    if width is None:
        with pytest.raises(InvalidArgument) as caught:
            pool_of_groups.slot_mapping(tables, [0] * 9, [1] * 9)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("starts", "num_tokens", "field", "fix"),
    [
        pytest.param([0], [1, 1], "starts", "2 in all; got 1 entries", id="starts"),
        pytest.param([0, 0], [1], "num_tokens", "2 in all; got 1 entries", id="counts"),
        pytest.param(0, [1, 1], "starts", "got 0", id="one for all"),
        pytest.param([0, -1], [1, 1], "starts[1]", "not negative; got -1", id="before it"),
        pytest.param([0, 0], [1, 1.5], "num_tokens[1]", "whole number", id="part of a token"),
        pytest.param([0, 3], [1, 2], "tables[1]", "1 blocks of 4 tokens, too few", id="short"),
    ],
)
def test_counts_of_another_shape(
    pool_of_groups: Pool, starts: Any, num_tokens: Any, field: str, fix: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pool_of_groups.slot_mapping([[1, 2], [3]], starts, num_tokens)
    assert caught.value.field == field and fix in caught.value.message


def test_tables_may_be_arrays_and_tensors(pool_of_groups: Pool) -> None:
    rows = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
    for tables in (rows, rows.numpy(), list(rows), tuple(rows.numpy())):
        assert pool_of_groups.block_table(tables, 3).tolist() == [[1, 2, 0], [3, 0, 0]]
        slots = pool_of_groups.slot_mapping(tables, rows.numpy()[:, 1], torch.tensor([1, 1]))
        assert slots.tolist() == [6, 12]
    assert pool_of_groups.block_table([]).shape == (0, 0)
    assert pool_of_groups.block_table([[], []]).shape == (2, 0)


def test_a_layer_that_is_none_has_a_name_beside_it(pool_of_groups: Pool) -> None:
    with pytest.raises(NotFound, match=r"no layer 'ff0'; did you mean 'f0'\? The pool has 4"):
        pool_of_groups.layer("ff0")
    with pytest.raises(NotFound, match="no layer 4; The pool has 4, in layer_names"):
        pool_of_groups.layer(4)


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_new_blocks_are_zeroed_in_their_group_only(serve: Any, layout: str) -> None:
    with three_groups(serve, layout).client() as client:
        description = client.describe_pool()
    # As in vLLM: full attention, where Mamba states may have lain.
    assert [group.needs_zeroing for group in description.groups] == [True, False, False]
    pool = map_pool(description)
    for name in ("f0", "f1"):
        pool.layer_bytes(name)[:] = 7
    pool.zero_blocks(0, [2, 8])
    for name in ("f0", "f1", "w"):
        written = pool.layer_bytes(name).any(axis=(1, 2, 3)).tolist()
        assert written == [True, True, False, True, True, True, True, True, False]
    pool.zero_blocks(1, [3])  # the window's layer lies where the first of full attention does
    assert not pool.layer_bytes("f0")[3].any()
    assert pool.layer_bytes("f1")[3].all()
    for group, block_ids, field in ((0, [0], "block_ids"), (0, [9], "block_ids"), (3, [], "group")):
        with pytest.raises(InvalidArgument) as caught:
            pool.zero_blocks(group, block_ids)
        assert caught.value.field == field
    assert pool.layer_bytes("f0")[0].all()


def test_layers_of_one_group_may_differ(serve: Any) -> None:
    spec = {"kind": "full_attention", "block_size": 4, "num_kv_heads": 1, "head_size": 64}
    groups = [{"kind": "uniform", "layers": {"a": spec, "b": spec | {"head_size_v": 32}}}]
    server = serve(model="mine", groups=json.dumps(groups), num_blocks=9)
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    (group,) = pool.description.groups
    assert [layer.head_size_v for layer in group.layer_specs] == [64, 32]
    assert pool.layer("a").shape == (9, 2, 4, 1, 64)
    assert pool.layer("b").shape == (9, 4, 1, 96)
    pool.write_slots(
        "b", [5], torch.ones(1, 1, 64).bfloat16(), torch.full((1, 1, 32), 2.0).bfloat16()
    )
    key, value = pool.read_slots("b", [5])
    assert bool((key == 1).all()) and bool((value == 2).all())


@pytest.mark.parametrize("slots", [[65 * 4], [-2], [3, -7]], ids=str)
def test_a_slot_outside_the_pool(server: Any, slots: list[int]) -> None:
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    with pytest.raises(InvalidArgument, match="outside"):
        pool.read_slots(0, slots)


@pytest.mark.parametrize("layer", ["other", 2, -1], ids=str)
def test_no_such_layer(server: Any, layer: str | int) -> None:
    with server.client() as client:
        pool = map_pool(client.describe_pool())
    with pytest.raises(NotFound):
        pool.layer(layer)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "NO_MAPPING"),
        ({"path": "/nowhere/at/all"}, "MAPPING_UNREACHABLE"),
        ({"nbytes": 1}, "MAPPING_MISMATCH"),
    ],
    ids=["no-bytes", "another-host", "another-size"],
)
def test_what_cannot_be_mapped(server: Any, change: dict[str, Any] | None, reason: str) -> None:
    with server.client() as client:
        description: PoolDescription = client.describe_pool()
    (mapping,) = description.mappings
    changed = () if change is None else (dataclasses.replace(mapping, **change),)
    with pytest.raises(FailedPrecondition) as caught:
        map_pool(dataclasses.replace(description, mappings=changed))
    assert caught.value.reason == reason


def test_a_block_that_is_not_written_yet_is_pending(client: Client) -> None:
    with client.open_session() as session:
        session.allocate_slots(SlotRequest("a", Content(range(4)), lookup=True))
        with client.stream_events(snapshot=True) as events:
            assert next(events).events == ()
            session.cache_blocks("a", 4)
            event = next(events).events[0]
        assert isinstance(event, BlockStored)
        (block,) = client.pull_blocks(event.block_hashes)
        assert block.status is BlockStatus.READY
