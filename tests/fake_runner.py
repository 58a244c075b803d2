"""A device whose every token can be computed by hand, and which notices when it is misled."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

from jaxengine.buckets import buckets_for
from jaxengine.config import EngineConfig
from jaxengine.outputs import FinishReason, ItemLogprobs
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler_output import ScheduledRequest, SchedulerOutput

__all__ = [
    "NOTHING_SAMPLED",
    "FakeModelRunner",
    "NextToken",
    "repetitive",
    "weighted_sum",
    "whole_answer",
]

# What the runner returns for a request from which nothing was sampled. Nobody may use it.
NOTHING_SAMPLED = -1

NextToken = Callable[[Sequence[int]], int]


def weighted_sum(vocab_size: int) -> NextToken:
    """Return the default rule: 1 * first id + 2 * second id + ..., modulo the vocabulary.

    By hand, for the prompt 1 2 3 and a vocabulary of 100: 1 + 4 + 9 = 14; then 14 + 4 * 14 = 70;
    then 70 + 5 * 70 = 420, so 20. A lost, doubled or swapped token shows.
    """

    def next_token(token_ids: Sequence[int]) -> int:
        return sum(place * token_id for place, token_id in enumerate(token_ids, 1)) % vocab_size

    return next_token


def repetitive(vocab_size: int, *, period: int = 5, surprise: int = 11) -> NextToken:
    """Return a rule that repeats the last few tokens, but for a surprise at every so-many-th place.

    By hand, for a period of 2, a surprise of 5, the prompt 1 2 3 and a vocabulary of 100: 2; then
    the weighted sum at place 5, which is 1 + 4 + 9 + 8 = 22; then 2 and 22, without end but for
    places 10, 15 ...
    """
    surprising = weighted_sum(vocab_size)

    def next_token(token_ids: Sequence[int]) -> int:
        if len(token_ids) < period or (len(token_ids) + 1) % surprise == 0:
            return surprising(token_ids)
        return token_ids[-period]

    return next_token


def whole_answer(
    prompt: Sequence[int],
    params: SamplingParams,
    next_token: NextToken,
    *,
    eos_token_ids: Sequence[int],
    max_model_len: int,
) -> tuple[tuple[int, ...], FinishReason]:
    """Return what a request must be answered, alone and without any engine: the reference."""
    eos = () if params.ignore_eos else eos_token_ids
    ends = {*params.stop_token_ids, *eos}
    token_ids = list(prompt)
    for num_output_tokens in range(1, params.max_tokens + 1):
        masked = num_output_tokens <= params.min_tokens
        token_ids.append(_unmasked(next_token(token_ids), ends if masked else set()))
        if token_ids[-1] in ends:
            return tuple(token_ids[len(prompt) :]), FinishReason.STOP
        if len(token_ids) == max_model_len:
            break
    return tuple(token_ids[len(prompt) :]), FinishReason.LENGTH


def _unmasked(token_id: int, masked: set[int]) -> int:
    """Return the next larger id that is not masked; the vocabulary has no end for this."""
    while token_id in masked:
        token_id += 1
    return token_id


class _Written(NamedTuple):
    """What one slot holds. K and V of a token depend on all tokens before it: so does `chain`."""

    position: int
    token_id: int
    chain: int


class FakeModelRunner:
    """A ModelRunner that computes on what it was given, not on what the host believes.

    It keeps the content of each slot and the last token of each row. A step writes its tokens to
    the slots that the block tables name, reads the whole sequence back through the tables, and
    samples `next_token` of what it has read. So a stale block, a wrong table, a wrong position or
    a wrong mark of a pending token gives a wrong token; what it can tell is wrong it also notes
    in `faults` and raises. Results are computed at launch, and handed out by `result()`.

    Attributes:
        faults: what went wrong; empty after a healthy run, whatever the engine recovered from.
        steps: for each launched step, the (request id, number of tokens) that it held.
        requests: all requests seen, by id.
        num_results: steps whose tokens were handed out.
        lost: ids of the requests that were in flight whenever the cache was emptied.
        num_padded_tokens: what each step says it padded.
        num_resets: how often the cache was emptied.
        num_overtaken: how often a step was run before the rest of another.
        num_vain_looks: how often a step is not done when somebody looks, not waiting for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        vocab_size: int = 100,
        next_token: NextToken | None = None,
        eos_token_ids: Sequence[int] = (),
        num_padded_tokens: int = 0,
    ) -> None:
        self.compiles_after_ready = 0
        self.faults: list[str] = []
        self.steps: list[list[tuple[str, int]]] = []
        self.requests: dict[str, Request] = {}
        self.num_padded_tokens = num_padded_tokens
        self.num_resets = 0
        self.num_overtaken = 0
        self.num_vain_looks = 0
        self.num_results = 0
        self.lost: set[str] = set()
        self._in_flight: list[int] = []  # steps launched, whose tokens nobody has seen
        self._config = config
        self._next_token = next_token or weighted_sum(vocab_size)
        self._eos_token_ids = tuple(eos_token_ids)
        self._slots: dict[int, _Written] = {}
        self._last_token: dict[int, int] = {}
        self._must_be_reset = False
        self._failing_launches: set[int] = set()
        self._failing_results: set[int] = set()
        self._changed = threading.Condition()
        self._results_allowed: int | None = None  # None: any number

    # What ModelRunner asks for.

    def execute(self, outputs: Iterable[SchedulerOutput]) -> list["_FakeStep"]:
        # One by one: a table may change with the next one.
        return [self.execute_one(output) for output in outputs]

    def execute_one(self, output: SchedulerOutput) -> "_FakeStep":
        if self._must_be_reset:
            self._fault("a step was launched on a device that has failed")
        index = len(self.steps)
        self._in_flight.append(index)
        with self._changed:
            self.steps.append([(i.request.request_id, i.num_new_tokens) for i in output.scheduled])
            self._changed.notify_all()
        if index in self._failing_launches:
            self._fail()
        self._check_budgets(output)
        self.requests |= {item.request.request_id: item.request for item in output.scheduled}
        num_slots = output.num_tokens + output.wasted_slots + self.num_padded_tokens
        slots, last_token = dict(self._slots), dict(self._last_token)
        sampled = self._run(output)
        return _FakeStep(self, index, num_slots, sampled, output, slots, last_token, [])

    @property
    def can_overtake(self) -> bool:
        return self._config.decode_steps == 1

    def overtake(
        self, running: Sequence["_FakeStep"], output: SchedulerOutput
    ) -> tuple["_FakeStep", list["_FakeStep"]]:
        """Take back what the running steps wrote, run the other one, and then these again.

        So whoever reads what is not written yet, or writes what will be written again, is found.
        """
        indices = [step.index for step in running]
        self._require(self._in_flight == indices, "they are not all that is in flight")
        self._slots, self._last_token = dict(running[0].slots), dict(running[0].last_token)
        self._in_flight.clear()
        try:
            step = self.execute_one(output)
        finally:
            self._in_flight += indices
        self.num_overtaken += 1
        rests = [self._go_on(running[0], begun=True)]
        rests += [self._go_on(rest, begun=False) for rest in running[1:]]
        return step, rests

    def _go_on(self, step: "_FakeStep", *, begun: bool) -> "_FakeStep":
        """Run a step again; what one had begun with is not read again."""
        slots, memory = dict(self._slots), self._last_token
        items = step.output.scheduled
        pending = {i.row: step.last_token[i.row] for i in items if i.last_is_pending and begun}
        self._last_token = {**memory, **pending}
        sampled = self._run(step.output)
        rows = [item.row for item in items if item.samples]
        self._last_token = {**memory, **{row: self._last_token[row] for row in rows}}
        return replace(step, sampled=sampled, slots=slots, last_token={**memory, **pending})

    def reset(self) -> None:
        self.lost |= {name for index in self._in_flight for name, _ in self.steps[index]}
        self._in_flight.clear()
        self._slots.clear()
        self._last_token.clear()
        self._must_be_reset = False
        self.num_resets += 1

    # What tests use.

    def fail_launch(self, step: int) -> None:
        """Let the launch of a step fail, counted from 0 over all launches."""
        self._failing_launches.add(step)

    def fail_result(self, step: int) -> None:
        """Let a step fail once it runs: its tokens never come."""
        self._failing_results.add(step)

    def hold(self) -> None:
        """From now on results come only as `release` lets them."""
        with self._changed:
            self._results_allowed = 0

    def release(self, count: int | None = None) -> None:
        """Let so many results through, in all or (None) without end."""
        with self._changed:
            held = self._results_allowed
            self._results_allowed = None if count is None or held is None else held + count
            self._changed.notify_all()

    def wait_for_launches(self, count: int) -> None:
        """Block the calling thread until so many steps have been launched since the start."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.steps) >= count)

    # Inside.

    def may_hand_out(self) -> bool:
        """Whether the results of a step may be seen now."""
        with self._changed:
            return self._results_allowed != 0

    def hand_out(self, index: int, sampled: list[int]) -> list[int]:
        """Wait until the results of a step may be seen."""
        with self._changed:
            self._changed.wait_for(lambda: self._results_allowed != 0)
            if self._results_allowed is not None:
                self._results_allowed -= 1
        if self._in_flight[0] != index:
            self._fault(f"step {index} is taken in before the one before it")
        if index in self._failing_results:
            self._fail()
        del self._in_flight[0]
        self.num_results += 1
        return sampled

    def _fail(self) -> None:
        self._must_be_reset = True
        raise RuntimeError("the device has failed")

    def _fault(self, text: str) -> NoReturn:
        self.faults.append(f"step {len(self.steps) - 1}: {text}")
        raise AssertionError(self.faults[-1])

    def _require(self, ok: bool, text: str) -> None:
        if not ok:
            self._fault(text)

    def _check_budgets(self, output: SchedulerOutput) -> None:
        config, items = self._config, output.scheduled
        rows = [item.row for item in items if not item.is_draft]
        num_fillers = len(output.items) - len(items)
        self._require(not output.is_empty, "nothing is scheduled")
        self._require(len(rows) + num_fillers <= config.max_num_seqs, "too many sequences")
        most = max(bucket.num_seqs for bucket in buckets_for(config))
        self._require(len(items) <= most, "more sequences than any bucket holds")
        self._require(
            all(item.row == config.max_num_seqs + 1 for item in items if item.is_draft),
            "a draft has a row",
        )
        self._require(len(set(rows)) == len(rows), f"a row is held twice: {rows}")
        self._require(all(0 <= row < config.max_num_seqs for row in rows), f"no such row: {rows}")
        num_tokens = sum(item.num_new_tokens for item in items)
        self._require(num_tokens == output.num_tokens, "the tokens are counted wrongly")
        limit = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        num_slots = num_tokens + output.wasted_slots
        self._require(num_slots <= limit, f"{num_slots} tokens in a step")

    def _run(self, output: SchedulerOutput) -> list[int]:
        self._write(output.items)
        return [self._compute(item) for item in output.items][: len(output.scheduled)]

    def _write(self, items: Sequence[ScheduledRequest]) -> None:
        """Write K and V of all tokens, before any of them attends."""
        written: set[int] = set()
        for item in items:
            self._require(item.num_new_tokens > 0, f"{item.request} has nothing to compute")
            end = item.first_position + item.num_new_tokens
            table = item.block_ids
            blocks = range(1, self._config.num_blocks)
            self._require(all(b in blocks for b in table), f"no such block: {table}")
            self._require(len(set(table)) == len(table), f"a block twice in a table: {table}")
            self._require(end <= self._config.max_model_len, f"position {end - 1} is too large")
            token_ids = list(item.token_ids)
            if item.last_is_pending:
                self._require(item.row in self._last_token, f"row {item.row} has no last token")
                token_ids.append(self._last_token[item.row])
            self._require(len(token_ids) == item.num_new_tokens, "tokens are missing")
            for position, token_id in enumerate(token_ids, item.first_position):
                slot = self._slot(item, position)
                if slot in written:
                    self._fault(f"two sequences write slot {slot}")
                written.add(slot)
                chain = self._read(item, position - 1).chain if position else 0
                chain = hash((chain, position, token_id))
                self._slots[slot] = _Written(position, token_id, chain)

    def _compute(self, item: ScheduledRequest) -> int:
        """Read the sequence back through its table, and sample."""
        end = item.first_position + item.num_new_tokens
        token_ids, chain = [], 0
        for position in range(end):
            found = self._read(item, position)
            chain = hash((chain, position, found.token_id))
            # A filler may lie behind padding of its row that tokens have overwritten since.
            if not item.is_filler and (found.position != position or found.chain != chain):
                self._fault(f"{item.request} attends at {position} to another sequence's {found}")
            token_ids.append(found.token_id)
        if item.is_filler:
            return NOTHING_SAMPLED
        known = item.request.token_ids[:end]
        if token_ids[: len(known)] != known:
            self._fault(f"{item.request} attends to {token_ids}")
        if not item.samples:
            return NOTHING_SAMPLED
        self._require(end >= len(item.request.token_ids), "sampled before the last token")
        self._last_token[item.row] = self._sample(item.request, token_ids)
        return self._last_token[item.row]

    def _sample(self, request: Request, token_ids: list[int]) -> int:
        params = request.params
        masked: set[int] = set()
        if len(token_ids) - request.num_prompt_tokens < params.min_tokens:
            masked = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)}
        return _unmasked(self._next_token(token_ids), masked)

    def _slot(self, item: ScheduledRequest, position: int) -> int:
        block, offset = divmod(position, self._config.block_size)
        if block >= len(item.block_ids):
            self._fault(f"{item.request} has no block for {position}")
        return item.block_ids[block] * self._config.block_size + offset

    def _read(self, item: ScheduledRequest, position: int) -> _Written:
        found = self._slots.get(self._slot(item, position))
        if found is None:
            self._fault(f"{item.request} attends at {position} to what nobody wrote")
        return found


@dataclass(frozen=True)
class _FakeStep:
    """A launched step.

    Attributes:
        slots, last_token: what there was before it.
        looks: at whether it is done.
    """

    runner: FakeModelRunner
    index: int
    num_slots: int
    sampled: list[int]
    output: SchedulerOutput
    slots: dict[int, _Written]
    last_token: dict[int, int]
    looks: list[bool]

    def is_done(self) -> bool:
        is_done = self.runner.may_hand_out() and len(self.looks) >= self.runner.num_vain_looks
        self.looks.append(is_done)
        return is_done

    def result(self) -> list[int]:
        return self.runner.hand_out(self.index, self.sampled)

    def logprobs(self) -> dict[int, ItemLogprobs]:
        return {}
