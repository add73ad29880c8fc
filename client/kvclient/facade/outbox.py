"""What the facade has to send, in order, and what it sent and has no answer to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvclient.errors import CacheLost, KVDepotError
from kvclient.facade.known import KnownRequest
from kvclient.facade.message import Message, Queued
from kvclient.facade.operation import Ask, Introduction, Offer
from kvclient.stream import PendingStep, StepStream
from kvclient.values import (
    FreeMode,
    OperationKind,
    Outcome,
    SlotRequest,
    SlotResult,
    StepMark,
    StepResult,
)

_OK = Outcome.OK
OPERATIONS_MAX = 4096
"""Operations that wait; one more sends them."""
INTRODUCED_BYTES_MAX = 1 << 18
"""Token bytes of introductions in one message, but for the last of them."""


class Outbox:
    """Operations for one StepStream.

    What is queued goes out in order with whatever is sent next; asks ahead last, so that
    they take no block from what cannot wait. ``on_answer`` is told of a message's answered asks,
    ``on_unheard`` of an admission whose caller has got an error instead of its answer.
    """

    def __init__(
        self,
        stream: StepStream,
        mark: Callable[[], StepMark | None],
        on_answer: Callable[[list[Ask]], None],
        on_unheard: Callable[[SlotResult], None],
        *,
        step_operations_max: int,
    ) -> None:
        self._stream = stream
        self._mark = mark
        self._on_answer = on_answer
        self._on_unheard = on_unheard
        self._queue: list[Queued] = []
        # Of the asks among them: a Step has one.
        self._lookahead: int | None = None
        self._ahead: list[Ask] = []
        # Asks for the next parts of prompts: in a message of their own, behind all others.
        self._parts: list[Ask] = []
        # Admitted, and not taken yet: they go back in front of the next message.
        self.offers: deque[Offer] = deque()
        # They go with messages that nobody waits for.
        self._introductions: deque[Introduction] = deque()
        # Messages without an answer.
        self._sent: deque[tuple[PendingStep, Message]] = deque()
        # Of those sent, with admissions.
        self._num_admitting = 0
        # A server that does not say what it takes is an older one.
        self.operations_max = min(OPERATIONS_MAX, step_operations_max or OPERATIONS_MAX)
        # Why what the requests hold is not known any more.
        self._lost: CacheLost | None = None
        # Of detached requests by handle, until they are taken.
        self.tickets: dict[int, int] = {}
        # At the last answer, for this session.
        self.num_free_blocks: int | None = None

    def __len__(self) -> int:
        return len(self._queue) + len(self._ahead) + len(self._parts) + len(self.offers)

    def cache(self, known: KnownRequest, num_computed_tokens: int) -> None:
        """The bytes of so many tokens are written."""
        self._add(OperationKind.CACHE, known.handle, num_computed_tokens)

    def free(self, known: KnownRequest, mode: FreeMode) -> None:
        """The request ends, is preempted, or detached. What it asked ahead is not asked."""
        if self._ahead or self._parts:
            for ask in (*self._ahead, *self._parts):
                if ask.known is known:
                    known.num_tokens = min(known.num_tokens, ask.offset)
            self._ahead = [ask for ask in self._ahead if ask.known is not known]
            self._parts = [ask for ask in self._parts if ask.known is not known]
        self._add(OperationKind.FREE, known.handle, mode)

    def give_back(self, handle: int, mode: FreeMode) -> None:
        """Free, before all that waits, what an admission gave that nobody runs."""
        self._queue.insert(0, (OperationKind.FREE, handle, -mode))

    def withdraw(self) -> None:
        """All offers go back, the last one first."""
        while self.offers:
            self.give_back(self.offers.popleft().result.handle, FreeMode.PREEMPT)

    def introduce(self, introduction: Introduction) -> None:
        """Tells the server of a request, with the next message that nobody waits for."""
        self._introductions.append(introduction)

    def settle_introduction(self, introduction: Introduction) -> None:
        """Waits for its answer, or, if it was not sent, does not send it."""
        if introduction.is_open and not introduction.is_sent:
            introduction.close()
            self._introductions.remove(introduction)
        while introduction.is_open and self._sent:
            self._read()

    def grow(self, ask: Ask) -> None:
        """Growth that does not wait for the end of the step."""
        if self._lookahead not in (None, ask.lookahead):
            self._send(with_ahead=False)
        self._lookahead = ask.lookahead
        self._add(OperationKind.GROW, ask, 0)

    def ask_ahead(self, ask: Ask) -> None:
        """Growth that may: it is sent behind everything else."""
        if self._ahead and self._ahead[-1].lookahead != ask.lookahead:
            self.flush()  # a Step has one lookahead
        self._ahead.append(ask)

    def takes_part(self, lookahead: int) -> bool:
        """Whether ``ask_part`` takes one with this lookahead, which its message has one of."""
        parts = self._parts
        return not parts or (parts[0].lookahead == lookahead and len(parts) < self.operations_max)

    def ask_part(self, ask: Ask) -> None:
        """Growth for the next part of a prompt: it is sent behind everything else."""
        self._parts.append(ask)

    def has_ahead(self, known: KnownRequest) -> bool:
        """Whether an ask of this request waits to be sent."""
        return any(ask.known is known for ask in (*self._ahead, *self._parts))

    def _add(self, kind: OperationKind, subject: object, argument: int) -> None:
        if len(self) >= self.operations_max:
            self.flush()
        self._queue.append((kind, subject, argument))

    # --- to the server and back -------------------------------------------------------

    def flush(self) -> None:
        """Sends what is queued, if anything is; its answer is read later."""
        self.hear()
        if self._queue or self._ahead or self.offers:
            self._send(with_ahead=True)
        if self._parts:
            self._ahead, self._parts = self._parts, []
            self._send(with_ahead=True)

    def exchange(
        self,
        *admissions: SlotRequest,
        with_ahead: bool = True,
        token_budget: int | None = None,
        are_offers: bool = False,
    ) -> StepResult:
        """Sends what is queued, and these admissions behind it; their answer.

        Without ``with_ahead``, asks ahead wait on. ``token_budget`` is what the admissions
        may schedule together. Of ``are_offers``, those behind the first may fail.
        """
        self.hear()
        pending = self._send(
            admissions,
            with_ahead=with_ahead,
            is_awaited=True,
            token_budget=token_budget,
            are_offers=are_offers,
        )
        while True:
            read, result = self._read(pending)
            if read is pending:
                return result

    def collect(self) -> None:
        """Reads the answers that are here."""
        while self._sent and self._sent[0][0].is_here():
            self._read()

    def forget_free_blocks(self) -> None:
        """Their number has changed otherwise."""
        self.num_free_blocks = None

    def wait_for(self, known: KnownRequest) -> None:
        """Sends and reads until nothing is asked for this request."""
        if self.has_ahead(known):
            self.flush()
        while known.num_asked and self._sent:
            self._read()

    def settle(self) -> None:
        """Sends and reads everything."""
        self.hear()
        while self._sent or len(self):
            self.flush()
            self._read()

    def _send(
        self,
        admissions: tuple[SlotRequest, ...] = (),
        *,
        with_ahead: bool = True,
        is_awaited: bool = False,
        token_budget: int | None = None,
        are_offers: bool = False,
    ) -> PendingStep:
        """What is queued, in as few messages as the server takes; the last one."""
        self.withdraw()
        if with_ahead and self._ahead and self._lookahead not in (None, self._ahead[0].lookahead):
            self._send(with_ahead=False)
        ahead = self._ahead if with_ahead else []
        size = self.operations_max
        while (num_queued := len(self._queue) + len(ahead)) + len(admissions) > size:
            if not num_queued:
                break
            queue = self._queue[:size]
            self._put(queue, ahead[: size - len(queue)])
        return self._put(
            self._queue,
            ahead,
            admissions,
            is_awaited=is_awaited,
            token_budget=token_budget,
            are_offers=are_offers,
        )

    def _put(
        self,
        queue: list[Queued],
        ahead: list[Ask],
        admissions: tuple[SlotRequest, ...] = (),
        *,
        is_awaited: bool = False,
        token_budget: int | None = None,
        are_offers: bool = False,
    ) -> PendingStep:
        """One message: the first that are queued, the first asks ahead, and admissions."""
        introductions: list[Introduction] = []
        if self._introductions and not is_awaited:
            introductions = self._next_introductions(self.operations_max - len(queue) - len(ahead))
        num_certain = 1 if are_offers else len(admissions)
        message = Message(queue, ahead, admissions, introductions, num_certain=num_certain)
        pending = self._stream.send(
            message.step(token_budget), mark=self._mark(), is_awaited=is_awaited
        )
        # Only now: what could not be sent stays queued.
        del self._queue[: len(queue)]
        del self._ahead[: len(ahead)]
        if not self._queue:
            self._lookahead = None
        for _ in introductions:
            self._introductions.popleft().is_sent = True
        self._sent.append((pending, message))
        self._num_admitting += bool(admissions)
        return pending

    def _next_introductions(self, num_max: int) -> list[Introduction]:
        """Those that fit the next message."""
        nbytes = 0
        introductions: list[Introduction] = []
        for introduction in self._introductions:
            if len(introductions) >= num_max or nbytes >= INTRODUCED_BYTES_MAX:
                break
            nbytes += 4 * introduction.num_tokens
            introductions.append(introduction)
        return introductions

    def hear(self) -> None:
        """Reads on until no admission is without an answer. CacheLost after a refusal."""
        if self._lost is not None:
            raise self._lost.again()
        while self._num_admitting:
            self._read()

    def _read(self, awaited: PendingStep | None = None) -> tuple[PendingStep, StepResult]:
        """The answer to the oldest message; what waits for it is told."""
        if self._lost is not None:
            raise self._lost.again()
        pending, message = self._sent[0]
        try:
            result = pending.result()
        except KVDepotError as error:
            if pending.is_settled:
                self._refused(message, error)
            raise
        self._sent.popleft()
        self.num_free_blocks = result.free_blocks
        num_admissions = len(message.admissions)
        self._num_admitting -= bool(num_admissions)
        asks = message.asks
        if asks:
            outcomes = result.grow.outcomes
            groups = range(len(result.grow.counts))
            columns = zip(*[result.grow.new_blocks(group) for group in groups], strict=True)
            for ask, new_blocks in zip(asks, columns, strict=False):
                ask.outcome, ask.new_blocks = _OK, new_blocks
            if outcomes:
                for ask, outcome in zip(asks, outcomes, strict=True):
                    ask.outcome = Outcome(outcome)
            self._on_answer(asks)
        for handle, ticket in zip(message.freed, result.free_tickets, strict=False):
            if ticket:
                self.tickets[handle] = ticket
        admissions = result.admissions[:num_admissions]
        for introduction, answer in zip(
            message.introductions, result.admissions[num_admissions:], strict=True
        ):
            introduction.close()
            introduction.on_answer(introduction, answer.handle)
        try:
            message.check(result)
        except KVDepotError:
            awaited = None  # it may be another operation's error, and is raised all the same
            raise
        finally:
            if pending is not awaited:
                for admission in admissions:
                    self._on_unheard(admission)
        return pending, result

    def _refused(self, message: Message, error: KVDepotError) -> None:
        """A message was not done, or nobody knows how; that is told once, to this caller.

        Of an admission he knows then. Of what else was in it nobody does.
        """
        self._sent.popleft()
        self._num_admitting -= bool(message.admissions)
        for introduction in message.introductions:
            introduction.close()
        if message.holds_more and not isinstance(error, CacheLost):
            self._lost = CacheLost(
                f"the server refused what the facade had queued ({error.reason}: "
                f"{error.message}): reopen the session, and admit its requests again",
                reason="MESSAGE_REFUSED",
            )
