"""Errors of the engine.

```
EngineError
├─ InvalidRequestError       the request can never run; `field` names the offending part
├─ QueueFullError            too many requests wait; retry after `retry_after_s`
├─ EngineStoppingError       the engine drains or has stopped; nothing new is accepted
├─ EngineStalledError        no step ends; the process should be restarted if it stays so
├─ EngineDeadError           the engine failed for good; the process should be restarted
└─ ModelError                the model cannot be had, read, or run as asked
```
"""

__all__ = [
    "EngineDeadError",
    "EngineError",
    "EngineStalledError",
    "EngineStoppingError",
    "InvalidRequestError",
    "ModelError",
    "QueueFullError",
]


class EngineError(Exception):
    """Base of every error that the engine raises on purpose."""


class InvalidRequestError(EngineError):
    """A request that can never run as asked.

    Attributes:
        field: name of the request field at fault, as the caller spells it.
        code: machine-readable reason, or None.
    """

    def __init__(self, message: str, *, field: str, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class QueueFullError(EngineError):
    """The waiting queue is at a bound, or would not be served in time.

    Attributes:
        retry_after_s: when it is worth trying again, by the backlog.
        reason: which bound: "queued_requests", "queued_tokens" or "queue_timeout".
    """

    def __init__(
        self, message: str, *, retry_after_s: float, reason: str = "queued_requests"
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class EngineStoppingError(EngineError):
    """The engine no longer accepts requests because it is shutting down."""


class EngineStalledError(EngineError):
    """A step takes longer than any step should; whether it will ever end nobody knows."""


class EngineDeadError(EngineError):
    """The engine loop has failed for good."""


class ModelError(EngineError):
    """The model cannot be found, downloaded, read, or run as asked. One line, fit to print."""
