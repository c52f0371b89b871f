"""``martlet store inspect|verify|repair|backup``: work on a data directory; only ``backup`` works while a broker uses
it.
"""

import argparse
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import asdict

from martlet.cli.interrupts import ended_by
from martlet.cli.outcome import Exit, UsageError
from martlet.cli.terminal import Bar, body_fields, human_bytes, print_json, table
from martlet.config import override, read_toml
from martlet.contracts import Subcommand

if TYPE_CHECKING:
    from msgspec import Struct

    from martlet.app.config import Config
    from martlet.message import Record
    from martlet.offline.directory import Finding, Report
    from martlet.store.recovery.inspect import Inspection

__all__ = ["COMMAND"]

T = TypeVar("T")

EPILOG = """\
examples:
  martlet store inspect martlet-data                 list segments and queues, with the times of their records
  martlet store inspect martlet-data --at 4281       show the record at that position of the log
  martlet store verify martlet-data                  read all records and look each one up
  martlet store repair martlet-data                  repair now what the next start would repair
  martlet store repair /var/lib/martlet --config /etc/martlet.toml --yes
  martlet store backup martlet-data /backup/monday   copy it, also while the broker runs, and verify the copy
For inspect, verify and repair the broker must be stopped, or DIR be a copy or a snapshot. inspect and verify change
nothing. To restore a backup, stop the broker and put a copy of the backup in the place of its data directory.
Exit codes: 0 no damage; 1 repair was declined; 3 damage was found (verify, backup) or could not be repaired (repair),
or a broker has the directory open.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    choices = parser.add_subparsers(metavar="ACTION", required=True)
    for name, text, work in (
        ("inspect", "show the contents of a data directory", show),
        ("verify", "report what a start would repair, read the whole log, and look up every record", verify),
        ("repair", "list what a start would repair, ask, and repair it", repair),
        ("backup", "copy a data directory, also of a running broker, and verify the copy", back_up),
    ):
        inner = choices.add_parser(name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False)
        inner.add_argument("directory", metavar="DIR", help="the data directory")
        if name == "backup":
            inner.add_argument("target", metavar="TARGET", help="the new directory for the copy")
        inner.add_argument("--json", action="store_true", help="print a JSON object")
        inner.set_defaults(work=work)
        if name == "inspect":
            inner.add_argument("--at", type=int, metavar="POSITION", help="show the record at this position instead")
            continue
        inner.add_argument("--config", metavar="FILE", type=Path, help="the broker's configuration file")
        inner.add_argument(
            "--set", metavar="SECTION.KEY=VALUE", action="append", default=[], help="set one key, overriding the file"
        )
        if name == "repair":
            inner.add_argument("--yes", action="store_true", help="repair without asking")


def run(arguments: Any) -> int:
    code: int = arguments.work(arguments)
    return code


def _config(arguments: Any) -> "Config":
    from martlet.app.config import read_config

    tables = read_toml(arguments.config) if arguments.config else {}
    for assignment in arguments.set:
        override(tables, assignment)
    return read_config(tables)


def _shown(bar: Bar) -> "Report":
    return lambda done, total, records: bar.update(done, total, f"{records:,} records" if records else "")


def _inspect(arguments: Any) -> "Inspection":
    from martlet.offline.owner import owner_kept
    from martlet.store.disk.files import RealDisk
    from martlet.store.recovery.inspect import inspect

    bar = Bar("reading", "B")
    try:
        with owner_kept(arguments.directory):
            return inspect(arguments.directory, RealDisk(), report=_shown(bar))
    finally:
        bar.close()


def show(arguments: Any) -> int:
    if arguments.at is not None:
        return _show_record(arguments)
    found = _inspect(arguments)
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
    state = "clean shutdown" if found.stopped_in_order else "no clean shutdown: the next start recovers"
    lines = [
        f"log       {found.log_start:,} to {found.log_end:,}, {found.records:,} records",
        f"state     {state}",
    ]
    if found.torn_bytes:
        lines.append(f"torn end  {found.torn_bytes:,} bytes after the last valid record; the next start removes them")
    lines += [f"damage    {damage.start:,} to {damage.end:,}: {damage.text}" for damage in found.damage]
    return "\n".join(lines)


def verify(arguments: Any) -> int:
    from martlet.offline import directory as offline

    found = _run_offline(arguments, offline.verify, "trying a start", "reading")
    if arguments.json:
        print_json({"sound": not found.findings, "findings": _listed(found.findings), **_fields(found.inspection)})
    else:
        print(_summary(found.inspection))
        _print_findings(found.findings)
        print("verified  " + (SOUND if not found.findings else f"{_count(found.findings)}; {REMEDY}"))
    return Exit.UNUSABLE if found.findings else Exit.OK


SOUND = "every record is intact and can be served; a start changes nothing"
REMEDY = "`martlet store repair` does now what the next start would do"


def _run_offline(arguments: Any, work: "Callable[..., Awaitable[T]]", *labels: str) -> "T":
    """Do *work* of `martlet.offline.directory` with a progress bar for each of *labels*."""
    import trio

    from martlet.offline.owner import owner_kept
    from martlet.store.disk.files import RealDisk

    directory, config = os.path.abspath(arguments.directory), _config(arguments)
    bars = [Bar(label, "B") for label in labels]
    try:
        with owner_kept(directory):
            return trio.run(partial(work, directory, config, RealDisk(), *map(_shown, bars)))
    finally:
        for bar in bars:
            bar.close()


def _print_findings(findings: "Sequence[Finding]") -> None:
    for finding in findings:
        print(f"{finding.kind:8}  {finding.text}")


def _listed(records: "Iterable[Struct]") -> list[dict[str, object]]:
    return [asdict(record) for record in records]


def _count(findings: "Sequence[Finding]") -> str:
    return "1 finding" if len(findings) == 1 else f"{len(findings)} findings"


def repair(arguments: Any) -> int:
    from martlet.offline import directory as offline

    planned = _run_offline(arguments, offline.plan, "trying a start").findings
    if not arguments.json:
        _print_findings(planned)
    done: list[str] = []
    if planned:
        if not _confirm(arguments):
            return Exit.FAILED
        os.umask(0o077)  # no other user may read messages
        done = _run_offline(arguments, offline.repair, "repairing", "indexing keys")
    left = _run_offline(arguments, offline.verify, "trying a start", "reading").findings
    if arguments.json:
        print_json({"planned": _listed(planned), "done": done, "left": _listed(left)})
        return Exit.UNUSABLE if left else Exit.OK
    for text in done:
        print(f"done      {text}")
    if left:
        print("left, because a start cannot repair it:")
        _print_findings(left)
    print("repaired  " + (SOUND if not left else _count(left) + " left"))
    return Exit.UNUSABLE if left else Exit.OK


def back_up(arguments: Any) -> int:
    from martlet.errors import StoreError
    from martlet.offline.backup import backup
    from martlet.offline.owner import give_to_owner
    from martlet.offline.unfinished import unfinished_backup
    from martlet.store.disk.files import RealDisk

    target = os.path.abspath(arguments.target)
    if f"{os.path.realpath(target)}/".startswith(f"{os.path.realpath(arguments.directory)}/"):
        raise StoreError(f"backup {target!r} is inside of the data directory; choose another place")
    os.umask(0o077)  # no other user may read messages
    labels = ("copying", "starting the copy", "indexing keys", "trying a start", "verifying")
    with ended_by(signal.SIGTERM, signal.SIGHUP), unfinished_backup(target, RealDisk()) as folder:
        made = _run_offline(arguments, partial(backup, target=folder), *labels)
        give_to_owner(folder, arguments.directory)
    if arguments.json:
        fields = {"target": target, "copied_bytes": made.copied_bytes, "sound": not made.findings}
        print_json({**fields, "findings": _listed(made.findings), **_fields(made.inspection)})
    else:
        print(_summary(made.inspection))
        _print_findings(made.findings)
        state = SOUND if not made.findings else f"{_count(made.findings)}, which the original has as well"
        print(f"copied    {human_bytes(made.copied_bytes)} to {target}")
        print(f"verified  {state}")
    return Exit.UNUSABLE if made.findings else Exit.OK


def _confirm(arguments: Any) -> bool:
    """Return whether to change the directory: the user gave `--yes`, or agreed at the terminal."""
    if arguments.yes:
        return True
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"data directory {arguments.directory!r} was not repaired; add --yes to repair without asking")
    print(f"repair {arguments.directory!r} now? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _fields(found: "Inspection") -> dict[str, object]:
    return {
        **asdict(found),
        "segments": _listed(found.segments),
        "queues": _listed(queue for _, queue in sorted(found.queues.items())),
        "damage": _listed(found.damage),
    }


def _show_record(arguments: Any) -> int:
    from martlet.store.disk.files import RealDisk
    from martlet.store.recovery.inspect import record_at

    record = record_at(arguments.directory, RealDisk(), arguments.at)
    fields = _record_fields(record)
    if arguments.json:
        print_json({**fields, **body_fields(record.body)})
    else:
        fields["body"] = record.body.decode("utf-8", "backslashreplace")
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
    }


def _time(ms: int) -> str | None:
    """Return local time with the UTC offset of that day; the number itself when it is out of range."""
    if ms <= 0:
        return None
    try:
        return (datetime.fromtimestamp(ms // 1000) + timedelta(milliseconds=ms % 1000)).isoformat(" ", "milliseconds")
    except (OverflowError, ValueError, OSError):
        return str(ms)


COMMAND = Subcommand("store", "inspect, verify, repair or back up a data directory", configure, run)
