"""Tables for people and bars for those who wait."""

import io
import logging

import pytest

from martlet.cli import terminal
from martlet.cli.terminal import Bar, human_bytes, table


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_numbers_stand_to_the_right_under_their_head() -> None:
    assert table(("topic", "queues", "lag"), [("orders", 8, 1234567), ("a", 16, None)]).splitlines() == [
        "topic   queues        lag",
        "orders       8  1,234,567",
        "a           16          -",
    ]


def test_a_table_without_rows_is_its_head() -> None:
    assert table(("topic", "queues"), []) == "topic  queues"


def test_what_a_stranger_named_cannot_move_the_cursor() -> None:
    assert "\x1b" not in table(("name",), [("\x1b[2Jgone",)])


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")]
)
def test_bytes_are_readable(size: int, text: str) -> None:
    assert human_bytes(size) == text


def test_a_bar_on_a_terminal_shows_share_and_rate_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "REDRAW_S", 0.0)
    monkeypatch.setenv("COLUMNS", "200")
    screen = Screen()
    bar = Bar("recovering", "B", screen)
    bar.update(0, 4 << 20)
    bar.update(1 << 20, 4 << 20, "3 records")
    assert "recovering [#######.....................]  25% 1.0 MiB at " in screen.getvalue()
    assert " s left; 3 records" in screen.getvalue()
    bar.close()
    assert screen.getvalue().endswith(" \r")


def test_a_bar_elsewhere_is_lines_of_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(terminal, "LOG_EVERY_S", 0.0)
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "martlet"):
        bar = Bar("sending", "messages", stream)
        bar.update(0, 200)
        bar.update(50, 200)
        bar.close()
    assert stream.getvalue() == ""
    assert caplog.messages[1].startswith("sending  25% 50 messages at ")


def test_a_bar_that_was_quick_says_nothing() -> None:
    screen = Screen()
    bar = Bar("recovering", "B", screen)
    bar.update(1, 2)
    bar.close()
    assert screen.getvalue() == ""
