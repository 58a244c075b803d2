from dataclasses import replace

import pytest

from gateway.errors import InvalidRequest
from gateway.json_body import convert
from gateway.openai.responses import items
from gateway.openai.responses.items import input_messages, output_messages
from gateway.openai.responses.protocol import (
    CallItem,
    InputItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningPart,
)
from gateway.text_codec import ChatMessage, MessageCall

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
OTHER_CALL = {**CALL, "call_id": "2", "name": "g"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "sun"}


def messages(*given):
    return input_messages(convert(list(given), list[InputItem]))


def user(content):
    return ChatMessage(role="user", content=content)


def assistant(content="", *calls, **fields):
    return ChatMessage(role="assistant", content=content, tool_calls=calls, **fields)


F, G = MessageCall(id="1", name="f", arguments="{}"), MessageCall(id="2", name="g", arguments="{}")


def test_a_text_is_a_user_message():
    assert input_messages("Hi") == (user("Hi"),)


def test_messages_of_each_role_with_text_or_parts():
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert messages(
        {"role": "developer", "content": "x"},
        {"type": "message", "role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
    ) == (ChatMessage(role="system", content="x"), user("a\nb"), assistant("c"))


def test_thoughts_text_and_calls_of_one_turn_are_one_message():
    thoughts = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    text = {"role": "assistant", "content": "I look."}
    assert messages({"role": "user", "content": "?"}, thoughts, text, CALL, OTHER_CALL, OUTPUT) == (
        user("?"),
        assistant("I look.", F, G, reasoning="Hm."),
        ChatMessage(role="tool", content="sun", tool_call_id="1"),
    )


def test_two_turns_stay_two():
    first, second = ({"role": "assistant", "content": text} for text in "ab")
    assert messages(first, second) == (assistant("a"), assistant("b"))
    assert messages(CALL, first) == (assistant("", F), assistant("a"))


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "wizard", "content": "x"}, "input[0].role"),
        ({"content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        ({**CALL, "name": None}, "input[0].name"),
        ({**CALL, "call_id": ""}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "1"}, "input[0].output"),
        ({"type": "function_call_output", "output": "x"}, "input[0].call_id"),
        ({"type": "item_reference", "id": "x"}, "input[0].type"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_path(item, param):
    with pytest.raises(InvalidRequest) as caught:
        messages(item)
    assert caught.value.param == param


def test_an_answer_becomes_the_message_that_it_would_be_as_input():
    answered = [
        ReasoningItem(id="r", status="completed", content=(ReasoningPart(text="Hm."),)),
        MessageItem(id="m", status="completed", content=(OutputText(text="I look."),)),
        CallItem(id="c", call_id="1", name="f", arguments="{}", status="completed"),
        CallItem(id="d", call_id="2", name="g", arguments="{}", status="completed"),
    ]
    assert output_messages(answered) == (assistant("I look.", F, G, reasoning="Hm."),)
    assert output_messages([]) == ()


def test_many_calls_of_one_turn_are_joined_at_once(monkeypatch):
    num_copies = 0

    def counted(message, **fields):
        nonlocal num_copies
        num_copies += 1
        return replace(message, **fields)

    monkeypatch.setattr(items, "replace", counted)
    [message] = messages(*[CALL] * 2000)
    assert message.tool_calls == (F,) * 2000
    assert num_copies == 1


def test_thoughts_begin_a_turn_and_calls_go_on_with_it():
    thoughts = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    assert messages(CALL, thoughts, OTHER_CALL) == (
        assistant("", F),
        assistant("", G, reasoning="Hm."),
    )
