"""Block hashes: the name of a full block's content, given everything before it.

A hash covers a full block and its whole prefix: token ids, the request's extra keys and
the seed, so equal hashes mean equal KV bytes in every process that shares scheme, seed
and block size. Three schemes:

- ``kvd_sha256`` (default): one running SHA-256, read at every block boundary.
- ``sha256_cbor``, ``xxhash_cbor``: each block hashes (parent hash, token ids, extra keys)
  as canonical CBOR, byte-equal to vLLM 0.25.1 (``vllm/v1/core/kv_cache_utils.py``:
  ``init_none_hash``, ``generate_block_hash_extra_keys``, ``hash_block_tokens``; and
  ``vllm/utils/hashing.py``).

The cbor schemes differ from vLLM in two places, both because vLLM's answer depends on more
than the content. Every multimodal item that overlaps a block counts; vLLM skips
(1) all but the last item in blocks that are completed by generated tokens, and
(2) the later of two placeholder ranges that overlap one another, while the earlier goes on.

What ``kvd_sha256`` feeds its SHA-256, with integers little-endian and text in UTF-8::

    header:  "kvdepot.kvd_sha256" u8 version, u64 len(seed), seed, u64 block_size
    block:   0x00 | 0x01 u32 number of keys, key...
             block_size token ids, u32 each
    key:     u8 kind, u64 len(value), value, and for a multimodal item i64 offset

Every field has a fixed size or is preceded by its length, so no two different inputs
make the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol

__all__ = [
    "DEFAULT_SCHEME",
    "SCHEMES",
    "ExtraKeys",
    "HashChain",
    "HashScheme",
    "MultimodalItem",
    "hashes_at",
    "make_scheme",
]

DEFAULT_SCHEME: Final = "kvd_sha256"
SCHEMES: Final[tuple[str, ...]] = ("kvd_sha256", "sha256_cbor", "xxhash_cbor")

TOKEN_BYTES: Final = 4
_TOKEN_END_MAX: Final = 2**32  # placeholder ranges end here at the latest

# Kinds of extra key, in the order in which a block lists them (vLLM's order).
_LORA: Final = 1
_MULTIMODAL: Final = 2
_SALT: Final = 3
_EMBEDS: Final = 4

_NO_EMBEDS: Final = hashlib.sha256(b"").digest()

_KVD_DOMAIN: Final = b"kvdepot.kvd_sha256"
_KVD_VERSION: Final = 1
_KVD_NO_KEYS: Final = b"\x00"
_KVD_STATE_EVERY: Final = 64  # blocks between kept states: bounds what truncation rehashes


# --- extra keys -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One image, clip or the like: its content hash and its placeholder tokens.

    ``offset`` (from the start of the request) and ``length`` count tokens. Raises
    ValueError for a negative offset, a length below 1, an end beyond 2**32 tokens, or
    an identifier that is no valid Unicode text.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        _check_text("multimodal identifier", self.identifier)
        if self.offset < 0 or self.length < 1 or self.offset + self.length > _TOKEN_END_MAX:
            raise ValueError(
                f"multimodal range offset={self.offset} length={self.length} must have "
                f"offset >= 0, length >= 1 and end by {_TOKEN_END_MAX}"
            )


@dataclass(frozen=True, slots=True)
class ExtraKeys:
    """What of a request, besides its tokens, goes into its block hashes.

    ``lora_name`` counts in every block; ``cache_salt`` in block 0 only, and through the
    chain in all later ones (an empty salt is none, as in vLLM); ``multimodal`` items, sorted
    by offset, in the blocks that they overlap. ``prompt_embeds_digest[i]`` is the SHA-256 of
    the prompt embeddings' rows within hash block i (the last may be partial); when there are
    any, blocks beyond them carry the SHA-256 of nothing, as in vLLM.

    Raises ValueError for unsorted items, text that is not valid Unicode, or a digest
    that is not 32 bytes long.
    """

    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    prompt_embeds_digest: tuple[bytes, ...] = ()
    # Both non-decreasing, so that a block finds its items by bisection.
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())
    _ends_max: tuple[int, ...] = field(init=False, repr=False, compare=False, default=())

    def __post_init__(self) -> None:
        if self.lora_name is not None:
            _check_text("lora_name", self.lora_name)
        if self.cache_salt is not None:
            _check_text("cache_salt", self.cache_salt)
        if any(len(digest) != 32 for digest in self.prompt_embeds_digest):
            raise ValueError("prompt_embeds_digest: every digest must have 32 bytes")
        if self.multimodal:
            starts = tuple(item.offset for item in self.multimodal)
            if any(left > right for left, right in pairwise(starts)):
                raise ValueError("multimodal items must be sorted by offset")
            ends = (item.offset + item.length for item in self.multimodal)
            object.__setattr__(self, "_starts", starts)
            object.__setattr__(self, "_ends_max", tuple(accumulate(ends, max)))

    @property
    def is_empty(self) -> bool:
        """Whether no block has any."""
        return not (
            self.lora_name is not None
            or self.cache_salt
            or self.multimodal
            or self.prompt_embeds_digest
        )

    def of_block(self, start: int, end: int, block_index: int) -> tuple[Any, ...] | None:
        """The keys of the block over tokens [start, end), or None when it has none.

        In vLLM's order: LoRA name, (identifier, offset relative to the block) of every
        overlapping item, salt, embeddings digest.
        """
        keys = self._typed_keys(start, end, block_index)
        return tuple(value for _, value in keys) if keys else None

    def _typed_keys(self, start: int, end: int, block_index: int) -> list[tuple[int, Any]]:
        keys: list[tuple[int, Any]] = []
        if self.lora_name is not None:
            keys.append((_LORA, self.lora_name))
        if self.multimodal:
            first = bisect_right(self._ends_max, start)
            last = bisect_left(self._starts, end)
            keys.extend(
                (_MULTIMODAL, (item.identifier, item.offset - start))
                for item in self.multimodal[first:last]
                if item.offset + item.length > start
            )
        if self.cache_salt and block_index == 0:
            keys.append((_SALT, self.cache_salt))
        if self.prompt_embeds_digest:
            known = block_index < len(self.prompt_embeds_digest)
            digest = self.prompt_embeds_digest[block_index] if known else _NO_EMBEDS
            keys.append((_EMBEDS, digest))
        return keys

    def _steady_from(self, block_size: int) -> int:
        """Index of the first block from which on every block has the same keys."""
        salted = 1 if self.cache_salt else 0
        pictured = -(-self._ends_max[-1] // block_size) if self._ends_max else 0
        return max(salted, pictured, len(self.prompt_embeds_digest))


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode text") from error


# --- the two interfaces ---------------------------------------------------------------


class HashChain(ABC):
    """The block hashes of one request, grown as its tokens are appended.

    ``hashes[i]`` names block i, over tokens [0, (i + 1) * block_size). Full blocks only.
    The list is grown and cut in place; others only read it.
    """

    __slots__ = ("_extra", "_steady_from", "block_size", "hashes")

    def __init__(self, block_size: int, extra: ExtraKeys) -> None:
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._extra = extra
        self._steady_from = 0 if extra.is_empty else extra._steady_from(block_size)

    def extend(self, tokens: bytes | bytearray | memoryview, num_tokens: int) -> None:
        """Hash every full block that is not hashed yet; the cost is per new block.

        ``tokens`` is the request's whole token buffer, contiguous little-endian uint32, of
        which the first ``num_tokens`` are valid; those already hashed must be unchanged.
        No reference to it is kept. Raises ValueError, and changes nothing, when the buffer
        is shorter than the full blocks of ``num_tokens``, or blocks beyond ``num_tokens``
        are hashed already (``truncate`` first).
        """
        first = len(self.hashes)
        stop = num_tokens // self.block_size
        if stop == first:
            return
        if num_tokens < 0:
            raise ValueError(f"num_tokens {num_tokens} is negative")
        if stop < first:
            raise ValueError(
                f"{num_tokens} tokens are fewer than the {first * self.block_size} hashed; "
                "truncate the chain first"
            )
        _check_buffer(tokens, stop * self.block_size)
        # Released on leaving, so that the caller's bytearray can be resized again.
        with memoryview(tokens) as buffer, buffer.cast("B") as view:
            self._hash_blocks(view, first, stop)

    def truncate(self, num_tokens: int, tokens: bytes | bytearray | memoryview) -> None:
        """Keep the hashes of full blocks within ``num_tokens``; drop those beyond.

        ``tokens`` is the buffer as for ``extend``; its first ``num_tokens`` must be unchanged.
        No-op when no hashed block reaches beyond. Raises ValueError, and changes nothing, for
        a negative count or a buffer shorter than the hashes kept.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens {num_tokens} is negative")
        keep = num_tokens // self.block_size
        if keep >= len(self.hashes):
            return
        _check_buffer(tokens, keep * self.block_size)
        with memoryview(tokens) as buffer, buffer.cast("B") as view:
            self._cut(view, keep)

    @abstractmethod
    def _hash_blocks(self, view: memoryview, first: int, stop: int) -> None:
        """Append the hashes of blocks [first, stop); ``first`` is the next to hash."""

    @abstractmethod
    def _cut(self, view: memoryview, keep: int) -> None:
        """Drop the hashes from block ``keep`` on and rewind to its start."""


