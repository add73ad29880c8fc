"""Random transfers and imports beside random sessions: what is pinned is nobody else's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from building import full, groups_config, token_bytes, window
from importing import Entry, filled, finish
from kvcore.content_run import ContentRun
from kvcore.depot import Depot
from kvcore.errors import FailedPrecondition
from kvcore.hashing import ExtraKeys
from kvcore.import_job import Import, ImportStatus, Ready
from kvcore.operation import SlotRequest
from kvcore.request import Request, RequestStatus
from kvcore.reset import ResetScope
from kvcore.session import Session
from kvcore.transfer import GroupHashes, Transfer
from test_sessions_machine import BLOCK_SIZE, NUM_SESSIONS, Sessions, _held, _settings

PROMPTS = [(0, 5), (0, 9), (0, 4), (7, 12)]


class Transfers(Sessions):
    """The model keeps which blocks each transfer was given, and which each import fills."""

    def __init__(self) -> None:
        super().__init__()
        # The ids of the blocks that each keeps.
        self.transfers: dict[Transfer, set[int]] = {}
        self.imports: dict[Import, set[int]] = {}
        # Of each session, what it held last, and in which step it let go of a block.
        self.held: dict[Session, set[int]] = {}
        self.left_in: dict[Session, dict[int, int]] = {}

    def _pinned(self) -> set[int]:
        return set().union(*self.transfers.values(), *self.imports.values())

    def _note_blocks(self, request: Request, session: Session, before: set[int]) -> None:
        taken = _held(session, request.request_id) - before
        assert not taken & _filling(self.imports)
        super()._note_blocks(request, session, before)

    def _num_in_use(self, scope: ResetScope | None) -> int:
        pool = self.depot.pool
        pinned = [pool.blocks[i] for transfer in self.transfers for i in self.transfers[transfer]]
        return (
            super()._num_in_use(scope)
            + sum(
                scope is None
                or (block.block_hash is not None and scope.matches(pool.extra_of(block)))
                for block in pinned
            )
            + sum(
                scope is None or found.request is None or scope.matches(found.request.extra)
                for found, ids in self.imports.items()
                if ids
            )
        )

    # --- outgoing ---------------------------------------------------------------------

    @precondition(lambda self: len(self.transfers) < 4)
    @rule(prompt=st.sampled_from(PROMPTS), lora_name=st.sampled_from([None, "A"]))
    def a_peer_asks_for_hashes(self, prompt: tuple[int, int], lora_name: str | None) -> None:
        wanted = [
            GroupHashes(group, [block_hash for block_hash, _ in blocks])
            for group, blocks in enumerate(self._prompt(prompt, lora_name))
        ]
        self._opened(self.depot.transfers.open_hashes("peer", wanted))

    @precondition(lambda self: len(self.transfers) < 4)
    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def a_peer_asks_for_a_request(self, who: int, name: str) -> None:
        session = self.sessions[who]
        if name in session.requests:
            self._opened(self.depot.transfers.open_request("peer", session, name))

    def _opened(self, transfer: Transfer) -> None:
        pinned = set()
        drain = self.depot.resets.drain
        for group in transfer.groups:
            for block_hash, block in zip(group.hashes, group.blocks, strict=True):
                if block is not None:
                    assert block.block_hash == block_hash
                    assert block.pending_view is None
                    extra = self.depot.pool.extra_of(block)
                    assert drain is None or not drain.holds_off(extra)
                    pinned.add(block.block_id)
        self.transfers[transfer] = pinned

    @precondition(lambda self: self.transfers)
    @rule(data=st.data(), lease_is_over=st.booleans())
    def a_transfer_ends(self, data: st.DataObject, lease_is_over: bool) -> None:
        transfer = list(self.transfers)[data.draw(st.integers(0, len(self.transfers) - 1))]
        blocks = self.depot.pool.blocks
        lost = any(
            blocks[block_id].block_hash != block_hash
            for block_id, (_, block_hash) in transfer.pinned.items()
        )
        if lease_is_over:
            self.depot.transfers.end(transfer.transfer_id)
        elif lost:
            with pytest.raises(FailedPrecondition):
                self.depot.transfers.close(transfer.transfer_id)
        else:
            self.depot.transfers.close(transfer.transfer_id)
        del self.transfers[transfer]

    @precondition(lambda self: self.transfers)
    @rule(data=st.data())
    def a_transfers_blocks_are_summed(self, data: st.DataObject) -> None:
        """A checksum is known until its block loses its content, which check looks for."""
        chosen = data.draw(st.integers(0, len(self.transfers) - 1))
        transfer = list(self.transfers)[chosen]
        ids = sorted(self.transfers[transfer])
        self.depot.transfers.keep_sums(
            transfer.transfer_id, ids, [block_id + 1 for block_id in ids]
        )
        for block_id, (block, block_hash) in transfer.pinned.items():
            known = self.depot.pool.sums.of([block])
            assert known == [block_id + 1 if block.block_hash == block_hash else 0]

    # --- incoming ---------------------------------------------------------------------

    def _prompt(
        self, prompt: tuple[int, int], lora_name: str | None
    ) -> list[list[tuple[bytes, ContentRun]]]:
        """What a peer has of a prompt, by group."""
        config = self.depot.config
        tokens = token_bytes(range(*prompt))
        chain = self.depot.scheme.chain(config.hash_block_size, ExtraKeys(lora_name=lora_name))
        chain.extend(tokens, len(tokens) // 4)
        by_group = []
        for group in config.kv_cache.groups:
            size = group.spec.block_size
            ratio = size // config.hash_block_size
            hashes = chain.hashes[ratio - 1 :: ratio]
            by_group.append(
                [
                    (
                        block_hash,
                        ContentRun(
                            1,
                            hashes[i - 1] if i else None,
                            tokens[4 * i * size : 4 * (i + 1) * size],
                            lora_name=lora_name,
                        ),
                    )
                    for i, block_hash in enumerate(hashes)
                ]
            )
        return by_group

    @precondition(lambda self: len(self.imports) < 4)
    @rule(prompt=st.sampled_from(PROMPTS), lora_name=st.sampled_from([None, "A"]))
    def import_hashes(self, prompt: tuple[int, int], lora_name: str | None) -> None:
        by_group = self._prompt(prompt, lora_name)
        wanted = [
            GroupHashes(group, [block_hash for block_hash, _ in blocks])
            for group, blocks in enumerate(by_group)
        ]
        if self.depot.resets.drain is not None:
            with pytest.raises(FailedPrecondition):
                self.depot.imports.begin_hashes("peer", wanted)
            return
        num_cached = self.depot.pool.num_cached_blocks
        found = self.depot.imports.begin_hashes("peer", wanted)
        assert not list(_wanted(found))
        self.imports[found] = {block.block_id for block in found.blocks}
        # Nothing is evicted before the peer has said what it has.
        assert self.depot.pool.num_cached_blocks >= num_cached - len(self.imports[found])

    @precondition(lambda self: any(found.request is None for found in self.imports))
    @rule(data=st.data())
    def the_peer_says_what_it_has(self, data: st.DataObject) -> None:
        of_hashes = [found for found in self.imports if found.request is None]
        found = data.draw(st.sampled_from(range(len(of_hashes))).map(of_hashes.__getitem__))
        used = {
            block.block_id for session in self.sessions for block in self._blocks_of(session)
        } | self._pinned()
        before = dict(_wanted(found))
        ready = {}
        for group in found.groups:  # a part of it
            first = data.draw(st.integers(0, len(group.asked)))
            is_ready = data.draw(st.lists(st.booleans(), max_size=len(group.asked) - first))
            ready[group.group] = Ready(first, is_ready)
        taken = self.depot.imports.take(found, ready)
        after = dict(_wanted(found))
        assert before.items() <= after.items()
        assert not (set(after.values()) - set(before.values())) & used
        for group in found.groups:
            first, is_ready = ready[group.group]
            end = first + len(is_ready)
            assert taken[group.group] == group.wanted()[1][first:end]
            has = [False] * first + is_ready + [False] * (len(group.asked) - end)
            for number, may_have_come in zip(group.asked, has, strict=True):
                name = (group.group, group.hashes[number])
                assert may_have_come or name in before or name not in after
        self.imports[found] = {block.block_id for block in found.blocks}

    @precondition(lambda self: len(self.imports) < 4)
    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def import_for_a_request(self, who: int, name: str) -> None:
        session = self.sessions[who]
        request = session.requests.get(name)
        if (
            request is None
            or request.status is RequestStatus.RUNNING
            or not session.holds_blocks(request)
        ):
            return
        if request.importing is not None:
            with pytest.raises(FailedPrecondition):
                self.depot.imports.begin_request("peer", session, name)
            return
        completed_step = session.view.completed_step
        left_in = self.left_in.get(session, {})
        in_flight = {block_id for block_id, step in left_in.items() if step > completed_step}
        found = refused = None
        try:
            found = self.depot.imports.begin_request("peer", session, name)
        except FailedPrecondition as error:
            refused = error.reason
        if found is None:
            assert refused == "STEP_IN_FLIGHT"
            assert in_flight & _held(session, name)
            return
        ids = {block_id for _, block_id in _wanted(found)}
        assert ids <= _held(session, name)
        assert not ids & in_flight
        assert not ids & self._pinned()
        self.imports[found] = ids

    def _entries(self, data: st.DataObject, hashes: list[bytes]) -> list[Entry]:
        """What came of a peer's blocks."""
        contents = {
            block_hash: content
            for prompt in PROMPTS
            for lora_name in (None, "A")
            for blocks in self._prompt(prompt, lora_name)
            for block_hash, content in blocks
        }
        return [
            Entry(ImportStatus.IMPORTED, contents.get(block_hash))
            if data.draw(st.integers(0, 3))
            else Entry(ImportStatus.MISSING)
            for block_hash in hashes
        ]

    @precondition(lambda self: self.imports)
    @rule(data=st.data())
    def a_part_comes(self, data: st.DataObject) -> None:
        """It is told of as soon as it is here; some of it may be told twice."""
        found = list(self.imports)[data.draw(st.integers(0, len(self.imports) - 1))]
        told = {}
        for group in found.groups:
            hashes = group.wanted()[0]
            first = data.draw(st.integers(0, len(hashes)))
            last = data.draw(st.integers(first, len(hashes)))
            entries = self._entries(data, hashes[first:last])
            told[group.group] = filled(hashes, entries, first)
        before = [bytes(group.statuses) for group in found.groups]
        self.depot.imports.fill(found, told)
        for group, statuses in zip(found.groups, before, strict=True):
            for number, status in enumerate(statuses):
                block = group.blocks[number]
                assert not status or group.statuses[number] == status  # what is told, stays
                if not status and group.statuses[number] == ImportStatus.IMPORTED:
                    assert block is not None
                    if found.request is None:
                        assert block.block_hash == group.hashes[number]
                        self.block_generations[block.block_id] = found.generation

    @precondition(lambda self: self.imports)
    @rule(data=st.data(), cancelled=st.booleans())
    def an_import_ends(self, data: st.DataObject, cancelled: bool) -> None:
        found = list(self.imports)[data.draw(st.integers(0, len(self.imports) - 1))]
        entries = {group.group: self._entries(data, group.wanted()[0]) for group in found.groups}
        wanted = dict(_wanted(found))
        current = found.request is not None and found.request.importing is found
        generation = self.depot.generation
        result = finish(self.depot, found, None if cancelled else entries)
        for group in found.groups:
            for block_hash, status in zip(group.hashes, result.statuses[group.group], strict=True):
                block_id = wanted.get((group.group, block_hash))
                if block_id is None:
                    assert status != ImportStatus.IMPORTED
                elif found.request is None and status == ImportStatus.IMPORTED:
                    assert found.generation == generation
                    # Unless a drain waited for the import, and has reset now.
                    if self.depot.generation == generation:
                        assert self.depot.pool.blocks[block_id].block_hash == block_hash
                    self.block_generations[block_id] = found.generation
        if current:
            assert found.session is not None
            assert found.request is not None
            assert result.num_tokens <= found.num_tokens
            if result.num_tokens:
                self.depot.cache_blocks(
                    found.session, found.request.request_id, None, result.num_tokens
                )
        else:
            assert result.num_tokens == 0
        del self.imports[found]

    @rule(who=st.integers(0, NUM_SESSIONS - 1), name=st.sampled_from("abc"))
    def confirm(self, who: int, name: str) -> None:
        request = self.sessions[who].requests.get(name)
        if request is not None and request.importing is not None:
            with pytest.raises(FailedPrecondition):
                self.depot.cache_blocks(self.sessions[who], name, None, 0)
            with pytest.raises(FailedPrecondition):
                self.depot.allocate_slots(self.sessions[who], SlotRequest(name, num_new_tokens=1))
        elif request is not None:
            self.depot.cache_blocks(self.sessions[who], name, None, request.num_computed_tokens)

    # --- what holds all the while -----------------------------------------------------

    @invariant()
    def what_a_step_lets_go_of_is_noted(self) -> None:
        for session in self.sessions:
            held = {block.block_id for block in self._blocks_of(session)}
            for block_id in self.held.get(session, held) - held:
                self.left_in.setdefault(session, {})[block_id] = session.view.step
            self.held[session] = held

    @invariant()
    def what_is_pinned_is_kept(self) -> None:
        pinned = self._pinned()
        assert not pinned & set(self.depot.pool.free_queue.block_ids())
        for block in self.depot.pool.blocks:
            assert (block.block_id in self.depot.pool.pins.counts) == (block.block_id in pinned)

    @invariant()
    def what_is_being_filled_is_one_requests_at_most(self) -> None:
        for found in self.imports:
            ids = {block_id for _, block_id in _wanted(found)}
            for session in self.sessions:
                for name, request in session.requests.items():
                    if request.importing is not found:
                        assert not ids & _held(session, name)

    @invariant()
    def states_are_those_of_the_model(self) -> None:
        used = {block.block_id for session in self.sessions for block in self._blocks_of(session)}
        filling = _filling(self.imports)
        states = self.depot.pool.states()
        assert states.live == len(used)
        assert states.in_transfer == len(filling - used)
        assert states.pinned == len(self._pinned() - used - filling)
        assert sum(states) == len(self.depot.pool.blocks) - 1


def _wanted(found: Import) -> Iterator[tuple[tuple[int, bytes], int]]:
    for group in found.groups:
        for block_hash, block_id in zip(*group.wanted(), strict=True):
            if block_id:
                yield (group.group, block_hash), block_id


def _filling(imports: Iterable[Import]) -> set[int]:
    """Blocks that bytes may land in, or that are nobody's yet."""
    return {block.block_id for found in imports for block in found.filling}


class WindowTransfers(Transfers):
    """Beside full attention, a window in blocks of half the size."""

    def make_depot(self) -> Depot:
        specs = (full(2 * BLOCK_SIZE), window(4, BLOCK_SIZE))
        return Depot(groups_config(14, *specs, max_model_len=256))


TestTransfers = Transfers.TestCase
TestTransfers.settings = _settings(80)
TestWindowTransfers = WindowTransfers.TestCase
TestWindowTransfers.settings = _settings(40)
