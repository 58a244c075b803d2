import pytest

from gateway.errors import (
    DeadlineExceeded,
    Forbidden,
    GatewayError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    PayloadTooLarge,
    RequestTimeout,
    Unavailable,
    UnsupportedMediaType,
    from_engine_error,
    sanitize,
)
from jaxengine.errors import (
    EngineDeadError,
    EngineStalledError,
    EngineStoppingError,
    InvalidRequestError,
    QueueFullError,
)


def test_the_wire_form_has_exactly_the_four_keys_of_openai():
    assert InvalidRequest("no", param="n", code="c").to_wire() == {
        "message": "no",
        "type": "invalid_request_error",
        "param": "n",
        "code": "c",
    }


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest("x"), 400),
        (Forbidden("x"), 403),
        (ModelNotFound("m"), 404),
        (MethodNotAllowed("PUT", "GET"), 405),
        (RequestTimeout("x"), 408),
        (PayloadTooLarge("x"), 413),
        (UnsupportedMediaType("x"), 415),
        (Overloaded("x", retry_after_s=1), 429),
        (DeadlineExceeded(), 429),
        (InternalError(), 500),
        (Unavailable("x"), 503),
    ],
)
def test_each_error_has_its_status(error, status):
    assert error.status == status


def test_retry_after_is_a_whole_number_of_at_least_one_second():
    assert Overloaded("x", retry_after_s=2.1).headers() == {"Retry-After": "3"}
    assert Overloaded("x", retry_after_s=0.0).headers() == {"Retry-After": "1"}
    assert Unavailable("x").headers() == {}


def test_clients_are_told_not_to_repeat_what_would_come_too_late():
    assert DeadlineExceeded().headers() == {"x-should-retry": "false"}


def test_an_unknown_model_is_named_in_part():
    error = ModelNotFound("m" * 1000)
    assert (error.param, error.code) == ("model", "model_not_found")
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("exc", "status", "param", "code"),
    [
        (InvalidRequestError("x", field="top_p", code="c"), 400, "top_p", "c"),
        (QueueFullError("x", retry_after_s=7), 429, None, "queued_requests"),
        (QueueFullError("x", retry_after_s=7, reason="queue_timeout"), 429, None, "queue_timeout"),
        (EngineStoppingError("x"), 503, None, "shutting_down"),
        (EngineStalledError("x"), 503, None, "stalled"),
        (EngineDeadError("x"), 503, None, "engine_dead"),
        (RuntimeError("secret"), 500, None, "internal_error"),
        (InvalidRequest("x", param="n"), 400, "n", None),
    ],
)
def test_engine_errors_become_gateway_errors(exc, status, param, code):
    error = from_engine_error(exc)
    assert (error.status, error.param, error.code) == (status, param, code)
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("cannot open /home/user/model.gguf", "cannot open <path>"),
        ("in '/usr/lib/x.py', line 3", "in '<path>', line 3"),
        ("got <foo.Bar object at 0x7f1234567890>", "got <object>"),
        ("at 0x7f1234567890 it broke", "at <address> it broke"),
        ("two\nlines\x00and a null", "two lines and a null"),
        ("10 tokens/s and/or more", "10 tokens/s and/or more"),
        ("use /v1", "use /v1"),
    ],
)
def test_messages_show_no_paths_addresses_or_objects(raw, shown):
    assert sanitize(raw) == shown


def test_every_message_is_one_line_of_bounded_length():
    error = GatewayError("a\r\nb" + "x" * 10_000, status=400, type="t")
    assert error.message.startswith("a b")
    assert len(error.message) <= 500
