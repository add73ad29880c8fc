"""A stream that breaks while it is written to: gRPC's asyncio side may forget its status."""

from __future__ import annotations

import grpc
import pytest

from kvclient.errors import InternalError, KVDepotError, Unavailable, unanswered


@pytest.mark.parametrize(
    ("message", "error_class"),
    [
        pytest.param("Internal error from Core", Unavailable, id="gRPC's own"),
        pytest.param("the server failed", InternalError, id="the server's"),
    ],
)
def test_only_what_grpc_forgot_is_sent_again(message: str, error_class: type[KVDepotError]) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details=message)
    typed = unanswered(error, closed=False)
    assert type(typed) is error_class
    assert typed.retryable == (error_class is Unavailable)
