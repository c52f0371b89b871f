"""``martlet store inspect|verify``: a data directory, while no broker runs on it."""

import argparse
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from martlet.commands.outcome import Exit
from martlet.commands.terminal import Bar, human_bytes, print_json, table
from martlet.contracts import Command

if TYPE_CHECKING:
    from martlet.message import Record
    from martlet.store.inspect import Inspection

__all__ = ["COMMAND"]

EPILOG = """\
examples:
  martlet store inspect martlet-data                 segments, topics, first and last time
  martlet store inspect martlet-data --at 4281       the record at that position of the log
  martlet store verify martlet-data                  read everything, compare every checksum
Nothing is changed. The broker must be stopped; a copy or a snapshot will do as well.
Exit codes: 0 all is well; 3 damage was found, or a broker has the directory open.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    for name, text, work in (
        ("inspect", "show what a data directory holds", show),
        ("verify", "read a whole data directory and compare every checksum and queue entry", verify),
    ):
        inner = choices.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        inner.add_argument("directory", metavar="DIR", help="the data directory")
        inner.add_argument("--json", action="store_true", help="print an object for programs")
        inner.set_defaults(work=work)
        if name == "inspect":
            inner.add_argument("--at", type=int, metavar="POSITION", help="show the record at this position instead")


def run(arguments: Any) -> int:
    code: int = arguments.work(arguments)
    return code


def _inspect(arguments: Any, *, bodies: bool) -> "Inspection":
    from martlet.store.files import RealDisk
    from martlet.store.inspect import inspect

    bar = Bar("reading", "B")
    try:
        return inspect(
            arguments.directory,
            RealDisk(),
            bodies=bodies,
            report=lambda done, total, records: bar.update(done, total, f"{records:,} records"),
        )
    finally:
        bar.close()


def show(arguments: Any) -> int:
    if arguments.at is not None:
        return _show_record(arguments)
    found = _inspect(arguments, bodies=False)
    if arguments.json:
        print_json(_fields(found))
        return Exit.OK
    print(_summary(found), end="\n\n")
    print(
        table(
            ("segment", "size", "used", "records", "first", "last"),
            [
                (
                    segment.path.rpartition("/")[2],
                    human_bytes(segment.file_bytes),
                    human_bytes(segment.end - segment.start),
                    segment.records,
                    _time(segment.first_ms),
                    _time(segment.last_ms),
                )
                for segment in found.segments
            ],
        ),
        end="\n\n",
    )
    print(table(("topic", "queue", "first", "next", "records", "size", "last"), _queue_rows(found)))
    return Exit.OK


def _queue_rows(found: "Inspection") -> list[tuple[object, ...]]:
    return [
        (
            queue.topic,
            queue.queue_id,
            queue.first_offset,
            queue.next_offset,
            queue.records,
            human_bytes(queue.size),
            _time(queue.last_ms),
        )
        for _, queue in sorted(found.queues.items())
    ]


def _summary(found: "Inspection") -> str:
    state = "stopped in order" if found.stopped_in_order else "not stopped in order: the next start recovers"
    lines = [
        f"log       {found.log_start:,} to {found.log_end:,}, {found.records:,} records",
        f"state     {state}",
    ]
    if found.torn_bytes:
        lines.append(f"torn end  {found.torn_bytes:,} bytes that are no record; the next start cuts them")
    lines += [f"damage    {damage.start:,} to {damage.end:,}: {damage.text}" for damage in found.damage]
    return "\n".join(lines)


def verify(arguments: Any) -> int:
    found = _inspect(arguments, bodies=True)
    if arguments.json:
        print_json({"sound": found.sound, **_fields(found)})
    else:
        print(_summary(found))
        for _, queue in sorted(found.queues.items()):
            if queue.wrong_entries:
                print(
                    f"queue     {queue.topic}/{queue.queue_id}: {queue.wrong_entries:,} entries disagree with the log"
                )
        print("verified  every record is intact" if found.sound else "verified  DAMAGE was found")
    return Exit.OK if found.sound else Exit.UNUSABLE


def _fields(found: "Inspection") -> dict[str, object]:
    fields = asdict(found)
    fields["queues"] = [asdict(queue) for _, queue in sorted(found.queues.items())]
    return fields


def _show_record(arguments: Any) -> int:
    from martlet.store.files import RealDisk
    from martlet.store.inspect import record_at

    fields = _record_fields(record_at(arguments.directory, RealDisk(), arguments.at))
    if arguments.json:
        print_json(fields)
    else:
        shown = {name: value for name, value in fields.items() if value not in ("", {})}
        print(table(("field", "value"), shown.items()))
    return Exit.OK


def _record_fields(record: "Record") -> dict[str, object]:
    from martlet.message import decode_properties

    return {
        "position": record.position,
        "bytes": record.size,
        "topic": record.topic,
        "queue": record.queue_id,
        "offset": record.queue_offset,
        "flag": record.flag,
        "sys_flag": record.sys_flag,
        "born": _time(record.born_ms),
        "stored": _time(record.store_ms),
        "redeliveries": record.reconsume_times,
        "properties": decode_properties(record.properties),
        "body": record.body.decode("utf-8", "backslashreplace"),
    }


def _time(ms: int) -> str | None:
    try:
        return (
            (datetime.fromtimestamp(0) + timedelta(milliseconds=ms)).isoformat(" ", "milliseconds") if ms > 0 else None
        )
    except OverflowError:
        return str(ms)


COMMAND = Command("store", "look into a data directory while no broker runs on it", configure, run)
