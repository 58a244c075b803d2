"""POST /v1/chat/completions: a conversation to be continued by the assistant."""

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web
from msgspec import UNSET

from gateway.app_keys import CONFIG, GENERATOR
from gateway.callers import caller_of
from gateway.errors import InvalidRequest
from gateway.generation import ChatMessage, PreparedGeneration, TextFinish, TextGenerator
from gateway.json_body import convert, read_object
from gateway.openai.answers import send_answer
from gateway.openai.details import DetailOptions
from gateway.openai.protocol import (
    ChatBody,
    ChatChoice,
    ChatDelta,
    ChatDeltaChoice,
    FunctionCall,
    FunctionCallDelta,
    GeneratedMessage,
    MessageBody,
    StreamOptions,
    ToolCall,
    ToolCallBody,
    ToolCallDelta,
)
from gateway.openai.reasoning import thinks
from gateway.openai.sampling import (
    check_model,
    generation_requests,
    num_choices,
    prepare_all,
    wire_finish,
    wire_stop_reason,
    with_choice_seeds,
)
from gateway.openai.tool_parsers import (
    CallArguments,
    CallStart,
    Part,
    PlainAnswer,
    ReasoningText,
    ReplyText,
)
from gateway.openai.tools import (
    AnswerReading,
    answer_reading,
    check_num_calls,
    new_call_id,
    tool_use,
)
from gateway.openai.unsupported import CHAT_FIELDS, refuse_unsupported
from gateway.text_codec import MessageCall
from jaxengine.sampling_params import MAX_LOGPROBS

__all__ = ["chat_completions", "chat_messages"]

# What clients call the roles, and what templates know.
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Handle POST /v1/chat/completions."""
    raw = await read_object(request)
    body = convert(raw, ChatBody)
    config = request.app[CONFIG]
    model = check_model(body.model, config)
    refuse_unsupported(raw, CHAT_FIELDS)
    messages = chat_messages(body.messages)
    n = num_choices(body, 1, config)
    generator = request.app[GENERATOR]
    tools = tool_use(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
    reading = answer_reading(tools, generator, config)
    [generation] = generation_requests(
        body,
        [messages],
        max_tokens=_max_tokens(body),
        logprobs=_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
        caller=caller_of(request),
    )
    generation = tools.apply(generation, visible_tokens=reading.visible_tokens)
    generation = replace(
        generation, thinks=thinks(body.reasoning_effort, body.chat_template_kwargs or {})
    )
    try:
        [prepared] = await prepare_all(generator, [generation], n=n)
    except InvalidRequest as exc:
        if exc.param == "max_tokens" and body.max_completion_tokens is not None:
            exc.param = "max_completion_tokens"  # as the client spells it
        raise
    return await send_answer(
        request,
        with_choice_seeds(prepared, n),
        n=n,
        model=model,
        stream_options=(body.stream_options or StreamOptions()) if body.stream else None,
        answer_format=ChatFormat(reading, generator, prepared, n=n),
        details=DetailOptions(
            logprobs="chat" if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            names_are_ids=bool(body.return_tokens_as_token_ids),
        ),
    )


def chat_messages(bodies: list[MessageBody]) -> tuple[ChatMessage, ...]:
    """Return the messages as the template knows them.

    Raises:
        InvalidRequest: none, too many calls, or one that we cannot serve; `param` is its path.
    """
    if not bodies:
        raise InvalidRequest("messages must not be empty", param="messages")
    messages = tuple(_message(body, f"messages[{i}]") for i, body in enumerate(bodies))
    check_num_calls(messages, "messages")
    return messages


def _message(body: MessageBody, path: str) -> ChatMessage:
    if body.function_call is not None:
        raise _unsupported(f"{path}.function_call", "use tool_calls")
    if body.role == "function":
        raise _unsupported(
            f"{path}.role", "messages of role 'function' are not supported; use 'tool'"
        )
    if body.role not in _ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(_ROLES)}, got '{body.role[:40]}'",
            param=f"{path}.role",
        )
    is_answer = body.role == "assistant"
    if body.tool_calls and not is_answer:
        raise InvalidRequest(
            f"{path}.tool_calls: only an assistant calls tools", param=f"{path}.tool_calls"
        )
    calls = [_call(c, f"{path}.tool_calls[{i}]") for i, c in enumerate(body.tool_calls or ())]
    has_content = body.content is not None or not calls
    return ChatMessage(
        role=_ROLES[body.role],
        content=_content(body, f"{path}.content") if has_content else "",
        reasoning=body.reasoning_content if is_answer else None,
        tool_calls=tuple(calls),
        tool_call_id=body.tool_call_id if body.role == "tool" else None,
    )


def _call(body: ToolCallBody, path: str) -> MessageCall:
    if body.type not in (None, "function"):
        raise _unsupported(f"{path}.type", f"calls of type '{body.type[:40]}' are not supported")
    if body.function is None:
        raise InvalidRequest(f"{path}.function is required", param=f"{path}.function")
    return MessageCall(
        id=body.id or "", name=body.function.name, arguments=body.function.arguments or ""
    )


def _content(body: MessageBody, path: str) -> str:
    if body.content is None:
        raise InvalidRequest(f"{path} is required", param=path)
    if isinstance(body.content, str):
        return body.content
    texts = []
    for i, part in enumerate(body.content):
        if part.type != "text":
            raise _unsupported(
                f"{path}[{i}].type", f"content of type '{part.type[:40]}' is not supported"
            )
        if part.text is None:
            raise InvalidRequest(f"{path}[{i}].text is required", param=f"{path}[{i}].text")
        texts.append(part.text)
    return "\n".join(texts)


def _unsupported(path: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {problem}", param=path, code="unsupported_parameter")


def _max_tokens(body: ChatBody) -> int | None:
    """Return the newer field, if given, or the older; clients that send both mean the same."""
    if body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives are told with each token; None to tell no log-probabilities."""
    num_top = body.top_logprobs or 0
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs must be from 0 to {MAX_LOGPROBS}, got {num_top}", param="top_logprobs"
        )
    if num_top and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return num_top if body.logprobs else None


