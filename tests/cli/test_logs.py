"""What the log promises to those who read it."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from martlet.app import logs

FORMS = ("text", "json")


@pytest.fixture(autouse=True)
def root_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, loud = list(root.handlers), root.level, logging.raiseExceptions
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = loud


def logged(form: str, level: str, *events: tuple[int, str]) -> str:
    stream = io.StringIO()
    logs.configure(logs.LogConfig(format=form, level=level), stream)  # type: ignore[arg-type]
    for number, text in events:
        logging.getLogger("martlet.server").log(number, "%s", text)
    return stream.getvalue()


def test_a_text_line_names_level_and_part() -> None:
    line = logged("text", "info", (logging.WARNING, "peer closed"))
    assert line.endswith(" WARNING server: peer closed\n")


def test_a_json_line_is_an_object() -> None:
    event = json.loads(logged("json", "info", (logging.WARNING, 'a "peer" closed')))
    assert event["level"] == "warning"
    assert event["part"] == "server"
    assert event["message"] == 'a "peer" closed'
    assert event["time"].endswith("+00:00")


@pytest.mark.parametrize("form", FORMS)
def test_what_a_peer_sent_cannot_begin_a_line_of_its_own(form: str) -> None:
    hostile = "bad\n2026-01-01 00:00:00.000 ERROR server: forged\r\x1b[2J\x9b\u2028"
    out = logged(form, "info", (logging.INFO, hostile))
    assert out.count("\n") == 1
    assert len(out.splitlines()) == 1
    assert "\x1b" not in out


@pytest.mark.parametrize("form", FORMS)
def test_what_is_below_the_level_is_not_written(form: str) -> None:
    assert logged(form, "warning", (logging.INFO, "unimportant"), (logging.DEBUG, "less")) == ""


@pytest.mark.parametrize("form", FORMS)
def test_a_defect_carries_its_traceback(form: str) -> None:
    stream = io.StringIO()
    logs.configure(logs.LogConfig(format=form), stream)  # type: ignore[arg-type]
    try:
        raise ZeroDivisionError("ours")
    except ZeroDivisionError:
        logging.getLogger("martlet.server").exception("a defect")
    text = stream.getvalue() if form == "text" else json.loads(stream.getvalue())["traceback"]
    assert "ZeroDivisionError: ours" in text


def test_a_log_that_cannot_be_written_stops_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    logs.configure(logs.LogConfig(), stream)
    stream.close()
    logging.getLogger("martlet").info("nobody hears this")
    assert capsys.readouterr() == ("", "")
