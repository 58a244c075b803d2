"""What the server keeps of responses between requests: those that ended, and those that run.

Owns: the store, the tasks of responses that run in the background, and what is known of the size
of the requests that are open on websockets.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from aiohttp import web

from gateway.accounts import Account
from gateway.errors import GatewayError, InternalError, Overloaded, Unavailable
from gateway.openai.responses.protocol import Event
from gateway.openai.responses.run import ResponseRun
from gateway.openai.responses.store import ResponseStore, StoredResponse

__all__ = ["RESPONSES", "ResponseService"]

logger = logging.getLogger(__name__)

MAX_HELD_BYTES = 64 * 1024 * 1024  # of the requests that are open on websockets, by account


class ResponseService:
    """The responses of one application.

    Args:
        max_bytes: as in ResponseStore.
    """

    def __init__(self, max_bytes: int) -> None:
        self.store = ResponseStore(max_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_held: Counter[Account] = Counter()  # bytes

    def keep(self, owner: str, run: ResponseRun) -> None:
        """Keep a response that has ended, unless it failed or its client does not want it."""
        if run.response.store and run.failure is None:
            stored = StoredResponse(run.response, inputs=run.inputs, conversation=run.conversation)
            self.store.put(owner, stored)

    def hold(self, account: Account, num_bytes: int) -> None:
        """Count a request that is open on a websocket, until `release`.

        Raises:
            Overloaded: those of this account have too many bytes.
        """
        held = self._num_held[account]
        if held and held + num_bytes > MAX_HELD_BYTES:
            raise Overloaded(
                f"the open requests of all websockets of a key may have {MAX_HELD_BYTES} bytes",
                retry_after_s=1.0,
            )
        self._num_held[account] = held + num_bytes

    def release(self, account: Account, num_bytes: int) -> None:
        """Undo `hold`, for one request or for several together."""
        self._num_held[account] -= num_bytes
        if not self._num_held[account]:
            del self._num_held[account]

    async def start(self, owner: str, run: ResponseRun) -> StoredResponse:
        """Let a response run in the background, and keep it from now on.

        Raises:
            gateway.errors.GatewayError: the engine refused.
        """
        events = run.events()
        first = await anext(events) or []
        stored = StoredResponse(
            run.response,
            inputs=run.inputs,
            events=[msgspec.json.encode(event) for event in first],
            cancel=run.cancel,
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
        error: GatewayError = Unavailable("the server is shutting down", code="shutting_down")
        try:
            async with aclosing(events):
                async for batch in events:
                    self._append(run, stored, batch or [])
        except Exception:
            logger.exception("a response in the background failed")
            error = InternalError()
        finally:
            # Only a server that stops, or a fault of ours, leaves one unfinished.
            try:
                self._append(run, stored, run.fail(error))
            finally:
                stored.conversation = run.conversation
                stored.cancel = _nothing  # the run is not kept with the response
                if self.store.holds(owner, stored):
                    self.store.put(owner, stored)

    def _append(self, run: ResponseRun, stored: StoredResponse, events: list[Event]) -> None:
        try:
            if stored.events is not None:
                stored.events += [msgspec.json.encode(event) for event in events]
        finally:
            stored.response = run.response
            stored.notify()

    async def close(self) -> None:
        """End what still runs, as failed; return once it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _nothing() -> None:
    """Cancels what has ended."""


RESPONSES: web.AppKey[ResponseService] = web.AppKey("RESPONSES", ResponseService)
