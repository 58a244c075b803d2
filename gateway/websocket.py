"""The native stream protocol over one websocket (docs/protocol.md).

A connection is one reader loop, one writer task, and one task per stream. The reader decodes and
starts; stream tasks put output into the outbox; only the writer sends, because two senders that
wait on one aiohttp connection share a future, and cancelling one would cancel the other. So no
stream ever waits for the socket, and whatever ends the connection ends its streams at once.
"""

import asyncio
import contextlib
import logging

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, web

from gateway.app_keys import CONFIG, ENGINE, GENERATOR
from gateway.callers import Caller, caller_of
from gateway.config import GatewayConfig
from gateway.connections import RETRY_AFTER_S, check_room, serve_connection
from gateway.errors import (
    GatewayError,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NotFound,
    Overloaded,
    Unavailable,
)
from gateway.generation import TextFinish, TextGenerator, TextStream, Timing, Usage
from gateway.mailbox import Close, Outbox, PongFrame
from gateway.messages import (
    PROTOCOL_VERSION,
    SUBPROTOCOLS,
    Accepted,
    Cancel,
    Codec,
    Done,
    Error,
    Goaway,
    Hello,
    HelloLimits,
    InvalidFrame,
    InvalidMessage,
    Ping,
    Pong,
    Start,
    generation_request,
)
from gateway.operations import server_version

__all__ = ["StreamConnection", "stream_handler"]

logger = logging.getLogger(__name__)

MAX_BAD_FRAMES = 8  # undecodable frames in a row

_NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)


class _Stream:
    """One generation of a connection, from its `start` to its last message."""

    def __init__(self, start: Start, started_s: float) -> None:
        self.start = start
        self.started_s = started_s
        self.cancelled = False  # the client asked for it
        self.task: asyncio.Task[None] | None = None
        self.output: TextStream | None = None  # None until the engine has the request


