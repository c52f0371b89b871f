"""Notes of files that tasks write, so that a run finds its predecessors' unfinished files without listing the archive.

Before a task creates a file, it notes the path in ``_writing/BATCH-TASK-ATTEMPT``. The commit of a batch removes the
notes of its files before the next batch is committed. A run that starts removes the files of all other notes, and then
the notes; files of the newest batch that its commit lists stay. An archive of an earlier version has no notes, so its
next run lists the whole archive once, and writes ``_writing/complete``.
"""

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Final, final

import pyarrow.fs as pafs

from martlet_spark.errors import PipelineError
from martlet_spark.pipelines.storage import each_of, read_whole, write_whole

__all__ = ["FileNote", "batch_of", "forget_notes", "open_path", "remove_unfinished"]

WRITING: Final = "_writing"
COMPLETE: Final = "complete"
NAME: Final = re.compile(r"\.?(\d{10})-\d{5}(?:-[0-9a-f]+)*(?:\.parquet|$)")


def batch_of(name: str) -> int | None:
    """Return the batch of the file or note *name*; None if no task wrote it."""
    found = NAME.match(name)
    return int(found[1]) if found else None


def _note_of(path: str) -> str:
    """Return the name of the note of the file *path*: the file's name without its number."""
    return path.rpartition("/")[2].rpartition("-")[0]


def open_path(filesystem: pafs.FileSystem, path: str) -> str:
    """Return the path of the file *path*, whose name no other attempt uses, until it is complete."""
    if not isinstance(filesystem, pafs.LocalFileSystem):
        return path  # an S3 object appears when it is complete
    folder, _, name = path.rpartition("/")
    return f"{folder}/.{name}"


@final
class FileNote:
    """The note of one attempt of a task; *name* is the attempt."""

    def __init__(self, filesystem: pafs.FileSystem, root: str, name: str) -> None:
        self._filesystem = filesystem
        self._path = f"{root}/{WRITING}/{name}"
        self._paths: list[str] = []

    def add(self, path: str) -> None:
        """Note *path*, before its file is created."""
        self._paths.append(path)
        write_whole(self._filesystem, self._path, "\n".join(self._paths).encode())

    def check(self) -> None:
        """Raise `PipelineError` if a newer run has removed the note, and the files that existed by then."""
        if self._paths and self._filesystem.get_file_info(self._path).type is pafs.FileType.NotFound:
            raise PipelineError("files of a batch were removed by a newer run of this pipeline; start one at a time")


def forget_notes(filesystem: pafs.FileSystem, root: str, paths: Iterable[str]) -> None:
    """Remove the notes of the files *paths*, which were committed or removed."""
    names = {_note_of(path) for path in paths}
    each_of(lambda name: _remove(filesystem, f"{root}/{WRITING}/{name}"), sorted(names))


def remove_unfinished(filesystem: pafs.FileSystem, root: str, last: int, listed: Callable[[], Collection[str]]) -> None:
    """Remove files of uncommitted batches; batches up to *last* are committed, and *last* has the files *listed*."""
    marker = f"{root}/{WRITING}/{COMPLETE}"
    if filesystem.get_file_info(marker).type is pafs.FileType.NotFound:
        _remove_files_without_note(filesystem, root, last, listed())
        write_whole(filesystem, marker, b"")
    selector = pafs.FileSelector(f"{root}/{WRITING}", allow_not_found=True)
    names = [info.base_name for info in filesystem.get_file_info(selector)]
    notes = [name for name in names if batch_of(name) is not None]
    listed_files = listed() if any(batch_of(name) == last for name in notes) else ()

    def remove(name: str) -> None:
        note = f"{root}/{WRITING}/{name}"
        for path in (read_whole(filesystem, note) or "").splitlines():
            if batch_of(name) != last or path not in listed_files:
                for file_path in {open_path(filesystem, f"{root}/{path}"), f"{root}/{path}"}:
                    _remove(filesystem, file_path)
        _remove(filesystem, note)

    each_of(remove, notes)


def _remove_files_without_note(filesystem: pafs.FileSystem, root: str, last: int, listed: Collection[str]) -> None:
    """Remove files of uncommitted batches by listing the whole archive."""
    selector = pafs.FileSelector(root, allow_not_found=True, recursive=True)
    for info in filesystem.get_file_info(selector):
        batch = batch_of(info.base_name) if ".parquet" in info.base_name else None
        is_unlisted = batch == last and info.path.removeprefix(f"{root}/") not in listed
        if batch is not None and (batch > last or is_unlisted):
            _remove(filesystem, info.path)


def _remove(filesystem: pafs.FileSystem, path: str) -> None:
    with suppress(FileNotFoundError):
        filesystem.delete_file(path)
