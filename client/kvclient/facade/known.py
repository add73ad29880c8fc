"""What the server holds of a request, as this side knows it."""

from __future__ import annotations

from kvclient.tables import RequestTables
from kvclient.values import BlockTables

NEVER = 1 << 62
"""An end that no request reaches."""


class KnownRequest:
    """One request, from its first call to its end.

    What is below ``life`` is of lazy growth. Ends are in tokens from the request's start.
    """

    __slots__ = (
        "asked_end",
        "confirm_end",
        "handle",
        "held_end",
        "life",
        "lookahead",
        "num_asked",
        "num_tokens",
        "quiet_end",
        "register_end",
        "reserve",
        "running",
        "skip_end",
        "table_end",
        "tables",
        "was_offered",
        "was_refused",
    )

    def __init__(self, handle: int) -> None:
        self.handle = handle
        # Of its tokens, those that were sent or wait to be.
        self.num_tokens = 0
        # Admitted: it grows by its handle.
        self.running = False
        # None while it holds no blocks.
        self.tables: RequestTables | None = None
        # Its last lookup was an offer: the server remembers no hit of it.
        self.was_offered = False
        # The last offer did not fit: until it is admitted it gets none.
        self.was_refused = False
        # Counts its frees: an answer to what an earlier life asked for is none of its own.
        self.life = 0
        # Blocks that the server gave and that are in no table yet, by group.
        self.reserve: BlockTables = ()
        # Slots in the tables; those and the reserve; those and what is asked for.
        self.table_end = 0
        self.held_end = 0
        self.asked_end = 0
        # Asks without an answer.
        self.num_asked = 0
        # Where the next full block ends that is to be registered, or confirmed.
        self.register_end = 0
        self.confirm_end = 0
        # Computed tokens at which something may leave the tables.
        self.skip_end = 0
        # A growth that ends before this, with this lookahead, changes nothing anywhere.
        self.quiet_end = 0
        self.lookahead = 0

    def hold(self, blocks: BlockTables) -> None:
        """The server gave these, behind what it gave before."""
        if not self.reserve:
            self.reserve = tuple([] for _ in blocks)
        for held, new in zip(self.reserve, blocks, strict=True):
            held.extend(new)

    def end(self) -> None:
        """It holds nothing any more."""
        self.life += 1
        self.running = False
        self.tables = None
        self.reserve = ()
        self.table_end = self.held_end = self.asked_end = self.quiet_end = 0
        self.num_asked = self.register_end = self.confirm_end = self.skip_end = 0
