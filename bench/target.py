"""The server under test: its address, the body of a request, and one request sent to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import orjson
from yarl import URL

from bench.stream import RequestFailed, RequestRecord, measure_stream
from bench.workload import Prompt

__all__ = [
    "Endpoint",
    "Target",
    "describe_server",
    "find_model",
    "get_text",
    "make_body",
    "open_session",
    "send",
]

Endpoint = Literal["completions", "chat"]

PATHS: dict[Endpoint, str] = {"completions": "completions", "chat": "chat/completions"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where and how requests are sent.

    Attributes:
        url: of the server, with or without the trailing /v1.
        model: name that requests carry.
        api_key: sent as a bearer token; None sends none.
        ignore_eos: ask for exactly as many tokens as are wanted (an extension that vLLM, SGLang,
            llama.cpp and we know).
        continuous_usage: ask for usage in every chunk, for exact token counts.
        temperature: of the sampling.
    """

    url: str
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    ignore_eos: bool = True
    continuous_usage: bool = True
    temperature: float = 0.0

    @property
    def request_url(self) -> URL:
        """The URL that requests are posted to."""
        return api_root(self.url) / PATHS[self.endpoint]


def api_root(url: str) -> URL:
    """The URL that ends in /v1."""
    root = URL(url.rstrip("/"))
    return root if root.path.endswith("/v1") else root / "v1"


def make_body(
    target: Target, prompt: Prompt, output_len: int, extra: Mapping[str, Any] | None = None
) -> bytes:
    """The JSON body that asks for `output_len` tokens after `prompt`, with fields besides."""
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": output_len,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.continuous_usage:
        body["stream_options"]["continuous_usage_stats"] = True
    body.update(extra or {})
    return orjson.dumps(body)


def open_session(
    api_key: str | None, timeout_s: float, *, reuse: bool = True
) -> aiohttp.ClientSession:
    """A session without a limit on connections, so that the client never queues requests itself.

    Args:
        api_key: sent as a bearer token.
        timeout_s: how long the server may be silent within one request.
        reuse: send another request on a connection; some servers close it just then.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=not reuse),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=timeout_s),
    )


async def find_model(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """The first entry of the server's list of models.

    Raises:
        RequestFailed: the server cannot be reached or lists none.
    """
    listing = await get_json(session, api_root(url) / "models")
    models = listing.get("data") if isinstance(listing, dict) else None
    if not models or not isinstance(models[0], dict) or "id" not in models[0]:
        raise RequestFailed(
            "no model", f"{api_root(url) / 'models'} lists none; name one with --model"
        )
    first: dict[str, Any] = models[0]
    return first


async def describe_server(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """What the server says of itself, for the record; empty where it has no /version."""
    try:
        answer = await get_json(session, api_root(url).parent / "version")
    except RequestFailed:
        return {}
    return answer if isinstance(answer, dict) else {}


async def get_json(session: aiohttp.ClientSession, url: URL) -> object:
    """GET a JSON document."""
    try:
        document: object = orjson.loads(await get_body(session, url))
    except orjson.JSONDecodeError as error:
        raise RequestFailed("bad answer", f"{url} does not answer with JSON") from error
    return document


async def get_text(session: aiohttp.ClientSession, url: str, path: str) -> str:
    """GET a page that lies beside /v1, such as "metrics".

    Raises:
        RequestFailed: the server cannot be reached, or has no such page.
    """
    return (await get_body(session, api_root(url).parent / path)).decode()


async def get_body(session: aiohttp.ClientSession, url: URL) -> bytes:
    """GET whatever is there."""
    try:
        async with session.get(url) as response:
            body = await response.read()
            check_status(response.status, body)
            return body
    except (aiohttp.ClientError, TimeoutError) as error:
        raise failure_of(error) from error


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    body: bytes,
    record: RequestRecord,
    clock: Callable[[], float],
) -> None:
    """Send one request, read its answer, and fill the record, also when it fails."""
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(target.request_url, data=body, headers=headers) as response:
            if response.status != 200:
                record.retry_after = response.headers.get("Retry-After")
                check_status(response.status, await response.read())
            await measure_stream(response.content.iter_any(), record, clock)
    except RequestFailed as error:
        note_failure(record, error, clock)
    except (aiohttp.ClientError, TimeoutError) as error:
        note_failure(record, failure_of(error), clock)


def note_failure(record: RequestRecord, failure: RequestFailed, clock: Callable[[], float]) -> None:
    """Write a failure into the record."""
    record.error = failure.kind
    record.error_detail = str(failure)
    record.end_s = clock() - record.start_s


def check_status(status: int, body: bytes) -> None:
    """Refuse every status but 200, with the start of what the server said."""
    if status != 200:
        raise RequestFailed(f"http {status}", body[:300].decode(errors="replace").strip())


def failure_of(error: aiohttp.ClientError | TimeoutError) -> RequestFailed:
    """The kind of failure behind an exception of the transport."""
    if isinstance(error, TimeoutError):  # aiohttp's time-outs are both
        kind = "timeout"
    elif isinstance(error, aiohttp.ClientConnectionError) and not isinstance(
        error, aiohttp.ServerDisconnectedError | aiohttp.ClientConnectionResetError
    ):
        kind = "no connection"
    else:
        kind = "cut off"
    return RequestFailed(kind, str(error))
