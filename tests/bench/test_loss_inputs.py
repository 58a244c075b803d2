import json

import click
import pytest
from click.testing import CliRunner

from bench.logit_loss import GoldenCase
from bench.loss_inputs import input_options, read_inputs
from golden_model import TINY_DIR

TINY = str(TINY_DIR / "llama")


def test_a_text_is_cut_into_windows(tmp_path):
    paths = [tmp_path / "one.md", tmp_path / "two.md"]
    for path in paths:
        path.write_text("abcd")
    # The tokenizer of the tiny model has a token for each byte; a newline joins the files.
    inputs = read_inputs(TINY, paths, 4, 8, None)
    assert [len(window) for window in inputs.windows] == [4, 4, 1][: len(inputs.windows)]
    assert inputs.facts["num_tokens"] == sum(map(len, inputs.windows))
    assert inputs.facts["texts"] == ["one.md", "two.md"]
    assert len(read_inputs(TINY, paths, 4, 1, None).windows) == 1
    assert inputs.golden == []


def test_golden_answers_are_read(tmp_path):
    path, text = tmp_path / "golden.json", tmp_path / "text.md"
    text.write_text("some text")
    path.write_text(json.dumps({"cases": [{"prompt_ids": [1, 2], "output_ids": [3]}]}))
    inputs = read_inputs(TINY, [text], 4, 8, path)
    assert inputs.golden == [GoldenCase((1, 2), (3,))]
    assert inputs.facts["num_golden"] == 1


@pytest.mark.parametrize("option", ["--model", "--text", "--golden", "--output-json"])
def test_commands_get_the_options(option):
    @click.command()
    @input_options
    def command(**options: object) -> None:
        click.echo(sorted(options))

    assert option in CliRunner().invoke(command, ["--help"]).output
    assert "'max_windows'" in CliRunner().invoke(command).output
