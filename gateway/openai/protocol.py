"""Bodies of the OpenAI endpoints: what we read, and what we answer.

Every optional field of a request accepts null, because clients send it. Unknown fields are
ignored; known ones that we do not support yet are refused in `gateway.openai.unsupported`.
"""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from gateway.generation import Timing
from gateway.token_fields import StructuralTag, TokenFields
from gateway.token_logprobs import TokenLogprob

__all__ = [
    "AnyChoice",
    "ChatBody",
    "ChatChoice",
    "ChatDelta",
    "ChatDeltaChoice",
    "ChatLogprobs",
    "CompletionBody",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionTokensDetails",
    "ContentPart",
    "Envelope",
    "FunctionBody",
    "FunctionCall",
    "FunctionCallDelta",
    "FunctionName",
    "GeneratedMessage",
    "JsonSchemaFormat",
    "MessageBody",
    "PromptLogprob",
    "PromptLogprobs",
    "PromptTokensDetails",
    "ResponseFormat",
    "SamplingBody",
    "StreamOptions",
    "ToolBody",
    "ToolCall",
    "ToolCallBody",
    "ToolCallDelta",
    "ToolChoiceBody",
    "UsageBody",
    "WireFinish",
]

WireFinish = Literal["stop", "length", "tool_calls"]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """A schema that the answer must match; the name is for the client."""

    name: str | None = None
    schema: dict[str, object] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """What an answer must look like, in OpenAI's words; a "structural_tag" in vLLM's."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: list[StructuralTag] | None = None
    triggers: list[str] | None = None
    format: object = None


class SamplingBody(TokenFields, frozen=True, kw_only=True):
    """Fields that both generating endpoints share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, object] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    priority: int | None = None
    queue_timeout: float | None = None
    deadline: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(SamplingBody, frozen=True, kw_only=True):
    """Body of POST /v1/completions. A prompt is text or token ids; several come as a list."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """What a call of an earlier answer asked for; the arguments are JSON in a string."""

    name: str
    arguments: str | None = None


class ToolCallBody(msgspec.Struct, frozen=True):
    """A call of an earlier answer."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None


class MessageBody(msgspec.Struct, frozen=True):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    function_call: object = None


class FunctionBody(msgspec.Struct, frozen=True):
    """A function that the model may ask for; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True):
    """A tool; only functions are supported."""

    type: str
    function: FunctionBody | None = None


class FunctionName(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str


class ToolChoiceBody(msgspec.Struct, frozen=True):
    """The one tool that must be called."""

    type: str
    function: FunctionName | None = None


class ChatBody(SamplingBody, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, object] | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the prompt tokens, those that came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Of the generated tokens, those of thoughts before the answer."""

    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct, frozen=True):
    """Token counts of one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class ChatLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Log-probabilities as chat answers tell them."""

    content: tuple[TokenLogprob, ...]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Log-probabilities as text completions tell them; of the first prompt token there is none."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]


class PromptLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """How likely a token of a prompt was, in vLLM's words.

    Attributes:
        rank: 1 is the likeliest; null for a token that is none of those that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


# Of each token of a prompt, by id: itself and the likeliest. Of the first there is none.
type PromptLogprobs = tuple[dict[str, PromptLogprob] | None, ...]


class _Choice(msgspec.Struct, kw_only=True, frozen=True):
    """What all choices share. `stop_reason` and `timing` are ours; only finished ones have them."""

    index: int
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    finish_reason: WireFinish | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    timing: Timing | UnsetType = UNSET


class CompletionChoice(_Choice, kw_only=True, frozen=True):
    """A choice of a text completion; whole and streamed ones look alike."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True):
    """What a call asks for; the arguments are what the model wrote, and need not be valid JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(msgspec.Struct, kw_only=True, frozen=True):
    """What a chunk adds to a call; the name comes once and first."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True, frozen=True):
    """What a chunk adds to one of the calls; id and type come once and first."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, kw_only=True, frozen=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallDelta, ...] | UnsetType = UNSET


class ChatDeltaChoice(_Choice, kw_only=True, frozen=True):
    """A choice of a streamed chat answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class GeneratedMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A whole answer. `content` is null where there is nothing but calls or thoughts."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[ToolCall, ...] | UnsetType = UNSET


class ChatChoice(_Choice, kw_only=True, frozen=True):
    """A choice of a whole chat answer."""

    message: GeneratedMessage
    logprobs: ChatLogprobs | None = None


type AnyChoice = CompletionChoice | ChatDeltaChoice | ChatChoice


class Envelope(msgspec.Struct, kw_only=True, frozen=True):
    """A whole answer or one chunk of it.

    Attributes:
        usage: in a stream absent unless asked for; then null until the last chunk.
        prompt_logprobs: of a conversation; a text completion has them in its choices.
    """

    id: str
    object: str
    created: int
    model: str
    choices: tuple[CompletionChoice | ChatDeltaChoice | ChatChoice, ...]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    system_fingerprint: str | UnsetType = UNSET
