"""Talk to a headrace server: `AsyncClient`, or `Client` without asyncio, and their streams.

Importing this package needs aiohttp, orjson and msgpack, and nothing of the server.
"""

from headrace_client.client import DEFAULT_URL, AsyncClient
from headrace_client.conversation import Conversation
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
from headrace_client.events import Finished, Resumed, Started, StreamEvent
from headrace_client.inbox import TextDelta
from headrace_client.messages import (
    ChatMessage,
    GenerationOptions,
    Hello,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from headrace_client.stream import Stream, Timeouts
from headrace_client.sync import Client, SyncStream

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_URL",
    "AsyncClient",
    "BadRequest",
    "ChatMessage",
    "Client",
    "ConnectFailed",
    "ConnectTimeout",
    "ConnectionLost",
    "Conversation",
    "Finished",
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
    "Resumed",
    "Started",
    "Stream",
    "StreamEvent",
    "SyncStream",
    "TextDelta",
    "Timeouts",
    "Timing",
    "TokenLogprob",
    "TopLogprob",
    "Unavailable",
    "Usage",
]
