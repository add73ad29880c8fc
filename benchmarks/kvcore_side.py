"""kvcore's side of the workloads."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from benchmarks.workloads import BLOCK_SIZE, WINDOW_TOKENS
from kvcore.hashing import ExtraKeys, make_scheme
from kvcore.manager import KVCacheManager
from kvcore.request import Request, RequestStatus
from kvcore.spec import (
    DepotConfig,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    SlidingWindowSpec,
)


def token_bytes(tokens: list[int]) -> bytes:
    """Little-endian uint32, as tokens come over the wire."""
    return array("I", tokens).tobytes()


class KvcoreSide:
    """The manager alone, without a session around it."""

    def __init__(self) -> None:
        self.scheme = make_scheme("kvd_sha256", "0")

    def make_manager(
        self, num_blocks: int, *, hybrid: bool = False, events: bool = False
    ) -> KVCacheManager:
        full = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=1, head_size=16)
        window = SlidingWindowSpec(
            BLOCK_SIZE, num_kv_heads=1, head_size=16, sliding_window=WINDOW_TOKENS
        )
        groups = [KVCacheGroup(("layer",), full)]
        if hybrid:
            groups.append(KVCacheGroup(("window",), window))
        config = DepotConfig(KVCacheConfig(num_blocks, tuple(groups)))
        return KVCacheManager(config, enable_kv_cache_events=events)

    def make_request(self, request_id: str, tokens: list[int]) -> Request:
        extra = ExtraKeys()
        chain = self.scheme.chain(BLOCK_SIZE, extra)
        request = Request(request_id, hash_chain=chain, extra=extra, num_prompt_tokens=len(tokens))
        request.append(token_bytes(tokens))
        return request

    def set_running(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING

    def append_token(self, request: Request, token: int) -> None:
        request.append(token.to_bytes(4, "little"))

    def make_hashing(self, tokens: list[int]) -> Callable[[], int]:
        data, num_tokens, extra = token_bytes(tokens), len(tokens), ExtraKeys()

        def hashing() -> int:
            chain = self.scheme.chain(BLOCK_SIZE, extra)
            chain.extend(data, num_tokens)
            return len(chain.hashes)

        return hashing