class StreamConnection:
    """All that belongs to one open websocket."""

    def __init__(
        self,
        ws: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        codec: Codec,
        generator: TextGenerator,
        config: GatewayConfig,
        *,
        caller: Caller,
    ) -> None:
        self._ws = ws
        self._transport = transport
        self._codec = codec
        self._generator = generator
        self._config = config
        self._caller = caller
        self._outbox = Outbox()
        self._streams: dict[str, _Stream] = {}
        self._tasks = asyncio.TaskGroup()
        self._closing = False
        self._num_bad_frames = 0
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until the connection ends; nothing of it is left running afterwards."""
        self._outbox.put_control(self._hello())
        try:
            async with self._tasks:
                writer = self._tasks.create_task(self._write())
                try:
                    await self._read()
                finally:
                    self._abandon_streams()
                    if not self._closing:
                        writer.cancel()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._config.ws_close_timeout_s):
                    await self._ws.close(drain=False)
        finally:
            self._ended.set()

    def shut_down(self, reason: str) -> None:
        """Say goodbye, end every stream with status 503, and close once that is sent."""
        self._outbox.put_control(Goaway(reason=reason, retry_after_s=RETRY_AFTER_S))
        error = Unavailable(reason, code="shutting_down", retry_after_s=RETRY_AFTER_S)
        for stream_id in list(self._streams):
            self._outbox.put_last(stream_id, Error.of(error, stream_id))
        self._abandon_streams()
        self._close(WSCloseCode.SERVICE_RESTART, reason)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def cut(self) -> None:
        """Drop the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    # ---- reading -------------------------------------------------------------------------------

    async def _read(self) -> None:
        while not self._closing:
            # Answers that the client does not fetch stop us reading, not growing.
            await self._outbox.wait_for_room()
            frame = await self._ws.receive()
            match frame.type:
                case WSMsgType.TEXT | WSMsgType.BINARY:
                    self._handle_frame(frame.type, frame.data)
                case WSMsgType.PING:
                    self._outbox.put_control(PongFrame(bytes(frame.data)))
                case WSMsgType.PONG:
                    pass
                case _:
                    return

    def _handle_frame(self, frame_type: WSMsgType, data: bytes) -> None:
        try:
            if frame_type is not self._codec.frame_type:
                raise InvalidFrame(
                    f"{self._codec.subprotocol} uses {self._codec.frame_type.name.lower()} frames"
                )
            message = self._codec.decode(data)
            self._num_bad_frames = 0
            match message:
                case Start():
                    self._start(message)
                case Cancel():
                    self._cancel(message)
                case Ping():
                    self._outbox.put_control(Pong(t=message.t))
        except InvalidFrame as error:
            self._outbox.put_control(Error.of(error, None))
            self._num_bad_frames += 1
            if self._num_bad_frames == MAX_BAD_FRAMES:
                self._abandon_streams()
                self._close(WSCloseCode.INVALID_TEXT, "too many frames that cannot be decoded")
        except InvalidMessage as error:
            self._num_bad_frames = 0
            # Once the id belongs to an open stream, an error with it would end that one.
            is_free = error.start_id is not None and not self._outbox.is_open(error.start_id)
            self._outbox.put_control(Error.of(error, error.start_id if is_free else None))

    def _start(self, start: Start) -> None:
        if self._outbox.is_open(start.id):
            raise InvalidMessage(
                f"the id {start.id!r} belongs to an open stream", param="id", code="id_in_use"
            )
        refusal: GatewayError | None = None
        if self._closing:
            refusal = Unavailable(
                "the server is shutting down", code="shutting_down", retry_after_s=RETRY_AFTER_S
            )
        elif self._outbox.num_streams >= self._config.ws_max_streams:
            refusal = Overloaded(
                f"this connection has {self._config.ws_max_streams} open streams, the most allowed",
                retry_after_s=1.0,
            )
        if refusal is not None:
            self._outbox.put_control(Error.of(refusal, start.id))
            return
        self._outbox.open_stream(start.id, with_token_ids=bool(start.return_token_ids))
        stream = _Stream(start, asyncio.get_running_loop().time())
        self._streams[start.id] = stream
        stream.task = self._tasks.create_task(self._generate(stream))
        stream.task.add_done_callback(lambda _: self._forget(stream))

    def _cancel(self, cancel: Cancel) -> None:
        stream = self._streams.get(cancel.id)
        if stream is None:
            if not self._outbox.is_open(cancel.id):  # else its last message is on the way
                error = NotFound(
                    f"no open stream has the id {cancel.id!r}", param="id", code="unknown_id"
                )
                self._outbox.put_control(Error.of(error, None))
        elif stream.output is not None:
            stream.cancelled = True
            stream.output.cancel()
        elif not stream.cancelled and stream.task is not None:
            stream.cancelled = True
            stream.task.cancel()
            self._outbox.put_last(cancel.id, self._done_before_the_engine(stream))

    # ---- streams -------------------------------------------------------------------------------

    async def _generate(self, stream: _Stream) -> None:
        """Run one generation and put its output, ending with exactly one last message."""
        stream_id = stream.start.id
        try:
            last = await self._run_to_the_end(stream)
        except GatewayError as error:
            last = Error.of(error, stream_id)
        except Exception:
            logger.exception("a stream failed")
            last = Error.of(InternalError(), stream_id)
        self._outbox.put_last(stream_id, last)

    async def _run_to_the_end(self, stream: _Stream) -> Done | Error:
        stream_id = stream.start.id
        request = stream.start.request
        if request.model is not None and request.model not in self._config.served_model_names:
            raise ModelNotFound(request.model)
        prepared = await self._generator.prepare(generation_request(request, caller=self._caller))
        async with self._generator.start(prepared) as output:
            stream.output = output
            self._outbox.put_control(
                Accepted(
                    id=stream_id,
                    request_id=output.request_id,
                    prompt_tokens=len(prepared.prompt_token_ids),
                )
            )
            async for delta in output:
                self._outbox.put_delta(stream_id, delta.text, delta.token_ids)
                if delta.finish is not None:
                    return self._last_message(stream, delta.finish)
        raise InternalError("the generation ended without a reason")

    def _last_message(self, stream: _Stream, finish: TextFinish) -> Done | Error:
        stream_id = stream.start.id
        if (failure := self._generator.failure(finish)) is not None:
            return Error.of(failure, stream_id)
        return Done(
            id=stream_id,
            seq=0,  # the outbox knows
            finish_reason=finish.reason,
            stop_reason=finish.stop_reason,
            usage=finish.usage,
            timing=finish.timing,
        )

    def _done_before_the_engine(self, stream: _Stream) -> Done:
        elapsed_s = asyncio.get_running_loop().time() - stream.started_s
        return Done(
            id=stream.start.id,
            seq=0,
            finish_reason="cancelled",
            stop_reason=None,
            usage=_NO_USAGE,
            timing=Timing(
                queue_s=0.0,
                ttft_s=None,
                prefill_s=0.0,
                decode_s=0.0,
                e2e_s=round(elapsed_s, 6),
                itl_mean_s=None,
                itl_p50_s=None,
                itl_p99_s=None,
                itl_max_s=None,
                num_preemptions=0,
            ),
        )

    def _forget(self, stream: _Stream) -> None:
        # The id may have been used again since this stream's last message was sent.
        if self._streams.get(stream.start.id) is stream:
            del self._streams[stream.start.id]

    def _abandon_streams(self) -> None:
        """End all generations; leaving a TextStream aborts its request in the engine."""
        for stream in self._streams.values():
            if stream.task is not None:
                stream.task.cancel()

    # ---- writing -------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Send what the outbox gives, until the connection closes or accepts no more bytes."""
        try:
            while not await self._send_next():
                pass
        except TimeoutError:
            logger.info("closing a websocket whose client does not read")
            self._closing = True
            self._abandon_streams()
            await self._close_and_cut(WSCloseCode.TRY_AGAIN_LATER, b"the client reads too slowly")
        except (OSError, aiohttp.ClientError):
            # The client is gone; the reader learns it as well.
            self._abandon_streams()
        except Exception:
            logger.exception("the writer of a websocket failed")
            self._closing = True
            self._abandon_streams()
            await self._close_and_cut(WSCloseCode.INTERNAL_ERROR, b"internal error")
        finally:
            self._outbox.close(
                WSCloseCode.GOING_AWAY, ""
            )  # lets a reader that waits for room go on

    async def _send_next(self) -> bool:
        """Send one message; return whether it was the last."""
        item = await self._outbox.take()
        async with asyncio.timeout(self._config.send_timeout_s):
            match item:
                case PongFrame():
                    await self._ws.pong(item.payload)
                case Close():
                    await self._ws.close(code=item.code, message=item.reason.encode())
                    return True
                case _:
                    await self._ws.send_frame(self._codec.encode(item), self._codec.frame_type)
        return False

    async def _close_and_cut(self, code: int, reason: bytes) -> None:
        """Leave a close frame for a client that may yet read it; then drop the connection."""
        with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(self._config.ws_close_timeout_s):
                await self._ws.close(code=code, message=reason, drain=False)
                await asyncio.sleep(self._config.ws_close_timeout_s)
        self.cut()

    def _close(self, code: int, reason: str) -> None:
        self._closing = True
        self._outbox.close(code, reason)

    def _hello(self) -> Hello:
        return Hello(
            server=f"headrace/{server_version()}",
            version=PROTOCOL_VERSION,
            model=self._config.model_name,
            limits=HelloLimits(
                max_model_len=self._generator.engine.limits.max_model_len,
                max_streams=self._config.ws_max_streams,
                max_message_bytes=self._config.max_body_bytes,
            ),
            heartbeat_s=self._config.ws_heartbeat_s,
        )


