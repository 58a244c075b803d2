"""How much memory the native library keeps for itself.

A call of `native_layer` keeps what its phases hand to each other, for the next call; there are as
many of these as calls have run at once. Every thread that takes part in attention keeps a tile of
it for as long as it lives. Both are kept for the largest step that there was, so that no call waits
for fresh pages. The sizes are those of `layer.cc`, `calls.cc` and `attention_worker.h` in
`native_source`.

Letters: T tokens, R rows, D model, F hidden, N query heads, K kv heads, H head dim, I inputs.
"""

from dataclasses import dataclass
from typing import Literal

from kernels_pallas.kv_cache import KVCacheDtype, product_dtype
from kernels_pallas.native import HEAD_MULTIPLE
from kernels_pallas.projection import PANEL

__all__ = ["LayerSizes", "call_bytes", "worker_bytes"]

PAGE, CACHE_LINE = 4096, 64

# Of attention: tokens of a tile, query rows of a thread, and the numbers that the widest and the
# narrowest vectors hold.
KV_TILE, MAX_ROWS = 128, 64
MOST_LANES, FEWEST_LANES = 16, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """What the memory of a call depends on, but for the tokens.

    Attributes:
        weights: the dtype of packed weights; None if XLA has the products, and the library only
            attention.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    weights: Literal["bfloat16", "int8"] | None
    block_size: int
    kv_cache_dtype: KVCacheDtype


def call_bytes(sizes: LayerSizes, *, num_tokens: int, num_rows: int) -> int:
    """Return what is kept of a call at most, once it has run such steps.

    Args:
        sizes: of the model.
        num_tokens: of a step, at most.
        num_rows: of a step, at most: those of which the vocabulary is looked at.
    """
    if sizes.weights is None:
        return 0
    layers = _attention_half(sizes, num_tokens) + _mlp_half(sizes, num_tokens)
    most = max(layers, _head(sizes, num_rows))
    return _rounded_up(most, PAGE)


def worker_bytes(sizes: LayerSizes) -> int:
    """Return what a thread keeps for a tile of attention.

    That is queries, scores, sums, and operands that do not lie as they should, counted for
    the processor that takes most: others take a few kilobytes less.
    """
    head_dim = _rounded_up(sizes.head_dim, HEAD_MULTIPLE)
    per_word = 2 if product_dtype(sizes.kv_cache_dtype) == "bfloat16" else 1
    num_blocks = KV_TILE // sizes.block_size
    words = MAX_ROWS * (2 * head_dim + KV_TILE + MOST_LANES) + 2 * head_dim
    if sizes.kv_cache_dtype not in ("bfloat16", "float32"):  # decoded, K and V
        words += 2 * KV_TILE * head_dim // per_word
    if sizes.block_size < MOST_LANES:  # keys of blocks side by side
        words += KV_TILE * head_dim // per_word
    # Pointers of two words.
    columns = 2 * max(num_blocks * head_dim // FEWEST_LANES, KV_TILE // FEWEST_LANES)
    return _rounded_up(4 * words + _rounded_up(4 * columns, CACHE_LINE), PAGE)


def _attention_half(sizes: LayerSizes, num_tokens: int) -> int:
    """Rows behind the norm, q, k and v, and rows of what attention gives."""
    query = sizes.num_heads * sizes.head_dim
    qkv = query + 2 * sizes.num_kv_heads * sizes.head_dim
    return (
        _rows(sizes, num_tokens, sizes.hidden_size)
        + _rounded_up(4 * num_tokens * qkv, CACHE_LINE)
        + _given_rows(sizes, num_tokens, query)
    )


def _mlp_half(sizes: LayerSizes, num_tokens: int) -> int:
    """Rows behind the norm, and rows of what the gate lets through."""
    return _rows(sizes, num_tokens, sizes.hidden_size) + _given_rows(
        sizes, num_tokens, sizes.intermediate_size
    )


def _head(sizes: LayerSizes, num_rows: int) -> int:
    """Rows behind the last norm, and each panel's largest logit with its place: [V / 32, R]."""
    largest = (4 + 4) * (sizes.vocab_size // PANEL) * num_rows
    return _rows(sizes, num_rows, sizes.hidden_size) + _rounded_up(largest, CACHE_LINE)


def _rows(sizes: LayerSizes, num_tokens: int, num_inputs: int) -> int:
    """[T, I] rounded for a product; rows of eight bits with a scale and a sum each."""
    if sizes.weights == "int8":
        rounded = _rounded_up(num_tokens * num_inputs, CACHE_LINE)
        return _rounded_up(rounded + num_tokens * (4 + 4), CACHE_LINE)
    return _rounded_up(num_tokens * num_inputs * 2, CACHE_LINE)


def _given_rows(sizes: LayerSizes, num_tokens: int, num_inputs: int) -> int:
    """The same for what comes in pieces: a row of eight bits is rounded as a whole, from f32."""
    whole = 4 * num_tokens * num_inputs if sizes.weights == "int8" else 0
    return _rows(sizes, num_tokens, num_inputs) + _rounded_up(whole, CACHE_LINE)


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
