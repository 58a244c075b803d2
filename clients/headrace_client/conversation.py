"""A chat that remembers what was said."""

from collections.abc import AsyncIterator, Iterable
from typing import Protocol, Unpack

from headrace_client.inbox import TextDelta
from headrace_client.messages import ChatMessage, GenerationOptions
from headrace_client.stream import Stream

__all__ = ["ChatStarter", "Conversation"]


class ChatStarter(Protocol):
    """What a conversation needs of a client."""

    async def chat(
        self, messages: list[ChatMessage], **options: Unpack[GenerationOptions]
    ) -> Stream: ...


class Conversation:
    """Turns of a user and the model; each answer is asked for with all turns before it.

    ```
    conversation = Conversation(client, system="You answer in one sentence.", temperature=0)
    print(await conversation.ask("What is the capital of France?"))
    async for delta in conversation.stream("And of Italy?"):
        print(delta.text, end="", flush=True)
    ```

    A question is remembered together with its answer, once that has come to its end: one that
    failed, or was left in the middle, leaves the conversation as it was. One answer at a time.

    Attributes:
        messages: what was said so far, without the system message. Plain data, so that it can be
            stored as JSON, given to another conversation, or changed in place.
        system: the instruction before all turns; None for none.
        last: the stream of the newest question, with its usage and timing.
    """

    def __init__(
        self,
        client: ChatStarter,
        *,
        system: str | None = None,
        messages: Iterable[ChatMessage] = (),
        **options: Unpack[GenerationOptions],
    ) -> None:
        """Begin, or go on with `messages`; the options are those of every question."""
        self.system = system
        self.messages: list[ChatMessage] = list(messages)
        self.last: Stream | None = None
        self._client = client
        self._options = options

    async def ask(self, question: str, **options: Unpack[GenerationOptions]) -> str:
        """Return the whole answer; the options replace those of the conversation.

        Raises:
            HeadraceError: as `AsyncClient.chat` and iterating over its stream.
        """
        return "".join([delta.text async for delta in self.stream(question, **options)])

    async def stream(
        self, question: str, **options: Unpack[GenerationOptions]
    ) -> AsyncIterator[TextDelta]:
        """Yield the answer as it comes. Otherwise as `ask`."""
        asked: ChatMessage = {"role": "user", "content": question}
        head: list[ChatMessage] = []
        if self.system is not None:
            head.append({"role": "system", "content": self.system})
        merged: GenerationOptions = {**self._options, **options}
        stream = await self._client.chat([*head, *self.messages, asked], **merged)
        pieces: list[str] = []
        async with stream:
            self.last = stream
            async for delta in stream:
                pieces.append(delta.text)
                yield delta
        self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]

    def undo(self) -> None:
        """Forget the newest question and its answer; does nothing if there is none."""
        del self.messages[-2:]

    def clear(self) -> None:
        """Forget all turns."""
        self.messages.clear()
