"""Every address of the server, as the OpenAPI document tells of it.

A new route needs its operation here; a test compares this table with the application's routes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from gateway.openai.models import ModelEntry, ModelList
from gateway.openai.protocol import ChatBody, CompletionBody
from gateway.openai.responses.input_items import InputItemList
from gateway.openai.responses.protocol import (
    DeletedResponse,
    ResponseEvent,
    ResponseObject,
    ResponsesBody,
)
from gateway.openai.tokenize import (
    DetokenizeBody,
    DetokenizedBody,
    TokenizeBody,
    TokenizedBody,
    TokenizerInfoBody,
)
from gateway.openapi_bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    HealthBody,
    ReadyBody,
    StepsBody,
    TextCompletion,
    TicketBody,
    VersionBody,
)
from gateway.stream_events import EventsBody
from gateway.usage import UsageBody

__all__ = ["ERRORS", "OPERATIONS", "Content", "Operation", "Parameter"]

JSON = "application/json"
EVENT_STREAM = "text/event-stream"

# What each status means, wherever it is answered.
ERRORS = {
    400: "The request makes no sense as it is; `param` names the field.",
    401: "The server has keys and got none of them.",
    403: "This Host or Origin is not allowed, or the key does not suffice.",
    404: "Nothing has this name.",
    408: "The body did not arrive in time.",
    410: "What was asked for is not kept any more.",
    413: "The body is too large.",
    415: "The body is not JSON by its own account.",
    429: "Too much waits already, or the request's own time is up; see Retry-After.",
    500: "A fault of the server.",
    503: "The server is not ready, or is about to stop.",
}
ALWAYS = (403, 500)
WITH_KEY = (401,)
WITH_BODY = (400, 404, 408, 413, 415, 429, 503)  # 404: a body may name a model


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """A body in one media type.

    Attributes:
        type: of the JSON, or of each event's JSON in a stream; None for text and bytes.
    """

    media_type: str = JSON
    type: object = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A part of the address, or a header."""

    name: str
    place: Literal["path", "query", "header"] = "query"
    type: object = str
    description: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """What one method of one address takes and gives.

    Attributes:
        answers: by status, where it is no error: what it means, and the bodies it may have.
        errors: statuses that answer with an ErrorBody, besides those that every address has.
        needs_key: where the operator has set keys.
    """

    method: Literal["get", "post", "delete"]
    path: str
    summary: str
    parameters: tuple[Parameter, ...] = ()
    body: object = None
    answers: Mapping[int, tuple[str, tuple[Content, ...]]]
    errors: tuple[int, ...] = ()
    needs_key: bool = True

    @property
    def all_errors(self) -> tuple[int, ...]:
        """Every status that answers with an ErrorBody."""
        with_body = WITH_BODY if self.body is not None else ()
        with_key = WITH_KEY if self.needs_key else ()
        statuses = {*ALWAYS, *with_key, *with_body, *self.errors} - self.answers.keys()
        return tuple(sorted(statuses))


def _json(type_: object, text: str = "The answer.") -> dict[int, tuple[str, tuple[Content, ...]]]:
    return {200: (text, (Content(type=type_),))}


def _other(*media_types: str) -> dict[int, tuple[str, tuple[Content, ...]]]:
    return {200: ("The answer.", tuple(Content(media_type=name) for name in media_types))}


def _whole_or_stream(whole: object, chunk: object) -> dict[int, tuple[str, tuple[Content, ...]]]:
    text = "The answer; with `stream`, as events that end with `data: [DONE]`."
    return {200: (text, (Content(type=whole), Content(media_type=EVENT_STREAM, type=chunk)))}


RESUME_TOKEN = Parameter(
    name="Resume-Token", place="header", description="That of `accepted`; required."
)

UPGRADED: dict[int, tuple[str, tuple[Content, ...]]] = {
    101: ("A websocket; docs/protocol.md says what it carries.", ())
}
AFTER = Parameter(
    name="after",
    type=Annotated[int, Meta(ge=-1, le=2**53)],
    description="The index of the last step that the caller has.",
)
SHARES = Parameter(
    name="shares",
    type=Literal["0", "1"],
    description="1 also tells what each request had of each step.",
)

