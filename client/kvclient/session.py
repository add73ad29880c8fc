"""One scheduler's session, synchronous: its ordered calls, its lease, its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from kvclient import calls
from kvclient.base_session import BaseSession
from kvclient.calls import Call, Opened, Opening
from kvclient.errors import (
    CacheLost,
    DeadlineExceeded,
    KVDepotError,
    lost_by,
)
from kvclient.imports import Import, TransferPath, session_request
from kvclient.reset import DrainPolls
from kvclient.sequence import Flight, unsettled
from kvclient.stream import StepStream
from kvclient.values import (
    Content,
    FreeMode,
    FreeResult,
    Hit,
    ResetMode,
    ResetResult,
    SlotRequest,
    SlotResult,
    Step,
    StepMark,
    StepResult,
    Tokens,
)

if TYPE_CHECKING:
    from kvclient.client import Client

Result = TypeVar("Result")


class Session(BaseSession):
    """One scheduler's session. Calls from several threads take turns.

    A call that raised Unavailable or DeadlineExceeded may or may not have been done;
    by the time of the next call (or of ``settle``) it has been, exactly once. If that
    next call cannot reach the server either, it is not begun, and raises Unavailable
    with the reason UNSETTLED.
    ``mark`` says which scheduler step a call belongs to and which have ended;
    left out, each call ends the step before it.

    The client renews the lease for as long as the session is open and referred to. Once
    it is lost every call raises CacheLost at once; ``reopen`` begins anew.
    """

    client: Client

    def __init__(
        self, client: Client, opening: Opening, opened: Opened, *, asked_at: float
    ) -> None:
        super().__init__(client, opening, opened, asked_at=asked_at)
        self._lock = threading.Lock()

    def reopen(self) -> Session:
        """A new session with the same name and options; this one is over.

        Nothing of this one is in it: no request, no handle, no ticket; content that was
        confirmed is still a hit if the server lived on. After a restart the pool's
        mapping is another, too: map it again. If this one is not lost it is closed, or,
        when the server cannot be reached, left to its lease.
        """
        with contextlib.suppress(KVDepotError):
            self.close()
        self._closed = True
        return self.client._open(self._opening)

    def get_computed_blocks(
        self,
        request_id: str,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> Hit:
        """The longest cached prefix; introduces or extends the request by ``content``."""
        return self._call(calls.get_computed_blocks(request_id, content, mark))

    def allocate_slots(self, slots: SlotRequest, *, mark: StepMark | None = None) -> SlotResult:
        """Slots for one request; that it does not fit is an outcome, not an error."""
        return self._call(calls.allocate_slots(slots, mark))

    def cache_blocks(
        self,
        request_id: str,
        num_computed_tokens: int,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> bool:
        """Registers full blocks and confirms their bytes; False for an unknown request."""
        return self._call(calls.cache_blocks(request_id, num_computed_tokens, content, mark))

    def free(
        self,
        request_id: str,
        mode: FreeMode = FreeMode.FINISH,
        *,
        did_not_run: bool = False,
        mark: StepMark | None = None,
    ) -> FreeResult:
        """Gives the request's blocks back, or detaches them; a no-op if it is unknown."""
        return self._call(calls.free(request_id, mode, did_not_run, mark))

    def return_blocks(self, ticket: int, *, mark: StepMark | None = None) -> int:
        """Gives detached blocks back; answers how many."""
        return self._call(calls.return_blocks(ticket, mark))

    def reset_prefix_cache(
        self,
        mode: ResetMode | str = ResetMode.REFUSE,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        mark: StepMark | None = None,
    ) -> ResetResult:
        """Empties the cache, or the part with this LoRA name or salt.

        "refuse": BlocksInUse while blocks are in use. "drain": admits nothing more and
        waits until none is, at most ``timeout_s`` (default: the server's bound), then
        BlocksInUse with the holders; calls of other threads go on meanwhile. "force": at
        once; what runs keeps its blocks, and none of them becomes a hit any more.
        """
        polls = DrainPolls(mode, (lora_name, cache_salt), timeout_s)
        while True:
            result = self._call(polls.call(mark))
            if polls.is_done(result):
                return result
            time.sleep(polls.next_pause())

    def step(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """All operations of one scheduler step."""
        return self._call(calls.step(step, mark))

    def step_stream(self, max_in_flight: int | None = None) -> StepStream:
        """A stream on which steps cost less, and of which several may be in flight."""
        return StepStream(self, max_in_flight)

    def import_blocks(
        self,
        request_id: str,
        peer: str,
        *,
        paths: Iterable[TransferPath] = (),
        checksums: bool = False,
        deadline_s: float | None = None,
    ) -> Import:
        """Has the server fill, from ``peer``, the blocks that a request was given for external
        tokens with ``delay_cache_blocks``.

        Publishes nothing: ``cache_blocks`` with the result's ``num_tokens`` does. The request
        may be freed meanwhile. None of the session's ordered calls: others go on beside it.
        Of a group with ``needs_zeroing`` the blocks are zeroed before, not in a later step.
        """
        self._check_open()
        request = session_request(
            self.session_id,
            self.epoch,
            request_id,
            peer,
            paths=paths,
            checksums=checksums,
            deadline_s=deadline_s,
        )
        return Import(self.client, request, deadline_s, self._as_lost)

    def settle(self) -> Any:
        """The result of the last call, if its answer did not come; else None."""
        self._check_not_lost()
        with self._lock:
            flights = self._sequence.flights
            return self._wait_for(flights[-1]) if flights else None

    def close(self) -> int:
        """Frees all the session holds; answers the number of its requests.

        0 if it was lost or closed already. Its lease is renewed no more, whatever happens.
        """
        self.client._keeper.remove(self)
        if self._closed or self._lost is not None:
            return 0
        try:
            num_requests = self._call(calls.close_session())
        except CacheLost:
            return 0
        self._closed = True
        return num_requests

    def __enter__(self) -> Session:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            self.close()
        else:
            with contextlib.suppress(KVDepotError):
                self.close()

    def _call(self, call: Call[Result]) -> Result:
        """Settles what is in flight, then does ``call``, one at a time."""
        self._check_open()
        with self._lock:
            self._check_open()
            self._settle_all()
            return self._wait_for(self._sequence.begin(call, self._send))

    def _begin(
        self, call: Call[Result], stream: StepStream, *, is_awaited: bool = False
    ) -> Flight[Result]:
        """Sends ``call`` on the stream, behind what it carries already.

        ``is_awaited``, and nothing is in flight: it is sent when its result is asked for.
        """
        self._check_open()
        with self._lock:
            self._check_open()
            is_awaited = is_awaited and not self._sequence.flights
            while not stream._takes(self._sequence.flights):
                self._settle_oldest()
            flight = self._sequence.begin(call, stream._fetch)
            if not is_awaited:
                stream._put(flight, is_awaited=False)
            return flight

    def _result(self, flight: Flight[Result]) -> Result:
        """What a call gives or raises that was begun before."""
        if not flight.is_settled:
            with self._lock:
                return self._wait_for(flight)
        return flight.result()

    def _wait_for(self, flight: Flight[Result]) -> Result:
        while not flight.is_settled:
            self._check_not_lost()
            self._advance()
        return flight.result()

    def _settle_all(self) -> None:
        while self._sequence.flights:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Its own error is its caller's: that one had no effect, or one that is no longer told."""
        try:
            self._advance()
        except CacheLost:
            raise
        except KVDepotError as error:
            raise unsettled(error) from None

    def _advance(self) -> None:
        """Settles the oldest call in flight. Raises what kept its answer away."""
        flight = self._sequence.flights[0]
        while True:
            try:
                reply = flight.fetch(flight)
            except KVDepotError as error:
                lost = lost_by(error)
                if lost is not None:
                    self._lose(lost)
                    raise lost from None
                if self._sequence.failed(error):
                    continue
                if not flight.is_settled:
                    raise
                return
            self._lease.renewed(flight.asked_at)
            self._sequence.succeeded(reply)
            return

    def _send(self, flight: Flight[Any]) -> Any:
        """Half the time for an answer; then sent again with its number, for the other half."""
        client = self.client
        flight.asked_at = time.monotonic()
        deadline = flight.asked_at + client.timeout_s
        try:
            return client._send(flight.call, client.timeout_s / 2)
        except DeadlineExceeded:
            return client._send(flight.call, deadline - time.monotonic())
