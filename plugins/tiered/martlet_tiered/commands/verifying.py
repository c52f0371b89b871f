"""``martlet tiered verify``: reads all files, and compares them with their checksums."""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from martlet.cli.outcome import Exit
from martlet.cli.terminal import Bar, human_bytes, print_json

if TYPE_CHECKING:
    from martlet_tiered.commands.place import OpenedTable
    from martlet_tiered.files import DataFile

__all__ = ["configure", "run"]

# A row group takes up to 50 MiB while it is decoded.
FILES_AT_ONCE: Final = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--date", metavar="YYYY-MM-DD", default="", help="only the files of this day (UTC)")


def run(arguments: Any) -> int:
    """Print what is damaged."""
    from martlet_tiered.commands.place import open_place

    place = open_place(arguments)
    files = [file for file in place.files if arguments.date in ("", file.date)]
    damages: dict[str, list[str]] = {}
    records = done_bytes = 0
    total = sum(file.bytes for file in files)
    bar = Bar("verifying", "B")
    try:
        outcomes = place.each(files, partial(_verify, place), FILES_AT_ONCE)
        for file, (count, problems) in zip(files, outcomes, strict=True):
            records += count
            done_bytes += file.bytes
            bar.update(done_bytes, total, f"{records:,} records")
            if problems:
                damages[file.path] = problems
    finally:
        bar.close()
    if arguments.json:
        print_json({"url": place.url, "files": len(files), "records": records, "damaged": damages})
    else:
        for path, problems in damages.items():
            for problem in problems:
                print(f"{path}: {problem}")
        what = f"{len(files)} files ({human_bytes(total)}) with {records:,} intact records"
        print(f"{place.url}: {what}; " + (f"{len(damages)} files are damaged" if damages else "no damage was found"))
    return Exit.FAILED if damages else Exit.OK


def _verify(place: "OpenedTable", file: "DataFile") -> tuple[int, list[str]]:
    """Return the number of intact records of *file*, and what is wrong with it."""
    from martlet.runtime.checksum import crc32
    from martlet_columns.errors import RecordError
    from martlet_columns.rebuild import rebuild
    from martlet_tiered.errors import ObjectDamaged, ObjectMissing
    from martlet_tiered.format.footer import decode_group, footer_of, read_metadata
    from martlet_tiered.format.keys import decode_keys, keys_name
    from martlet_tiered.names import DATA_FOLDER

    name, count, problems = f"{DATA_FOLDER}/{file.path}", 0, []
    try:
        metadata = read_metadata(place.objects, name, file.bytes)
        footer = footer_of(metadata)
    except (ObjectDamaged, ObjectMissing) as error:
        return 0, [str(error)]
    if footer is None:
        return 0, []  # of another program: nothing says what must be in it
    for number, group in enumerate(footer.groups):
        try:
            data = place.objects.read_range(name, group.begin, group.end)
            records = rebuild(decode_group(metadata, number, group.begin, data))
        except (ObjectDamaged, ObjectMissing, RecordError) as error:
            problems.append(f"row group {number}: {error}")
            continue
        if crc32(records.data) == group.crc and len(records) == group.count:
            count += group.count
        else:
            problems.append(f"row group {number} has other records than its footer says")
    try:
        decode_keys(place.objects.read(keys_name(file.path)))
    except (ObjectDamaged, ObjectMissing) as error:
        problems.append(f"its keys: {error}")
    return count, problems
