import io
from array import array
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from bench.report import (
    make_notes,
    open_console,
    print_rows,
    print_summaries,
    record_row,
    write_json,
)
from bench.stream import RequestRecord
from bench.summary import Goodput, LoadLevel, LoadSummary, summarize


def make_record(**fields: object) -> RequestRecord:
    record = RequestRecord(
        index=4,
        start_s=0.0,
        first_token_s=0.125,
        last_token_s=0.25,
        end_s=1.0,
        gaps_s=array("d", [0.125]),
        gap_tokens=array("L", [2]),
        first_tokens=1,
        method="usage",
        prompt_tokens=5,
        cached_tokens=0,
        output_tokens=3,
        finish_reason="length",
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def make_summary(*records: RequestRecord, **more: object) -> LoadSummary:
    arguments = {"output_len": 3, "client_cpu_s": 0.0, "level": LoadLevel(concurrency=8), **more}
    return summarize(records=records or [make_record()], **arguments)


def printed(*summaries: LoadSummary) -> str:
    console = Console(file=io.StringIO(), width=80)
    print_summaries(console, summaries)
    return console.file.getvalue()


def test_the_table_has_a_row_for_each_load_with_its_figures():
    text = printed(make_summary(), make_summary(level=LoadLevel(request_rate=2.5)))
    assert "8 streams" in text
    assert "2.5 req/s" in text
    assert "3.0" in text  # output tokens per second
    assert "125/125" in text  # TTFT
    assert "62.5/62.5" in text  # two tokens after 125 ms
    assert "1000/1000" in text


def test_rows_have_their_headings_and_title():
    console = Console(file=io.StringIO(), width=80)
    print_rows(console, ["mode", "tok/s"], [["static", "12.5"]], title="Speed")
    words = console.file.getvalue().split()
    assert words[:3] == ["Speed", "mode", "tok/s"]
    assert words[-2:] == ["static", "12.5"]


def test_a_file_is_wide_enough_for_a_long_row(capsys: pytest.CaptureFixture[str]):
    print_rows(open_console(), ["a"] * 12, [["123456789"] * 12])
    assert "123456789 " * 3 in " ".join(capsys.readouterr().out.split())


def test_a_clean_run_needs_no_note():
    assert make_notes(make_summary()) == []


@pytest.mark.parametrize(
    ("summary", "note"),
    [
        (
            make_summary(make_record(error="http 503", error_detail="http 503: [bold]no")),
            "1 failed (http 503: 1); first: http 503: [bold]no",
        ),
        (make_summary(output_len=9), "1 answers had another length than asked for"),
        (make_summary(make_record(cached_tokens=4)), "4 prompt tokens came from the server's"),
        (make_summary(make_record(method="chunks")), "tokens were counted as chunks"),
        (make_summary(client_cpu_s=0.9), "the client itself used 90% of a core"),
        (make_summary(make_record(lag_s=0.5), level=LoadLevel(request_rate=1.0)), "500 ms late"),
        (make_summary(goodput=Goodput(ttft_ms=500)), "goodput 1.00 req/s"),
    ],
)
def test_what_a_reader_must_know_is_said_below_the_table(summary: LoadSummary, note: str):
    assert note in " ".join(printed(summary).split())


def test_a_level_without_any_success_can_be_printed():
    record = RequestRecord(index=0, start_s=0.0, end_s=0.5, error="timeout", error_detail="slow")
    assert "timeout: 1" in printed(make_summary(record))


def test_rows_and_summaries_survive_json(tmp_path: Path):
    path = tmp_path / "new/result.json"
    write_json(path, {"run": make_summary().as_dict(), "row": record_row(make_record())})
    document = orjson.loads(path.read_bytes())
    assert document["run"]["output_tokens_per_s"] == 3.0
    assert document["run"]["level"]["concurrency"] == 8
    assert document["row"]["gaps_s"] == [0.125]
    assert document["row"]["gap_tokens"] == [2]
    assert document["row"]["index"] == 4
