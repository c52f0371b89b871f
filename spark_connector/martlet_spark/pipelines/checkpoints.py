"""The checkpoint, Spark's directory for a query's progress: binds it to options, and reads offsets from it.

The directory may be on any file system that Spark reads, so it is read and written through the JVM.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from martlet_spark.errors import OptionError
from martlet_spark.read.offsets import Offsets, decode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["bind", "check_bound", "exists", "qualified", "query_of", "read_offsets", "read_text", "write_text"]

NOTE: Final = "martlet.json"


def check_bound(session: "SparkSession", checkpoint: str, what: str, chosen: Mapping[str, object]) -> None:
    """Check that *checkpoint* was bound to the options *chosen* now, unless its query has not planned a batch yet.

    A checkpoint records the progress of its query, not its options. With another selection the query would skip
    messages that were not selected before; with another target it would leave out messages that the first target has.

    Raises:
      OptionError: the checkpoint was bound to other options, or is another program's.
    """
    old_options, new_options = _bound(session, checkpoint), _given(chosen)
    if old_options == new_options or _last_batch(session, f"{checkpoint}/offsets") is None:
        return
    if old_options is None:
        text = f"checkpoint {checkpoint!r} belongs to another query, or its file {NOTE} was removed"
        raise OptionError(f"{text}; give another checkpoint, which begins from the start")
    changed_names = [
        name for name in sorted({*old_options, *new_options}) if old_options.get(name) != new_options.get(name)
    ]
    old_values = ", ".join(
        f"{name} {old_options[name]!r}" if old_options.get(name) else f"no {name}" for name in changed_names
    )
    text = f"checkpoint {checkpoint!r} belongs to a {what} with {old_values}"
    raise OptionError(f"{text}; give the same, or another checkpoint, which begins from the start")


def bind(session: "SparkSession", checkpoint: str, chosen: Mapping[str, object]) -> None:
    """Store the options *chosen* in *checkpoint*, for `check_bound`; call it before the query begins.

    An equal note is not written again: a run that is killed while it writes a note leaves none.
    """
    given = _given(chosen)
    if _bound(session, checkpoint) != given:
        write_text(session, f"{checkpoint}/{NOTE}", json.dumps(given, indent=1))


def _bound(session: "SparkSession", checkpoint: str) -> dict[str, Any] | None:
    """Return the options that *checkpoint* was bound to; None if it is not bound."""
    return _parsed(read_text(session, f"{checkpoint}/{NOTE}"))


def _given(chosen: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in chosen.items() if value}


def query_of(session: "SparkSession", checkpoint: str) -> str:
    """Return the id of the query of *checkpoint*; empty if none has used it."""
    found = _parsed(read_text(session, f"{checkpoint}/metadata"))
    return found["id"] if found else ""


def read_offsets(session: "SparkSession", checkpoint: str) -> Offsets:
    """Return the end offsets of the last batch of *checkpoint* that is known to be complete."""
    last = _last_batch(session, f"{checkpoint}/commits")
    text = read_text(session, f"{checkpoint}/offsets/{last}") if last is not None else None
    return decode(json.loads(text.splitlines()[-1])) if text else {}


def _last_batch(session: "SparkSession", folder: str) -> int | None:
    """Return the number of the last batch that has a file in *folder*; None if none has."""
    path, files = _of(session, folder)
    if not files.exists(path):
        return None
    names = [status.getPath().getName() for status in files.listStatus(path)]
    return max((int(name) for name in names if name.isdecimal()), default=None)


def qualified(session: "SparkSession", path: str) -> str:
    """Return *path* with its file system unless that is local or S3: some clusters give Spark a default one."""
    if path.startswith("s3://"):
        return path
    file, files = _of(session, path)
    whole = str(files.makeQualified(file).toString())
    return path if whole.startswith("file:") else whole


def exists(session: "SparkSession", path: str) -> bool:
    """Whether *path* is a file or a directory."""
    file, files = _of(session, path)
    return bool(files.exists(file))


def read_text(session: "SparkSession", path: str) -> str | None:
    """Return the text of a file; None if there is none."""
    file, files = _of(session, path)
    if not files.exists(file):
        return None
    stream = files.open(file)
    try:
        text: str = session._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8")  # type: ignore[union-attr]
    finally:
        stream.close()
    return text


def write_text(session: "SparkSession", path: str, text: str) -> None:
    """Write a file; replace an existing one."""
    file, files = _of(session, path)
    stream = files.create(file, True)
    try:
        stream.write(bytearray(text.encode()))
    finally:
        stream.close()


def _of(session: "SparkSession", path: str) -> tuple[Any, Any]:
    """Return Hadoop's objects for *path* and its file system."""
    jvm: Any = session._jvm
    file = jvm.org.apache.hadoop.fs.Path(path)
    return file, file.getFileSystem(session._jsc.hadoopConfiguration())


def _parsed(text: str | None) -> dict[str, Any] | None:
    """Return the JSON object in *text*; None if it is incomplete, as after a run that was killed while it wrote."""
    try:
        value = json.loads(text or "")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