async def stream_handler(request: web.Request) -> web.StreamResponse:
    """Serve `GET /v1/stream`.

    Raises:
        GatewayError: before the upgrade, when none is asked for, no subprotocol is known (400),
            or there is no room for another connection (503).
    """
    config = request.app[CONFIG]
    codec = _negotiate(request)
    check_room(request.app)
    if not request.app[ENGINE].is_ready:
        raise Unavailable("the engine is not ready", retry_after_s=RETRY_AFTER_S)
    ws = web.WebSocketResponse(
        protocols=(codec.subprotocol,),
        heartbeat=config.ws_heartbeat_s,
        timeout=config.ws_close_timeout_s,
        max_msg_size=config.max_body_bytes,
        compress=False,
        autoping=False,  # the writer answers pings
        autoclose=False,  # the streams end first
        decode_text=False,
    )
    await ws.prepare(request)
    connection = StreamConnection(
        ws,
        request.transport,
        codec,
        request.app[GENERATOR],
        config,
        caller=caller_of(request),
    )
    await serve_connection(request.app, connection)
    return ws


def _negotiate(request: web.Request) -> Codec:
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise InvalidRequest("this is a websocket endpoint", code="upgrade_required")
    offered = request.headers.getall("Sec-WebSocket-Protocol", [])
    for name in ",".join(offered).split(","):
        if codec := SUBPROTOCOLS.get(name.strip()):
            return codec
    raise InvalidRequest(
        f"offer one of the subprotocols {', '.join(SUBPROTOCOLS)}",
        param="Sec-WebSocket-Protocol",
        code="unknown_subprotocol",
    )
