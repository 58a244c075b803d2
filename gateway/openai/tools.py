"""The tools of a request: checked, and what may be made of them in the answer."""

import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest
from gateway.generation import GenerationRequest, PreparedGeneration, TextGenerator
from gateway.grammars import Structure
from gateway.openai.protocol import FunctionBody, ToolBody, ToolChoiceBody
from gateway.openai.reasoning import (
    REASONING_END,
    REASONING_START,
    ReasoningCounter,
    read_reasoning,
    reasoning_format,
)
from gateway.openai.tool_parsers import (
    AnswerParser,
    CharSource,
    PartSink,
    PlainAnswer,
    Reader,
    read_plain,
)
from gateway.openai.tool_parsers_formats import (
    VISIBLE_TOKENS,
    ToolFormat,
    read_answer,
    read_forced_call,
    read_forced_calls,
    tool_format,
)
from gateway.openai.tools_forced import arguments_structure, calls_structure
from gateway.text_codec import ChatMessage, ToolDefinition

__all__ = [
    "AnswerReading",
    "ToolUse",
    "answer_reading",
    "check_num_calls",
    "new_call_id",
    "tool_use",
]

MAX_TOOLS = 128
MAX_CALLS = 4096  # in one conversation
MAX_DEPTH = 32
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MARK_TOKENS = 16  # more than the mark that opens thoughts ever takes, with white space


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """What a request allows.

    Attributes:
        functions: what may be called; none if calls are not wanted.
        max_calls: most calls of one answer; None sets no bound.
        must_call: the answer must be a call, or several.
        name: the one that must be called, if must_call and one was named.
    """

    functions: tuple[FunctionBody, ...] = ()
    max_calls: int | None = None
    must_call: bool = False
    name: str | None = None

    @property
    def definitions(self) -> tuple[ToolDefinition, ...]:
        """The functions as chat templates know them."""
        return tuple(_definition(function) for function in self.functions)

    @property
    def structure(self) -> Structure | None:
        """What the answer must match; None if a call is not forced."""
        if not self.must_call:
            return None
        for index, function in enumerate(self.functions):
            if function.name == self.name:
                return arguments_structure(function, index=index)
        return calls_structure(self.functions, max_calls=self.max_calls)

    def apply(
        self, request: GenerationRequest, *, visible_tokens: tuple[str, ...]
    ) -> GenerationRequest:
        """Return the request with these tools.

        Raises:
            InvalidRequest: the answer must already be something else than a call.
        """
        tokens = request.tokens
        if (structure := self.structure) is not None:
            if tokens.structure is not None:
                raise InvalidRequest(
                    f"tool_choice forces a call, and {tokens.structure.param} something else",
                    param="tool_choice",
                )
            tokens = replace(tokens, structure=structure)
        return replace(
            request, tools=self.definitions, tokens=tokens, visible_tokens=visible_tokens
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerReading:
    """How to take the answers to one request apart.

    Attributes:
        tools: what may be called.
        style: how the model writes calls; None if it may make none.
        thinks: whether it marks thoughts before its answer.
    """

    tools: ToolUse
    style: ToolFormat | None
    thinks: bool

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """Special tokens that must show in the text."""
        marks = (REASONING_START, REASONING_END) if self.thinks else ()
        return (*marks, *(VISIBLE_TOKENS[self.style] if self.style is not None else ()))

    def parser(
        self, generator: TextGenerator, prepared: PreparedGeneration
    ) -> AnswerParser | PlainAnswer:
        """Return a parser for one answer to a prompt."""
        if self.tools.name is not None:
            return AnswerParser(partial(read_forced_call, name=self.tools.name))
        if self.tools.must_call:
            return AnswerParser(read_forced_calls, max_calls=self.tools.max_calls)
        if not self.thinks and self.style is None:
            return PlainAnswer()
        reader = partial(self._read, is_inside=self.thinks and _opens_thoughts(generator, prepared))
        return AnswerParser(reader, max_calls=self.tools.max_calls)

    def counter(
        self, generator: TextGenerator, prepared: PreparedGeneration
    ) -> ReasoningCounter | None:
        """Return what counts the thoughts of one answer; None if nothing can."""
        tokenizer = generator.tokenizer
        marks = [
            tokenizer.encode(mark, parse_special=True) for mark in (REASONING_START, REASONING_END)
        ]
        match marks:
            case [[start_id], [end_id]] if self.thinks:
                return ReasoningCounter(
                    start_id,
                    end_id,
                    is_inside=_opens_thoughts(generator, prepared),
                    token_bytes=tokenizer.token_bytes,
                )
            case _:
                return None

    def _read(self, source: CharSource, sink: PartSink, *, is_inside: bool) -> Reader[None]:
        if self.thinks:
            yield from read_reasoning(source, sink, is_inside=is_inside)
        if self.style is None:
            yield from read_plain(source, sink)
        else:
            schemas = {
                function.name: function.parameters or {} for function in self.tools.functions
            }
            yield from read_answer(source, sink, style=self.style, tools=schemas)


def tool_use(
    tools: Sequence[ToolBody] | None,
    choice: str | ToolChoiceBody | None,
    *,
    parallel: bool | None,
) -> ToolUse:
    """Check the tools of a request.

    Raises:
        InvalidRequest: naming the field at fault.
    """
    functions = tuple(_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()))
    if len(functions) > MAX_TOOLS:
        raise InvalidRequest(f"tools may hold at most {MAX_TOOLS} tools", param="tools")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools holds two functions of the same name", param="tools")
    max_calls = 1 if parallel is False else None
    match choice:
        case None | "auto":
            return ToolUse(functions=functions, max_calls=max_calls)
        case "none":
            # The best way to have no call is not to tell of tools.
            return ToolUse()
        case "required" | ToolChoiceBody(type="function"):
            if not functions:
                raise InvalidRequest("tool_choice needs tools", param="tool_choice")
            if not isinstance(choice, ToolChoiceBody):
                return ToolUse(functions=functions, max_calls=max_calls, must_call=True)
            if choice.function is None or choice.function.name not in names:
                raise InvalidRequest(
                    "tool_choice must name one of the tools", param="tool_choice.function.name"
                )
            return ToolUse(
                functions=functions, max_calls=1, must_call=True, name=choice.function.name
            )
        case _:
            raise InvalidRequest(
                "tool_choice must be 'none', 'auto', 'required' or a function", param="tool_choice"
            )


