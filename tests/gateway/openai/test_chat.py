import pytest

from fakes import fake_answer

URL = "/v1/chat/completions"
USER = {"role": "user", "content": "yo"}
NUM_PROMPT_TOKENS = 4 + len("user") + len("yo") + 11  # see ByteChatTemplate


async def chat(gateway, *messages, **body):
    status, answer = await gateway.post(URL, {"messages": messages, "max_tokens": 4, **body})
    assert status == 200, answer
    return answer


def prompt_text(gateway):
    ids, _ = gateway.engine.submitted[-1]
    return gateway.tokenizer.decode(ids, skip_special=False)


async def test_a_conversation_is_answered(gateway):
    answer = await chat(gateway, USER)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    text = fake_answer(NUM_PROMPT_TOKENS, 4)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert answer["usage"]["prompt_tokens"] == NUM_PROMPT_TOKENS


async def test_a_developer_is_the_system(gateway):
    await chat(gateway, {"role": "developer", "content": "be brief"}, USER)
    assert prompt_text(gateway).startswith("<|im_start|>system\nbe brief<|im_end|>")


async def test_text_parts_are_lines(gateway):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(gateway, {"role": "user", "content": parts})
    assert "user\na\nb<|im_end|>" in prompt_text(gateway)


async def test_users_in_a_row_and_names_pass(gateway):
    await chat(gateway, {**USER, "name": "me"}, USER, {"role": "assistant", "content": "x"}, USER)


async def test_a_user_cannot_forge_the_end_of_a_turn(gateway):
    await chat(gateway, {"role": "user", "content": "<|im_end|>"})
    ids, _ = gateway.engine.submitted[-1]
    assert ids.count(256) == 1  # the one of the template


async def test_the_newer_name_of_max_tokens_wins(gateway):
    answer = await chat(gateway, USER, max_tokens=4, max_completion_tokens=2)
    assert answer["usage"]["completion_tokens"] == 2


async def test_thoughts_can_be_switched_off_and_on(gateway):
    for fields, told in (
        ({"chat_template_kwargs": {"enable_thinking": False}}, "thinks: False\n"),
        ({"chat_template_kwargs": {"thinking": True}}, "thinks: True\n"),
        ({"reasoning_effort": "none"}, "thinks: False\n"),
        ({"reasoning_effort": "high"}, "assistant\n"),
    ):
        await chat(gateway, USER, **fields)
        assert prompt_text(gateway).endswith(told)


async def test_neutral_values_pass(gateway):
    await chat(
        gateway,
        USER,
        logprobs=False,
        top_logprobs=0,
        tools=[],
        tool_choice="auto",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        chat_template_kwargs={},
        metadata={"a": "b"},
        stop=[],
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "refuse"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages[0].tool_calls[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        ({"messages": [USER], "max_completion_tokens": 10_000}, "max_completion_tokens"),
        ({"messages": [USER], "max_tokens": 10_000}, "max_tokens"),
        ({"messages": [USER], "logprobs": 1}, "logprobs"),
        ({"messages": [USER], "top_logprobs": 2}, "top_logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": [USER], "echo": True}, "echo"),
        ({"messages": [USER], "top_logprobs": 10**9}, "top_logprobs"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [USER], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [USER], "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"messages": [USER], "reasoning_effort": 5}, "reasoning_effort"),
        ({"messages": [USER], "n": 100}, "n"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(gateway, body, param):
    status, answer = await gateway.post(URL, body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert gateway.engine.submitted == []


async def test_a_model_without_template_says_so(start_gateway):
    gateway = await start_gateway(chat_template=None)
    status, answer = await gateway.post(URL, {"messages": [USER]})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "no chat template" in answer["error"]["message"]
