"""Several Steps in flight on one stream, and what breaks meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from kvclient.errors import ResourceExhausted
from kvclient.values import Step
from own_process import told_by


@pytest.mark.parametrize("flavour", ["sync", "aio"])
def test_steps_in_flight(serve: Any, flavour: str) -> None:
    """Each flavour in a process of its own, as every event loop of grpc's."""
    told_by("pipelining.py", flavour, serve().target)


def test_a_stream_too_many_takes_no_number(serve: Any) -> None:
    """The Step stays in flight; with room for its stream, the session goes on where it was."""
    server = serve(max_concurrent_streams=1)
    with server.client() as client, client.open_session("a") as a, client.open_session("b") as b:
        with a.step_stream() as taken:
            taken.send(Step(runs=[])).result()
            with b.step_stream() as stream, pytest.raises(ResourceExhausted) as refused:
                stream.send(Step(runs=[])).result()
        assert refused.value.reason == "TOO_MANY_STREAMS"
        assert b.free("unknown").known is False
        with b.step_stream() as stream:
            stream.send(Step(runs=[])).result()
