import asyncio
from contextlib import aclosing

import pytest

from gateway.delta_reader import DeltaReader, deltas_and_silences
from gateway.generation import GenerationRequest
from gateway.openai.choices import open_streams


async def prepared(generator, *prompts, **fields):
    return [
        await generator.prepare(GenerationRequest(prompt=prompt, **fields)) for prompt in prompts
    ]


class Collector:
    """Takes in what comes, and is full after so many deltas; None for never."""

    def __init__(self, max_deltas=None):
        self.deltas = []
        self.max_deltas = max_deltas

    def take_in(self, index, delta):
        self.deltas.append((index, delta))
        return len(self.deltas) != self.max_deltas

    def text(self, index):
        return "".join(delta.text for i, delta in self.deltas if i == index)


async def test_all_streams_are_read_to_their_ends(make_generator):
    generator, collector = make_generator(), Collector()
    requests = await prepared(generator, "a", "bb", max_tokens=3)
    async with open_streams(generator, requests) as streams:
        reader = DeltaReader(streams, collector.take_in)
        await reader.read()
        assert reader.has_ended
        await reader.read()  # at once
    assert (collector.text(0), collector.text(1)) == ("bcd", "cde")


async def test_what_comes_in_one_turn_of_the_loop_is_taken_in_at_once_in_the_next(make_generator):
    generator, collector = make_generator(), Collector()
    generator.engine.hold()
    async with open_streams(generator, await prepared(generator, "a", "bb")) as streams:
        reading = asyncio.create_task(DeltaReader(streams, collector.take_in).read())
        await asyncio.sleep(0)
        generator.engine.step(2)
        assert collector.deltas == []
        await asyncio.sleep(0)
        assert [(index, delta.text) for index, delta in collector.deltas] == [(0, "bc"), (1, "cd")]
        reading.cancel()


async def test_who_is_full_gets_no_more_until_it_reads_again_and_then_merged(make_generator):
    generator, collector = make_generator(), Collector(max_deltas=1)
    generator.engine.hold()
    async with open_streams(generator, await prepared(generator, "a", max_tokens=4)) as streams:
        reader = DeltaReader(streams, collector.take_in)
        generator.engine.step()
        await reader.read()
        generator.engine.step(3)
        assert collector.text(0) == "b"
        await reader.read()
        assert [delta.text for _, delta in collector.deltas] == ["b", "cde"]


async def test_an_interrupted_reader_goes_on_where_it_was(make_generator):
    generator, collector = make_generator(), Collector()
    generator.engine.hold()
    async with open_streams(generator, await prepared(generator, "a", max_tokens=2)) as streams:
        reader = DeltaReader(streams, collector.take_in)
        reading = asyncio.create_task(reader.read())
        await asyncio.sleep(0)
        reader.interrupt()
        await reading
        generator.engine.step(2)
        assert collector.deltas == []
        await reader.read()
        assert collector.text(0) == "bc"


async def test_a_failure_to_take_in_is_the_readers_and_not_the_engines(make_generator):
    def fail(index, delta):
        raise ZeroDivisionError

    generator = make_generator()
    generator.engine.hold()
    requests = await prepared(generator, "a", "b")
    async with open_streams(generator, requests) as streams:
        reading = asyncio.create_task(DeltaReader(streams, fail).read())
        await asyncio.sleep(0)
        generator.engine.step()  # raises nothing
        with pytest.raises(ZeroDivisionError):
            await reading


async def test_a_stop_string_ends_the_answer_once(make_generator):
    generator, collector = make_generator(), Collector()
    requests = await prepared(generator, "a", stop=("d",))
    async with open_streams(generator, requests) as streams:
        await DeltaReader(streams, collector.take_in).read()
    finishes = [delta.finish.reason for _, delta in collector.deltas if delta.finish is not None]
    assert (collector.text(0), finishes) == ("bc", ["stop"])


async def test_a_cancelled_stream_gives_what_there_is_and_its_end(make_generator):
    generator, collector = make_generator(), Collector()
    generator.engine.hold()
    async with open_streams(generator, await prepared(generator, "a")) as streams:
        generator.engine.step(2)
        streams[0].cancel()
        await DeltaReader(streams, collector.take_in).read()
    assert collector.text(0) == "bc"
    assert collector.deltas[-1][1].finish.reason == "cancelled"


@pytest.mark.parametrize("prompt_only", [False, True])
async def test_a_stream_that_is_cancelled_in_the_turn_of_its_token_ends_all_the_same(
    make_generator, prompt_only
):
    generator, collector = make_generator(), Collector()
    generator.engine.hold()
    requests = await prepared(generator, "a", max_tokens=2, prompt_only=prompt_only)
    async with open_streams(generator, requests) as [stream]:
        reading = asyncio.create_task(DeltaReader([stream], collector.take_in).read())
        await asyncio.sleep(0)
        generator.engine.step()
        stream.cancel()
        await reading
    assert collector.text(0) == ("" if prompt_only else "b")
    assert [delta.finish and delta.finish.reason for _, delta in collector.deltas] == ["cancelled"]


async def test_a_silent_time_yields_nothing_and_loses_nothing(make_generator):
    generator = make_generator()
    generator.engine.hold()
    text, num_silences = "", 0
    requests = await prepared(generator, "a", max_tokens=2)
    async with (
        open_streams(generator, requests) as [stream],
        aclosing(deltas_and_silences(stream, 0.001)) as deltas,
    ):
        async for delta in deltas:
            if delta is None:
                num_silences += 1
                generator.engine.step()
            else:
                text += delta.text
    assert text == "bc"
    assert num_silences >= 2
