import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from bench.comparison import runs as runs_module
from bench.comparison.figures import ProductLimit
from bench.comparison.golden import GoldenCase
from bench.comparison.plan import PeersPlan, WorkloadKind
from bench.comparison.runs import PeersRunner, measure_limit
from bench.comparison.sides import Side
from bench.server_process import ServerFailed, ServerProcess
from bench_server import FakeServe
from golden_model import TINY_DIR

OURS = Side(
    name="headrace", kind="headrace", command=("headrace",), cache_variables=("HEADRACE_CACHE",)
)
PEER = Side(
    name="peer",
    kind="server",
    command=("peer", "--port", "{port}"),
    environment={"QUIET": "1"},
    cache_variables=("PEER_CACHE",),
    model="named",
    ignore_eos=False,
    body={"own": 1},
    prompts="text",
)
GOLDEN = GoldenCase(prompt_ids=[5], output_ids=[5, 5], margins=[1.0, 1.0])


@pytest.fixture
def environments() -> list[tuple[str, dict[str, str]]]:
    """With which each side was started."""
    return []


@pytest.fixture
def fake(
    monkeypatch: pytest.MonkeyPatch, environments: list[tuple[str, dict[str, str]]]
) -> FakeServe:
    fake = FakeServe(pace=lambda *_: 0.001, max_model_len=256)

    @contextmanager
    def run(
        command: Sequence[str], *, output: object, environment: dict[str, str], **_: object
    ) -> Iterator[ServerProcess]:
        environments.append((command[0], environment))
        with fake.run(command, output=output) as server:
            yield server

    monkeypatch.setattr(runs_module, "running_server", run)
    monkeypatch.setattr(runs_module, "running_peer", run)
    monkeypatch.setattr(runs_module, "LEFT_S", 0.0)
    return fake


def make_runner(*kinds: WorkloadKind, folder: Path | None = None) -> PeersRunner:
    plan = PeersPlan(
        kinds=kinds,
        streams=(2,),
        input_len=4,
        output_len=3,
        requests_per_stream=1,
        batch_streams=2,
        exponential_mean=3,
        exponential_cap=6,
        prefix_len=20,
        prefix_output_len=2,
        disturbed_streams=2,
        long_len=50,
        idle_s=0.05,
        open_streams=5,
        open_input_len=3,
        open_output_len=2,
    )
    return PeersRunner(
        plan=plan,
        cases=[GOLDEN],
        folder=folder,
        startup_timeout_s=60,
        timeout_s=60,
        progress=Console(quiet=True),
    )


def test_the_order_of_the_sides_is_reversed_each_round(fake: FakeServe):
    runner = make_runner("prefill")
    sides = [OURS, PEER]
    runs = [run for number in range(3) for run in runner.measure_round(sides, number)]
    assert [(run.side, run.round_number) for run in runs] == [
        *(("headrace", 0), ("peer", 0), ("peer", 1), ("headrace", 1)),
        *(("headrace", 2), ("peer", 2)),
    ]
    assert [command[0] for command in fake.commands] == [
        *("headrace", "peer", "peer", "headrace", "headrace", "peer")
    ]
    assert all(run.failure is None and run.ready_s == 0.2 for run in runs)
    assert all(run.peak_memory_bytes is not None for run in runs)


def test_every_workload_reaches_a_server(fake: FakeServe):
    kinds = ("streams", "exponential", "prefix", "prefill", "long-prompt", "open")
    run = make_runner(*kinds).measure_side(OURS, 0)
    assert [entry.workload for entry in run.workloads] == [
        *("2 streams", "exponential", "prefix", "prefill", "long-prompt", "open")
    ]
    by_name = {entry.workload: entry for entry in run.workloads}
    assert all(entry.failure is None for entry in run.workloads)
    streams = by_name["2 streams"].summary
    assert streams is not None
    assert (streams.num_requests, streams.num_failed, streams.output_tokens) == (3, 0, 9)
    assert by_name["open"].summary is not None
    assert by_name["open"].summary.num_requests == 5
    beside = by_name["long-prompt"]
    assert beside.beside_ms is not None
    assert beside.summary is not None
    assert beside.summary.prompt_tokens == 50
    assert run.golden is not None
    assert run.golden.holds


def test_every_request_has_a_connection_of_its_own(fake: FakeServe):
    make_runner("streams").measure_side(OURS, 0)
    assert set(fake.connection_headers) == {"close"}


