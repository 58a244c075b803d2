"""Helpers to generate with a TextGenerator and to look at what was counted."""

from gateway.generation import GenerationRequest


async def generate(generator, prompt="Hi!", **fields):
    """Return (list of non-final deltas, the final delta)."""
    prepared = await generator.prepare(GenerationRequest(prompt=prompt, **fields))
    async with generator.start(prepared) as stream:
        deltas = [delta async for delta in stream]
    assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    return deltas[:-1], deltas[-1]


def joined(deltas, last):
    return "".join(delta.text for delta in [*deltas, last])


def counted(generator, sample):
    """Return the value of one line of the exposition, or None if there is no such line."""
    text = generator.metrics.render()[0].decode()
    values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(sample + " ")]
    return float(values[0]) if values else None


def finished(generator, reason):
    return counted(
        generator,
        f'headrace_requests_finished_total{{finished_reason="{reason}",model_name="m"}}',
    )
