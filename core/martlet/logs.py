"""The log on stderr: a line for people, or an object for programs.

Levels are the standard library's. One event is one line: what a peer sent us may stand
in a message, so control characters in it are escaped. Only a defect carries a traceback.
"""

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from martlet.config import setting

__all__ = ["JsonLines", "LogConfig", "TextLines", "configure"]

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(0x80, 0xA0), 0x2028, 0x2029)} | {
    9: "\t",
    10: "\\n",
    13: "\\r",
}


@dataclass(frozen=True, slots=True)
class LogConfig:
    """``[log]``: what is written on stderr."""

    format: Literal["text", "json"] = setting("text", "text: lines for people; json: one object a line")
    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "the least that is written; debug tells every connection that comes and goes"
    )


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Send everything that is logged from *config*'s level on to *stream* (stderr), in its format."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if config.format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    logging.raiseExceptions = False  # a full disk behind stderr shall not stop the broker


def _part(record: logging.LogRecord) -> str:
    """The part that speaks: ``martlet.store`` is ``store``."""
    return record.name.removeprefix("martlet.")


class TextLines(logging.Formatter):
    """``2026-03-01 12:00:00.123 WARNING server: text``, in local time; a traceback follows a defect."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        text = record.getMessage().translate(_ESCAPES)
        line = f"{when}.{int(record.msecs):03d} {record.levelname} {_part(record)}: {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    """One object a line: time (UTC, ISO 8601), level, part, message, and traceback for a defect."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "part": _part(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)
