"""Offers: slots that are taken with the lookup, before the scheduler asks for them.

A lazy lookup is sent as an admission of all that the step's token budget has room for: an
offer. If the scheduler then asks for that, it has it already. If it asks for something else,
or for nothing, the offer goes back with the next message: its blocks are free again, and
what it registered is no hit, for it did not run.

Of requests that were hinted at, the next are offered in the same message, as many as the
budget has room for. They are taken in that order: behind one that goes back all do, as their
hits may be blocks that it would have computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvclient.description import PoolDescription
from kvclient.facade.known import KnownRequest
from kvclient.facade.operation import Introduction, Offer
from kvclient.facade.outbox import Outbox
from kvclient.values import Content, FreeMode, Outcome, SlotRequest, SlotResult

OFFERS_MAX = 256
"""Admissions in one message."""
HINTS_MAX = 4096
"""Hinted requests that wait; those beyond are introduced when they are looked up."""
_MISFITS_MAX, _PAUSE = 4, 64


class Offers:
    """What a scheduler has before it asks, from what it is expected to ask for.

    The token budget of a step is ``max_num_batched_tokens``; without it, what the scheduler was
    last seen to keep to. ``max_num_seqs`` requests run at most; without it, any number.
    """

    def __init__(
        self,
        pool: PoolDescription,
        outbox: Outbox,
        known: dict[str, KnownRequest],
        content: Callable[[Any], Content | None],
        *,
        max_num_batched_tokens: int | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        self._outbox = outbox
        self._known = known
        self._content = content
        self._blocks_a_token = sum(1 / size for size in pool.table_block_sizes)
        # None: not known (yet).
        self.budget = max_num_batched_tokens
        self._learns_budget = max_num_batched_tokens is None
        self._max_num_seqs = max_num_seqs
        # By request id, in the order in which they are expected to be admitted.
        self._hints: dict[str, Introduction] = {}
        # As the scheduler asked last.
        self._lookahead = 0
        self._must_fit = self._always_scheduled = False
        # Of the tokens that were looked up of late, those that were a hit.
        self._hit_share = 0.0
        # Offers behind the first: as many as were taken of late, and then some.
        self._num_followers = self._num_taken = 0
        self._followers_max = OFFERS_MAX
        # Of those looked up, asked for otherwise, in a row; and lookups that offer nothing.
        self._num_misfits = self._num_pauses = 0

    # --- hints ------------------------------------------------------------------------

    def hint(self, request: Any) -> None:
        """The request will be looked up, after those that were hinted at before."""
        request_id, hints = request.request_id, self._hints
        if len(hints) >= HINTS_MAX or request_id in self._known or request_id in hints:
            return
        slots = SlotRequest(request_id, self._content(request), max_new_tokens=0)
        introduction = hints[request_id] = Introduction(request, slots, self._introduced)
        self._outbox.introduce(introduction)

    def settle(self, request_id: str) -> None:
        """What was said of this request ahead is known, or will not be sent."""
        introduction = self._hints.get(request_id)
        if introduction is not None and introduction.is_open:
            self._outbox.settle_introduction(introduction)

    def forget(self, request_id: str) -> None:
        """The request waits no more; what was offered to it goes back, so that nobody takes it."""
        if any(offer.request_id == request_id for offer in self._outbox.offers):
            self._outbox.withdraw()
        self._unhint(request_id)

    def _unhint(self, request_id: str) -> None:
        self.settle(request_id)
        self._hints.pop(request_id, None)

    def _introduced(self, introduction: Introduction, handle: int) -> None:
        request_id = introduction.request.request_id
        if handle and request_id not in self._known:
            known = self._known[request_id] = KnownRequest(handle)
            known.num_tokens = introduction.num_tokens

    # --- offers -----------------------------------------------------------------------

    def look_up(self, request: Any, *, num_running: int, num_scheduled: int) -> SlotResult | None:
        """The request's hit, with an offer; None if there is none, and it is to be looked up.

        ``num_scheduled`` tokens are in the present step so far.
        """
        offers = self._outbox.offers
        if offers:
            offer = offers[0]
            if offer.request_id == request.request_id and offer.num_tokens == request.num_tokens:
                return offer.result
            self._outbox.withdraw()
        if not self._may_offer(request) or request.num_computed_tokens or self._pauses():
            return None
        left = None
        if self.budget is not None:
            left = self.budget - num_scheduled
            if left <= 0:
                return None
        requests = [request, *self._followers(request, num_running, left)]
        slots = [
            SlotRequest(
                one.request_id,
                self._new_content(one),
                lookup=True,
                num_lookahead_tokens=self._lookahead,
                full_sequence_must_fit=self._must_fit,
                has_scheduled_reqs=self._always_scheduled or num_running + number > 0,
            )
            for number, one in enumerate(requests)
        ]
        results = self._outbox.exchange(*slots, token_budget=left, are_offers=True).admissions
        num_tokens = sum([one.num_tokens for one in requests])
        num_hit = sum([result.num_new_computed_tokens for result in results])
        self._hit_share += (num_hit / num_tokens - self._hit_share) / 4
        is_offered = True
        for one, asked, result in zip(requests, slots, results, strict=True):
            self._note(one, result)
            is_offered = is_offered and result.outcome is Outcome.OK
            if is_offered:
                offers.append(Offer(one.request_id, one.num_tokens, asked, result))
            elif result.outcome is Outcome.OK:
                self._outbox.give_back(result.handle, FreeMode.PREEMPT)
        self._num_followers, self._num_taken = max(0, len(offers) - 1), -1
        return results[0] if offers else None

    def take(self, request_id: str, asked: SlotRequest, num_scheduled: int) -> SlotResult | None:
        """What was offered, if it is what is asked for; else None, and all offers go back."""
        offers = self._outbox.offers
        if not offers:
            return None
        offer = offers[0]
        if offer.request_id == request_id:
            self._learn(asked, offer, num_scheduled)
            if offer.fits(asked):
                self._num_misfits = 0
                self._num_taken += 1
                return offers.popleft().result
            self._num_misfits += 1
        self._outbox.withdraw()
        return None

    def admitted(self, request_id: str, num_scheduled: int) -> None:
        """The request was; with its tokens, so many are in the step."""
        self._unhint(request_id)
        if self._learns_budget and self.budget is not None and num_scheduled > self.budget:
            self.budget = None

    def _may_offer(self, request: Any) -> bool:
        known = self._known.get(request.request_id)
        return known is None or (known.tables is None and not known.was_refused)

    def _pauses(self) -> bool:
        if self._num_misfits >= _MISFITS_MAX:
            self._num_misfits, self._num_pauses = 0, _PAUSE
        if not self._num_pauses:
            return False
        self._num_pauses -= 1
        return True

    def _followers(self, first: Any, num_running: int, left: int | None) -> list[Any]:
        """Requests that are expected to be admitted behind ``first`` in this step."""
        if self._num_taken >= self._num_followers:
            self._followers_max = min(OFFERS_MAX, 2 * self._followers_max + 1)
        elif self._num_followers:
            self._followers_max = max(0, self._num_taken)
        num_max = min(self._followers_max, self._outbox.operations_max - 1)
        if self._max_num_seqs is not None:
            num_max = min(num_max, self._max_num_seqs - num_running - 1)
        num_free = self._outbox.num_free_blocks
        if left is None or num_free is None or num_max <= 0:
            return []
        # In a short pool one is refused soon, and those behind it go back.
        left = min(left, int(num_free / self._blocks_a_token / 2))
        # Rather one too many, which finds the budget spent, than a message more.
        left += left // 8
        share = 1 - self._hit_share
        left -= int(first.num_tokens * share)
        followers: list[Any] = []
        for request_id, introduction in self._hints.items():
            request = introduction.request
            if request_id == first.request_id:
                continue
            if (
                left <= 0
                or len(followers) == num_max
                or request.num_computed_tokens
                or request.is_finished()
                or not self._may_offer(request)
            ):
                break
            left -= int(request.num_tokens * share)
            followers.append(request)
        return followers

    def _new_content(self, request: Any) -> Content | None:
        introduction = self._hints.get(request.request_id)
        content = None
        if (
            introduction is not None
            and introduction.slots is not None
            and not introduction.is_sent
            and introduction.num_tokens == request.num_tokens
        ):
            content = introduction.slots.content
        self.settle(request.request_id)
        return self._content(request) if content is None else content

    def _note(self, request: Any, result: SlotResult) -> None:
        if not result.handle:
            return
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = KnownRequest(result.handle)
        known.num_tokens = request.num_tokens
        known.was_offered = True
        known.was_refused = result.outcome is Outcome.NO_FIT

    def _learn(self, asked: SlotRequest, offer: Offer, num_scheduled: int) -> None:
        """How the scheduler asks, for the next offers."""
        self._lookahead = asked.num_lookahead_tokens
        self._must_fit = asked.full_sequence_must_fit
        if asked.has_scheduled_reqs and not offer.slots.has_scheduled_reqs:
            self._always_scheduled = True  # also of the first of all that run
        num_new = asked.num_new_tokens or 0
        if self._learns_budget and num_new != offer.result.num_new_tokens:
            num_left = offer.num_tokens - offer.result.num_new_computed_tokens
            self.budget = None if num_new >= num_left else num_scheduled + num_new
