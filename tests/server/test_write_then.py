"""A reply leaves before the rest of its call is done, and nobody gets in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvserver.rpc import write_then


class Wire:
    """A context that takes a message at once and waits until it may go on."""

    def __init__(self, told: list[str], *, waits: int = 1, fails: bool = False) -> None:
        self.told = told
        self.may_go = asyncio.Event()
        self.waits = waits
        self.fails = fails

    async def write(self, message: bytes) -> None:
        if self.fails:
            raise ConnectionError("gone")
        self.told.append(f"sent {message.decode()}")
        asyncio.get_running_loop().call_soon(self.told.append, "somebody else")
        try:
            for _ in range(self.waits):
                await self.may_go.wait()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.told.append("write cancelled")
            raise
        self.told.append("written")


def run(story: Callable[[list[str]], Any]) -> list[str]:
    told: list[str] = []
    asyncio.run(asyncio.wait_for(story(told), 10))
    return told


def test_the_rest_is_done_before_anybody_else_has_a_turn() -> None:
    async def story(told: list[str]) -> None:
        wire = Wire(told, waits=3)
        writing = asyncio.create_task(write_then(wire, b"reply", lambda: told.append("finished")))  # type: ignore[arg-type]
        while "somebody else" not in told:
            await asyncio.sleep(0)
        wire.may_go.set()
        await writing

    assert run(story) == ["sent reply", "finished", "somebody else", "written"]


def test_a_write_that_need_not_wait() -> None:
    async def story(told: list[str]) -> None:
        await write_then(Wire(told, waits=0), b"reply", lambda: told.append("finished"))  # type: ignore[arg-type]

    assert run(story) == ["sent reply", "written", "finished", "somebody else"]


def test_a_client_that_is_gone_leaves_nothing_undone() -> None:
    async def story(told: list[str]) -> None:
        with pytest.raises(ConnectionError):
            await write_then(Wire(told, fails=True), b"", lambda: told.append("finished"))  # type: ignore[arg-type]

    assert run(story) == ["finished"]


def test_a_write_is_cancelled_like_any_other() -> None:
    async def story(told: list[str]) -> None:
        wire = Wire(told)
        writing = asyncio.create_task(write_then(wire, b"reply", lambda: told.append("finished")))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        wire.may_go.set()

    assert run(story) == ["sent reply", "finished", "somebody else", "write cancelled"]
