import re

import pytest

from fakes import IM_START, ByteChatTemplate, FakeEngine, byte_tokenizer
from gateway.config import GatewayConfig
from gateway.errors import InvalidRequest
from gateway.generation import GenerationRequest
from gateway.json_body import convert
from gateway.openai.protocol import ToolBody, ToolChoiceBody
from gateway.openai.tool_parsers import (
    CallArguments,
    CallStart,
    PlainAnswer,
    ReasoningText,
    ReplyText,
)
from gateway.openai.tools import (
    MAX_CALLS,
    ToolUse,
    answer_reading,
    check_num_calls,
    new_call_id,
    tool_use,
)
from gateway.text_codec import ChatMessage, MessageCall

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {"type": "function", "function": {"name": "g", "description": "Gets g.", "strict": True}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


class Template(ByteChatTemplate):
    def __init__(self, source, *, renders_tools=True):
        self.source = source
        self.renders_tools = renders_tools


class Generator:
    """Only what the reading of answers asks of a TextGenerator."""

    def __init__(self, template):
        self.chat_template = template
        self.tokenizer = byte_tokenizer()


def use(tools, choice=None, parallel=None):
    choice = convert(choice, ToolChoiceBody) if isinstance(choice, dict) else choice
    return tool_use(convert(tools, list[ToolBody]), choice, parallel=parallel)


def reading_of(source, tools=(F,), *, renders_tools=True, **config):
    generator = Generator(Template(source, renders_tools=renders_tools))
    return answer_reading(use(list(tools)), generator, GatewayConfig(**config))


def test_definitions_are_what_templates_know():
    assert use([F, G]).definitions == (
        F,
        {"type": "function", "function": {"name": "g", "description": "Gets g."}},
    )


def test_no_tools_are_no_use():
    assert tool_use(None, None, parallel=None) == tool_use([], "auto", parallel=True) == ToolUse()


def test_without_parallel_calls_there_is_one():
    assert use([F], "auto", parallel=False).max_calls == 1
    assert use([F], "auto", parallel=True).max_calls is None


def test_a_call_that_is_forced_has_a_structure():
    assert use([F, G]).structure is None
    named = use([F, G], {"type": "function", "function": {"name": "f"}})
    assert (named.name, named.max_calls) == ("f", 1)
    assert named.structure.param == "tools[0].function.parameters"
    assert use([F, G], "required").structure.param == "tools"


async def test_a_forced_call_begins_at_once(make_generator):
    prepared = await prepared_by(make_generator, "Hi<think>\n")
    for choice, answer in (
        ({"type": "function", "function": {"name": "f"}}, "{}"),
        ("required", '[{"name": "f", "arguments": {}}]'),
    ):
        generator = Generator(Template("</think> <function="))
        reading = answer_reading(use([F], choice), generator, GatewayConfig())
        parser = reading.parser(generator, prepared)
        assert parser.push(answer) == [CallStart(0, "f"), CallArguments(0, "{}")]


def test_tools_that_must_not_be_called_are_not_told():
    assert use([F], "none") == ToolUse()


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "web_search"}], None, "tools[0].type"),
        ([F, {"type": "function"}], None, "tools[1].function"),
        ([F, F], None, "tools"),
        ([F] * 200, None, "tools"),
        ([{"type": "function", "function": {"name": ""}}], None, "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools[0].function.name"),
        ([], "required", "tool_choice"),
        ([F], "sometimes", "tool_choice"),
        ([F], {"type": "allowed_tools"}, "tool_choice"),
        ([F], {"type": "function"}, "tool_choice.function.name"),
        ([F], {"type": "function", "function": {"name": "g"}}, "tool_choice.function.name"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tools, choice, param):
    with pytest.raises(InvalidRequest) as caught:
        use(tools, choice)
    assert caught.value.param == param


