import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fakes import EOS, STEP_S, FakeEngine, fake_answer
from gateway.generation import GenerationRequest
from generating import counted, finished, generate, joined
from jaxengine.outputs import FinishReason as EngineFinish


async def test_an_answer_is_the_text_of_its_tokens(make_generator):
    deltas, last = await generate(make_generator(), "Hi!", max_tokens=5)
    assert joined(deltas, last) == fake_answer(3, 5) == "defgh"
    assert (last.finish.reason, last.finish.stop_reason) == ("length", None)


async def test_eos_ends_the_answer_without_text_and_counts_as_a_token(make_generator):
    generator = make_generator()
    generator.engine.script("Hi!", "ok")
    deltas, last = await generate(generator)
    assert joined(deltas, last) == "ok"
    assert (last.finish.reason, last.finish.stop_reason) == ("stop", None)
    assert last.finish.usage.completion_tokens == 3
    assert sum((delta.token_ids for delta in [*deltas, last]), ()) == (*b"ok", EOS)


async def test_a_stop_token_id_is_named_and_not_shown(make_generator):
    deltas, last = await generate(make_generator(), stop_token_ids=(ord("f"),))
    assert joined(deltas, last) == "de"
    assert (last.finish.reason, last.finish.stop_reason) == ("stop", ord("f"))


async def test_a_stop_token_is_shown_when_asked_for(make_generator):
    deltas, last = await generate(
        make_generator(), stop_token_ids=(ord("f"),), include_stop_str_in_output=True
    )
    assert joined(deltas, last) == "def"


async def test_ignored_eos_shows_nothing_and_goes_on(make_generator):
    generator = make_generator()
    generator.engine.script("Hi!", [ord("a"), EOS, ord("b")])
    deltas, last = await generate(generator, max_tokens=3, ignore_eos=True)
    assert joined(deltas, last) == "ab"
    assert last.finish.reason == "length"


async def test_a_stop_string_ends_the_answer_and_leaves_the_engine_at_once(make_generator):
    generator = make_generator()
    deltas, last = await generate(generator, stop=("hi",))  # d e f g h i
    assert joined(deltas, last) == "defg"
    assert (last.finish.reason, last.finish.stop_reason) == ("stop", "hi")
    assert last.finish.usage.completion_tokens == 6
    assert generator.engine.num_active == 0
    assert generator.engine.num_aborts == 1


