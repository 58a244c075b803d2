"""From a scheduler's decision to the arrays of one step, in one packed transfer."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from jaxengine.batch_layout import PENALTIES, BatchLayout
from jaxengine.buckets import Bucket, smallest_bucket
from jaxengine.request import Request
from jaxengine.scheduler_output import ScheduledRequest, SchedulerOutput
from jaxengine.token_rules import TokenRules
from kernels_pallas.work_plan import plan_decode_splits, plan_prefill_tiles

__all__ = ["BatchBuilder", "PackedStep", "pick_token_ids"]


class PackedStep(NamedTuple):
    """One step, ready to be sent.

    Attributes:
        packed: the buffer; a fresh one, because the device may keep using it.
        sequences: for each scheduled request its sequence in the batch.
        rules: sequences that have rules about tokens, these, and the number of tokens of the
            answer before the one to sample.
        logprobs: indices of scheduled requests that get the log-probabilities of a sampled token.
        prompt_logprobs: (index of a scheduled request that gets those of prompt tokens, packed
            index of its first token, number of its tokens).
        num_slots: token slots that the device computes.
    """

    layout: BatchLayout
    packed: NDArray[np.int32]
    sequences: list[int]
    rules: list[tuple[int, TokenRules, int]]
    logprobs: list[int]
    prompt_logprobs: list[tuple[int, int, int]]
    num_slots: int


class BatchBuilder:
    """Packs scheduled requests into the smallest bucket that holds them.

    Packed order: decodes first, by length, so that the groups that attend together are alike;
    then prefill chunks in scheduling order. Fillers are packed like any other.

    Args:
        skips_padding: the device leaves out what only fills a bucket.
    """

    def __init__(
        self,
        buckets: list[Bucket],
        *,
        block_size: int,
        max_blocks_per_seq: int,
        spare_row: int,
        eos_token_ids: tuple[int, ...],
        sliding_window: int | None = None,
        skips_padding: bool = False,
    ) -> None:
        self._layouts = {
            bucket: BatchLayout(bucket, max_blocks_per_seq, len(eos_token_ids), sliding_window)
            for bucket in buckets
        }
        self._sliding_window = sliding_window
        self._skips_padding = skips_padding
        self._block_size = block_size
        self._spare_row = spare_row
        self._eos_token_ids = eos_token_ids

    @property
    def layouts(self) -> list[BatchLayout]:
        return list(self._layouts.values())

    def choose(self, output: SchedulerOutput) -> BatchLayout:
        """Return the layout of the smallest bucket that holds the step.

        Raises:
            ValueError: no bucket does; the scheduler's budgets are meant to prevent it.
        """
        bucket = smallest_bucket(
            list(self._layouts),
            num_tokens=output.num_tokens + output.wasted_slots,
            num_seqs=len(output.items),
            decode_only=all(
                item.num_new_tokens == 1 and not _has_targets(item) for item in output.items
            ),
        )
        return self._layouts[bucket]

    def build(self, output: SchedulerOutput, layout: BatchLayout | None = None) -> PackedStep:
        """Pack one step; for the smallest bucket that holds it, unless told for which."""
        layout = layout or self.choose(output)
        packed = np.zeros(layout.size, np.int32)
        views = layout.views(packed)
        items = output.items
        order = sorted(
            range(len(items)),
            key=lambda i: (
                items[i].num_new_tokens > 1,
                items[i].first_position if items[i].num_new_tokens == 1 else i,
            ),
        )
        views["rows"][:] = self._spare_row
        views["suppressed_ids"][:] = -1
        views["targets"][:] = -1
        rules: list[tuple[int, TokenRules, int]] = []
        logprobs: list[int] = []
        prompt_logprobs: list[tuple[int, int, int]] = []
        start = 0
        for seq, index in enumerate(order):
            self._pack_tokens(views, seq, start, items[index])
            item = items[index]
            self._pack_sampling(views, seq, item)
            if item.samples:
                if item.request.rules is not None:
                    _pack_rules(views, seq, item.request.rules)
                    end = item.first_position + item.num_new_tokens
                    num_before = end - item.request.num_prompt_tokens
                    rules.append((seq, item.request.rules, num_before))
                if item.request.params.logprobs is not None:
                    logprobs.append(index)
            if _has_targets(item):
                count = _pack_targets(views, start, item)
                prompt_logprobs.append((index, start, count))
            start += item.num_new_tokens
        views["query_start_loc"][len(order) :] = start
        views["num_slots"][...] = start
        views["any_logprobs"][...] = bool(logprobs)
        views["any_targets"][...] = bool(prompt_logprobs)
        num_decodes = sum(item.num_new_tokens == 1 for item in items)
        views["num_decodes"][...] = num_decodes
        views["num_prefill_tiles"][...] = plan_prefill_tiles(
            views["query_start_loc"][: len(order) + 1],
            views["seq_lens"][: len(order)],
            num_decodes,
            views["prefill_tiles"],
        )
        plan_decode_splits(
            views["seq_lens"], num_decodes, views["decode_splits"], views["split_starts"]
        )
        if self._sliding_window is not None:
            plan_decode_splits(
                views["seq_lens"],
                num_decodes,
                views["window_splits"],
                views["window_split_starts"],
                sliding_window=self._sliding_window,
            )
        sequences = [0] * len(order)
        for seq, index in enumerate(order):
            sequences[index] = seq
        del sequences[len(output.scheduled) :]
        num_slots = start if self._skips_padding else layout.bucket.num_tokens
        return PackedStep(layout, packed, sequences, rules, logprobs, prompt_logprobs, num_slots)

    def _pack_tokens(
        self, views: dict[str, NDArray[np.int32]], seq: int, start: int, item: ScheduledRequest
    ) -> None:
        end = start + item.num_new_tokens
        first, last = item.first_position, item.first_position + item.num_new_tokens
        known = item.token_ids
        views["token_ids"][start : start + len(known)] = known
        if item.last_is_pending:
            views["token_ids"][end - 1] = -1 - item.row
        table = views["block_tables"][seq]
        table[: len(item.block_ids)] = item.block_ids
        positions = np.arange(first, last, dtype=np.int32)
        views["positions"][start:end] = positions
        views["slot_mapping"][start:end] = (
            table[positions // self._block_size] * self._block_size + positions % self._block_size
        )
        views["query_start_loc"][seq] = start
        views["seq_lens"][seq] = last
        views["sample_indices"][seq] = end - 1
        views["position"][seq] = last
        if item.samples:
            views["rows"][seq] = item.row

    def _pack_sampling(
        self, views: dict[str, NDArray[np.int32]], seq: int, item: ScheduledRequest
    ) -> None:
        params = item.request.params
        if not item.samples:
            return  # zero temperature: the greedy token of padding, which nobody reads
        if not params.is_greedy:
            views["temperature"].view(np.float32)[seq] = params.temperature
            views["top_k"][seq] = params.top_k
            views["top_p"].view(np.float32)[seq] = params.top_p
            views["min_p"].view(np.float32)[seq] = params.min_p
            seed = item.request.seed
            views["seed"].view(np.uint32)[seq] = seed >> 32, seed & 0xFFFFFFFF
            views["any_random"][...] = 1
            if params.top_k or params.top_p < 1 or params.min_p > 0:
                views["any_filtered"][...] = 1
        suppressed = self._suppressed_ids(item.request, item.first_position + item.num_new_tokens)
        if suppressed:
            views["suppressed_ids"][seq, : len(suppressed)] = suppressed
            views["any_suppressed"][...] = 1

    def _suppressed_ids(self, request: Request, position: int) -> tuple[int, ...]:
        """Return the ids that must not be sampled at `position`: min_tokens is not reached."""
        params = request.params
        if position - request.num_prompt_tokens >= params.min_tokens:
            return ()
        eos = () if params.ignore_eos else self._eos_token_ids
        return (*eos, *params.stop_token_ids)


def _has_targets(item: ScheduledRequest) -> bool:
    """Whether log-probabilities of prompt tokens are wanted that follow tokens of the item."""
    request = item.request
    return (
        request.lacks_prompt_logprobs
        and not item.is_filler
        and item.first_position + 1 < request.num_prompt_tokens
    )


def _pack_targets(views: dict[str, NDArray[np.int32]], start: int, item: ScheduledRequest) -> int:
    """Pack the prompt tokens after those of the item; return how many there are."""
    request, first = item.request, item.first_position + 1
    end = min(first + item.num_new_tokens, request.num_prompt_tokens)
    views["targets"][start : start + end - first] = request.token_ids[first:end]
    return end - first


def _pack_rules(views: dict[str, NDArray[np.int32]], seq: int, rules: TokenRules) -> None:
    params = rules.params
    if params.penalizes:
        for name in PENALTIES:
            views[name].view(np.float32)[seq] = getattr(params, name)
        views["any_penalized"][...] = 1
    if params.logit_bias:
        views["any_biased"][...] = 1
    if params.masks:
        views["any_masked"][...] = 1


def pick_token_ids(token_ids_T: Int[Array, "T"], last_token_R: Int[Array, "R"]) -> Int[Array, "T"]:
    """Replace the marks of pending tokens by what the device remembers."""
    rows = jnp.maximum(-1 - token_ids_T, 0)
    return jnp.where(token_ids_T < 0, last_token_R[rows], token_ids_T)
