"""What losses of logits are measured on: a model, texts cut into windows, and golden answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import orjson

from bench.logit_loss import GoldenCase
from gateway.tokenizer import Tokenizer
from jaxengine.models.config import ModelConfig
from jaxengine.weights.checkpoint import Checkpoint, open_checkpoint
from jaxengine.weights.source import resolve_model

__all__ = ["LossInputs", "input_options", "read_inputs"]

ROOT = Path(__file__).parent.parent
TEXTS = (ROOT / "docs" / "architecture.md", ROOT / "docs" / "protocol.md")
GOLDEN = ROOT / "tests" / "golden" / "golden_smollm2.json"

OPTIONS = (
    click.option("--model", "spec", help="As for `headrace serve`; default: the default model."),
    click.option(
        "--text",
        "texts",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        multiple=True,
        default=TEXTS,
        help="Files to read, repeatable; default: two of our own documents.",
    ),
    click.option("--window", type=click.IntRange(min=2), default=512, show_default=True),
    click.option("--max-windows", type=click.IntRange(min=1), default=8, show_default=True),
    click.option(
        "--golden",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        help="Golden answers for the model; the default model has its own.",
    ),
    click.option(
        "--output-json", type=click.Path(path_type=Path, dir_okay=False), help="Result file."
    ),
)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the options name.

    Attributes:
        name: of the model.
        model: its configuration.
        checkpoint: its weights.
        windows: token ids of pieces of the text, each of at least two.
        golden: answers that should be kept; empty if there are none for this model.
        facts: of the text, for the result file.
    """

    name: str
    model: ModelConfig
    checkpoint: Checkpoint
    windows: Sequence[Sequence[int]]
    golden: Sequence[GoldenCase]
    facts: dict[str, Any]


def input_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `read_inputs`, and --output-json."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def read_inputs(
    spec: str | None, texts: Sequence[Path], window: int, max_windows: int, golden: Path | None
) -> LossInputs:
    """Read what the options name."""
    files = resolve_model(spec)
    checkpoint = open_checkpoint(files)
    text = "\n".join(path.read_text("utf-8") for path in texts)
    token_ids = Tokenizer.from_model(files).encode(text)
    starts = range(0, len(token_ids) - 1, window)[:max_windows]
    windows = [token_ids[start : start + window] for start in starts]
    if golden is None and spec is None and GOLDEN.exists():
        golden = GOLDEN
    cases = [] if golden is None else _read_golden(golden)
    facts = {
        "model": files.name,
        "texts": [path.name for path in texts],
        "text_sha256": sha256(text.encode()).hexdigest(),
        "num_tokens": sum(map(len, windows)),
        "window": window,
        "num_golden": len(cases),
    }
    model = ModelConfig.from_hf(checkpoint.hf_config)
    return LossInputs(files.name, model, checkpoint, windows, cases, facts)


def _read_golden(path: Path) -> list[GoldenCase]:
    """Read prompts and answers from the file of the tests."""
    cases = orjson.loads(path.read_bytes())["cases"]
    return [GoldenCase(tuple(c["prompt_ids"]), tuple(c["output_ids"])) for c in cases]
