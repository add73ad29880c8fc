"""Two network namespaces with a cable between them, that a test can pull out."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_ADDRESSES = ("10.251.0.1", "10.251.0.2")


@dataclass(frozen=True)
class Cable:
    """The namespaces' names; the ends are called ``end0`` and ``end1``."""

    names: tuple[str, str]
    addresses: tuple[str, str] = _ADDRESSES

    def within(self, side: int) -> list[str]:
        """What runs a command in a namespace."""
        return ["ip", "netns", "exec", self.names[side]]

    def pull_out(self) -> None:
        """Packets vanish from now on, unsaid."""
        # Not this side's interface, whose own sockets would be told; the other end's.
        _ip("-n", self.names[0], "link", "set", "end0", "down")

    def plug_in(self) -> None:
        """They go again."""
        _ip("-n", self.names[0], "link", "set", "end0", "up")


@contextlib.contextmanager
def cable() -> Iterator[Cable]:
    """Skips the test, with the reason, where it may not be made."""
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` (iproute2)")
    names = (f"kvdepot-{os.getpid()}-0", f"kvdepot-{os.getpid()}-1")
    with contextlib.ExitStack() as stack:
        for name in names:
            made = _ip("netns", "add", name, check=False)
            if made.returncode:
                pytest.skip(f"no network namespace can be made: {made.stderr.strip()}")
            stack.callback(_ip, "netns", "del", name, check=False)
        one, other = names
        end = ("type", "veth", "peer", "name", "end1", "netns", other)
        made = _ip("link", "add", "end0", "netns", one, *end, check=False)
        if made.returncode:
            pytest.skip(f"no veth pair can be made: {made.stderr.strip()}")
        for number, (name, address) in enumerate(zip(names, _ADDRESSES, strict=True)):
            _ip("-n", name, "addr", "add", f"{address}/30", "dev", f"end{number}")
            _ip("-n", name, "link", "set", f"end{number}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield Cable(names)


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ip", *arguments], check=check, capture_output=True, text=True, timeout=60
    )
