import io
import json
import logging

import pytest

from gateway.log_format import JsonFormatter, TextFormatter, configure_logging


def lines(formatter, log) -> list[str]:
    """What a logger writes by this formatter."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("gateway.test")
    logger.addHandler(handler)
    log(logger)
    return stream.getvalue().splitlines()


def test_json_is_one_object_a_line_with_the_fields_beside_the_text():
    fields = {"key": "alice", "prompt_tokens": 3, "ttft_s": None}
    [line] = lines(
        JsonFormatter(), lambda log: log.warning("request %s", "ended", extra={"fields": fields})
    )
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "warning",
        "logger": "gateway.test",
        "message": "request ended",
        "key": "alice",
        "prompt_tokens": 3,
        "ttft_s": None,
    }


@pytest.mark.parametrize("text", ["a\nb", 'a"b', "a\r\nERROR forged", "\u2028", "\udcff"])
def test_nothing_that_is_logged_begins_another_line_of_json(text):
    def log(logger):
        logger.error("x: %s", text, extra={"fields": {"path": text}})

    [line] = lines(JsonFormatter(), log)
    entry = json.loads(line)
    assert (entry["message"], entry["path"]) == (f"x: {text}", text)


def test_a_traceback_is_in_its_object():
    def log(logger):
        try:
            raise KeyError("x")
        except KeyError:
            logger.exception("failed")

    [line] = lines(JsonFormatter(), log)
    assert "KeyError: 'x'" in json.loads(line)["exception"]


def test_text_shows_the_fields_at_the_end_of_the_line():
    fields = {"path": "/a b\n=", "status": 200, "key": None}
    [line] = lines(TextFormatter(), lambda log: log.info("answered", extra={"fields": fields}))
    assert line.endswith('INFO gateway.test: answered path="/a b\\n=" status=200 key=None')


def test_text_without_fields_is_the_text():
    [line] = lines(TextFormatter(), lambda log: log.info("hello"))
    assert line.endswith("INFO gateway.test: hello")


def test_the_logs_of_the_process_have_the_format(monkeypatch, capsys):
    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    configure_logging("info", "json")
    root.info("hello")
    root.debug("not")
    assert json.loads(capsys.readouterr().err)["message"] == "hello"
