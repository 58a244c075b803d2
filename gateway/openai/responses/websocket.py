"""GET /v1/responses as a websocket: many responses at a time, each lane in its own order.

A client sends `response.create` with the body of POST /v1/responses and perhaps a `stream_id`.
Requests of one lane are answered one after the other, lanes side by side; every event says which
lane it is of. A connection is a reader, a writer, and a task for each lane that has work; only the
writer sends. Whatever ends the connection ends its responses.
"""

import asyncio
import contextlib
import logging
from collections import deque
from contextlib import aclosing
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from gateway.app_keys import CONFIG, ENGINE, GENERATOR
from gateway.callers import Caller, caller_of
from gateway.config import GatewayConfig
from gateway.connections import (
    RETRY_AFTER_S,
    SHUTDOWN_REASON,
    MessageRate,
    accept_websocket,
    check_room,
    close_politely,
    serve_connection,
)
from gateway.errors import GatewayError, InternalError, InvalidRequest, Overloaded, Unavailable
from gateway.generation import TextGenerator
from gateway.json_body import decode_object
from gateway.openai.responses.creation import create_run, read_body
from gateway.openai.responses.frames import CloseFrame, FrameQueue, PongFrame
from gateway.openai.responses.protocol import Event, ResponsesBody
from gateway.openai.responses.run import ResponseRun
from gateway.openai.responses.service import RESPONSES, ResponseService
from gateway.openai.responses.store import ResponseStore, StoredResponse

__all__ = ["ResponsesConnection", "responses_handler"]

logger = logging.getLogger(__name__)

MAX_BAD_FRAMES = 8  # undecodable frames in a row
MAX_STREAM_ID_LENGTH = 128
# Of responses that are not stored, which the same connection may still go on with.
CONNECTION_STORE_BYTES = 4 * 1024 * 1024


@dataclass(slots=True)
class _Lane:
    """Requests that are answered one after the other; the first one is being answered."""

    stream_id: str | None
    waiting: deque[tuple[dict[str, object], int]] = field(default_factory=deque)


