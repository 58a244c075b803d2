import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InternalError, Overloaded
from gateway.generation import TextFinish, Timing, Usage
from gateway.openai.responses.builder import ResponseBuilder
from gateway.openai.responses.protocol import ReasoningOptions, ResponseObject, TextOptions
from gateway.openai.tool_parsers import CallArguments, CallStart, ReasoningText, ReplyText

TIMING = Timing(
    queue_s=0,
    ttft_s=None,
    prefill_s=0,
    decode_s=0,
    e2e_s=0,
    itl_mean_s=None,
    itl_p50_s=None,
    itl_p99_s=None,
    itl_max_s=None,
    num_preemptions=0,
)


def builder():
    return ResponseBuilder(
        ResponseObject(
            id="resp_1",
            created_at=1,
            status="in_progress",
            background=False,
            instructions=None,
            max_output_tokens=None,
            max_tool_calls=None,
            metadata={},
            model="m",
            output=(),
            parallel_tool_calls=True,
            previous_response_id=None,
            reasoning=ReasoningOptions(),
            store=True,
            temperature=1.0,
            text=TextOptions(),
            tool_choice="auto",
            tools=(),
            top_p=1.0,
        )
    )


def finish(reason="stop"):
    usage = Usage(prompt_tokens=3, completion_tokens=5, cached_tokens=2)
    stop_reason = None
    if reason == "dead_end":
        reason, stop_reason = "length", "dead_end"
    return TextFinish(reason=reason, stop_reason=stop_reason, usage=usage, timing=TIMING)


def build(*batches, reason="stop", **options):
    """All events of an answer that came in these batches, as a client reads them."""
    b = builder()
    events = b.start()
    for parts in batches:
        ids = [f"call_{part.index}" for part in parts if isinstance(part, CallStart)]
        events += b.add(parts, call_ids=ids)
    events += b.finish(finish(reason), reasoning_tokens=1, **options)
    return msgspec.json.decode(msgspec.json.encode(events))


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_has_the_events_that_clients_know():
    events = build([ReplyText("a")], [ReplyText("b")])
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    item_id = events[2]["item"]["id"]
    assert events[2]["item"] == {
        "type": "message",
        "id": item_id,
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
    assert events[4] == {
        "type": "response.output_text.delta",
        "sequence_number": 4,
        "item_id": item_id,
        "output_index": 0,
        "content_index": 0,
        "delta": "a",
        "logprobs": [],
    }
    assert events[6]["text"] == events[7]["part"]["text"] == "ab"
    assert events[9]["response"]["output"] == [events[8]["item"]]
    assert events[9]["response"]["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
    }


def test_thoughts_text_and_calls_are_items_in_their_order():
    events = build(
        [ReasoningText("Hm"), ReplyText("I look."), CallStart(0, "f")],
        [CallArguments(0, "{"), CallArguments(0, "}"), CallStart(1, "g"), CallArguments(1, "{}")],
    )
    assert kinds(events)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert (output[2]["call_id"], output[2]["name"], output[2]["arguments"]) == (
        "call_0",
        "f",
        "{}",
    )
    assert len({item["id"] for item in output}) == 4


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", {"reason": "max_output_tokens"}),
        ("dead_end", "incomplete", {"reason": "dead_end"}),
        ("deadline", "incomplete", {"reason": "deadline"}),
        ("cancelled", "cancelled", None),
    ],
)
def test_each_end_has_its_status(reason, status, details):
    events = build([ReplyText("a")], reason=reason)
    assert kinds(events)[-1] == status
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"]) == (status, details)
    expected = "completed" if status == "completed" else "incomplete"
    assert response["output"][0]["status"] == expected


def test_an_answer_of_no_words_is_a_message_without_words():
    [item] = build()[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    assert build(may_be_empty=True)[-1]["response"]["output"] == []
    assert build(reason="cancelled")[-1]["response"]["output"] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InternalError("the step failed"), "server_error"),
        (Overloaded("x", retry_after_s=1), "rate_limit_exceeded"),
    ],
)
def test_a_failure_closes_what_is_open(error, code):
    b = builder()
    b.start()
    b.add([ReplyText("a")], call_ids=[])
    events = b.fail(error)
    assert kinds(events) == ["output_text.done", "content_part.done", "output_item.done", "failed"]
    assert b.response.error.code == code
    assert b.response.output[0].status == "incomplete"


def test_what_was_told_does_not_change_later():
    b = builder()
    [created, _] = b.start()
    [added, *_] = b.add([ReplyText("a")], call_ids=[])
    b.finish(finish(), reasoning_tokens=0)
    assert created["response"].status == "in_progress"
    assert added["item"].content == ()


PARTS = st.lists(
    st.one_of(
        st.builds(ReplyText, st.text(min_size=1, max_size=3)),
        st.builds(ReasoningText, st.text(min_size=1, max_size=3)),
    ),
    max_size=6,
)


@given(st.lists(PARTS, max_size=5))
def test_deltas_make_up_the_items_and_numbers_have_no_gap(batches):
    events = build(*batches)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts = {}
    for event in events:
        if event["type"].endswith("_text.delta"):
            texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
    output = events[-1]["response"]["output"]
    assert [item["content"][0]["text"] for item in output] == (list(texts.values()) or [""])
