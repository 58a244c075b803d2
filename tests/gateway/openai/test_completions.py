import asyncio
import threading

import pytest

from connections import posted
from fakes import ByteTokenizer, FakeEngine, fake_answer

URL = "/v1/completions"


async def complete(gateway, **body):
    status, answer = await gateway.post(URL, {"model": "tiny", "max_tokens": 4, **body})
    assert status == 200, answer
    return answer


async def refused(gateway, **body):
    status, answer = await gateway.post(URL, {"prompt": "Hi!", **body})
    assert status == 400, answer
    return answer["error"]


async def test_a_text_is_continued(gateway):
    answer = await complete(gateway, prompt="Hi!")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "defg", "length")
    assert choice["logprobs"] is None
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "sizes"),
    [
        ([1, 2, 3], [3]),
        (["a", "bc"], [1, 2]),
        ([[1], [2, 3]], [1, 2]),
        (["a"], [1]),
    ],
)
async def test_a_prompt_may_be_ids_or_several_texts_or_lists_of_ids(gateway, prompt, sizes):
    answer = await complete(gateway, prompt=prompt)
    assert [c["text"] for c in answer["choices"]] == [fake_answer(size, 4) for size in sizes]
    assert [c["index"] for c in answer["choices"]] == list(range(len(sizes)))
    assert answer["usage"]["prompt_tokens"] == sum(sizes)


async def test_choices_of_several_prompts_come_prompt_by_prompt(gateway):
    answer = await complete(gateway, prompt=["a", "bc"], n=2)
    assert [c["text"] for c in answer["choices"]] == ["bcde", "bcde", "cdef", "cdef"]
    assert answer["usage"]["prompt_tokens"] == 3  # a prompt counts once
    assert answer["usage"]["completion_tokens"] == 16


async def test_cached_tokens_are_those_of_the_first_choice_of_each_prompt(gateway):
    gateway.engine.num_cached_tokens = 5
    answer = await complete(gateway, prompt=["a", "bc"], n=2)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 10}


async def test_a_seed_is_counted_up_over_the_choices(gateway):
    await complete(gateway, prompt="x", n=3, seed=2**64 - 2)
    seeds = [params.seed for _, params in gateway.engine.submitted]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]


async def test_a_stop_string_is_named_and_ends_the_text(gateway):
    answer = await complete(gateway, prompt="Hi!", stop="fg")
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("de", "stop", "fg")
    assert answer["usage"]["completion_tokens"] == 4


async def test_eos_is_not_shown(gateway):
    gateway.engine.script("Hi!", "ok")
    answer = await complete(gateway, prompt="Hi!")
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ok", "stop", None)
    assert answer["usage"]["completion_tokens"] == 3


async def test_the_timing_of_each_choice_is_told(gateway):
    [choice] = (await complete(gateway, prompt="Hi!"))["choices"]
    assert choice["timing"]["queue_s"] == 0
    assert choice["timing"]["ttft_s"] == pytest.approx(0.01)
    assert choice["timing"]["itl_p99_s"] == pytest.approx(0.01)
    assert choice["timing"]["num_preemptions"] == 0


async def test_every_optional_field_may_be_null(gateway):
    fields = [
        *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "n", "seed"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "cache_salt"),
        *("stream", "stream_options", "model", "logprobs", "echo", "suffix", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "best_of", "user", "response_format"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
        *("repetition_penalty", "bad_words", "allowed_token_ids", "return_token_ids"),
        *("priority", "tenant", "queue_timeout", "deadline"),
    ]
    gateway.engine.script_all("ok")
    await complete(gateway, prompt="x", **dict.fromkeys(fields))


