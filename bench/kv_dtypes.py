"""What each dtype of the KV cache costs in quality, and what it saves.

    python -m bench.kv_dtypes

One text goes through the model window by window, teacher-forced, in chunks through a paged cache
of each dtype at once; every logit is compared with that of a float32 cache.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import click

from bench.environment import describe_environment
from bench.logit_loss import (
    BLOCK_SIZE,
    LOSS_HEADINGS,
    GoldenCase,
    LogitLoss,
    PagedDecoder,
    count_kept,
    longest_text,
    loss_cells,
    measure_losses,
    time_steps,
)
from bench.loss_inputs import input_options, read_inputs
from bench.report import open_console, print_rows, write_json
from jaxengine.kv_cache import kv_block_bytes
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.models.loader import load_decoder
from kernels_pallas.kv_cache import KVCacheDtype

__all__ = ["kv_dtypes", "measure_dtypes"]

RESULT_SCHEMA = "headrace.bench.kv_dtypes/2"
REFERENCE: KVCacheDtype = "float32"

HEADINGS = (
    *("KV cache", "bytes\n/token", "capacity"),
    *(*LOSS_HEADINGS, "golden\nkept", "step ms\nmedian/min"),
)
DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
WeightsDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class DtypeReport:
    """One dtype of the cache against a float32 cache under the same weights.

    Attributes:
        bytes_per_token: of the cache, over all layers.
        capacity: tokens in the same memory, relative to bfloat16.
        loss: of logits.
        golden_kept: golden answers of which every token is still the likeliest.
        step_ms: median time of a decode step, and the fastest.
    """

    dtype: KVCacheDtype
    bytes_per_token: int
    capacity: float
    loss: LogitLoss
    golden_kept: int | None
    step_ms: tuple[float, float] | None


def measure_dtypes(
    decoder: Decoder,
    model: ModelConfig,
    windows: Sequence[Sequence[int]],
    *,
    dtypes: Sequence[KVCacheDtype],
    golden: Sequence[GoldenCase] = (),
    step_ms: dict[KVCacheDtype, tuple[float, float]] | None = None,
) -> list[DtypeReport]:
    """Report on every dtype.

    Args:
        decoder: with weights of any dtype.
        model: its configuration.
        windows: token ids of pieces of a text, each of at least two.
        dtypes: to measure.
        golden: answers that should be kept; empty if there are none for this model.
        step_ms: what `time_steps` found, if it was asked.
    """
    max_len = longest_text(windows, golden)
    paged = {d: PagedDecoder(decoder, model, d, max_len=max_len) for d in (REFERENCE, *dtypes)}
    losses = measure_losses(paged[REFERENCE], {d: paged[d] for d in dtypes}, windows)
    bf16_bytes = kv_block_bytes(model, block_size=BLOCK_SIZE, dtype="bfloat16")
    reports = []
    for dtype in dtypes:
        block_bytes = kv_block_bytes(model, block_size=BLOCK_SIZE, dtype=dtype)
        reports.append(
            DtypeReport(
                dtype=dtype,
                bytes_per_token=block_bytes // BLOCK_SIZE,
                capacity=bf16_bytes / block_bytes,
                loss=LogitLoss.of(losses[dtype]),
                golden_kept=count_kept(paged[dtype], golden) if golden else None,
                step_ms=None if step_ms is None else step_ms[dtype],
            )
        )
    return reports


def dtype_row(report: DtypeReport, num_golden: int) -> tuple[str, ...]:
    """One row of the table."""
    return (
        report.dtype,
        str(report.bytes_per_token),
        f"{report.capacity:.2f}",
        *loss_cells(report.loss),
        "-" if report.golden_kept is None else f"{report.golden_kept}/{num_golden}",
        "-" if report.step_ms is None else "/".join(f"{ms:.0f}" for ms in report.step_ms),
    )


@click.command()
@input_options
@click.option(
    "--dtype",
    "weights_dtypes",
    type=click.Choice(get_args(WeightsDtype)),
    multiple=True,
    default=get_args(WeightsDtype),
    show_default=True,
    help="Of the weights; repeatable.",
)
@click.option(
    "--kv-cache-dtype",
    "dtypes",
    type=click.Choice(DTYPES),
    multiple=True,
    default=DTYPES,
    show_default=True,
    help="To measure; repeatable.",
)
@click.option(
    "--step-repeats",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Decode steps to time for each dtype.",
)
@click.option("--step-seqs", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--step-context", type=click.IntRange(min=1), default=192, show_default=True)
def kv_dtypes(
    spec: str | None,
    weights_dtypes: tuple[WeightsDtype, ...],
    dtypes: tuple[KVCacheDtype, ...],
    texts: tuple[Path, ...],
    window: int,
    max_windows: int,
    golden: Path | None,
    step_repeats: int,
    step_seqs: int,
    step_context: int,
    output_json: Path | None,
) -> None:
    """Measure what each dtype of the KV cache costs in logits, in perplexity, and in time."""
    inputs = read_inputs(spec, texts, window, max_windows, golden)
    model, cases = inputs.model, inputs.golden
    console = open_console()
    results: dict[str, list[DtypeReport]] = {}
    for weights_dtype in weights_dtypes:
        decoder = load_decoder(model, inputs.checkpoint, dtype=weights_dtype)
        step_ms = None
        if step_repeats:
            step_ms = time_steps(
                decoder,
                model,
                dtypes,
                num_seqs=step_seqs,
                context=step_context,
                repeats=step_repeats,
            )
        reports = measure_dtypes(
            decoder, model, inputs.windows, dtypes=dtypes, golden=cases, step_ms=step_ms
        )
        results[weights_dtype] = reports
        rows = [dtype_row(report, len(cases)) for report in reports]
        print_rows(console, HEADINGS, rows, f"{inputs.name}, weights in {weights_dtype}")
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            **inputs.facts,
            "step": {"num_seqs": step_seqs, "context": step_context, "repeats": step_repeats},
            "weights": {name: [asdict(report) for report in r] for name, r in results.items()},
        }
        write_json(output_json, document)


if __name__ == "__main__":
    kv_dtypes()
