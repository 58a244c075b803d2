import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from bench.simulation.step_file import StepFileError, load_steps
from recorded_steps import recorded, step_body

STEPS = [
    recorded(0, 1.0, 1.5, [("a", 0, 6, True), ("b", 4, 2, False)]),
    recorded(1, 1.5, 2.0, [("a", 6, 1, True), ("b", 6, 1, True)]),
    recorded(2, 2.0, 2.25, [("a", 7, 1, True)]),
]


def test_a_body_and_a_plain_list_are_both_read(tmp_path):
    body, plain = tmp_path / "body.json", tmp_path / "plain.json"
    body.write_text(json.dumps({"steps": [step_body(step) for step in STEPS], "last_index": 2}))
    plain.write_text(json.dumps([step_body(step) for step in STEPS]))
    assert load_steps([str(body)]) == load_steps([str(plain)]) == STEPS


def test_pages_in_any_order_make_one_recording(tmp_path):
    for number, steps in enumerate([STEPS[1:], STEPS[:2]]):
        page = [step_body(step) for step in steps]
        (tmp_path / f"{number}.json").write_text(json.dumps(page))
    assert load_steps([str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == STEPS


def test_what_a_step_asks_of_the_device_follows_from_its_shares():
    mixed = STEPS[0]
    assert not mixed.decode_only
    assert mixed.duration_s == 0.5
    # Positions 0 to 5 attend to 1 to 6 tokens; positions 4 and 5 to 5 and 6.
    assert mixed.prefill_context == 21 + 11
    assert mixed.decode_context == 0
    decode = STEPS[1]
    assert decode.decode_only
    assert decode.decode_context == 7 + 7
    assert decode.prefill_context == 0


def test_a_server_is_read_page_by_page():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            after = int(parse_qs(urlsplit(self.path).query)["after"][0])
            page = [step_body(step) for step in STEPS if step.index > after][:2]
            next_after = page[-1]["index"] if page else after
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"steps": page, "next_after": next_after}).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert load_steps([f"http://127.0.0.1:{server.server_port}/"]) == STEPS
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    "content", ["nothing", "{}", "[1]", '[{"index": 0}]', "[]", '{"steps": []}']
)
def test_what_is_no_recording_is_refused_by_name(tmp_path, content: str):
    path = tmp_path / "steps.json"
    path.write_text(content)
    with pytest.raises(StepFileError, match=r"steps\.json"):
        load_steps([str(path)])


def test_steps_without_shares_are_refused(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps([step_body(recorded(0, 0.0, 1.0, []))]))
    with pytest.raises(StepFileError, match="no steps with shares"):
        load_steps([str(path)])


def test_a_missing_file_is_named():
    with pytest.raises(StepFileError, match="nowhere"):
        load_steps(["nowhere/steps.json"])


def test_what_others_took_before_the_rest_of_a_step_is_none_of_its_time(tmp_path):
    body = step_body(STEPS[0]) | {"overtaken_s": 0.2}
    (tmp_path / "new.json").write_text(json.dumps([body]))
    (step,) = load_steps([str(tmp_path / "new.json")])
    assert step.duration_s == pytest.approx(0.3)
    del body["overtaken_s"]  # as it was recorded before there was such a thing
    (tmp_path / "old.json").write_text(json.dumps([body]))
    assert load_steps([str(tmp_path / "old.json")])[0].duration_s == 0.5
