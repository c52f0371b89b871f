"""``martlet tiered rebuild``: makes again what follows from the data files: their keys, and the index of readers."""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from martlet.cli.outcome import Exit
from martlet.cli.terminal import Bar, print_json
from martlet.errors import StoreError, StoreLocked

if TYPE_CHECKING:
    from martlet_tiered.commands.place import OpenedTable
    from martlet_tiered.files import DataFile

__all__ = ["configure", "run"]

# A row group takes up to 50 MiB while it is decoded; an index needs only the ends of files.
KEYS_AT_ONCE: Final = 2
FOOTERS_AT_ONCE: Final = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--data", metavar="DIR", help="the broker's data directory. Default: that of the configuration")
    parser.add_argument(
        "--all", action="store_true", help="read every file, and compare also keys that are intact with its rows"
    )


def run(arguments: Any) -> int:
    """Rebuild keys and index, and print what was done."""
    from martlet_tiered.commands.place import data_directory, open_place, tier_owner_kept

    place, directory = open_place(arguments), data_directory(arguments)
    with tier_owner_kept(arguments):
        made, damaged = _rebuild_keys(place, intact_too=arguments.all)
    index = _rebuild_index(place, directory) if directory else "not rebuilt; give --data or --config"
    if arguments.json:
        print_json({"url": place.url, "files": len(place.files), "keys": made, "damaged": damaged, "index": index})
    else:
        for text in damaged:
            print(text)
        print(f"keys   of {len(made):,} files were rebuilt, {len(place.files) - len(made):,} needed nothing")
        print(f"index  {index}")
    return Exit.FAILED if damaged else Exit.OK


def _rebuild_keys(place: "OpenedTable", *, intact_too: bool) -> tuple[list[str], list[str]]:
    """Return the paths of the files whose keys were rebuilt, and why others cannot be."""
    made: list[str] = []
    damaged: list[str] = []
    bar = Bar("rebuilding keys", "files")
    try:
        results = place.each(place.files, partial(_keys_of, place, intact_too), KEYS_AT_ONCE)
        for number, (file, (was_made, problem)) in enumerate(zip(place.files, results, strict=True), 1):
            bar.update(number, len(place.files))
            if was_made:
                made.append(file.path)
            if problem:
                damaged.append(f"{file.path}: {problem}")
    finally:
        bar.close()
    return made, damaged


def _keys_of(place: "OpenedTable", intact_too: bool, file: "DataFile") -> tuple[bool, str]:
    from martlet_tiered.errors import ObjectDamaged, ObjectMissing
    from martlet_tiered.format.rebuilding import rebuild_keys

    try:
        return rebuild_keys(place.objects, file, if_intact=intact_too), ""
    except (ObjectDamaged, ObjectMissing) as error:
        return False, str(error)


def _rebuild_index(place: "OpenedTable", directory: str) -> str:
    """Rebuild the index in *directory*, unless a broker uses it; return what was done."""
    from martlet.offline.owner import owner_kept
    from martlet.store.disk.data_directory import lock_directory
    from martlet.store.disk.files import RealDisk
    from martlet_tiered.reading.index import FILE_NAME, identity_of
    from martlet_tiered.reading.rebuilding import rebuild_index
    from martlet_tiered.upload.ownership import read_owners

    disk = RealDisk()
    if "commitlog" not in disk.names(directory):
        raise StoreError(f"{directory!r} is no data directory; give that of the broker")
    with owner_kept(directory):
        try:
            lock = lock_directory(directory, disk)
        except StoreLocked:
            return f"of {directory} was left to the broker, which runs; it rebuilds a damaged index itself"
        bar = Bar("rebuilding the index", "files")
        try:
            newest = place.last_commit()
            if newest is not None:
                read_owners(disk, directory).check(place.url, place.epoch, newest.owner)
            total = len(place.files)

            def load(files: Sequence[Any], read: Any) -> Any:
                for number, file in enumerate(place.each(files, read, FOOTERS_AT_ONCE), 1):
                    yield file
                    bar.update(number, total)

            path, identity = f"{directory}/{FILE_NAME}", identity_of(place.url, place.broker)
            faults = rebuild_index(path, identity, place.objects, place.files, load)
        finally:
            bar.close()
            disk.close(lock)
    text = f"{path} was rebuilt from {total:,} files"
    return f"{text}; {len(faults)} of them cannot be read: {faults[0]}" if faults else text
