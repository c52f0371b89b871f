"""The real disk, where it is more than one system call."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import assert_no_checkpoints, wait_all_tasks_blocked

from martlet.errors import StoreLocked
from martlet.store.disk.files import Disk, Files, RealDisk, ThreadLimiter, atomic_write, read_file
from martlet.testing.disk import FakeDisk

SIZE = 10_000


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """A file of SIZE bytes: its descriptor, and what is in it."""
    data = os.urandom(SIZE)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    yield fd, data
    os.close(fd)


@pytest.mark.parametrize(("position", "size"), [(0, SIZE), (100, 50), (SIZE - 10, 10), (SIZE - 10, 20), (SIZE, 1)])
def test_what_is_read_at_once_is_what_is_there_or_nothing(position: int, size: int, written: tuple[int, bytes]) -> None:
    fd, data = written
    # Only the kernel knows what it holds, and some file systems do not ask it.
    assert RealDisk().read_now(fd, size, position) in (None, data[position : position + size])


def test_a_file_system_that_cannot_tell_is_waited_for(
    written: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "preadv", refuse)
    assert RealDisk().read_now(written[0], 10, 0) is None


def test_a_read_that_must_not_wait_finds_nothing_where_the_c_library_cannot_do_it(
    written: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the reader waits for `read` in a thread, as for data that is not in the page cache."""
    monkeypatch.setattr("martlet.store.disk.files.READ_NOWAIT", None)
    monkeypatch.delattr("os.preadv")
    assert RealDisk().read_now(written[0], 10, 0) is None


@pytest.mark.parametrize(("held", "answer"), [(40, True), (30, False)])
def test_a_short_answer_counts_only_at_the_end(
    held: int, answer: bool, written: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, data = written

    def give(fd: int, buffers: list[bytearray], position: int, flags: int) -> int:
        buffers[0][:held] = data[position : position + held]
        return held

    monkeypatch.setattr(os, "preadv", give)
    assert RealDisk().read_now(fd, 100, SIZE - 40) == (data[SIZE - 40 :] if answer else None)


@pytest.mark.parametrize("read_only", [False, True])
def test_an_error_of_a_file_names_it(read_only: bool, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    files = Files(RealDisk(), 4, read_only=read_only)
    path = str(tmp_path / "directory")
    with pytest.raises(IsADirectoryError) as raised:
        files.read(path, 10, 0)
    assert raised.value.filename == path
    assert path in str(raised.value)
    files.close()


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as raised:
        read_file(RealDisk(), str(tmp_path))
    assert raised.value.filename == str(tmp_path)


def test_a_file_is_locked_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    disk = RealDisk()
    fd = disk.lock(str(tmp_path / "lock"))
    with pytest.raises(StoreLocked, match="lock"):
        disk.lock(str(tmp_path / "lock"))
    disk.close(fd)


async def test_work_gets_a_free_thread_without_a_turn_of_the_loop_and_else_waits_for_one() -> None:
    threads = trio.to_thread.current_default_thread_limiter()
    limiter = ThreadLimiter()
    with assert_no_checkpoints():
        await limiter.acquire_on_behalf_of("first")
    assert threads.borrowed_tokens == 1
    limiter.release_on_behalf_of("first")
    threads.total_tokens = 1
    threads.acquire_on_behalf_of_nowait("another")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(limiter.acquire_on_behalf_of, "second")
        await wait_all_tasks_blocked()
        assert threads.statistics().tasks_waiting == 1
        threads.release_on_behalf_of("another")
    assert threads.statistics().borrowers == ["second"]


@pytest.mark.parametrize("make", [RealDisk, FakeDisk])
def test_a_stamp_changes_with_each_write_and_replacement(tmp_path: Path, make: Callable[[], Disk]) -> None:
    disk, path = make(), f"{tmp_path}/config/users"
    assert disk.stamp(path) is None
    seen = []
    for content in (b"one", b"two", b"three"):
        atomic_write(disk, path, content)
        seen.append(disk.stamp(path))
        assert disk.stamp(path) == seen[-1]
    fd = disk.open(path)
    disk.write(fd, b"X" * 100, 0)
    disk.close(fd)
    seen.append(disk.stamp(path))
    assert len(set(seen)) == 4
    assert None not in seen


def test_a_replaced_file_and_its_previous_generation_have_the_mode_of_secrets(tmp_path: Path) -> None:
    path = f"{tmp_path}/secrets"
    before = os.umask(0)
    try:
        for content in (b"one", b"two"):
            atomic_write(RealDisk(), path, content, mode=0o600)
    finally:
        os.umask(before)
    assert [os.stat(name).st_mode & 0o777 for name in (path, f"{path}.bak")] == [0o600, 0o600]
