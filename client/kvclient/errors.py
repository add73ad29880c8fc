"""What a call can raise: the server's errors, with the names they have there.

One table between status codes and classes; nothing of gRPC leaks to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from kvclient.values import BlockHolder, OperationError
from kvdepot.v1 import types_pb2


class KVDepotError(Exception):
    """Base of all errors of this client.

    ``reason`` is stable and upper snake case; ``field`` names the offending input,
    if there is one; ``retryable`` says whether the same call may succeed later.
    ``answered``: the server itself said so; False when the call failed on the way, or
    never left. ``took_op_seq``: it did so after the call had taken its number.
    """

    answered = False
    took_op_seq = False

    def __init__(
        self, message: str, *, reason: str, field: str = "", retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.field = field
        self.retryable = retryable


class InvalidArgument(KVDepotError):
    """The call is malformed, whatever the state."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "INVALID_ARGUMENT",
        field: str = "",
        retryable: bool = False,
    ) -> None:
        super().__init__(message, reason=reason, field=field, retryable=retryable)


class NotFound(KVDepotError):
    """A session, request, ticket or layer that is not known."""


class AlreadyExists(KVDepotError):
    """A request id in use with other content."""


class FailedPrecondition(KVDepotError):
    """The state forbids the call: a stale epoch, a wrong sequence, a busy reset."""

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        field: str = "",
        retryable: bool = False,
        current_epoch: str | None = None,
        expected_op_seq: int | None = None,
    ) -> None:
        super().__init__(message, reason=reason, field=field, retryable=retryable)
        self.current_epoch = current_epoch
        self.expected_op_seq = expected_op_seq


class CacheLost(FailedPrecondition):
    """The session is over, and all it held is gone; ``Session.reopen`` begins anew.

    ``reason`` is STALE_EPOCH when the server lost its state (``current_epoch`` is the new
    one), SESSION_EXPIRED when it ended the session as its lease ran out, UNKNOWN_SESSION
    when it does not know it (any more), LEASE_EXPIRED when it could not be reached for as
    long as the lease. A worker also hears SESSION_ENDED, and the facade's caller
    MESSAGE_REFUSED: the session lives, but what its requests hold is not known any more.
    """

    def again(self) -> CacheLost:
        """The same, to be raised once more."""
        return CacheLost(
            self.message, reason=self.reason, field=self.field, current_epoch=self.current_epoch
        )


class BlocksInUse(FailedPrecondition):
    """A reset that was refused, or whose drain took too long.

    ``holders`` are those that kept a drain waiting, as far as the server named them.
    """

    holders: tuple[BlockHolder, ...] = ()


class ResourceExhausted(KVDepotError):
    """A configured limit is reached."""


class Unavailable(KVDepotError):
    """The server cannot be reached, or is going away."""


class DeadlineExceeded(KVDepotError):
    """No answer in time; whether the call took effect is not known."""


class Cancelled(KVDepotError):
    """The call was cancelled, by this side or by closing the client."""


class OutOfRange(KVDepotError):
    """A cursor that is no longer kept."""


class DataLoss(KVDepotError):
    """A cursor of an earlier life of the server, or bytes that do not match."""


class Unauthenticated(KVDepotError):
    """The server does not know who calls."""


class PermissionDenied(KVDepotError):
    """The caller may not do this."""


class InternalError(KVDepotError):
    """The server or the wire broke a promise; a bug."""


_BY_CODE: dict[grpc.StatusCode, type[KVDepotError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRange,
    grpc.StatusCode.DATA_LOSS: DataLoss,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
}
_BY_NUMBER = {code.value[0]: error_class for code, error_class in _BY_CODE.items()}
_BY_REASON: dict[str, type[KVDepotError]] = {"BLOCKS_IN_USE": BlocksInUse}
_LOST_REASONS = ("STALE_EPOCH", "UNKNOWN_SESSION", "SESSION_EXPIRED")
_RETRYABLE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_DETAILS_KEY = "grpc-status-details-bin"
_STATUS_LOST = "Internal error from Core"


def from_rpc_error(error: grpc.RpcError) -> KVDepotError:
    """The typed error of a failed call, synchronous or asyncio."""
    code = error.code()
    message = error.details() or code.name
    error_class = _BY_CODE.get(code, InternalError)
    detail = _detail(error.trailing_metadata())
    if detail is None:
        return error_class(message, reason=code.name, retryable=code in _RETRYABLE_CODES)
    error_class = _BY_REASON.get(detail.reason, error_class)
    typed = error_class(
        message, reason=detail.reason, field=detail.field, retryable=detail.retryable
    )
    typed.answered = True
    typed.took_op_seq = detail.took_op_seq
    if isinstance(typed, FailedPrecondition):
        if detail.HasField("current_epoch"):
            typed.current_epoch = detail.current_epoch
        if detail.HasField("expected_op_seq"):
            typed.expected_op_seq = detail.expected_op_seq
    return typed


def of_operation(failed: OperationError) -> KVDepotError:
    """The typed error of one operation of a Step, as a unary call of it would raise it."""
    error_class = _BY_NUMBER.get(failed.code, InternalError if failed.code else InvalidArgument)
    typed = error_class(
        failed.message, reason=failed.reason, field=failed.field, retryable=failed.retryable
    )
    typed.answered = True
    return typed


def unanswered(error: grpc.RpcError, *, closed: bool) -> KVDepotError:
    """As from_rpc_error, of a call that this side cancels only by closing (``closed``).

    A server that stops cancels what it has not begun: that is Unavailable. So is a stream
    that broke as something was written to it, where gRPC's asyncio side forgets the status
    (grpc/grpc issue 36066).
    """
    typed = from_rpc_error(error)
    if isinstance(typed, InternalError) and typed.message == _STATUS_LOST and not typed.answered:
        return Unavailable("the stream broke", reason="UNAVAILABLE", retryable=True)
    if isinstance(typed, Cancelled) and not closed:
        return Unavailable(
            f"the server cancelled the call: {typed.message}",
            reason="CANCELLED_BY_SERVER",
            retryable=True,
        )
    return typed


def no_answer(timeout_s: float) -> DeadlineExceeded:
    """Of a stream that has been silent for so long."""
    return DeadlineExceeded(
        f"no answer within {timeout_s:g} s", reason="DEADLINE_EXCEEDED", retryable=True
    )


def stream_ended() -> Unavailable:
    """Of a stream that the server ended without an error."""
    return Unavailable("the server ended the stream", reason="STREAM_ENDED", retryable=True)


def lost_by(error: KVDepotError) -> CacheLost | None:
    """The session's end, if that is what a call of it failed with."""
    if not error.answered or error.reason not in _LOST_REASONS:
        return None
    epoch = error.current_epoch if isinstance(error, FailedPrecondition) else None
    return CacheLost(error.message, reason=error.reason, field=error.field, current_epoch=epoch)


def _detail(metadata: Iterable[Any] | None) -> types_pb2.ErrorDetail | None:
    """The ErrorDetail within the call's google.rpc.Status; None without a readable one."""
    detail = types_pb2.ErrorDetail()
    for key, value in metadata or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for packed in Status.FromString(value).details:
                if packed.Unpack(detail):
                    return detail
        except DecodeError:
            return None
    return None
