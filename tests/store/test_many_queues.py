"""Retention with very many queues: other tasks run in between, and concurrent reads get correct answers."""

import logging

import pytest
import trio
from tests.store.conftest import OpenStore
from trio.testing import MockClock

from martlet.store import ReadStatus, Store
from martlet.store.upkeep import retention as module
from martlet.testing.stores import bodies, message, small_config

QUEUES = 40


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADVANCED_AT_ONCE", 8)
    monkeypatch.setattr(module, "ADVANCED_A_TURN", 8)


async def filled(open_store: OpenStore) -> Store:
    """A store whose oldest segment was just removed."""
    store = await open_store(small_config(flush="async"))
    for number in range(3):
        for queue_id in range(QUEUES):
            store.writer.append(message(b"%d" % number + b"x" * 100), queue_id)
    store.committer.commit()
    store.flusher.flush_now()
    await store.upkeep.checkpointer.checkpoint()
    store.segments.remove_first()
    store.upkeep.retention._update_after_removal()
    return store


def behind(store: Store) -> int:
    start = store.first_position
    return sum(0 <= store.queues.position_at(queue, queue.first_offset) < start for queue in store.queues.all())


async def test_queues_follow_a_few_at_a_time(open_store: OpenStore, autojump_clock: MockClock) -> None:
    store = await filled(open_store)
    before = behind(store)
    assert before > 8
    first_offsets = store.upkeep.retention._first_offsets
    assert first_offsets.advance(8)
    assert len(first_offsets._behind) == QUEUES - 8
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.upkeep.retention.run)
        await trio.sleep(1)
        assert behind(store) == 0
        nursery.cancel_scope.cancel()


async def test_a_read_of_removed_messages_returns_where_to_continue(open_store: OpenStore) -> None:
    store = await filled(open_store)
    queue = store.queue("T", 0)
    assert queue.first_offset == 0
    result = store.readers.read(queue, 0, 1, 1000)
    assert result.status in (ReadStatus.REMOVED, ReadStatus.TOO_SMALL)
    assert result.next_offset > 0
    assert [body[:1] for body in bodies(store.readers.read(queue, 1, 9, 9000).pieces)] == [b"1", b"2"]


async def test_a_stop_right_after_it_leaves_nothing_to_rebuild(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = await filled(open_store)
    await store.close()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        store = await open_store(small_config(flush="async"))
    assert caplog.text == ""
    assert behind(store) == 0
