"""Output of commands: tables and a progress bar for people, JSON for programs."""

import base64
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TextIO, final

__all__ = ["Bar", "body_fields", "human_bytes", "print_json", "print_json_line", "table"]

log = logging.getLogger("martlet")

REDRAW_S: Final = 0.1
LOG_EVERY_S: Final = 5.0
BAR_CELLS: Final = 28
WIDTH_MIN: Final = 40


def body_fields(body: bytes) -> dict[str, str]:
    """Return *body* for JSON: as text if it is UTF-8, else as base64."""
    try:
        return {"body": body.decode(), "body_encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"body": base64.b64encode(body).decode(), "body_encoding": "base64"}


def print_json(value: object) -> None:
    """Print *value* as indented JSON."""
    print(json.dumps(value, indent=2, default=str))


def print_json_line(value: object) -> None:
    """Print *value* as JSON on one line."""
    print(json.dumps(value, default=str))


def human_bytes(size: float) -> str:
    """Return *size* as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return *rows* under *heads* as aligned text; numbers are right-aligned."""
    lines = [[_cell(value) for value in row] for row in rows]
    numeric = [bool(lines) and all(_is_number(line[i]) for line in lines) for i in range(len(heads))]
    widths = [max(len(line[i]) for line in [list(heads), *lines]) for i in range(len(heads))]

    def show(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([show(list(heads)), *(show(line) for line in lines)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={v}" for k, v in value.items())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(value))


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").replace(".", "", 1).lstrip("-").isdigit()


@final
class Bar:
    """A progress bar with a rate on a terminal; a log line every few seconds elsewhere.

    *unit* is "B" for bytes, else a plural noun such as "messages".
    """

    def __init__(self, label: str, unit: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._unit = unit
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._last = time.monotonic()
        self._first: tuple[float, int] | None = None  # time and *done* of the first update
        self._shown = False

    def update(self, done: int, total: int, note: str = "") -> None:
        """Show that *done* of *total* are done; cheap enough to call often."""
        now = time.monotonic()
        first_at, first_done = self._first = self._first or (now, done)
        if now - self._last < (REDRAW_S if self._tty else LOG_EVERY_S):
            return
        self._last = now
        rate = (done - first_done) / (now - first_at) if now > first_at else 0.0
        text = self._text(done, total, rate, note)
        self._shown = True
        if self._tty:
            width = max(shutil.get_terminal_size().columns - 1, WIDTH_MIN)
            self._stream.write("\r" + text[:width].ljust(width))
            self._stream.flush()
        else:
            log.info("%s", text)

    def _text(self, done: int, total: int, rate: float, note: str) -> str:
        share = min(done / total, 1.0) if total > 0 else 1.0
        full = round(share * BAR_CELLS)
        bar = f"[{'#' * full}{'.' * (BAR_CELLS - full)}] " if self._tty else ""
        text = f"{self._label} {bar}{share:4.0%} {self._amount(done)}"
        if rate > 0:
            text += f" at {self._amount(rate)}/s, {max(total - done, 0) / rate:,.0f} s left"
        return f"{text}; {note}" if note else text

    def _amount(self, value: float) -> str:
        return human_bytes(value) if self._unit == "B" else f"{value:,.0f} {self._unit}"

    def close(self) -> None:
        """Clear the line."""
        if self._shown and self._tty:
            self._stream.write("\r" + " " * max(shutil.get_terminal_size().columns - 1, WIDTH_MIN) + "\r")
            self._stream.flush()
