import asyncio

from gateway.openai.responses.frames import MAX_WAITING, CloseFrame, FrameQueue, PongFrame


async def test_frames_come_in_order_and_the_close_last():
    queue = FrameQueue()
    queue.put(b"a")
    queue.put(PongFrame(b"p"))
    queue.close(1012, "bye")
    queue.put(b"too late")
    queue.close(1000, "later")
    assert [await queue.take() for _ in range(4)] == [
        b"a",
        PongFrame(b"p"),
        CloseFrame(1012, "bye"),
        CloseFrame(1012, "bye"),
    ]


async def test_whoever_takes_waits_for_a_frame():
    queue = FrameQueue()
    task = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    assert not task.done()
    queue.put(b"a")
    assert await task == b"a"


async def test_there_is_room_again_once_half_is_taken():
    queue = FrameQueue()
    await queue.wait_for_room()
    for _ in range(MAX_WAITING):
        queue.put(b"a")
    waiting = asyncio.create_task(queue.wait_for_room())
    for _ in range(MAX_WAITING // 2):
        await queue.take()
    await asyncio.sleep(0)
    assert not waiting.done()
    await queue.take()
    await waiting


async def test_nobody_waits_for_room_once_it_is_closed():
    queue = FrameQueue()
    for _ in range(MAX_WAITING):
        queue.put(b"a")
    waiting = asyncio.create_task(queue.wait_for_room())
    queue.close(1001, "")
    await waiting
