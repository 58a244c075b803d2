"""StreamInbox on its own: no socket, only messages."""

import asyncio

import pytest

from headrace_client.errors import (
    BadRequest,
    ConnectionLost,
    GenerationFailed,
    Overloaded,
    ProtocolError,
)
from headrace_client.inbox import CREDITS, StreamInbox, TextDelta
from headrace_client.messages import Accepted, Delta, Done, ServerError, Timing, Usage

ACCEPTED = Accepted(id="s1", request_id="r", prompt_tokens=1)


def delta(seq: int, text: str, *token_ids: int) -> Delta:
    return Delta(id="s1", seq=seq, text=text, token_ids=token_ids or None)


def done(seq: int) -> Done:
    return Done(
        id="s1",
        seq=seq,
        finish_reason="stop",
        stop_reason=None,
        usage=Usage(prompt_tokens=1, completion_tokens=seq, cached_tokens=0),
        timing=Timing(
            queue_s=0.0,
            ttft_s=None,
            prefill_s=0.0,
            decode_s=0.0,
            e2e_s=0.0,
            itl_mean_s=None,
            itl_p50_s=None,
            itl_p99_s=None,
            itl_max_s=None,
            num_preemptions=0,
        ),
    )


def refusal(status: int, *, param: str | None = None, retry_after_s: float | None = None):
    return ServerError(
        id="s1",
        message="no",
        type="some_error",
        param=param,
        code="some_code",
        status=status,
        retry_after_s=retry_after_s,
    )


def lost(text: str) -> ConnectionLost:
    return ConnectionLost(text, code=None, retry_after_s=None)


def inbox_with(*messages: Accepted | Delta | Done | ServerError) -> StreamInbox:
    inbox = StreamInbox("s1")
    for message in messages:
        inbox.put(message)
    return inbox


# ---- reading -----------------------------------------------------------------------------------


async def test_deltas_merge_in_order_while_nobody_reads():
    inbox = inbox_with(ACCEPTED, delta(0, "a", 1, 2), delta(1, ""), delta(2, "bc", 3))
    assert await inbox.take() == TextDelta(text="abc", token_ids=(1, 2, 3))
    inbox.put(delta(3, "d"))
    inbox.put(done(4))
    assert await inbox.take() == TextDelta(text="d")
    assert await inbox.take() is None


async def test_a_reader_that_waits_gets_the_next_delta():
    inbox = inbox_with(ACCEPTED)
    reading = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not reading.done()
    inbox.put(delta(0, "a"))
    assert await reading == TextDelta(text="a")


async def test_a_delta_of_token_ids_without_text_is_handed_on():
    inbox = inbox_with(ACCEPTED, delta(0, "", 240))
    assert await inbox.take() == TextDelta(text="", token_ids=(240,))


async def test_what_is_discarded_is_not_read_and_still_counted():
    inbox = inbox_with(ACCEPTED, delta(0, "a", 1))
    inbox.discard()
    inbox.put(delta(1, "b", 2))
    inbox.put(done(2))
    assert await inbox.take() is None


async def test_a_server_may_send_what_it_was_allowed_to_and_not_much_more():
    """As much again, because one that stops sends what it has."""
    granted = []
    inbox = inbox_with(ACCEPTED)
    inbox.on_credit = lambda _, num_credits: granted.append(num_credits)
    for seq in range(CREDITS):
        inbox.put(delta(seq, "x"))
    await inbox.take()
    assert granted == [CREDITS]
    for seq in range(CREDITS, 3 * CREDITS):
        inbox.put(delta(seq, "x"))
    with pytest.raises(ProtocolError, match="'s1'"):
        inbox.put(delta(3 * CREDITS, "x"))


async def test_after_a_cancel_all_that_is_left_may_come():
    inbox = inbox_with(ACCEPTED)
    inbox.is_cancelled = True
    for seq in range(3 * CREDITS):
        inbox.put(delta(seq, "x"))
    inbox.put(done(3 * CREDITS))


async def test_what_a_server_can_make_us_hold_is_bounded(monkeypatch):
    monkeypatch.setattr("headrace_client.inbox.MAX_UNREAD_CHARS", 10)
    inbox = inbox_with(ACCEPTED, delta(0, "x" * 10))
    await inbox.take()
    inbox.put(delta(1, "x" * 10))
    with pytest.raises(ProtocolError, match="too much"):
        inbox.put(delta(2, "x"))


# ---- the end -----------------------------------------------------------------------------------


async def test_an_error_comes_after_the_text_before_it_and_again_whenever_asked():
    inbox = inbox_with(ACCEPTED, delta(0, "a"))
    inbox.fail(lost("gone"))
    assert await inbox.take() == TextDelta(text="a")
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="gone"):
            await inbox.take()


async def test_a_stream_that_ended_well_cannot_fail_any_more():
    inbox = inbox_with(ACCEPTED, done(0))
    inbox.fail(lost("gone"))
    assert await inbox.take() is None
    assert inbox.done == done(0)


async def test_only_the_first_error_counts():
    inbox = inbox_with(ACCEPTED)
    inbox.fail(lost("first"))
    inbox.fail(lost("second"))
    with pytest.raises(ConnectionLost, match="first"):
        await inbox.take()


# ---- acceptance --------------------------------------------------------------------------------


async def test_waiting_for_acceptance_ends_with_it_or_with_a_cancel_before_it():
    for message in (ACCEPTED, done(0)):
        inbox = StreamInbox("s1")
        waiting = asyncio.create_task(inbox.wait_accepted())
        await asyncio.sleep(0)
        assert not waiting.done()
        inbox.put(message)
        await waiting


async def test_an_error_before_acceptance_is_a_refusal_with_all_that_the_server_said():
    with pytest.raises(Overloaded, match="no") as full:
        await inbox_with(refusal(429, retry_after_s=1.5)).wait_accepted()
    assert (full.value.status, full.value.retry_after_s) == (429, 1.5)
    assert (full.value.type, full.value.code) == ("some_error", "some_code")
    with pytest.raises(BadRequest) as bad:
        await inbox_with(refusal(400, param="top_p")).wait_accepted()
    assert (bad.value.param, bad.value.retry_after_s) == ("top_p", None)


async def test_an_error_after_acceptance_is_no_refusal_whatever_its_status():
    inbox = inbox_with(ACCEPTED, refusal(503))
    await inbox.wait_accepted()
    with pytest.raises(GenerationFailed) as error:
        await inbox.take()
    assert error.value.status == 503


# ---- order -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ([ACCEPTED], delta(1, "x")),
        ([ACCEPTED, delta(0, "x")], delta(0, "x")),
        ([ACCEPTED, delta(0, "x")], done(0)),
        ([ACCEPTED], done(3)),
        ([ACCEPTED], ACCEPTED),
        ([delta(0, "x")], ACCEPTED),
    ],
)
async def test_a_message_that_may_not_come_next_is_refused(before, message):
    inbox = inbox_with(*before)
    with pytest.raises(ProtocolError, match="'s1'"):
        inbox.put(message)