class HashScheme(ABC):
    """How hashes are made: a name, a seed (text) and the size of a hash in bytes."""

    __slots__ = ("digest_size", "name", "seed")

    def __init__(self, name: str, seed: str, digest_size: int) -> None:
        self.name = name
        self.seed = seed
        self.digest_size = digest_size

    def __repr__(self) -> str:
        return f"<HashScheme {self.name} digest_size={self.digest_size}>"  # the seed may be secret

    def chain(self, block_size: int, extra: ExtraKeys) -> HashChain:
        """An empty chain for one request. Raises ValueError for a block size below 1."""
        if block_size < 1:
            raise ValueError(f"block_size {block_size} must be at least 1 token")
        return self._chain(block_size, extra)

    @abstractmethod
    def _chain(self, block_size: int, extra: ExtraKeys) -> HashChain: ...


def make_scheme(name: str, seed: str) -> HashScheme:
    """The scheme of that name, seeded.

    For the cbor schemes the seed is the text that vLLM reads from PYTHONHASHSEED. Raises
    ValueError for an unknown name or a seed that is not valid Unicode text, and
    ModuleNotFoundError when the scheme's package (cbor2, xxhash) is not installed.
    """
    if name not in SCHEMES:
        raise ValueError(f"unknown hash scheme {name!r}; known: {', '.join(SCHEMES)}")
    _check_text("seed", seed)
    if name == "kvd_sha256":
        return _RunningScheme(seed)
    if name == "sha256_cbor":
        return _CborScheme(name, seed, lambda data: hashlib.sha256(data).digest())
    from xxhash import xxh3_128_digest

    return _CborScheme(name, seed, xxh3_128_digest)


