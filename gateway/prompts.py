"""Prompts to token ids, off the event loop and within bounds."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard

from gateway.errors import InvalidRequest, Overloaded, sanitize
from gateway.text_codec import ChatMessage, ChatRenderer, TextTokenizer, ToolDefinition
from gateway.tool_prompt import with_tools_in_words

__all__ = ["Prompt", "PromptEncoder", "context_overflow"]

type Prompt = str | tuple[int, ...] | tuple[ChatMessage, ...]


def context_overflow(message: str, *, param: str) -> InvalidRequest:
    """Return the error that OpenAI's clients know as a full context."""
    return InvalidRequest(message, param=param, code="context_length_exceeded")


class PromptEncoder:
    """Renders templates and tokenizes in a few threads of its own.

    Text of a prompt is never parsed for special tokens inside chat messages, so a user cannot
    forge the end of a turn; a raw completion prompt is the caller's own and is parsed.

    Owns: the threads; `close` ends them.

    Args:
        max_concurrent: prompts that may be encoded, or wait for it, at the same time.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        chat_template: ChatRenderer | None,
        *,
        num_threads: int,
        max_concurrent: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._max_concurrent = max_concurrent
        self._num_running = 0
        # No token stands for more characters than it has bytes.
        sizes = (len(tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size))
        self._max_token_chars = max(1, max(sizes, default=1))

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def encode(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        bound: str,
        vocab_size: int,
        tools: Sequence[ToolDefinition] = (),
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        thinks: bool | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids, at least 1 and at most `max_tokens`; `bound` says why so many.

        `tools` and `thinks` are for chat messages only, and as in ChatRenderer.

        Cancelling is safe; a thread that has begun goes on and its result is dropped.

        Raises:
            InvalidRequest: naming "prompt" or "messages".
            Overloaded: too many prompts wait to be encoded.
        """
        param = _param(prompt)
        if not prompt:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        self._check_size(prompt, param, max_tokens, bound)
        if tools:
            self._check_tools(tools, max_tokens, bound)
        if _is_token_ids(prompt):
            _check_range(prompt, vocab_size)
            return prompt
        ids = await self.run(
            self._encode_here,
            prompt,
            tools=tools,
            add_bos=add_special_tokens and self._tokenizer.adds_bos,
            add_generation_prompt=add_generation_prompt,
            thinks=thinks,
        )
        if len(ids) > max_tokens:
            raise _too_long(f"{len(ids)}", param, max_tokens, bound)
        return ids

    async def run[**P, T](self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the text layer in one of the threads.

        Raises:
            Overloaded: too many wait.
        """
        if self._num_running >= self._max_concurrent:
            raise Overloaded("too many prompts wait to be tokenized", retry_after_s=1)
        self._num_running += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))
        finally:
            self._num_running -= 1

    def _check_size(self, prompt: Prompt, param: str, max_tokens: int, bound: str) -> None:
        """Refuse before tokenizing what cannot fit whatever its tokens turn out to be."""
        if isinstance(prompt, str):
            at_least = math.ceil(len(prompt) / self._max_token_chars)
        elif _is_token_ids(prompt):
            at_least = len(prompt)
        else:
            num_chars = sum(len(message.content) for message in _messages(prompt))
            # The template spends at least one token on the role of each message.
            at_least = math.ceil(num_chars / self._max_token_chars) + len(prompt)
        if at_least > max_tokens:
            counted = f"{at_least}" if _is_token_ids(prompt) else f"at least {at_least}"
            raise _too_long(counted, param, max_tokens, bound)

    def _check_tools(self, tools: Sequence[ToolDefinition], max_tokens: int, bound: str) -> None:
        at_least = math.ceil(len(json.dumps(tools, ensure_ascii=False)) / self._max_token_chars)
        if at_least > max_tokens:
            raise _too_long(f"at least {at_least}", "tools", max_tokens, bound)

    def _encode_here(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolDefinition],
        add_bos: bool,
        add_generation_prompt: bool,
        thinks: bool | None,
    ) -> tuple[int, ...]:
        param = _param(prompt)
        try:
            if isinstance(prompt, str):
                ids = self._tokenizer.encode(prompt, parse_special=True, add_bos=add_bos)
            elif self._chat_template is None:
                raise InvalidRequest(
                    "this model has no chat template; use /v1/completions", param=param
                )
            else:
                messages = _messages(prompt)
                if not self._chat_template.renders_tools:
                    messages, tools = with_tools_in_words(messages, tools), ()
                ids = self._chat_template.encode(
                    self._tokenizer,
                    messages,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    thinks=thinks,
                )
        except ValueError as exc:
            raise InvalidRequest(f"{param}: {sanitize(str(exc))}", param=param) from exc
        if not ids:
            raise InvalidRequest(f"{param} must not be empty", param=param)
        return tuple(ids)


def _param(prompt: Prompt) -> str:
    is_chat = isinstance(prompt, tuple) and any(isinstance(p, ChatMessage) for p in prompt[:1])
    return "messages" if is_chat else "prompt"


def _is_token_ids(prompt: Prompt) -> TypeGuard[tuple[int, ...]]:
    return isinstance(prompt, tuple) and any(isinstance(p, int) for p in prompt[:1])


def _messages(prompt: Prompt) -> tuple[ChatMessage, ...]:
    return tuple(part for part in prompt if isinstance(part, ChatMessage))


def _check_range(ids: tuple[int, ...], vocab_size: int) -> None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        outside = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"prompt holds token id {outside}; ids must be from 0 to {vocab_size - 1}",
            param="prompt",
        )


def _too_long(num_tokens: str, param: str, max_tokens: int, bound: str) -> InvalidRequest:
    return context_overflow(
        f"{param} has {num_tokens} tokens; at most {max_tokens} {bound}", param=param
    )
