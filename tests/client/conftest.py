"""A fake cluster for every test that wants one."""

import pytest
import trio

from .fake import Cluster


@pytest.fixture
async def cluster(nursery: trio.Nursery) -> Cluster:
    return Cluster(nursery)


@pytest.fixture
async def two_brokers(nursery: trio.Nursery) -> Cluster:
    return Cluster(nursery, brokers=2)
