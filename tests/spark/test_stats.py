"""Statistics of topics, compared with what Python computes of the same messages."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.client.patient import patient

from martlet.cli.main import main
from martlet_client.blocking import Admin, PullConsumer
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.errors import OptionError, PipelineError
from martlet_spark.pipelines.plots import Chart, charts_of, plot, short_number
from martlet_spark.pipelines.stats import message_stats, per_topic

from .conftest import Topic

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


@pytest.mark.spark
def test_windows_have_counts_sizes_latency_and_lag(spark: SparkSession, topic: Topic) -> None:
    topic.send(40, tags="red")
    topic.send(20)
    with Admin(patient(topic.endpoints)) as admin:
        admin.create_group("spark-lag")
    with PullConsumer(patient(topic.endpoints), "spark-lag") as consumer:
        broker = consumer.queues(topic.name)[0].broker_name
        consumer.commit(MessageQueue(topic.name, broker, 0), 12)
    rows = spark.read.format("martlet").options(**topic.options, columns="body,tag,born_ts,store_ts").load().collect()
    until_2100 = {**topic.options, "endingTimestamp": "4102444800000"}
    found = message_stats(spark, until_2100, 86_400, "spark-lag").orderBy("tag").collect()
    for tag in (None, "red"):
        own = [row for row in found if row.tag == tag]
        sizes = [len(row.body) for row in rows if row.tag == tag]
        latencies = [(row.store_ts - row.born_ts) // timedelta(milliseconds=1) for row in rows if row.tag == tag]
        assert sum(row.messages for row in own) == len(sizes)
        assert sum(row.bytes for row in own) == sum(sizes)
        assert max(row.size_max for row in own) == max(sizes)
        assert max(row.latency_ms_max for row in own) == max(latencies)
        if len(own) == 1:  # unless midnight was in between
            ordered = sorted(sizes)
            assert own[0].size_p50 == ordered[(len(ordered) + 1) // 2 - 1]
            assert own[0].size_mean == pytest.approx(sum(sizes) / len(sizes), abs=0.06)
    # queue 0 has 10 red messages and 5 others, of which 12 were consumed
    assert sum(row.lag for row in found if row.tag == "red") == 30
    assert sum(row.lag for row in found if row.tag is None) == 15 + 3
    total = per_topic(message_stats(spark, topic.options, 86_400)).collect()
    assert sum(row.messages for row in total) == 60
    with pytest.raises(OptionError, match="window of 0 s is too short"):
        message_stats(spark, topic.options, 0)


@pytest.mark.spark
def test_the_command_prints_writes_and_draws(
    spark: SparkSession, topic: Topic, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    topic.send(12, tags="red")
    words = ["pipeline", "stats", topic.name, "-n", topic.endpoints, "--window", "24h", "--from", "2020-01-01"]
    files = ["--to", str(tmp_path / "table"), "--format", "csv", "--plot", str(tmp_path / "page.html")]
    assert main([*words, *files]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{topic.name} +red +12 ", out)
    assert out.rstrip().endswith(f"written to {tmp_path / 'table'}; written to {tmp_path / 'page.html'}")
    assert topic.name in (tmp_path / "page.html").read_text()
    [table] = (tmp_path / "table").glob("*.csv")
    assert table.read_text().startswith("window,topic,tag,messages,bytes,size_mean,size_p50,")
    assert main([*words, "--until", "2020-01-02", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"count": 0, "rows": []}


def rows(count: int = 3) -> list[dict[str, object]]:
    return [
        {"window": NOON + timedelta(minutes=n), "topic": topic, "messages": n, "bytes": 10 * n, "latency_ms_p99": 5 - n}
        for n in range(count)
        for topic in ("A", "<B>")
    ]


def test_a_plot_is_a_page_that_needs_nothing(tmp_path: Path) -> None:
    charts = charts_of(rows())
    assert [chart.title for chart in charts][:2] == ["messages per window", "bytes per window"]
    assert charts[1].series["A"] == [(NOON + timedelta(minutes=n), 10.0 * n) for n in range(3)]
    plot(charts, str(tmp_path / "page.html"), "Topics")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polyline") == 6
    assert "&lt;B&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_line_is_interrupted_where_windows_have_no_messages(tmp_path: Path) -> None:
    minutes = [0, 1, 2, 7, 9, 10]
    chart = Chart("any", {"A": [(NOON + timedelta(minutes=n), 1.0) for n in minutes]})
    assert [[point[0].minute for point in part] for part in chart.lines("A")] == [[0, 1, 2], [7], [9, 10]]
    plot([chart], str(tmp_path / "page.html"), "Topics")
    page = (tmp_path / "page.html").read_text()
    assert (page.count("<polyline"), page.count("<circle")) == (3, 6)
    plot([chart], str(tmp_path / "page.png"), "Topics")


def test_one_window_is_drawn_between_its_begin_and_its_end(tmp_path: Path) -> None:
    plot(charts_of(rows(1), 300), str(tmp_path / "page.html"), "Topics")
    page = (tmp_path / "page.html").read_text()
    assert page.count("12:00:00") == page.count("12:05:00") == 3
    assert 'cx="460.0"' in page  # the middle
    plot(charts_of(rows(1), 300), str(tmp_path / "page.png"), "Topics")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (1500, "1,500"), (1e7, "10 M"), (2.5e9, "2.5 G"), (2e13, "20 T"), (5e15, "5,000 T")],
)
def test_numbers_of_an_axis_are_written_out(value: float, text: str) -> None:
    assert short_number(value) == text


def test_a_plot_can_be_a_png(tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    plot([*charts_of(rows()), Chart("none", {})], str(path), "Topics")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert width == 900
    assert height == 4 * 260  # a chart for each measure, and the empty one
    assert data[-8:-4] == b"IEND"


def test_a_png_without_matplotlib_is_an_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("martlet_spark.pipelines.plots.find_spec", lambda name: None)
    text = "matplotlib is not installed, and PNG needs it; pip install matplotlib, or plot to .html"
    with pytest.raises(PipelineError, match=re.escape(text)):
        plot(charts_of(rows()), str(tmp_path / "page.png"), "Topics")
    assert main(["pipeline", "stats", "A", "--plot", "x.png"]) == 1
    assert text in capsys.readouterr().err


def test_only_the_largest_topics_are_drawn() -> None:
    many = [{"window": NOON, "topic": f"T{n:02}", "messages": n, "bytes": 0, "latency_ms_p99": 0} for n in range(20)]
    assert list(charts_of(many)[0].series) == [f"T{n:02}" for n in range(19, 11, -1)]


@pytest.mark.parametrize("values", [[0.0], [-3.0, 0.001], [1.0, 10.0], [99_999.0]])
def test_a_chart_holds_any_values(tmp_path: Path, values: list[float]) -> None:
    series = {"A": [(NOON + timedelta(minutes=n), value) for n, value in enumerate(values)]}
    plot([Chart("any", series), Chart("none", {})], str(tmp_path / "page.html"), "Topics")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<circle") == len(values)
    assert "nan" not in page
    assert "inf" not in page
    assert "no messages" in page


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["A", "--plot", "x.gif"], "plot 'x.gif' is neither .html nor .png; name the file so"),
        (["A", "--window", "1500ms"], "--window is not a number of whole seconds"),
    ],
)
def test_a_wrong_option_is_an_error(capsys: pytest.CaptureFixture[str], words: list[str], text: str) -> None:
    assert main(["pipeline", "stats", *words]) == 2
    assert text in capsys.readouterr().err
