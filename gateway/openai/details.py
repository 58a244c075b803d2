"""What choices tell besides their text: log-probabilities, token ids, and the prompt again."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation import PreparedGeneration, TextDelta
from gateway.openai.protocol import (
    AnyChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
)
from gateway.text_codec import TextTokenizer
from gateway.token_logprobs import TokenLogprob, finite, token_logprob
from gateway.token_wishes import token_name
from jaxengine.outputs import TokenLogprobs

__all__ = ["ChoiceDetails", "DetailOptions", "prompt_text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DetailOptions:
    """What a client wants to be told.

    Attributes:
        logprobs: in which of the two shapes; None for none.
        num_top: alternatives to tell with each token; None for all that there are.
        echo: whether the prompt comes first.
        prompt_logprobs: alternatives to tell, in vLLM's shape, with each token of the prompt; None
            to tell nothing of it.
        token_ids: whether ids are told.
        names_are_ids: whether log-probabilities name tokens by their ids.
    """

    logprobs: Literal["chat", "completion"] | None = None
    num_top: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    token_ids: bool = False
    names_are_ids: bool = False

    @property
    def is_asking(self) -> bool:
        """Whether choices have anything to tell."""
        wanted = (self.logprobs, self.prompt_logprobs)
        return self.token_ids or any(value is not None for value in wanted)


class ChoiceDetails:
    """The details of one choice, collected until a chunk takes them.

    Args:
        options: what to tell.
        prepared: the request.
        tokenizer: names tokens.

    Attributes:
        is_asking: whether there is anything to tell.
    """

    def __init__(
        self, options: DetailOptions, prepared: PreparedGeneration, tokenizer: TextTokenizer
    ) -> None:
        self._options = options
        self.is_asking = options.is_asking
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._generated: list[int] = []
        self._prompt_logprobs: Sequence[TokenLogprobs | None] = ()
        self._is_begun = False
        self._is_told = False  # the prompt

    def add(self, delta: TextDelta) -> None:
        """Take in a delta."""
        if not self.is_asking:
            return
        if not self._is_begun:
            self._is_begun = True
            self._prompt_logprobs = delta.prompt_logprobs or ()
            self._begin()
        self._generated += delta.token_ids
        if self._options.logprobs is not None:
            self._ids += delta.token_ids
            self._logprobs += delta.logprobs

    def attach[T: AnyChoice](self, choice: T) -> T:
        """Return the choice with all that was collected."""
        if not self.is_asking:
            return choice
        options = self._options
        fields: dict[str, object] = {}
        if isinstance(choice, CompletionChoice):
            fields["prompt_logprobs"] = self.prompt_logprobs
        if options.logprobs == "completion":
            fields["logprobs"] = self._completion_logprobs()
        elif options.logprobs == "chat":
            content = tuple(map(self._token_logprob, self._ids, self._logprobs))
            fields["logprobs"] = ChatLogprobs(content=content)
        if options.token_ids:
            fields["token_ids"] = tuple(self._generated)
            if not self._is_told:
                fields["prompt_token_ids"] = self._prepared.prompt_token_ids
            self._is_told = True
        self._ids, self._logprobs, self._generated = [], [], []
        return msgspec.structs.replace(choice, **fields)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | UnsetType:
        """How likely the prompt was, where that is wanted; complete once there was a delta."""
        if self._options.prompt_logprobs is None:
            return UNSET
        ids = self._prepared.prompt_token_ids
        return tuple(
            None if found is None else self._prompt_logprob(token_id, found)
            for token_id, found in zip(ids, self._prompt_logprobs, strict=True)
        )

    def _prompt_logprob(self, token_id: int, found: TokenLogprobs) -> dict[str, PromptLogprob]:
        ranks = {other: rank for rank, (other, _) in enumerate(found.top, start=1)}
        likeliest = dict(found.top[: self._options.prompt_logprobs])
        return {
            str(other): PromptLogprob(
                logprob=finite(logprob), rank=ranks.get(other), decoded_token=self._name(other)
            )
            for other, logprob in {**likeliest, token_id: found.logprob}.items()
        }

    def _begin(self) -> None:
        """Tell the prompt, or only how long it is: offsets count from its beginning."""
        if self._options.logprobs != "completion":
            return
        prepared = self._prepared
        if self._options.echo and self._prompt_logprobs:
            self._ids = list(prepared.prompt_token_ids)
            self._logprobs = list(self._prompt_logprobs)
        else:
            self._num_chars = len(prompt_text(prepared, self._tokenizer))

    def _completion_logprobs(self) -> CompletionLogprobs:
        names, offsets, tops = [], [], []
        for token_id, found in zip(self._ids, self._logprobs, strict=True):
            names.append(self._name(token_id))
            offsets.append(self._num_chars)
            shown = self._tokenizer.token_bytes(token_id)
            self._num_chars += len(self._decoder.decode(shown))
            tops.append(None if found is None else self._top(token_id, found))
        return CompletionLogprobs(
            tokens=tuple(names),
            token_logprobs=tuple(
                None if found is None else finite(found.logprob) for found in self._logprobs
            ),
            top_logprobs=tuple(tops),
            text_offset=tuple(offsets),
        )

    def _top(self, token_id: int, found: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by name, and always the one that came."""
        top: dict[str, float] = {}
        likeliest = dict(found.top[: self._options.num_top])
        for other, logprob in {**likeliest, token_id: found.logprob}.items():
            name = self._name(other)
            name = f"token_id:{other}" if name in top else name  # some look alike
            top[name] = finite(logprob)
        return top

    def _token_logprob(self, token_id: int, found: TokenLogprobs | None) -> TokenLogprob:
        assert found is not None, "a generated token has no log-probability"
        return token_logprob(
            self._tokenizer, token_id, found, names_are_ids=self._options.names_are_ids
        )

    def _name(self, token_id: int) -> str:
        if self._options.names_are_ids:
            return f"token_id:{token_id}"
        return token_name(self._tokenizer, token_id)


def prompt_text(prepared: PreparedGeneration, tokenizer: TextTokenizer) -> str:
    """Return the prompt as text: as it was given, or what its ids mean."""
    prompt = prepared.request.prompt
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prepared.prompt_token_ids, skip_special=False)
