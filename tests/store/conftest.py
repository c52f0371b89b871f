"""Small stores: segments and pages of a few KiB, so that every border is met."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from martlet.store import Disk, Store, StoreConfig
from martlet.testing.stores import HOST, ManualClock, small_config

OpenStore = Callable[..., Awaitable[Store]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def open_store(tmp_path: Path, clock: ManualClock) -> AsyncIterator[OpenStore]:
    """Open stores in one directory, and crash those that are still open at the end."""
    opened: list[Store] = []

    async def open_one(config: StoreConfig | None = None, disk: Disk | None = None) -> Store:
        store = await Store.open(tmp_path / "store", config or small_config(), clock, disk)
        store.writer.store_host = HOST
        opened.append(store)
        return store

    yield open_one
    for store in opened:
        store.crash()
