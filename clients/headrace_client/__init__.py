"""Talk to a headrace server: `AsyncClient`, its streams, and its errors.

Importing this package needs aiohttp, orjson and msgpack, and nothing of the server.
"""

from headrace_client.client import DEFAULT_URL, AsyncClient
from headrace_client.errors import (
    BadRequest,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    GenerationFailed,
    GenerationTimeout,
    HeadraceError,
    ModelNotFound,
    NotAllowed,
    Overloaded,
    ProtocolError,
    RequestRejected,
    Unavailable,
)
from headrace_client.inbox import TextDelta
from headrace_client.messages import ChatMessage, GenerationOptions, Hello, Timing, Usage
from headrace_client.stream import Stream, Timeouts

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "BadRequest",
    "ChatMessage",
    "ConnectFailed",
    "ConnectTimeout",
    "ConnectionLost",
    "GenerationFailed",
    "GenerationOptions",
    "GenerationTimeout",
    "HeadraceError",
    "Hello",
    "ModelNotFound",
    "NotAllowed",
    "Overloaded",
    "ProtocolError",
    "RequestRejected",
    "Stream",
    "TextDelta",
    "Timeouts",
    "Timing",
    "Unavailable",
    "Usage",
]
