"""A tokenizer and a chat template whose every token can be computed by hand."""

import re
from collections.abc import Sequence
from typing import ClassVar

from gateway.text_codec import ChatMessage

__all__ = [
    "BOS",
    "EOS",
    "FIRST_WORD",
    "IM_START",
    "ByteChatTemplate",
    "ByteTokenizer",
    "byte_tokenizer",
]

EOS = 256  # "<|im_end|>"
IM_START = 257  # "<|im_start|>"
BOS = 258  # "<s>"
SPECIAL_TEXTS = {EOS: "<|im_end|>", IM_START: "<|im_start|>", BOS: "<s>"}
FIRST_WORD = 259


class ByteTokenizer:
    """Token ids 0..255 are bytes, 256..258 are specials, and from 259 on come `words`.

    `encode` never uses the words: they are there for scripts to generate.
    """

    bos_id = BOS
    eos_ids = (EOS,)
    adds_bos = False

    def __init__(self, words: Sequence[str | bytes] = ()) -> None:
        self._words = [w.encode() if isinstance(w, str) else w for w in words]
        self.vocab_size = FIRST_WORD + len(self._words)

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool = False) -> list[int]:
        ids = [BOS] if add_bos else []
        while text:
            found = [(text.find(s), i) for i, s in SPECIAL_TEXTS.items()] if parse_special else []
            start, token_id = min(((at, i) for at, i in found if at >= 0), default=(len(text), -1))
            ids.extend(text[:start].encode())
            if token_id >= 0:
                ids.append(token_id)
                start += len(SPECIAL_TEXTS[token_id])
            text = text[start:]
        return ids

    def find_special(self, text: str) -> list[tuple[int, int, int]]:
        return [
            (match.start(), match.end(), token_id)
            for token_id, special in SPECIAL_TEXTS.items()
            for match in re.finditer(re.escape(special), text)
        ]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        shown = (
            SPECIAL_TEXTS[i].encode()
            if i in SPECIAL_TEXTS and not skip_special
            else self.token_bytes(i)
            for i in ids
        )
        return b"".join(shown).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        # As in the real one: an embedding may have rows that are no token.
        index = token_id - FIRST_WORD
        return self._words[index] if 0 <= index < len(self._words) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in SPECIAL_TEXTS


def byte_tokenizer(*words: str | bytes) -> ByteTokenizer:
    return ByteTokenizer(words)


class ByteChatTemplate:
    """A message is ``<|im_start|>role\\ncontent<|im_end|>\\n``; then ``<|im_start|>assistant\\n``.

    So one message of role r and content c costs 4 + len(r) + len(c) tokens in UTF-8 bytes
    (two specials, two line feeds), and the generation prompt costs 11.
    """

    source = "{{ messages }}"
    renders_tools = False
    tokens: ClassVar = {"bos_token": "<s>", "eos_token": "<|im_end|>"}

    def encode(
        self,
        tokenizer: ByteTokenizer,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[object] = (),
        add_generation_prompt: bool = True,
        thinks: bool | None = None,
    ) -> list[int]:
        assert not tools, "it has no place for them"
        ids: list[int] = []
        for message in messages:
            if message.content == "refuse":
                raise ValueError("the template refuses this conversation")
            ids.append(IM_START)
            ids.extend(tokenizer.encode(f"{message.role}\n{message.content}"))
            ids.extend([EOS, ord("\n")])
        if add_generation_prompt:
            ids.append(IM_START)
            ids.extend(tokenizer.encode("assistant\n"))
        if thinks is not None:
            ids.extend(tokenizer.encode(f"thinks: {thinks}\n"))
        return ids
