"""Block hashes: what goes in, what must tell two blocks apart, and growth by appending."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import struct
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.hashing import (
    DEFAULT_SCHEME,
    SCHEMES,
    ExtraKeys,
    HashChain,
    MultimodalItem,
    hashes_at,
    make_scheme,
)

SEED = "0"
CAT = MultimodalItem("cat", 3, 6)
EMBEDS = tuple(hashlib.sha256(bytes([i])).digest() for i in range(3))
EXTRAS = {
    "none": ExtraKeys(),
    "salt": ExtraKeys(cache_salt="s"),
    "lora": ExtraKeys(lora_name="a"),
    "multimodal": ExtraKeys(multimodal=(CAT, MultimodalItem("dog", 9, 1))),
    "embeds": ExtraKeys(prompt_embeds_digest=EMBEDS),
    "all": ExtraKeys("a", "s", (CAT, MultimodalItem("dog", 300, 40)), EMBEDS),
}
each_scheme = pytest.mark.parametrize("scheme_name", SCHEMES)
each_extra = pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS.keys())


def pack(tokens: list[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def chain_of(
    tokens: list[int],
    extra: ExtraKeys = EXTRAS["none"],
    *,
    block_size: int = 4,
    scheme_name: str = DEFAULT_SCHEME,
    seed: str = SEED,
) -> HashChain:
    chain = make_scheme(scheme_name, seed).chain(block_size, extra)
    chain.extend(pack(tokens), len(tokens))
    return chain


# --- kvd_sha256, once more and straightforwardly --------------------------------------


def plain_kvd(tokens: list[int], extra: ExtraKeys, block_size: int, seed: str) -> list[bytes]:
    """The format of the module's docstring, all bytes laid out, hashed from the start."""
    name = seed.encode()
    data = b"kvdepot.kvd_sha256\x01" + len(name).to_bytes(8, "little") + name
    data += block_size.to_bytes(8, "little")
    hashes = []
    for index in range(len(tokens) // block_size):
        start, end = index * block_size, (index + 1) * block_size
        keys: list[bytes] = []

        def key(kind: int, value: bytes, rest: bytes = b"", into: list[bytes] = keys) -> None:
            into.append(bytes([kind]) + len(value).to_bytes(8, "little") + value + rest)

        if extra.lora_name is not None:
            key(1, extra.lora_name.encode())
        for item in extra.multimodal:
            if item.offset < end and item.offset + item.length > start:
                relative = (item.offset - start).to_bytes(8, "little", signed=True)
                key(2, item.identifier.encode(), relative)
        if extra.cache_salt and index == 0:
            key(3, extra.cache_salt.encode())
        if extra.prompt_embeds_digest:
            rows = (*extra.prompt_embeds_digest, *[hashlib.sha256(b"").digest()] * (index + 1))
            key(4, rows[index])
        data += b"\x01" + len(keys).to_bytes(4, "little") if keys else b"\x00"
        data += b"".join(keys)
        data += b"".join(token.to_bytes(4, "little") for token in tokens[start:end])
        hashes.append(hashlib.sha256(data).digest())
    return hashes


# Of tokens 0..399 in blocks of 4, made by `plain_kvd`: the first, the third and the last hash.
GOLDEN = {
    "none": (
        "d19d89f1799b42518d21da66b20a59aff8daecdcf5e3e7cac53a4b091ad68223",
        "e50e43e91c585bb69b9e9df468caacc677974b2dd5b5e766b702c428e28c1a0c",
        "5856234931f9beaf1e73892fc3ff93616f00d0c48e6e2f2e997c97f30eed5443",
    ),
    "salt": (
        "2df10057e1778d5707445d05b6f10dde7698a4f243394f029fb814a1ffe049ff",
        "71cd439161d23801a52486fbe8541a55b69c5a72c724b99c2b65a25bc57763ff",
        "149025595a0bf2f5b5ae047ff416aedc0f822662f4d66b3b013f3916da1344c9",
    ),
    "lora": (
        "6a7df2eb32a190903a54fbd8f24a73ebbdddca53eba4ac84be95725e3cb76217",
        "6270033c5d9f15ed9023ed8d36af4c0034406f4114cc4328f8b53f9d73e7be7a",
        "1df449ebd18b3aff71747c0508a0c772f533fed25d1db17db428e90b0c414654",
    ),
    "multimodal": (
        "7f6e686ec96fd242abdbdae2bfcf7b3553d3bfd2686d6434d236924680d0b226",
        "5280377475afb82625bdf5251deef313af222e143183da688a3796c0a8212bc1",
        "3dbd9ca8a7309fa04ff6ad69f7da8c7c1b8f096c3c0e740a6f23621368b74bc9",
    ),
    "embeds": (
        "909e7abfae3f5daf48594657323fbd6d148dc87724bcd93e0202c5e4ca8ee776",
        "1d417bee92d3d4310b1b5d3b0e511c6dd11ff3b12388ef5881a32e266d1cdc44",
        "384affaa05f06ed7c94683087acc0cf68037e6eb534f9e564e8c36ec8a02ec9f",
    ),
    "all": (
        "27a84a8a74e2a8ad068f2bb123bc3bebf1c156264b52479ddcb724c994b2c789",
        "93938a46d7275bd99b8db941217e216d0591524a5bd9bc7cf9813d2b537dc687",
        "0200fa8be6947116481ac07859da1de343974d1270a968c2d35a9d539478a419",
    ),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_kvd_sha256_golden(name: str) -> None:
    hashes = chain_of(list(range(400)), EXTRAS[name]).hashes
    assert (hashes[0].hex(), hashes[2].hex(), hashes[-1].hex()) == GOLDEN[name]
    assert hashes == plain_kvd(list(range(400)), EXTRAS[name], 4, SEED)


token_ids = st.one_of(st.integers(0, 300), st.integers(0, 2**32 - 1))
items = st.lists(
    st.builds(MultimodalItem, st.text(max_size=3), st.integers(0, 40), st.integers(1, 30)),
    max_size=5,
).map(lambda found: tuple(sorted(found, key=lambda item: item.offset)))
extras = st.builds(
    ExtraKeys,
    lora_name=st.none() | st.text(max_size=3),
    cache_salt=st.none() | st.text(max_size=3),
    multimodal=items,
    prompt_embeds_digest=st.lists(st.binary(min_size=32, max_size=32), max_size=4).map(tuple),
)


@given(
    tokens=st.lists(token_ids, max_size=60),
    extra=extras,
    block_size=st.integers(1, 20),
    seed=st.text(max_size=4),
)
def test_kvd_sha256_equals_plain(
    tokens: list[int], extra: ExtraKeys, block_size: int, seed: str
) -> None:
    chain = chain_of(tokens, extra, block_size=block_size, seed=seed)
    assert chain.hashes == plain_kvd(tokens, extra, block_size, seed)


# --- growing and cutting --------------------------------------------------------------


@each_scheme
@given(data=st.data(), extra=extras, block_size=st.sampled_from([1, 3, 4, 16]))
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_hashes_of_one_shot(
    scheme_name: str, data: st.DataObject, extra: ExtraKeys, block_size: int
) -> None:
    tokens = data.draw(st.lists(token_ids, max_size=80))
    stops = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=8)))
    chain = make_scheme(scheme_name, SEED).chain(block_size, extra)
    buffer = bytearray()
    for stop in [*stops, len(tokens)]:
        buffer += pack(tokens[len(buffer) // 4 : stop])
        chain.extend(buffer, stop)
        assert len(chain.hashes) == stop // block_size
    one_shot = chain_of(tokens, extra, block_size=block_size, scheme_name=scheme_name)
    assert chain.hashes == one_shot.hashes


@each_scheme
@given(data=st.data(), extra=extras)
@settings(max_examples=60, deadline=None)
def test_truncate_then_extend_equals_fresh(
    scheme_name: str, data: st.DataObject, extra: ExtraKeys
) -> None:
    # One token a block, so that the states kept (every 64 blocks) come into play.
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    tokens = [rng.randrange(2**32) for _ in range(data.draw(st.integers(0, 300)))]
    chain = chain_of(tokens, extra, block_size=1, scheme_name=scheme_name)
    for _ in range(3):
        keep = data.draw(st.integers(0, len(tokens)))
        chain.truncate(keep, pack(tokens))
        fresh = chain_of(tokens[:keep], extra, block_size=1, scheme_name=scheme_name)
        assert chain.hashes == fresh.hashes
        tokens = tokens[:keep] + [rng.randrange(2**32) for _ in range(rng.randrange(150))]
        chain.extend(pack(tokens), len(tokens))
        whole = chain_of(tokens, extra, block_size=1, scheme_name=scheme_name)
        assert chain.hashes == whole.hashes


@each_scheme
@pytest.mark.parametrize(
    ("num_tokens", "num_hashes"),
    [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (10, 2)],
)
def test_only_full_blocks_of_valid_tokens(
    scheme_name: str, num_tokens: int, num_hashes: int
) -> None:
    chain = make_scheme(scheme_name, SEED).chain(4, ExtraKeys())
    chain.extend(pack(list(range(10))), num_tokens)
    whole = chain_of(list(range(10)), scheme_name=scheme_name)
    assert chain.hashes == whole.hashes[:num_hashes]


@each_scheme
@each_extra
def test_digest_size(scheme_name: str, extra: ExtraKeys) -> None:
    scheme = make_scheme(scheme_name, SEED)
    assert (scheme.name, scheme.seed) == (scheme_name, SEED)
    hashes = chain_of(list(range(400)), extra, scheme_name=scheme_name).hashes
    assert {len(digest) for digest in hashes} == {scheme.digest_size}
    assert len(set(hashes)) == len(hashes) == 100


@each_scheme
@pytest.mark.parametrize("kind", ["bytes", "bytearray", "memoryview", "memoryview of words"])
def test_buffer_kinds_are_equal_and_not_held(scheme_name: str, kind: str) -> None:
    tokens = list(range(40))
    make: dict[str, Callable[[bytes], Any]] = {
        "bytes": bytes,
        "bytearray": bytearray,
        "memoryview": memoryview,
        "memoryview of words": lambda data: memoryview(array("I", data)),
    }
    buffer = make[kind](pack(tokens))
    chain = make_scheme(scheme_name, SEED).chain(4, ExtraKeys())
    chain.extend(buffer, 40)
    assert chain.hashes == chain_of(tokens, scheme_name=scheme_name).hashes
    chain.truncate(9, buffer)
    if isinstance(buffer, bytearray):
        buffer += b"more"  # BufferError if the chain still held a view


@each_scheme
def test_chains_of_one_scheme_are_independent(scheme_name: str) -> None:
    scheme = make_scheme(scheme_name, SEED)
    left, right = scheme.chain(4, ExtraKeys()), scheme.chain(4, ExtraKeys())
    left.extend(pack([1] * 8), 8)
    right.extend(pack([2] * 4), 4)
    left.extend(pack([1] * 8 + [2] * 4), 12)
    assert left.hashes == chain_of([1] * 8 + [2] * 4, scheme_name=scheme_name).hashes
    assert right.hashes == chain_of([2] * 4, scheme_name=scheme_name).hashes


# --- what tells two requests apart ----------------------------------------------------

IMAGE_AT_5 = ExtraKeys(multimodal=(MultimodalItem("cat", 5, 2),))


@each_scheme
@pytest.mark.parametrize(
    ("left", "right", "num_equal"),
    [
        pytest.param(ExtraKeys(), ExtraKeys(cache_salt="s"), 0, id="salt or none"),
        pytest.param(ExtraKeys(cache_salt="s"), ExtraKeys(cache_salt="t"), 0, id="salts"),
        pytest.param(ExtraKeys(), ExtraKeys(cache_salt=""), 5, id="an empty salt is none"),
        pytest.param(ExtraKeys(), ExtraKeys(lora_name="a"), 0, id="lora or none"),
        pytest.param(ExtraKeys(), ExtraKeys(lora_name=""), 0, id="an unnamed lora is one"),
        pytest.param(ExtraKeys(lora_name="a"), ExtraKeys(lora_name="b"), 0, id="loras"),
        pytest.param(ExtraKeys(), IMAGE_AT_5, 1, id="image or none"),
        pytest.param(
            IMAGE_AT_5,
            ExtraKeys(multimodal=(MultimodalItem("dog", 5, 2),)),
            1,
            id="images",
        ),
        pytest.param(
            IMAGE_AT_5,
            ExtraKeys(multimodal=(MultimodalItem("cat", 6, 1),)),
            1,
            id="image offsets",
        ),
        pytest.param(
            IMAGE_AT_5,
            ExtraKeys(multimodal=(MultimodalItem("cat", 5, 4),)),
            2,
            id="image reaches the next block",
        ),
        pytest.param(ExtraKeys(), EXTRAS["embeds"], 0, id="embeds or none"),
        pytest.param(
            EXTRAS["embeds"],
            ExtraKeys(prompt_embeds_digest=(EMBEDS[0], EMBEDS[2])),
            1,
            id="embeds differ in block 1",
        ),
    ],
)
def test_equal_until_the_first_difference_and_never_again(
    scheme_name: str, left: ExtraKeys, right: ExtraKeys, num_equal: int
) -> None:
    tokens = list(range(20))
    pairs = zip(
        chain_of(tokens, left, scheme_name=scheme_name).hashes,
        chain_of(tokens, right, scheme_name=scheme_name).hashes,
        strict=True,
    )
    assert [a == b for a, b in pairs] == [True] * num_equal + [False] * (5 - num_equal)


@each_scheme
@given(tokens=st.lists(token_ids, min_size=12, max_size=12), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_changed_token_changes_its_block_and_all_later(
    scheme_name: str, tokens: list[int], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, 11))
    other = list(tokens)
    other[at] = data.draw(token_ids.filter(lambda token: token != tokens[at]))
    pairs = zip(
        chain_of(tokens, scheme_name=scheme_name).hashes,
        chain_of(other, scheme_name=scheme_name).hashes,
        strict=True,
    )
    assert [a == b for a, b in pairs] == [index < at // 4 for index in range(3)]


@each_scheme
def test_the_seed_changes_every_hash(scheme_name: str) -> None:
    tokens = list(range(20))
    one = chain_of(tokens, scheme_name=scheme_name).hashes
    other = chain_of(tokens, scheme_name=scheme_name, seed="1").hashes
    assert not set(one) & set(other)


@given(pair=st.tuples(extras, extras), tokens=st.lists(token_ids, min_size=8, max_size=8))
def test_kvd_hashes_are_equal_just_when_the_typed_keys_are(
    pair: tuple[ExtraKeys, ExtraKeys], tokens: list[int]
) -> None:
    def content(extra: ExtraKeys, index: int) -> object:
        bare = dataclasses.replace(extra, lora_name=None, cache_salt=None)
        salt = (extra.cache_salt or None) if index == 0 else None
        return extra.lora_name, salt, bare.of_block(index * 4, index * 4 + 4, index)

    hashes = [chain_of(tokens, extra).hashes for extra in pair]
    same = True
    for index in range(2):
        same = same and content(pair[0], index) == content(pair[1], index)
        assert (hashes[0][index] == hashes[1][index]) == same


def test_kvd_framing_leaves_nothing_to_confuse() -> None:
    """Extras and seeds chosen so that careless joining would make equal bytes."""
    tokens = list(range(40))
    image = MultimodalItem
    cases = [
        ExtraKeys(),
        ExtraKeys(lora_name="abc"),
        ExtraKeys(cache_salt="abc"),
        ExtraKeys(lora_name="ab", cache_salt="c"),
        ExtraKeys(lora_name="a", cache_salt="bc"),
        ExtraKeys(lora_name="abc", cache_salt=""),
        ExtraKeys(lora_name="", cache_salt="abc"),
        ExtraKeys(multimodal=(image("ab", 0, 1), image("c", 1, 1))),
        ExtraKeys(multimodal=(image("a", 0, 1), image("bc", 1, 1))),
        ExtraKeys(multimodal=(image("a", 0, 1),)),
        ExtraKeys(multimodal=(image("a" + "\x00" * 8, 0, 1),)),
        ExtraKeys(multimodal=(image("a", 0, 1),), cache_salt="a"),
        ExtraKeys(multimodal=(image("a", 0, 1), image("a", 0, 1))),
        ExtraKeys(prompt_embeds_digest=(b"a" * 32,)),
        ExtraKeys(cache_salt="a" * 32),
        ExtraKeys(lora_name="a" * 32),
    ]
    lasts = {chain_of(tokens, extra).hashes[-1] for extra in cases}
    # A lone "lora_name" is as good as one with an empty salt.
    assert len(lasts) == len(cases) - 1
    # Seed and block size are framed, too.
    seeds = ["", "\x00", "\x04", "\x00" * 8, "\x04" + "\x00" * 7]
    assert len({chain_of(tokens, seed=seed).hashes[-1] for seed in seeds}) == len(seeds)
    assert chain_of(tokens, block_size=8).hashes[-1] not in lasts


# --- ExtraKeys ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block_index", "expected"),
    [
        (0, ("lora", ("a", 2), "salt", EMBEDS[0])),
        (1, ("lora", ("a", -2), ("b", 3), EMBEDS[1])),
        (2, ("lora", ("b", -1), EMBEDS[2])),
        (3, ("lora", hashlib.sha256(b"").digest())),
    ],
)
def test_of_block_lists_keys_in_vllms_order(block_index: int, expected: tuple[Any, ...]) -> None:
    images = (MultimodalItem("a", 2, 5), MultimodalItem("b", 7, 2))
    extra = ExtraKeys("lora", "salt", images, EMBEDS)
    start = block_index * 4
    assert extra.of_block(start, start + 4, block_index) == expected


def test_of_block_is_none_without_keys() -> None:
    extra = ExtraKeys(cache_salt="salt", multimodal=(MultimodalItem("a", 8, 4),))
    found = [extra.of_block(start, start + 4, start // 4) for start in range(0, 16, 4)]
    assert found == [("salt",), None, (("a", 0),), None]


@given(extra=extras, block_size=st.integers(1, 9))
def test_of_block_finds_every_overlapping_item(extra: ExtraKeys, block_size: int) -> None:
    bare = ExtraKeys(multimodal=extra.multimodal)
    for index in range(80 // block_size):
        start, end = index * block_size, (index + 1) * block_size
        expected = tuple(
            (item.identifier, item.offset - start)
            for item in extra.multimodal
            if item.offset < end and start < item.offset + item.length
        )
        assert bare.of_block(start, end, index) == (expected or None)


def test_extra_keys_are_values() -> None:
    assert EXTRAS["all"] == dataclasses.replace(EXTRAS["all"])
    assert hash(EXTRAS["all"]) == hash(dataclasses.replace(EXTRAS["all"]))
    assert repr(ExtraKeys(lora_name="a")).startswith("ExtraKeys(lora_name='a', cache_salt=None")
    assert "_starts" not in repr(EXTRAS["all"])


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda: MultimodalItem("a", -1, 4), "offset=-1", id="negative offset"),
        pytest.param(lambda: MultimodalItem("a", 0, 0), "length=0", id="no length"),
        pytest.param(lambda: MultimodalItem("a", 2**32, 1), "end by", id="beyond any request"),
        pytest.param(lambda: MultimodalItem("\ud800", 0, 1), "identifier", id="bad identifier"),
        pytest.param(lambda: ExtraKeys(lora_name="\ud800"), "lora_name", id="bad lora"),
        pytest.param(lambda: ExtraKeys(cache_salt="\ud800"), "cache_salt", id="bad salt"),
        pytest.param(
            lambda: ExtraKeys(multimodal=(MultimodalItem("a", 4, 1), MultimodalItem("b", 0, 1))),
            "sorted",
            id="unsorted items",
        ),
        pytest.param(
            lambda: ExtraKeys(prompt_embeds_digest=(b"short",)), "32 bytes", id="short digest"
        ),
        pytest.param(
            lambda: make_scheme("md5", SEED),
            "'md5'; known: kvd_sha256, sha256_cbor, xxhash_cbor",
            id="unknown scheme",
        ),
        pytest.param(lambda: make_scheme("kvd_sha256", "\ud800"), "seed", id="bad seed"),
        pytest.param(
            lambda: make_scheme("kvd_sha256", SEED).chain(0, ExtraKeys()),
            "block_size 0",
            id="no block size",
        ),
        pytest.param(lambda: hashes_at([], 4, 6), "multiple", id="not a multiple"),
        pytest.param(lambda: hashes_at([], 4, 0), "multiple", id="coarser by nothing"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@each_scheme
@pytest.mark.parametrize(
    ("call", "message"),
    [
        pytest.param(lambda c: c.extend(bytes(44), 12), "44 bytes", id="extend beyond buffer"),
        pytest.param(lambda c: c.extend(bytes(32), 7), "truncate", id="extend below hashed"),
        pytest.param(lambda c: c.extend(bytes(32), -1), "negative", id="extend negative"),
        pytest.param(lambda c: c.truncate(-1, b""), "negative", id="truncate negative"),
        pytest.param(lambda c: c.truncate(5, bytes(15)), "15 bytes", id="truncate short buffer"),
    ],
)
def test_a_refused_call_changes_nothing(scheme_name: str, call: Any, message: str) -> None:
    chain = chain_of(list(range(8)), scheme_name=scheme_name)
    with pytest.raises(ValueError, match=message):
        call(chain)
    chain.extend(pack(list(range(12))), 12)
    assert chain.hashes == chain_of(list(range(12)), scheme_name=scheme_name).hashes


def test_negative_count_on_an_empty_chain() -> None:
    with pytest.raises(ValueError, match="negative"):
        make_scheme(DEFAULT_SCHEME, SEED).chain(4, ExtraKeys()).extend(b"", -1)


def test_the_seed_is_not_shown() -> None:
    assert "secret" not in repr(make_scheme(DEFAULT_SCHEME, "secret"))


@pytest.mark.parametrize(
    ("block_size", "expected"),
    [(4, [b"A", b"B", b"C", b"D", b"E"]), (8, [b"B", b"D"]), (12, [b"C"]), (24, [])],
)
def test_coarser_blocks_read_the_hash_at_their_boundary(
    block_size: int, expected: list[bytes]
) -> None:
    assert hashes_at([b"A", b"B", b"C", b"D", b"E"], 4, block_size) == expected
