"""Sessions that end while something fails: what their protocol stores with the end is stored once, or tried again."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from errno import ENOSPC
from random import Random

import pytest
from tests.delivery.pushing import broker_in_memory
from tests.sessions.session_talk import Client, durable, said, sweep
from trio.testing import MockClock, wait_all_tasks_blocked

from martlet.broker import Broker
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.sessions.session import JointChanges
from martlet.settings import DeliveryConfig
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import ManualClock

FULL = OSError(ENOSPC, "No space left on device")


@asynccontextmanager
async def telling(disk: FakeDisk, clock: ManualClock, delivery: DeliveryConfig | None = None) -> AsyncIterator[Broker]:
    """A broker whose protocol publishes the data of a session that ends, in topic "t"."""
    async with broker_in_memory(disk, clock=clock, delivery=delivery) as broker:
        broker.topics.ensure("t", 1)

        def tell(changes: JointChanges) -> None:
            broker.publish_all([Message("t", changes.state.data, queue_id=0)], atomic=True, notes=changes.notes)
            changes.apply()

        broker.sessions.expiry.ending["toy"] = tell
        await wait_all_tasks_blocked()  # the sweep at the start
        yield broker


def count(broker: Broker) -> int:
    """How many messages were published."""
    queue = broker.store.queues.find("t", 0)
    return queue.next_offset if queue is not None else 0


def lose_commit(broker: Broker, disk: FakeDisk) -> None:
    disk.fail_next("write", ENOSPC)
    with pytest.raises(Refused):
        broker.store.committer.commit()
    broker.store.upkeep.retention.look()  # there is room again


async def away(broker: Broker, clock: ManualClock) -> Client:
    """Return a client whose session has expired."""
    client = Client(broker)
    session = client.open(expiry_s=10)
    session.keep(b"will")
    session.leave()
    await durable(broker)
    clock.ms += 11_000
    return client


async def test_a_session_whose_end_was_lost_ends_again() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with telling(disk, clock) as broker:
        client = await away(broker, clock)
        steps = broker.sessions.expiry.sweep()
        assert list(steps) == []
        assert count(broker) == 1
        lose_commit(broker, disk)
        assert count(broker) == 0
        await sweep(broker)
        assert (count(broker), client.stored()) == (1, None)
        await sweep(broker)
        assert count(broker) == 1


async def test_a_session_is_not_ended_twice_before_its_end_is_stored() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with telling(disk, clock) as broker:
        client = await away(broker, clock)
        for _ in range(2):
            assert list(broker.sessions.expiry.sweep()) == []
        assert broker.sessions.find("toy", client.name) == (None, False)
        _, existed = client.attach()
        assert (existed, count(broker)) == (False, 1)
        await durable(broker)
        assert client.lost == []


async def test_who_opens_a_session_that_has_expired_ends_it_first() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with telling(disk, clock) as broker:
        client = await away(broker, clock)
        _, existed = client.attach()
        assert (existed, count(broker)) == (False, 1)
        lose_commit(broker, disk)
        assert count(broker) == 0
        session, existed = client.attach()
        assert (existed, count(broker), session.data) == (False, 1, b"")
        await durable(broker)
        assert said(client.stored()) == said(session)


@pytest.mark.parametrize("is_opened", [True, False])
async def test_a_session_that_cannot_end_yet_keeps_what_it_has(is_opened: bool) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with telling(disk, clock) as broker:
        client, tell = await away(broker, clock), broker.sessions.expiry.ending["toy"]
        other = Client(broker, "other")
        other.open(expiry_s=1).leave()
        await durable(broker)
        clock.ms += 2_000

        def refuse(changes: JointChanges) -> None:
            if changes.state.key.endswith(client.name):
                raise Refused(Reason.BUSY, "not now")
            tell(changes)

        broker.sessions.expiry.ending["toy"] = refuse
        if is_opened:
            with pytest.raises(Refused, match="not now"):
                client.attach()
        await sweep(broker)
        stored = client.stored()
        assert stored is not None
        assert stored.data == b"will"
        assert other.stored() is None, "others end all the same"
        broker.sessions.expiry.ending["toy"] = tell
        await sweep(broker)
        assert (count(broker), client.stored()) == (2, None)


@pytest.mark.parametrize("expiry_s", [0, 100])
async def test_a_client_that_left_when_nothing_could_be_stored_is_noted_later(expiry_s: int) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with telling(disk, clock) as broker:
        client = Client(broker)
        session = client.open(expiry_s=expiry_s)
        where = [77]
        session.where = lambda: where[0]
        session.keep(b"will")
        await durable(broker)
        broker.store.admission.refuse_full(FULL)
        session.leave()
        where[0] = 99  # of a client that is gone
        await sweep(broker)
        assert broker.sessions.table.ends_ms("toy client ä/1") == 0
        assert broker.sessions.find("toy", client.name)[1] is False
        broker.store.upkeep.retention.look()
        await sweep(broker)
        if expiry_s:
            stored = client.stored()
            assert stored is not None
            assert (stored.position, stored.ends_ms) == (77, clock.ms + 100_000)
        else:
            assert (count(broker), client.stored()) == (1, None)


@pytest.mark.parametrize("is_killed", [True, False])
async def test_a_session_that_expires_at_once_is_not_found_after_its_connection(is_killed: bool) -> None:
    """The end of the connection could not be stored."""
    disk, clock = FakeDisk(), ManualClock()
    async with telling(disk, clock) as broker:
        client = Client(broker)
        session = client.open(expiry_s=0)
        session.keep(b"will")
        session.subscribe("a")
        await durable(broker)
        if is_killed:
            disk = disk.after_power_cut(Cut.KILLED, Random(1))
        else:
            broker.store.admission.refuse_full(FULL)
            session.leave()
            broker.store.upkeep.retention.look()
            session, existed = client.attach()
            assert (existed, count(broker), dict(session.filters)) == (False, 1, {})
    if is_killed:
        async with telling(disk, clock) as broker:
            session, existed = Client(broker).attach()
            assert (existed, count(broker), dict(session.filters)) == (False, 1, {})


async def test_changes_lost_with_a_segment_that_could_not_begin_are_noticed() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with telling(disk, clock) as broker:
        client = Client(broker)
        session = client.open()
        session.keep(b"will")
        session.leave()
        await durable(broker)
        changes = broker.sessions.changes_without_client("toy", client.name)
        assert changes is not None
        changes.keep(b"")
        broker.publish_all([Message("t", b"x", queue_id=0)], atomic=True, notes=changes.notes)
        changes.apply()
        disk.fail_next("write", ENOSPC)
        results = broker.publish_all([Message("t", bytes(1000), queue_id=0)] * 10).outcomes()
        assert isinstance(results[-1], Refused), "another segment could not begin"
        with pytest.raises(Refused):
            broker.store.committer.commit()
        broker.store.upkeep.retention.look()
        broker.sessions.writer.find_lost()
        state, _ = broker.sessions.find("toy", client.name)
        assert state is not None
        assert state.data == b"will"


async def test_a_session_is_not_opened_before_it_is_known_what_a_failed_commit_left_of_it(
    mock_clock: MockClock,
) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, flush="sync") as broker:
        client = Client(broker)
        session = client.open()
        await durable(broker)
        session.keep(b"written")
        broker.store.committer.commit()
        session.keep(b"lost")
        lose_commit(broker, disk)
        assert not broker.sessions.is_settled("toy", client.name)
        with pytest.raises(Refused, match="connect again") as caught:
            client.attach()
        assert caught.value.reason is Reason.UNAVAILABLE
        assert broker.sessions.is_settled("toy", "another")
        await durable(broker)
        assert broker.sessions.is_settled("toy", client.name)
        assert client.open().data == b"written"
        assert broker.sessions.writer.restored == {}


@pytest.mark.parametrize(
    ("limits", "size", "keep"),
    [
        ({}, 4097, lambda broker: Client(broker).open().keep),
        ({"session_bytes_max": 1024}, 1000, lambda broker: Client(broker).open().keep),
        ({"sessions_bytes_max": 1024}, 1000, lambda broker: Client(broker).open().keep),
        ({"session_bytes_max": 1024}, 1000, lambda broker: Client(broker).open().changes().keep),
    ],
)
async def test_the_data_of_sessions_has_limits(
    limits: dict[str, int], size: int, keep: Callable[[Broker], Callable[[bytes], None]]
) -> None:
    async with broker_in_memory(delivery=DeliveryConfig(**limits), segment_bytes=1 << 16) as broker:
        Client(broker, "before").open()
        await durable(broker)
        with pytest.raises(Refused, match="data") as caught:
            keep(broker)(bytes(size))
        assert caught.value.reason is (Reason.BUSY if limits else Reason.ILLEGAL)
        session = Client(broker).open()
        session.keep(bytes(200))
        session.keep(bytes(200))
        session.keep(b"less")


async def test_a_state_that_was_looked_at_can_be_changed_without_an_effect() -> None:
    async with broker_in_memory() as broker:
        client = Client(broker)
        session = client.open()
        session.subscribe("a")
        session.leave()
        await durable(broker)
        for _ in range(2):
            state = client.stored()
            assert state is not None
            assert (list(state.filters), state.data) == (["a"], b"")
            state.filters["b"] = b""
            state.data = b"changed"
        session = client.open()
        session.unsubscribe("a")
        session.leave()
        await durable(broker)
        state = client.stored()
        assert state is not None
        assert not state.filters
