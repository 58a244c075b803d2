"""Responses that can be asked for again, within a bound of bytes.

What nobody asked for the longest goes first. A conversation is kept with every response, not by
reference to the one before it, so that forgetting one breaks no other; it is counted as often.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable

import msgspec

from gateway.openai.responses.protocol import ResponseObject
from gateway.text_codec import ChatMessage

__all__ = ["ResponseStore", "StoredResponse"]

MESSAGE_OVERHEAD = 200  # bytes of an object, about
RESPONSE_OVERHEAD = 1000


class StoredResponse:
    """A response, the conversation that ends with it, and perhaps its events.

    Attributes:
        response: as it is now.
        inputs: what it was asked, without what came in responses before it.
        conversation: messages up to and including its answer; set once it has ended.
        events: each as JSON, at the index of its sequence number; None if they are not kept.
        cancel: asks a response that runs in the background to end; None for all others.
    """

    def __init__(
        self,
        response: ResponseObject,
        *,
        inputs: tuple[ChatMessage, ...] = (),
        conversation: tuple[ChatMessage, ...] = (),
        events: list[bytes] | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self.response = response
        self.inputs = inputs
        self.conversation = conversation
        self.events = events
        self.cancel = cancel
        self._changed = asyncio.Event()

    @property
    def has_ended(self) -> bool:
        return self.response.status != "in_progress"

    @property
    def num_bytes(self) -> int:
        """What it takes to keep it, about."""
        return (
            RESPONSE_OVERHEAD
            + len(msgspec.json.encode(self.response))
            + sum(_num_bytes(message) for message in self.conversation)
            + sum(len(event) for event in self.events or ())
        )

    def notify(self) -> None:
        """Tell those who follow that something has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_ended(self) -> None:
        while not self.has_ended:
            await self._changed.wait()

    async def follow(
        self, after: int, *, idle_s: float | None
    ) -> AsyncGenerator[list[bytes] | None]:
        """Yield the events after this sequence number as they come, until the last one.

        None is yielded whenever nothing came for `idle_s`.
        """
        events = self.events or []
        position = after + 1
        while position < len(events) or not self.has_ended:
            if position < len(events):
                new = events[position:]
                position += len(new)
                yield new
                continue
            try:
                async with asyncio.timeout(idle_s):
                    await self._changed.wait()
            except TimeoutError:
                yield None


class ResponseStore:
    """Responses by owner and id.

    Args:
        max_bytes: of all that have ended; those that run are bounded by the engine's own limits.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._sizes: dict[tuple[str, str], int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep a response, or count it anew once it has ended."""
        key = (owner, stored.response.id)
        self.delete(*key)  # what cannot be counted is not kept
        num_bytes = stored.num_bytes if stored.has_ended else None
        self._stored[key] = stored
        if num_bytes is not None:
            self._sizes[key] = num_bytes
            self.num_bytes += num_bytes
            self._make_room()

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return a response of this owner; it is now the last to be forgotten."""
        key = (owner, response_id)
        stored = self._stored.get(key)
        if stored is not None:
            self._stored.move_to_end(key)
        return stored

    def delete(self, owner: str, response_id: str) -> StoredResponse | None:
        """Forget a response, and return it."""
        key = (owner, response_id)
        self._forget_size(key)
        return self._stored.pop(key, None)

    def holds(self, owner: str, stored: StoredResponse) -> bool:
        """Whether exactly this one is still kept."""
        return self._stored.get((owner, stored.response.id)) is stored

    def _make_room(self) -> None:
        while self.num_bytes > self._max_bytes:
            key = next(key for key in self._stored if key in self._sizes)
            self._forget_size(key)
            del self._stored[key]

    def _forget_size(self, key: tuple[str, str]) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)


def _num_bytes(message: ChatMessage) -> int:
    texts = [message.content, message.reasoning or "", message.tool_call_id or ""]
    for call in message.tool_calls:
        texts += [call.id, call.name, call.arguments]
    return MESSAGE_OVERHEAD + sum(len(text.encode(errors="surrogatepass")) for text in texts)