class ResponsesConnection:
    """All that belongs to one open websocket."""

    def __init__(
        self,
        ws: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        generator: TextGenerator,
        service: ResponseService,
        config: GatewayConfig,
        *,
        caller: Caller,
    ) -> None:
        self._ws = ws
        self._transport = transport
        self._generator = generator
        self._service = service
        self._config = config
        self._caller = caller
        self._recent = ResponseStore(CONNECTION_STORE_BYTES)
        self._frames = FrameQueue()
        self._lanes: dict[str | None, _Lane] = {}
        self._lane_tasks: set[asyncio.Task[None]] = set()
        self._num_requests = 0  # being answered or waiting
        self._num_bytes = 0  # of them
        self._num_bad_frames = 0
        self._tasks = asyncio.TaskGroup()
        self._refusal: str | None = None  # why nothing new begins here
        self._closing = False
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the connection ends; nothing of it is left running afterwards."""
        try:
            async with self._tasks:
                reader = self._tasks.create_task(self._read())
                writer = self._tasks.create_task(self._write(reader))
                try:
                    await asyncio.wait([reader])
                finally:
                    self._abandon_lanes()
                    if not self._closing:
                        writer.cancel()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._config.ws_close_timeout_s):
                    await self._ws.close(drain=False)
        finally:
            self._service.release(self._caller.account, self._num_bytes)
            self._ended.set()

    @property
    def is_busy(self) -> bool:
        return bool(self._lanes)

    def drain(self, reason: str) -> None:
        """Refuse new requests from now on, and close once none runs."""
        self._refusal = self._refusal or reason
        if not self._lanes:
            self._close(WSCloseCode.SERVICE_RESTART, reason)

    def retire(self, reason: str) -> None:
        self.drain(reason)

    def shut_down(self, reason: str) -> None:
        """Close once every lane has told its end; the engine has stopped, so that is soon."""
        self.drain(reason)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def cut(self) -> None:
        """Drop the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    # ---- reading -------------------------------------------------------------------------------

    async def _read(self) -> None:
        rate = MessageRate(self._config.ws_max_messages_per_s)
        while not self._closing:
            # A client that does not fetch its answers is not read from either.
            await self._frames.wait_for_room()
            frame = await self._ws.receive()
            await rate.wait()
            match frame.type:
                case WSMsgType.TEXT | WSMsgType.BINARY:
                    self._handle_frame(frame.type, frame.data)
                case WSMsgType.PING:
                    self._frames.put(PongFrame(bytes(frame.data)))
                case WSMsgType.PONG:
                    pass
                case _:
                    return

    def _handle_frame(self, frame_type: WSMsgType, data: bytes) -> None:
        stream_id: str | None = None
        try:
            if frame_type is not WSMsgType.TEXT:
                raise InvalidRequest("messages are JSON in text frames")
            raw = decode_object(data)
            self._num_bad_frames = 0
        except InvalidRequest as error:
            self._send_error(error, None)
            self._num_bad_frames += 1
            if self._num_bad_frames == MAX_BAD_FRAMES:
                self._abandon_lanes()
                self._close(WSCloseCode.INVALID_TEXT, "too many frames that cannot be decoded")
            return
        try:
            stream_id = _stream_id(raw)
            if raw.get("type") != "response.create":
                raise InvalidRequest("type must be 'response.create'", param="type")
            self._enqueue(stream_id, raw, len(data))
        except GatewayError as error:
            self._send_error(error, stream_id)

    def _enqueue(self, stream_id: str | None, raw: dict[str, object], num_bytes: int) -> None:
        if self._refusal is not None or self._closing:
            raise Unavailable(
                self._refusal or SHUTDOWN_REASON, code="shutting_down", retry_after_s=RETRY_AFTER_S
            )
        config = self._config
        if self._num_requests >= config.ws_max_streams:
            raise Overloaded(
                f"this connection has {config.ws_max_streams} open requests, the most allowed",
                retry_after_s=1.0,
            )
        if self._num_requests and self._num_bytes + num_bytes > config.max_body_bytes:
            raise Overloaded(
                f"the open requests of a connection may have {config.max_body_bytes} bytes",
                retry_after_s=1.0,
            )
        self._service.hold(self._caller.account, num_bytes)
        self._num_requests += 1
        self._num_bytes += num_bytes
        lane = self._lanes.get(stream_id)
        if lane is None:
            lane = self._lanes[stream_id] = _Lane(stream_id)
            lane.waiting.append((raw, num_bytes))
            task = self._tasks.create_task(self._serve_lane(lane))
            self._lane_tasks.add(task)
            task.add_done_callback(self._lane_tasks.discard)
        else:
            lane.waiting.append((raw, num_bytes))

    def _abandon_lanes(self) -> None:
        """End all responses; leaving their events aborts them in the engine."""
        for task in self._lane_tasks:
            task.cancel()

    # ---- responses -----------------------------------------------------------------------------

    async def _serve_lane(self, lane: _Lane) -> None:
        """Answer the requests of one lane until there are none."""
        while lane.waiting:
            raw, num_bytes = lane.waiting.popleft()
            try:
                await self._respond(lane.stream_id, raw)
            except GatewayError as error:
                self._send_error(error, lane.stream_id)
            except Exception:
                logger.exception("a response failed")
                self._send_error(InternalError(), lane.stream_id)
            self._num_requests -= 1
            self._num_bytes -= num_bytes
            self._service.release(self._caller.account, num_bytes)
        del self._lanes[lane.stream_id]
        if self._refusal is not None and not self._lanes:
            self._close(WSCloseCode.SERVICE_RESTART, self._refusal)

    async def _respond(self, stream_id: str | None, raw: dict[str, object]) -> None:
        run = await create_run(
            _read_create(raw),
            caller=self._caller,
            generator=self._generator,
            config=self._config,
            stores=[self._recent, self._service.store],
        )
        async with aclosing(run.events()) as events:
            async for batch in events:
                if run.has_ended:
                    # Before the client knows, so that it can go on with it at once.
                    self._keep(run)
                for event in batch or ():
                    self._send(event, stream_id)
                await self._frames.wait_for_room()

    def _keep(self, run: ResponseRun) -> None:
        self._service.keep(self._caller.principal, run)
        if not run.response.store and run.failure is None:
            recent = StoredResponse(run.response, conversation=run.conversation)
            self._recent.put(self._caller.principal, recent)

    # ---- writing -------------------------------------------------------------------------------

    def _send(self, event: Event, stream_id: str | None) -> None:
        if stream_id is not None:
            event = {**event, "stream_id": stream_id}
        self._frames.put(msgspec.json.encode(event))

    def _send_error(self, error: GatewayError, stream_id: str | None) -> None:
        headers = {"headers": error.headers()} if error.headers() else {}
        body = {**error.to_wire(), **headers}
        self._send({"type": "error", "status": error.status, "error": body}, stream_id)

    def _close(self, code: int, reason: str) -> None:
        self._closing = True
        self._frames.close(code, reason)

    async def _write(self, reader: asyncio.Task[None]) -> None:
        """Send what there is, until the connection closes or accepts no more bytes."""
        try:
            while not await self._send_next(reader):
                pass
        except TimeoutError:
            logger.info("closing a websocket whose client does not read")
            self._closing = True
            self._abandon_lanes()
            await self._close_and_cut(
                reader, WSCloseCode.TRY_AGAIN_LATER, "the client reads too slowly"
            )
        except (OSError, aiohttp.ClientError):
            self._abandon_lanes()  # the client is gone; the reader learns it as well
        except Exception:
            logger.exception("the writer of a websocket failed")
            self._closing = True
            self._abandon_lanes()
            await self._close_and_cut(reader, WSCloseCode.INTERNAL_ERROR, "internal error")
        finally:
            self._frames.close(WSCloseCode.GOING_AWAY, "")  # whoever waits for room goes on

    async def _send_next(self, reader: asyncio.Task[None]) -> bool:
        """Send one frame; return whether it was the last."""
        frame = await self._frames.take()
        async with asyncio.timeout(self._config.send_timeout_s):
            match frame:
                case PongFrame():
                    await self._ws.pong(frame.payload)
                case CloseFrame():
                    await close_politely(self._ws, reader, code=frame.code, reason=frame.reason)
                    return True
                case _:
                    await self._ws.send_frame(frame, WSMsgType.TEXT)
        return False

    async def _close_and_cut(self, reader: asyncio.Task[None], code: int, reason: str) -> None:
        """Leave a close frame for a client that may yet read it; then drop the connection."""
        with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(self._config.ws_close_timeout_s):
                await close_politely(self._ws, reader, code=code, reason=reason, drain=False)
        self.cut()


