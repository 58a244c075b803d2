"""What is asked, and when: seeded prompts that no prefix cache can help, and arrival times."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

__all__ = ["WORDS", "Prompt", "PromptKind", "WorkloadConfig", "arrival_times", "make_prompt"]

# Plain words, each one or two tokens in the usual vocabularies, for servers that take text only.
WORDS = (
    "river stone window garden paper winter market bridge yellow carpet dinner forest silver "
    "letter mountain orange pencil street candle thunder village morning blanket captain desert "
    "engine farmer guitar harbor island jacket kitchen ladder mirror needle ocean planet rabbit "
    "saddle temple uncle valley wagon basket cotton dragon elbow feather ginger hammer insect "
    "jungle kettle lemon magnet napkin oyster pepper quarter ribbon shadow ticket umbrella velvet"
).split()

type Prompt = str | list[int]
type PromptKind = Literal["tokens", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadConfig:
    """One kind of request.

    Attributes:
        kind: "tokens" sends token ids; "text" sends about `input_len` words.
        input_len: length of each prompt, in tokens (in words for text).
        output_len: tokens asked for.
        shared_prefix_len: how many of the prompt's first tokens are the same in every prompt.
        min_token_id, vocab_size: ids are drawn from [min_token_id, vocab_size). The ids below are
            usually control tokens and single bytes.
        seed: the same seed gives the same prompts.
    """

    kind: PromptKind = "tokens"
    input_len: int = 128
    output_len: int = 64
    shared_prefix_len: int = 0
    min_token_id: int = 1000
    vocab_size: int = 30000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("tokens", "text"):
            raise ValueError(f"{self.kind=} must be 'tokens' or 'text'")
        if self.input_len < 1 or self.output_len < 1:
            raise ValueError(f"{self.input_len=} and {self.output_len=} must be positive")
        if not 0 <= self.shared_prefix_len < self.input_len:
            raise ValueError(
                f"{self.shared_prefix_len=} must leave room for at least one own token in "
                f"{self.input_len=}"
            )
        if not 0 <= self.min_token_id < self.vocab_size:
            raise ValueError(f"{self.min_token_id=} must be below {self.vocab_size=}")


def make_prompt(config: WorkloadConfig, index: int) -> Prompt:
    """Prompt number `index` of the workload.

    Each is drawn by itself from (seed, index), so that a prompt does not depend on how many came
    before it, and a later measurement of the same run never repeats an earlier one.
    """
    shared = random.Random(f"{config.seed}/shared")
    own = random.Random(f"{config.seed}/{index}")
    own_len = config.input_len - config.shared_prefix_len
    if config.kind == "text":
        words = [shared.choice(WORDS) for _ in range(config.shared_prefix_len)]
        words += [own.choice(WORDS) for _ in range(own_len)]
        return " ".join(words)
    ids = [draw_id(config, shared) for _ in range(config.shared_prefix_len)]
    return ids + [draw_id(config, own) for _ in range(own_len)]


def draw_id(config: WorkloadConfig, source: random.Random) -> int:
    """One ordinary token id."""
    return source.randrange(config.min_token_id, config.vocab_size)


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which requests arrive, for ever.

    Args:
        rate: requests per second, on average.
        burstiness: shape of the gamma-distributed gaps: 1 is a Poisson process, below 1 comes in
            bursts, above 1 is more regular.
        seed: the same seed gives the same times.
    """
    if rate <= 0 or burstiness <= 0:
        raise ValueError(f"{rate=} and {burstiness=} must be positive")
    source = random.Random(f"{seed}/arrivals")
    now = 0.0
    while True:
        yield now
        now += source.gammavariate(burstiness, 1.0 / (rate * burstiness))
