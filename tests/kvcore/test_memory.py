"""The pool's bytes: their layouts, their views, their file."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from block_pages import block_pages
from kvcore import memory
from kvcore.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from kvcore.memory import PoolMemory, layer_layouts, remove_abandoned
from kvcore.spec import (
    DepotConfig,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

torch = pytest.importorskip("torch")

BLOCK_SIZE, HEADS, HEAD_SIZE, NUM_BLOCKS = 4, 2, 8, 6
PAGE = 2 * BLOCK_SIZE * HEADS * HEAD_SIZE * 2
LAYERS = ("first", "second", "third")


def config_of(layout: str) -> DepotConfig:
    spec = FullAttentionSpec(BLOCK_SIZE, HEADS, HEAD_SIZE, "bfloat16")
    return DepotConfig(KVCacheConfig(NUM_BLOCKS, (KVCacheGroup(LAYERS, spec),)), layout=layout)


@pytest.fixture(params=["block", "layer"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PoolMemory]:
    with PoolMemory(config_of(request.param), str(tmp_path), name="test") as made:
        yield made


@pytest.mark.parametrize(
    ("layout", "offsets", "stride"),
    [
        pytest.param("block", [0, PAGE, 2 * PAGE], 3 * PAGE, id="block"),
        pytest.param("layer", [0, NUM_BLOCKS * PAGE, 2 * NUM_BLOCKS * PAGE], PAGE, id="layer"),
    ],
)
def test_where_layers_lie(layout: str, offsets: list[int], stride: int) -> None:
    layouts = layer_layouts(config_of(layout))
    assert [(lay.name, lay.offset_bytes) for lay in layouts] == list(
        zip(LAYERS, offsets, strict=True)
    )
    assert {lay.block_stride_bytes for lay in layouts} == {stride}
    assert {lay.group for lay in layouts} == {0}


def test_the_sizes_of_qwen2() -> None:
    spec = FullAttentionSpec(16, 2, 64)
    names = tuple(f"layer.{i}" for i in range(24))
    cache = KVCacheConfig(131_928, (KVCacheGroup(names, spec),))
    layouts = layer_layouts(DepotConfig(cache, layout="layer"))
    assert spec.page_size_bytes == 8192
    assert layouts[1].offset_bytes - layouts[0].offset_bytes == 1_080_754_176
    assert cache.pool_bytes == 24 * 1_080_754_176


def test_a_layer_is_a_view_of_the_pool(pool: PoolMemory) -> None:
    assert pool.nbytes == Path(pool.path).stat().st_size == NUM_BLOCKS * len(LAYERS) * PAGE
    views = [pool.layer(name) for name in LAYERS]
    for number, view in enumerate(views, 1):
        assert view.shape == (NUM_BLOCKS, 2, BLOCK_SIZE, HEADS, HEAD_SIZE)
        assert view.dtype is torch.bfloat16
        assert not view.any()
        assert view.stride()[1:] == (
            BLOCK_SIZE * HEADS * HEAD_SIZE,
            HEADS * HEAD_SIZE,
            HEAD_SIZE,
            1,
        )
        view.fill_(number)
    for number, (name, view) in enumerate(zip(LAYERS, views, strict=True), 1):
        assert bool((view == number).all())
        swapped = pool.layer(name, kv_first=True)
        assert swapped.shape == (2, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
        assert torch.equal(swapped.transpose(0, 1), view)
        swapped[1, 3, 2] = 9
        assert bool((view[3, 1, 2] == 9).all())


def test_a_block_is_its_pages_layer_by_layer(pool: PoolMemory) -> None:
    generator = torch.Generator().manual_seed(0)
    for name in LAYERS:
        view = pool.layer(name)
        view.copy_(torch.randn(view.shape, generator=generator))
    for block_id in (0, 1, NUM_BLOCKS - 1):
        pages = [pool.layer(name)[block_id] for name in LAYERS]
        expected = torch.stack(pages).contiguous().view(torch.uint8).flatten()
        found = torch.frombuffer(bytearray(block_pages(pool, block_id)), dtype=torch.uint8)
        assert torch.equal(found, expected)


def test_there_is_no_such_layer(pool: PoolMemory) -> None:
    with pytest.raises(NotFound, match="fourth"):
        pool.layer("fourth")


def test_another_process_sees_writes_and_is_seen(pool: PoolMemory) -> None:
    pool.layer("second")[5, 1, 3, 1, 7] = 42
    offset = pool.layouts["second"].offset_bytes + 5 * pool.layouts["second"].block_stride_bytes
    program = f"""
import mmap, os
fd = os.open({pool.path!r}, os.O_RDWR)
shared = mmap.mmap(fd, 0)
page = shared[{offset}:{offset + PAGE}]
assert page[-2:] == b"\\x28\\x42", page[-2:]  # 42 as bfloat16, in the page's last element
shared[{offset}:{offset} + 2] = b"\\x28\\x42"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert pool.layer("second")[5, 0, 0, 0, 0] == 42


