import math

import pytest

from bench.objective import (
    Objective,
    Probe,
    find_highest_rate,
    highest_rate,
    is_missed,
    probe_rate,
)
from bench.scenario import PlannedRequest, Sender
from bench.stream import RequestRecord
from bench.target import Target, open_session
from bench_server import FakeServe


def make_probe(rate: float, holds: bool) -> Probe:
    return Probe(
        rate=rate,
        num_requests=1,
        ttft_p99_ms=None,
        itl_p99_ms=None,
        num_failed=0,
        ended_early=False,
        holds=holds,
    )


async def rates_of(low: float, high: float, start: float) -> tuple[list[float], float | None]:
    """Rates that are probed when those from `low` to `high` hold, and the answer."""

    async def probe(rate: float) -> Probe:
        return make_probe(rate, low <= rate <= high)

    probes = await find_highest_rate(probe, start)
    return [probe.rate for probe in probes], highest_rate(probes)


async def test_the_search_goes_down_until_a_rate_holds_and_then_between():
    rates, highest = await rates_of(0, 2.1, start=8)
    # 8, 8/√2, 4, 4/√2 miss and 2 holds; √(2·2.83) = 2.38, then 2.18 miss, then 2.09 holds.
    assert rates == pytest.approx([8, 5.66, 4, 2.83, 2, 2.38, 2.18, 2.09], abs=0.01)
    assert highest == pytest.approx(2.089, abs=0.001)


async def test_the_search_goes_up_when_the_start_holds():
    rates, highest = await rates_of(0, 9, start=4)
    assert rates[:4] == pytest.approx([4, 5.66, 8, 11.31], abs=0.01)
    assert highest is not None
    assert 9 / 1.045 <= highest <= 9


async def test_a_range_that_also_has_a_lowest_rate_is_found_from_above():
    _, highest = await rates_of(1.0, 2.1, start=8)
    assert highest == pytest.approx(2.089, abs=0.001)


async def test_a_server_that_never_holds_has_no_rate():
    rates, highest = await rates_of(0, 0, start=8)
    assert highest is None
    assert rates[-1] == pytest.approx(8 / math.sqrt(2) ** 9)


async def test_a_server_that_always_holds_has_the_highest_that_was_tried():
    rates, highest = await rates_of(0, math.inf, start=1)
    assert highest == max(rates) == pytest.approx(math.sqrt(2) ** 9)


def test_an_objective_is_read():
    assert Objective.parse("ttft_p99=2000, itl_p99=150") == Objective(
        ttft_p99_ms=2000, itl_p99_ms=150
    )
    assert Objective.parse("itl_p99=80").ttft_p99_ms is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=5", "must be ttft_p99=MS or itl_p99=MS"),
        ("ttft_p99", "no number"),
        ("itl_p99=0", "must be positive"),
        ("itl_p99=inf", "must be positive"),
    ],
)
def test_an_objective_that_cannot_be_read_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        Objective.parse(text)


def test_a_probe_is_lost_once_too_many_have_waited_too_long():
    objective = Objective(ttft_p99_ms=1000)
    late = [RequestRecord(index=0, start_s=0.0), RequestRecord(index=1, start_s=0.0)]
    late[0].first_token_s = 1.5
    good = RequestRecord(index=2, start_s=0.0, first_token_s=0.5)
    fresh = RequestRecord(index=3, start_s=4.5)
    # Of 100 requests the percentile lies between the 99th and the 100th: two late ones miss it.
    assert is_missed([*late, good, fresh], 5.0, 100, objective)
    assert not is_missed([late[0], good, fresh], 5.0, 100, objective)
    # Of 200 it lies between the 198th and the 199th: three are needed.
    assert not is_missed([*late, good, fresh], 5.0, 200, objective)
    assert not is_missed(late, 5.0, 100, Objective(itl_p99_ms=1))
    refused = RequestRecord(index=4, start_s=4.5, end_s=0.0, error="http 429")
    assert is_missed([good, refused], 5.0, 100, objective)


async def probe_with(fake: FakeServe, objective: Objective, output_len: int = 3) -> Probe:
    planned = [PlannedRequest(prompt=[1], output_len=output_len) for _ in range(4)]
    with fake.run(["headrace"], output=None) as server:
        async with open_session(None, 30) as session:
            sender = Sender(session, Target(url=server.url, model="tiny"))
            return await probe_rate(sender, planned, 5.0, objective)


async def test_a_probe_that_keeps_the_objective_holds():
    fake = FakeServe(pace=lambda *_: 0.001)
    probe = await probe_with(fake, Objective(ttft_p99_ms=60_000, itl_p99_ms=60_000))
    assert (probe.rate, probe.num_requests, probe.holds) == (5.0, 4, True)
    assert probe.ttft_p99_ms is not None
    assert probe.itl_p99_ms is not None


async def test_a_probe_with_slow_tokens_does_not_hold():
    fake = FakeServe(pace=lambda *_: 0.003)
    probe = await probe_with(fake, Objective(itl_p99_ms=2))
    assert not probe.holds
    assert not probe.ended_early
    assert probe.itl_p99_ms is not None
    assert probe.itl_p99_ms >= 3


async def test_a_probe_with_refusals_does_not_hold():
    probe = await probe_with(FakeServe(refuse=lambda *_: 429), Objective(ttft_p99_ms=60_000))
    assert not probe.holds
    assert probe.num_failed > 0


async def test_a_lost_probe_ends_early_and_leaves_the_server_idle():
    fake = FakeServe(pace=lambda *_: 3600.0)
    probe = await probe_with(fake, Objective(ttft_p99_ms=1))
    assert (probe.holds, probe.ended_early, probe.ttft_p99_ms) == (False, True, None)
