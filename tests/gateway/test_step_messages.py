from dataclasses import fields

import orjson
import pytest

from fakes import FakeEngine
from gateway.step_messages import clock_body, engine_status, stats_body, step_bodies
from jaxengine.stats import EngineStats
from jaxengine.step_log import StepRecord
from step_records import make_step


def encoded(body):
    return orjson.loads(orjson.dumps(body))


def test_a_step_has_every_field_of_its_record_and_the_times_since_its_scheduling():
    [body] = encoded(step_bodies([make_step(5)], with_shares=False))
    names = {field.name for field in fields(StepRecord)} - {"shares"}
    relative = {"launched_after_s", "device_start_after_s", "end_after_s", "duration_s"}
    assert set(body) == names | relative
    assert (body["index"], body["scheduled_s"], body["end_s"]) == (5, 1000.1, 1000.119)
    assert {name: body[name] for name in relative} == {
        "launched_after_s": 0.002,
        "device_start_after_s": 0.003,
        "end_after_s": 0.019,
        "duration_s": 0.016,
    }
    assert (body["predicted_s"], body["waiting_for"], body["wasted_slots"]) == (0.015, "seqs", 1)


def test_shares_come_when_asked_for():
    [body] = encoded(step_bodies([make_step(5)], with_shares=True))
    assert body["shares"] == [
        {"request_id": "a", "first_position": 45, "num_tokens": 1, "samples": True},
        {"request_id": "b", "first_position": 30, "num_tokens": 6, "samples": False},
    ]


def test_times_are_in_microseconds_at_most_and_none_stays_none():
    step = make_step(0, scheduled_s=1 / 3, predicted_s=None)
    [body] = encoded(step_bodies([step], with_shares=False))
    assert body["scheduled_s"] == 0.333333
    assert body["predicted_s"] is None


def test_stats_are_all_numbers_but_the_histograms():
    body = encoded(stats_body(EngineStats(num_blocks=8, num_free_blocks=6, step_busy_s=1 / 3)))
    names = {field.name for field in fields(EngineStats)}
    assert set(body) == names - {"step_times", "iteration_tokens"} | {"kv_cache_usage"}
    assert (body["kv_cache_usage"], body["step_busy_s"]) == (0.25, 0.333333)


async def test_an_engine_is_ready_or_not_or_stalled_or_dead():
    engine = FakeEngine()
    assert engine_status(engine) == "ready"
    engine.is_ready = False
    assert engine_status(engine) == "not_ready"
    engine.is_stalled = True
    assert engine_status(engine) == "stalled"
    engine.die()
    assert engine_status(engine) == "dead"


def test_the_clock_is_that_of_the_steps_and_that_of_the_calendar(monkeypatch):
    monkeypatch.setattr("time.monotonic", lambda: 12.3456789)
    monkeypatch.setattr("time.time", lambda: 1767225600.25)
    assert clock_body() == {
        "now_s": pytest.approx(12.345679, abs=0),
        "now_unix_s": 1767225600.25,
    }