RESPONSE: dict[int, tuple[str, tuple[Content, ...]]] = {
    200: (
        "The response; with `stream`, as events, of which the last has it whole.",
        (Content(type=ResponseObject), Content(media_type=EVENT_STREAM, type=ResponseEvent)),
    )
}
RESPONSE_ID = Parameter(name="response_id", place="path", description="The response.")

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation.",
        body=ChatBody,
        answers=_whole_or_stream(ChatCompletion, ChatCompletionChunk),
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue one or more prompts.",
        body=CompletionBody,
        answers=_whole_or_stream(TextCompletion, TextCompletion),
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer a conversation, and remember it.",
        body=ResponsesBody,
        answers=RESPONSE,
    ),
    Operation(
        method="get",
        path="/v1/responses",
        summary="Many responses at a time on one websocket.",
        answers=UPGRADED,
        errors=(400, 503),
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}",
        summary="Tell of a response, or with `stream` follow one in the background.",
        parameters=(
            RESPONSE_ID,
            Parameter(
                name="stream", type=Literal["true", "false"], description="Answer with events."
            ),
            Parameter(
                name="starting_after",
                type=Annotated[int, Meta(ge=-1, le=2**53)],
                description="The sequence number of the last event that the caller has.",
            ),
        ),
        answers=RESPONSE,
        errors=(400, 404),
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response_id}",
        summary="Forget a response.",
        parameters=(RESPONSE_ID,),
        answers=_json(DeletedResponse),
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        summary="End a response in the background.",
        parameters=(RESPONSE_ID,),
        answers=_json(ResponseObject),
        errors=(400, 404),
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        summary="List what a response was asked.",
        parameters=(
            RESPONSE_ID,
            Parameter(
                name="limit",
                type=Annotated[int, Meta(ge=1, le=100)],
                description="The most items to answer, by default 20.",
            ),
            Parameter(
                name="order",
                type=Literal["asc", "desc"],
                description="The last item comes first by default.",
            ),
            Parameter(name="after", description="The id of the last item that the caller has."),
        ),
        answers=_json(InputItemList),
        errors=(400, 404),
    ),
    Operation(
        method="get",
        path="/v1/stream",
        summary="Many streams on one websocket: the native protocol.",
        answers=UPGRADED,
        errors=(400, 503),
    ),
    Operation(
        method="post",
        path="/v1/stream/events",
        summary="One stream of the native protocol, as events.",
        body=EventsBody,
        answers=_other(EVENT_STREAM),
    ),
    Operation(
        method="get",
        path="/v1/stream/events",
        summary="Go on with such a stream whose connection was lost.",
        parameters=(
            RESUME_TOKEN,
            Parameter(name="Last-Event-ID", place="header", description="The last id that came."),
        ),
        answers=_other(EVENT_STREAM),
        errors=(400, 404, 410),
    ),
    Operation(
        method="delete",
        path="/v1/stream/events",
        summary="End such a stream early.",
        parameters=(RESUME_TOKEN,),
        answers={204: ("It ends.", ())},
        errors=(400, 404),
    ),
    Operation(
        method="post",
        path="/v1/ws-ticket",
        summary="Trade a key for a ticket, which a browser's websocket can carry.",
        answers=_json(TicketBody),
        errors=(429,),
    ),
    Operation(
        method="get",
        path="/v1/usage",
        summary="Tell what the caller's key has used, and may; to an admin, of all keys.",
        answers=_json(UsageBody),
    ),
    Operation(
        method="get",
        path="/v1/models",
        summary="List the names that requests may use.",
        answers=_json(ModelList),
    ),
    Operation(
        method="get",
        path="/v1/models/{name}",
        summary="Describe one of them.",
        parameters=(
            Parameter(name="name", place="path", description="The name; it may hold slashes."),
        ),
        answers=_json(ModelEntry),
        errors=(404,),
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="Turn a text or a conversation into token ids.",
        body=TokenizeBody,
        answers=_json(TokenizedBody),
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="Turn token ids into text.",
        body=DetokenizeBody,
        answers=_json(DetokenizedBody),
    ),
    Operation(
        method="get",
        path="/tokenizer_info",
        summary="Tell the special tokens and the chat template.",
        answers=_json(TokenizerInfoBody),
    ),
    Operation(
        method="get",
        path="/v1/steps",
        summary="Tell what the engine's last steps did.",
        parameters=(
            Parameter(
                name="limit",
                type=Annotated[int, Meta(ge=1, le=1000)],
                description="The most steps to answer.",
            ),
            AFTER,
            SHARES,
        ),
        answers=_json(StepsBody),
        errors=(400,),
    ),
    Operation(
        method="get",
        path="/v1/steps/stream",
        summary="Tell it live, on a websocket.",
        parameters=(AFTER, SHARES),
        answers=UPGRADED,
        errors=(400, 503),
    ),
    Operation(
        method="get",
        path="/v1/steps/trace",
        summary="Tell it as a trace for ui.perfetto.dev.",
        answers=_json(dict[str, object]),
    ),
    Operation(
        method="get",
        path="/health",
        summary="Is the process to live on?",
        answers={
            200: ("The engine lives.", (Content(type=HealthBody),)),
            503: ("The engine is dead, or stalled; restart.", (Content(type=HealthBody),)),
        },
        needs_key=False,
    ),
    Operation(
        method="get",
        path="/ready",
        summary="Are requests accepted?",
        answers={
            200: ("Yes.", (Content(type=ReadyBody),)),
            503: ("Not now.", (Content(type=ReadyBody),)),
        },
        needs_key=False,
    ),
    Operation(
        method="get",
        path="/metrics",
        summary="Numbers for Prometheus.",
        answers=_other("text/plain", "application/openmetrics-text"),
    ),
    Operation(
        method="get",
        path="/version",
        summary="Tell the version.",
        answers=_json(VersionBody),
    ),
    Operation(
        method="get",
        path="/openapi.json",
        summary="This document.",
        answers=_json(dict[str, object]),
    ),
    Operation(
        method="get",
        path="/",
        summary="The chat page.",
        answers=_other("text/html"),
        needs_key=False,
    ),
    Operation(
        method="get",
        path="/dashboard",
        summary="The dashboard.",
        answers=_other("text/html"),
        needs_key=False,
    ),
    Operation(
        method="get",
        path="/docs",
        summary="This document as a page.",
        answers=_other("text/html"),
        needs_key=False,
    ),
    Operation(
        method="get",
        path="/static/{name}",
        summary="What the pages load.",
        parameters=(Parameter(name="name", place="path", description="Name of the file."),),
        answers=_other("*/*"),
        errors=(404,),
        needs_key=False,
    ),
)
