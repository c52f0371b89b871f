"""Directories of an archive that executors write and read through Arrow: local ones, and those of S3-compatible stores.

S3's credentials come from the environment of each process, or from the machine's role; only the address of a store that
is not Amazon's is part of the location.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final
from urllib.parse import quote, urlencode, urlsplit

import pyarrow.fs as pafs

__all__ = ["Location"]

S3: Final = "s3://"
ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")


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
        """Return the location *path*; for S3, the environment of this process says which store."""
        if path.startswith(S3):
            return cls(path.rstrip("/"), _first(ENDPOINTS), _first(REGIONS) or "us-east-1")
        return cls(os.path.abspath(path.removeprefix("file://")))

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> "Location":
        """Return the location of `options`."""
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
