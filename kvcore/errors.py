"""Everything a caller of kvcore can cause. What only kvcore can break is an assert."""

from __future__ import annotations


class KVDepotError(Exception):
    """Base of all errors a caller can cause.

    ``reason`` is stable and upper snake case; ``field`` names the offending input,
    if there is one; ``retryable`` says whether the same call may succeed later.
    """

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

    def __init__(self, message: str, *, field: str, reason: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message, reason=reason, field=field)


class NotFound(KVDepotError):
    """A session, request or ticket that is not known."""


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


class ResourceExhausted(KVDepotError):
    """A configured limit is reached."""


class Unavailable(KVDepotError):
    """The server is going away; another one, or this one later, may answer."""


class OutOfRange(KVDepotError):
    """A cursor that is no longer kept."""


class DataLoss(KVDepotError):
    """A cursor of an earlier life of the server, or bytes that are gone."""
