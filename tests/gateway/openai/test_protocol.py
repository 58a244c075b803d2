import msgspec
import pytest

from gateway.openai.protocol import (
    ChatBody,
    ChatDelta,
    ChatDeltaChoice,
    CompletionBody,
    CompletionChoice,
    Envelope,
    PromptTokensDetails,
    UsageBody,
)


@pytest.mark.parametrize(
    ("body_type", "required"), [(CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": []})]
)
def test_every_optional_field_accepts_null(body_type, required):
    names = set(body_type.__struct_fields__) - set(required)
    body = msgspec.convert({**required, **dict.fromkeys(names)}, body_type)
    assert {getattr(body, name) for name in names} == {None}


def test_an_unfinished_choice_has_null_for_its_reason_and_nothing_of_ours():
    choice = ChatDeltaChoice(index=0, delta=ChatDelta(content="x"))
    assert msgspec.to_builtins(choice) == {
        "index": 0,
        "logprobs": None,
        "finish_reason": None,
        "delta": {"content": "x"},
    }


def test_a_finished_choice_tells_its_stop_reason_even_if_it_is_null():
    choice = CompletionChoice(index=0, text="", finish_reason="stop", stop_reason=None)
    assert msgspec.to_builtins(choice)["stop_reason"] is None


def test_usage_can_be_absent_null_or_there():
    def envelope(**fields):
        made = Envelope(id="x", object="o", created=1, model="m", choices=(), **fields)
        return msgspec.to_builtins(made)

    assert "usage" not in envelope()
    assert envelope(usage=None)["usage"] is None
    usage = UsageBody(1, 2, 3, PromptTokensDetails(0))
    assert envelope(usage=usage)["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