async def responses_handler(request: web.Request) -> web.StreamResponse:
    """Serve `GET /v1/responses`.

    Raises:
        GatewayError: before the upgrade, when none is asked for (400), or there is no room for
            another connection (503).
    """
    config = request.app[CONFIG]
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise InvalidRequest(
            "GET /v1/responses is a websocket; POST creates a response", code="upgrade_required"
        )
    check_room(request.app)
    if not request.app[ENGINE].is_ready:
        raise Unavailable("the engine is not ready", retry_after_s=RETRY_AFTER_S)
    ws = await accept_websocket(request, max_message_bytes=config.max_body_bytes)
    connection = ResponsesConnection(
        ws,
        request.transport,
        request.app[GENERATOR],
        request.app[RESPONSES],
        config,
        caller=caller_of(request),
    )
    await serve_connection(request.app, connection)
    return ws


def _stream_id(raw: dict[str, object]) -> str | None:
    stream_id = raw.get("stream_id")
    if stream_id is None:
        return None
    if not isinstance(stream_id, str) or not 1 <= len(stream_id) <= MAX_STREAM_ID_LENGTH:
        raise InvalidRequest(
            f"stream_id must be text of 1 to {MAX_STREAM_ID_LENGTH} characters", param="stream_id"
        )
    return stream_id


def _read_create(raw: dict[str, object]) -> ResponsesBody:
    """The body of a request; here every answer is streamed, and none runs in the background."""
    fields = {name: raw[name] for name in raw if name not in ("background", "stream_options")}
    return read_body({**fields, "stream": True})
