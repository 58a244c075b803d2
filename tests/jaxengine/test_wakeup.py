import asyncio
import contextlib

from jaxengine.wakeup import Wakeup


async def test_who_waits_is_woken():
    wakeup = Wakeup()
    waiting = asyncio.ensure_future(wakeup.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    wakeup.set()
    wakeup.set()
    await waiting


async def test_what_was_set_before_lets_one_wait_go_on_and_is_used_up():
    wakeup = Wakeup()
    wakeup.set()
    await wakeup.wait()
    waiting = asyncio.ensure_future(wakeup.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    wakeup.set()
    await waiting


async def test_a_cancelled_wait_loses_nothing():
    wakeup = Wakeup()
    waiting = asyncio.ensure_future(wakeup.wait())
    await asyncio.sleep(0)
    wakeup.set()
    waiting.cancel()  # woken, but it has not run yet
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await wakeup.wait()
