"""How log lines look: for people, or as JSON for machines. Neither ever shows prompts or answers.

What a line is about besides its text comes by ``extra={"fields": {...}}``.
"""

import json
import logging
import time
from typing import Literal, get_args

__all__ = ["LOG_FORMATS", "LogFormat", "configure_logging"]

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Send the logs of the whole process to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


class TextFormatter(logging.Formatter):
    """One line for people, the fields at its end; a traceback follows in lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        text = super().formatMessage(record)
        pairs = (f"{name}={_word(value)}" for name, value in _fields(record).items())
        return " ".join((text, *pairs))


class JsonFormatter(logging.Formatter):
    """One JSON object a line; whatever the message holds, it cannot begin another line."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _word(value: object) -> str:
    """Return the value so that it neither ends the line nor looks like another field."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') else json.dumps(text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}