def check_num_calls(messages: Sequence[ChatMessage], param: str) -> None:
    """Refuse a conversation with more calls than anybody should have to write down.

    Args:
        messages: the conversation.
        param: what the client calls it.

    Raises:
        InvalidRequest: it has more.
    """
    if sum(len(message.tool_calls) for message in messages) > MAX_CALLS:
        raise InvalidRequest(f"{param} may hold at most {MAX_CALLS} calls of tools", param=param)


def answer_reading(
    tools: ToolUse, generator: TextGenerator, config: GatewayConfig
) -> AnswerReading:
    """Decide how to read answers of this model.

    Raises:
        InvalidRequest: there are tools, and nobody knows how this model calls them.
    """
    template = generator.chat_template
    source = "" if template is None else template.source
    style: ToolFormat | None = None
    if tools.functions:
        style = tool_format(config.tool_call_parser, source)
        if style is None and (template is None or not template.renders_tools):
            style = "hermes"  # as `gateway.tool_prompt` tells it to
        if style is None and not tools.must_call:
            raise InvalidRequest(
                "the calls of this model are of an unknown format; "
                "the server's --tool-call-parser names those that are known",
                param="tools",
                code="unsupported_parameter",
            )
    # Where a call is forced, it begins at once.
    thinks = not tools.must_call and reasoning_format(config.reasoning_parser, source) == "think"
    return AnswerReading(tools=tools, style=style, thinks=thinks)


def new_call_id(style: ToolFormat | None) -> str:
    """Return a fresh id for a call; Mistral's templates accept nothing but nine characters."""
    unique = uuid.uuid4().hex
    return unique[:9] if style == "mistral" else f"call_{unique[:24]}"


def _function(tool: ToolBody, path: str) -> FunctionBody:
    if tool.type != "function":
        raise InvalidRequest(
            f"{path}.type: tools of type '{tool.type[:40]}' are not supported",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    if tool.function is None:
        raise InvalidRequest(f"{path}.function is required", param=f"{path}.function")
    if not NAME.fullmatch(tool.function.name):
        raise InvalidRequest(
            f"{path}.function.name must have 1 to 64 letters, digits, '_', '-' or '.'",
            param=f"{path}.function.name",
        )
    if not _is_shallow(tool.function.parameters):
        raise InvalidRequest(
            f"{path}.function.parameters is nested more than {MAX_DEPTH} deep",
            param=f"{path}.function.parameters",
        )
    return tool.function


def _is_shallow(value: object, depth: int = 0) -> bool:
    if depth > MAX_DEPTH:
        return False
    inner: Sequence[object] = ()
    if isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list):
        inner = value
    return all(_is_shallow(item, depth + 1) for item in inner)


def _definition(function: FunctionBody) -> ToolDefinition:
    described: dict[str, object] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    if function.parameters is not None:
        described["parameters"] = function.parameters
    return {"type": "function", "function": described}


def _opens_thoughts(generator: TextGenerator, prepared: PreparedGeneration) -> bool:
    tail = prepared.prompt_token_ids[-MARK_TOKENS:]
    text = generator.tokenizer.decode(tail, skip_special=False)
    return text.rstrip().endswith(REASONING_START)