async def test_tokens_after_the_stop_string_in_the_same_output_do_not_count(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!", stop=("f",)))
    async with generator.start(prepared) as stream:
        generator.engine.step(8)  # all before the first read, so they merge
        delta = await anext(stream)
    assert (delta.text, delta.token_ids) == ("de", tuple(b"def"))
    assert delta.finish.usage.completion_tokens == 3


async def test_no_delta_is_empty_while_text_is_held_back(make_generator):
    generator = make_generator(words=("DEF", "HI"))
    generator.engine.script("x", [*b"ABC", 259, ord("G"), 260, *b"JK"])
    deltas, last = await generate(generator, "x", stop=("DEFGHIJ",))
    assert [delta.text for delta in deltas] == ["A", "B", "C"]
    assert (last.text, last.finish.stop_reason) == ("", "DEFGHIJ")
    assert last.finish.usage.completion_tokens == 7


async def test_held_back_text_is_sent_when_the_answer_ends_otherwise(make_generator):
    generator = make_generator()
    generator.engine.script("x", "abcEN")
    deltas, last = await generate(generator, "x", stop=("END",))
    assert joined(deltas, last) == "abcEN"
    assert last.finish.stop_reason is None


async def test_a_code_point_is_sent_whole_or_not_at_all(make_generator):
    generator = make_generator()
    generator.engine.script("x", "a🧎b")
    deltas, _ = await generate(generator, "x")
    assert [d.text for d in deltas] == ["a", "🧎", "b"]
    assert [d.token_ids for d in deltas] == [(97,), tuple("🧎".encode()), (98,)]


async def test_an_unfinished_code_point_is_flushed_at_the_end(make_generator):
    generator = make_generator()
    generator.engine.script("x", "🧎".encode()[:2])
    deltas, last = await generate(generator, "x")
    assert joined(deltas, last) == "\ufffd"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(
    answer=st.binary(max_size=20),
    stops=st.lists(st.sampled_from(["a", "ab", "\ufffd", "é"]), max_size=2, unique=True),
    burst=st.integers(1, 5),
)
async def test_joined_text_is_the_decoded_answer_up_to_the_first_stop(
    make_generator, answer, stops, burst
):
    engine = FakeEngine()
    engine.script("x", answer)
    engine.hold()
    generator = make_generator(engine)
    prepared = await generator.prepare(GenerationRequest(prompt="x", stop=tuple(stops)))
    texts, ids = [], []
    async with generator.start(prepared) as stream:
        while True:
            engine.step(burst)
            delta = await next_delta(stream, engine)
            texts.append(delta.text)
            ids.extend(delta.token_ids)
            if delta.finish is not None:
                break
    whole = answer.decode("utf-8", "replace")
    ends = [end for end in range(len(whole) + 1) for s in stops if whole[:end].endswith(s)]
    if ends:
        longest = max((s for s in stops if whole[: min(ends)].endswith(s)), key=len)
        assert "".join(texts) == whole[: min(ends) - len(longest)]
        assert delta.finish.stop_reason == longest
    else:
        assert "".join(texts) == whole
        assert ids == [*answer, EOS]
    assert delta.finish.usage.completion_tokens == len(ids)


async def next_delta(stream, engine):
    """Read one delta, with more steps while the stream holds everything back."""
    task = asyncio.ensure_future(anext(stream))
    while not task.done():
        await asyncio.sleep(0)
        engine.step(1)
    return await task


async def test_cancel_yields_what_is_left_with_the_usage_so_far(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!", stop=("fgX",)))
    async with generator.start(prepared) as stream:
        generator.engine.step(3)
        stream.cancel()
        stream.cancel()
        deltas = [delta async for delta in stream]
    assert [delta.text for delta in deltas] == ["def"]
    assert deltas[-1].finish.reason == "cancelled"
    assert deltas[-1].finish.usage.completion_tokens == 3
    assert generator.engine.num_aborts == 1
    assert finished(generator, "abort") == 1


async def test_cancel_wakes_a_reader_that_waits(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared) as stream:
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.cancel()
        delta = await reader
    assert (delta.finish.reason, delta.finish.timing.ttft_s) == ("cancelled", None)


async def test_cancel_after_the_end_changes_nothing(make_generator):
    generator = make_generator()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!", max_tokens=1))
    async with generator.start(prepared) as stream:
        await generator.engine.wait_until_idle()
        stream.cancel()
        [delta] = [delta async for delta in stream]
    assert delta.finish.reason == "length"
    assert generator.engine.num_aborts == 0


async def test_leaving_the_block_aborts_and_counts_once(make_generator):
    generator = make_generator()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared) as stream:
        await anext(stream)
    assert generator.engine.num_active == 0
    assert finished(generator, "abort") == 1


async def test_a_failed_step_ends_the_answer_with_an_error(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared) as stream:
        generator.engine.step(2)
        generator.engine.fail_requests("the step failed in /usr/lib/python3/x.py")
        deltas = [delta async for delta in stream]
    assert joined(deltas[:-1], deltas[-1]) == "de"
    assert deltas[-1].finish.reason == "error"
    assert deltas[-1].finish.error == "the step failed in <path>"
    assert finished(generator, "error") == 1


async def test_an_abort_by_the_engine_is_an_error_for_the_client(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!"))
    async with generator.start(prepared) as stream:
        await generator.engine.stop(drain_timeout_s=0)
        delta = await anext(stream)
    assert delta.finish.reason == "error"
    assert "stopped" in delta.finish.error


@pytest.mark.parametrize(
    ("reason", "name"),
    [(EngineFinish.DEADLINE, "deadline"), (EngineFinish.QUEUE_TIMEOUT, "queue_timeout")],
)
async def test_a_request_that_its_time_ended_says_so_and_is_counted(make_generator, reason, name):
    generator = make_generator()
    generator.engine.hold()
    async with generator.start(await generator.prepare(GenerationRequest(prompt="Hi!"))) as stream:
        generator.engine.expire(reason)
        [delta] = [delta async for delta in stream]
    assert (delta.text, delta.finish.reason, delta.finish.stop_reason) == ("", name, None)
    assert finished(generator, name) == 1


async def test_at_the_deadline_held_back_text_is_sent(make_generator):
    generator = make_generator()
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!", stop=("efX",)))
    async with generator.start(prepared) as stream:
        generator.engine.step(3)
        generator.engine.expire(EngineFinish.DEADLINE)
        deltas = [delta async for delta in stream]
    assert joined(deltas[:-1], deltas[-1]) == "def"
    assert deltas[-1].finish.reason == "deadline"


async def test_a_stop_string_that_the_deadline_completes_is_a_stop(make_generator):
    generator = make_generator()
    generator.engine.script("x", "a🧎".encode()[:3])
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="x", stop=("\ufffd",)))
    async with generator.start(prepared) as stream:
        generator.engine.step(3)
        generator.engine.expire(EngineFinish.DEADLINE)
        deltas = [delta async for delta in stream]
    assert joined(deltas[:-1], deltas[-1]) == "a"
    assert (deltas[-1].finish.reason, deltas[-1].finish.stop_reason) == ("stop", "\ufffd")


async def test_timing_tells_what_the_steps_took(make_generator):
    generator = make_generator(FakeEngine(max_num_seqs=1))
    generator.engine.hold()
    prepared = await generator.prepare(GenerationRequest(prompt="Hi!", max_tokens=4))
    async with generator.start(prepared) as first, generator.start(prepared) as second:
        generator.engine.step(8)
        assert [d async for d in first][-1].finish.timing.queue_s == 0
        timing = [d async for d in second][-1].finish.timing
    assert timing.queue_s == pytest.approx(4 * STEP_S)
    assert timing.ttft_s == pytest.approx(5 * STEP_S)
    assert timing.prefill_s == pytest.approx(STEP_S)
    assert timing.decode_s == pytest.approx(3 * STEP_S)
    assert timing.itl_p50_s == timing.itl_max_s == pytest.approx(STEP_S)


async def test_timing_is_complete_after_a_stop_string(make_generator):
    generator = make_generator()
    _, last = await generate(generator, stop=("g",))  # d e f g: four steps
    timing = last.finish.timing
    assert timing.queue_s == 0
    assert timing.ttft_s == timing.prefill_s == pytest.approx(STEP_S)
    assert timing.decode_s == pytest.approx(3 * STEP_S)


async def test_every_request_is_observed_once(make_generator):
    generator = make_generator()
    await generate(generator, max_tokens=3)
    await generate(generator, stop=("f",))
    assert finished(generator, "length") == 1
    assert finished(generator, "stop") == 1
    ours = '{model_name="m"}'
    assert counted(generator, f"headrace_time_to_first_token_seconds_count{ours}") == 2
    assert counted(generator, f"headrace_inter_token_latency_seconds_count{ours}") == 4
    assert counted(generator, f"headrace_request_generation_tokens_sum{ours}") == 6
