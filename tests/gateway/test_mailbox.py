import asyncio

import pytest

from gateway.generation import Timing, Usage
from gateway.mailbox import MAX_WAITING_REPLIES, Close, Mailbox, Outbox, PongFrame
from gateway.messages import Accepted, Delta, Done, Pong
from gateway.stream_buffer import PlainBuffer


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


def opened(outbox: Outbox, stream_id: str, *, ids: bool = False, credits: int | None = None):
    mailbox = Mailbox(stream_id, PlainBuffer(), with_token_ids=ids, credits=credits)
    outbox.attach(mailbox)
    return mailbox


async def test_deltas_that_wait_merge_into_one():
    outbox = Outbox()
    a = opened(outbox, "a", ids=True)
    for n in range(10_000):
        a.put_delta("x", (n,))
    a.put_last(done("a"))
    delta, last = await outbox.take(), await outbox.take()
    assert delta == Delta(id="a", seq=0, text="x" * 10_000, token_ids=list(range(10_000)))
    assert isinstance(last, Done)
    assert last.seq == 1
    assert outbox.num_streams == 0


async def test_streams_take_turns_however_much_one_of_them_has():
    outbox = Outbox()
    big, small, other = (opened(outbox, stream_id) for stream_id in ("big", "small", "other"))
    order = []
    big.put_delta("x" * 1000, ())
    small.put_delta("y", ())
    other.put_delta("z", ())
    for _ in range(4):
        message = await outbox.take()
        assert isinstance(message, Delta)
        order.append(message.id)
        big.put_delta("x" * 1000, ())  # it always has more
    assert order == ["big", "small", "other", "big"]


async def test_the_last_message_waits_for_the_turn_of_the_others():
    outbox = Outbox()
    a, b = opened(outbox, "a"), opened(outbox, "b")
    a.put_delta("text", ())
    b.put_delta("text", ())
    a.put_last(done("a"))
    taken = [await outbox.take() for _ in range(3)]
    assert [(type(m), m.id) for m in taken if isinstance(m, Delta | Done)] == [
        (Delta, "a"),
        (Delta, "b"),
        (Done, "a"),
    ]


async def test_control_messages_go_first():
    outbox = Outbox()
    opened(outbox, "a").put_delta("text", ())
    outbox.put_control(Pong(t=1))
    outbox.put_control(PongFrame(b"x"))
    assert await outbox.take() == Pong(t=1)
    assert await outbox.take() == PongFrame(b"x")
    assert isinstance(await outbox.take(), Delta)


async def test_only_the_first_last_message_counts():
    outbox = Outbox()
    a = opened(outbox, "a")
    a.put_last(done("a"))
    a.put_last(done("a"))
    await outbox.take()
    assert outbox.mailbox("a") is None
    a.put_last(done("a"))  # it has ended: nothing to take
    outbox.close(1000, "")
    assert await outbox.take() == Close(1000, "")


async def test_nothing_is_taken_for_a_delta_without_content():
    outbox = Outbox()
    a = opened(outbox, "a")
    a.put_delta("", (1, 2, 3))
    a.put_last(done("a"))
    last = await outbox.take()
    assert isinstance(last, Done)
    assert last.seq == 0


async def test_close_comes_after_everything_else_and_ends_putting():
    outbox = Outbox()
    opened(outbox, "a").put_delta("text", ())
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


# ---- credits -----------------------------------------------------------------------------------


async def test_without_credit_deltas_merge_and_the_last_message_waits_behind_them():
    outbox = Outbox()
    a = opened(outbox, "a", credits=1)
    a.put_delta("one", ())
    assert await outbox.take() == Delta(id="a", seq=0, text="one")
    for piece in ("two", "three"):
        a.put_delta(piece, ())
    a.put_last(done("a"))
    outbox.put_control(Pong(t=1))
    assert await outbox.take() == Pong(t=1)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    a.grant(1)
    assert await taking == Delta(id="a", seq=1, text="twothree")
    last = await outbox.take()
    assert isinstance(last, Done)
    assert last.seq == 2


async def test_a_stream_without_credit_holds_up_no_other():
    outbox = Outbox()
    a, b = opened(outbox, "a", credits=1), opened(outbox, "b")
    for n in range(3):
        a.put_delta(f"a{n}", ())
        b.put_delta(f"b{n}", ())
    taken = [await outbox.take() for _ in range(2)]
    a.put_delta("more", ())
    b.put_delta("b3", ())
    taken.append(await outbox.take())
    assert [(m.id, m.text) for m in taken if isinstance(m, Delta)] == [
        ("a", "a0a1a2"),
        ("b", "b0b1b2"),
        ("b", "b3"),
    ]


async def test_the_first_and_the_last_message_cost_no_credit_and_lifting_frees_all():
    outbox = Outbox()
    a = opened(outbox, "a", credits=1)
    a.put_first(Accepted(id="a", request_id="r", prompt_tokens=1))
    assert isinstance(await outbox.take(), Accepted)
    a.put_delta("x", ())
    assert isinstance(await outbox.take(), Delta)
    a.put_delta("y", ())
    a.lift_limit()
    assert await outbox.take() == Delta(id="a", seq=1, text="y")
    a.put_last(done("a"))
    assert isinstance(await outbox.take(), Done)


async def test_a_detached_stream_keeps_what_it_holds_and_brings_it_to_the_next_outbox():
    first, second = Outbox(), Outbox()
    a = opened(first, "a")
    a.put_delta("x", ())
    first.detach(a)
    a.put_delta("y", ())
    assert first.num_streams == 0
    a.stream_id = "b"
    a.put_last(done("a"))
    second.attach(a)
    assert await second.take() == Delta(id="b", seq=0, text="xy")
    last = await second.take()
    assert isinstance(last, Done)
    assert last.id == "b"
    first.close(1000, "")
    assert await first.take() == Close(1000, "")
