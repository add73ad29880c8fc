"""kvcore's side of interpreter.Backend."""

from __future__ import annotations

from array import array
from typing import Any

import kvcore.spec
from backend import hash_names, sort_removals, stats_column
from kvcore.block import KVCacheBlock
from kvcore.check import check
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvcore.hashing import ExtraKeys, make_scheme
from kvcore.hybrid import HybridKVCacheCoordinator
from kvcore.manager import KVCacheBlocks, KVCacheManager
from kvcore.request import Request, RequestStatus
from kvcore.spec import DepotConfig, KVCacheConfig, KVCacheGroup, KVCacheSpec, RequestLimits

HASH_SCHEME = "sha256_cbor"
HASH_SEED = "0"


def make_spec(values: dict[str, Any]) -> KVCacheSpec:
    """A spec from its class name ("kind") and fields."""
    fields = dict(values)
    spec_class: type[KVCacheSpec] = getattr(kvcore.spec, fields.pop("kind"))
    if "kv_cache_specs" in fields:
        fields["kv_cache_specs"] = {
            name: make_spec(spec) for name, spec in fields["kv_cache_specs"].items()
        }
    if "shapes" in fields:
        fields["shapes"] = tuple(tuple(shape) for shape in fields["shapes"])
        fields["dtypes"] = tuple(fields["dtypes"])
    return spec_class(**fields)


def describe_spec(spec: KVCacheSpec, config: dict[str, Any]) -> dict[str, Any]:
    """What a spec says of itself, under a configuration's lengths."""
    max_model_len = config["max_model_len"]
    max_num_batched_tokens = config["max_num_batched_tokens"] or max_model_len
    limits = RequestLimits(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_encoder_input_tokens=config["encoder_max"],
        dcp_world_size=config["dcp_world_size"],
        pcp_world_size=config["pcp_world_size"],
    )
    return {
        "page_size_bytes": spec.page_size_bytes,
        "storage_block_size": spec.storage_block_size,
        "kind": spec.kind,
        "sliding_window": spec.event_window,
        "max_admission_blocks_per_request": spec.max_admission_blocks_per_request(
            max_num_batched_tokens, max_model_len
        ),
        "max_memory_usage_bytes": spec.max_memory_usage_bytes(limits),
    }


class KvcoreBackend:
    """kvcore's side of backend.Backend: a manager under the configuration of a sequence."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        groups = tuple(
            KVCacheGroup(tuple(group["layers"]), make_spec(group["spec"]), group["eagle"])
            for group in config["groups"]
        )
        self.depot = DepotConfig(
            KVCacheConfig(config["num_blocks"], groups),
            max_model_len=config["max_model_len"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            hash_block_size=config["hash_block_size"],
            enable_caching=config["enable_caching"],
            use_eagle=config["use_eagle"],
            prefix_cache_retention_interval=config["retention_interval"],
            dcp_world_size=config["dcp_world_size"],
            pcp_world_size=config["pcp_world_size"],
            hash_scheme=HASH_SCHEME,
            hash_seed=HASH_SEED,
            watermark=config["watermark"],
        )
        self.manager = KVCacheManager(
            self.depot,
            enable_kv_cache_events=config["events"],
            log_stats=config["log_stats"],
        )
        self.scheme = make_scheme(HASH_SCHEME, HASH_SEED)
        self.partial = config["partial"]

    def describe(self) -> dict[str, Any]:
        return {
            "scheduler_block_size": self.depot.scheduler_block_size,
            "hash_block_size": self.depot.hash_block_size,
            "watermark_blocks": self.manager.watermark_blocks,
            "groups": [
                {
                    **describe_spec(group.spec, self.config),
                    "block_size": manager.block_size,
                    "use_eagle": manager.group in self.depot.eagle_group_ids,
                }
                for group, manager in zip(
                    self.depot.kv_cache.groups, self.manager.coordinator.managers, strict=True
                )
            ],
        }

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
            hash_chain=self.scheme.chain(self.depot.hash_block_size, extra),
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

    def hits_per_group(self, request: Request) -> tuple[KVCacheBlocks, list[int]]:
        manager = self.manager
        coordinator = manager.coordinator
        assert isinstance(coordinator, HybridKVCacheCoordinator)
        blocks, lengths = coordinator.find_longest_cache_hit_per_group(
            request.block_hashes, request.num_tokens - 1
        )
        if manager.log_stats:
            stats = manager.prefix_cache_stats
            prefix = "preempted_" if request.num_preemptions > 0 else ""
            for name, count in (
                ("requests", 1),
                ("queries", request.num_tokens),
                ("hits", max(lengths)),
            ):
                setattr(stats, prefix + name, getattr(stats, prefix + name) + count)
        return manager.create_kv_cache_blocks(blocks), list(lengths)

    def num_uncached_common_prefix_tokens(self) -> int:
        return self.manager.coordinator.num_uncached_common_prefix_tokens

    def cache_partial_block(
        self, request: Request, block: KVCacheBlock, num_tokens: int, group: int
    ) -> str | None:
        block_hash = self.manager.block_pool.partial.cache_partial_block(
            request,
            block,
            num_tokens,
            block_size=self.manager.coordinator.managers[group].block_size,
            hash_block_size=self.depot.hash_block_size,
            group=group,
            view=self.manager.view,
        )
        return None if block_hash is None else block_hash.hex()

    def remaining_blocks(self, request: Request) -> int:
        manager = self.manager
        num_tokens = min(request.num_tokens, manager.max_model_len)
        return manager.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            num_tokens,
            manager.empty_kv_cache_blocks.blocks,
            request.num_computed_tokens,
            num_tokens,
            apply_admission_cap=True,
        )

    def blocks(self) -> tuple[list[int], list[str | None]]:
        pool = self.manager.block_pool
        others = pool.partial.aliases_by_id
        return [block.ref_cnt for block in pool.blocks], [
            None
            if block.block_hash is None
            else hash_names(block.block_hash, block.group, others.get(block.block_id, ()))
            for block in pool.blocks
        ]

    def events(self) -> list[list[Any]]:
        events = [_event(event) for event in self.manager.take_events()]
        return sort_removals(events) if self.partial else events

    def stats(self) -> list[int] | None:
        return stats_column(self.manager.make_prefix_cache_stats())

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
        event.sliding_window,
        event.medium,
    ]