def test_the_file_is_private_and_reserved_and_goes(tmp_path: Path) -> None:
    pool = PoolMemory(config_of("block"), str(tmp_path), name="test")
    status = Path(pool.path).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= pool.nbytes
    view = pool.layer("first")
    pool.close()
    pool.close()
    assert list(tmp_path.iterdir()) == []
    assert not view.any()  # whoever maps it keeps the bytes


def test_two_pools_never_share_a_file(tmp_path: Path) -> None:
    with PoolMemory(config_of("block"), str(tmp_path), name="test") as first:
        with pytest.raises(AlreadyExists, match="another server"):
            PoolMemory(config_of("block"), str(tmp_path), name="test")
        assert Path(first.path).exists()
        assert len(list(tmp_path.iterdir())) == 1


def test_too_small_a_filesystem_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, length // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(memory.file.os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match=r"needs \d+ bytes, but .* has room for \d+"):
        PoolMemory(config_of("block"), str(tmp_path), name="test")
    assert list(tmp_path.iterdir()) == []


_MOUNTED = """
import os, sys
from kvcore.memory import FileMemory, TensorView
memory = FileMemory(5 << 20, sys.argv[1], name="test", huge_pages=sys.argv[2] == "on")
mapping = memory.mapping
assert not memory.tensor(TensorView("", "uint8", (5 << 20,), (1,), 0)).any()
print(memory.huge_bytes, mapping.huge_pages, os.stat(memory.path).st_blocks * 512 >= 5 << 20)
memory.close()
assert os.listdir(sys.argv[1]) == []
"""


@pytest.mark.parametrize(
    ("mounted", "huge_pages", "obtained"),
    [
        pytest.param("advise", "on", "4194304 True True", id="on advice"),
        pytest.param("within_size", "on", "4194304 True True", id="where they fit"),
        pytest.param("advise", "off", "0 False True", id="not asked for"),
        pytest.param("never", "on", "0 False True", id="not given"),
    ],
)
def test_huge_pages(tmp_path: Path, mounted: str, huge_pages: str, obtained: str) -> None:
    # In a mount namespace of its own, which ends with the command.
    mount = f"mount -t tmpfs -o huge={mounted},size=16m tmpfs {tmp_path}"
    inside = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*inside, mount], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a tmpfs with huge pages here")
    command = [sys.executable, "-c", _MOUNTED, str(tmp_path), huge_pages]
    ran = subprocess.run(
        [*inside, f'{mount} && exec "$@"', "sh", *command],
        check=True,
        timeout=120,
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ran.stdout.strip() == obtained


def test_other_failures_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(memory.file.os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="Input/output"):
        PoolMemory(config_of("block"), str(tmp_path), name="test")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "a/b"], ids=["empty", "slash"])
def test_a_name_must_name_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument):
        PoolMemory(config_of("block"), str(tmp_path), name=name)


def test_what_a_dead_owner_left_is_removed(tmp_path: Path) -> None:
    with PoolMemory(config_of("block"), str(tmp_path), name="alive") as alive:
        abandoned = tmp_path / "kvdepot-dead.pool"
        abandoned.write_bytes(b"x")
        (tmp_path / "other.txt").write_bytes(b"x")
        assert remove_abandoned(str(tmp_path)) == [str(abandoned)]
        assert Path(alive.path).exists()
        assert (tmp_path / "other.txt").exists()


# --- several groups -------------------------------------------------------------------

FULL = FullAttentionSpec(4, 1, 8)  # a page of 128 bytes
WINDOW = SlidingWindowSpec(4, 1, 8, sliding_window=8)
STATE = MambaSpec(4, shapes=((3, 4), (2, 2)), dtypes=("bfloat16", "float32"), page_size_padded=128)
SMALL = FullAttentionSpec(4, 1, 4)  # 64 bytes


def uniform(**specs: FullAttentionSpec) -> KVCacheGroup:
    return KVCacheGroup(tuple(specs), UniformTypeKVCacheSpecs(4, specs))


