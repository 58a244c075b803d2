import json

import pytest
from click.testing import CliRunner

from bench.scheduler import scheduler


def run(*arguments: str):
    return CliRunner().invoke(scheduler, ["--running", "4", "--steps", "3", *arguments])


def test_each_number_of_waiting_requests_is_measured(tmp_path):
    path = tmp_path / "cost.json"
    result = run("--waiting", "0,5", "--output-json", str(path))
    assert result.exit_code == 0, result.output
    assert "A step takes at most" in result.output
    document = json.loads(path.read_text())
    assert document["schema"] == "headrace.bench.scheduler/1"
    assert document["scheduling_policy"] == "fair"
    assert [cost["num_waiting"] for cost in document["costs"]] == [0, 5]
    assert all(cost["num_running"] == 4 for cost in document["costs"])


@pytest.mark.parametrize("waiting", ["many", "-1", "1,,2"])
def test_what_is_no_list_of_numbers_is_a_usage_error(waiting: str):
    result = run("--waiting", waiting)
    assert result.exit_code == 2
    assert "--waiting" in result.output
