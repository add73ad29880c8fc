"""A request as the cache knows it: its tokens, their hashes, and how far it is."""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from kvcore.hashing import TOKEN_BYTES as TOKEN_BYTES
from kvcore.hashing import ExtraKeys, HashChain

if TYPE_CHECKING:
    from kvcore.import_job import Import

NO_EXTRA_KEYS = ExtraKeys()


class RequestStatus(Enum):
    """Where a request stands; the watermark looks at it."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()


# Reading a member off its enum costs 0.1 us and more on Python 3.11.
_WAITING = RequestStatus.WAITING


class Request:
    """Tokens are little-endian uint32; every full block of them is hashed as it comes.

    ``hash_chain`` None: the request is not hashed (caching is off).
    """

    __slots__ = (
        "block_hashes",
        "extra",
        "handle",
        "has_extra_keys",
        "hash_chain",
        "importing",
        "lora_id",
        "num_computed_tokens",
        "num_confirmed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "outlived_reset",
        "quiet_end",
        "quiet_slots",
        "registered_step",
        "remembered_hit_tokens",
        "request_id",
        "skip_reading_prefix_cache",
        "status",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        *,
        hash_chain: HashChain | None,
        extra: ExtraKeys,
        lora_id: int | None = None,
        num_prompt_tokens: int | None = None,
        skip_reading_prefix_cache: bool = False,
        handle: int = 0,
    ) -> None:
        self.request_id = request_id
        self.hash_chain = hash_chain
        self.block_hashes: list[bytes] = [] if hash_chain is None else hash_chain.hashes
        self.extra = extra
        self.has_extra_keys = not extra.is_empty
        self.lora_id = lora_id
        self.num_prompt_tokens = num_prompt_tokens
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.handle = handle
        self.tokens = bytearray()
        self.num_tokens = 0
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = _WAITING
        # It held blocks at a forced reset: what it computes is not to be registered.
        self.outlived_reset = False
        # What the last lookup answered, in tokens; AllocateSlots may claim it.
        self.remembered_hit_tokens = 0
        # Leading tokens whose bytes CacheBlocks has confirmed.
        self.num_confirmed_tokens = 0
        # What fills blocks of it now.
        self.importing: Import | None = None
        # The view's step of the last allocation.
        self.registered_step = 0
        # Growth within these changes no table and no hash: computed tokens with the new
        # ones, and tokens held; slots. See Session.grow; 0 is always right.
        self.quiet_end = self.quiet_slots = 0

    def append(self, tokens: bytes) -> None:
        """Add ``tokens`` at the end; ``len(tokens)`` is a multiple of 4."""
        self.tokens += tokens
        self.num_tokens = len(self.tokens) // TOKEN_BYTES
        self.hash_full_blocks()

    def hash_full_blocks(self) -> None:
        """Hash the full blocks that are not hashed yet."""
        chain = self.hash_chain
        if chain is not None and self.num_tokens // chain.block_size > len(self.block_hashes):
            chain.extend(self.tokens, self.num_tokens)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first ``num_tokens`` tokens, and the hashes of their full blocks."""
        assert num_tokens <= self.num_tokens
        del self.tokens[num_tokens * TOKEN_BYTES :]
        self.num_tokens = num_tokens
        self.quiet_end = 0
        if self.hash_chain is not None:
            self.hash_chain.truncate(num_tokens, self.tokens)

    def token_bytes(self, start: int, stop: int) -> bytes:
        """The tokens ``start`` to ``stop``, as they came."""
        return bytes(self.tokens[start * TOKEN_BYTES : stop * TOKEN_BYTES])

    def extra_keys_of(self, position: int, block_size: int) -> tuple[Any, ...] | None:
        """The extra keys in the hash of the block at ``position`` of the table."""
        start = position * block_size
        return self.extra.of_block(start, start + block_size, position)

    def forget_progress(self) -> None:
        """The request holds no blocks any more."""
        self.num_computed_tokens = 0
        self.remembered_hit_tokens = 0
        self.num_confirmed_tokens = 0
        self.outlived_reset = False
        self.quiet_end = self.quiet_slots = 0
        self.importing = None
