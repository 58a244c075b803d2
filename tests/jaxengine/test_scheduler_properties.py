"""Laws of the engine under random use, on a device that notices when it is misled."""

import itertools
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine_loop import EngineLoop, small_config
from fake_runner import repetitive
from jaxengine import prompt_budget
from jaxengine.engine_core import MAX_FAILURES_IN_A_ROW
from jaxengine.outputs import FinishReason, RequestOutput
from jaxengine.request import Request
from known_times import KnownTimes

# Small and prime: many tokens are EOS or a stop id, and no weight of the sum vanishes.
VOCAB_SIZE = 23
EOS = (22,)
BEGINNINGS = (tuple(range(20)), (5,) * 20, (*range(8), *(5,) * 12))
SALTS = (None, None, None, "", "tenant")

token_ids = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def prompts(draw) -> tuple[int, ...]:
    """Prompts that often share a beginning with each other; at most 23 tokens."""
    shared = draw(st.sampled_from(BEGINNINGS))[: draw(st.sampled_from((8, 7, 0, 16, 15, 17, 20)))]
    return (*shared, *draw(st.lists(token_ids, min_size=1, max_size=3)))


@st.composite
def requests(draw) -> dict:
    """Arguments of EngineLoop.add but the name."""
    max_tokens = draw(st.sampled_from((16, 1, 2, 3, 7, 9, 12)))
    return {
        "prompt": draw(prompts()),
        "max_tokens": max_tokens,
        "min_tokens": draw(st.sampled_from((0, 0, 1, max_tokens // 2, max_tokens))),
        "stop_token_ids": draw(st.sampled_from(((), (), (), (3,), (4, 5)))),
        "ignore_eos": draw(st.booleans()),
        "salt": draw(st.sampled_from(SALTS)),
        "tenant": draw(st.sampled_from(("", "", "light", "heavy"))),
        "priority": draw(st.sampled_from((0, 0, 0, 1, -1, 5))),
    }


# Seconds of the loop's clock, of which a step takes about three.
limits = st.fixed_dictionaries(
    {
        "queue_timeout_s": st.sampled_from((None, None, None, None, None, 90.0, 10.0)),
        "deadline_s": st.sampled_from((None, None, None, None, None, 120.0, 30.0)),
    }
)


@pytest.fixture(autouse=True)
def _expected_failures_are_not_printed(caplog):
    caplog.set_level(logging.CRITICAL + 1)


class EngineLaws(RuleBasedStateMachine):
    """Requests come, are left, and fail in any order, in a cache that is too small for them.

    EngineLoop and its device check each step; the laws of the whole are checked at the end.
    """

    POSITION_S = 0.0001

    @initialize(
        overlap=st.booleans(),
        caching=st.booleans(),
        num_usable=st.sampled_from((6, 5, 4, 7, 8)),
        max_num_seqs=st.sampled_from((4, 4, 3, 2, 1)),
        budget=st.sampled_from((40, 32, 16, 8, 4)),
        scheduled=st.sampled_from((40, 32, 16, 5, 2)),
        watermark=st.sampled_from((0.0, 0.0, 0.0, 0.01, 0.3)),
        num_failures=st.sampled_from((0, 0, 1, 3)),
        batching=st.sampled_from(("continuous",) * 4 + ("dynamic", "static")),
        policy=st.sampled_from(("fair", "fair", "priority", "fcfs")),
        threshold=st.sampled_from((0, 0, 1, 3, 10)),
        target_ms=st.sampled_from((None, None, 12, 25)),
        decode_steps=st.sampled_from((1, 1, 2, 3, 8)),
        num_guessed=st.sampled_from((0, 1, 3, 8)),
        repeats=st.booleans(),
        num_vain_looks=st.sampled_from((0, 3, 9)),
    )
    def start(
        self,
        overlap,
        caching,
        num_usable,
        max_num_seqs,
        budget,
        scheduled,
        watermark,
        num_failures,
        batching,
        policy,
        threshold,
        target_ms,
        decode_steps,
        num_guessed,
        repeats,
        num_vain_looks,
    ) -> None:
        may_guess = decode_steps == 1 and batching == "continuous"
        config = small_config(
            overlap=overlap,
            enable_prefix_caching=caching,
            num_blocks=num_usable + 1,
            max_model_len=32,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_num_scheduled_tokens=min(scheduled, budget),
            watermark=watermark,
            batching=batching,
            batch_window_s=7.0,
            scheduling_policy=policy,
            priority_aging_s=5.0,
            tenant_weights={"heavy": 3.0},
            long_prefill_token_threshold=threshold,
            target_itl_s=None if target_ms is None else target_ms / 1000,
            decode_steps=decode_steps,
            num_speculative_tokens=num_guessed if may_guess else 0,
        )
        self.loop = EngineLoop(
            config,
            vocab_size=VOCAB_SIZE,
            eos=EOS,
            step_times=KnownTimes(self.POSITION_S),
            next_token=repetitive(VOCAB_SIZE) if repeats else None,
        )
        self.loop.runner.num_vain_looks = num_vain_looks
        self.names: list[str] = []
        self.aborted: set[str] = set()
        self.failures_left = num_failures
        self.failure_is_due = False
        self.failures_in_a_row = 0

    @rule(batch=st.lists(st.tuples(requests(), limits), min_size=2, max_size=5))
    def add(self, batch) -> None:
        for request, its_limits in batch:
            self.names.append(f"r{len(self.names)}")
            self.loop.add(self.names[-1], **request, **its_limits)

    @rule(count=st.integers(1, 5))
    def step(self, count) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def leave(self, data) -> None:
        name = data.draw(st.sampled_from(self.names))
        if name in self.loop.unfinished:
            self.aborted.add(name)
        self.loop.abort(name)

    @rule()
    def leave_what_was_never_there(self) -> None:
        self.loop.abort("unknown")

    @precondition(lambda self: self.failures_left and not self.failure_is_due)
    @precondition(lambda self: self.failures_in_a_row < MAX_FAILURES_IN_A_ROW - 1)
    @rule(at_launch=st.booleans())
    def let_the_next_step_fail(self, at_launch) -> None:
        runner = self.loop.runner
        (runner.fail_launch if at_launch else runner.fail_result)(len(runner.steps))
        self.failure_is_due = True
        self.failures_left -= 1

    def _step(self) -> None:
        results, failures = self.loop.runner.num_results, self.loop.stats.num_step_failures
        running = set(self.loop.unfinished)
        lost = set(self.loop.runner.lost)
        self.loop.step()
        if self.loop.runner.num_results > results:
            self.failures_in_a_row = 0
        if self.loop.stats.num_step_failures > failures:
            self.failures_in_a_row += 1
            self.failure_is_due = False
            newly_lost = running & (self.loop.runner.lost - lost)
            assert not newly_lost & set(self.loop.unfinished), "a lost request goes on"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        loop = self.loop
        loop.run()
        loop.check_idle()
        loop.check_answers()
        for name, end in loop.ends.items():
            _check_limits(loop.requests[name], end)
        by_reason = {
            reason: {name for name, end in loop.ends.items() if end.finish_reason is reason}
            for reason in FinishReason
        }
        assert set(loop.ends) == set(self.names)
        assert by_reason[FinishReason.ABORT] == self.aborted
        assert by_reason[FinishReason.ERROR] <= loop.runner.lost
        stats = loop.stats
        assert stats.generation_tokens == sum(len(tokens) for tokens in loop.answers.values())
        assert stats.num_preemptions == sum(end.num_preemptions for end in loop.ends.values())
        assert stats.prefix_hits <= stats.prefix_queries == stats.prompt_tokens


def _check_limits(request: Request, end: RequestOutput) -> None:
    """A request ends by a limit only if it has one, and not before its time."""
    assert end.timing is not None
    if end.finish_reason is FinishReason.QUEUE_TIMEOUT:
        assert request.queue_timeout_s is not None
        assert end.timing.e2e_s >= request.queue_timeout_s
        assert end.timing.ttft_s is None
    if end.finish_reason is FinishReason.DEADLINE:
        assert request.deadline_s is not None
        assert end.timing.e2e_s >= request.deadline_s


class OvertakingLaws(EngineLaws):
    """The same with room enough that steps are often overtaken, and slow reading of contexts."""

    POSITION_S = 0.0004
    MOST_BEFORE = 1  # so that pieces of prompts this short are long pieces

    @initialize(
        caching=st.booleans(),
        num_usable=st.sampled_from((40, 25, 18)),
        max_num_seqs=st.sampled_from((4, 3, 2)),
        num_failures=st.sampled_from((0, 0, 1)),
        num_guessed=st.sampled_from((0, 3)),
        num_vain_looks=st.sampled_from((3, 6)),
        target_ms=st.sampled_from((None, 20, 26)),
    )
    def start(
        self,
        caching,
        num_usable,
        max_num_seqs,
        num_failures,
        num_guessed,
        num_vain_looks,
        target_ms,
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prompt_budget, "MOST_BEFORE", self.MOST_BEFORE)
        super().start(
            overlap=True,
            caching=caching,
            num_usable=num_usable,
            max_num_seqs=max_num_seqs,
            budget=40,
            scheduled=40,
            watermark=0.0,
            num_failures=num_failures,
            batching="continuous",
            policy="fair",
            threshold=0,
            target_ms=target_ms,
            decode_steps=1,
            num_guessed=num_guessed,
            repeats=num_guessed > 0,
            num_vain_looks=num_vain_looks,
        )

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self.patch.undo()

    @rule(tenant=st.sampled_from(("", "light")), batch=st.lists(requests(), max_size=4))
    def flood_and_come_late(self, tenant, batch) -> None:
        for request in batch:
            self.names.append(f"r{len(self.names)}")
            self.loop.add(self.names[-1], **request | {"tenant": "flood", "priority": 0})
        self._step()
        self.names.append(f"r{len(self.names)}")
        self.loop.add(self.names[-1], (1, 2, 3), tenant=tenant)
        self._step()


EngineLaws.TestCase.settings = settings(max_examples=100, stateful_step_count=12)
OvertakingLaws.TestCase.settings = settings(max_examples=50, stateful_step_count=12)
TestTheLawsOfTheEngine = EngineLaws.TestCase
TestTheLawsOfOvertaking = OvertakingLaws.TestCase

LOOPS = [
    pytest.param(overlap, chunk, id=f"{'overlapped' if overlap else 'plain'}-chunk-{chunk}")
    for overlap, chunk in itertools.product((False, True), (4, 16, 64))
]


@pytest.mark.parametrize(("overlap", "chunk"), LOOPS)
@given(
    batch=st.lists(requests(), min_size=3, max_size=6),
    arrivals=st.lists(st.sampled_from((0, 0, 1, 2, 5)), min_size=6, max_size=6),
    batching=st.sampled_from(("continuous", "continuous", "dynamic", "static")),
    policy=st.sampled_from(("fair", "priority", "fcfs")),
)
@settings(max_examples=25)
def test_nothing_but_the_request_decides_its_answer(
    overlap, chunk, batch, arrivals, batching, policy
):
    """The same requests, whatever the cache and whoever came before, get the same tokens."""
    answers = []
    for caching, num_usable in itertools.product((False, True), (4, 64)):
        config = small_config(
            overlap=overlap,
            max_num_batched_tokens=chunk,
            enable_prefix_caching=caching,
            num_blocks=num_usable + 1,
            max_model_len=32,
            batching=batching,
            batch_window_s=7.0,
            scheduling_policy=policy,
        )
        loop = EngineLoop(config, vocab_size=VOCAB_SIZE, eos=EOS)
        for index, request in enumerate(batch):
            for _ in range(arrivals[index]):
                loop.step()
            loop.add(f"r{index}", **request)
        loop.run()
        loop.check_idle()
        loop.check_answers()  # with one request at a time, without engine
        answers.append(loop.answers)
    assert all(answer == answers[0] for answer in answers)
