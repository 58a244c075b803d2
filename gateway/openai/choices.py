"""Several generations that start together, or not at all."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from gateway.generation import PreparedGeneration, TextGenerator, TextStream

__all__ = ["open_streams"]


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