@pytest.mark.parametrize(
    ("groups", "places", "block_bytes"),
    [
        pytest.param(
            (KVCacheGroup(("f0", "f1"), FULL), KVCacheGroup(("w0", "w1"), WINDOW)),
            {"f0": 0, "f1": 128, "w0": 0, "w1": 128},
            256,
            id="layers at one position share their place",
        ),
        pytest.param(
            (KVCacheGroup(("f0",), FULL), KVCacheGroup(("m0", "m1"), STATE)),
            {"f0": 0, "m0": 0, "m1": 128},
            256,
            id="the larger group decides",
        ),
        pytest.param(
            (KVCacheGroup(("s0", "s1"), SMALL), KVCacheGroup(("f0",), FULL)),
            {"s0": 0, "s1": 128, "f0": 0},
            256,
            id="a place is as large as the largest page",
        ),
        pytest.param(
            (uniform(a=FULL, b=SMALL, c=FULL),),
            {"a": 0, "b": 128, "c": 192},
            320,
            id="one group of pages of two sizes",
        ),
        pytest.param(
            (uniform(a=FULL, b=SMALL), uniform(c=SMALL, d=FULL, e=SMALL)),
            {"a": 0, "d": 0, "b": 128, "c": 128, "e": 192},
            256,
            id="groups of such meet by page size",
        ),
        pytest.param(
            (uniform(a=FULL, b=SMALL), KVCacheGroup(("w0", "w1"), WINDOW)),
            {"a": 0, "w0": 0, "b": 128, "w1": 192},
            320,
            id="and any others with them",
        ),
        pytest.param(
            (
                KVCacheGroup(("f0",), FULL),
                KVCacheGroup(("e0", "e1"), EncoderOnlyAttentionSpec(4, 1, 8)),
            ),
            {"f0": 0},
            128,
            id="encoder-only layers keep nothing",
        ),
    ],
)
def test_where_the_layers_of_groups_lie(
    groups: tuple[KVCacheGroup, ...], places: dict[str, int], block_bytes: int, tmp_path: Path
) -> None:
    config = DepotConfig(KVCacheConfig(NUM_BLOCKS, groups), layout="block")
    layouts = {layout.name: layout for layout in layer_layouts(config)}
    assert {name: layout.offset_bytes for name, layout in layouts.items()} == places
    assert {layout.block_stride_bytes for layout in layouts.values()} == {block_bytes}
    # Tensor by tensor, the same places follow one another.
    other = {
        layout.name: layout
        for layout in layer_layouts(DepotConfig(KVCacheConfig(NUM_BLOCKS, groups), layout="layer"))
    }
    assert {name: layout.offset_bytes for name, layout in other.items()} == {
        name: place * NUM_BLOCKS for name, place in places.items()
    }
    with PoolMemory(config, str(tmp_path), name="test") as pool:
        assert pool.nbytes == config.kv_cache.pool_bytes == NUM_BLOCKS * block_bytes


@pytest.mark.parametrize("layout", ["block", "layer"])
def test_groups_share_bytes_and_not_blocks(tmp_path: Path, layout: str) -> None:
    groups = (
        KVCacheGroup(("f0", "f1"), FULL),
        KVCacheGroup(("w0", "w1"), WINDOW),
        KVCacheGroup(("m0", "m1"), STATE),
    )
    config = DepotConfig(KVCacheConfig(NUM_BLOCKS, groups), layout=layout)
    with PoolMemory(config, str(tmp_path), name="test") as pool:
        pool.layer("f0")[2].fill_(1)
        pool.layer("w0")[3].fill_(2)
        convolution, state = pool.layer("m0")
        convolution[4].fill_(3)
        state[4].fill_(4)
        assert bool((pool.layer("w0")[2] == 1).all())
        assert bool((pool.layer("f0")[3] == 2).all())
        assert not pool.layer("f1").any()
        raw = block_pages(pool, 4, 2)
        assert len(raw) == 256
        assert raw[:24] == b"\x40\x40" * 12
        assert raw[24:40] == b"\0\0\x80\x40" * 4
        assert not any(raw[40:])
        assert block_pages(pool, 4, 0) == raw
        assert block_pages(pool, 2, 1) == b"\x80\x3f" * 64 + bytes(128)


def test_a_copy_of_a_block_leaves_out_what_lies_between(tmp_path: Path) -> None:
    groups = (KVCacheGroup(("s0", "s1"), SMALL), KVCacheGroup(("f0", "f1"), FULL))
    config = DepotConfig(KVCacheConfig(NUM_BLOCKS, groups))
    with PoolMemory(config, str(tmp_path), name="test") as pool:
        for number, name in enumerate(("s0", "s1"), 1):
            pool.layer(name)[1].fill_(number)
        assert block_pages(pool, 1, 0) == b"\x80\x3f" * 32 + b"\0\x40" * 32
        assert [group.block_bytes for group in groups] == [128, 256]


def test_a_page_that_no_tensor_can_lie_over_is_refused(tmp_path: Path) -> None:
    odd = FullAttentionSpec(1, 1, 1, "uint8")  # 2 bytes
    wide = FullAttentionSpec(1, 1, 1, "float32")
    specs = UniformTypeKVCacheSpecs(1, {"a": odd, "b": wide})
    groups = (KVCacheGroup(("a", "b"), specs),)
    with pytest.raises(InvalidArgument, match="pad every page") as caught:
        PoolMemory(DepotConfig(KVCacheConfig(NUM_BLOCKS, groups)), str(tmp_path), name="test")
    assert caught.value.field == "page_size_padded"
    assert list(tmp_path.iterdir()) == []
