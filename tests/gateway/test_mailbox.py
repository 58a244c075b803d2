import asyncio

import pytest

from gateway.generation import Timing, Usage
from gateway.mailbox import MAX_WAITING_REPLIES, Close, Outbox, PongFrame
from gateway.messages import Delta, Done, Pong


def done(stream_id: str) -> Done:
    return Done(
        id=stream_id,
        seq=0,
        finish_reason="stop",
        stop_reason=None,
        usage=Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0),
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


async def test_deltas_that_wait_merge_into_one():
    outbox = Outbox()
    outbox.open_stream("a", with_token_ids=True)
    for n in range(10_000):
        outbox.put_delta("a", "x", (n,))
    outbox.put_last("a", done("a"))
    delta, last = await outbox.take(), await outbox.take()
    assert delta == Delta(id="a", seq=0, text="x" * 10_000, token_ids=list(range(10_000)))
    assert isinstance(last, Done)
    assert last.seq == 1
    assert outbox.num_streams == 0


async def test_streams_take_turns_however_much_one_of_them_has():
    outbox = Outbox()
    for stream_id in ("big", "small", "other"):
        outbox.open_stream(stream_id, with_token_ids=False)
    order = []
    outbox.put_delta("big", "x" * 1000, ())
    outbox.put_delta("small", "y", ())
    outbox.put_delta("other", "z", ())
    for _ in range(4):
        message = await outbox.take()
        assert isinstance(message, Delta)
        order.append(message.id)
        outbox.put_delta("big", "x" * 1000, ())  # it always has more
    assert order == ["big", "small", "other", "big"]


async def test_the_last_message_waits_for_the_turn_of_the_others():
    outbox = Outbox()
    for stream_id in ("a", "b"):
        outbox.open_stream(stream_id, with_token_ids=False)
        outbox.put_delta(stream_id, "text", ())
    outbox.put_last("a", done("a"))
    taken = [await outbox.take() for _ in range(3)]
    assert [(type(m), m.id) for m in taken if isinstance(m, Delta | Done)] == [
        (Delta, "a"),
        (Delta, "b"),
        (Done, "a"),
    ]


async def test_control_messages_go_first():
    outbox = Outbox()
    outbox.open_stream("a", with_token_ids=False)
    outbox.put_delta("a", "text", ())
    outbox.put_control(Pong(t=1))
    outbox.put_control(PongFrame(b"x"))
    assert await outbox.take() == Pong(t=1)
    assert await outbox.take() == PongFrame(b"x")
    assert isinstance(await outbox.take(), Delta)


async def test_only_the_first_last_message_counts():
    outbox = Outbox()
    outbox.open_stream("a", with_token_ids=False)
    outbox.put_last("a", done("a"))
    outbox.put_last("a", done("a"))
    await outbox.take()
    assert not outbox.is_open("a")
    outbox.put_last("a", done("a"))  # it has ended: nothing to take
    outbox.close(1000, "")
    assert await outbox.take() == Close(1000, "")


async def test_nothing_is_taken_for_a_delta_without_content():
    outbox = Outbox()
    outbox.open_stream("a", with_token_ids=False)
    outbox.put_delta("a", "", (1, 2, 3))
    outbox.put_last("a", done("a"))
    last = await outbox.take()
    assert isinstance(last, Done)
    assert last.seq == 0


async def test_close_comes_after_everything_else_and_ends_putting():
    outbox = Outbox()
    outbox.open_stream("a", with_token_ids=False)
    outbox.put_delta("a", "text", ())
    outbox.put_control(Pong(t=1))
    outbox.close(1012, "bye")
    outbox.put_control(Pong(t=2))
    outbox.close(1000, "later")
    assert await outbox.take() == Pong(t=1)
    assert isinstance(await outbox.take(), Delta)
    assert await outbox.take() == Close(1012, "bye")


async def test_replies_that_nobody_fetches_stop_the_reader():
    outbox = Outbox()
    for n in range(MAX_WAITING_REPLIES):
        await asyncio.wait_for(outbox.wait_for_room(), 1)
        outbox.put_control(Pong(t=n))
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    for _ in range(MAX_WAITING_REPLIES // 2 + 1):
        await outbox.take()
    await waiting


async def test_close_lets_a_waiting_reader_go_on():
    outbox = Outbox()
    for n in range(MAX_WAITING_REPLIES):
        outbox.put_control(Pong(t=n))
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    outbox.close(1001, "")
    await waiting


async def test_a_cancelled_take_loses_nothing():
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put_control(Pong(t=1))
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert await outbox.take() == Pong(t=1)
