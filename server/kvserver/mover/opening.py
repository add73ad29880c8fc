"""An import's transfers at its peer, opened part by part: one ahead of what is copied."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import kvclient.errors
from kvdepot.v1 import transfer_pb2 as pb
from kvserver.mover.lease import Lease, Leases
from kvserver.mover.parts import Part
from kvserver.mover.peer import Peer

# What a peer says that opens no transfer of so many blocks, but may of fewer.
_TOO_LARGE = frozenset(("TOO_MANY_BLOCKS", "TOO_MANY_CONTENTS", "CONTENTS_TOO_LARGE"))
# What it says that is asked for two at a time, and has room for one, maybe.
_TOO_MANY = "TOO_MANY_TRANSFERS"
_CLOSE_SECONDS = 1.0


class Opening:
    """Opens ``parts`` of ``groups`` (number and hashes), in their order.

    ``seconds_left`` says how long a call may take, or raises.
    """

    def __init__(
        self,
        peer: Peer,
        leases: Leases,
        groups: Sequence[tuple[int, Sequence[bytes]]],
        parts: Iterable[Part],
        *,
        fingerprint: str,
        contents: bool,
        checksums: bool,
        seconds_left: Callable[[], float],
    ) -> None:
        self._peer = peer
        self._leases = leases
        self._groups = groups
        self._waiting = deque(parts)
        self._fingerprint = fingerprint
        self._contents = contents
        self._checksums = checksums
        self._seconds_left = seconds_left

    def opened(self) -> Generator[tuple[Part, Lease], None, None]:
        """Each part with its transfer, to be closed before the next. Close the iterator."""
        executor = ThreadPoolExecutor(1, "kvdepot-open")  # starts a thread when it is needed
        ahead: Future[tuple[Part, Lease]] | None = None
        try:
            part, lease = self._open_next()
            while True:
                ahead = executor.submit(self._open_next) if self._waiting else None
                yield part, lease
                if ahead is None:
                    return
                try:
                    part, lease = ahead.result()
                except kvclient.errors.ResourceExhausted as error:
                    if error.reason != _TOO_MANY:
                        raise
                    part, lease = self._open_next()  # the one before it is closed by now
                ahead = None
        finally:
            if ahead is not None:  # nobody wants it any more, and nobody waits for it
                executor.submit(_close_unused, ahead)
            executor.shutdown(wait=False)

    def _open_next(self) -> tuple[Part, Lease]:
        """A peer that finds the part too large is asked for half of it.

        One that is refused for another reason is the next again.
        """
        while True:
            part = self._waiting.popleft()
            try:
                return part, self._open(part)
            except kvclient.errors.ResourceExhausted as error:
                halves = part.halves() if error.reason in _TOO_LARGE else None
                if halves is None:
                    self._waiting.appendleft(part)
                    raise
                self._waiting.extendleft(reversed(halves))

    def _open(self, part: Part) -> Lease:
        asked_at = time.monotonic()
        request = pb.OpenTransferRequest(
            fingerprint=self._fingerprint,
            groups=[
                pb.GroupHashes(group=group, block_hashes=hashes[begin:end])
                for (group, hashes), (begin, end) in zip(self._groups, part.ranges, strict=True)
            ],
            name="import",
            contents=self._contents,
            checksums=self._checksums,
        )
        opened = self._peer.call("OpenTransfer", request, self._seconds_left(), linger=True)
        return self._leases.keep(self._peer, opened, asked_at)


def _close_unused(opening: Future[tuple[Part, Lease]]) -> None:
    with suppress(Exception):
        _, lease = opening.result()
        lease.close(_CLOSE_SECONDS)
