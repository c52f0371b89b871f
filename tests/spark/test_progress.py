"""Progress bars and Ctrl-C of pipelines, with a session and a query that do as Spark does; without a JVM."""

import io
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from tests.interop.process import eventually

from martlet.cli import terminal
from martlet.cli.main import main
from martlet_spark.pipelines import progress
from martlet_spark.pipelines.progress import SENT, Show, StreamReport, follow_query

WAIT_S = 240


@dataclass
class Stage:
    numCompletedTasks: int
    numTasks: int


class FakeSession:
    """A session, its context and its tracker: two stages of a job run, and another one has just ended."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.looks = 0
        self.cancelled = Event()
        self.stopped = False

    def statusTracker(self) -> "FakeSession":
        return self

    def getActiveStageIds(self) -> list[int]:
        self.looks += 1
        return [4, 5, 6]

    def getStageInfo(self, stage: int) -> Stage | None:
        return {4: Stage(1, 4), 5: Stage(2, 8)}.get(stage)

    def cancelAllJobs(self) -> None:
        self.cancelled.set()

    def stop(self) -> None:
        self.stopped = True


class FakeTable:
    """A table whose jobs do what the test says."""

    columns = ("topic",)

    def __init__(self, job: Callable[[], object]) -> None:
        self._job = job

    def persist(self) -> "FakeTable":
        return self

    def orderBy(self, *_: object, **__: object) -> "FakeTable":
        return self

    def limit(self, _: int) -> "FakeTable":
        return self

    @property
    def write(self) -> Any:
        return SimpleNamespace(parquet=lambda path: self._job())

    def coalesce(self, _: int) -> "FakeTable":
        return self

    def count(self) -> int:
        self._job()
        return 7

    def collect(self) -> list[object]:
        return []


class FakeQuery:
    """A streaming query of two batches, which goes on with empty ones until it is stopped."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self.stopped = 0
        self.recentProgress = [self._batch(number) for number in range(2)]
        self.lastProgress = self.recentProgress[-1]

    def _batch(self, number: int) -> dict[str, Any]:
        ends = [json.dumps({"v": 1, "t": {"A": {"b/0": end}}}) for end in (3 * number + 3, 12)]
        source = {"endOffset": ends[0], "latestOffset": ends[1]}
        rows = {"numInputRows": 3, "observedMetrics": {f"martlet_{SENT}": {"count": 2}}}
        return {"batchId": number, "timestamp": f"t{number}", "sources": [source], **rows}

    def awaitTermination(self, timeout: float) -> bool:
        self._wait()
        return False

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    """The session that commands get instead of Spark's; bars are drawn at once."""
    found = FakeSession()
    monkeypatch.setattr("martlet_spark.pipelines.session.open_session", lambda *_: found)
    # That of other tests in this process would be left running.
    monkeypatch.setattr(SparkSession, "getActiveSession", staticmethod(lambda: None))
    monkeypatch.setattr("martlet_spark.commands.stats.source_of", lambda _: {})
    monkeypatch.setattr(terminal, "REDRAW_S", 0.0)
    monkeypatch.setattr(terminal, "LOG_EVERY_S", 0.0)
    monkeypatch.setattr(progress, "LOOK_S", 0.01)
    monkeypatch.setenv("COLUMNS", "120")
    return found


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=[Screen, io.StringIO], ids=["terminal", "file"])
def stderr(request: pytest.FixtureRequest) -> io.StringIO:
    """What a test puts in the place of stderr."""
    found: io.StringIO = request.param()
    return found


def stats(monkeypatch: pytest.MonkeyPatch, job: Callable[[], object], *words: str) -> int:
    """Run ``pipeline stats``, whose job is *job*."""
    monkeypatch.setattr("martlet_spark.pipelines.stats.message_stats", lambda *_: FakeTable(job))
    return main(["pipeline", "stats", "A", *words])


def replay(monkeypatch: pytest.MonkeyPatch, query: FakeQuery, is_done: Callable[[Any], bool] | None = None) -> int:
    """Run ``pipeline replay``, whose query is *query*."""

    def run(session: object, source: object, cluster: object, plan: object, show: Show) -> StreamReport:
        return follow_query(query, show, is_done, observed=(SENT,))  # type: ignore[arg-type]

    monkeypatch.setattr("martlet_spark.pipelines.replay.replay", run)
    return main(["pipeline", "replay", "--archive", "x", "--to", "T", "--checkpoint", "c"])


def test_tasks_are_shown_on_a_terminal_only(
    session: FakeSession, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    assert stats(monkeypatch, lambda: eventually(lambda: session.looks > 3 or None)) == 0
    assert session.stopped
    assert capsys.readouterr().out.endswith("7 rows\n")
    if stderr.isatty():
        assert "\rmeasuring [#######.....................]  25% 3 tasks " in stderr.getvalue()
        assert stderr.getvalue().endswith(f"\r{' ' * 119}\r"), "the bar stays"
    else:
        assert stderr.getvalue() == ""


def test_messages_are_shown_on_a_terminal_only(
    session: FakeSession, stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    query = FakeQuery(lambda: None)
    assert replay(monkeypatch, query, is_done=lambda _: True) == 0
    assert query.stopped
    assert "replayed to T: messages 6, sent 4, batches 2, behind 6, seconds " in capsys.readouterr().out
    if stderr.isatty():
        assert "\rreplaying [##############..............]  50% 6 messages " in stderr.getvalue()
        assert stderr.getvalue().endswith(f"\r{' ' * 119}\r"), "the bar stays"
    else:
        assert stderr.getvalue() == ""


@pytest.fixture
def handler() -> Iterator[None]:
    """Ctrl-C does what it did before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("words", [[], ["--to", "table"]])
def test_ctrl_c_cancels_the_job(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    def job() -> None:
        signal.raise_signal(signal.SIGINT)
        assert session.cancelled.wait(WAIT_S)
        raise PySparkException("[JOB_CANCELLED] Job 0 was cancelled")

    assert stats(monkeypatch, job, *words) == 130
    assert session.stopped
    shown = capsys.readouterr()
    assert shown.out == ""
    incomplete = "'table' may be incomplete; remove it, and " if words else ""
    assert shown.err == f"martlet: interrupted; {incomplete}start the command again\n"


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("fails", [False, True], ids=["waits", "fails"])
def test_ctrl_c_stops_the_query_and_reports_what_it_did(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    """A query may fail by it, because the terminal sends it to the processes of Spark too."""

    def wait() -> None:
        signal.raise_signal(signal.SIGINT)
        if fails:
            raise PySparkException("[STREAM_FAILED] a worker has died")

    query = FakeQuery(wait)
    assert replay(monkeypatch, query) == 130
    assert query.stopped
    assert session.stopped
    shown = capsys.readouterr()
    assert "replayed to T: messages 6, sent 4, batches 2, behind 6, seconds " in shown.out
    assert shown.err == "martlet: interrupted; what was completed stays, and the same command continues\n"


@pytest.mark.usefixtures("handler")
def test_ctrl_c_pressed_twice_waits_for_nothing(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it goes on")

    assert stats(monkeypatch, job) == 130
    assert session.stopped
    assert capsys.readouterr().err == "martlet: interrupted; start the command again\n"
