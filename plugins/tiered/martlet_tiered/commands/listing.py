"""``martlet tiered ls``: what is in the table."""

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from martlet.cli.outcome import Exit
from martlet.cli.terminal import Bar, human_bytes, print_json, table
from martlet.errors import MartletError

if TYPE_CHECKING:
    from martlet_tiered.commands.place import OpenedTable
    from martlet_tiered.format.footer import Span

__all__ = ["configure", "run"]

REQUESTS_MAX: Final = 8
OF_DAYS: Final = ("date", "kind", "files", "messages", "size")
OF_TOPICS: Final = ("topic", "kind", "queues", "messages", "first stored", "last stored")
OF_QUEUES: Final = ("queue", "messages", "first offset", "last offset", "first stored", "last stored")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--topics", action="store_true", help="list topics; reads the footer of each file")
    chosen.add_argument("--topic", metavar="TOPIC", default="", help="list the queues of a topic")


def run(arguments: Any) -> int:
    """Print what the table has."""
    from martlet_tiered.commands.place import open_place

    place = open_place(arguments)
    if arguments.topic:
        rows = _queues(place, arguments.topic)
        heads: Sequence[str] = OF_QUEUES
        if not rows:
            raise MartletError(f"the cold tier at {place.url!r} has no message of topic {arguments.topic!r}")
    elif arguments.topics:
        rows, heads = _topics(place), OF_TOPICS
    else:
        rows, heads = _days(place), OF_DAYS
    if arguments.json:
        names = [head.replace(" ", "_") for head in heads]
        head = {"url": place.url, "broker": place.broker, "epoch": place.epoch, "end_position": place.end}
        print_json({**head, "rows": [dict(zip(names, row, strict=True)) for row in rows]})
        return Exit.OK
    size = human_bytes(sum(file.bytes for file in place.files))
    what = f"{len(place.files)} files ({size}) of broker {place.broker!r}"
    print(f"{place.url} has {what}, up to log position {place.end:,}")
    if rows:
        print()
        print(table(heads, [_shown(heads, row) for row in rows]))
    return Exit.OK


def _shown(heads: Sequence[str], row: Sequence[object]) -> list[object]:
    texts: list[object] = []
    for head, value in zip(heads, row, strict=True):
        if head == "size" and isinstance(value, int):
            texts.append(human_bytes(value))
        elif head.endswith("stored") and isinstance(value, int):
            texts.append(datetime.fromtimestamp(value / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S"))
        else:
            texts.append(value)
    return texts


def _days(place: "OpenedTable") -> list[tuple[object, ...]]:
    files: Counter[tuple[str, str]] = Counter()
    messages: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for file in place.files:
        key = file.date, file.kind
        files[key] += 1
        messages[key] += file.rows or 0
        sizes[key] += file.bytes
    return [(*key, files[key], messages[key], sizes[key]) for key in sorted(files)]


def _spans(place: "OpenedTable") -> Iterable[tuple[str, "Span"]]:
    """Yield the kind and each span of all files."""
    footers = place.each(place.files, place.footer, REQUESTS_MAX)
    bar = Bar("reading", "files")
    try:
        for number, (file, footer) in enumerate(zip(place.files, footers, strict=True), 1):
            bar.update(number, len(place.files))
            for span in footer.spans:
                yield file.kind, span
    finally:
        bar.close()


def _topics(place: "OpenedTable") -> list[tuple[object, ...]]:
    queues: dict[tuple[str, str], set[int]] = {}
    messages: Counter[tuple[str, str]] = Counter()
    times: dict[tuple[str, str], tuple[int, int]] = {}
    for kind, span in _spans(place):
        key = span.topic, kind
        queues.setdefault(key, set()).add(span.queue)
        messages[key] += span.count
        first, last = times.get(key, (span.min_ms, span.max_ms))
        times[key] = min(first, span.min_ms), max(last, span.max_ms)
    return [(*key, len(queues[key]), messages[key], *times[key]) for key in sorted(queues)]


def _queues(place: "OpenedTable", topic: str) -> list[tuple[object, ...]]:
    found: dict[int, tuple[int, int, int, int, int]] = {}
    for _, span in _spans(place):
        if span.topic == topic:
            new = span.count, span.first, span.last, span.min_ms, span.max_ms
            old = found.get(span.queue)
            found[span.queue] = (
                new
                if old is None
                else (
                    old[0] + new[0],
                    min(old[1], new[1]),
                    max(old[2], new[2]),
                    min(old[3], new[3]),
                    max(old[4], new[4]),
                )
            )
    return [(queue, *found[queue]) for queue in sorted(found)]
