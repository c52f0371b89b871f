"""Plots of statistics: an HTML page with SVG, which needs no package, or a PNG by matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape
from importlib.util import find_spec
from math import log10
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from martlet_spark.errors import OptionError, PipelineError

__all__ = ["PLOT_ROWS", "SERIES_MAX", "Chart", "charts_of", "check_plot", "plot", "short_number"]

Points: TypeAlias = list[tuple[datetime, float]]

PLOT_ROWS: Final = 20_000  # windows and topics in one plot, the latest
SERIES_MAX: Final = 8  # topics in one chart, the ones with the most messages
COLOURS: Final = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#17becf")
WIDTH: Final = 860
HEIGHT: Final = 220
LEFT: Final = 70
BOTTOM: Final = 30
TICKS: Final = 4
MEASURES: Final = (
    ("messages", "messages per window"),
    ("bytes", "bytes per window"),
    ("latency_ms_p99", "latency in ms, 99th percentile (of the worst tag)"),
    ("lag", "messages that the group has not consumed"),
)
STYLE: Final = "body{font:14px sans-serif;margin:2em}h2{font-size:15px;margin:1.5em 0 .3em}text{font:11px sans-serif}"


@final
@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: a line for each topic, interrupted where windows of *window_s* have no messages."""

    title: str
    series: dict[str, Points]
    window_s: float = 60

    @property
    def half(self) -> timedelta:
        """Half the length of a window: a window is drawn at its middle."""
        return timedelta(seconds=self.window_s / 2)

    def span(self) -> tuple[datetime, datetime]:
        """Return the begin of the first window and the end of the last: a single window has a width too."""
        times = [when for series in self.series.values() for when, _ in series]
        return min(times), max(times) + 2 * self.half

    def lines(self, topic: str) -> list[Points]:
        """Return the points of *topic* as lists without gaps."""
        found: list[Points] = []
        for point in self.series[topic]:
            if found and (point[0] - found[-1][-1][0]).total_seconds() <= self.window_s * 1.01:
                found[-1].append(point)
            else:
                found.append([point])
        return found


def check_plot(path: str) -> None:
    """Raise `OptionError` if *path* names no kind of plot, and `PipelineError` if its package is missing."""
    kind = Path(path).suffix.lower()
    if kind not in (".html", ".png"):
        raise OptionError(f"plot {path!r} is neither .html nor .png; name the file so")
    if kind == ".png" and find_spec("matplotlib") is None:
        raise PipelineError("matplotlib is not installed, and PNG needs it; pip install matplotlib, or plot to .html")


def charts_of(rows: Iterable[Mapping[str, Any]], window_s: float = 60) -> list[Chart]:
    """Return the charts of *rows*, which have ``window``, ``topic`` and measures and are in order of time."""
    found = list(rows)
    totals: dict[str, int] = {}
    for row in found:
        totals[row["topic"]] = totals.get(row["topic"], 0) + row["messages"]
    topics = sorted(sorted(totals), key=lambda topic: -totals[topic])[:SERIES_MAX]
    charts = []
    for measure, title in MEASURES:
        if found and measure in found[0]:
            series: dict[str, Points] = {topic: [] for topic in topics}
            for row in found:
                if row["topic"] in series:
                    series[row["topic"]].append((row["window"], float(row[measure] or 0)))
            charts.append(Chart(title, series, window_s))
    return charts


def plot(charts: Sequence[Chart], path: str, title: str) -> None:
    """Write *charts* to the file *path*, ``.html`` or ``.png``."""
    check_plot(path)
    if path.lower().endswith(".png"):
        _png(charts, path, title)
    else:
        Path(path).write_text(_html(charts, title), encoding="utf-8")


def _html(charts: Sequence[Chart], title: str) -> str:
    parts = [f"<h2>{escape(chart.title)}</h2>\n{_svg(chart)}" for chart in charts]
    head = (
        f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head>'
    )
    return "\n".join([head, f"<body><h1>{escape(title)}</h1>", *parts, "</body></html>\n"])


def _svg(chart: Chart) -> str:
    points = [point for series in chart.series.values() for point in series]
    if not points:
        return "<p>no messages</p>"
    half = chart.half
    first, last = chart.span()
    top = _round_up(max(value for _, value in points))
    low = min(0.0, min(value for _, value in points))
    span_s = (last - first).total_seconds() or 1.0

    def x(when: datetime) -> float:
        return LEFT + (when - first).total_seconds() / span_s * (WIDTH - LEFT - 10)

    def y(value: float) -> float:
        return (HEIGHT - BOTTOM) - (value - low) / (top - low) * (HEIGHT - BOTTOM - 10)

    lines = [f'<svg width="{WIDTH}" height="{HEIGHT + 18 * len(chart.series)}" xmlns="http://www.w3.org/2000/svg">']
    for tick in range(TICKS + 1):
        value = low + (top - low) * tick / TICKS
        lines.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - 10}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{short_number(value)}</text>')
    for when, anchor in ((first, "start"), (last, "end")):
        text = when.isoformat(" ", "seconds")
        lines.append(f'<text x="{x(when):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="{anchor}">{text}</text>')
    for number, (topic, series) in enumerate(chart.series.items()):
        colour = COLOURS[number]
        for part in chart.lines(topic):
            path = " ".join(f"{x(when + half):.1f},{y(value):.1f}" for when, value in part)
            lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        dots = [(x(when + half), y(value)) for when, value in series]
        lines += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2" fill="{colour}"/>' for across, down in dots]
        legend_y = HEIGHT + 18 * number
        lines.append(f'<rect x="{LEFT}" y="{legend_y - 8}" width="12" height="8" fill="{colour}"/>')
        lines.append(f'<text x="{LEFT + 18}" y="{legend_y}">{escape(topic)}</text>')
    return "\n".join([*lines, "</svg>"])


def _round_up(value: float) -> float:
    """Return the least number >= *value* that is 1, 2 or 5 times a power of ten; 1 for 0 and less."""
    if value <= 0:
        return 1.0
    power = 10.0 ** int(log10(value) - (value < 1))
    return next(power * step for step in (1, 2, 5, 10, 20) if power * step >= value)


def short_number(value: float) -> str:
    """Return *value* as a label of an axis: 1,500 or 20 M, never 1e7."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M")):
        if abs(value) >= limit:
            return f"{value / limit:,.4g}{unit}" if abs(value) < limit * 1000 else f"{value / limit:,.0f}{unit}"
    return f"{value:,.6g}"


def _png(charts: Sequence[Chart], path: str, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6 * max(len(charts), 1)), layout="constrained")
    figure.suptitle(title)
    for number, chart in enumerate(charts):
        axes: Any = figure.add_subplot(len(charts), 1, number + 1)
        axes.set_title(chart.title, fontsize=9)
        handles: dict[str, Any] = {}
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
        for topic, colour in zip(chart.series, COLOURS, strict=False):
            for part in chart.lines(topic):
                times, values = [when + chart.half for when, _ in part], [value for _, value in part]
                shown = axes.plot(times, values, color=colour, marker=".")
            handles[topic] = shown[0]
        if chart.series:
            axes.set_xlim(*chart.span())
            axes.legend(handles.values(), handles.keys(), fontsize=7)
    figure.savefig(path)
