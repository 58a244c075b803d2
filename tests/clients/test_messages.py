"""What a program sees of the server's messages. docs/protocol.md's own: test_protocol_docs.py."""

import orjson
import pytest

from headrace_client.messages import Delta, Done, Hello, ServerError, ServerMessage, Timing
from headrace_client.wire import ENCODINGS
from scripted_server import DONE, HELLO


def read(message: object) -> ServerMessage | None:
    return ENCODINGS["json"].decode(orjson.dumps(message))


def test_a_hello_keeps_limits_that_this_client_does_not_know():
    limits = {"max_model_len": 8192, "max_credits": 5}
    assert read({**HELLO, "limits": limits, "extensions": []}) == Hello(
        server="scripted", version=1, model="m", limits=limits, heartbeat_s=20
    )


def test_the_times_of_an_answer_of_one_token_know_no_time_between_tokens():
    done = read({"type": "done", "id": "s1", "seq": 1, **DONE})
    assert isinstance(done, Done)
    assert done.timing == Timing(
        queue_s=0,
        ttft_s=0.5,
        prefill_s=0.5,
        decode_s=1,
        e2e_s=1.5,
        itl_mean_s=None,
        itl_p50_s=None,
        itl_p99_s=None,
        itl_max_s=None,
        num_preemptions=0,
    )


def test_an_optional_time_may_be_null_or_left_out():
    timing = {k: v for k, v in DONE["timing"].items() if not k.startswith("itl_")}
    short = read({"type": "done", "id": "s1", "seq": 0, **DONE, "timing": timing})
    assert short == read({"type": "done", "id": "s1", "seq": 0, **DONE})


@pytest.mark.parametrize("stop_reason", ["THE END", 2, None])
def test_a_stop_reason_is_the_string_or_the_token_id_that_ended_the_answer(stop_reason):
    done = read({"type": "done", "id": "s1", "seq": 0, **DONE, "stop_reason": stop_reason})
    assert isinstance(done, Done)
    assert done.stop_reason == stop_reason


def test_token_ids_are_none_unless_sent_even_if_there_were_none():
    message = {"type": "delta", "id": "s1", "seq": 0, "text": "x"}
    assert read(message) == Delta(id="s1", seq=0, text="x", token_ids=None)
    assert read({**message, "token_ids": []}) == Delta(id="s1", seq=0, text="x", token_ids=())


def test_an_error_needs_only_message_type_and_status():
    error = {"message": "no", "type": "server_error"}
    assert read({"type": "error", "error": error, "status": 500}) == ServerError(
        id=None,
        message="no",
        type="server_error",
        param=None,
        code=None,
        status=500,
        retry_after_s=None,
    )
