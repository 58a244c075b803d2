"""One listening gateway: start, and a stop that lets running answers finish."""

import asyncio
import logging
import ssl
from types import TracebackType
from typing import Self, cast
from weakref import ReferenceType, WeakSet, ref

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError

from gateway.app import build_app
from gateway.config import GatewayConfig
from gateway.connection_guard import ConnectionGuard, plain_response
from gateway.connections import RETRY_AFTER_S, begin_drain
from gateway.errors import (
    GatewayError,
    InternalError,
    InvalidRequest,
    Unavailable,
    UnsupportedMediaType,
    sanitize,
)
from gateway.generation import TextGenerator
from gateway.key_ring import KeyRing
from gateway.metrics import Metrics
from gateway.middleware import error_response

__all__ = ["Server"]

logger = logging.getLogger(__name__)

# Once the engine has drained, handlers only have to send their last bytes; aiohttp waits for a
# handler up to twice this long.
HANDLER_TIMEOUT_S = 3.0


class Server:
    """Serves one generator on one address: ``async with Server(...) as server: server.url``.

    Owns: the listening socket, the connections and the generator's threads. Never: starts the
    engine; but `stop` stops it, because only both together end in good order.

    Args:
        keys: who may come in; without, everybody.
        tls: speak TLS with the certificate of this context.
    """

    def __init__(
        self,
        config: GatewayConfig,
        generator: TextGenerator,
        metrics: Metrics,
        *,
        keys: KeyRing | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._config = config
        self._tls = tls
        self._generator = generator
        self._runner = web.AppRunner(
            build_app(config, generator, metrics, keys or KeyRing(None)),
            # A client that leaves cancels its handler at once, whatever the handler waits for.
            handler_cancellation=True,
            shutdown_timeout=HANDLER_TIMEOUT_S,
        )
        self._http_logger = _http_logger()
        # It would log subprotocols that are not ours, word for word; some clients put keys there.
        logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)
        self._listener: asyncio.Server | None = None
        # Those that asyncio has accepted. It drops who fails at the TLS handshake without a word,
        # at once or as garbage: so they are held weakly, and unmade ones not for long.
        self._connections: WeakSet[ConnectionGuard] = WeakSet()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def port(self) -> int:
        """The port we listen on, also when the configuration left the choice open."""
        if self._listener is None:
            return self._config.port
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """An address that a browser on this machine can open."""
        scheme = "http" if self._tls is None else "https"
        host = "127.0.0.1" if self._config.listens_everywhere else self._config.host
        return (
            f"{scheme}://[{host}]:{self.port}" if ":" in host else f"{scheme}://{host}:{self.port}"
        )

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be had.
        """
        await self._runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                self._new_connection,
                self._config.host or None,
                self._config.port,
                backlog=1024,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self._config.header_timeout_s,
                ssl_shutdown_timeout=None if self._tls is None else HANDLER_TIMEOUT_S,
            )
        except BaseException:
            await self._runner.cleanup()
            raise

    async def stop(self, *, drain_timeout_s: float | None = None) -> None:
        """Refuse new requests, let running ones finish, tell the rest, and close everything.

        While requests finish we still listen: /health answers, /ready says no, and a new request
        is refused with 503. What has not finished in time ends with an error event or message.

        Args:
            drain_timeout_s: instead of the configured `shutdown_timeout_s`.
        """
        if drain_timeout_s is None:
            drain_timeout_s = self._config.shutdown_timeout_s
        begin_drain(self._runner.app)
        await self._generator.engine.stop(drain_timeout_s=drain_timeout_s)
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        self._generator.close()

    def _new_connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or len(self._connections) >= self._config.max_connections:
            return _Refusal()
        connection = _HttpConnection(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=self._config.keepalive_timeout_s,
            access_log=None,  # type: ignore[arg-type]  # no log at all
            logger=self._http_logger,
        )
        guard = ConnectionGuard(connection, self._config, on_lost=self._connections.discard)
        self._connections.add(guard)  # now: others may be accepted before this one is made
        if self._tls is not None:
            asyncio.get_running_loop().call_later(
                self._config.header_timeout_s, self._forget_unmade, ref(guard)
            )
        return guard

    def _forget_unmade(self, reference: ReferenceType[ConnectionGuard]) -> None:
        """Count a connection no more whose handshake has had all of its time."""
        guard = reference()
        if guard is not None and not guard.was_made:
            self._connections.discard(guard)


class _HttpConnection(web.RequestHandler):
    """aiohttp's side of a connection, with our words for what it refuses by itself."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, "")  # logs, or raises if it is too late
        error: GatewayError = InternalError()
        if isinstance(exc, ContentEncodingError):  # one that would need another package
            error = UnsupportedMediaType("the body's Content-Encoding is not known here")
        elif status < 500:
            error = InvalidRequest(
                "this is not valid HTTP, or its head is larger than allowed", code="bad_http"
            )
        response = error_response(error)
        response.headers["Server"] = "headrace"
        response.force_close()
        return response


class _ClientFaults(logging.Filter):
    """Makes one quiet line of the traceback that aiohttp logs for every broken request.

    Anybody who can connect could fill the log with them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            return True
        logger.debug("a client sent broken HTTP: %s", sanitize(str(error)))
        return False


_client_faults = _ClientFaults()


def _http_logger() -> logging.Logger:
    """The logger of aiohttp's connections."""
    http_logger = logging.getLogger(f"{__name__}.http")
    http_logger.addFilter(_client_faults)  # again and again the same one: added once
    return http_logger


class _Refusal(asyncio.Protocol):
    """Tells one connection too many to come back later, without reading what it wants."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        error = Unavailable(
            "too many connections are open",
            code="too_many_connections",
            retry_after_s=RETRY_AFTER_S,
        )
        # uvloop's transports do not inherit from asyncio's.
        cast(asyncio.WriteTransport, transport).write(plain_response(error, "Service Unavailable"))
        transport.close()
