"""POST /v1/chat/completions: a conversation to be continued by the assistant."""

from aiohttp import web

from gateway.app_keys import CONFIG, GENERATOR
from gateway.callers import caller_of
from gateway.errors import InvalidRequest
from gateway.generation import ChatMessage, TextFinish
from gateway.json_body import convert, read_object
from gateway.openai.answers import send_answer
from gateway.openai.protocol import (
    ChatBody,
    ChatChoice,
    ChatDelta,
    ChatDeltaChoice,
    GeneratedMessage,
    MessageBody,
    StreamOptions,
)
from gateway.openai.sampling import (
    check_model,
    generation_requests,
    num_choices,
    prepare_all,
    wire_finish,
    wire_stop_reason,
    with_choice_seeds,
)
from gateway.openai.unsupported import CHAT_FIELDS, refuse_unsupported

__all__ = ["chat_completions", "chat_messages"]

# What clients call the roles, and what templates know.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


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
    requests = generation_requests(
        body,
        [messages],
        max_tokens=_max_tokens(body),
        caller=caller_of(request),
    )
    try:
        [prepared] = await prepare_all(generator, requests, n=n)
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
        answer_format=ChatFormat(),
    )


def chat_messages(bodies: list[MessageBody]) -> tuple[ChatMessage, ...]:
    """Return the messages as the template knows them.

    Raises:
        InvalidRequest: no message, or one that we cannot serve; `param` is its path.
    """
    if not bodies:
        raise InvalidRequest("messages must not be empty", param="messages")
    return tuple(_message(body, f"messages[{i}]") for i, body in enumerate(bodies))


def _message(body: MessageBody, path: str) -> ChatMessage:
    if body.tool_calls or body.function_call is not None:
        field = "tool_calls" if body.tool_calls else "function_call"
        raise _unsupported(f"{path}.{field}", "tool calls are not supported yet")
    if body.role in ("tool", "function"):
        raise _unsupported(f"{path}.role", f"messages of role '{body.role}' are not supported yet")
    if body.role not in _ROLES:
        raise InvalidRequest(
            f"{path}.role must be one of {', '.join(_ROLES)}, got '{body.role[:40]}'",
            param=f"{path}.role",
        )
    return ChatMessage(role=_ROLES[body.role], content=_content(body, f"{path}.content"))


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


class ChatFormat:
    """Choices with a message, or with its pieces."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def opening(self, index: int) -> ChatDeltaChoice:
        return ChatDeltaChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def text(self, index: int, text: str) -> ChatDeltaChoice:
        return ChatDeltaChoice(index=index, delta=ChatDelta(content=text))

    def finish(self, index: int, finish: TextFinish) -> ChatDeltaChoice:
        return ChatDeltaChoice(
            index=index,
            delta=ChatDelta(content=""),
            finish_reason=wire_finish(finish),
            stop_reason=wire_stop_reason(finish),
            timing=finish.timing,
        )

    def whole(self, index: int, text: str, finish: TextFinish) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=GeneratedMessage(content=text),
            finish_reason=wire_finish(finish),
            stop_reason=wire_stop_reason(finish),
            timing=finish.timing,
        )
