"""What the server keeps of responses between requests: those that ended, and those that run.

Owns: the store, and the tasks of responses that run in the background.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from aiohttp import web

from gateway.errors import Unavailable
from gateway.openai.responses.protocol import Event
from gateway.openai.responses.run import ResponseRun
from gateway.openai.responses.store import ResponseStore, StoredResponse

__all__ = ["RESPONSES", "ResponseService"]


class ResponseService:
    """The responses of one application.

    Args:
        max_bytes: as in ResponseStore.
    """

    def __init__(self, max_bytes: int) -> None:
        self.store = ResponseStore(max_bytes)
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, owner: str, run: ResponseRun) -> None:
        """Keep a response that has ended, unless it failed or its client does not want it."""
        if run.response.store and run.failure is None:
            self.store.put(owner, StoredResponse(run.response, conversation=run.conversation))

    async def start(self, owner: str, run: ResponseRun) -> StoredResponse:
        """Let a response run in the background, and keep it from now on.

        Raises:
            gateway.errors.GatewayError: the engine refused.
        """
        events = run.events()
        first = await anext(events) or []
        stored = StoredResponse(
            run.response, events=[msgspec.json.encode(event) for event in first], cancel=run.cancel
        )
        self.store.put(owner, stored)
        # Begun at once: a task that is cancelled before would not clean up after itself.
        task = asyncio.Task(
            self._collect(owner, run, stored, events),
            loop=asyncio.get_running_loop(),
            eager_start=True,
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stored

    async def _collect(
        self,
        owner: str,
        run: ResponseRun,
        stored: StoredResponse,
        events: AsyncGenerator[list[Event] | None],
    ) -> None:
        """Add events as they come, and count the response once it has ended."""
        try:
            async with aclosing(events):
                async for batch in events:
                    self._append(run, stored, batch or [])
        finally:
            # Only a server that stops leaves one unfinished.
            error = Unavailable("the server is shutting down", code="shutting_down")
            self._append(run, stored, run.fail(error))
            stored.conversation = run.conversation
            if self.store.holds(owner, stored):
                self.store.put(owner, stored)

    def _append(self, run: ResponseRun, stored: StoredResponse, events: list[Event]) -> None:
        if stored.events is not None:
            stored.events += [msgspec.json.encode(event) for event in events]
        stored.response = run.response
        stored.notify()

    async def close(self) -> None:
        """End what still runs, as failed; return once it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


RESPONSES: web.AppKey[ResponseService] = web.AppKey("RESPONSES", ResponseService)
