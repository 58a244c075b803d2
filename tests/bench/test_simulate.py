import json

import pytest
from click.testing import CliRunner, Result

from bench.simulate import simulate
from recorded_steps import recorded, step_body

SMALL = (
    *("--num-requests", "30", "--workload", "fixed:40,5", "--max-model-len", "512"),
    *("--num-kv-blocks", "200", "--max-num-seqs", "8", "--processes", "1"),
)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(simulate, [*SMALL, *arguments])


def recording(tmp_path) -> str:
    """One request of 6 prompt tokens and 30 of output, half a second a step."""
    steps = [recorded(0, 0.0, 0.5, [("a", 0, 6, True)], num_slots=32)]
    steps += [recorded(n, n / 2, n / 2 + 0.5, [("a", 5 + n, 1, True)]) for n in range(1, 30)]
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"steps": [step_body(step) for step in steps]}))
    return str(path)


def test_lists_are_varied_and_written_down(tmp_path):
    path, plot = tmp_path / "runs.json", tmp_path / "runs.svg"
    result = run(
        *("--router", "round-robin,prefix-affine", "--replicas", "2", "--request-rate", "2,inf"),
        *("--goodput", "ttft:500", "--output-json", str(path), "--plot", str(plot)),
    )
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert document["schema"] == "headrace.bench.simulate/1"
    assert document["device"]["name"] == "Llama-3-8B on 1 H200"
    assert document["device"]["accelerator"]["bandwidth_efficiency"] < 1
    assert document["engine"]["num_blocks"] == 200
    assert [run["name"] for run in document["runs"]] == ["round-robin"] * 2 + ["prefix-affine"] * 2
    assert all(run["figures"]["num_completed"] == 30 for run in document["runs"])
    assert plot.read_text().startswith("<svg")
    assert "B: prefix-affine" in result.output


def test_the_same_seed_gives_the_same_figures(tmp_path):
    figures = []
    for seed in ("3", "3", "4"):
        path = tmp_path / "runs.json"
        run("--seed", seed, "--output-json", str(path))
        figures.append(json.loads(path.read_text())["runs"][0]["figures"])
    assert figures[0] == figures[1] != figures[2]


def test_70b_takes_four_chips_unless_told(tmp_path):
    path = tmp_path / "runs.json"
    assert run("--model", "70b", "--output-json", str(path)).exit_code == 0
    assert json.loads(path.read_text())["device"]["num_chips"] == 4
    result = run("--model", "70b", "--tensor-parallel-size", "1")
    assert result.exit_code == 1
    assert "leaves no room for KV" in result.output


def test_a_recorded_device_is_fitted_and_used(tmp_path):
    path = tmp_path / "runs.json"
    result = run("--calibrate", recording(tmp_path), "--output-json", str(path))
    assert result.exit_code == 0, result.output
    bases = json.loads(path.read_text())["device"]["base_s"]
    assert {base["decode_only"] for base in bases} == {True, False}
    assert [base["seconds"] for base in bases] == pytest.approx([0.5, 0.5])


def test_a_recorded_run_is_compared_with_its_simulation(tmp_path):
    steps, path = recording(tmp_path), tmp_path / "validation.json"
    # Steps of eight slots are the reference kernel's.
    kernel = ("--attention-kernel", "reference")
    result = run("--calibrate", steps, "--validate", steps, *kernel, "--output-json", str(path))
    assert result.exit_code == 0, result.output
    assert "Throughput within 15 %" in result.output
    validation = json.loads(path.read_text())["validation"]
    assert validation["holds"]
    assert validation["output_tokens"] == 30
    assert validation["simulated"]["duration_s"] == pytest.approx(15.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--router", "random"), "--router"),
        (("--batching", "continuous,none"), "--batching"),
        (("--scheduling-policy", "lifo"), "--scheduling-policy"),
        (("--replicas", "0"), "--replicas"),
        (("--replicas", "1,x"), "--replicas"),
        (("--request-rate", "-1"), "--request-rate"),
        (("--request-rate", "nan"), "--request-rate"),
        (("--target-itl-ms", "0"), "--target-itl-ms"),
        (("--workload", "fixed:0,5"), "--workload"),
        (("--workload", "books"), "--workload"),
        (("--goodput", "speed:3"), "--goodput"),
        (("--validate", "steps.json"), "--calibrate"),
    ],
)
def test_a_wrong_option_is_a_usage_error_that_names_it(arguments: tuple[str, ...], named: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("--calibrate", "nowhere.json"),
        ("--num-kv-blocks", "2"),
        ("--shared-prefix-len", "600"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(arguments: tuple[str, ...]):
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
