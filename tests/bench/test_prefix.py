from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from bench.prefix import PrefixPlan, find_hits, hit_rows, prefix
from bench.stream import RequestFailed, RequestRecord
from bench_server import FakeServe


def make_plan(**fields: object) -> PrefixPlan:
    values = {
        "num_streams": 3,
        "num_requests": 6,
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
    prompts = {tuple(request.prompt) for request in (*plan.misses(), *plan.warm_up())}
    assert len(prompts) == 9


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
    assert [command[-1] for command in fake.commands] == [
        *("--enable-prefix-caching", "--no-enable-prefix-caching"),
        *("--no-enable-prefix-caching", "--enable-prefix-caching"),
    ]
    # Two streams warm up, four requests are measured; with caching, three pairs follow.
    counts = [sum(server == number for server, _ in fake.bodies) for number in range(4)]
    assert counts == [12, 6, 6, 12]
    document = orjson.loads(path.read_bytes())
    assert len(document["on_over_off"]) == 2
    assert len(document["loads"]["on"]) == len(document["loads"]["off"]) == 2
    assert document["hits"][0]["cached_share"] == 0
    assert "TTFT at least 5 times better at 90% hits" in result.stdout


def test_a_request_that_fails_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch):
    def refuse(body: dict, _: object) -> int | None:
        return 500 if len(body["prompt"]) == 20 and body["max_tokens"] == 3 else None

    FakeServe(refuse=refuse).install(monkeypatch)
    result = CliRunner().invoke(prefix, ["--quick", "--output-len", "3"])
    assert result.exit_code == 1
    assert "http 500: 8" in result.output
