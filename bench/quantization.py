"""What weights of eight bits cost in quality, beside those of bfloat16.

    python -m bench.quantization

One text goes through the model window by window, teacher-forced, with each kind of weights; every
logit is compared with that of float32 weights and cache. Integers are the same on every path, so
XLA's stands for that of compiled products too. Eight-bit floats are widened here, which changes no
product of two, and added up in float32.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import jax
from flax import nnx

from bench.environment import describe_environment
from bench.logit_loss import (
    LOSS_HEADINGS,
    LogitLoss,
    PagedDecoder,
    count_kept,
    longest_text,
    loss_cells,
    measure_losses,
)
from bench.loss_inputs import LossInputs, input_options, read_inputs
from bench.report import open_console, print_rows, write_json
from jaxengine.config import Dtype, Quantization
from jaxengine.models.decoder import Decoder
from jaxengine.models.loader import load_decoder

__all__ = ["measure_weights", "quantization"]

RESULT_SCHEMA = "headrace.bench.quantization/1"
HEADINGS = ("weights", "dtype", "MB", *LOSS_HEADINGS, "golden\nkept")


@dataclass(frozen=True, slots=True)
class Weights:
    """A kind of weights, as the options of `headrace serve` name it.

    Attributes:
        exact_head: tied embeddings are also multiplied with as they are, which no server does.
    """

    dtype: Dtype
    quantization: Quantization | None = None
    exact_head: bool = False

    @property
    def name(self) -> str:
        if self.quantization is None:
            return self.dtype
        return self.quantization + (f", head in {self.dtype}" if self.exact_head else "")


KINDS = (
    Weights("float32"),
    Weights("bfloat16"),
    Weights("float32", "int8"),
    Weights("bfloat16", "int8"),
    Weights("bfloat16", "int8", exact_head=True),
    Weights("float32", "fp8"),
    Weights("bfloat16", "fp8"),
)


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """One kind of weights, with a cache of its dtype, against float32.

    Attributes:
        num_bytes: of all weights.
        golden_kept: golden answers of which every token is still the likeliest.
    """

    name: str
    dtype: Dtype
    num_bytes: int
    loss: LogitLoss
    golden_kept: int | None


def measure_weights(inputs: LossInputs, kinds: Sequence[Weights]) -> list[WeightsReport]:
    """Report on every kind of weights."""
    max_len = longest_text(inputs.windows, inputs.golden)

    def page(decoder: Decoder, dtype: Dtype) -> PagedDecoder:
        return PagedDecoder(decoder, inputs.model, dtype, max_len=max_len)

    reference = page(load_decoder(inputs.model, inputs.checkpoint, dtype="float32"), "float32")
    reports = []
    for kind in kinds:
        decoder = load_decoder(
            inputs.model, inputs.checkpoint, dtype=kind.dtype, quantization=kind.quantization
        )
        if kind.exact_head and inputs.model.tie_embeddings:
            decoder.lm_head = None
        paged = page(decoder, kind.dtype)
        loss = LogitLoss.of(
            measure_losses(reference, {kind.name: paged}, inputs.windows)[kind.name]
        )
        reports.append(
            WeightsReport(
                name=kind.name,
                dtype=kind.dtype,
                num_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(decoder))),
                loss=loss,
                golden_kept=count_kept(paged, inputs.golden) if inputs.golden else None,
            )
        )
    return reports


@click.command()
@input_options
def quantization(
    spec: str | None,
    texts: tuple[Path, ...],
    window: int,
    max_windows: int,
    golden: Path | None,
    output_json: Path | None,
) -> None:
    """Measure what weights of eight bits cost in logits, perplexity and golden answers."""
    inputs = read_inputs(spec, texts, window, max_windows, golden)
    reports = measure_weights(inputs, KINDS)
    rows = [
        (
            report.name,
            report.dtype,
            f"{report.num_bytes / 1e6:.0f}",
            *loss_cells(report.loss),
            "-" if report.golden_kept is None else f"{report.golden_kept}/{len(inputs.golden)}",
        )
        for report in reports
    ]
    print_rows(open_console(), HEADINGS, rows, inputs.name)
    if output_json is not None:
        document = {
            "schema": RESULT_SCHEMA,
            "environment": describe_environment(sys.argv),
            **inputs.facts,
            "weights": [asdict(report) for report in reports],
        }
        write_json(output_json, document)


if __name__ == "__main__":
    quantization()
