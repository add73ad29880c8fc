"""A plain model of the service: what every call must answer, and leave behind.

It chooses no blocks. It reads which free blocks the server chose, and says whether it
might; all else it predicts: hits, refusals, references, states, counters. Contents are
compared as tokens, not as hashes.
"""

from __future__ import annotations

from typing import Any

import grpc

from kvdepot.v1 import cache_pb2 as pb
from model_state import (
    EXISTS,
    HOLDERS_MAX,
    INFINITE,
    INVALID,
    NOT_FOUND,
    PRECONDITION,
    Answer,
    Block,
    Detached,
    Divergence,
    Drain,
    Key,
    Refusal,
    Request,
    Scope,
    Session,
    agree,
    ids_of,
    tokens_of,
)
from step_judge import StepJudge, no_fit


class Model:
    """One pool, and the sessions on it."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        watermark_blocks: int = 0,
        max_model_len: int,
        quarantine_seconds: float = INFINITE,
        reset_deadline_seconds: float = INFINITE,
    ) -> None:
        self.block_size = block_size
        self.watermark_blocks = watermark_blocks
        self.max_model_len = max_model_len
        self.blocks = {block_id: Block(block_id) for block_id in range(1, num_blocks)}
        self.copies: dict[Key, dict[int, Block]] = {}
        self.quarantine_seconds = quarantine_seconds
        self.reset_deadline_seconds = reset_deadline_seconds
        self.sessions: list[Session] = []
        self.departed: list[Session] = []
        self.drain: Drain | None = None
        self.ended_drains: dict[int, int | None] = {}
        self.now = 0.0
        self.generation = 0
        self.evictions = 0
        self.queries = self.hits = self.preempted_queries = self.preempted_hits = 0
        self.last_handle = 0

    # --- what is compared with the server ---------------------------------------------

    def states(self) -> dict[str, int]:
        """Blocks by state."""
        blocks = self.blocks.values()
        live = sum(block.refs > 0 for block in blocks)
        kept = sum(not block.refs and bool(block.keepers) for block in blocks)
        cached = sum(
            not block.refs and not block.keepers and block.key is not None for block in blocks
        )
        return {
            "live": live,
            "cached": cached,
            "quarantined": kept,
            "free": len(self.blocks) - live - kept - cached,
        }

    def check_stats(self, stats: Any) -> None:
        """Compare with GetStats."""
        for name, number in self.states().items():
            agree(f"blocks.{name}", getattr(stats.blocks, name), number)
        agree("num_sessions", stats.num_sessions, len(self.sessions))
        agree("num_requests", stats.num_requests, sum(len(s.requests) for s in self.sessions))
        agree("num_departed_sessions", stats.num_departed_sessions, len(self.departed))
        workers = sum(session.workers for session in (*self.sessions, *self.departed))
        agree("num_workers", stats.num_workers, workers)
        agree("reset_pending", stats.reset_pending, self.drain is not None)
        agree("generation", stats.generation, self.generation)
        agree("evictions", stats.evictions, self.evictions)
        agree("queries", stats.prefix_cache_queries, self.queries)
        agree("hits", stats.prefix_cache_hits, self.hits)
        agree("preempted_queries", stats.preempted_queries, self.preempted_queries)
        agree("preempted_hits", stats.preempted_hits, self.preempted_hits)

    # --- sessions ---------------------------------------------------------------------

    def open(self, name: str, lease_seconds: float = INFINITE) -> Session:
        """OpenSession."""
        session = Session(name, lease_seconds=lease_seconds, heard_at=self.now)
        self.sessions.append(session)
        return session

    def pass_time(self, now: float) -> None:
        """Whatever runs out until ``now`` does, in order."""
        while True:
            times = [(s.heard_at + s.lease_seconds, s) for s in self.sessions]
            times += [(s.ended_at + self.quarantine_seconds, s) for s in self.departed]
            at, session = min(times, key=lambda item: item[0], default=(INFINITE, None))
            if self.drain is not None and self.drain.deadline <= min(at, now):
                self.ended_drains[self.drain.drain_id] = None
                self.drain = None
                continue
            if at > now or session is None:
                break
            self.now = at
            if session in self.departed:
                self._end_quarantine(session)
            else:
                self.end(session)
        self.now = now

    def attach(self, session: Session) -> None:
        """A worker may write under the session."""
        session.workers += 1

    def detach(self, session: Session) -> None:
        """A worker is gone."""
        session.workers -= 1
        if session in self.departed and not session.workers:
            self._end_quarantine(session)

    def _end_quarantine(self, session: Session) -> None:
        self.departed.remove(session)
        self._give_up_kept(session)

    def _give_up_kept(self, session: Session) -> None:
        for block in self.blocks.values():
            block.keepers.pop(session, None)

    def end(self, session: Session) -> int:
        """CloseSession, or the end of a lease; the number of requests freed."""
        num_requests = len(session.requests)
        for block in self.blocks.values():
            if block.writer is session:
                self._forget(block)
        if session.workers:  # whatever is freed from now on is kept from the others
            session.step += 1
            session.last_use = session.step
        for request in session.requests.values():
            self._release(session, request.table)
        for blocks in session.tickets.values():
            self._release(session, blocks)
        session.requests.clear()
        session.tickets.clear()
        self.sessions.remove(session)
        if session.workers:
            self.departed.append(session)
            session.ended_at = self.now
        else:
            self._give_up_kept(session)
        self._settle_drain()
        return num_requests

    def call(self, session: Session, method: str, request: Any, answer: Answer) -> None:
        """Judge one executed call of an open session, and take in what it did."""
        code = answer if isinstance(answer, grpc.StatusCode) else None
        try:
            # A session that ends says nothing of the step before.
            if method != "CloseSession" or request.context.HasField("step"):
                self._begin(session, request.context)
            operate = getattr(self, f"_{method}")
            operate(session, request, answer)
            self._settle_drain()
        except Refusal as refusal:
            agree(f"{method} {request}", code or "OK", refusal.code)
        else:
            agree(f"{method} {request}", code, None)

    def _begin(self, session: Session, context: Any) -> None:
        if not context.HasField("step") and not context.HasField("completed_step"):
            if session.names_steps:  # they may be in flight: it is one more of the present one
                return
            self._enter(session, session.step + 1, session.step)
            session.last_use = session.completed  # what runs in it begins after what is freed
            return
        step, completed = context.step, context.completed_step
        if (
            not (context.HasField("step") and context.HasField("completed_step"))
            or completed > step
            or step < session.step
            or completed < session.completed
        ):
            raise Refusal(INVALID)
        session.names_steps = True
        self._enter(session, step, completed)

    def _enter(self, session: Session, step: int, completed: int) -> None:
        session.step = session.last_use = step
        session.completed = completed
        for block in self.blocks.values():
            if block.writer is session and block.written_in <= completed:
                block.writer = None
            if block.keepers.get(session, completed + 1) <= completed:
                del block.keepers[session]

    # --- calls ------------------------------------------------------------------------

    def _GetComputedBlocks(self, session: Session, call: Any, answer: Answer) -> None:
        request = self._find(session, call)
        if request.holds:
            raise Refusal(INVALID)
        hit = [] if self._holds_off(request) else self._lookup(session, request)
        request.remembered = len(hit) * self.block_size
        reply = _reply(answer)
        agree("hit", reply.num_computed_tokens, request.remembered)
        agree("hit blocks", ids_of(reply.blocks), [block.block_id for block in hit])
        agree("handle", reply.handle, request.handle)

    def _AllocateSlots(self, session: Session, call: Any, answer: Answer) -> None:
        self.allocate(session, call.slots, getattr(answer, "result", None))

    def _CacheBlocks(self, session: Session, call: Any, answer: Answer) -> None:
        request = session.requests.get(call.request_id)
        if request is not None:
            if call.HasField("content"):
                self.write(
                    session, request, call.content.token_offset, tokens_of(call.content.tokens)
                )
            self.confirm(session, request, call.num_computed_tokens)
        agree("known", _reply(answer).known, request is not None)

    def _Free(self, session: Session, call: Any, answer: Answer) -> None:
        if call.mode not in (1, 2, 3):
            raise Refusal(INVALID)
        request = session.requests.get(call.request_id)
        reply = _reply(answer)
        agree("known", reply.known, request is not None)
        if request is not None:
            self.free(session, request, call.mode, call.did_not_run, reply.ticket)

    def _ReturnBlocks(self, session: Session, call: Any, answer: Answer) -> None:
        blocks = session.tickets.pop(call.ticket, None)
        if blocks is None:
            raise Refusal(NOT_FOUND)
        agree("returned", _reply(answer).num_blocks, len(blocks))
        self._release(session, blocks)

    def _ResetPrefixCache(self, session: Session, call: Any, answer: Answer) -> None:
        if call.drain_id:
            self._tell_drain(call.drain_id, answer)
            return
        scope = None
        if call.HasField("scope"):
            if not call.scope.HasField("cache_salt"):
                raise Refusal(INVALID)
            scope = call.scope.cache_salt
        deadline = self.reset_deadline_seconds
        if call.HasField("deadline_seconds"):
            if not 0 < call.deadline_seconds <= deadline:
                raise Refusal(INVALID)
            deadline = call.deadline_seconds
        drain_id = 0
        if call.mode == pb.RESET_MODE_FORCE:
            for request in self._holders(scope, tickets=False):
                request.outlived_reset = True
            self._clear(scope)
        elif call.mode == pb.RESET_MODE_DRAIN:
            if self.drain is None:
                drain_id = len(self.ended_drains) + 1
                self.drain = Drain(drain_id, scope, self.now + deadline)
                self._settle_drain()
            elif self.drain.scope != scope:
                raise Refusal(PRECONDITION)
            else:
                drain_id = self.drain.drain_id
            self._tell_drain(drain_id, answer)
            return
        elif self._in_use(scope):
            raise Refusal(PRECONDITION)
        else:
            self._clear(scope)
        reply = _reply(answer)
        agree("reset", (reply.done, reply.generation), (True, self.generation))
        agree("drain_id", reply.drain_id, 0)

    def _tell_drain(self, drain_id: int, answer: Answer) -> None:
        pending = self.drain is not None and self.drain.drain_id == drain_id
        if not pending and drain_id not in self.ended_drains:
            raise Refusal(NOT_FOUND)
        reply = _reply(answer)
        agree("drain_id", reply.drain_id, drain_id)
        generation = None if pending else self.ended_drains[drain_id]
        agree("drain done", reply.done, generation is not None)
        agree("drain abandoned", reply.abandoned, not pending and generation is None)
        if generation is not None:
            agree("generation", reply.generation, generation)
        held: list[int] = []
        if pending:
            assert self.drain is not None
            tables = [request.table for request in self._holders(self.drain.scope)]
            held = sorted(map(len, tables), reverse=True)[:HOLDERS_MAX]
        agree("who is waited for", [holder.num_blocks for holder in reply.holders], held)

    def _holders(self, scope: Scope, *, tickets: bool = True) -> list[Request]:
        """Requests, and detached ones, that hold blocks of the scope."""
        requests = [
            request
            for session in self.sessions
            for request in (
                *session.requests.values(),
                *(self._of_ticket(blocks) for blocks in session.tickets.values() if tickets),
            )
        ]
        return [r for r in requests if r.holds and scope in (None, r.salt)]

    def _of_ticket(self, blocks: Detached) -> Request:
        """Detached blocks as if they were a request's."""
        return Request("", [], blocks.salt, 0, table=list(blocks), holds=True)

    def _in_use(self, scope: Scope) -> bool:
        return any(request.table for request in self._holders(scope))

    def _clear(self, scope: Scope) -> None:
        self.generation += 1
        for block in self.blocks.values():
            if block.key is not None and scope in (None, block.key[0]):
                self._forget(block)
        if self.drain is not None and scope in (None, self.drain.scope):
            self.ended_drains[self.drain.drain_id] = self.generation
            self.drain = None

    def _settle_drain(self) -> None:
        """A reset that waited for blocks in use is done, if none is any more."""
        if self.drain is not None and not self._in_use(self.drain.scope):
            self._clear(self.drain.scope)

    def _holds_off(self, request: Request) -> bool:
        return self.drain is not None and self.drain.scope in (None, request.salt)

    def _CloseSession(self, session: Session, call: Any, answer: Answer) -> None:
        agree("freed", _reply(answer).num_requests_freed, self.end(session))

    def _Step(self, session: Session, call: Any, answer: Answer) -> None:
        StepJudge(self, session, call, _reply(answer)).run()

    # --- parts of calls ---------------------------------------------------------------

    def _find(self, session: Session, call: Any) -> Request:
        content = call.content if call.HasField("content") else None
        request = session.requests.get(call.request_id)
        tokens = tokens_of(content.tokens) if content is not None else []
        if request is not None:
            if content is None:
                return request
            if content.HasField("extra_keys") and content.extra_keys.cache_salt != request.salt:
                raise Refusal(EXISTS)
            if content.token_offset == 0:
                common = min(len(tokens), len(request.tokens))
                if tokens[:common] != request.tokens[:common]:
                    raise Refusal(EXISTS)
            self.write(session, request, content.token_offset, tokens)
            return request
        if content is None or content.token_offset:
            raise Refusal(NOT_FOUND)
        if not tokens:
            raise Refusal(INVALID)
        self.last_handle += 1
        salt = content.extra_keys.cache_salt
        request = Request(call.request_id, tokens, salt, self.last_handle)
        session.requests[call.request_id] = request
        return request

    def write(self, session: Session, request: Request, offset: int, tokens: list[int]) -> None:
        """Tokens from an offset on; what was known beyond it is cut off."""
        held = request.tokens
        if offset > len(held):
            raise Refusal(INVALID)
        kept = offset
        while kept < min(len(held), offset + len(tokens)) and held[kept] == tokens[kept - offset]:
            kept += 1
        if kept < len(held):
            first = kept // self.block_size
            gone = request.table[first:]
            if any(block.refs > 1 or block.keepers.keys() - {session} for block in gone):
                raise Refusal(PRECONDITION)
            for block in gone:
                self._forget(block)
            request.registered = min(request.registered, first)
            request.confirmed = min(request.confirmed, first)
            request.computed = min(request.computed, kept)
            request.remembered = 0
        request.tokens = held[:kept] + tokens[kept - offset :]

    def find(self, session: Session, request: Request) -> list[Block]:
        """The longest run of blocks that the session may read."""
        run: list[Block] = []
        for position in range((len(request.tokens) - 1) // self.block_size):
            copies = self.copies.get(request.key(position, self.block_size), {})
            visible = [b for b in copies.values() if b.writer is None or b.writer is session]
            if not visible:
                break
            run.append(visible[0])
        return run

    def _lookup(self, session: Session, request: Request) -> list[Block]:
        hit = self.find(session, request)
        if request.preemptions:
            self.preempted_queries += len(request.tokens)
            self.preempted_hits += len(hit) * self.block_size
        else:
            self.queries += len(request.tokens)
            self.hits += len(hit) * self.block_size
        return hit

    def free_blocks(self, session: Session) -> int:
        """Blocks that the session can take."""
        return sum(block.is_free_for(session) for block in self.blocks.values())

    def check_holders(self, no_fit: Any, *, named: bool) -> None:
        """A refusal names who holds the most, if it is a Step's first."""
        holds = []
        for session in (*self.sessions, *self.departed):
            kept = sum(block.is_kept_by(session) for block in self.blocks.values())
            if session.num_blocks + kept:
                holds.append((session.num_blocks + kept, session in self.departed))
        holds.sort(key=lambda hold: -hold[0])
        found = [(holder.num_blocks, holder.departed) for holder in no_fit.holders]
        agree("holders", found, holds[:HOLDERS_MAX] if named else [])

    def allocate(
        self,
        session: Session,
        slots: Any,
        result: Any,
        budget: int | None = None,
        *,
        name_holders: bool = True,
    ) -> str:
        """One allocation; the name of its outcome."""
        size = self.block_size
        request = self._find(session, slots)
        held = len(request.table) * size if request.holds else 0
        claimed, external = slots.num_new_computed_tokens, slots.num_external_computed_tokens
        if slots.num_computed_tokens > min(held, len(request.tokens)):
            raise Refusal(INVALID)
        if request.holds and (claimed or slots.lookup):
            raise Refusal(INVALID)
        if not request.holds and self._holds_off(request):
            result = _reply(result)
            agree("outcome", pb.Outcome.Name(result.outcome), "OUTCOME_RESETTING")
            agree("handle", result.handle, request.handle)
            return "RESETTING"
        hit: list[Block] = []
        if slots.lookup:
            hit = self._lookup(session, request)
            claimed = len(hit) * size
        elif claimed:
            if claimed > request.remembered or claimed % size:
                raise Refusal(INVALID)
            found = self.find(session, request)
            if len(found) * size < claimed:
                request.remembered = len(found) * size
                result = _reply(result)
                agree("outcome", pb.Outcome.Name(result.outcome), "OUTCOME_HIT_CHANGED")
                agree("new hit", result.num_new_computed_tokens, request.remembered)
                agree("new hit blocks", ids_of(result.hit_blocks), [b.block_id for b in found])
                return "HIT_CHANGED"
            hit = found[: claimed // size]
        if request.holds and external:
            raise Refusal(INVALID)
        computed = slots.num_computed_tokens + claimed + external
        if computed > len(request.tokens):
            raise Refusal(INVALID)
        new = self._num_new(request, slots, computed, budget)
        if new is None:
            agree("outcome", pb.Outcome.Name(_reply(result).outcome), "OUTCOME_NO_BUDGET")
            return "NO_BUDGET"
        if computed + new > self.max_model_len:
            raise Refusal(INVALID)
        num_slots = min(computed + new + slots.num_lookahead_tokens, self.max_model_len)
        has_scheduled = not slots.HasField("has_scheduled_reqs") or slots.has_scheduled_reqs
        watermark = 0 if request.running or not has_scheduled else self.watermark_blocks
        free = self.free_blocks(session)
        cost = sum(block.is_free_for(session) for block in hit)
        have = len(request.table) + len(hit)
        refusal = None
        whole = max(-(-len(request.tokens) // size) - have, 0) + cost
        if slots.full_sequence_must_fit and whole + watermark > free:
            refusal = (whole, free, 0, watermark)
        needed = max(-(-num_slots // size) - have, 0) + cost
        if refusal is None and needed + watermark > free - slots.reserved_blocks:
            refusal = (needed, free, slots.reserved_blocks, watermark)
        result = _reply(result)
        agree("handle", result.handle, request.handle)
        agree("claimed", result.num_new_computed_tokens, claimed)
        if refusal is not None:
            agree("outcome", pb.Outcome.Name(result.outcome), "OUTCOME_NO_FIT")
            agree("no_fit", no_fit(result.no_fit), refusal)
            self.check_holders(result.no_fit, named=name_holders)
            return "NO_FIT"
        agree("outcome", pb.Outcome.Name(result.outcome), "OUTCOME_OK")
        agree("num_new_tokens", result.num_new_tokens, new)
        agree("hit blocks", ids_of(result.hit_blocks), [block.block_id for block in hit])
        for block in hit:
            block.refs += 1
        if not request.holds:
            request.holds = True
            request.registered = len(hit)
        request.table += hit
        self.take(session, request, ids_of(result.new_blocks), -(-num_slots // size))
        if not slots.delay_cache_blocks:
            self.register(session, request, min(computed + new, len(request.tokens)))
            request.running = True
        request.allocated_in = session.step
        request.computed = computed
        request.remembered = 0
        return "OK"

    def _num_new(
        self, request: Request, slots: Any, computed: int, budget: int | None
    ) -> int | None:
        external = slots.num_external_computed_tokens
        if slots.HasField("num_new_tokens"):
            if not slots.num_new_tokens and not external:
                raise Refusal(INVALID)
            fits = budget is None or slots.num_new_tokens <= budget
            return slots.num_new_tokens if fits else None
        left = len(request.tokens) - computed
        if not left and not external:
            raise Refusal(INVALID)
        limits = [left]
        limits += [slots.max_new_tokens] if slots.HasField("max_new_tokens") else []
        limits += [budget] if budget is not None else []
        new = min(limits)
        if new < left and slots.new_tokens_alignment > 1:
            new -= new % slots.new_tokens_alignment
        return new if new > 0 or not left else None

    def take(
        self, session: Session, request: Request, block_ids: list[int], num_blocks: int
    ) -> None:
        """The blocks that the server chose, if it might."""
        agree("new blocks", len(block_ids), max(num_blocks - len(request.table), 0))
        for block_id in block_ids:
            block = self.blocks.get(block_id)
            if block is None or not block.is_free_for(session):
                raise Divergence(f"{session.name} was given {block}, which is not free for it")
            if block.key is not None:
                self._forget(block)
                self.evictions += 1
            block.keepers.clear()
            block.refs = 1
            request.table.append(block)

    def register(self, session: Session, request: Request, num_tokens: int) -> None:
        """Full blocks become hits of the session."""
        if request.outlived_reset:
            return
        full = num_tokens // self.block_size
        if full > request.registered:
            first = request.registered
            if request.registered_in == session.step:  # cut off and grown again meanwhile
                first = min(first, request.registered_from)
            request.registered_in, request.registered_from = session.step, first
        for position in range(request.registered, full):
            block = request.table[position]
            assert block.key is None
            block.key = request.key(position, self.block_size)
            self.copies.setdefault(block.key, {})[block.block_id] = block
            if session.step > session.completed:
                block.writer, block.written_in = session, session.step
        request.registered = max(request.registered, full)

    def confirm(self, session: Session, request: Request, num_tokens: int) -> None:
        """The bytes of so many tokens are written."""
        slots = len(request.table) * self.block_size if request.holds else 0
        if num_tokens > min(slots, len(request.tokens)):
            raise Refusal(INVALID)
        self.register(session, request, num_tokens)
        confirmed = num_tokens // self.block_size
        for block in request.table[request.confirmed : confirmed]:
            block.writer = None
        request.confirmed = max(request.confirmed, confirmed)

    def free(
        self, session: Session, request: Request, mode: int, did_not_run: bool, ticket: int
    ) -> None:
        """The request gives its blocks back, keeps its tokens, or is detached."""
        if did_not_run and not (session.names_steps and request.allocated_in != session.step):
            self._forget_unwritten(session, request)
        table, request.table = request.table, []
        request.holds = request.running = False
        request.computed = request.registered = request.confirmed = request.remembered = 0
        request.registered_in = -1
        request.outlived_reset = False
        if mode == pb.FREE_MODE_PREEMPT:
            request.preemptions += 1
        else:
            del session.requests[request.request_id]
        if mode == pb.FREE_MODE_DETACH and table:
            if ticket == 0 or ticket in session.tickets:
                raise Divergence(f"ticket {ticket} for detached blocks")
            session.tickets[ticket] = Detached(table)
            session.tickets[ticket].salt = request.salt
        else:
            agree("ticket", ticket, 0)
            self._release(session, table)

    def _forget_unwritten(self, session: Session, request: Request) -> None:
        last = []
        if request.registered_in == request.allocated_in:
            last = request.table[max(request.registered_from, request.confirmed) :]
        unwritten = [block for block in last if block.key is not None]
        lost = {block.key for block in unwritten}
        for block in unwritten:
            self._forget(block)
        for other in session.requests.values():
            behind = False
            for block in other.table:
                if behind and block.writer is session:
                    lost.add(block.key)
                    self._forget(block)
                behind = behind or block in unwritten
        # Also of requests that are over.
        found = True
        while found:
            found = False
            for block in self.blocks.values():
                if block.key is not None and block.writer is session:
                    salt, tokens = block.key
                    if (salt, tokens[: -self.block_size]) in lost:
                        lost.add(block.key)
                        self._forget(block)
                        found = True

    def _release(self, session: Session, blocks: list[Block]) -> None:
        for block in blocks:
            block.refs -= 1
            if session.last_use > session.completed:
                block.keepers[session] = session.last_use

    def _forget(self, block: Block) -> None:
        if block.key is None:
            return
        copies = self.copies[block.key]
        del copies[block.block_id]
        if not copies:
            del self.copies[block.key]
        block.key = block.writer = None


def _reply(answer: Answer) -> Any:
    if answer is None or isinstance(answer, grpc.StatusCode):
        raise Divergence(f"the server answers {answer}, the model expects a reply")
    return answer