def test_parameters_may_not_be_nested_without_end():
    schema = {}
    for _ in range(100):
        schema = {"items": [schema]}
    with pytest.raises(InvalidRequest) as caught:
        use([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert caught.value.param == "tools[0].function.parameters"


def test_the_format_is_the_templates_unless_the_operator_says_otherwise():
    assert reading_of("<tool_call>").style == "hermes"
    assert reading_of("[TOOL_CALLS]").style == "mistral"
    assert reading_of("<tool_call>\n<function=").style == "qwen3_xml"
    assert reading_of("[TOOL_CALLS]", tool_call_parser="llama3_json").style == "llama3_json"
    assert reading_of("", renders_tools=False).style == "hermes"
    with pytest.raises(InvalidRequest) as caught:
        reading_of("<|tool_calls_section_begin|>")
    assert caught.value.param == "tools"


def test_the_marks_of_calls_and_thoughts_are_made_visible():
    assert reading_of("[TOOL_CALLS]").visible_tokens == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    assert reading_of("</think>", tools=()).visible_tokens == ("<think>", "</think>")
    assert reading_of("", tools=()).visible_tokens == ()


async def prepared_by(make_generator, prompt):
    generator = make_generator(FakeEngine())
    return await generator.prepare(GenerationRequest(prompt=prompt))


async def test_an_answer_is_taken_apart_as_the_model_writes_it(make_generator):
    prepared = await prepared_by(make_generator, "Hi")
    reading = reading_of("<tool_call> </think>")
    parser = reading.parser(Generator(None), prepared)
    assert parser.push(f"<think>Hm</think>Yes {CALL}") == [
        ReasoningText("Hm"),
        ReplyText("Yes"),
        CallStart(0, "f"),
        CallArguments(0, "{}"),
    ]


async def test_thoughts_that_the_prompt_opens_are_thoughts(make_generator):
    prepared = await prepared_by(make_generator, "Hi<think>\n")
    parser = reading_of("</think>", tools=()).parser(Generator(None), prepared)
    assert parser.push("Hm</think>Yes") == [ReasoningText("Hm"), ReplyText("Yes")]


async def test_without_tools_and_thoughts_nothing_is_parsed(make_generator):
    prepared = await prepared_by(make_generator, "Hi<think>\n")
    reading = reading_of("</think> <tool_call>", tools=(), reasoning_parser="none")
    assert isinstance(reading.parser(Generator(None), prepared), PlainAnswer)
    assert reading.counter(Generator(None), prepared) is None


async def test_thoughts_are_counted_where_a_mark_is_a_token(make_generator):
    prepared = await prepared_by(make_generator, "Hi")
    reading = reading_of("</think>", tools=())
    assert reading.counter(Generator(None), prepared) is None  # of bytes

    class Marks:
        def encode(self, text, *, parse_special):
            return [IM_START if text == "<think>" else 256]

        def decode(self, ids, *, skip_special):
            return "Hi"

        def token_bytes(self, token_id):
            return bytes([token_id]) if token_id < 256 else b""

    generator = Generator(None)
    generator.tokenizer = Marks()
    counter = reading.counter(generator, prepared)
    assert counter.count([10, IM_START, 65]) == 2
    assert counter.count([66, 256, 67, IM_START]) == 2
    assert reading.counter(generator, prepared).count([65, IM_START, 66, 256]) == 0


def test_ids_of_calls_are_fresh_and_as_the_template_wants_them():
    assert re.fullmatch(r"call_[0-9a-f]{24}", new_call_id("hermes"))
    assert re.fullmatch(r"[0-9a-f]{9}", new_call_id("mistral"))
    assert new_call_id("hermes") != new_call_id("hermes")


def test_a_conversation_holds_only_so_many_calls():
    call = MessageCall(id="1", name="f", arguments="{}")
    full = ChatMessage(role="assistant", content="", tool_calls=(call,) * MAX_CALLS)
    check_num_calls([full], "messages")
    one_more = ChatMessage(role="assistant", content="", tool_calls=(call,))
    with pytest.raises(InvalidRequest, match="at most 4096 calls") as caught:
        check_num_calls([full, one_more], "input")
    assert caught.value.param == "input"
