"""What the text layer needs from a tokenizer and from a chat template.

`gateway.tokenizer` and `gateway.chat_template` implement these; so do small fakes in tests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["ChatMessage", "ChatRenderer", "MessageCall", "TextTokenizer", "ToolDefinition"]

# {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}
type ToolDefinition = Mapping[str, object]


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageCall:
    """A call of a tool that an earlier answer made; its arguments are JSON, as they were made."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One turn of a conversation, as the template sees it.

    Attributes:
        reasoning: what the assistant thought before it wrote the content.
        tool_calls: what the assistant asked for.
        tool_call_id: which call this message of role "tool" answers.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[MessageCall, ...] = ()
    tool_call_id: str | None = None


class TextTokenizer(Protocol):
    """Text to token ids and back. Safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether a prompt of this model starts with a beginning-of-sequence token."""
        ...

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool = False
    ) -> list[int]: ...

    def find_special(self, text: str) -> list[tuple[int, int, int]]:
        """Return (start, end, token id) of every special token that is spelled out in a text."""
        ...

    def encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        """Return the ids of one text given in parts: ids as they are, stretches as plain text."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return what the token adds to the answer; nothing for special tokens."""
        ...


class ChatRenderer(Protocol):
    """Chat messages to a prompt."""

    @property
    def source(self) -> str:
        """The template itself."""
        ...

    @property
    def tokens(self) -> Mapping[str, str]:
        """Texts of the model's own tokens by their names: bos_token, eos_token and the like."""
        ...

    @property
    def renders_tools(self) -> bool:
        """Whether it has a place for definitions of tools; else calls in messages get lost too."""
        ...

    def encode(
        self,
        tokenizer: TextTokenizer,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[ToolDefinition] = (),
        add_generation_prompt: bool = True,
        thinks: bool | None = None,
    ) -> list[int]:
        """Return the token ids of the prompt.

        `thinks` is whether the model is to think first, where its template can say so; None leaves
        it to the template.

        Raises:
            ValueError: the template refuses the messages; the text is for the client.
        """
        ...
