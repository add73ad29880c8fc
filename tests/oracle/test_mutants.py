"""The comparison can fail: a manager that errs in one way is found, and the story told short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from families import FAMILIES
from harness import Local, Oracle, compare
from kvcore.single_type import SingleTypeKVCacheManager
from ours import KvcoreBackend
from sequence import make_sequence

pytestmark = pytest.mark.oracle

NUM_OPS = 200
SEQUENCES_MAX = 30

Mutation = Callable[[KvcoreBackend], None]


def _frees_head_first(backend: KvcoreBackend) -> None:
    manager = backend.manager
    manager.free = lambda request: manager.return_blocks(  # type: ignore[method-assign]
        manager.pop_blocks_for_free(request)[::-1]
    )


def _forgets_reserved_blocks(backend: KvcoreBackend) -> None:
    allocate_slots = backend.manager.allocate_slots
    backend.manager.allocate_slots = (  # type: ignore[method-assign]
        lambda *args, reserved_blocks=0, **named: allocate_slots(*args, **named)
    )


def _loses_removals(backend: KvcoreBackend) -> None:
    events = backend.events
    backend.events = (  # type: ignore[method-assign]
        lambda: [event for event in events() if event[0] != "removed"]
    )


def _crashes(backend: KvcoreBackend) -> None:
    def crash(blocks: list[Any]) -> None:
        raise ZeroDivisionError

    backend.return_blocks = crash  # type: ignore[method-assign]


def _each_manager(mutate: Callable[[SingleTypeKVCacheManager], None]) -> Mutation:
    def mutation(backend: KvcoreBackend) -> None:
        for manager in backend.manager.coordinator.managers:
            mutate(manager)

    return mutation


def _frees_window_head_first(manager: Any) -> None:
    def remove_range(request_id: str, first: int, stop: int) -> None:
        table = manager.req_to_blocks.get(request_id, [])
        window = [block for block in table[first:stop] if not block.is_null]
        table[first : first + len(table[first:stop])] = [manager.pool.null_block] * len(
            table[first:stop]
        )
        manager.pool.free(window, manager.view)

    manager._remove_range = remove_range


def _keeps_the_window(manager: Any) -> None:
    manager.get_num_skipped_tokens = lambda num_computed_tokens: 0


def _keeps_the_gap(manager: Any) -> None:
    manager.remove_skipped_blocks = lambda *arguments: None


def _never_drops_for_eagle(manager: Any) -> None:
    find = manager.find_longest_cache_hit
    manager.find_longest_cache_hit = lambda *arguments, **named: find(
        *arguments, **{**named, "drop_eagle_block": False}
    )


def _ignores_alignment(manager: Any) -> None:
    find = manager.find_longest_cache_hit
    manager.find_longest_cache_hit = lambda *arguments, **named: find(
        *arguments, **{**named, "alignment_tokens": manager.block_size}
    )


def _caches_the_unreachable(manager: Any) -> None:
    manager.reachable_block_mask = lambda *arguments: None


def _forgets_the_prompt(manager: Any) -> None:
    mask = manager.reachable_block_mask
    manager.reachable_block_mask = lambda start, stop, num_prompt_tokens: mask(start, stop, None)


def _has_no_cap(manager: Any) -> None:
    manager.max_admission_blocks = None


def _hits_in_the_same_step(manager: Any) -> None:
    manager.made_in_this_step = lambda hit: False


def _keeps_old_states(manager: Any) -> None:
    manager._last_state = type("Forgets", (dict,), {"get": lambda self, key: None})()


def _reads_the_first_finer_hash(backend: KvcoreBackend) -> None:
    coordinator: Any = backend.manager.coordinator
    hashes_by_size = coordinator._hashes_by_size

    def misread(block_hashes: list[bytes], max_length: int) -> dict[int, Any]:
        first_size = backend.depot.hash_block_size
        return {
            size: block_hashes[:: size // first_size]
            for size in hashes_by_size(block_hashes, max_length)
        }

    coordinator._hashes_by_size = misread


def _forgets_encoder_tokens(backend: KvcoreBackend) -> None:
    allocate_slots = backend.manager.allocate_slots
    backend.manager.allocate_slots = (  # type: ignore[method-assign]
        lambda *args, num_encoder_tokens=0, **named: allocate_slots(*args, **named)
    )


def _takes_before_touching(backend: KvcoreBackend) -> None:
    """Each group's external blocks at once, before the next group's hit is referenced."""
    coordinator = backend.manager.coordinator

    def allocate(request_id: str, hits: Any, num_local: int, num_external: int) -> None:
        if any(request_id in manager.num_cached_blocks for manager in coordinator.managers):
            return
        for manager, hit in zip(coordinator.managers, hits, strict=True):
            manager.add_local_computed_blocks(request_id, hit, num_local + num_external)
            if num_external > 0:
                manager.allocate_external_computed_blocks(
                    request_id, num_local + num_external, num_external
                )

    coordinator.allocate_new_computed_blocks = allocate  # type: ignore[method-assign]


MUTANTS: dict[str, tuple[Mutation, str, str]] = {
    "free order": (_frees_head_first, "full attention", "queue"),
    "reserved blocks": (_forgets_reserved_blocks, "full attention", "result"),
    "lost event": (_loses_removals, "full attention", "events"),
    "crash": (_crashes, "full attention", "ZeroDivisionError"),
    "window order": (_each_manager(_frees_window_head_first), "full and sliding", "queue"),
    "window kept": (_each_manager(_keeps_the_window), "sliding several", "queue"),
    "gap kept": (_each_manager(_keeps_the_gap), "reference window", "queue"),
    "eagle drop": (_each_manager(_never_drops_for_eagle), "eagle flagged", "result"),
    "alignment": (_each_manager(_ignores_alignment), "block sizes", "result"),
    "window mask": (_each_manager(_caches_the_unreachable), "block sizes", "hashes"),
    "retention mask": (_each_manager(_caches_the_unreachable), "retention", "hashes"),
    "replay boundary": (_each_manager(_forgets_the_prompt), "retention", "hashes"),
    "finer hash": (_reads_the_first_finer_hash, "block sizes", "result"),
    "encoder tokens": (_forgets_encoder_tokens, "cross", "result"),
    "admission cap": (_each_manager(_has_no_cap), "full and sliding", "result"),
    "same step": (_each_manager(_hits_in_the_same_step), "mamba all", "result"),
    "old states": (_each_manager(_keeps_old_states), "mamba align", "queue"),
    "two phases": (_takes_before_touching, "full and sliding", "tables"),
}
"""What errs, in which family it shows, and in which field of the record."""

NUM_OPS_MAX = 24


@pytest.mark.parametrize(("mutation", "family", "field"), MUTANTS.values(), ids=MUTANTS)
def test_divergence_is_found_and_shrunk(
    oracle: Oracle, mutation: Mutation, family: str, field: str
) -> None:
    def make_mutant(config: dict[str, Any]) -> KvcoreBackend:
        backend = KvcoreBackend(config)
        mutation(backend)
        return backend

    first = list(FAMILIES).index(family)
    seeds = range(first, first + SEQUENCES_MAX * len(FAMILIES), len(FAMILIES))
    reports = (
        compare(Local(make_mutant), oracle, make_sequence(seed, NUM_OPS))[0] for seed in seeds
    )
    report = next((report for report in reports if report is not None), None)
    assert report is not None, "no sequence shows it"
    *story, tail = report.partition("\nat ")
    num_ops = len([line for line in story[0].splitlines() if line.startswith("  ")])
    assert report.startswith("divergence: seed ")
    assert num_ops <= NUM_OPS_MAX, report
    assert field in tail, report
