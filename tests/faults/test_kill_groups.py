"""A real process that writes atomic groups, killed at any moment: no half group is left, and no durable one is lost."""

from pathlib import Path
from random import Random

import trio
from tests.faults.group_writer import CONFIG, sizes_of
from tests.kills import ROUNDS, Victim

from martlet.records.codec import check_record, decode_record, decode_records
from martlet.records.layout import BLANK_MAGIC, FILLER, RECORD_BYTES_MIN
from martlet.runtime.clock import SystemClock
from martlet.store import Store

Groups = dict[int, int]


def kill_after(directory: Path, first: int, commits: int) -> int:
    """Run the writer until it has said that *commits* commits are durable, kill it, and return its last number."""
    with Victim("tests.faults.group_writer", directory, first) as victim:
        lines = [victim.line() for _ in range(commits)] + victim.kill()
    return int(lines[-1])


def count(bodies: list[bytes]) -> Groups:
    """How many members of each group are among *bodies*."""
    found: Groups = {}
    for body in bodies:
        number = body.partition(b":")[0]
        if number.isdigit():
            found[int(number)] = found.get(int(number), 0) + 1
    return found


async def stored(directory: Path) -> Groups:
    """The groups that a start finds."""
    store = await Store.open(directory, CONFIG, SystemClock())
    bodies: list[bytes] = []
    for topic in "UV":
        queue, offset = store.queue(topic, 0), 0
        while offset < store.readers.end_offset(queue):
            result = await store.readers.read_far(queue, offset, 1000, 1 << 20)
            bodies += [record.body for record in decode_records(b"".join(result.pieces))]
            offset = result.next_offset
    assert store.readers.damaged_records == 0
    store.crash()
    return count(bodies)


def seen_by_rocketmq(directory: Path) -> Groups:
    """The groups of the records up to the first bytes that are not a record."""
    bodies: list[bytes] = []
    for path in sorted((directory / "commitlog").iterdir()):
        data, at, base = path.read_bytes(), 0, int(path.name)
        while at + RECORD_BYTES_MIN <= len(data):
            size, magic = FILLER.unpack_from(data, at)
            if magic == BLANK_MAGIC:
                break
            if not check_record(data, at, at + size, base + at):
                return count(bodies)
            bodies.append(decode_record(data, at).body)
            at += size
    return count(bodies)


def test_a_killed_process_leaves_whole_groups_only(tmp_path: Path) -> None:
    chance = Random(11)
    last = 0
    for _ in range(ROUNDS):
        last = kill_after(tmp_path, max(last, 0), chance.randrange(1, 200))
        for found in (seen_by_rocketmq(tmp_path), trio.run(stored, tmp_path)):
            assert {number for number, members in found.items() if members != len(sizes_of(number))} == set()
            assert set(range(1, last + 1)) - set(found) == set()
        last = max(found)
