"""One S3 server for all tests, and a place in it or in a directory for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from .cold import Tier, new_prefix
from .stores import ENVIRON, Faulty, faulty_server, make_bucket, s3_process


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """The URL of an S3 server that has the bucket ``lake``."""
    with s3_process() as url:
        make_bucket(url, "lake")
        yield url


@pytest.fixture
def s3_tier(s3_url: str) -> Tier:
    return Tier(f"s3://lake/{new_prefix()}", {"endpoint": s3_url}, ENVIRON)


@pytest.fixture
def local_tier(tmp_path: Path) -> Tier:
    return Tier(str(tmp_path / "tier"))


@pytest.fixture(params=["s3", "local"])
def tier(request: pytest.FixtureRequest) -> Tier:
    """A place in an S3 server, and a local directory."""
    found: Tier = request.getfixturevalue(f"{request.param}_tier")
    return found


@pytest.fixture(params=["s3", "local"])
def atomic_tier(request: pytest.FixtureRequest) -> Tier:
    """The same for concurrent writers."""
    found: Tier = request.getfixturevalue("local_tier" if request.param == "local" else "faulty_tier")
    return found


@pytest.fixture
def faulty(s3_url: str) -> Iterator[Faulty]:
    """A server before the S3 server."""
    with faulty_server(s3_url) as server:
        yield server


@pytest.fixture
def faulty_tier(faulty: Faulty) -> Tier:
    """A place in the S3 server, behind the faulty one, which has no faults yet."""
    return Tier(f"s3://lake/{new_prefix()}", {"endpoint": faulty.url}, ENVIRON)
