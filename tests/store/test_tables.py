"""Small files that are replaced whole: whatever fails, the newest generation that was confirmed is still there."""

import contextlib
import errno
from random import Random

import pytest

from martlet.store.disk.files import atomic_write, read_file, read_generation
from martlet.testing.disk import Cut, FakeDisk, PowerCut

PATH = "/data/config/topics.json"
STEPS_MAX = 8  # more calls than one replacement makes


def newest(disk: FakeDisk) -> bytes | None:
    return read_generation(disk, PATH, complete)


def complete(data: bytes) -> bytes:
    """Raise an error for a torn file, as every table does."""
    if not data.endswith(b"."):
        raise ValueError("cut short")
    return data


def cut_power_at(disk: FakeDisk, step: int) -> None:
    calls = iter(range(10**6))

    def count(_: str) -> None:
        if next(calls) == step:
            raise PowerCut

    disk.on_change = count


def crashed_while_replacing(step: int, cut: Cut, before: tuple[bytes, ...] = (b"one.", b"two.")) -> FakeDisk:
    """A disk that holds *before*; the process died at call *step* of writing ``three.``."""
    disk = FakeDisk()
    for data in before:
        atomic_write(disk, PATH, data)
    cut_power_at(disk, step)
    with contextlib.suppress(PowerCut):
        atomic_write(disk, PATH, b"three.")
    disk.on_change = None
    return disk.after_power_cut(cut, Random(step))


@pytest.mark.parametrize("cut", Cut)
@pytest.mark.parametrize("step", range(STEPS_MAX))
def test_a_crash_leaves_the_old_or_the_new(step: int, cut: Cut) -> None:
    assert newest(crashed_while_replacing(step, cut)) in (b"two.", b"three.")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["create", "write", "sync", "rename", "unlink", "sync_directory"])
@pytest.mark.parametrize("step", range(STEPS_MAX))
def test_a_replacement_that_fails_after_a_crash_loses_nothing(step: int, call: str, code: int) -> None:
    for after in range(3):
        disk = crashed_while_replacing(step, Cut.KILLED)
        found = newest(disk)
        assert found is not None
        disk.fail_next(call, code, after=after)
        try:
            atomic_write(disk, PATH, b"four.")
        except OSError:
            assert newest(disk) in (found, b"four.")
        else:
            assert newest(disk) == b"four."
        disk.failures.clear()
        atomic_write(disk, PATH, b"five.")
        assert newest(disk) == b"five."


@pytest.mark.parametrize("step", range(STEPS_MAX))
def test_a_disk_without_space_after_a_crash_loses_nothing(step: int) -> None:
    disk = crashed_while_replacing(step, Cut.KILLED)
    found = newest(disk)
    disk.free_bytes = 0
    # Removing what is left of the interrupted write may make room.
    for number in range(3):
        with pytest.raises(OSError, match=r"No space left on device: '/data/config/topics.json.tmp'"):
            atomic_write(disk, PATH, b"%d" % number * 10_000 + b".")
        assert newest(disk) == found
    disk.free_bytes = None
    atomic_write(disk, PATH, b"four.")
    assert newest(disk) == b"four."


@pytest.mark.parametrize("step", range(STEPS_MAX))
def test_the_first_generation_survives_what_comes_after_a_crash(step: int) -> None:
    disk = crashed_while_replacing(step, Cut.KILLED, before=())
    found = newest(disk)
    disk.fail_next("write", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(disk, PATH, b"four.")
    assert newest(disk) == found
    atomic_write(disk, PATH, b"five.")
    assert newest(disk) == b"five."


def test_a_write_that_failed_gives_its_space_back() -> None:
    disk = FakeDisk()
    atomic_write(disk, PATH, b"one.")
    disk.free_bytes = 2 * 4096
    with pytest.raises(OSError, match="No space left"):
        atomic_write(disk, PATH, b"x" * 3 * 4096)
    assert disk.free_bytes == 2 * 4096


def test_the_previous_generation_is_kept() -> None:
    disk = FakeDisk()
    for data in (b"one.", b"two.", b"three."):
        atomic_write(disk, PATH, data)
    assert (read_file(disk, PATH), read_file(disk, PATH + ".bak")) == (b"three.", b"two.")
    assert read_file(disk, PATH + ".tmp") is None


@pytest.mark.parametrize("cut", list(Cut))
def test_what_was_written_outlives_a_power_cut_right_after_it(cut: Cut) -> None:
    for content in (b"one.", b"two." * 5000):
        disk = FakeDisk()
        atomic_write(disk, PATH, b"zero.")
        atomic_write(disk, PATH, content)
        for seed in range(10):
            assert read_file(disk.after_power_cut(cut, Random(seed)), PATH) == content
