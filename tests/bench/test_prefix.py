from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bench.prefix import Pair, PrefixPlan, busy_per_token_s, cost_rows, find_hits, hit_rows, prefix
from bench.scenario import ScenarioRun
from bench.scrape import EngineCounters
from bench.stream import RequestFailed, RequestRecord
from bench.summary import LoadLevel, summarize
from bench_server import FakeServe


def make_plan(**fields: object) -> PrefixPlan:
    values = {
        "num_streams": 3,
        "num_requests": 6,
        "num_pairs": 2,
        "input_len": 12,
        "output_len": 2,
        "hit_input_len": 20,
        "hit_share": 0.9,
        "num_hits": 2,
        "seed": 0,
        "vocab_size": 5000,
    }
    return PrefixPlan(**{**values, **fields})


def test_new_prompts_share_nothing_and_known_ones_their_beginning():
    pairs = [tuple(request.prompt) for request in make_plan().pairs()]
    assert len(pairs) == 6  # two more for warming up
    new, known = pairs[::2], pairs[1::2]
    assert len({prompt[:18] for prompt in known}) == 1
    assert len({prompt[18:] for prompt in known}) == 3
    assert len({prompt[:4] for prompt in (*new, known[0])}) == 4


def test_no_prompt_of_the_load_is_sent_twice():
    plan = make_plan()
    prompts = {tuple(r.prompt) for number in range(3) for r in plan.piece(number)}
    assert len(prompts) == 3 * 6


def piece(duration_s: float, busy_s: float = 0.0) -> ScenarioRun:
    """One request of 12 + 2 tokens."""
    records = [
        RequestRecord(index=0, start_s=0.0, end_s=duration_s, prompt_tokens=12, output_tokens=2)
    ]
    summary = summarize(LoadLevel(concurrency=1), records, output_len=None, client_cpu_s=0.0)
    return ScenarioRun(summary, EngineCounters(busy_s=busy_s), records)


def test_the_cost_of_a_pair_is_the_throughput_that_it_takes():
    assert Pair(on=piece(2.0), off=piece(1.9)).cost == pytest.approx(0.05)
    assert Pair(on=piece(1.0), off=piece(1.25)).cost == pytest.approx(-0.25)


def test_rounds_are_told_one_by_one_and_together():
    rounds = [[Pair(on=piece(2.0), off=piece(1.9))] * 6, [Pair(on=piece(2.0), off=piece(2.0))] * 7]
    assert cost_rows(rounds) == [
        ["round 1", "6", "7.0", "7.4", "+5.00%", "+5.00% to +5.00%"],
        ["round 2", "7", "7.0", "7.0", "+0.00%", "+0.00% to +0.00%"],
        ["all", "13", "7.0", "7.0", "+0.00%", "+0.00% to +5.00%"],
    ]


def test_the_engines_time_is_that_of_its_steps():
    plan = make_plan(num_requests=2)  # 28 tokens
    runs = [piece(1.0, busy_s=0.25), piece(1.0, busy_s=0.31)]
    assert busy_per_token_s(runs, plan) == pytest.approx(0.01)


def record(first_token_s: float | None, cached_tokens: int = 0) -> RequestRecord:
    return RequestRecord(
        index=0,
        start_s=0.0,
        first_token_s=first_token_s,
        prompt_tokens=100,
        cached_tokens=cached_tokens,
    )


def test_times_to_first_token_are_compared_without_the_warm_up():
    hits = find_hits(
        [
            *(record(9.0), record(9.0)),
            *(record(1.0), record(0.2, 90)),
            *(record(1.2), record(0.2, 80)),
        ]
    )
    assert hits.ratio == pytest.approx(1.1 / 0.2)
    assert hits.cached_share == pytest.approx(0.85)
    assert hit_rows(hits)[1] == ["known", "85.0%", "200/200", "5.50x"]


def test_hits_without_answers_are_an_error():
    with pytest.raises(RequestFailed, match="no answer"):
        find_hits([record(None)] * 6)


def test_servers_with_and_without_caching_take_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    fake = FakeServe()
    fake.install(monkeypatch)
    path = tmp_path / "p.json"
    result = CliRunner().invoke(prefix, ["--quick", "--rounds", "2", "--output-json", str(path)])
    assert result.exit_code == 0, result.output
    flags = ["--enable-prefix-caching", "--no-enable-prefix-caching"]
    assert [command[-1] for command in fake.commands] == 2 * flags
    # Four requests warm up, two times four are measured; with caching, three pairs follow.
    servers = [server for server, _ in fake.bodies]
    assert [servers.count(number) for number in range(4)] == [18, 12, 18, 12]
    pieces = [servers[index] for index in range(0, 24, 4)]
    assert pieces == [0, 1, 0, 1, 1, 0]
    document = orjson.loads(path.read_bytes())
    assert [pair["round"] for pair in document["pairs"]] == [0, 0, 1, 1]
    assert document["cost"]["num_pairs"] == 4
    assert document["cost"]["high"] is None  # four pairs say nothing with confidence
    assert document["bookkeeping"]["num_tokens"] == 8 * 4 * 22
    assert document["hits"][0]["cached_share"] == 0
    assert "TTFT at least 5 times better at 90% hits" in result.stdout


def test_a_request_that_fails_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch):
    def refuse(body: dict, _: object) -> int | None:
        # Neither the warm-up of the two servers nor the prompts with and without hits.
        return 500 if len(body["prompt"]) == 20 and len(fake.bodies) > 2 * 4 else None

    fake = FakeServe(refuse=refuse)
    fake.install(monkeypatch)
    result = CliRunner().invoke(prefix, ["--quick"])
    assert result.exit_code == 1
    assert "http 500: 16" in result.output
