"""The one table from the core's errors to gRPC statuses, with google.rpc.Status details."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NoReturn

import grpc
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status

from kvcore import errors
from kvdepot.v1 import types_pb2

logger = logging.getLogger(__name__)

CODES: dict[type[errors.KVDepotError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.OutOfRange: grpc.StatusCode.OUT_OF_RANGE,
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,
}

# Statuses travel as trailing metadata, which gRPC limits to 8 KiB by default.
MESSAGE_LENGTH_MAX = 512
# An attribute of exceptions: the core's errors know of no numbers.
_TOOK_OP_SEQ = "_took_op_seq"


@dataclass(frozen=True, slots=True)
class Failure:
    """A call's error as it goes out."""

    code: grpc.StatusCode
    message: str
    details: bytes

    async def abort(self, context: grpc.aio.ServicerContext[bytes, bytes]) -> NoReturn:
        """End the call with this status."""
        await context.abort(self.code, self.message, (("grpc-status-details-bin", self.details),))
        raise AssertionError("abort does not return")


def failure(error: Exception, *, method: str, epoch: str) -> Failure:
    """The status for ``error``. What is not a caller's doing is logged and told as INTERNAL."""
    if isinstance(error, errors.KVDepotError):
        code = code_of(error)
        message = _shortened(error.message)
        detail = types_pb2.ErrorDetail(
            reason=error.reason, retryable=error.retryable, field=_shortened(error.field)
        )
        if isinstance(error, errors.FailedPrecondition):
            if error.current_epoch is not None:
                detail.current_epoch = error.current_epoch
            if error.expected_op_seq is not None:
                detail.expected_op_seq = error.expected_op_seq
        elif isinstance(error, errors.DataLoss):
            detail.current_epoch = epoch
    elif isinstance(error, DecodeError):
        code = grpc.StatusCode.INVALID_ARGUMENT
        message = f"the request of {method} is not a valid message"
        detail = types_pb2.ErrorDetail(reason="MALFORMED_MESSAGE")
    else:
        logger.error("%s failed", method, exc_info=error)
        code = grpc.StatusCode.INTERNAL
        message = "the server failed to answer; its log says why"
        detail = types_pb2.ErrorDetail(reason="INTERNAL")
    detail.took_op_seq = getattr(error, _TOOK_OP_SEQ, False)
    status = Status(code=code.value[0], message=message)
    status.details.add().Pack(detail)
    return Failure(code, message, status.SerializeToString())


def note_took_op_seq(error: Exception) -> None:
    """The call that fails with ``error`` took its op_seq, which ``failure`` then tells."""
    setattr(error, _TOOK_OP_SEQ, True)


def code_of(error: errors.KVDepotError) -> grpc.StatusCode:
    """The status code of one of the core's errors."""
    return CODES.get(type(error), grpc.StatusCode.UNKNOWN)


def _shortened(text: str) -> str:
    """``text`` made to fit, and encodable."""
    if len(text) > MESSAGE_LENGTH_MAX:
        text = text[: MESSAGE_LENGTH_MAX - 3] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")
