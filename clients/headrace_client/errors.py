"""Errors of the client.

```
HeadraceError
├─ ConnectFailed            no server answers at the URL, or it does not speak the protocol
│  └─ ConnectTimeout        it did not answer in time
├─ ConnectionLost           the connection ended while a stream was open
├─ RequestRejected          the server refused the request; nothing was generated
│  ├─ BadRequest            400: the request can never work; `param` names the field
│  ├─ NotAllowed            401, 403: the server knows no such API key, or it does not suffice
│  ├─ ModelNotFound         404: the server does not serve this model
│  ├─ Overloaded            429: too much work waits; try again after `retry_after_s`
│  └─ Unavailable           503: the server starts, drains, or has failed
├─ GenerationFailed         the server gave up after it had accepted the request; `code` says why
├─ GenerationTimeout        one of the client's own time limits passed
└─ ProtocolError            the server sent what the protocol does not allow
```
"""

from typing import Literal

__all__ = [
    "BadRequest",
    "ConnectFailed",
    "ConnectTimeout",
    "ConnectionLost",
    "GenerationFailed",
    "GenerationTimeout",
    "HeadraceError",
    "ModelNotFound",
    "NotAllowed",
    "Overloaded",
    "ProtocolError",
    "RequestRejected",
    "Unavailable",
    "rejection",
]


class HeadraceError(Exception):
    """Base of all errors of this package."""


class ConnectFailed(HeadraceError):
    """No connection could be made."""


class ConnectTimeout(ConnectFailed):
    """The server did not answer in time."""


class ConnectionLost(HeadraceError):
    """The connection ended while a stream was open.

    Attributes:
        code: the websocket close code; 1006 or None when the connection just broke.
        retry_after_s: what the server said before it went away, or None.
    """

    def __init__(self, message: str, *, code: int | None, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class _ServerError(HeadraceError):
    """What the server said about a request.

    Attributes:
        status: what HTTP would have answered.
        type, param, code: as in the OpenAI API; `param` names the field at fault.
        retry_after_s: when it makes sense to try again, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        type: str,
        param: str | None,
        code: str | None,
        retry_after_s: float | None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class RequestRejected(_ServerError):
    """The server refused the request."""


class BadRequest(RequestRejected):
    """The request can never work as asked."""


class NotAllowed(RequestRejected):
    """The server wants an API key, or another one."""


class ModelNotFound(RequestRejected):
    """The server does not serve this model."""


class Overloaded(RequestRejected):
    """Too much work waits in the server."""


class Unavailable(RequestRejected):
    """The server accepts no requests now."""


class GenerationFailed(_ServerError):
    """The generation broke off; what was received before it is a part of the answer."""


class GenerationTimeout(HeadraceError):
    """A time limit of the client passed; the stream was cancelled.

    Attributes:
        limit: which one.
        after_s: its length.
    """

    def __init__(self, limit: Literal["first_token", "idle", "total"], after_s: float) -> None:
        what = {
            "first_token": "no token came",
            "idle": "no further token came",
            "total": "the answer was not complete",
        }[limit]
        super().__init__(f"{what} within {after_s:g} s")
        self.limit = limit
        self.after_s = after_s


class ProtocolError(HeadraceError):
    """The server sent what the protocol does not allow."""


def rejection(status: int) -> type[RequestRejected]:
    """Return the class for a status of the server."""
    known: dict[int, type[RequestRejected]] = {
        400: BadRequest,
        401: NotAllowed,
        403: NotAllowed,
        404: ModelNotFound,
        429: Overloaded,
        503: Unavailable,
    }
    return known.get(status, RequestRejected)
