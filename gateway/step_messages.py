"""Steps and the state of the engine, as JSON for those who watch (docs/protocol.md)."""

import time
from collections.abc import Iterable
from dataclasses import fields

from jaxengine.stats import EngineStats
from jaxengine.step_log import StepRecord, StepShare
from jaxengine.token_engine import TokenEngine

__all__ = ["clock_body", "engine_status", "stats_body", "step_bodies"]

_RECORD_FIELDS = [field.name for field in fields(StepRecord) if field.name != "shares"]
_HISTOGRAMS = {"step_times", "iteration_tokens"}  # /metrics has them
_STATS_FIELDS = [field.name for field in fields(EngineStats) if field.name not in _HISTOGRAMS]


def step_bodies(records: Iterable[StepRecord], *, with_shares: bool) -> list[dict[str, object]]:
    """Return these steps for orjson: all fields, and the times since scheduling began."""
    return [_step_body(record, with_shares) for record in records]


def stats_body(stats: EngineStats) -> dict[str, object]:
    """Return the counters and gauges of an engine."""
    body = {name: _rounded(getattr(stats, name)) for name in _STATS_FIELDS}
    body["kv_cache_usage"] = _rounded(stats.kv_cache_usage)
    return body


def clock_body() -> dict[str, object]:
    """Return the time now, on the clock of the steps and on that of the calendar."""
    return {"now_s": _rounded(time.monotonic()), "now_unix_s": _rounded(time.time())}


def engine_status(engine: TokenEngine) -> str:
    """Return "ready", "not_ready", "stalled" or "dead"."""
    if engine.failure is not None:
        return "dead"
    if engine.is_stalled:
        return "stalled"
    return "ready" if engine.is_ready else "not_ready"


def _step_body(record: StepRecord, with_shares: bool) -> dict[str, object]:
    body = {name: _rounded(getattr(record, name)) for name in _RECORD_FIELDS}
    body["launched_after_s"] = _rounded(record.launched_s - record.scheduled_s)
    body["device_start_after_s"] = _rounded(record.device_start_s - record.scheduled_s)
    body["end_after_s"] = _rounded(record.end_s - record.scheduled_s)
    body["duration_s"] = _rounded(record.duration_s)
    if with_shares:
        body["shares"] = [_share_body(share) for share in record.shares]
    return body


def _share_body(share: StepShare) -> dict[str, object]:
    return {
        "request_id": share.request_id,
        "first_position": share.first_position,
        "num_tokens": share.num_tokens,
        "samples": share.samples,
    }


def _rounded(value: object) -> object:
    """Round times to microseconds: the rest is noise that costs bytes."""
    return round(value, 6) if isinstance(value, float) else value