def hashes_at(hashes: Sequence[bytes], hash_block_size: int, block_size: int) -> Sequence[bytes]:
    """The hashes of coarser blocks: the finer hash at each coarser boundary.

    ``hashes`` are per ``hash_block_size`` tokens. Raises ValueError unless ``block_size`` is
    a multiple of it. Answers ``hashes`` itself when the sizes are equal.
    """
    ratio, rest = divmod(block_size, hash_block_size)
    if rest or ratio < 1:
        raise ValueError(f"block size {block_size} is not a multiple of {hash_block_size}")
    return hashes if ratio == 1 else hashes[ratio - 1 :: ratio]


def _check_buffer(tokens: bytes | bytearray | memoryview, num_tokens: int) -> None:
    num_bytes = tokens.nbytes if isinstance(tokens, memoryview) else len(tokens)
    if num_bytes < num_tokens * TOKEN_BYTES:
        raise ValueError(
            f"token buffer has {num_bytes} bytes, too few for {num_tokens} tokens "
            f"of {TOKEN_BYTES} bytes"
        )


# --- kvd_sha256 -----------------------------------------------------------------------


class _Hasher(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> _Hasher: ...


_BlocksOf = Callable[[memoryview], Iterator[tuple[Any, ...]]]
"""Cuts tokens into blocks of bytes."""


class _RunningScheme(HashScheme):
    __slots__ = ("_block_size", "_blocks_of", "_root")

    def __init__(self, seed: str) -> None:
        super().__init__("kvd_sha256", seed, 32)
        self._block_size = 0

    def _chain(self, block_size: int, extra: ExtraKeys) -> HashChain:
        if block_size != self._block_size:  # a pool has one
            seed = self.seed.encode()
            header = struct.pack("<BQ", _KVD_VERSION, len(seed)) + seed
            header += struct.pack("<Q", block_size)
            self._root: _Hasher = hashlib.sha256(_KVD_DOMAIN + header)
            self._blocks_of: _BlocksOf = struct.Struct(f"{block_size * TOKEN_BYTES}s").iter_unpack
            self._block_size = block_size
        return _RunningChain(block_size, extra, self._root, self._blocks_of)


class _RunningChain(HashChain):
    __slots__ = ("_blocks_of", "_saved", "_state", "_steady_frame")

    def __init__(
        self, block_size: int, extra: ExtraKeys, root: _Hasher, blocks_of: _BlocksOf
    ) -> None:
        super().__init__(block_size, extra)
        self._state = root.copy()
        # _saved[i] is the state before block i * _KVD_STATE_EVERY.
        self._saved = [root]
        self._steady_frame = _KVD_NO_KEYS if extra.is_empty else self._frame(self._steady_from)
        self._blocks_of = blocks_of

    def _frame(self, block_index: int) -> bytes:
        start = block_index * self.block_size
        return _kvd_frame(self._extra._typed_keys(start, start + self.block_size, block_index))

    def extend(self, tokens: bytes | bytearray | memoryview, num_tokens: int) -> None:
        first = len(self.hashes)
        width = self.block_size * TOKEN_BYTES
        end = (first + 1) * width
        if (
            num_tokens // self.block_size == first + 1
            and first >= self._steady_from
            and (first + 1) % _KVD_STATE_EVERY
            and type(tokens) is bytearray
            and len(tokens) >= end
        ):
            # A decode step's block, at a third of the cost of the general way.
            self._state.update(self._steady_frame + tokens[end - width : end])
            self.hashes.append(self._state.digest())
        else:
            super().extend(tokens, num_tokens)

    def _hash_blocks(self, view: memoryview, first: int, stop: int) -> None:
        while first < stop:
            pause = min(stop, (first // _KVD_STATE_EVERY + 1) * _KVD_STATE_EVERY)
            self._absorb(view, first, pause)
            if pause % _KVD_STATE_EVERY == 0:
                self._saved.append(self._state.copy())
            first = pause

    def _absorb(self, view: memoryview, first: int, stop: int) -> None:
        width = self.block_size * TOKEN_BYTES
        # digest() leaves the state as it is, ready for more.
        update, digest, append = self._state.update, self._state.digest, self.hashes.append
        for index in range(first, min(stop, self._steady_from)):
            update(self._frame(index))
            update(view[index * width : (index + 1) * width])
            append(digest())
        frame, first = self._steady_frame, max(first, self._steady_from)
        if first < stop:
            # One update a block, of bytes cut by struct: half the cost of two, of views.
            with view[first * width : stop * width] as steady:
                for (tokens,) in self._blocks_of(steady):
                    update(frame + tokens)
                    append(digest())

    def _cut(self, view: memoryview, keep: int) -> None:
        base = keep // _KVD_STATE_EVERY
        del self._saved[base + 1 :]
        self._state = self._saved[base].copy()
        del self.hashes[base * _KVD_STATE_EVERY :]
        self._absorb(view, base * _KVD_STATE_EVERY, keep)


def _kvd_frame(keys: list[tuple[int, Any]]) -> bytes:
    if not keys:
        return _KVD_NO_KEYS
    parts = [struct.pack("<BI", 1, len(keys))]
    for kind, key in keys:
        text, offset = key if kind == _MULTIMODAL else (key, None)
        value = text if isinstance(text, bytes) else text.encode()
        parts += (struct.pack("<BQ", kind, len(value)), value)
        if offset is not None:
            parts.append(struct.pack("<q", offset))
    return b"".join(parts)


# --- sha256_cbor, xxhash_cbor ---------------------------------------------------------


class _CborScheme(HashScheme):
    __slots__ = ("_hash_object", "_root")

    def __init__(self, name: str, seed: str, hash_bytes: Callable[[bytes], bytes]) -> None:
        from cbor2 import dumps

        # Canonical form differs only in floats, maps and sets, of which there are none.
        self._hash_object: Callable[[object], bytes] = lambda value: hash_bytes(dumps(value))
        self._root = self._hash_object(seed)
        super().__init__(name, seed, len(self._root))

    def _chain(self, block_size: int, extra: ExtraKeys) -> HashChain:
        return _CborChain(block_size, extra, self._root, self._hash_object)


class _CborChain(HashChain):
    __slots__ = ("_hash_object", "_root", "_steady_keys", "_unpack_from")

    def __init__(
        self,
        block_size: int,
        extra: ExtraKeys,
        root: bytes,
        hash_object: Callable[[object], bytes],
    ) -> None:
        super().__init__(block_size, extra)
        self._root = root
        self._hash_object = hash_object
        self._unpack_from = struct.Struct(f"<{block_size}I").unpack_from
        self._steady_keys = self._keys(self._steady_from)

    def _keys(self, block_index: int) -> tuple[Any, ...] | None:
        start = block_index * self.block_size
        return self._extra.of_block(start, start + self.block_size, block_index)

    def _hash_blocks(self, view: memoryview, first: int, stop: int) -> None:
        width = self.block_size * TOKEN_BYTES
        hash_object, unpack_from, append = self._hash_object, self._unpack_from, self.hashes.append
        steady_from, keys = self._steady_from, self._steady_keys
        parent = self.hashes[-1] if self.hashes else self._root
        for index in range(first, stop):
            own = keys if index >= steady_from else self._keys(index)
            parent = hash_object((parent, unpack_from(view, index * width), own))
            append(parent)

    def _cut(self, view: memoryview, keep: int) -> None:
        del self.hashes[keep:]