def test_a_peer_is_asked_in_its_own_words_and_not_for_golden_answers(fake: FakeServe):
    run = make_runner("streams").measure_side(PEER, 0)
    assert run.golden is None
    for _, body in fake.bodies:
        assert body["model"] == "named"
        assert body["own"] == 1
        assert "ignore_eos" not in body
        assert "continuous_usage_stats" not in body["stream_options"]
        assert len(body["prompt"].split()) == 4


def test_the_first_start_is_cold_in_a_folder_that_later_ones_share(
    fake: FakeServe, environments: list[tuple[str, dict[str, str]]], tmp_path: Path
):
    runner = make_runner("prefill", folder=tmp_path)
    runs = [run for number in range(2) for run in runner.measure_round([OURS, PEER], number)]
    assert [run.is_cold for run in runs] == [True, True, False, False]
    ours = {"HEADRACE_CACHE": str(tmp_path / "headrace" / "headrace_cache")}
    theirs = {"QUIET": "1", "PEER_CACHE": str(tmp_path / "peer" / "peer_cache")}
    assert environments == [
        *(("headrace", ours), ("peer", theirs)),
        *(("peer", theirs), ("headrace", ours)),
    ]


def test_without_such_a_folder_no_start_is_cold(
    fake: FakeServe, environments: list[tuple[str, dict[str, str]]]
):
    (run,) = make_runner("prefill").measure_round([OURS], 0)
    assert not run.is_cold
    assert environments == [("headrace", {})]


def test_a_side_that_does_not_start_is_reported_with_its_last_words(fake: FakeServe):
    broken = Side(name="peer", kind="server", command=("peer", "--broken"))
    run = make_runner("streams").measure_side(broken, 0)
    assert run.ready_s is None
    assert run.failure == "the server ended before it was ready, with exit code 2"
    assert run.last_words == "no such flag\n"
    assert run.workloads == []


def test_a_side_that_refuses_the_warm_up_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs_module, "running_peer", FakeServe(refuse=lambda *_: 400).run)
    run = make_runner("streams").measure_side(PEER, 0)
    assert run.ready_s == 0.2
    assert run.failure is not None
    assert "http 400: in the warm-up" in run.failure


def test_refused_requests_are_counted_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch):
    refusing = FakeServe(refuse=lambda body, _: 503 if body["max_tokens"] == 2 else None)
    monkeypatch.setattr(runs_module, "running_peer", refusing.run)
    run = make_runner("streams", "open").measure_side(PEER, 0)
    assert run.failure is None
    streams, opened = (entry.summary for entry in run.workloads)
    assert streams is not None
    assert streams.num_failed == 0
    assert opened is not None
    assert opened.errors == {"http 503": 5}


def test_a_workload_that_comes_to_nothing_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch,
):
    # The streams beside the long prompt end at once.
    fake = FakeServe(max_output=4)
    monkeypatch.setattr(runs_module, "running_peer", fake.run)
    run = make_runner("long-prompt", "open").measure_side(PEER, 0)
    beside, opened = run.workloads
    assert beside.failure is not None
    assert beside.summary is None
    assert opened.summary is not None
    assert run.last_words == ""


DRIVER = """
import json, sys
print('{"ready": true}', flush=True)
for line in sys.stdin:
    records = [{
        "index": index, "start_s": 0.0, "prompt_tokens": len(request["prompt"]),
        "method": "token_ids", "output_tokens": request["output_len"], "first_token_s": 1.0,
        "last_token_s": 1.0, "first_tokens": request["output_len"], "gaps_s": [], "gap_tokens": [],
        "end_s": 1.0, "finish_reason": "length", "error": None, "error_detail": None,
    } for index, request in enumerate(json.loads(line)["requests"])]
    print(json.dumps({"records": records}), flush=True)
"""


def test_a_pipeline_gets_all_but_the_long_prompt():
    side = Side(name="offline", kind="offline", command=(sys.executable, "-c", DRIVER))
    run = make_runner("streams", "long-prompt", "open").measure_side(side, 0)
    assert run.failure is None
    streams, opened = run.workloads
    assert streams.summary is not None
    assert streams.summary.output_tokens_per_s == 9.0  # three requests, three tokens, one second
    assert opened.summary is not None
    assert opened.summary.prompt_tokens == 15
    assert run.peak_memory_bytes is not None


def test_product_rates_are_measured_in_a_process_of_their_own(monkeypatch: pytest.MonkeyPatch):
    limit = measure_limit(TINY_DIR / "llama")
    assert isinstance(limit, ProductLimit)
    assert limit.matrix_weights > 0


def test_rates_that_cannot_be_measured_say_why():
    with pytest.raises(ServerFailed, match="cannot be measured"):
        measure_limit(Path("missing"))
