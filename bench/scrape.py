"""A server's counters, read from its /metrics: what the engine did during a measurement.

Counters that a server does not export are 0, so that others can be measured too.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

__all__ = ["EngineCounters", "parse_counters"]

PREFIX = "headrace_"
BUSY_SECONDS = f"{PREFIX}engine_busy_seconds_total"
STEPS = f"{PREFIX}engine_steps_total"
STEP_TOKENS = f"{PREFIX}iteration_tokens_sum"
PADDED_TOKENS = f"{PREFIX}padded_tokens_total"
WASTED_SLOTS = f"{PREFIX}wasted_slots_total"
PREEMPTIONS = f"{PREFIX}preemptions_total"
DRAFTS = f"{PREFIX}draft_tokens_total"
ACCEPTED_DRAFTS = f"{PREFIX}accepted_draft_tokens_total"
RUNNING = f"{PREFIX}num_requests_running"
WAITING = f"{PREFIX}num_requests_waiting"

# name{label="value",...} value
SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounters:
    """What an engine has counted, since its start or between two readings.

    Attributes:
        busy_s: time with a step in flight.
        steps: passes of the engine.
        step_tokens: tokens that they computed for requests.
        wasted_slots: token slots computed for nothing, by cause: "bucket", "prompt_padding" and
            "finished_row"; a server without causes has all as "bucket".
        preemptions: times a request gave way to another one.
        draft_tokens, accepted_draft_tokens: guessed tokens computed along, and the right ones.
        num_unfinished: requests that run or wait; a gauge, as of the later reading.
    """

    busy_s: float = 0.0
    steps: float = 0.0
    step_tokens: float = 0.0
    wasted_slots: Mapping[str, float] = field(default_factory=dict)
    preemptions: float = 0.0
    draft_tokens: float = 0.0
    accepted_draft_tokens: float = 0.0
    num_unfinished: float = 0.0

    def since(self, earlier: "EngineCounters") -> "EngineCounters":
        """What was counted after an earlier reading."""
        return EngineCounters(
            busy_s=self.busy_s - earlier.busy_s,
            steps=self.steps - earlier.steps,
            step_tokens=self.step_tokens - earlier.step_tokens,
            wasted_slots={
                cause: slots - earlier.wasted_slots.get(cause, 0.0)
                for cause, slots in self.wasted_slots.items()
            },
            preemptions=self.preemptions - earlier.preemptions,
            draft_tokens=self.draft_tokens - earlier.draft_tokens,
            accepted_draft_tokens=self.accepted_draft_tokens - earlier.accepted_draft_tokens,
            num_unfinished=self.num_unfinished,
        )

    def wasted_shares(self) -> dict[str, float]:
        """Wasted slots by cause, as shares of all slots."""
        num_slots = self.step_tokens + sum(self.wasted_slots.values())
        return {cause: slots / num_slots for cause, slots in self.wasted_slots.items() if num_slots}


def parse_counters(text: str) -> EngineCounters:
    """Read an exposition in the Prometheus text format."""
    totals: dict[str, float] = {}
    wasted: dict[str, float] = {}
    for name, labels, value in parse_samples(text):
        totals[name] = totals.get(name, 0.0) + value
        if name == WASTED_SLOTS:
            cause = labels.get("cause", "bucket")
            wasted[cause] = wasted.get(cause, 0.0) + value
    if not wasted and PADDED_TOKENS in totals:
        wasted = {"bucket": totals[PADDED_TOKENS]}
    return EngineCounters(
        busy_s=totals.get(BUSY_SECONDS, 0.0),
        steps=totals.get(STEPS, 0.0),
        step_tokens=totals.get(STEP_TOKENS, 0.0),
        wasted_slots=wasted,
        preemptions=totals.get(PREEMPTIONS, 0.0),
        draft_tokens=totals.get(DRAFTS, 0.0),
        accepted_draft_tokens=totals.get(ACCEPTED_DRAFTS, 0.0),
        # The waiting ones may be exported by reason; the sum is the same.
        num_unfinished=totals.get(RUNNING, 0.0) + totals.get(WAITING, 0.0),
    )


def parse_samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample that has a number."""
    for line in text.splitlines():
        found = SAMPLE.match(line)
        if found is None:
            continue
        name, labels, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        yield name, dict(LABEL.findall(labels or "")), number
