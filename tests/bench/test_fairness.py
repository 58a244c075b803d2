from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bench.fairness import FairnessPlan, fairness
from bench_server import FakeServe, flag_value

SHORT = ("--duration", "0.25", "--settle", "0.05", "--light-rate", "20")


def make_plan(**fields: object) -> FairnessPlan:
    values = {
        "num_light": 3,
        "light_rate": 2.0,
        "light_input_len": 4,
        "light_output_len": 2,
        "flood_streams": 5,
        "flood_input_len": 6,
        "flood_output_len": 3,
        "duration_s": 50.0,
        "settle_s": 0.0,
        "seed": 0,
        "vocab_size": 5000,
    }
    return FairnessPlan(**{**values, **fields})


def test_light_tenants_arrive_in_order_each_at_its_rate_within_the_window():
    requests = make_plan().light_requests(1)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals)
    assert arrivals[0] > 0
    assert arrivals[-1] < 50
    for tenant in ("light-1", "light-2", "light-3"):
        own = [request for request in requests if request.tenant == tenant]
        assert 70 <= len(own) <= 130  # 100 on average


def test_every_part_has_the_same_arrivals_and_other_prompts():
    plan = make_plan()
    first, second = plan.light_requests(1), plan.light_requests(2)
    assert [(r.arrival_s, r.tenant) for r in first] == [(r.arrival_s, r.tenant) for r in second]
    flood = [plan.flood_request(index) for index in range(50)]
    prompts = {tuple(request.prompt) for request in (*first, *second, *flood)}
    assert len(prompts) == len(first) + len(second) + len(flood)
    assert {request.tenant for request in flood} == {"flood"}


def test_light_tenants_are_measured_alone_and_beside_the_flood(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake = FakeServe(pace=lambda *_: 0.002)
    fake.install(monkeypatch)
    path = tmp_path / "f.json"
    arguments = ["--quick", *SHORT, "--rounds", "2", "--output-json", str(path)]
    result = CliRunner().invoke(fairness, arguments)
    assert result.exit_code == 0, result.output
    policies = [flag_value(command, "--scheduling-policy") for command in fake.commands]
    assert policies == ["fair", "fcfs", "fcfs", "fair"]
    document = orjson.loads(path.read_bytes())
    assert [(run["policy"], run["flooded"]) for run in document["runs"]] == [
        *(("fair", False), ("fair", True), ("fcfs", True)),
        *(("fcfs", True), ("fair", False), ("fair", True)),
    ]
    alone, beside = document["runs"][:2]
    assert "flood" not in alone["service"]
    # Eight streams of 16 + 8 tokens at 2 ms or more each.
    assert 0 < beside["service"]["flood"] <= 8 * 0.25 / (8 * 0.002) * 24
    # This server divides nothing: the light tenants get all that they ask for.
    assert alone["service"]["light-1"] == pytest.approx(alone["demand"]["light-1"], rel=0.5)
    tenants = {body["tenant"] for _, body in fake.bodies}
    assert tenants == {"flood", *(f"light-{number}" for number in range(1, 10))}
    assert "Jain index at least 0.95" in result.stdout


def test_a_light_request_that_fails_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch):
    seen: list[dict] = []

    def refuse(body: dict, _: object) -> int | None:
        seen.append(body)
        return 503 if body["tenant"] == "light-2" and len(seen) > 20 else None

    FakeServe(refuse=refuse).install(monkeypatch)
    result = CliRunner().invoke(fairness, ["--quick", *SHORT])
    assert result.exit_code == 1
    assert "http 503" in result.output


def test_a_window_without_light_requests_is_an_error(monkeypatch: pytest.MonkeyPatch):
    FakeServe().install(monkeypatch)
    arguments = ["--quick", "--duration", "0.01", "--settle", "0", "--light-rate", "0.001"]
    result = CliRunner().invoke(fairness, arguments)
    assert result.exit_code == 1
    assert "is the duration too short?" in result.output
