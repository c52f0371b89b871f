"""A disk that keeps all changes in memory: its user sees a normal disk, and the disk below never changes."""

from random import Random

import pytest

from martlet.store.disk.dry_disk import PAGE_BYTES, DryDisk
from martlet.store.disk.files import Disk, atomic_write
from martlet.testing.disk import Cut, FakeDisk

PATHS = [f"/data/{directory}/{name}" for directory in "ab" for name in "12"]
SIZES = [0, 1, 100, PAGE_BYTES - 1, PAGE_BYTES, 3 * PAGE_BYTES + 5]


def change(disk: Disk, random: Random) -> object:
    """One call, drawn from *random*; returns what it answers, or its error."""
    path, size, at = random.choice(PATHS), random.choice(SIZES), random.choice(SIZES)
    kind = random.choice(["write", "write", "truncate", "unlink", "rename", "replace", "rmdir", "mkdir"])
    data = random.randbytes(size)
    try:
        if kind in ("write", "truncate"):
            fd = disk.open(path, create=path.rpartition("/")[2] not in disk.names(path.rpartition("/")[0]))
            disk.write(fd, data, at) if kind == "write" else disk.truncate(fd, at)
            disk.close(fd)
        elif kind == "unlink":
            disk.unlink(path)
        elif kind == "rename":
            disk.rename(path, random.choice(PATHS))
        elif kind == "replace":
            atomic_write(disk, path, data)
        elif kind == "rmdir":
            disk.remove_directory(path.rpartition("/")[0])
        else:
            disk.make_directory(path.rpartition("/")[0])
    except OSError as error:
        return kind, error.errno
    return kind


def contents(disk: Disk) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for directory in ("/data/a", "/data/b"):
        for name in disk.names(directory):
            fd = disk.open(f"{directory}/{name}", read_only=True)
            data = disk.read(fd, disk.size(fd), 0)
            for at in SIZES:
                assert disk.read(fd, 50, at) == data[at : at + 50]
                following = disk.next_data(fd, at) if at < len(data) else at
                assert not data[at:following].strip(b"\x00")
            found[f"{directory}/{name}"] = data
            disk.close(fd)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_it_answers_as_the_disk_itself_would(seed: int) -> None:
    random = Random(seed)
    below = FakeDisk()
    for directory in "ab":
        below.make_directory(f"/data/{directory}")
    for _ in range(10):
        change(below, random)
    right = below.after_power_cut(Cut.KILLED, Random(0))
    before = contents(below)
    dry = DryDisk(below)
    for step in range(40):
        answers = [change(disk, Random(f"{seed} {step}")) for disk in (right, dry)]
        assert answers[0] == answers[1], step
        after = contents(right)
        assert contents(dry) == after, (step, answers[0])
        assert dry.names("/data") == right.names("/data")
    assert contents(below) == before
    assert dry.changes() == {
        path: "removed" if path not in after else "created" if path not in before else "changed"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }
    assert not below.open_files
