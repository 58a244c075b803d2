"""Several generations read as one: whichever has news comes next."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from gateway.generation import PreparedGeneration, TextDelta, TextGenerator, TextStream

__all__ = ["merged_deltas", "open_streams"]


@asynccontextmanager
async def open_streams(
    generator: TextGenerator, prepared: Sequence[PreparedGeneration]
) -> AsyncIterator[list[TextStream]]:
    """Start all or none; whatever ends the block aborts those that still run.

    Raises:
        gateway.errors.GatewayError: as `TextGenerator.start_all`.
    """
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(s) for s in generator.start_all(prepared)]


async def merged_deltas(
    streams: Sequence[TextStream], *, idle_s: float | None = None
) -> AsyncGenerator[tuple[int, TextDelta] | None]:
    """Yield (index of the stream, delta) until every stream has ended.

    None is yielded whenever nothing came for `idle_s`. A stream is read again only after its
    delta was taken, so while the caller is busy its news merge.
    """
    if len(streams) > 1:
        async with aclosing(_deltas_of_many(streams, idle_s)) as deltas:
            async for item in deltas:
                yield item
        return
    # Nearly every request has one stream, and needs no task for each token of it.
    [stream] = streams
    while True:
        try:
            async with asyncio.timeout(idle_s):
                delta = await anext(stream)
        except TimeoutError:
            yield None
            continue
        yield 0, delta
        if delta.finish is not None:
            return


async def _deltas_of_many(
    streams: Sequence[TextStream], idle_s: float | None
) -> AsyncGenerator[tuple[int, TextDelta] | None]:
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(
                waiting, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                yield None
            for future in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(future)
                delta = future.result()
                yield index, delta
                if delta.finish is None:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for future in waiting:
            future.cancel()
