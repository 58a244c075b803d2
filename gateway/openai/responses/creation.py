"""From the body of a request to a response that can run."""

import dataclasses
import time
import uuid
from collections.abc import Sequence

import msgspec

from gateway.callers import Caller
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest
from gateway.generation import TextGenerator
from gateway.json_body import convert
from gateway.openai.protocol import (
    FunctionBody,
    FunctionName,
    JsonSchemaFormat,
    ResponseFormat,
    ToolBody,
    ToolChoiceBody,
)
from gateway.openai.reasoning import thinks
from gateway.openai.responses.items import input_messages
from gateway.openai.responses.protocol import (
    RESPONSE_FIELDS,
    ReasoningOptions,
    ResponseObject,
    ResponsesBody,
    ResponseTool,
    ResponseToolChoice,
    TextFormat,
    TextOptions,
)
from gateway.openai.responses.run import ResponseRun
from gateway.openai.responses.store import ResponseStore
from gateway.openai.sampling import check_model, generation_requests, prepare_all
from gateway.openai.tools import ToolUse, answer_reading, check_num_calls, tool_use
from gateway.openai.unsupported import refuse_unsupported
from gateway.text_codec import ChatMessage

__all__ = ["create_run", "read_body"]

MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512

# How the fields of a response are called where its generation is prepared.
_FIELD_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


def read_body(raw: dict[str, object]) -> ResponsesBody:
    """Check the fields of a decoded body.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    body = convert(raw, ResponsesBody)
    refuse_unsupported(raw, RESPONSE_FIELDS)
    for i, name in enumerate(body.include or ()):
        if "logprobs" in name:
            raise _unsupported(f"include[{i}]", "logprobs are not supported")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE
        for key, value in metadata.items()
    ):
        raise InvalidRequest(
            f"metadata may hold at most {MAX_METADATA} entries, with keys of {MAX_METADATA_KEY} "
            f"and values of {MAX_METADATA_VALUE} characters",
            param="metadata",
        )
    if body.background and body.store is False:
        raise InvalidRequest(
            "a response in the background must be stored, or nobody could get it", param="store"
        )
    return body


async def create_run(
    body: ResponsesBody,
    *,
    caller: Caller,
    generator: TextGenerator,
    config: GatewayConfig,
    stores: Sequence[ResponseStore],
) -> ResponseRun:
    """Return the response that this body asks for, ready to run.

    Args:
        body: as `read_body` returns it.
        caller: who asks; previous responses must be theirs.
        generator: what is to answer.
        config: the limits.
        stores: where a previous response may be.

    Raises:
        gateway.errors.GatewayError: it cannot be served.
    """
    model = check_model(body.model, config)
    inputs = input_messages(body.input or ())
    conversation = (*_previous(body, caller, stores), *inputs)
    if not conversation:
        raise InvalidRequest("input must not be empty", param="input")
    check_num_calls(conversation, "input")
    tools = _tool_use(body)
    reading = answer_reading(tools, generator, config)
    system = (ChatMessage(role="system", content=body.instructions),) if body.instructions else ()
    answers = body.generate is not False
    try:
        [request] = generation_requests(
            _with_format(body),
            [(*system, *conversation)],
            max_tokens=body.max_output_tokens if answers else 1,
            caller=caller,
        )
        request = tools.apply(request, visible_tokens=reading.visible_tokens)
        effort = None if body.reasoning is None else body.reasoning.effort
        request = dataclasses.replace(request, thinks=thinks(effort, {}))
        [prepared] = await prepare_all(generator, [request], n=1)
    except InvalidRequest as exc:
        raise _as_here(exc) from None
    return ResponseRun(
        generator,
        prepared,
        reading,
        _response(body, model),
        conversation=conversation,
        num_inputs=len(inputs),
        answers=answers,
    )


def _previous(
    body: ResponsesBody, caller: Caller, stores: Sequence[ResponseStore]
) -> tuple[ChatMessage, ...]:
    """The conversation that this response goes on with."""
    if body.previous_response_id is None:
        return ()
    for store in stores:
        stored = store.get(caller.principal, body.previous_response_id)
        if stored is None:
            continue
        if stored.response.status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"the previous response is {stored.response.status}",
                param="previous_response_id",
            )
        return stored.conversation
    raise InvalidRequest(
        f"the previous response '{body.previous_response_id[:100]}' is not there, or no more",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def _tool_use(body: ResponsesBody) -> ToolUse:
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())]
    try:
        return tool_use(tools, _tool_choice(body.tool_choice), parallel=body.parallel_tool_calls)
    except InvalidRequest as exc:
        raise _as_here(exc) from None


def _as_here(error: InvalidRequest) -> InvalidRequest:
    """The error with fields as they are called here, and not where a generation is prepared."""
    message, param = error.message, error.param or ""
    for theirs, ours in _FIELD_NAMES.items():
        if param.startswith(theirs):
            message, param = message.replace(theirs, ours), ours + param.removeprefix(theirs)
    if param.startswith(("tools[", "tool_choice.")):
        # A function is no part of a tool here, but the tool itself.
        message, param = message.replace(".function", ""), param.replace(".function", "")
    return InvalidRequest(message, param=param or None, code=error.code)


def _with_format(body: ResponsesBody) -> ResponsesBody:
    """The body with what its text must be like where a chat has it."""
    wanted = None if body.text is None else body.text.format
    if wanted is None:
        return body
    schema = None if wanted.type != "json_schema" else JsonSchemaFormat(schema=wanted.schema)
    like_chat = ResponseFormat(
        type=wanted.type,
        json_schema=schema,
        structures=wanted.structures,
        triggers=wanted.triggers,
    )
    return msgspec.structs.replace(body, response_format=like_chat)


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | ToolChoiceBody | None:
    if not isinstance(choice, ResponseToolChoice):
        return choice
    function = None if choice.name is None else FunctionName(choice.name)
    return ToolChoiceBody(type=choice.type, function=function)


def _tool(tool: ResponseTool, path: str) -> ToolBody:
    if tool.type == "function" and tool.name is None:
        raise InvalidRequest(f"{path}.name is required", param=f"{path}.name")
    return ToolBody(
        type=tool.type,
        function=FunctionBody(
            name=tool.name or "",
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        ),
    )


def _response(body: ResponsesBody, model: str) -> ResponseObject:
    """The response at its beginning, with what was asked."""
    return ResponseObject(
        id=f"resp_{uuid.uuid4().hex}",
        created_at=int(time.time()),
        status="in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        output=(),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or ReasoningOptions(),
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=_text_options(body.text),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=tuple(
            msgspec.structs.replace(tool, parameters=tool.parameters or {})
            for tool in body.tools or ()
        ),
        top_p=1.0 if body.top_p is None else body.top_p,
    )


def _text_options(wanted: TextOptions | None) -> TextOptions:
    """What the text must be like, as it is told back."""
    plain = TextFormat(type="text")
    if wanted is None:
        return TextOptions(format=plain)
    return TextOptions(format=wanted.format or plain, verbosity=wanted.verbosity)


def _unsupported(path: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{path}: {problem}", param=path, code="unsupported_parameter")
