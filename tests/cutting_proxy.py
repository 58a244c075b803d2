"""A TCP proxy that cuts connections after as many bytes of the server as a test wants."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

__all__ = ["CuttingProxy", "cutting_proxy"]


class CuttingProxy:
    """Attributes:
    port: where it listens.
    num_connections: so far.
    num_cuts: so far.
    """

    def __init__(self, target_port: int, cuts: Iterator[int]) -> None:
        self.port = 0
        self.num_connections = 0
        self.num_cuts = 0
        self._target_port = target_port
        self._cuts = cuts
        self._open: set[asyncio.StreamWriter] = set()
        self._refusing = False

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def cut_all(self) -> None:
        """Cut every connection that is open now."""
        for writer in list(self._open):
            writer.transport.abort()

    def refuse(self, refusing: bool) -> None:
        """Cut every new connection at once, or no more."""
        self._refusing = refusing

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self._refusing:
            writer.transport.abort()
            return
        room = next(self._cuts, None)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        pair = {writer, server_writer}
        self._open |= pair
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, server_writer, None, pair))
                tasks.create_task(self._copy(server_reader, writer, room, pair))
        finally:
            self._open -= pair

    async def _copy(self, reader, writer, room: int | None, pair) -> None:
        try:
            while data := await reader.read(4096):
                if room is not None:
                    data, is_last = data[:room], len(data) >= room
                    room -= len(data)
                    writer.write(data)
                    await writer.drain()
                    if is_last:
                        self.num_cuts += 1
                        break
                else:
                    writer.write(data)
                    await writer.drain()
        except OSError:
            pass
        if room is None:
            for end in pair:
                end.transport.abort()
        else:  # what was sent arrives; nothing after it does
            for end in pair:
                end.close()


@asynccontextmanager
async def cutting_proxy(target_port: int, cuts: Iterable[int] = ()) -> AsyncIterator[CuttingProxy]:
    """Cut the n-th connection after `cuts[n]` bytes from the server; those after them never."""
    proxy = CuttingProxy(target_port, iter(cuts))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy
        proxy.cut_all()
