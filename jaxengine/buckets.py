"""The sizes that steps are compiled for, and which of them a step takes."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxengine.config import EngineConfig

__all__ = ["Bucket", "buckets_for", "smallest_bucket"]

# The smallest bucket. Below two rows XLA's CPU products are slow and round differently; from two
# to eight they cost the same, since reading the weights is what takes the time.
SMALLEST_BUCKET = 8

# The products of the native kernel take sixteen rows in the time of one.
SMALLEST_RAGGED_BUCKET = 16

# Tokens of mixed steps, up to what a step can hold. Time is about linear in them.
MIXED_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

# Sizes between them. Worth their compilation where prompts are cut to a time, because a step just
# too long for its limit would otherwise fall to half, and where decode-only steps need none.
SIZES_BETWEEN = (96, 192, 384, 768, 1536, 3072, 6144, 12288, 24576)


class Bucket(NamedTuple):
    """A compiled size."""

    num_tokens: int
    num_seqs: int
    decode_only: bool

    def holds(self, *, num_tokens: int, num_seqs: int, decode_only: bool) -> bool:
        """Whether such a step fits. `decode_only`: it has one token for every sequence."""
        return (
            num_tokens <= self.num_tokens
            and num_seqs <= self.num_seqs
            and (decode_only or not self.decode_only)
        )


def buckets_for(config: EngineConfig, *, skips_padding: bool = False) -> list[Bucket]:
    """Return the sizes to compile: powers of two, so that padding wastes less than half.

    With `target_itl_s` there are as many mixed sizes again between them, but for the smallest.
    Decode-only steps have one token per sequence. Mixed steps begin at a size that a short prompt
    fills: each costs seconds to compile. The native kernel takes a ragged batch as it is, so that
    there is nothing to be gained from decode-only steps; it has the sizes between for them.

    Args:
        config: of the engine.
        skips_padding: the device computes no padding, so that sizes between gain nothing.
    """
    is_ragged = config.attention_kernel == "native"
    smallest = SMALLEST_RAGGED_BUCKET if is_ragged else SMALLEST_BUCKET
    most_seqs = max(config.max_num_seqs, smallest)
    decode_sizes, size = [], smallest
    while size < most_seqs:
        decode_sizes.append(size)
        size *= 2
    decode_sizes.append(size)
    token_buckets = config.token_buckets
    if not token_buckets:
        largest = max(config.max_num_batched_tokens, size)
        is_fine = (is_ragged or config.target_itl_s is not None) and not skips_padding
        sizes = (*MIXED_SIZES, *SIZES_BETWEEN) if is_fine else MIXED_SIZES
        token_buckets = tuple(sorted({largest, *(t for t in sizes if t < largest)}))
    mixed_sizes = {max(tokens, smallest) for tokens in token_buckets}
    if is_ragged:
        mixed_sizes.update(decode_sizes)
        decode_sizes = []
    return [
        *(Bucket(seqs, seqs, True) for seqs in decode_sizes),
        *(Bucket(tokens, min(tokens, size), False) for tokens in sorted(mixed_sizes)),
    ]


def smallest_bucket(
    buckets: Sequence[Bucket], *, num_tokens: int, num_seqs: int, decode_only: bool
) -> Bucket:
    """Return the cheapest bucket that holds a step; of two equal sizes, the decode-only one.

    Raises:
        ValueError: none does; the scheduler's budgets are meant to prevent it.
    """
    fitting = [
        bucket
        for bucket in buckets
        if bucket.holds(num_tokens=num_tokens, num_seqs=num_seqs, decode_only=decode_only)
    ]
    if not fitting:
        raise ValueError(f"no bucket holds {num_tokens} tokens of {num_seqs} sequences")
    return min(fitting, key=lambda b: (b.num_tokens, b.num_seqs, not b.decode_only))
