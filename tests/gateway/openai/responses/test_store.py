import asyncio

import msgspec
import pytest

from gateway.openai.responses.protocol import ReasoningOptions, ResponseObject, TextOptions
from gateway.openai.responses.store import ResponseStore, StoredResponse
from gateway.text_codec import ChatMessage, MessageCall

SIZE = 5000


def response(name, status="completed"):
    return ResponseObject(
        id=name,
        created_at=1,
        status=status,
        background=False,
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        metadata={},
        model="m",
        output=(),
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning=ReasoningOptions(),
        store=True,
        temperature=1.0,
        text=TextOptions(),
        tool_choice="auto",
        tools=(),
        top_p=1.0,
    )


def stored(name, size=SIZE, **fields):
    message = ChatMessage(role="user", content="x" * size)
    return StoredResponse(response(name, **fields), conversation=(message,))


def test_a_response_is_its_owners_alone():
    store = ResponseStore(1 << 20)
    mine = stored("a")
    store.put("me", mine)
    assert store.get("me", "a") is mine
    assert store.get("you", "a") is None
    assert store.delete("you", "a") is None
    assert store.delete("me", "a") is mine
    assert (len(store), store.num_bytes) == (0, 0)


def test_what_nobody_asked_for_the_longest_goes_first():
    store = ResponseStore(2 * stored("a").num_bytes)
    for name in "ab":
        store.put("", stored(name))
    store.get("", "a")
    store.put("", stored("c"))
    assert [name for name in "abc" if store.get("", name)] == ["a", "c"]


def test_bytes_stay_within_the_bound_whatever_comes():
    store = ResponseStore(20_000)
    for number in range(100):
        store.put("", stored(str(number), size=number * 97 % 4000))
        assert store.num_bytes <= 20_000
    store.put("", stored("huge", size=30_000))
    assert store.get("", "huge") is None
    assert (len(store), store.num_bytes) == (0, 0)


def test_everything_that_is_kept_counts():
    call = MessageCall(id="1", name="f", arguments="x" * 1000)
    message = ChatMessage(role="assistant", content="", reasoning="x" * 1000, tool_calls=(call,))
    plain = StoredResponse(response("a"))
    assert (
        StoredResponse(response("a"), conversation=(message,), events=[b"x" * 1000]).num_bytes
        >= plain.num_bytes + 3000
    )


def test_what_runs_is_not_forgotten_and_counts_once_it_has_ended():
    store = ResponseStore(10)
    running = stored("a", status="in_progress")
    store.put("", running)
    store.put("", stored("b"))
    assert store.get("", "a") is running
    assert store.num_bytes == 0
    running.response = response("a")
    assert store.holds("", running)
    store.put("", running)
    assert not store.holds("", running)


def test_a_response_put_again_counts_once():
    store = ResponseStore(1 << 20)
    one = stored("a")
    store.put("", one)
    store.put("", one)
    assert store.num_bytes == one.num_bytes


async def test_followers_get_each_event_once_and_then_the_end():
    running = StoredResponse(response("a", status="in_progress"), events=[b"0", b"1"])

    async def follow(after):
        return [e async for batch in running.follow(after, idle_s=None) for e in batch]

    tasks = [asyncio.create_task(follow(after)) for after in (-1, 0, 1, 7)]
    for number in (b"2", b"3"):
        await asyncio.sleep(0)
        running.events.append(number)
        running.notify()
    await asyncio.sleep(0)
    running.response = msgspec.structs.replace(running.response, status="completed")
    running.notify()
    await running.wait_ended()
    assert [b"".join(await task) for task in tasks] == [b"0123", b"123", b"23", b""]
    assert await follow(2) == [b"3"]


async def test_silence_is_told():
    running = StoredResponse(response("a", status="in_progress"), events=[])
    follower = running.follow(-1, idle_s=0.001)
    assert await anext(follower) is None
    await follower.aclose()


def test_what_cannot_be_counted_is_not_kept():
    store = ResponseStore(1 << 20)
    running = stored("a", status="in_progress")
    store.put("", running)
    running.response = msgspec.structs.replace(response("a"), metadata={"a": "\ud800"})
    with pytest.raises(UnicodeEncodeError):
        store.put("", running)
    assert (len(store), store.num_bytes) == (0, 0)
