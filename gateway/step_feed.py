"""Steps as they happen, over a websocket (docs/protocol.md, "Watching the steps").

A connection is a reader that only notices the end, a writer, and two timers that wake it. Nothing
waits to be sent: the writer looks at the engine when it can send. So a slow reader costs no
memory; it skips to the newest steps and is told how many it missed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence

import aiohttp
import orjson
from aiohttp import WSCloseCode, WSMsgType, web

from gateway.accounts import Account
from gateway.config import GatewayConfig
from gateway.connections import RETRY_AFTER_S, MessageRate, close_politely
from gateway.step_messages import clock_body, engine_status, stats_body, step_bodies
from jaxengine.step_log import StepRecord
from jaxengine.token_engine import TokenEngine

__all__ = ["StepFeed"]

logger = logging.getLogger(__name__)

BATCH_INTERVAL_S = 0.1  # between two batches of steps
STATS_INTERVAL_S = 1.0
MAX_STEPS = 256  # in one batch
MAX_SHARES = 8192  # in one batch of more than one step
REVOKED = "this API key was revoked"


class StepFeed:
    """One watcher.

    Args:
        account: of the watcher; once its key is no more, the feed ends.
        after: the first step to send is the next one; whoever has seen none asks for -1.
    """

    def __init__(
        self,
        ws: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        engine: TokenEngine,
        config: GatewayConfig,
        *,
        account: Account,
        after: int,
        with_shares: bool,
    ) -> None:
        self._ws = ws
        self._transport = transport
        self._engine = engine
        self._config = config
        self._account = account
        self._last_sent = after
        self._with_shares = with_shares
        self._wakeup = asyncio.Event()
        self._ended = asyncio.Event()
        # What the writer has to do, the most urgent first.
        self._ping: bytes | None = None  # the newest one unanswered
        self._goodbye: str | None = None
        self._closing = False  # by us; the writer does it
        self._stats_are_due = False
        self._steps_are_due = False

    async def run(self) -> None:
        """Serve until the connection ends; nothing of it is left running afterwards."""
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read())
                writer = tasks.create_task(self._write(reader))
                timers = [tasks.create_task(t()) for t in (self._watch_stats, self._watch_steps)]
                try:
                    await asyncio.wait([reader])
                finally:
                    for timer in timers:
                        timer.cancel()
                    if not self._closing:
                        writer.cancel()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._config.ws_close_timeout_s):
                    await self._ws.close(drain=False)
        finally:
            self._ended.set()

    @property
    def is_busy(self) -> bool:
        return True  # somebody watches

    def retire(self, reason: str) -> None:
        self.shut_down(reason)

    def drain(self, reason: str) -> None:
        """Do nothing: the last steps are worth watching, and the status says that it stops."""

    def shut_down(self, reason: str) -> None:
        """Say goodbye and close once that is sent."""
        self._goodbye, self._closing = reason, True
        self._wakeup.set()

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def cut(self) -> None:
        """Drop the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    async def _read(self) -> None:
        """Return when the client has left; what it says means nothing here."""
        rate = MessageRate(self._config.ws_max_messages_per_s)
        while True:
            frame = await self._ws.receive()
            await rate.wait()
            match frame.type:
                case WSMsgType.PING:
                    self._ping = bytes(frame.data)
                    self._wakeup.set()
                case WSMsgType.TEXT | WSMsgType.BINARY | WSMsgType.PONG:
                    pass
                case _:
                    return

    async def _watch_stats(self) -> None:
        while True:
            self._stats_are_due = True
            self._wakeup.set()
            await asyncio.sleep(STATS_INTERVAL_S)

    async def _watch_steps(self) -> None:
        while True:
            await self._engine.steps.wait_after(self._last_sent)
            self._steps_are_due = True
            self._wakeup.set()
            await asyncio.sleep(BATCH_INTERVAL_S)  # steps that come meanwhile share the next batch

    async def _write(self, reader: asyncio.Task[None]) -> None:
        """Send what is due, until the connection closes or accepts no more bytes."""
        try:
            await self._send(
                {
                    "type": "hello",
                    "model": self._config.model_name,
                    "last_index": self._engine.steps.last_index,
                    "batch_interval_s": BATCH_INTERVAL_S,
                    "stats_interval_s": STATS_INTERVAL_S,
                    **clock_body(),
                }
            )
            while not await self._send_what_is_due(reader):
                await self._wakeup.wait()
                self._wakeup.clear()
        except TimeoutError:
            logger.info("cutting off a watcher of the steps that does not read")
            self.cut()
        except (OSError, aiohttp.ClientError):
            pass  # the client is gone; the reader learns it as well
        except Exception:
            logger.exception("a feed of steps failed")
            self.cut()

    async def _send_what_is_due(self, reader: asyncio.Task[None]) -> bool:
        """Return whether it was the last."""
        if self._account.is_closed:
            self._closing = True
            async with asyncio.timeout(self._config.send_timeout_s):
                await close_politely(
                    self._ws, reader, code=WSCloseCode.POLICY_VIOLATION, reason=REVOKED
                )
            return True
        if self._ping is not None:
            payload, self._ping = self._ping, None
            async with asyncio.timeout(self._config.send_timeout_s):
                await self._ws.pong(payload)
        if self._goodbye is not None:
            reason = self._goodbye
            await self._send({"type": "goaway", "reason": reason, "retry_after_s": RETRY_AFTER_S})
            async with asyncio.timeout(self._config.send_timeout_s):
                await close_politely(
                    self._ws, reader, code=WSCloseCode.SERVICE_RESTART, reason=reason
                )
            return True
        if self._stats_are_due:
            self._stats_are_due = False
            stats = stats_body(self._engine.stats())
            status = engine_status(self._engine)
            await self._send({"type": "stats", **clock_body(), "status": status, "stats": stats})
        if self._steps_are_due:
            self._steps_are_due = False
            await self._send_steps()
        return False

    async def _send_steps(self) -> None:
        new = self._newest(self._engine.steps.after(self._last_sent))
        if new:
            num_missed = new[0].index - self._last_sent - 1
            self._last_sent = new[-1].index
            steps = step_bodies(new, with_shares=self._with_shares)
            await self._send({"type": "steps", "num_missed": num_missed, "steps": steps})

    def _newest(self, records: Sequence[StepRecord]) -> Sequence[StepRecord]:
        """Return as many of the last ones as a message may hold, at least one if there is one."""
        records = records[-MAX_STEPS:]
        if not self._with_shares:
            return records
        room = MAX_SHARES
        for num_taken, record in enumerate(reversed(records)):
            room -= len(record.shares)
            if room < 0:
                return records[-max(num_taken, 1) :]
        return records

    async def _send(self, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._config.send_timeout_s):
            await self._ws.send_frame(orjson.dumps(message), WSMsgType.TEXT)
