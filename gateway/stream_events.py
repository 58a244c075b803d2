"""The stream protocol as server-sent events, for clients without websockets (docs/protocol.md).

One request, one stream, the same messages. Unlike the events of the OpenAI endpoints these carry
an `id:`, the `seq` of the delta, so that a client whose connection was lost can go on after it.
"""

import asyncio
import contextlib

import msgspec
from aiohttp import web
from msgspec import UNSET

from gateway.app_keys import CONFIG, GENERATOR
from gateway.callers import caller_of
from gateway.errors import GatewayError, InvalidRequest
from gateway.json_body import convert, read_object
from gateway.mailbox import Mailbox, Outbox
from gateway.messages import Delta, Done, Error, ServerMessage, Start, StartRequest, StreamOptions
from gateway.resumption import RESUME_STORE, KeptStream, ResumeStore, taken_over
from gateway.silence import SilenceAlarm
from gateway.sse import EventStream, event
from gateway.stream_buffer import PlainBuffer
from gateway.stream_run import StreamRun

__all__ = ["EventsBody", "add_routes"]

STREAM_ID = "0"  # there is only one on a connection
MAX_SEQ = 2**53


class EventsBody(msgspec.Struct, frozen=True, kw_only=True):
    """A `start` without `type` and `id`."""

    request: StartRequest
    return_token_ids: bool | None = None
    stream: StreamOptions | None = None


def add_routes(app: web.Application) -> None:
    """Serve /v1/stream/events."""
    app.router.add_post("/v1/stream/events", start_events)
    app.router.add_get("/v1/stream/events", resume_events, allow_head=False)
    app.router.add_delete("/v1/stream/events", cancel_events)


async def start_events(request: web.Request) -> web.StreamResponse:
    """Begin a generation and send its messages."""
    body = _body(await read_object(request))
    options = body.stream or StreamOptions()
    if options.credits is not None:
        raise InvalidRequest(
            "events have no credits: a reader that reads slowly gets fewer and larger ones",
            param="stream.credits",
        )
    start = Start(
        id=STREAM_ID,
        request=body.request,
        return_token_ids=body.return_token_ids,
        stream=body.stream,
    )
    carrier = _EventCarrier(request)
    if not (options.resumable and carrier.open_kept(start)):
        carrier.open_plain(start)
    return await carrier.run()


async def resume_events(request: web.Request) -> web.StreamResponse:
    """Go on with a stream whose connection was lost."""
    after = -1
    if (text := request.headers.get("Last-Event-ID")) is not None:
        if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) < MAX_SEQ):
            raise InvalidRequest("Last-Event-ID must be the id of an event", param="Last-Event-ID")
        after = int(text)
    carrier = _EventCarrier(request)
    carrier.resume(_token(request), after)
    return await carrier.run()


async def cancel_events(request: web.Request) -> web.Response:
    """End a stream early; whoever reads it, or resumes it, gets its last message."""
    store = request.app[RESUME_STORE]
    store.find(_token(request), principal=caller_of(request).principal).run.cancel()
    return web.Response(status=204)


def _body(raw: dict[str, object]) -> EventsBody:
    """Return the body; what is wrong in its request is named as on the websocket."""
    try:
        return convert(raw, EventsBody)
    except InvalidRequest as error:
        prefix = "request."
        if error.param is None or not error.param.startswith(prefix):
            raise
        raise InvalidRequest(
            error.message.removeprefix(prefix), param=error.param.removeprefix(prefix)
        ) from None


def _token(request: web.Request) -> str:
    # In a header, because addresses end up in logs.
    token = request.headers.get("Resume-Token", "")
    if not token:
        raise InvalidRequest("the header Resume-Token is required", param="Resume-Token")
    return token


class _EventCarrier:
    """One response that carries one stream."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._config = request.app[CONFIG]
        self._store: ResumeStore = request.app[RESUME_STORE]
        self._caller = caller_of(request)
        self._outbox = Outbox()
        self._kept: KeptStream | None = None
        self._run: StreamRun | None = None

    def open_kept(self, start: Start) -> bool:
        """Begin a stream that can be resumed; False if there is no room for one."""
        self._kept = self._store.open(start, self._outbox, self, caller=self._caller)
        return self._kept is not None

    def open_plain(self, start: Start) -> None:
        """Begin a stream that ends with this response."""
        mailbox = Mailbox(
            start.id,
            PlainBuffer(),
            with_token_ids=bool(start.return_token_ids),
            with_logprobs=start.request.logprobs is not None,
        )
        self._outbox.attach(mailbox)
        self._run = StreamRun(
            start, mailbox, self._request.app[GENERATOR], self._config, caller=self._caller
        )
        self._run.task = asyncio.create_task(self._run.run())

    def resume(self, token: str, after: int) -> None:
        self._kept = self._store.resume(
            token,
            principal=self._caller.principal,
            after=after,
            stream_id=STREAM_ID,
            credits=None,
            outbox=self._outbox,
            carrier=self,
        )

    def stream_ended(self, stream_id: str) -> None:
        self._kept = None

    def stream_taken_over(self, stream_id: str) -> None:
        if self._kept is not None:
            self._outbox.detach(self._kept.run.mailbox)
        self._kept = None
        self._outbox.put_control(Error.of(taken_over(), stream_id))

    async def run(self) -> web.StreamResponse:
        """Send messages to the last one, or until the client is gone."""
        events = EventStream(self._request, send_timeout_s=self._config.send_timeout_s)
        try:
            first = await self._outbox.take()
            if isinstance(first, Error):
                raise _refusal(first)
            silence_s = self._config.sse_keep_alive_interval_s
            with (
                contextlib.suppress(ConnectionError),  # a client that leaves is a normal end
                contextlib.closing(SilenceAlarm(silence_s, self._outbox.wakeup.set)) as alarm,
            ):
                await events.open()
                await self._send(events, first, alarm)
                await events.close()
        finally:
            await self._leave()
        return events.response

    async def _send(self, events: EventStream, message: object, alarm: SilenceAlarm) -> None:
        while True:
            if message is not None:
                assert isinstance(message, ServerMessage)  # nobody puts pongs or closes here
                alarm.reset()
                await events.send([_event(message)])
                if isinstance(message, Done | Error):
                    return
            elif alarm.is_due:
                alarm.reset()
                await events.send_keep_alive()
            else:
                await self._outbox.wakeup.wait()
            message = self._outbox.take_now()

    async def _leave(self) -> None:
        if self._kept is not None:
            self._store.lose(self._kept, self._outbox)
            self._kept = None
        if self._run is not None and self._run.task is not None:
            self._run.abandon()
            await asyncio.gather(self._run.task, return_exceptions=True)


def _event(message: ServerMessage) -> bytes:
    name: str = message.__struct_config__.tag  # type: ignore[assignment]
    return event(
        msgspec.json.encode(message),
        name=name,
        event_id=message.seq if isinstance(message, Delta) else None,
    )


def _refusal(error: Error) -> GatewayError:
    """Return as an HTTP answer what ended the stream before it began."""
    body = error.error
    return GatewayError(
        body.message,
        status=error.status,
        type=body.type,
        param=body.param,
        code=body.code,
        retry_after_s=None if error.retry_after_s is UNSET else error.retry_after_s,
    )
