"""Archives of the classes that a Java program loads, which spare each JVM of the tests reading and checking them.

A JVM that runs RocketMQ or Spark spends a third of its processor time on that (class-data sharing, JEP 350). `make`
writes an archive while a program runs once; `words` are the options with which the same program uses it from then on.
Without an archive, or with one of other jars or of another JVM, a program runs as always, only slower.
"""

import fcntl
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from . import fetch

# What a JVM says of an archive that does not fit must not be among what a program writes to its output.
QUIET: Final = ("-Xlog:disable", "-Xlog:all=warning:stderr")

_writing: set[Path] = set()


def archive(name: str, classes: Sequence[Path], folder: Path | None = None) -> Path:
    """Return where the archive is of the program *name*, whose jars, or folders of jars, are *classes*."""
    java = Path(fetch.tool("java")).resolve()
    digest = hashlib.sha256(f"{java} {java.stat().st_mtime_ns}".encode())
    for each in classes:
        digest.update(f" {each} {each.stat().st_ino} {each.stat().st_mtime_ns}".encode())
    return (folder or fetch.cache()) / f"classes-{name}-{digest.hexdigest()[:12]}.jsa"


def words(path: Path) -> list[str]:
    """Return the options for a JVM that uses the archive *path*, or writes it if that is what `make` is for."""
    if path in _writing:
        return [*QUIET, "-Xlog:cds*=off:stderr", f"-XX:ArchiveClassesAtExit={_part(path)}"]
    return [*QUIET, f"-XX:SharedArchiveFile={path}"] if path.exists() else []


@contextmanager
def make(*paths: Path) -> Iterator[bool]:
    """Let the block run, and stop in good order, each program whose archive is among *paths*; False: all are there."""
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)
    with paths[0].with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [path for path in paths if not path.exists()]
        _writing.update(missing)
        try:
            yield bool(missing)
        finally:
            _writing.difference_update(missing)
        for path in missing:
            _part(path).replace(path)


def _part(path: Path) -> Path:
    return path.with_suffix(".part")
