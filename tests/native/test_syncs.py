"""The thread that syncs files does the same in the kernel as in Python."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread

import pytest
from tests.native.kernel import kernel_of

from martlet.store.disk.syncers import REQUEST, RESULT, serve_syncs

Serve = Callable[[int, int], None]

both = pytest.mark.parametrize("serve", [serve_syncs, kernel_of(serve_syncs)], ids=["python", "native"])


def results_of(serve: Serve, requests: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return errno and count for each of *requests*, which are sent one after the other."""
    read_requests, write_requests = os.pipe()
    read_results, write_results = os.pipe()
    thread = Thread(target=serve, args=(read_requests, write_results))
    thread.start()
    try:
        results: list[tuple[int, int]] = []
        for request in requests:
            os.write(write_requests, b"".join(map(REQUEST.pack, request)))
            results.append(RESULT.unpack(os.read(read_results, 100)))
        return results
    finally:
        os.close(write_requests)  # the end: `serve` returns
        thread.join()
        for fd in read_requests, read_results, write_results:
            os.close(fd)


@both
def test_files_and_a_directory_are_synced_until_one_fails(serve: Serve, tmp_path: Path) -> None:
    file = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    unsyncable, other_end = os.pipe()
    try:
        os.write(file, b"data")
        requests = [[file], [file, ~directory], [file, unsyncable, file], [~unsyncable], [10**6, file], [~(10**6)]]
        results = results_of(serve, [*requests, [file] * 1000])
    finally:
        for fd in file, directory, unsyncable, other_end:
            os.close(fd)
    failed = [(errno.EINVAL, 1), (errno.EINVAL, 0), (errno.EBADF, 0), (errno.EBADF, 0)]
    assert results == [(0, 1), (0, 2), *failed, (0, 1000)]


@both
def test_a_pipe_that_fails_ends_it(serve: Serve) -> None:
    for fd in (-1, 10**6):
        with pytest.raises((OSError, RuntimeError)):
            serve(fd, fd)
