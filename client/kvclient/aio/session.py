"""One scheduler's session, asyncio: the twin of ``kvclient.session``."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from kvclient import calls
from kvclient.aio.imports import Import
from kvclient.aio.stream import StepStream
from kvclient.base_session import BaseSession
from kvclient.calls import Call, Opened, Opening
from kvclient.errors import (
    CacheLost,
    DeadlineExceeded,
    KVDepotError,
    lost_by,
)
from kvclient.imports import TransferPath, session_request
from kvclient.reset import DrainPolls
from kvclient.sequence import Flight, unsettled
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
    from kvclient.aio.client import Client

Result = TypeVar("Result")


class Session(BaseSession):
    """One scheduler's session, as ``kvclient.session.Session``, where its calls are explained.

    Calls of several tasks take turns. One that was cancelled may or may not have been done,
    as one that raised Unavailable or DeadlineExceeded.
    """

    client: Client

    def __init__(
        self, client: Client, opening: Opening, opened: Opened, *, asked_at: float
    ) -> None:
        super().__init__(client, opening, opened, asked_at=asked_at)
        self._lock = asyncio.Lock()

    async def reopen(self) -> Session:
        """A new session with the same name and options, in it nothing; this one is over."""
        with contextlib.suppress(KVDepotError):
            await self.close()
        self._closed = True
        return await self.client._open(self._opening)

    async def get_computed_blocks(
        self,
        request_id: str,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> Hit:
        """The longest cached prefix; introduces or extends the request by ``content``."""
        return await self._call(calls.get_computed_blocks(request_id, content, mark))

    async def allocate_slots(
        self, slots: SlotRequest, *, mark: StepMark | None = None
    ) -> SlotResult:
        """Slots for one request; that it does not fit is an outcome, not an error."""
        return await self._call(calls.allocate_slots(slots, mark))

    async def cache_blocks(
        self,
        request_id: str,
        num_computed_tokens: int,
        content: Content | Tokens | None = None,
        *,
        mark: StepMark | None = None,
    ) -> bool:
        """Registers full blocks and confirms their bytes; False for an unknown request."""
        return await self._call(calls.cache_blocks(request_id, num_computed_tokens, content, mark))

    async def free(
        self,
        request_id: str,
        mode: FreeMode = FreeMode.FINISH,
        *,
        did_not_run: bool = False,
        mark: StepMark | None = None,
    ) -> FreeResult:
        """Gives the request's blocks back, or detaches them; a no-op if it is unknown."""
        return await self._call(calls.free(request_id, mode, did_not_run, mark))

    async def return_blocks(self, ticket: int, *, mark: StepMark | None = None) -> int:
        """Gives detached blocks back; answers how many."""
        return await self._call(calls.return_blocks(ticket, mark))

    async def reset_prefix_cache(
        self,
        mode: ResetMode | str = ResetMode.REFUSE,
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        mark: StepMark | None = None,
    ) -> ResetResult:
        """Empties the cache, or the part with this LoRA name or salt.

        Calls of other tasks go on while a drain waits.
        """
        polls = DrainPolls(mode, (lora_name, cache_salt), timeout_s)
        while True:
            result = await self._call(polls.call(mark))
            if polls.is_done(result):
                return result
            await asyncio.sleep(polls.next_pause())

    async def step(self, step: Step, *, mark: StepMark | None = None) -> StepResult:
        """All operations of one scheduler step."""
        return await self._call(calls.step(step, mark))

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

    async def settle(self) -> Any:
        """The result of the last call, if its answer did not come; else None."""
        self._check_not_lost()
        async with self._lock:
            flights = self._sequence.flights
            return await self._wait_for(flights[-1]) if flights else None

    async def close(self) -> int:
        """Frees all the session holds; answers the number of its requests.

        0 if it was lost or closed already. Its lease is renewed no more, whatever happens.
        """
        self.client._keeper.remove(self)
        if self._closed or self._lost is not None:
            return 0
        try:
            num_requests = await self._call(calls.close_session())
        except CacheLost:
            return 0
        self._closed = True
        return num_requests

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            await self.close()
        else:
            with contextlib.suppress(KVDepotError):
                await self.close()

    async def _call(self, call: Call[Result]) -> Result:
        """Settles what is in flight, then does ``call``, one at a time."""
        self._check_open()
        async with self._lock:
            self._check_open()
            await self._settle_all()
            return await self._wait_for(self._sequence.begin(call, self._send))

    async def _begin(self, call: Call[Result], stream: StepStream) -> Flight[Result]:
        """Sends ``call`` on the stream, behind what it carries already."""
        self._check_open()
        async with self._lock:
            self._check_open()
            while not stream._takes(self._sequence.flights):
                await self._settle_oldest()
            flight = self._sequence.begin(call, stream._fetch)
            await stream._put(flight)
            return flight

    async def _result(self, flight: Flight[Result]) -> Result:
        """What a call gives or raises that was begun before."""
        if not flight.is_settled:
            async with self._lock:
                return await self._wait_for(flight)
        return flight.result()

    async def _wait_for(self, flight: Flight[Result]) -> Result:
        while not flight.is_settled:
            self._check_not_lost()
            await self._advance()
        return flight.result()

    async def _settle_all(self) -> None:
        while self._sequence.flights:
            await self._settle_oldest()

    async def _settle_oldest(self) -> None:
        """Its own error is its caller's: that one had no effect, or one that is no longer told."""
        try:
            await self._advance()
        except CacheLost:
            raise
        except KVDepotError as error:
            raise unsettled(error) from None

    async def _advance(self) -> None:
        """Settles the oldest call in flight. Raises what kept its answer away."""
        flight = self._sequence.flights[0]
        while True:
            try:
                reply = await flight.fetch(flight)
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

    async def _send(self, flight: Flight[Any]) -> Any:
        """Half the time for an answer; then sent again with its number, for the other half."""
        client = self.client
        flight.asked_at = time.monotonic()
        deadline = flight.asked_at + client.timeout_s
        try:
            return await client._send(flight.call, client.timeout_s / 2)
        except DeadlineExceeded:
            return await client._send(flight.call, deadline - time.monotonic())
