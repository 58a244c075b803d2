"""Raw connections, for tests of what a client does to one."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator


async def closed(writer: asyncio.StreamWriter) -> None:
    """Close a connection, whatever the other side has done to it."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        await closed(writer)


@contextlib.asynccontextmanager
async def posted(
    port: int, body: object, path: str = "/v1/completions"
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Send a request on a connection of its own; leaving the block closes it."""
    data = json.dumps(body).encode()
    async with connection(port) as (reader, writer):
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        yield reader, writer
