"""Memory of the kernel is as usable as that of Python."""

import os
from pathlib import Path

import pytest
from tests.native.kernel import kernel_of

from martlet.store.disk.files import RealDisk, uncleared


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
def test_memory_has_the_size_that_is_asked_for_and_can_be_changed(size: int) -> None:
    for memory in (kernel_of(uncleared)(size), uncleared(size)):
        assert type(memory) is bytearray
        assert len(memory) == size
        memory[:] = b"a" * size
        assert memory == b"a" * size


def test_a_read_at_the_end_of_a_file_returns_only_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    disk = RealDisk()
    disk._uncleared = kernel_of(uncleared)
    fd = disk.open(str(tmp_path / "file"))
    try:
        found = disk.read_now(fd, 100, 3)
    finally:
        os.close(fd)
    assert found in (b"tent", None)  # not every file system can tell whether a read would wait
