"""From a scheduler's decision to the arrays of one step, in one packed transfer."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from jaxengine.batch_layout import PENALTIES, BatchLayout
from jaxengine.buckets import Bucket, smallest_bucket
from jaxengine.sampling_params import SamplingParams
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
        serial: as in ScheduledBatch.
        num_slots: token slots that the device computes.
    """

    layout: BatchLayout
    packed: NDArray[np.int32]
    sequences: list[int]
    rules: list[tuple[int, TokenRules, int]]
    logprobs: list[int]
    prompt_logprobs: list[tuple[int, int, int]]
    serial: int
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

    def build(
        self, output: SchedulerOutput, layout: BatchLayout | None = None, *, serial: int = 0
    ) -> PackedStep:
        """Pack one step; for the smallest bucket that holds it, unless told for which.

        Args:
            output: the step.
            layout: of the bucket.
            serial: as in ScheduledBatch.
        """
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
        ordered = [items[index] for index in order]
        views["rows"][:] = self._spare_row
        views["suppressed_ids"][:] = -1
        views["targets"][:] = -1
        num_tokens = self._pack_tokens(views, ordered)
        self._pack_sampling(views, ordered)
        rules: list[tuple[int, TokenRules, int]] = []
        logprobs: list[int] = []
        prompt_logprobs: list[tuple[int, int, int]] = []
        for seq, item in enumerate(ordered):
            request = item.request
            if item.samples:
                if request.rules is not None:
                    _pack_rules(views, seq, request.rules)
                    end = item.first_position + item.num_new_tokens
                    rules.append((seq, request.rules, end - request.num_prompt_tokens))
                if request.params.logprobs is not None:
                    logprobs.append(order[seq])
            if request.lacks_prompt_logprobs and _has_targets(item):
                start = int(views["query_start_loc"][seq])
                prompt_logprobs.append((order[seq], start, _pack_targets(views, start, item)))
        views["num_slots"][...] = num_tokens
        views["serial"][...] = serial
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
        num_slots = num_tokens if self._skips_padding else layout.bucket.num_tokens
        return PackedStep(
            layout, packed, sequences, rules, logprobs, prompt_logprobs, serial, num_slots
        )

    def _pack_tokens(
        self, views: dict[str, NDArray[np.int32]], items: Sequence[ScheduledRequest]
    ) -> int:
        """Pack what is computed, and where it belongs; return how many tokens there are.

        All sequences at once: one by one they cost as much as the rest of the host's work.
        """
        num_seqs = len(items)
        firsts = np.array([item.first_position for item in items], np.int32)
        counts = np.array([item.num_new_tokens for item in items], np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        num_tokens = int(ends[-1])
        views["query_start_loc"][1 : num_seqs + 1] = ends
        views["query_start_loc"][num_seqs + 1 :] = num_tokens
        views["seq_lens"][:num_seqs] = views["position"][:num_seqs] = firsts + counts
        views["sample_indices"][:num_seqs] = ends - 1
        views["rows"][:num_seqs] = [item.row if item.samples else self._spare_row for item in items]
        token_ids: list[int] = []
        for item in items:
            if item.num_new_tokens > 1 or not item.last_is_pending:
                token_ids += item.token_ids
            if item.last_is_pending:
                token_ids.append(-1 - item.row)
        views["token_ids"][:num_tokens] = token_ids
        tables = views["block_tables"]
        lengths = np.array([len(item.block_ids) for item in items])
        used = np.arange(tables.shape[1]) < lengths[:, np.newaxis]
        tables[:num_seqs][used] = list(chain.from_iterable(item.block_ids for item in items))
        seqs = np.repeat(np.arange(num_seqs), counts)
        positions = np.arange(num_tokens, dtype=np.int32) + (firsts + counts - ends)[seqs]
        views["positions"][:num_tokens] = positions
        views["slot_mapping"][:num_tokens] = (
            tables[seqs, positions // self._block_size] * self._block_size
            + positions % self._block_size
        )
        return num_tokens

    def _pack_sampling(
        self, views: dict[str, NDArray[np.int32]], items: Sequence[ScheduledRequest]
    ) -> None:
        """Pack how tokens are chosen; zeros are greedy, as is what nobody reads."""
        at_random: list[int] = []
        for seq, item in enumerate(items):
            if not item.samples:
                continue
            request = item.request
            if request.samples_at_random:
                at_random.append(seq)
            end = item.first_position + item.num_new_tokens
            if end - request.num_prompt_tokens < request.params.min_tokens:
                suppressed = self._suppressed_ids(request.params)
                if suppressed:
                    views["suppressed_ids"][seq, : len(suppressed)] = suppressed
                    views["any_suppressed"][...] = 1
        if not at_random:
            return
        views["any_random"][...] = 1
        params = [items[seq].request.params for seq in at_random]
        for name in ("temperature", "top_p", "min_p"):
            views[name].view(np.float32)[at_random] = [getattr(p, name) for p in params]
        views["top_k"][at_random] = [p.top_k for p in params]
        seeds = [items[seq].request.seed for seq in at_random]
        views["seed"].view(np.uint32)[at_random] = [(s >> 32, s & 0xFFFFFFFF) for s in seeds]
        if any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params):
            views["any_filtered"][...] = 1

    def _suppressed_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the ids that must not be sampled before min_tokens are there."""
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
