"""The lists of an archive's batches: ``_batches/NUMBER.json`` has the files of a batch, in one line of JSON.

A hundred lists of successive batches are joined into one, ``FIRST-LAST.json`` with their lines, and a hundred of the
joined lists again. So a start looks at a few hundred names, for any number of batches. Lists are removed once the
joined list is durable: a run may be killed at any moment. A concurrent reader finds each batch if it looks for the
shorter lists first. The newest batch always has a list of its own.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from errno import ENOENT
from itertools import groupby
from typing import Any, Final, final

import pyarrow.fs as pafs

from martlet_spark.pipelines.parts import WrittenFile
from martlet_spark.pipelines.storage import each_of, read_whole, write_whole

__all__ = ["BATCHES", "BatchLists"]

BATCHES: Final = "_batches"
# Batches in a joined list. One of 10,000 batches with ten files each has about 20 MB.
SPANS: Final = (100, 10_000)
SUFFIX: Final = ".json"


def _name(batches: range) -> str:
    if len(batches) == 1:
        return f"{batches.start:010}{SUFFIX}"
    return f"{batches.start:010}-{batches[-1]:010}{SUFFIX}"


def _batches(name: str) -> range | None:
    """Return the batches of the list *name*; None if *name* is not that of a list."""
    numbers = name.removesuffix(SUFFIX).split("-")
    if not name.endswith(SUFFIX) or len(numbers) > 2 or not all(each.isdecimal() for each in numbers):
        return None
    return range(int(numbers[0]), int(numbers[-1]) + 1)


@final
class BatchLists:
    """The lists of the archive at *root*."""

    def __init__(self, filesystem: pafs.FileSystem, root: str) -> None:
        self._filesystem = filesystem
        self._folder = f"{root}/{BATCHES}"
        self._joined: tuple[range, dict[int, Any]] = range(0), {}  # the joined list that was read last

    def numbers(self) -> list[int]:
        """Return the numbers of all batches, in order; reads all joined lists."""
        found: set[int] = set()
        for batches in self._present():
            numbers = batches if len(batches) == 1 else self._read_joined(batches)
            if numbers is None:
                return self.numbers()  # the list was joined with others meanwhile
            found.update(numbers)
        return sorted(found)

    def has(self, batch: int) -> bool:
        """Return whether *batch* has a list of its own."""
        path = f"{self._folder}/{_name(range(batch, batch + 1))}"
        return bool(self._filesystem.get_file_info(path).type is not pafs.FileType.NotFound)

    def last(self) -> int:
        """Return the number of the newest batch; -1 if there is none."""
        present = self._present()
        if not present:
            return -1
        newest = max(present, key=lambda each: (each.stop, -len(each)))
        numbers = newest if len(newest) == 1 else self._read_joined(newest)
        return max(numbers) if numbers else self.last()

    def query(self, batch: int) -> str:
        """Return the id of the query of *batch*."""
        return str(self._read(batch)["query"])

    def files(self, batch: int) -> list[WrittenFile]:
        """Return the files of *batch*."""
        return [WrittenFile(**each) for each in self._read(batch)["files"]]

    def add(self, query: str, batch: int, files: Iterable[WrittenFile]) -> None:
        """Write the list of *batch*."""
        value = {"query": query, "batch": batch, "files": [asdict(each) for each in files]}
        write_whole(self._filesystem, f"{self._folder}/{_name(range(batch, batch + 1))}", json.dumps(value).encode())

    def join_before(self, batch: int) -> None:
        """Join the lists before that of *batch*, the one added last, if *batch* is the first of a new span."""
        if batch % SPANS[0] == 0:
            self.join()

    def join(self) -> None:
        """Join lists where there are enough; if a call is interrupted, the next one continues."""
        for span, part in zip(SPANS, (1, *SPANS), strict=False):
            present = self._present()
            newest = max((each.start for each in present if len(each) == 1), default=-1)
            parts = sorted((each for each in present if len(each) == part), key=lambda each: each.start)
            for first, group in groupby(parts, key=lambda each: each.start - each.start % span):
                if first + span <= newest:
                    self._join(range(first, first + span), list(group))

    def _join(self, batches: range, parts: list[range]) -> None:
        """Join the lists *parts* into that of *batches*; an interrupted run may have removed some of *parts* before."""
        paths = [f"{self._folder}/{_name(part)}" for part in parts]
        texts = each_of(self._load, paths)
        if None in texts:
            return  # another run joins them
        before = self._load(f"{self._folder}/{_name(batches)}") or ""
        lines = {json.loads(line)["batch"]: line for text in (before, *texts) for line in (text or "").splitlines()}
        text = "".join(f"{lines[number]}\n" for number in sorted(lines))
        if text != before:
            write_whole(self._filesystem, f"{self._folder}/{_name(batches)}", text.encode())
        each_of(self._remove, paths)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.delete_file(path)

    def _present(self) -> list[range]:
        selector = pafs.FileSelector(self._folder, allow_not_found=True)
        names = [_batches(info.base_name) for info in self._filesystem.get_file_info(selector)]
        return [each for each in names if each is not None]

    def _load(self, path: str) -> str | None:
        return read_whole(self._filesystem, path)

    def _read_joined(self, batches: range) -> dict[int, Any] | None:
        """Return the lists of *batches* from the joined list; None if they are not joined."""
        if self._joined[0] != batches:
            text = self._load(f"{self._folder}/{_name(batches)}")
            if text is None:
                return None
            values = map(json.loads, text.splitlines())
            self._joined = batches, {value["batch"]: value for value in values}
        return self._joined[1]

    def _read(self, batch: int) -> dict[str, Any]:
        """Return the list of *batch*.

        Raises:
          FileNotFoundError: the batch has no list of its own.
        """
        batches, lists = self._joined
        if batch not in batches or batch not in lists:
            text = self._load(f"{self._folder}/{_name(range(batch, batch + 1))}")
            if text is not None:
                batch_list: dict[str, Any] = json.loads(text)
                return batch_list
        for span in SPANS:
            first = batch - batch % span
            joined = self._read_joined(range(first, first + span))
            if joined is not None and batch in joined:
                value: dict[str, Any] = joined[batch]
                return value
        raise FileNotFoundError(
            ENOENT, "the list of a batch is gone", f"{self._folder}/{_name(range(batch, batch + 1))}"
        )
