"""Steps as trace events, the JSON that ui.perfetto.dev and chrome://tracing open.

The host, the device and each request have a track of their own; blocks, requests, tokens and step
times are counters. `ts` and `dur` are microseconds.
"""

from collections.abc import Iterable, Iterator

from jaxengine.step_log import StepRecord, StepShare

__all__ = ["trace_events"]

type Event = dict[str, object]

ENGINE, REQUESTS = 1, 2  # pid: groups of tracks
HOST, DEVICE = 1, 2  # tid: tracks of the engine


def trace_events(records: Iterable[StepRecord], *, origin_s: float) -> Iterator[list[Event]]:
    """Yield the events of the tracks' names, then those of each step in turn.

    Args:
        records: oldest first.
        origin_s: the moment that becomes 0.
    """
    yield [
        _name("process_name", "engine", pid=ENGINE, tid=HOST),
        _name("process_name", "requests", pid=REQUESTS, tid=0),
        _name("thread_name", "host: scheduling", pid=ENGINE, tid=HOST),
        _name("thread_name", "device: steps", pid=ENGINE, tid=DEVICE),
    ]
    tracks: dict[str, int] = {}  # request id -> tid
    for record in records:
        yield [
            *_engine_events(record, origin_s),
            *_request_events(record, origin_s, tracks),
        ]


def _engine_events(record: StepRecord, origin_s: float) -> Iterator[Event]:
    yield _slice(
        f"schedule {record.index}",
        (record.scheduled_s - origin_s, record.launched_s - origin_s),
        pid=ENGINE,
        tid=HOST,
        args={
            "step": record.index,
            "running": record.num_running,
            "waiting": record.num_waiting,
            "waiting_for": record.waiting_for,
            "preempted": record.num_preempted,
        },
    )
    predicted_ms = None if record.predicted_s is None else record.predicted_s * 1e3
    yield _slice(
        f"step {record.index}",
        (record.device_start_s - origin_s, record.end_s - origin_s),
        pid=ENGINE,
        tid=DEVICE,
        args={
            "step": record.index,
            "decodes": record.num_decodes,
            "prefills": record.num_prefills,
            "decode_tokens": record.decode_tokens,
            "prefill_tokens": record.prefill_tokens,
            "draft_tokens": record.draft_tokens,
            "accepted_draft_tokens": record.accepted_draft_tokens,
            "slots": record.num_slots,
            "wasted_slots": record.wasted_slots,
            "real_ms": round(record.duration_s * 1e3, 3),
            "overtaken_ms": round(record.overtaken_s * 1e3, 3),
            "predicted_ms": None if predicted_ms is None else round(predicted_ms, 3),
        },
    )
    scheduled_s = record.launched_s - origin_s
    started_s = record.device_start_s - origin_s
    yield _counter(
        "KV blocks",
        scheduled_s,
        used=record.num_used_blocks,
        cached=record.num_cached_blocks,
        free=record.num_free_blocks,
    )
    yield _counter("requests", scheduled_s, running=record.num_running, waiting=record.num_waiting)
    yield _counter(
        "tokens",
        started_s,
        decode=record.decode_tokens,
        prefill=record.prefill_tokens,
        wasted=record.wasted_slots,
    )
    times_ms = {"real": round(record.duration_s * 1e3, 3)}
    if predicted_ms is not None:
        times_ms["predicted"] = round(predicted_ms, 3)
    yield _counter("step time (ms)", started_s, **times_ms)


def _request_events(record: StepRecord, origin_s: float, tracks: dict[str, int]) -> Iterator[Event]:
    for share in record.shares:
        tid = tracks.get(share.request_id)
        if tid is None:
            tid = tracks[share.request_id] = len(tracks) + 1
            yield _name("thread_name", share.request_id, pid=REQUESTS, tid=tid)
        yield _slice(
            _what(share),
            (record.device_start_s - origin_s, record.end_s - origin_s),
            pid=REQUESTS,
            tid=tid,
            args={
                "step": record.index,
                "first_position": share.first_position,
                "num_tokens": share.num_tokens,
                "samples": share.samples,
            },
        )


def _what(share: StepShare) -> str:
    # The engine knows no phases: one token that leads to the next one is what decoding looks like.
    if share.num_tokens == 1 and share.samples:
        return "decode"
    return f"prefill {share.num_tokens}"


def _slice(name: str, span_s: tuple[float, float], *, pid: int, tid: int, args: Event) -> Event:
    # Start and end are rounded, not the length: so neighbours cannot overlap.
    start_us, end_us = (_microseconds(s) for s in span_s)
    return {
        "ph": "X",
        "name": name,
        "cat": "step",
        "ts": start_us,
        "dur": round(end_us - start_us, 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _counter(name: str, at_s: float, **values: float) -> Event:
    return {
        "ph": "C",
        "name": name,
        "cat": "step",
        "ts": _microseconds(at_s),
        "pid": ENGINE,
        "tid": 0,
        "args": values,
    }


def _name(kind: str, name: str, *, pid: int, tid: int) -> Event:
    return {"ph": "M", "name": kind, "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
