"""Errors that reach a client, in the shape of the OpenAI API.

```
GatewayError              status  type
├─ InvalidRequest         400     invalid_request_error
├─ Unauthorized           401     authentication_error, code "invalid_api_key"
├─ Forbidden              403     permission_error
├─ NotFound               404     not_found_error
│  └─ ModelNotFound       404     not_found_error, code "model_not_found"
├─ MethodNotAllowed       405     invalid_request_error
├─ RequestTimeout         408     timeout_error
├─ PayloadTooLarge        413     invalid_request_error
├─ UnsupportedMediaType   415     invalid_request_error
├─ Overloaded             429     rate_limit_error, with Retry-After
├─ DeadlineExceeded       429     rate_limit_error, code "deadline_exceeded"
├─ InternalError          500     server_error
└─ Unavailable            503     service_unavailable_error
```

Messages are one line and never show file paths, memory addresses or Python objects.
"""

import math
import re
from typing import TypedDict

from jaxengine.errors import (
    EngineDeadError,
    EngineStalledError,
    EngineStoppingError,
    InvalidRequestError,
    QueueFullError,
)

__all__ = [
    "DeadlineExceeded",
    "Forbidden",
    "GatewayError",
    "InternalError",
    "InvalidRequest",
    "MethodNotAllowed",
    "ModelNotFound",
    "NotFound",
    "Overloaded",
    "PayloadTooLarge",
    "RequestTimeout",
    "Unauthorized",
    "Unavailable",
    "UnsupportedMediaType",
    "WireError",
    "from_engine_error",
    "sanitize",
]

MAX_MESSAGE_LENGTH = 500

_OBJECT = re.compile(r"<[\w.]+(?: object)? at 0x[0-9a-fA-F]+>")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")
# Two or more components, so that "tokens/s" and "and/or" stay as they are.
_PATH = re.compile(r"(?<![\w/.:])~?(?:/[\w.@+-]+){2,}/?|\b[A-Za-z]:\\[^\s'\"]+")


class WireError(TypedDict):
    """The object under the key "error" of an answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class GatewayError(Exception):
    """A refusal or failure with everything that a client is told about it.

    Attributes:
        status: HTTP status; the websocket protocol sends it as a field.
        type: kind of error, as OpenAI's clients know them.
        param: the request field at fault, as the client spells it.
        code: machine-readable reason.
        retry_after_s: when it makes sense to try again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = _one_line(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def to_wire(self) -> WireError:
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }

    def headers(self) -> dict[str, str]:
        """HTTP headers that belong to this error."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class InvalidRequest(GatewayError):
    """The request can never be served as asked; `param` names the field."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=400, type="invalid_request_error", param=param, code=code)


class Unauthorized(GatewayError):
    """No API key, or none that we know."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, type="authentication_error", code="invalid_api_key")

    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(GatewayError):
    """Whoever asks, or the page or host that the request comes through, may not."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=403, type="permission_error", param=param, code=code)


class NotFound(GatewayError):
    """Nothing is at this address."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, status=404, type="not_found_error", param=param, code=code)


class ModelNotFound(NotFound):
    """The request names a model that is not served."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model '{model[:100]}' does not exist; GET /v1/models lists what is served",
            param="model",
            code="model_not_found",
        )


class MethodNotAllowed(GatewayError):
    """The address exists, but not for this method."""

    def __init__(self, method: str, allowed: str) -> None:
        super().__init__(
            f"method {method} is not allowed here; use {allowed}",
            status=405,
            type="invalid_request_error",
            code="method_not_allowed",
        )
        self.allowed = allowed

    def headers(self) -> dict[str, str]:
        return {"Allow": self.allowed}


class RequestTimeout(GatewayError):
    """The client did not send its request in time."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=408, type="timeout_error", code="request_timeout")


class PayloadTooLarge(GatewayError):
    """The body is larger than we accept."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message, status=413, type="invalid_request_error", code="request_too_large"
        )


class UnsupportedMediaType(GatewayError):
    """The body is not JSON by its own account."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message, status=415, type="invalid_request_error", code="unsupported_media_type"
        )


class Overloaded(GatewayError):
    """Too much work waits; try again after `retry_after_s`. `code` says of what kind."""

    def __init__(self, message: str, *, retry_after_s: float, code: str = "overloaded") -> None:
        super().__init__(
            message,
            status=429,
            type="rate_limit_error",
            code=code,
            retry_after_s=retry_after_s,
        )


class DeadlineExceeded(GatewayError):
    """The deadline that the request itself set has passed before its first token.

    Not 408 or 504: clients repeat those by themselves, and this answer would come too late.
    """

    def __init__(self) -> None:
        super().__init__(
            "the deadline passed before the first token",
            status=429,
            type="rate_limit_error",
            code="deadline_exceeded",
        )

    def headers(self) -> dict[str, str]:
        # OpenAI's clients repeat a 429 as well, unless they are told not to.
        return {"x-should-retry": "false"}


class InternalError(GatewayError):
    """A fault of ours; the log has more than the client is told."""

    def __init__(self, message: str = "internal server error") -> None:
        super().__init__(message, status=500, type="server_error", code="internal_error")


class Unavailable(GatewayError):
    """The engine is not there yet, no more, or about to stop."""

    def __init__(
        self, message: str, *, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(
            message,
            status=503,
            type="service_unavailable_error",
            code=code,
            retry_after_s=retry_after_s,
        )


def from_engine_error(exc: Exception) -> GatewayError:
    """Translate whatever the engine raised; what it did not raise on purpose says nothing."""
    match exc:
        case GatewayError():
            return exc
        case InvalidRequestError():
            return InvalidRequest(sanitize(str(exc)), param=exc.field, code=exc.code)
        case QueueFullError():
            return Overloaded(sanitize(str(exc)), retry_after_s=exc.retry_after_s, code=exc.reason)
        case EngineStoppingError():
            return Unavailable(sanitize(str(exc)), code="shutting_down", retry_after_s=5)
        case EngineStalledError():
            return Unavailable(sanitize(str(exc)), code="stalled", retry_after_s=5)
        case EngineDeadError():
            # What it died of is nobody's business but the operator's, and in the log.
            return Unavailable("the engine has failed", code="engine_dead")
        case _:
            return InternalError()


def sanitize(message: str) -> str:
    """Remove paths, addresses and object representations from a message we did not write."""
    for pattern, replacement in ((_OBJECT, "<object>"), (_PATH, "<path>"), (_ADDRESS, "<address>")):
        message = pattern.sub(replacement, message)
    return _one_line(message)


def _one_line(message: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in message[: 2 * MAX_MESSAGE_LENGTH])
    text = " ".join(printable.split())
    return text if len(text) <= MAX_MESSAGE_LENGTH else text[: MAX_MESSAGE_LENGTH - 1] + "…"
