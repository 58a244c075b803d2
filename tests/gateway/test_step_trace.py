"""The format is that of the Trace Event Format document: see the fields checked first."""

from itertools import pairwise

import orjson
import pytest

from gateway.step_trace import trace_events
from jaxengine.step_log import StepShare
from step_records import FIRST_S, make_step, make_steps

NUMBER = (int, float)


def events_of(*records, origin_s=FIRST_S):
    chunks = list(trace_events(records, origin_s=origin_s))
    return orjson.loads(orjson.dumps([event for chunk in chunks for event in chunk]))


def select(events, ph, **fields):
    return [e for e in events if e["ph"] == ph and all(e[k] == v for k, v in fields.items())]


def tracks(events):
    """Names of tracks by (pid, tid)."""
    names = select(events, "M", name="thread_name")
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in names}


def on_track(events, name):
    [key] = [key for key, value in tracks(events).items() if value == name]
    return [e for e in select(events, "X") if (e["pid"], e["tid"]) == key]


def test_every_event_has_the_fields_of_its_phase():
    events = events_of(*make_steps(0, 3), make_step(3, predicted_s=None))
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    for event in events:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], NUMBER)
        assert event["ts"] >= 0
        assert isinstance(event["args"], dict)
        match event["ph"]:
            case "X":
                assert isinstance(event["dur"], NUMBER)
                assert event["dur"] >= 0
            case "C":  # a counter is numbers and nothing else
                assert event["args"]
                assert all(isinstance(value, NUMBER) for value in event["args"].values())
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)


def test_each_group_and_each_track_has_one_name():
    events = events_of(*make_steps(0, 3))
    groups = {e["pid"]: e["args"]["name"] for e in select(events, "M", name="process_name")}
    assert sorted(groups.values()) == ["engine", "requests"]
    names = select(events, "M", name="thread_name")
    assert sorted(e["args"]["name"] for e in names) == [
        *("a", "b", "device: steps", "host: scheduling"),
    ]
    assert {(e["pid"], e["tid"]) for e in select(events, "X")} == set(tracks(events))
    assert all(groups[pid] for pid, _ in tracks(events))


def test_the_host_and_the_device_show_when_they_worked_on_a_step_in_microseconds():
    events = events_of(make_step(0), make_step(1))
    host, device = on_track(events, "host: scheduling"), on_track(events, "device: steps")
    assert [(e["name"], e["ts"], e["dur"]) for e in host] == [
        ("schedule 0", 0, 2000),
        ("schedule 1", 20000, 2000),
    ]
    assert [(e["name"], e["ts"], e["dur"]) for e in device] == [
        ("step 0", 3000, 16000),
        ("step 1", 23000, 16000),
    ]


def test_a_step_tells_its_composition_and_what_was_predicted():
    [step] = on_track(events_of(make_step(7), origin_s=FIRST_S), "device: steps")
    assert step["args"] == {
        "step": 7,
        "decodes": 1,
        "prefills": 1,
        "decode_tokens": 1,
        "prefill_tokens": 6,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
        "slots": 8,
        "wasted_slots": 1,
        "overtaken_ms": 0,
        "real_ms": 16,
        "predicted_ms": 15,
    }


def test_a_request_shows_its_prefill_chunks_and_decodes_on_one_track():
    def share(first, n, samples):
        return StepShare(request_id="r", first_position=first, num_tokens=n, samples=samples)

    parts = [share(0, 16, False), share(16, 5, True), share(21, 1, True), share(22, 1, True)]
    events = events_of(*(make_step(i, shares=(part,)) for i, part in enumerate(parts)))
    slices = on_track(events, "r")
    assert [e["name"] for e in slices] == ["prefill 16", "prefill 5", "decode", "decode"]
    assert [(e["ts"], e["dur"]) for e in slices] == [(3000 + 20000 * i, 16000) for i in range(4)]
    assert slices[1]["args"] == {"step": 1, "first_position": 16, "num_tokens": 5, "samples": True}


def test_counters_follow_blocks_requests_tokens_and_times():
    events = events_of(make_step(0), make_step(1, predicted_s=None))
    values = {
        name: [e["args"] for e in select(events, "C", name=name)]
        for name in ("KV blocks", "requests", "tokens", "step time (ms)")
    }
    assert values == {
        "KV blocks": [{"used": 30, "cached": 20, "free": 50}] * 2,
        "requests": [{"running": 2, "waiting": 3}] * 2,
        "tokens": [{"decode": 1, "prefill": 6, "wasted": 1}] * 2,
        "step time (ms)": [{"real": 16, "predicted": 15}, {"real": 16}],
    }
    assert len(select(events, "C")) == 8


@pytest.mark.parametrize("step_s", [1 / 3, 1e-6 / 7, 0.0123456789])
def test_slices_of_a_track_never_overlap_however_times_round(step_s):
    records = [
        make_step(
            i,
            scheduled_s=FIRST_S + i * step_s,
            launched_s=FIRST_S + (i + 1) * step_s,
            device_start_s=FIRST_S + i * step_s,
            end_s=FIRST_S + (i + 1) * step_s,
        )
        for i in range(50)
    ]
    events = events_of(*records)
    for name in tracks(events).values():
        for one, two in pairwise(on_track(events, name)):
            # In nanoseconds, as viewers read them.
            assert round((one["ts"] + one["dur"]) * 1000) <= round(two["ts"] * 1000)


def test_no_steps_are_an_empty_trace():
    assert {e["ph"] for e in events_of()} == {"M"}
