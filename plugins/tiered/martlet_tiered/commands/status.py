"""``martlet tiered status``: how far the table is, and how far a running broker is behind with it."""

import argparse
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from msgspec import structs

from martlet.cli.outcome import Exit, Unreachable
from martlet.cli.terminal import human_bytes, print_json
from martlet.runtime.clock import SystemClock

if TYPE_CHECKING:
    from martlet_tiered.commands.place import OpenedTable
    from martlet_tiered.status import TierStatus

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--data", metavar="DIR", help="the broker's data directory. Default: that of the configuration")


def run(arguments: Any) -> int:
    """Print how far the table is, and what the broker of the data directory says, if one runs."""
    from martlet_tiered.commands.place import data_directory, open_place

    place = open_place(arguments)
    directory = data_directory(arguments)
    status = _ask(directory) if directory else None
    if arguments.json:
        broker = {"data": directory, **structs.asdict(status)} if status else None
        print_json({**_fields(place), "running": broker})
    else:
        for name, text in [*_table_lines(place), *_broker_lines(place, directory, status)]:
            print(f"{name:<10}{text}")
    return Exit.OK


def _ask(directory: str) -> "TierStatus | None":
    from martlet_tiered.status import read_status

    try:
        return read_status(directory)
    except OSError as error:
        raise Unreachable(f"the broker of data directory {directory!r} does not answer; {error}") from error


def _fields(place: "OpenedTable") -> dict[str, object]:
    last = place.last_commit()
    return {
        "url": place.url,
        "broker": place.broker,
        "version": place.version,
        "end_position": place.end,
        "epoch": place.epoch,
        "owner": last.owner if last else "",
        "last_commit_ms": last.time_ms if last else 0,
        "files": len(place.files),
        "records": sum(file.rows or 0 for file in place.files),
        "bytes": sum(file.bytes for file in place.files),
    }


def _table_lines(place: "OpenedTable") -> Iterator[tuple[str, str]]:
    last = place.last_commit()
    yield "table", f"{place.url} of broker {place.broker!r}, version {place.version:,}"
    yield "owner", f"epoch {place.epoch:,}" + (f", {last.owner}" if last else "")
    when = ""
    if last is not None and last.time_ms:
        ago = timedelta(seconds=max(SystemClock().now_ms() - last.time_ms, 0) // 1000)
        when = f"; last commit {datetime.fromtimestamp(last.time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC, {ago} ago"
    yield "uploaded", f"up to log position {place.end:,}{when}"
    kinds = Counter(file.kind for file in place.files)
    by_kind = ", ".join(f"{kinds[kind]:,} {kind}" for kind in sorted(kinds))
    size, records = human_bytes(sum(file.bytes for file in place.files)), sum(file.rows or 0 for file in place.files)
    yield "files", f"{len(place.files):,} with {size} and {records:,} records" + (f" ({by_kind})" if by_kind else "")


def _broker_lines(place: "OpenedTable", directory: str, status: "TierStatus | None") -> Iterator[tuple[str, str]]:
    if status is None:
        where = f"none runs with {directory}" if directory else "unknown; give --data or --config to ask it"
        yield "broker", where
        return
    yield "broker", f"{status.broker!r} runs with {directory}"
    if status.url != place.url:
        yield "", f"its tier is {status.url}, which is another one"
    behind_s = timedelta(seconds=status.behind_ms // 1000)
    if status.behind_bytes:
        yield "behind", f"{human_bytes(status.behind_bytes)} are on its disk alone, the oldest for {behind_s}"
        yield "", status.reason
    else:
        yield "behind", "nothing: all durable messages are uploaded"
    counters = status.counters
    yield "failures", f"{counters['upload_failures']} uploads, {counters['upload_damaged']} damaged parts of the log"
    files = f"{counters['unindexed_files']} of {counters['files']} files are not indexed yet"
    yield "index", f"{files}, {counters['faulty_files']} cannot be read"
    hits, reads = counters["block_hits"], counters["block_reads"]
    yield "reads", f"{reads} row groups read, {hits} found in memory, {human_bytes(_number(counters['block_bytes']))}"


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0.0
