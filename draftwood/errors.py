"""Everything that can be refused or fail, as one exception tree.

An error carries a machine-readable ``reason``, the gRPC status name it maps to, and a message that names the value
and the limit. The table of reasons is in ``docs/errors.md``; a test holds the two against each other.
"""

from __future__ import annotations

from typing import ClassVar


class DraftwoodError(Exception):
    """Base of all errors that reach a peer.

    ``field`` is the path of the offending field ("" if none); ``retry_after_ms`` is a hint (0: no retry advised).
    """

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, reason: str, message: str, *, field: str = "", retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.reason, self.message, self.field, self.retry_after_ms))

    def __str__(self) -> str:
        where = f" ({self.field})" if self.field else ""
        return f"{self.reason}{where}: {self.message}"


def _rebuild(kind: type[DraftwoodError], reason: str, message: str, field: str, retry_after_ms: int) -> DraftwoodError:
    return kind(reason, message, field=field, retry_after_ms=retry_after_ms)


class InvalidArgument(DraftwoodError):
    """The input can never be served as it is."""

    status = "INVALID_ARGUMENT"


class NotFound(DraftwoodError):
    """The named thing is not known here."""

    status = "NOT_FOUND"


class FailedPrecondition(DraftwoodError):
    """The two sides do not fit together."""

    status = "FAILED_PRECONDITION"


class Unauthenticated(DraftwoodError):
    """The caller has not shown who it is."""

    status = "UNAUTHENTICATED"


class PermissionDenied(DraftwoodError):
    """The caller may not do this."""

    status = "PERMISSION_DENIED"


class ResourceExhausted(DraftwoodError):
    """A cap is reached; later may work."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(DraftwoodError):
    """Nobody can serve this now; later may work."""

    status = "UNAVAILABLE"


class Internal(DraftwoodError):
    """Our own fault, or the model's."""

    status = "INTERNAL"


BY_STATUS: dict[str, type[DraftwoodError]] = {
    kind.status: kind
    for kind in (
        InvalidArgument,
        NotFound,
        FailedPrecondition,
        Unauthenticated,
        PermissionDenied,
        ResourceExhausted,
        Unavailable,
        Internal,
    )
}
