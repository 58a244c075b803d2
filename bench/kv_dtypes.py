"""What each dtype of the KV cache costs in quality, and what it saves.

    python -m bench.kv_dtypes

One text goes through the model window by window, teacher-forced, in chunks through a paged cache
of each dtype at once; every logit is compared with that of a float32 cache.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, get_args

import click
import numpy as np
import orjson
from numpy.typing import NDArray

from bench.environment import describe_environment
from bench.kv_dtype_loss import BLOCK_SIZE, GoldenCase, count_kept, measure_losses, time_steps
from bench.report import open_console, print_rows, write_json
from gateway.tokenizer import Tokenizer
from jaxengine.kv_cache import kv_block_bytes
from jaxengine.models.config import ModelConfig
from jaxengine.models.decoder import Decoder
from jaxengine.models.loader import load_decoder
from jaxengine.weights.checkpoint import open_checkpoint
from jaxengine.weights.source import resolve_model
from kernels_pallas.kv_cache import KVCacheDtype

__all__ = ["kv_dtypes", "measure_dtypes"]

RESULT_SCHEMA = "headrace.bench.kv_dtypes/1"
ROOT = Path(__file__).parent.parent
TEXTS = (ROOT / "docs" / "architecture.md", ROOT / "docs" / "protocol.md")
GOLDEN = ROOT / "tests" / "golden" / "golden_smollm2.json"

HEADINGS = (
    *("KV cache", "bytes\n/token", "capacity", "logit error\nmean", "max", "KL\nnats"),
    *("same\nargmax", "perplexity", "golden\nkept", "step ms\nmedian/min"),
)
DTYPES: tuple[KVCacheDtype, ...] = get_args(KVCacheDtype)
WeightsDtype = Literal["bfloat16", "float32"]


@dataclass(frozen=True, slots=True)
class DtypeReport:
    """One dtype of the cache against a float32 cache under the same weights.

    Attributes:
        bytes_per_token: of the cache, over all layers.
        capacity: tokens in the same memory, relative to bfloat16.
        max_error, mean_error: of logits, absolute, over all positions and the vocabulary.
        kl_divergence: mean over positions, in nats.
        agreement: share of positions with the same likeliest token.
        perplexity: of the text.
        golden_kept: golden answers of which every token is still the likeliest.
        step_ms: median time of a decode step, and the fastest.
    """

    dtype: KVCacheDtype
    bytes_per_token: int
    capacity: float
    max_error: float
    mean_error: float
    kl_divergence: float
    agreement: float
    perplexity: float
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
    losses = measure_losses(decoder, model, windows, dtypes)
    bf16_bytes = kv_block_bytes(model, block_size=BLOCK_SIZE, dtype="bfloat16")
    reports = []
    for dtype in dtypes:
        block_bytes = kv_block_bytes(model, block_size=BLOCK_SIZE, dtype=dtype)
        loss = losses[dtype]
        reports.append(
            DtypeReport(
                dtype=dtype,
                bytes_per_token=block_bytes // BLOCK_SIZE,
                capacity=bf16_bytes / block_bytes,
                max_error=float(loss["max_error"].max()),
                mean_error=_mean(loss["mean_error"]),
                kl_divergence=_mean(loss["kl_divergence"]),
                agreement=_mean(loss["agrees"]),
                perplexity=math.exp(_mean(loss["surprise"])),
                golden_kept=count_kept(decoder, model, golden, dtype) if golden else None,
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
        f"{report.mean_error:.4f}",
        f"{report.max_error:.2f}",
        f"{report.kl_divergence:.1e}",
        f"{report.agreement:.2%}",
        f"{report.perplexity:.3f}",
        "-" if report.golden_kept is None else f"{report.golden_kept}/{num_golden}",
        "-" if report.step_ms is None else "/".join(f"{ms:.0f}" for ms in report.step_ms),
    )


def read_golden(path: Path) -> list[GoldenCase]:
    """Read prompts and answers from the file of the tests."""
    cases = orjson.loads(path.read_bytes())["cases"]
    return [GoldenCase(tuple(c["prompt_ids"]), tuple(c["output_ids"])) for c in cases]


def _mean(values: NDArray[np.float32]) -> float:
    return float(values.astype(np.float64).mean())


@click.command()
@click.option("--model", "spec", help="As for `headrace serve`; default: the default model.")
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
    "--text",
    "texts",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    multiple=True,
    default=TEXTS,
    help="Files to read, repeatable; default: two of our own documents.",
)
@click.option("--window", type=click.IntRange(min=2), default=512, show_default=True)
@click.option("--max-windows", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--golden",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Golden answers for the model; the default model has its own.",
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
@click.option("--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file.")
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
    files = resolve_model(spec)
    checkpoint = open_checkpoint(files)
    model = ModelConfig.from_hf(checkpoint.hf_config)
    text = "\n".join(path.read_text("utf-8") for path in texts)
    token_ids = Tokenizer.from_model(files).encode(text)
    starts = range(0, len(token_ids) - 1, window)[:max_windows]
    windows = [token_ids[start : start + window] for start in starts]
    if golden is None and spec is None and GOLDEN.exists():
        golden = GOLDEN
    cases = [] if golden is None else read_golden(golden)
    console = open_console()
    results: dict[str, list[DtypeReport]] = {}
    for weights_dtype in weights_dtypes:
        decoder = load_decoder(model, checkpoint, dtype=weights_dtype)
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
            decoder, model, windows, dtypes=dtypes, golden=cases, step_ms=step_ms
        )
        results[weights_dtype] = reports
        rows = [dtype_row(report, len(cases)) for report in reports]
        print_rows(console, HEADINGS, rows, f"{files.name}, weights in {weights_dtype}")
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            "model": files.name,
            "texts": [path.name for path in texts],
            "text_sha256": sha256(text.encode()).hexdigest(),
            "num_tokens": sum(map(len, windows)),
            "window": window,
            "num_golden": len(cases),
            "step": {"num_seqs": step_seqs, "context": step_context, "repeats": step_repeats},
            "weights": {name: [asdict(report) for report in r] for name, r in results.items()},
        }
        write_json(output_json, document)


if __name__ == "__main__":
    kv_dtypes()
