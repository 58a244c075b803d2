from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bench.speculation import SpeculationPlan, speculation
from bench_server import FakeServe, flag_value

FLAG = "--num-speculative-tokens"


def make_plan(**fields: int) -> SpeculationPlan:
    values = {"num_guesses": 8, "num_streams": 1, "num_requests": 3, "output_len": 9, "seed": 0}
    return SpeculationPlan(**{**values, **fields})


def test_chats_differ_and_are_the_same_for_every_server():
    for kind in ("copied", "written"):
        prompts = [request.prompt for request in make_plan().requests(kind)]
        assert len(set(prompts)) == 3
        assert prompts == [request.prompt for request in make_plan().requests(kind)]
        assert prompts != [request.prompt for request in make_plan(seed=1).requests(kind)]


def test_a_list_to_copy_has_numbered_lines_and_a_story_has_none():
    plan = make_plan()
    assert plan.prompt("copied", 0).count("\n") == 1 + 16
    assert "16. " in plan.prompt("copied", 0)
    assert "\n" not in plan.prompt("written", 0)


def test_servers_with_and_without_guesses_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # A token in 1 ms with guesses, in 3 ms without.
    fake = FakeServe(
        pace=lambda _, command: 0.003 if flag_value(list(command), FLAG) == "0" else 0.001
    )
    fake.install(monkeypatch)
    path = tmp_path / "s.json"
    options = ["--quick", "--rounds", "2", "--num-guesses", "5", "--output-json", str(path)]
    result = CliRunner().invoke(speculation, options)
    assert result.exit_code == 0, result.output
    assert [flag_value(command, FLAG) for command in fake.commands] == ["5", "0", "0", "5"]
    # One chat of each kind warms up, two are measured.
    assert [sum(server == n for server, _ in fake.bodies) for n in range(4)] == [6, 6, 6, 6]
    document = orjson.loads(path.read_bytes())
    ratios = document["on_over_off"]
    assert ratios.keys() == {"copied", "written"}
    assert all(ratio > 1 for found in ratios.values() for ratio in found)
    load = document["loads"]["on"][0]["copied"]
    assert (load["draft_tokens"], load["accepted_draft_tokens"]) == (64, 32)  # two chats of 16
    assert "50%" in result.stdout


def test_a_request_that_fails_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch):
    seen: list[dict] = []

    def refuse(body: dict, _: object) -> int | None:
        seen.append(body)
        return 500 if len(seen) == 3 else None

    FakeServe(refuse=refuse).install(monkeypatch)
    result = CliRunner().invoke(speculation, ["--quick"])
    assert result.exit_code == 1
    assert "http 500: 1" in result.output