class ChatFormat:
    """Choices with a message, or with its pieces: thoughts, text, and calls.

    Args:
        reading: how to tell those apart.
        generator: what the answers come from.
        prepared: the prompt that they answer.
        n: choices.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        reading: AnswerReading,
        generator: TextGenerator,
        prepared: PreparedGeneration,
        *,
        n: int,
    ) -> None:
        self._style = reading.style
        self._parsers = [reading.parser(generator, prepared) for _ in range(n)]
        self._counters = [reading.counter(generator, prepared) for _ in range(n)]
        self._held: list[list[Part]] = [[] for _ in range(n)]

    def opening(self, index: int) -> ChatDeltaChoice:
        return ChatDeltaChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def text(self, index: int, text: str) -> list[ChatDeltaChoice]:
        return self._deltas(index, self._parsers[index].push(text))

    def finish(self, index: int, finish: TextFinish) -> list[ChatDeltaChoice]:
        parser = self._parsers[index]
        return [
            *self._deltas(index, parser.finish()),
            ChatDeltaChoice(
                index=index,
                delta=ChatDelta(content=""),
                finish_reason=wire_finish(finish, has_calls=parser.num_calls > 0),
                stop_reason=wire_stop_reason(finish),
                timing=finish.timing,
            ),
        ]

    def is_plain(self, index: int) -> bool:
        return isinstance(self._parsers[index], PlainAnswer)

    def hold(self, index: int, text: str) -> None:
        self._held[index] += self._parsers[index].push(text)

    def whole(self, index: int, finish: TextFinish) -> ChatChoice:
        parser = self._parsers[index]
        parts = [*self._held[index], *parser.finish()]
        return ChatChoice(
            index=index,
            message=self._message(parts),
            finish_reason=wire_finish(finish, has_calls=parser.num_calls > 0),
            stop_reason=wire_stop_reason(finish),
            timing=finish.timing,
        )

    def reasoning_tokens(self, index: int, token_ids: Sequence[int]) -> int:
        counter = self._counters[index]
        return 0 if counter is None else counter.count(token_ids)

    def _deltas(self, index: int, parts: Sequence[Part]) -> list[ChatDeltaChoice]:
        return [ChatDeltaChoice(index=index, delta=self._delta(part)) for part in parts]

    def _delta(self, part: Part) -> ChatDelta:
        match part:
            case ReplyText():
                return ChatDelta(content=part.text)
            case ReasoningText():
                return ChatDelta(reasoning_content=part.text)
            case CallStart():
                call = ToolCallDelta(
                    index=part.index,
                    id=new_call_id(self._style),
                    type="function",
                    function=FunctionCallDelta(name=part.name, arguments=""),
                )
                return ChatDelta(tool_calls=(call,))
            case CallArguments():
                more = FunctionCallDelta(arguments=part.text)
                return ChatDelta(tool_calls=(ToolCallDelta(index=part.index, function=more),))

    def _message(self, parts: Sequence[Part]) -> GeneratedMessage:
        texts = [part.text for part in parts if isinstance(part, ReplyText)]
        thoughts = [part.text for part in parts if isinstance(part, ReasoningText)]
        arguments: dict[int, list[str]] = {}
        for part in parts:
            if isinstance(part, CallArguments):
                arguments.setdefault(part.index, []).append(part.text)
        calls = tuple(
            ToolCall(
                id=new_call_id(self._style),
                function=FunctionCall(
                    name=part.name, arguments="".join(arguments.get(part.index, ()))
                ),
            )
            for part in parts
            if isinstance(part, CallStart)
        )
        return GeneratedMessage(
            content="".join(texts) if texts or not (calls or thoughts) else None,
            reasoning_content="".join(thoughts) if thoughts else UNSET,
            tool_calls=calls or UNSET,
        )