async def test_neutral_values_and_unknown_fields_pass(gateway):
    await complete(
        gateway,
        prompt="x",
        echo=False,
        best_of=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        response_format={"type": "text"},
        suffix="",
        user="me",
        never_heard_of={"a": [1]},
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": True}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(gateway, body, param):
    error = await refused(gateway, **body)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert "not supported" in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": [10**40]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"presence_penalty": False}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": True}, "repetition_penalty"),
        ({"logit_bias": {"259": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 300 + [5]}, "bad_words[300]"),
        ({"allowed_token_ids": [5, 259]}, "allowed_token_ids"),
        ({"return_token_ids": 1}, "return_token_ids"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 5_000_000}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": True}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 999999}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop_token_ids": [259]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": "yes"}, "stream"),
        ({"model": 5}, "model"),
        ({"priority": 2**31}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "x" * 65}, "tenant"),
        ({"tenant": "a\nb"}, "tenant"),
        ({"tenant": 7}, "tenant"),
        ({"queue_timeout": 0}, "queue_timeout"),
        ({"queue_timeout": 86_401}, "queue_timeout"),
        ({"queue_timeout": "soon"}, "queue_timeout"),
        ({"deadline": -1}, "deadline"),
        ({"deadline": True}, "deadline"),
    ],
)
async def test_bad_values_are_refused_by_name(gateway, body, param):
    error = await refused(gateway, **body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert gateway.engine.submitted == []


async def test_too_many_choices_over_all_prompts_are_refused(start_gateway):
    gateway = await start_gateway(max_choices=3)
    assert (await refused(gateway, prompt=["a", "b"], n=2))["param"] == "n"
    assert (await refused(gateway, prompt=["a"] * 4))["param"] == "prompt"


async def test_an_unknown_model_is_status_404(gateway):
    status, answer = await gateway.post(URL, {"model": "../../etc/passwd", "prompt": "x"})
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"


class NoTokenizer(ByteTokenizer):
    """Fails a test in which anything is tokenized."""

    def encode(self, text, **options):
        raise AssertionError("tokenized in vain")


@pytest.mark.parametrize("body", [{"prompt": "x", "n": 3}, {"prompt": ["x", "y", "z"]}])
async def test_a_full_queue_is_status_429_tokenizes_nothing_and_starts_none(start_gateway, body):
    gateway = await start_gateway(FakeEngine(max_num_queued_requests=2), tokenizer=NoTokenizer())
    async with gateway.session.post(URL, json={**body, "stream": True}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "3"
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "queued_requests")
    assert gateway.engine.submitted == []


async def test_a_queue_that_is_full_for_one_tenant_tokenizes_nothing_of_it(start_gateway):
    gateway = await start_gateway(tokenizer=NoTokenizer())
    gateway.engine.full_for = {"alice"}
    status, _ = await gateway.post(URL, {"prompt": ["x", "y"], "tenant": "alice"})
    assert status == 429


@pytest.mark.parametrize("reason", ["queued_tokens", "queue_timeout"])
async def test_a_refusal_by_the_backlog_names_its_reason(gateway, reason):
    gateway.engine.refuse(reason, retry_after_s=0.2)
    async with gateway.session.post(URL, json={"prompt": ["x", "y"]}) as response:
        assert response.status == 429
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == reason


async def test_scheduling_fields_reach_the_engine(gateway):
    fields = {"priority": -7, "tenant": "alice", "queue_timeout": 1.5, "deadline": 60}
    await complete(gateway, prompt=["x", "y"], cache_salt="salt", **fields)
    for request in gateway.engine.requests:
        assert (request.tenant, request.priority, request.cache_salt) == ("alice", -7, "salt")
        assert (request.queue_timeout_s, request.deadline_s) == (1.5, 60)


@pytest.mark.parametrize(
    ("headers", "tenant"),
    [
        ({"Authorization": "Bearer abc"}, "ba7816bf8f01cfea"),  # of its SHA-256
        ({"Authorization": "Basic abc"}, ""),
        ({}, ""),
    ],
)
async def test_who_names_no_tenant_is_known_by_the_key(gateway, headers, tenant):
    body = {"prompt": "x", "max_tokens": 1}
    async with gateway.session.post(URL, json=body, headers=headers) as response:
        assert response.status == 200
    assert [request.tenant for request in gateway.engine.requests] == [tenant]


async def test_a_dead_engine_is_status_503(gateway):
    gateway.engine.die()
    status, answer = await gateway.post(URL, {"prompt": "x"})
    assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")


async def test_a_failed_step_is_status_500_without_a_trace(gateway):
    gateway.engine.hold()
    task = asyncio.create_task(gateway.post(URL, {"prompt": "x", "n": 2}))
    await gateway.engine.wait_for_requests(2)
    gateway.engine.fail_requests("the step failed at /root/x/y.py")
    status, answer = await task
    assert (status, answer["error"]["message"]) == (500, "the step failed at <path>")
    assert gateway.engine.num_active == 0


async def test_health_answers_while_a_huge_prompt_is_tokenized(start_gateway):
    tokenizer = GatedTokenizer()
    gateway = await start_gateway(FakeEngine(max_model_len=10_000_000), tokenizer=tokenizer)
    task = asyncio.create_task(complete(gateway, prompt="x" * 5_000_000))
    await asyncio.to_thread(tokenizer.entered.wait)
    assert (await gateway.get("/health"))[0] == 200
    assert not task.done()
    tokenizer.gate.set()
    assert (await task)["usage"]["prompt_tokens"] == 5_000_000


class GatedTokenizer(ByteTokenizer):
    """Blocks its thread in `encode` until the gate opens."""

    def __init__(self):
        super().__init__()
        self.gate = threading.Event()
        self.entered = threading.Event()

    def encode(self, text, **options):
        self.entered.set()
        self.gate.wait(10)  # so that a failing test does not hang at exit
        return super().encode(text, **options)


async def test_a_client_that_leaves_while_its_prompt_is_tokenized_submits_nothing(start_gateway):
    tokenizer = GatedTokenizer()
    gateway = await start_gateway(tokenizer=tokenizer)
    async with posted(gateway.server.port, {"prompt": "x"}):
        await asyncio.to_thread(tokenizer.entered.wait)
    tokenizer.gate.set()
    await complete(gateway, prompt="yy")
    assert [prompt for prompt, _ in gateway.engine.submitted] == [tuple(b"yy")]


async def test_requests_with_the_same_client_id_do_not_mix(gateway):
    headers = {"X-Request-Id": "a"}

    async def ask(prompt):
        body = {"prompt": prompt, "max_tokens": 3}
        async with gateway.session.post(URL, json=body, headers=headers) as response:
            return (await response.json())["choices"][0]["text"]

    assert await asyncio.gather(ask("x"), ask("xx")) == [fake_answer(1, 3), fake_answer(2, 3)]
