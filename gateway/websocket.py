"""The native stream protocol over one websocket (docs/protocol.md).

A connection is one reader loop, one writer task, and one task per stream. The reader decodes and
starts; streams put output into mailboxes; only the writer sends, because two senders that wait on
one aiohttp connection share a future, and cancelling one would cancel the other. So no stream ever
waits for the socket. Whatever ends the connection ends its streams at once, except those that the
client asked to be resumable: they wait in the `ResumeStore` for its next connection.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import aiohttp
from aiohttp import WSCloseCode, WSMsgType, web

from gateway.app_keys import CONFIG, ENGINE, GENERATOR
from gateway.callers import Caller, caller_of
from gateway.config import GatewayConfig
from gateway.connections import (
    DRAINING,
    RETRY_AFTER_S,
    SHUTDOWN_REASON,
    MessageRate,
    accept_websocket,
    check_room,
    close_politely,
    serve_connection,
)
from gateway.errors import GatewayError, InvalidRequest, NotFound, Overloaded, Unavailable
from gateway.generation import TextGenerator
from gateway.mailbox import Close, Mailbox, Outbox, PongFrame
from gateway.messages import (
    PROTOCOL_VERSION,
    SUBPROTOCOLS,
    Cancel,
    Codec,
    Credit,
    Error,
    Goaway,
    Hello,
    HelloLimits,
    InvalidFrame,
    InvalidMessage,
    Ping,
    Pong,
    Resume,
    ServerMessage,
    Start,
)
from gateway.operations import server_version
from gateway.resumption import RESUME_STORE, KeptStream, ResumeStore, taken_over
from gateway.stream_buffer import PlainBuffer
from gateway.stream_run import StreamRun
from gateway.websocket_frame import encode_frame
from gateway.write_room import has_room

__all__ = ["StreamConnection", "stream_handler"]

logger = logging.getLogger(__name__)

MAX_BAD_FRAMES = 8  # undecodable frames in a row
MAX_WRITE_BYTES = 16 * 1024  # nothing more is added to a write that is as long


class StreamConnection:
    """All that belongs to one open websocket.

    Args:
        drain: waits until the client has taken most of what was written.
        store: keeps the streams that can be resumed.
        caller: who is at the other end; only the same may resume what was started here.
    """

    def __init__(
        self,
        ws: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        drain: Callable[[], Awaitable[None]],
        codec: Codec,
        generator: TextGenerator,
        store: ResumeStore,
        config: GatewayConfig,
        *,
        caller: Caller,
    ) -> None:
        self._ws = ws
        self._transport = transport
        self._drain = drain
        self._codec = codec
        self._generator = generator
        self._store = store
        self._config = config
        self._caller = caller
        self._outbox = Outbox()
        self._runs: dict[str, StreamRun] = {}  # that end with this connection
        self._kept: dict[str, KeptStream] = {}  # that do not
        self._tasks = asyncio.TaskGroup()
        self._refusal: str | None = None  # why nothing new begins here
        self._is_retiring = False
        self._closing = False
        self._client_left = False  # on purpose
        self._num_bad_frames = 0
        self._ended = asyncio.Event()
        self._outbox.put_control(self._hello())

    async def run(self) -> None:
        """Serve until the connection ends; nothing of it is left running afterwards."""
        try:
            async with self._tasks:
                reader = self._tasks.create_task(self._read())
                writer = self._tasks.create_task(self._write(reader))
                try:
                    await asyncio.wait([reader])
                finally:
                    self._abandon_streams()
                    if not self._closing:
                        self._lose_streams()
                        writer.cancel()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(self._config.ws_close_timeout_s):
                    await self._ws.close(drain=False)
        finally:
            self._lose_streams()
            self._ended.set()

    @property
    def is_busy(self) -> bool:
        return self._outbox.num_streams > 0

    def drain(self, reason: str, *, retry_after_s: float = RETRY_AFTER_S) -> None:
        """Refuse new streams from now on; those that run may finish."""
        if self._refusal is None:
            self._refusal = reason
            self._outbox.put_control(Goaway(reason=reason, retry_after_s=retry_after_s))

    def retire(self, reason: str) -> None:
        self._is_retiring = True
        self.drain(reason, retry_after_s=0.0)

    def shut_down(self, reason: str) -> None:
        """Say goodbye, end every stream with status 503, and close once that is sent."""
        self.drain(reason)
        error = Unavailable(reason, code="shutting_down", retry_after_s=RETRY_AFTER_S)
        for run in (*self._runs.values(), *(kept.run for kept in self._kept.values())):
            run.mailbox.put_last(Error.of(error, run.mailbox.stream_id))
            run.mailbox.lift_limit()
            run.abandon()
        self._close(WSCloseCode.SERVICE_RESTART, reason)

    async def wait_ended(self) -> None:
        await self._ended.wait()

    def cut(self) -> None:
        """Drop the connection without a word."""
        if self._transport is not None:
            self._transport.abort()

    def stream_ended(self, stream_id: str) -> None:
        del self._kept[stream_id]

    def stream_taken_over(self, stream_id: str) -> None:
        kept = self._kept.pop(stream_id)
        self._outbox.detach(kept.run.mailbox)
        self._outbox.put_control(Error.of(taken_over(), stream_id))

    # ---- reading -------------------------------------------------------------------------------

    async def _read(self) -> None:
        rate = MessageRate(self._config.ws_max_messages_per_s)
        while not self._closing:
            # Answers that the client does not fetch stop us reading, not growing.
            await self._outbox.wait_for_room()
            frame = await self._ws.receive()
            await rate.wait()
            match frame.type:
                case WSMsgType.TEXT | WSMsgType.BINARY:
                    self._handle_frame(frame.type, frame.data)
                case WSMsgType.PING:
                    self._outbox.put_control(PongFrame(bytes(frame.data)))
                case WSMsgType.PONG:
                    pass
                case _:
                    self._client_left = (
                        frame.type is WSMsgType.CLOSE and frame.data == WSCloseCode.OK
                    )
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
                    self._open_stream(message)
                case Resume():
                    self._open_stream(message)
                case Credit():
                    self._credit(message)
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
            start_id = error.start_id
            is_free = start_id is not None and self._outbox.mailbox(start_id) is None
            self._outbox.put_control(Error.of(error, start_id if is_free else None))

    def _open_stream(self, message: Start | Resume) -> None:
        if self._outbox.mailbox(message.id) is not None:
            raise InvalidMessage(
                f"the id {message.id!r} belongs to an open stream", param="id", code="id_in_use"
            )
        try:
            if self._outbox.num_streams >= self._config.ws_max_streams:
                raise Overloaded(
                    f"this connection has {self._config.ws_max_streams} open streams, "
                    "the most allowed",
                    retry_after_s=1.0,
                )
            if isinstance(message, Start):
                self._start(message)
            else:
                self._resume(message)
        except GatewayError as error:
            self._outbox.put_control(Error.of(error, message.id))

    def _start(self, start: Start) -> None:
        if self._refusal is not None or self._closing:
            raise Unavailable(
                self._refusal or SHUTDOWN_REASON, code="shutting_down", retry_after_s=RETRY_AFTER_S
            )
        options = start.stream
        if options is not None and options.resumable:
            kept = self._store.open(start, self._outbox, self, caller=self._caller)
            if kept is not None:
                self._kept[start.id] = kept
                return
        mailbox = Mailbox(
            start.id,
            PlainBuffer(),
            with_token_ids=bool(start.return_token_ids),
            with_logprobs=start.request.logprobs is not None,
            credits=None if options is None else options.credits,
        )
        run = StreamRun(start, mailbox, self._generator, self._config, caller=self._caller)
        self._outbox.attach(mailbox)
        self._runs[start.id] = run
        run.task = self._tasks.create_task(run.run())
        run.task.add_done_callback(lambda _: self._forget(run))

    def _resume(self, resume: Resume) -> None:
        self._kept[resume.id] = self._store.resume(
            resume.token,
            principal=self._caller.principal,
            after=-1 if resume.after is None else resume.after,
            stream_id=resume.id,
            credits=resume.credits,
            outbox=self._outbox,
            carrier=self,
        )

    def _credit(self, credit: Credit) -> None:
        # For a stream that is not open there is none to tell: it may have ended meanwhile.
        if (mailbox := self._outbox.mailbox(credit.id)) is not None:
            mailbox.grant(credit.n)

    def _cancel(self, cancel: Cancel) -> None:
        mailbox = self._outbox.mailbox(cancel.id)
        if mailbox is None:
            error = NotFound(
                f"no open stream has the id {cancel.id!r}", param="id", code="unknown_id"
            )
            self._outbox.put_control(Error.of(error, None))
        elif (kept := self._kept.get(cancel.id)) is not None:
            kept.run.cancel()
        elif (run := self._runs.get(cancel.id)) is not None:
            run.cancel()
        else:  # its last message is on the way
            mailbox.lift_limit()

    def _forget(self, run: StreamRun) -> None:
        # The id may have been used again since this stream's last message was sent.
        if self._runs.get(run.mailbox.stream_id) is run:
            del self._runs[run.mailbox.stream_id]

    def _abandon_streams(self) -> None:
        """End all generations that end with the connection: leaving one aborts its request."""
        for run in self._runs.values():
            run.abandon()

    def _lose_streams(self) -> None:
        """Let the streams that can be resumed wait for another connection."""
        for kept in list(self._kept.values()):
            self._store.lose(kept, self._outbox)
            if self._client_left:
                self._store.drop(kept)
        self._kept.clear()

    # ---- writing -------------------------------------------------------------------------------

    async def _write(self, reader: asyncio.Task[None]) -> None:
        """Send what the outbox gives, until the connection closes or accepts no more bytes."""
        try:
            while not await self._send_next(reader):
                pass
        except TimeoutError:
            logger.info("closing a websocket whose client does not read")
            self._closing = True
            self._abandon_streams()
            await self._close_and_cut(
                reader, WSCloseCode.TRY_AGAIN_LATER, "the client reads too slowly"
            )
        except (OSError, aiohttp.ClientError):
            # The client is gone; the reader learns it as well.
            self._abandon_streams()
        except Exception:
            logger.exception("the writer of a websocket failed")
            self._closing = True
            self._abandon_streams()
            await self._close_and_cut(reader, WSCloseCode.INTERNAL_ERROR, "internal error")
        finally:
            self._outbox.close(
                WSCloseCode.GOING_AWAY, ""
            )  # lets a reader that waits for room go on

    async def _send_next(self, reader: asyncio.Task[None]) -> bool:
        """Send one message; return whether it was the last."""
        item = self._outbox.take_now() or await self._outbox.take()
        match item:
            case PongFrame():
                async with asyncio.timeout(self._config.send_timeout_s):
                    await self._ws.pong(item.payload)
            case Close():
                async with asyncio.timeout(self._config.send_timeout_s):
                    await close_politely(self._ws, reader, code=item.code, reason=item.reason)
                return True
            case _:
                await self._send(item)
        if self._is_retiring and not self.is_busy:
            self._close(WSCloseCode.GOING_AWAY, self._refusal or "")
        return False

    async def _send(self, message: ServerMessage | None) -> None:
        """Send a message, and in the same write what else is ready: a step has a token for each."""
        frames: list[bytes] = []
        num_bytes = 0
        while message is not None:
            frame = encode_frame(self._codec.encode(message), self._codec.frame_type)
            frames.append(frame)
            num_bytes += len(frame)
            message = self._outbox.take_output() if num_bytes < MAX_WRITE_BYTES else None
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._transport.write(b"".join(frames))
        if not has_room(self._transport):
            async with asyncio.timeout(self._config.send_timeout_s):
                await self._drain()

    async def _close_and_cut(self, reader: asyncio.Task[None], code: int, reason: str) -> None:
        """Leave a close frame for a client that may yet read it; then drop the connection."""
        with contextlib.suppress(OSError, aiohttp.ClientError, TimeoutError):
            async with asyncio.timeout(self._config.ws_close_timeout_s):
                await close_politely(self._ws, reader, code=code, reason=reason, drain=False)
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
                resume_ttl_s=self._config.resume_ttl_s,
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
    store = request.app[RESUME_STORE]
    # While we drain, a client whose connection was lost may still fetch the rest of its answers.
    is_awaited = request.app[DRAINING].is_set() and store.num_streams > 0
    if not request.app[ENGINE].is_ready and not is_awaited:
        raise Unavailable("the engine is not ready", retry_after_s=RETRY_AFTER_S)
    ws = await accept_websocket(
        request, max_message_bytes=config.max_body_bytes, protocols=(codec.subprotocol,)
    )
    connection = StreamConnection(
        ws,
        request.transport,
        request.writer.drain,
        codec,
        request.app[GENERATOR],
        store,
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
