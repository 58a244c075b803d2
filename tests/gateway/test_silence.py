import asyncio
from contextlib import closing

from gateway.silence import SilenceAlarm


async def test_it_rings_after_a_silence_and_again_after_the_next():
    rung = asyncio.Event()
    with closing(SilenceAlarm(0.001, rung.set)) as alarm:
        for _ in range(2):
            await rung.wait()
            assert alarm.is_due
            alarm.reset()
            rung.clear()
            assert not alarm.is_due


async def test_what_happens_puts_it_off():
    loop = asyncio.get_running_loop()
    reset_s, silences_s = loop.time(), []
    alarm = SilenceAlarm(0.002, lambda: silences_s.append(loop.time() - reset_s))
    with closing(alarm):
        for pause_s in (0.0, 0.0015, 0.0, 0.0015, 0.0015, 0.004):
            await asyncio.sleep(pause_s)
            reset_s = loop.time()
            alarm.reset()
        while not silences_s:
            await asyncio.sleep(0.001)
    assert min(silences_s) > 0.0019  # asyncio's clock has a resolution


async def test_without_a_time_it_never_rings_and_closed_it_rings_no_more():
    rings = []
    with closing(SilenceAlarm(None, lambda: rings.append("never"))) as alarm:
        alarm.reset()
    with closing(SilenceAlarm(0.001, lambda: rings.append("closed"))):
        pass
    await asyncio.sleep(0.01)
    assert rings == []
