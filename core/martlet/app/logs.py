"""The log on stderr, as text for people or as JSON for programs.

Levels are the standard library's. Each event is one line: a message may quote bytes from
the network, so control characters are escaped. Only unexpected errors have a traceback.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, Literal, TextIO

from martlet.config import Settings, setting

__all__ = ["JsonLines", "LogConfig", "TextLines", "configure"]

_ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(0x80, 0xA0), 0x2028, 0x2029)} | {
    9: "\t",
    10: "\\n",
    13: "\\r",
}


class LogConfig(Settings):
    """``[log]``: the log on stderr."""

    format: Literal["text", "json"] = setting("text", "text: lines for people; json: one object per line")
    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "lowest level to write; debug includes every connection opened and closed"
    )


def configure(config: LogConfig, stream: TextIO | None = None) -> None:
    """Write all log records of *config*'s level or above to *stream* (default stderr), in its format."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if config.format == "json" else TextLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    logging.raiseExceptions = False  # the broker must not stop because stderr goes to a full disk


def _part_name(record: logging.LogRecord) -> str:
    """Return the part of Martlet that logged: ``martlet.store`` is ``store``."""
    return record.name.removeprefix("martlet.")


class TextLines(logging.Formatter):
    """``2026-03-01 12:00:00.123 WARNING server: text``, in local time; then the traceback of an unexpected error."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        text = record.getMessage().translate(_ESCAPES)
        line = f"{when}.{int(record.msecs):03d} {record.levelname} {_part_name(record)}: {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonLines(logging.Formatter):
    """One object per line: time (UTC, ISO 8601), level, part, message; traceback for an unexpected error."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "part": _part_name(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)
