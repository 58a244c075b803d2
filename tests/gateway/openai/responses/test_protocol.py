import msgspec
import pytest

from gateway.openai.responses.protocol import (
    CallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningPart,
    ResponsesBody,
)


def test_each_item_says_what_it_is():
    text, thought = OutputText(text="a"), ReasoningPart(text="b")
    items = [
        MessageItem(id="1", status="completed", content=(text,)),
        ReasoningItem(id="2", status="completed", content=(thought,)),
        CallItem(id="3", call_id="4", name="f", arguments="{}", status="completed"),
    ]
    assert msgspec.json.decode(msgspec.json.encode(items)) == [
        {
            "type": "message",
            "id": "1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
        },
        {
            "type": "reasoning",
            "id": "2",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "b"}],
        },
        {
            "type": "function_call",
            "id": "3",
            "call_id": "4",
            "name": "f",
            "arguments": "{}",
            "status": "completed",
        },
    ]


def test_every_optional_field_accepts_null_and_unknown_ones_are_ignored():
    nulls = dict.fromkeys(ResponsesBody.__struct_fields__)
    assert msgspec.convert({**nulls, "whatever": 1}, ResponsesBody) == ResponsesBody()


@pytest.mark.parametrize("field", ["store", "input", "tools", "metadata", "max_output_tokens"])
def test_wrong_types_are_refused(field):
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.convert({field: 1.5}, ResponsesBody)
