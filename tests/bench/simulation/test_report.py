import io
import math
from xml.etree import ElementTree

import orjson
from rich.console import Console

from bench.simulation.device import FixedDevice
from bench.simulation.plan import Choices, SimulationPlan, run_plan
from bench.simulation.report import (
    draw_runs,
    fleet_notes,
    make_comparison_table,
    make_runs_tables,
    run_dict,
)
from bench.simulation.validation import Comparison, RunFigures
from bench.simulation.workload import WorkloadConfig, fixed_lengths
from simulated import small_config


def runs(choices: Choices, **workload):
    values = {"num_requests": 8, "request_rate": 1.0, "lengths": fixed_lengths(4, 2)}
    plan = SimulationPlan(
        workload=WorkloadConfig(**(values | {"max_model_len": 64} | workload)),
        engine=small_config(),
        device=FixedDevice(seconds=0.5),
    )
    return run_plan(plan, choices)


def shown(*tables) -> str:
    console = Console(file=io.StringIO(), width=100)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return [element.text or "" for element in root.iter() if element.tag.endswith("text")]


def test_a_row_for_each_run_and_no_column_for_what_there_is_not():
    results = runs(Choices(batching=("continuous", "static"), rates_per_replica=(math.inf,)))
    text = shown(*make_runs_tables(results))
    assert text.count("\n A ") == text.count("\n B ") == 2 or text.count("A ") >= 2
    for absent in ("heavy", "urgent", "timed", "good"):
        assert absent not in text
    assert fleet_notes(results) == ["A: continuous", "B: static"]


def test_tenants_and_urgent_requests_get_columns():
    results = runs(Choices(), num_tenants=2, heavy_share=0.5, urgent_share=0.5)
    text = shown(*make_runs_tables(results))
    assert "heavy" in text
    assert "light" in text
    assert "urgent" in text


def test_a_run_can_be_written_as_json():
    (result,) = runs(Choices(rates_per_replica=(math.inf,)))
    document = orjson.loads(orjson.dumps(run_dict(result)))
    assert document["variant"]["rate_per_replica"] is None
    assert document["figures"]["num_completed"] == 8
    assert document["figures"]["ttft_ms"]["p99"] > 0


def test_several_rates_are_drawn_as_lines():
    results = runs(Choices(routers=("round-robin", "least-loaded"), rates_per_replica=(1, 2, 4)))
    svg = draw_runs("fleet", results)
    assert "requests/s per replica" in texts(svg)
    assert "B: least-loaded" in texts(svg)
    # Output, TTFT, ITL, prefix hits, imbalance: two lines in each.
    assert svg.count("<polyline") == 5 * 2


def test_one_rate_is_drawn_as_bars():
    svg = draw_runs("fleet", runs(Choices(batching=("continuous", "dynamic", "static"))))
    assert "polyline" not in svg
    assert "Time to first token, p99" in texts(svg)


def test_a_comparison_shows_both_sides_and_the_error():
    def figures(rate: float) -> RunFigures:
        return RunFigures(
            duration_s=1.0,
            output_tokens_per_s=rate,
            num_steps=10,
            mean_step_ms=5.0,
            mean_itl_ms=0.0,
        )

    comparison = Comparison(
        num_requests=1,
        output_tokens=100,
        concurrency=None,
        measured=figures(100.0),
        simulated=figures(110.0),
    )
    text = shown(make_comparison_table(comparison))
    assert "+10.0 %" in text
    assert "mean step ms" in text
