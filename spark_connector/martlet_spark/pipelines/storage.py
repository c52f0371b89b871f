"""Directories of an archive that executors write and read through Arrow: local, or in S3-compatible stores.

S3 credentials come from the environment of each process, or from the machine's role. The location has the store's
address only if it is not Amazon's.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar, final
from urllib.parse import quote, urlencode, urlsplit
from uuid import uuid4

import pyarrow.fs as pafs

from martlet.runtime.fsync import fsync_path
from martlet_spark.errors import PipelineError

__all__ = ["Location", "each_of", "is_remote", "read_whole", "write_whole"]

Item = TypeVar("Item")
Result = TypeVar("Result")

S3: Final = "s3://"
ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


# Concurrent requests to a store; each takes 10 to 50 ms.
THREADS: Final = 16
KEYS: Final = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


def is_remote(path: str) -> bool:
    """Whether only Spark can read *path*, such as ``hdfs://`` or ``s3a://``."""
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*:", path) is not None and not path.startswith((S3, "file:"))


def each_of(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of *function* for *items*, called concurrently, as each waits for the store."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(function, items))


def read_whole(filesystem: pafs.FileSystem, path: str) -> str | None:
    """Return the text of the small file *path*; None if there is none."""
    try:
        with filesystem.open_input_stream(path) as stream:
            return str(stream.read(), "utf-8")
    except FileNotFoundError:
        return None


def write_whole(filesystem: pafs.FileSystem, path: str, data: bytes) -> None:
    """Write a small file durably and atomically: after a crash it has all of *data* or its old content."""
    is_local = isinstance(filesystem, pafs.LocalFileSystem)  # an object of S3 appears when it is complete
    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.{uuid4().hex}" if is_local else path
    filesystem.create_dir(folder)
    with filesystem.open_output_stream(temporary) as stream:
        stream.write(data)
    if is_local:
        fsync_path(temporary)
        filesystem.move(temporary, path)
        fsync_path(folder)


def _first(names: tuple[str, ...]) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


@final
@dataclass(frozen=True, slots=True)
class Location:
    """A directory: a local path, or ``s3://BUCKET/PREFIX``."""

    path: str
    endpoint: str = ""  # URL of an S3-compatible store; Amazon's, if empty
    region: str = ""

    @classmethod
    def of(cls, path: str) -> "Location":
        """Return the location *path*; for S3, the store's address comes from the environment of this process."""
        if path.startswith(S3):
            return cls(path.rstrip("/"), _first(ENDPOINTS), _first(REGIONS) or "us-east-1")
        return cls(os.path.abspath(path.removeprefix("file://").removeprefix("file:")))

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> "Location":
        """Return the location that `options` has encoded."""
        return cls(options["path"], options["endpoint"], options["region"])

    @property
    def options(self) -> dict[str, str]:
        """This location as options of a data source."""
        return {"path": self.path, "endpoint": self.endpoint, "region": self.region}

    @property
    def is_s3(self) -> bool:
        return self.path.startswith(S3)

    def open(self) -> tuple[pafs.FileSystem, str]:
        """Return the file system, and the path of the directory in it."""
        if not self.is_s3:
            return pafs.LocalFileSystem(), self.path
        values = {"region": self.region}
        if self.endpoint:
            address = urlsplit(self.endpoint)
            values |= {"scheme": address.scheme, "endpoint_override": address.netloc}
        filesystem, path = pafs.FileSystem.from_uri(f"{self.path}?{urlencode(values, quote_via=quote)}")
        return filesystem, path

    @contextmanager
    def plain_errors(self) -> Iterator[None]:
        """Turn an error of the file system into a sentence.

        Raises:
          PipelineError: the location cannot be read or written.
        """
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error).splitlines()[0]
            what = f"set {KEYS} to keys that may use the bucket, and AWS_ENDPOINT_URL if the store is not Amazon's"
            advice = what if self.is_s3 else "give a directory that can be used"
            raise PipelineError(f"{self.path!r} cannot be used: {why}; {advice}") from error

    @property
    def delta_options(self) -> dict[str, str]:
        """The storage options of deltalake."""
        if not self.is_s3:
            return {}
        options = {"aws_region": self.region}
        if self.endpoint:
            options |= {"aws_endpoint_url": self.endpoint}
        if self.endpoint.startswith("http://"):
            options |= {"aws_allow_http": "true"}
        return options
