"""``martlet tiered purge``: removes the bytes of deleted topics now."""

import argparse
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from martlet.cli.outcome import Exit, Unreachable
from martlet.cli.terminal import Bar, print_json
from martlet.errors import ConfigError, MartletError, StoreError, StoreLocked
from martlet.runtime.clock import SystemClock
from martlet.runtime.ids import Ids

if TYPE_CHECKING:
    from martlet_tiered.status import PurgeStatus
    from martlet_tiered.upload.ownership import Ownership

__all__ = ["configure", "run"]

EPILOG: Final = """\
A running broker does it, and it goes on if you end the command. Without one, the command owns the table meanwhile: it
needs the lock of the data directory, so no broker can start there, and a broker that uses the table from elsewhere by
mistake stops uploading. Removed objects are gone at once: other programs that read an older version of the table fail.

What stays: messages of a deleted topic that were in a transaction or delayed, in the topics of the broker itself, and
those in the retry and dead-letter topics of its groups.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.epilog = EPILOG
    parser.add_argument("--data", metavar="DIR", help="the broker's data directory. Default: that of the configuration")
    parser.add_argument("--topic", metavar="TOPIC", default="", help="only the messages of this deleted topic")


def run(arguments: Any) -> int:
    """Remove the bytes of deleted topics, and print what was removed."""
    from martlet_tiered.commands.place import data_directory

    directory = data_directory(arguments)
    if not directory:
        raise ConfigError("a running broker has to do it, and none is known; give --config FILE or --data DIR")
    found = _follow(_through_broker(directory, arguments.topic)) or _follow(_alone(arguments, directory))
    assert found is not None
    if found.error:
        raise MartletError(found.error)
    if arguments.json:
        print_json(
            {
                "files": found.done,
                "messages": found.messages,
                "objects": found.objects,
                "damaged": found.damaged,
            }
        )
    else:
        for text in found.damaged:
            print(text)
        what = f"{found.done:,} files lost {found.messages:,} messages of deleted topics"
        print(f"{what}; {found.objects:,} objects that the table does not need were removed")
    return Exit.FAILED if found.damaged else Exit.OK


def _follow(states: "Iterator[PurgeStatus]") -> "PurgeStatus | None":
    """Show the *states* of a purge, and return the last one; None without any."""
    bar, last = Bar("purging", "files"), None
    try:
        for last in states:
            bar.update(last.done, last.done + last.left, last.waits)
    finally:
        bar.close()
    return last


def _through_broker(directory: str, topic: str) -> "Iterator[PurgeStatus]":
    """Yield the states of a purge by the broker of *directory*; none if no broker runs."""
    from martlet_tiered.status import request_purge

    try:
        yield from request_purge(directory, topic)
    except OSError as error:
        raise Unreachable(f"the broker of data directory {directory!r} does not answer; {error}") from error


def _alone(arguments: Any, directory: str) -> "Iterator[PurgeStatus]":
    """Yield the states of a purge by this process, which keeps brokers from starting in *directory*."""
    from martlet.offline.owner import owner_kept
    from martlet.store.disk.data_directory import lock_directory
    from martlet.store.disk.files import RealDisk
    from martlet_tiered.commands.place import tier_owner_kept
    from martlet_tiered.upload.ownership import Ownership

    disk = RealDisk()
    if "commitlog" not in disk.names(directory):
        raise StoreError(f"{directory!r} is no data directory; give that of the broker")
    with owner_kept(directory):
        try:
            lock = lock_directory(directory, disk)
        except StoreLocked as error:
            raise StoreLocked(f"{error}; it is starting, or does not have the plugin tiered") from error
        try:
            ownership = Ownership(disk, directory, f"martlet tiered purge {Ids().unique()}")
            with tier_owner_kept(arguments):
                yield from _purge(arguments, ownership)
        finally:
            disk.close(lock)


def _purge(arguments: Any, ownership: "Ownership") -> "Iterator[PurgeStatus]":
    from martlet.runtime.steps import finish_now
    from martlet_tiered.commands.place import open_for_writing
    from martlet_tiered.errors import ObjectDamaged, ObjectMissing
    from martlet_tiered.reading.table_files import TableFile, load_file
    from martlet_tiered.rewrite.dropping import Dropping
    from martlet_tiered.rewrite.merging import merge_files
    from martlet_tiered.rewrite.rewriter import new_name
    from martlet_tiered.status import PurgeStatus

    now_ms: Callable[[], int] = SystemClock().now_ms
    objects, table, broker = open_for_writing(arguments, Ids().unique(), now_ms())
    owner = ownership.next_owner()
    ownership.take(table.take_over(owner, ownership.owners))
    ownership.save()
    deletions = _deletions(objects, table.files())
    if arguments.topic:
        if arguments.topic not in deletions:
            raise MartletError(f"topic {arguments.topic!r} was not deleted, as far as the table knows")
        deletions = {arguments.topic: deletions[arguments.topic]}
    files = [file for file in table.files() if file.kind != "internal"] if deletions else []
    state = PurgeStatus(left=len(files))
    for number, file in enumerate(files, 1):
        state.left = len(files) - number
        if file.name is None:
            if any(map(Dropping(deletions).touches, load_file(objects, TableFile.of(file)).spans)):
                state.damaged.append(f"{file.path}: another program has written it")
            continue
        try:
            name = new_name(table, [file], number)
            made = finish_now(merge_files(objects, [file], name, broker, Dropping(deletions), now_ms))
        except (ObjectDamaged, ObjectMissing) as error:
            state.damaged.append(f"{file.path}: {error}")
            continue
        if made.dropped:
            table.rewrite([file], made.files, now_ms(), changes_data=True)
            state.done += 1
            state.messages += made.dropped
        yield state
    state.objects = len(table.collect(now_ms(), 0))
    yield state


def _deletions(objects: Any, files: Any) -> dict[str, int]:
    """Return the topics whose deletion is noted in *files*, each with the log position of the newest note."""
    from martlet_tiered.reading.table_files import TableFile, load_file

    found: dict[str, int] = {}
    for file in files:
        if file.kind == "internal":
            loaded = load_file(objects, TableFile.of(file))
            if loaded.fault:
                raise MartletError(f"what was deleted cannot be read: {loaded.fault}")
            for topic, position in loaded.deleted:
                found[topic] = max(found.get(topic, 0), position)
    return found
