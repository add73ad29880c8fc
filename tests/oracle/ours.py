"""kvcore's side of interpreter.Backend."""

from __future__ import annotations

from array import array
from typing import Any

from kvcore.check import check
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.hashing import ExtraKeys, make_scheme
from kvcore.manager import KVCacheManager
from kvcore.request import Request, RequestStatus
from kvcore.spec import DepotConfig, FullAttentionSpec, KVCacheConfig, KVCacheGroup

HASH_SCHEME = "sha256_cbor"
HASH_SEED = "0"


class KvcoreBackend:
    """A manager of kvcore under the configuration of a sequence."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.block_size: int = config["block_size"]
        spec = FullAttentionSpec(self.block_size, num_kv_heads=1, head_size=16)
        pool = KVCacheConfig(config["num_blocks"], (KVCacheGroup(("layer",), spec),))
        self.manager = KVCacheManager(
            DepotConfig(
                pool,
                max_model_len=config["max_model_len"],
                enable_caching=config["enable_caching"],
                hash_scheme=HASH_SCHEME,
                hash_seed=HASH_SEED,
                watermark=config["watermark"],
            ),
            enable_kv_cache_events=config["events"],
            log_stats=config["log_stats"],
        )
        self.scheme = make_scheme(HASH_SCHEME, HASH_SEED)

    def make_request(
        self,
        request_id: str,
        tokens: list[int],
        *,
        lora: tuple[str, int] | None,
        salt: str | None,
        skip_reading: bool,
    ) -> Request:
        extra = ExtraKeys(lora_name=None if lora is None else lora[0], cache_salt=salt)
        request = Request(
            request_id,
            hash_chain=self.scheme.chain(self.block_size, extra),
            extra=extra,
            lora_id=None if lora is None else lora[1],
            num_prompt_tokens=len(tokens),
            skip_reading_prefix_cache=skip_reading,
        )
        self.append(request, tokens)
        return request

    def append(self, request: Request, tokens: list[int]) -> None:
        request.append(_little_endian(tokens))

    def set_status(self, request: Request, name: str) -> None:
        request.status = RequestStatus[name]

    def return_blocks(self, blocks: list[Any]) -> None:
        self.manager.return_blocks(blocks)

    def free_queue(self) -> list[int]:
        return self.manager.block_pool.free_queue.block_ids()

    def blocks(self) -> tuple[list[int], list[str | None]]:
        blocks = self.manager.block_pool.blocks
        return [block.ref_cnt for block in blocks], [
            None if block.block_hash is None else block.block_hash.hex() for block in blocks
        ]

    def events(self) -> list[list[Any]]:
        return [_event(event) for event in self.manager.take_events()]

    def stats(self) -> list[int] | None:
        stats = self.manager.make_prefix_cache_stats()
        if stats is None:
            return None
        return [
            stats.requests,
            stats.queries,
            stats.hits,
            stats.preempted_requests,
            stats.preempted_queries,
            stats.preempted_hits,
            int(stats.reset),
        ]

    def violations(self) -> list[str]:
        return check(self.manager)


def _little_endian(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def _token_ids(tokens: bytes) -> list[int]:
    ids = array("I")
    assert ids.itemsize == 4
    ids.frombytes(tokens)
    return ids.tolist()


def _event(event: Event) -> list[Any]:
    if isinstance(event, AllBlocksCleared):
        return ["cleared"]
    hashes = [block_hash.hex() for block_hash in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return ["removed", hashes, event.group, event.medium]
    assert isinstance(event, BlockStored)
    return [
        "stored",
        hashes,
        None if event.parent_block_hash is None else event.parent_block_hash.hex(),
        _token_ids(event.token_ids),
        event.block_size,
        event.lora_id,
        event.lora_name,
        None
        if event.extra_keys is None
        else [None if keys is None else list(keys) for keys in event.extra_keys],
        event.group,
        event.spec_kind,
        event.medium,
    ]
