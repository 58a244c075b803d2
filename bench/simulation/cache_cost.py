"""Host time of the prefix cache's bookkeeping: the engine's own scheduler without a device."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from jaxengine.config import EngineConfig
from jaxengine.kv_cache_manager import KVCacheManager
from jaxengine.request import Request
from jaxengine.sampling_params import SamplingParams
from jaxengine.scheduler import Scheduler

__all__ = ["Bookkeeping", "measure_bookkeeping"]

REPEATS = 5
BLOCK_SIZE = 16
NUM_BATCHED_TOKENS = 2048
NO_TOKEN = 7  # sampled each time


@dataclass(frozen=True, kw_only=True, slots=True)
class Bookkeeping:
    """What the cache manager takes of the host for a load.

    Attributes:
        num_tokens: prompt and output tokens of the load.
        on_s, off_s: seconds inside the cache manager with prefix caching and without.
    """

    num_tokens: int
    on_s: float
    off_s: float

    @property
    def extra_s(self) -> float:
        """What caching adds: hashing, looking up, remembering, forgetting."""
        return self.on_s - self.off_s

    @property
    def us_per_token(self) -> float:
        """Microseconds that it adds for each token."""
        return 1e6 * self.extra_s / self.num_tokens


class _TimedCache(KVCacheManager):
    """A cache manager that knows how long its callers have waited for it."""

    def __init__(self, *, is_on: bool, num_blocks: int, clock: Callable[[], float]) -> None:
        super().__init__(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=is_on)
        self.seconds = 0.0
        self._clock = clock

    def match_prefix(self, request: Request, unfinished: Collection[int] = ()) -> int:
        start_s = self._clock()
        found = super().match_prefix(request, unfinished)
        self.seconds += self._clock() - start_s
        return found

    def reserve(self, request: Request, num_tokens: int, unfinished: Collection[int] = ()) -> bool:
        start_s = self._clock()
        found = super().reserve(request, num_tokens, unfinished)
        self.seconds += self._clock() - start_s
        return found

    def remember(self, request: Request, end: int) -> None:
        start_s = self._clock()
        super().remember(request, end)
        self.seconds += self._clock() - start_s

    def free(self, request: Request) -> None:
        start_s = self._clock()
        super().free(request)
        self.seconds += self._clock() - start_s


def measure_bookkeeping(
    prompts: Sequence[Sequence[int]],
    output_len: int,
    *,
    num_rows: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Bookkeeping:
    """Let a scheduler work off requests that have nothing in common, with caching and without.

    The cache holds twice what runs at once, so that blocks are forgotten as well, as in a server
    that has run for long. Of several runs by turns the quickest of each kind counts.

    Args:
        prompts: of the requests; no two may begin alike.
        output_len: tokens of each answer.
        num_rows: requests that run at once.
        clock: seconds.
    """
    runs = [
        (
            _run(prompts, output_len, num_rows, True, clock),
            _run(prompts, output_len, num_rows, False, clock),
        )
        for _ in range(REPEATS)
    ]
    return Bookkeeping(
        num_tokens=sum(map(len, prompts)) + len(prompts) * output_len,
        on_s=min(on_s for on_s, _ in runs),
        off_s=min(off_s for _, off_s in runs),
    )


def _run(
    prompts: Sequence[Sequence[int]],
    output_len: int,
    num_rows: int,
    is_on: bool,
    clock: Callable[[], float],
) -> float:
    """Seconds inside the cache manager."""
    longest = max(map(len, prompts)) + output_len
    num_blocks = 1 + 2 * num_rows * -(-longest // BLOCK_SIZE)
    kv = _TimedCache(is_on=is_on, num_blocks=num_blocks, clock=clock)
    config = EngineConfig(
        max_model_len=longest,
        max_num_batched_tokens=max(NUM_BATCHED_TOKENS, num_rows),
        max_num_seqs=num_rows,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        enable_prefix_caching=is_on,
    )
    scheduler = Scheduler(config, kv, eos_token_ids=())
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0.0)
    for number, prompt in enumerate(prompts):
        request = Request(str(number), tuple(prompt), params, seed=0, arrival_time_s=0.0)
        scheduler.add(request)
    while scheduler.has_requests:
        output = scheduler.schedule(0.0)
        scheduler.update(output, [NO_TOKEN] * len(output.scheduled), 0.0)
    assert not kv.prefix_hits, "the prompts were to have nothing in common"
    return kv.seconds
