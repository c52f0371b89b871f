"""What outlives a connection: names, filters, positions and what is in flight, whose it is, and when it ends."""

import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import ENOSPC
from pathlib import Path
from random import Random
from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from tests.delivery.pushing import broker_in_memory, publish
from tests.sessions.session_talk import Client, durable, said, sweep
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.errors import Reason, Refused, StoreError
from martlet.message import Message
from martlet.records.layout import record_views
from martlet.runtime.checksum import crc32
from martlet.runtime.steps import finish_now
from martlet.sessions.expiry import DISTANCE_BYTES, SessionExpiry
from martlet.sessions.journal_codec import (
    ACKNOWLEDGED,
    ATTACHED,
    BEGIN,
    DATA,
    ENDED,
    FILTER,
    HEAD,
    HELD,
    INDEPENDENT,
    LEFT,
    MOVED,
    NEVER_MS,
    NO_FILTER,
    NO_MESSAGE,
    PROGRESS,
    SENT,
    WHOLE,
    SessionState,
    decode_note,
    encode_note,
    encode_sent,
    encode_whole,
    first_number,
    packed_position,
)
from martlet.sessions.session import JointChanges, Session
from martlet.sessions.state import SessionTable
from martlet.settings import DeliveryConfig
from martlet.state.journal import NEXT_COMMIT
from martlet.testing import disk as disk_module
from martlet.testing.clock import TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import ManualClock, small_config

POSITIONS = st.integers(0, 1 << 50)
SNAPSHOT = "/data/config/sessions.snapshot"


@asynccontextmanager
async def brokers(disk: FakeDisk, clock: ManualClock, **options: Any) -> AsyncIterator[Broker]:
    """A broker whose sessions expire only when a test calls `sweep`; a sweep of its own might come at any time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SessionExpiry, "run", staticmethod(trio.sleep_forever))
        async with broker_in_memory(disk, clock=clock, **options) as broker:
            yield broker


async def subscribed(broker: Broker) -> tuple[Client, Session]:
    """Return a client and its session, which has filter "a" on the disk."""
    client = Client(broker)
    session = client.open()
    session.subscribe("a")
    await durable(broker)
    return client, session


async def test_a_name_is_new_once_and_known_afterwards() -> None:
    async with broker_in_memory() as broker:
        client = Client(broker)
        session, existed = client.attach(position=7)
        assert not existed
        assert (session.name, session.position, session.is_stored) == ("client ä/1", 7, True)
        assert session.until == NEXT_COMMIT
        session.leave()
        again, existed = client.attach(position=99)
        assert existed
        assert again.position == 7


async def test_a_session_without_a_name_ends_with_its_connection() -> None:
    async with broker_in_memory() as broker:
        client = Client(broker, name="")
        session, existed = client.attach(position=5)
        session.subscribe("a/#", b"1")
        session.hand_out(1, [5, 8], 9)
        session.acknowledge(1)
        assert dict(session.flight) == {2: 8}
        assert (existed, session.until, session.is_stored) == (False, 0, False)
        changes = session.changes()
        changes.acknowledge(2)
        changes.apply()
        assert (changes.notes, dict(session.flight)) == ([], {})
        session.leave()
        session.end()
        await durable(broker)
        assert len(broker.sessions) == 0
        assert broker.store.queues.find(broker.sessions.journal.topic, 0) is None


async def test_a_client_with_the_name_of_an_attached_one_takes_over() -> None:
    async with broker_in_memory() as broker:
        first, second = Client(broker), Client(broker)
        old = first.open()
        old.subscribe("a")
        old.where = lambda: 1234
        new = second.open()
        assert first.lost == ["another connection uses the name"]
        assert new.position == 1234, "the first client has everything before that"
        old.subscribe("b")  # its own is no longer its own
        old.leave()
        old.end()
        with pytest.raises(Refused) as caught:
            old.changes()
        assert caught.value.reason is Reason.NOT_FOUND
        assert list(new.filters) == ["a"]
        await durable(broker)
        assert said(second.stored()) == said(new)
        third = Client(broker)
        third.open()
        assert first.lost == ["another connection uses the name"]
        assert len(second.lost) == 1


async def test_where_a_client_was_is_not_asked_after_it_has_left() -> None:
    """Its cursor is closed by then."""
    async with broker_in_memory() as broker:
        client = Client(broker)
        session = client.open()
        session.where = lambda: 1234
        session.leave()
        session.where = lambda: 9999
        assert client.open().position == 1234


async def test_a_name_belongs_to_the_identity_that_created_it() -> None:
    async with broker_in_memory() as broker:
        ada = Client(broker, owner="ada")
        ada.open()
        with pytest.raises(Refused, match="belongs to somebody else") as caught:
            Client(broker, owner="bob").open()
        assert caught.value.reason is Reason.NO_PERMISSION
        assert ada.lost == []


async def test_protocols_have_names_of_their_own() -> None:
    async with broker_in_memory() as broker:
        one, other = Client(broker), Client(broker, protocol="mqtt")
        one.open().subscribe("a")
        session, existed = other.attach()
        assert not existed
        assert not session.filters
        assert one.lost == []
        with pytest.raises(ValueError, match="contains a space"):
            Client(broker, protocol="two words").open()


@pytest.mark.parametrize("name", ["x", " ", "a b", "Ω" * 512, "nul\x00", "\n", "日本語/😀"])
async def test_any_text_is_a_name(name: str) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock, segment_bytes=1 << 16) as broker:
        session = Client(broker, name).open()
        assert session.name == name
        session.subscribe(name, name.encode())
        session.leave()
    async with brokers(disk, clock, segment_bytes=1 << 16) as broker:
        session, existed = Client(broker, name).attach()
        assert existed
        assert dict(session.filters) == {name: name.encode()}


async def test_a_name_has_a_limit() -> None:
    async with broker_in_memory() as broker:
        with pytest.raises(Refused, match="has 1026 bytes; shorten it to 1024") as caught:
            Client(broker, "Ω" * 513).open()
        assert caught.value.reason is Reason.ILLEGAL


@pytest.mark.parametrize("snapshot", [True, False])
async def test_everything_is_there_after_a_restart(snapshot: bool) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        session = Client(broker, owner="ada").open(position=3)
        for number in range(50):
            session.subscribe(f"filter/{number}/#", b"%d" % number)
        session.unsubscribe("filter/7/#")
        session.unsubscribe("never there")
        session.hand_out(1, [10, 20, 30], 40)
        session.acknowledge(2)
        session.hand_out(9, [40], 41)
        session.hand_out(100, [NO_MESSAGE], 41)
        session.keep(b"of the protocol")
        session.move(50)
        before = said(session)
        session.leave()
    if not snapshot:
        disk.unlink(SNAPSHOT)
    for _ in range(2):
        async with brokers(disk, clock) as broker:
            session, existed = Client(broker, owner="ada").attach()
            assert existed
            assert said(session) == before
            assert session.flight == {1: 10, 3: 30, 9: 40, 100: NO_MESSAGE}
            assert (session.start, session.position, session.next_id) == (10, 50, 101)


async def test_a_session_outlives_a_broker_that_was_killed() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client = Client(broker)
        client.open().subscribe("a")
        await durable(broker)
        copy = disk.after_power_cut(disk_module.Cut.KILLED, Random(1))
    async with brokers(copy, clock) as broker:
        client = Client(broker)
        assert client.stored() is not None
        clock.ms += 99_000
        await sweep(broker)  # the client is seen to be away
        clock.ms += 99_000
        await sweep(broker)
        assert len(broker.sessions) == 1
        clock.ms += 2_000
        await sweep(broker)
        assert len(broker.sessions) == 0


# limits


def subscribe_all(session: Session, count: int) -> None:
    for number in range(count):
        session.subscribe(f"{number:03}")


async def test_sessions_and_filters_have_limits() -> None:
    config = DeliveryConfig(sessions_max=1, session_bytes_max=1024)
    async with broker_in_memory(delivery=config) as broker:
        session = Client(broker).open()
        await durable(broker)
        with pytest.raises(Refused, match=r"delivery\.sessions_max is 1") as caught:
            Client(broker, "another").open()
        assert caught.value.reason is Reason.BUSY
        with pytest.raises(Refused, match=r"delivery\.session_bytes_max is 1024") as caught:
            subscribe_all(session, 100)
        assert caught.value.reason is Reason.BUSY
        assert 5 <= len(session.filters) <= 10
        session.subscribe("000")  # which is there
        with pytest.raises(Refused, match="session_bytes_max"):
            session.subscribe("000", b"x" * 300)
        session.unsubscribe("001")
        session.subscribe("another")
        with pytest.raises(Refused, match="shorten it to 512") as caught:
            session.subscribe("x" * 600)
        assert caught.value.reason is Reason.ILLEGAL
        with pytest.raises(Refused, match="data of a session"):
            session.keep(b"x" * 300)
        before = said(session)
        await durable(broker)
        assert said(Client(broker).stored()) == before


async def test_all_sessions_together_have_a_limit() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(sessions_bytes_max=2048)) as broker:
        for number in range(7):
            Client(broker, f"client {number}").open().subscribe("filter")
            await durable(broker)
        session = Client(broker).open()
        await durable(broker)
        subscribe_all(session, 5)
        await durable(broker)
        with pytest.raises(Refused, match=r"delivery\.sessions_bytes_max allows no more filters"):
            session.subscribe("more")


async def test_sessions_that_are_not_stored_have_the_same_limits() -> None:
    config = DeliveryConfig(session_bytes_max=1024, sessions_bytes_max=4096)
    async with broker_in_memory(delivery=config) as broker:
        sessions = [Client(broker, "").open() for _ in range(10)]
        with pytest.raises(Refused, match=r"delivery\.session_bytes_max is 1024"):
            subscribe_all(sessions[0], 100)
        for session in sessions[1:4]:
            subscribe_all(session, 7)
        with pytest.raises(Refused, match=r"delivery\.sessions_bytes_max allows no more filters"):
            subscribe_all(sessions[4], 7)
        stored = Client(broker).open()
        with pytest.raises(Refused, match=r"delivery\.sessions_bytes_max allows no more filters"):
            subscribe_all(stored, 7)
        sessions[0].unsubscribe("000")
        stored.subscribe("000")
        for session in sessions:
            session.leave()
            session.leave()
        others = [Client(broker, "").open() for _ in range(3)]
        for session in others:
            subscribe_all(session, 7)
            session.unsubscribe("003")
            session.leave()
        assert broker.sessions.statistics()["bytes"] == 0


async def test_a_session_has_any_number_of_filters() -> None:
    """More than one note holds, also when it is noted as a whole."""
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock, segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20) as broker:
        session = Client(broker).open()
        for number in range(5000):
            session.subscribe(f"filter/{number}", b"1")
        session.hand_out(1, range(0, 100_000, 10), 100_000)
        before = said(session)
        await durable(broker)
        end = broker.store.appended
        finish_now(broker.sessions.table.roll(0, end))
        await durable(broker)
        assert broker.sessions.table.floor() >= end
        assert said(Client(broker).stored()) == before
        table = SessionTable(broker.sessions.journal.topic)
        notes = [note for state in [session.state] for note in encode_whole(state, 1 << 16)]
        assert len(notes) > 10
        assert max(map(len, notes)) <= 1 << 16
        for note in notes:
            table._apply(*decode_note(note), 0)
        assert said(table.get("toy client ä/1")) == before


# what gets lost


async def test_a_failed_commit_takes_the_session_from_its_client_at_once() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client, other, new = Client(broker), Client(broker, "other"), Client(broker, "new")
        session, others = client.open(), other.open()
        session.subscribe("a")
        await durable(broker)
        session.subscribe("lost")
        new.open()
        disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            broker.store.committer.commit()
        broker.store.upkeep.retention.look()  # there is room again
        assert client.lost == new.lost == []
        others.subscribe("b")  # whoever notes something first finds that out
        assert client.lost == new.lost == ["a disk failure lost its last changes; connect again"]
        session.subscribe("c")  # too late
        await durable(broker)
        assert (other.lost, new.stored()) == ([], None)
        assert list(client.open().filters) == ["a"]
        await durable(broker)
        assert client.lost == client.lost[:1]
        assert said(other.stored()) == said(others)


async def test_a_client_whose_notes_were_lost_keeps_what_followed_them() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client, session = await subscribed(broker)
        session.subscribe("lost")
        broker.sessions.journal._notes.clear()
        session.subscribe("b")
        await durable(broker)
        assert client.lost == ["a disk failure lost its last changes; connect again"]
        again = client.open()
        assert list(again.filters) == ["a", "b"]
        again.subscribe("d")
        await durable(broker)
        assert list(said(client.stored())["filters"]) == ["a", "b", "d"]


# Notes after a lost one: kind, arguments, and what they change.
AFTER_A_GAP: dict[str, tuple[int, list[Any], dict[str, Any]]] = {
    "moved": (MOVED, [90], {}),
    "sent": (SENT, encode_sent(5, [70], 90), {}),
    "sent, in an atomic group": (
        SENT | INDEPENDENT,
        encode_sent(5, [70], 90),
        {"flight": {1: 10, 5: 70}, "next_id": 6},
    ),
    "the progress of a filter": (PROGRESS, ["a", b"2", 90], {}),
    "acknowledged": (ACKNOWLEDGED | INDEPENDENT, [1, 1], {"flight": {}, "start": 50}),
    "held": (HELD | INDEPENDENT, [8, 1], {"flight": {1: 10, 8: NO_MESSAGE}}),
    "a filter": (FILTER | INDEPENDENT, ["b", b"", 90], {"filters": {"a": b"", "b": b""}}),
    "a filter with a beginning": (
        FILTER | INDEPENDENT,
        ["b", b"", 90, 90],
        {"filters": {"a": b"", "b": b""}, "begins": {"a": 55, "b": 90}},
    ),
    "a filter that is changed": (FILTER | INDEPENDENT, ["a", b"1", 90], {"filters": {"a": b"1"}}),
    "no filter": (NO_FILTER | INDEPENDENT, ["a"], {"filters": {}, "begins": {}}),
    "data": (DATA | INDEPENDENT, [b"new", crc32(b"")], {"data": b"new"}),
    "data that replaced lost data": (DATA | INDEPENDENT, [b"new", crc32(b"lost")], {}),
    "connected": (ATTACHED | INDEPENDENT, [90, 7], {}),
    "left": (LEFT | INDEPENDENT, [90, 12], {}),
    "acknowledged, as an earlier version wrote it": (ACKNOWLEDGED, [1, 1], {}),
    "a filter, as an earlier version wrote it": (FILTER, ["b", b"", 90], {}),
    "ended, as an earlier version wrote it": (ENDED, [], {}),
}


@pytest.mark.parametrize("case", AFTER_A_GAP)
def test_notes_after_lost_ones(case: str) -> None:
    kind, arguments, changed = AFTER_A_GAP[case]
    table = SessionTable("journal")
    lost: list[str] = []
    table.on_lost = lambda key, _: lost.append(key)

    def apply(number: int, kind: int, *arguments: Any) -> None:
        table._apply(kind, "toy me", number, list(arguments), 0)

    apply(3, BEGIN, "ada", 0, 100)
    apply(4, FILTER, "a", b"", 0, 55)
    apply(5, SENT, *encode_sent(1, [10], 50))
    before = said(table.get("toy me"))
    apply(7, kind, *arguments)
    assert lost == ["toy me"]
    assert said(table.get("toy me")) == before | changed
    assert table.ends_ms("toy me") == (12 if kind == LEFT | INDEPENDENT else 0)
    apply(6, MOVED, 60)  # the broker continued from the last note before the gap
    assert lost == ["toy me"]
    assert table.position("toy me") == (60, False)
    apply(6, DATA | INDEPENDENT, b"repeated", crc32(b""))
    apply(first_number(6), DATA | INDEPENDENT, b"of another session", crc32(b""))
    assert lost == ["toy me"] * 3
    assert said(table.get("toy me"))["data"] == changed.get("data", b"")


def test_the_end_of_a_session_after_lost_notes() -> None:
    table = SessionTable("journal")
    table._apply(BEGIN, "toy me", 0, ["ada", 0, 100], 0)
    table._apply(ENDED | INDEPENDENT, "toy me", 2, [], 0)
    assert table.get("toy me") is None
    assert (len(table), table.bytes) == (0, 0)


async def test_a_session_whose_beginning_was_lost_is_not_the_one_before_it() -> None:
    """The first note after a lost one must not follow the notes of an older session by chance."""
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client = Client(broker)
        client.open(expiry_s=10).leave()
        await durable(broker)
        old = said(client.stored())
        clock.ms += 11_000
        session, existed = client.attach()
        assert not existed
        broker.sessions.journal._notes.clear()
        session.subscribe("b")
        await durable(broker)
        assert len(client.lost) == 1
        assert said(client.stored()) == old


async def test_a_full_disk_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock, disk_full_ratio=0.9) as broker:
        client, session = await subscribed(broker)
        before = said(session)
        disk.used_ratio = 0.95
        broker.store.upkeep.retention.look()
        for change in (
            lambda: session.subscribe("b"),
            lambda: session.unsubscribe("a"),
            lambda: session.hand_out(1, [5], 6),
            lambda: session.move(77),
            lambda: session.keep(b"x"),
            session.end,
            Client(broker, "another").open,
        ):
            with pytest.raises(Refused):
                change()
            assert said(session) == before
        session.leave()  # the client is gone, whatever the disk says
        disk.used_ratio = 0.1
        broker.store.upkeep.retention.look()
        await sweep(broker)
        assert said(client.stored()) == before
        assert broker.sessions.table.ends_ms("toy client ä/1") == clock.ms + 100_000


async def test_a_client_that_left_while_its_commit_failed_is_forgotten_by_a_sweep() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client, session = await subscribed(broker)
        session.leave()
        broker.sessions.journal._notes.clear()  # as a commit that failed
        await sweep(broker)
        assert broker.sessions.statistics()["attached"] == 0
        await sweep(broker)
        await sweep(broker)
        assert broker.sessions.table.ends_ms("toy client ä/1") == clock.ms + 100_000
        assert list(client.open().filters) == ["a"]
        assert client.lost == []


async def test_the_session_of_a_busy_client_is_noted_again_when_its_last_notes_were_lost() -> None:
    """Retention removes the records before; what the client did later must not take the session with it."""
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client, session = await subscribed(broker)
        session.subscribe("lost")
        broker.sessions.journal._notes.clear()
        end = broker.store.appended
        finish_now(broker.sessions.table.roll(0, end))
        await durable(broker)
        await durable(broker)
        assert len(client.lost) == 1
        state = client.stored()
        assert state is not None
        assert state.since >= end
        assert list(state.filters) == ["a"]


# atomic groups


async def test_an_acknowledgement_is_stored_with_messages() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        broker.topics.ensure("t", 1)
        client = Client(broker)
        session = client.open()
        session.hand_out(1, [10, 20], 30)
        changes = session.changes()
        changes.acknowledge(1)
        changes.hold(70_000, 2)
        changes.keep(b"data")
        broker.publish_all([], atomic=True, notes=changes.notes)
        changes.apply()
        session.subscribe("a")
        await durable(broker)
        assert dict(session.flight) == {2: 20, 70_000: NO_MESSAGE, 70_001: NO_MESSAGE}
        assert said(client.stored()) == said(session)
        assert client.lost == []


async def test_a_session_is_lost_with_an_acknowledgement_whose_messages_were_not_stored() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client = Client(broker)
        session = client.open()
        session.hand_out(1, [10, 20], 30)
        await durable(broker)
        changes = session.changes()
        changes.acknowledge(1)
        broker.publish_all([], atomic=True, notes=changes.notes)
        changes.apply()
        disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            broker.store.committer.commit()
        broker.store.upkeep.retention.look()  # there is room again
        with pytest.raises(Refused):
            session.changes()
        assert client.lost == ["a disk failure lost its last changes; connect again"]
        assert dict(client.open().flight) == {1: 10, 2: 20}


# time


async def test_a_session_ends_when_its_client_stays_away(autojump_clock: MockClock) -> None:
    clock = TrioClock()
    async with serving_memory(clock) as broker:
        stays, leaves, never = (Client(broker, name) for name in ("stays", "leaves", "never"))
        stays.open(expiry_s=100)
        leaves.open(expiry_s=100).leave()
        never.open(expiry_s=None).leave()
        await durable(broker)
        await trio.sleep(95)
        assert len(broker.sessions) == 3
        await trio.sleep(70)
        assert leaves.stored() is None
        assert broker.sessions.table.ends_ms("toy never") == NEVER_MS
        await trio.sleep(10_000)
        assert len(broker.sessions) == 2
        assert stays.lost == []


@asynccontextmanager
async def serving_memory(clock: TrioClock, disk: FakeDisk | None = None) -> AsyncIterator[Broker]:
    store = small_config(flush="async")
    async with serving(Path("/data"), disk=disk or FakeDisk(), clock=clock, store=store) as running:
        yield running.broker


async def test_a_session_that_ended_is_not_found_before_a_sweep_has_come_by() -> None:
    clock = ManualClock()
    async with brokers(FakeDisk(), clock) as broker:
        client = Client(broker)
        session = client.open(expiry_s=10)
        session.subscribe("a")
        session.leave()
        await durable(broker)
        clock.ms += 9_999
        session, existed = client.attach(expiry_s=10)
        assert existed
        session.leave()
        clock.ms += 10_000  # its note is not even stored
        session, existed = client.attach(position=77)
        assert not existed
        assert (dict(session.filters), session.position) == ({}, 77)
        await durable(broker)
        assert said(client.stored()) == said(session)
        assert client.lost == []


async def test_a_session_that_expires_at_once_ends_with_its_connection() -> None:
    async with broker_in_memory() as broker:
        client = Client(broker)
        session = client.open(expiry_s=0)
        await durable(broker)
        assert client.stored() is not None
        session.leave()
        await durable(broker)
        assert client.stored() is None


async def test_a_session_without_a_client_can_be_changed_together_with_messages() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        client, sessions = Client(broker), broker.sessions
        assert (sessions.find("toy", client.name), sessions.changes_without_client("toy", client.name)) == (
            (None, False),
            None,
        )
        session = client.open()
        session.keep(b"will")
        assert sessions.changes_without_client("toy", client.name) is None, "its client is there"
        session.leave()
        for is_stored in (False, True):  # the note that the client left is not stored yet, and then it is
            if is_stored:
                await durable(broker)
            state, has_client = sessions.find("toy", client.name)
            assert state is not None
            assert (state.data, has_client) == (b"done" if is_stored else b"will", False)
            changes = sessions.changes_without_client("toy", client.name)
            assert changes is not None
            changes.keep(b"again" if is_stored else b"done")
            broker.publish_all([Message("t", b"x", queue_id=0)], atomic=True, notes=changes.notes)
            changes.apply()
        await durable(broker)
        stored = client.stored()
        assert stored is not None
        assert stored.data == b"again"
        session = client.open()
        assert (session.data, session.expiry_s, client.lost) == (b"again", 100, [])
        session.end()
        assert sessions.find("toy", client.name) == (None, False)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_protocol_hears_of_a_session_before_it_ends_without_a_client(is_killed: bool) -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client = Client(broker)
        session = client.open(expiry_s=0 if is_killed else 10)
        session.keep(b"will")
        if not is_killed:
            session.leave()
        await durable(broker)
        disk = disk.after_power_cut(disk_module.Cut.KILLED, Random(1))
    async with brokers(disk, clock) as broker:
        heard: list[bytes] = []

        def note(changes: JointChanges) -> None:
            heard.append(changes.state.data)
            changes.store()

        broker.sessions.expiry.ending["toy"] = note
        clock.ms += 11_000
        await sweep(broker)
        assert (heard, len(broker.sessions)) == ([b"will"], 0)


async def test_changes_without_a_client_follow_each_other_before_they_are_applied() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client = Client(broker)
        session = client.open()
        session.keep(b"first")
        session.leave()
        await durable(broker)
        disk = disk.after_power_cut(disk_module.Cut.KILLED, Random(1))
    async with brokers(disk, clock) as broker:  # no live session is left
        client = Client(broker)
        for data in (b"second", b"third"):
            changes = broker.sessions.changes_without_client("toy", client.name)
            assert changes is not None
            changes.keep(data)
            broker.publish_all([], atomic=True, notes=changes.notes)
            changes.apply()
            state, has_client = broker.sessions.find("toy", client.name)
            assert state is not None
            assert (state.data, has_client) == (data, False)
        await durable(broker)
        stored = client.stored()
        assert stored is not None
        assert stored.data == b"third"
        await sweep(broker)
        await sweep(broker)
        assert (client.open().data, client.lost) == (b"third", [])


async def test_when_a_session_ends_can_change() -> None:
    clock = ManualClock()
    async with brokers(FakeDisk(), clock) as broker:
        client = Client(broker)
        session = client.open(expiry_s=10)
        session.expire_after(None)
        session.leave()
        await durable(broker)
        assert broker.sessions.table.ends_ms("toy client ä/1") == NEVER_MS
        session = client.open(expiry_s=20)
        session.expire_after(30)
        session.leave()
        await durable(broker)
        assert broker.sessions.table.ends_ms("toy client ä/1") == clock.ms + 30_000


async def test_a_session_that_was_ended_starts_from_nothing() -> None:
    async with broker_in_memory() as broker:
        client, other = Client(broker, owner="ada"), Client(broker, owner="bob")
        session = client.open()
        session.subscribe("a")
        session.end()
        session.end()
        session.leave()
        session, existed = other.attach()  # in the same commit
        assert not existed
        assert not session.filters
        await durable(broker)
        assert said(other.stored()) == said(session)
        assert other.lost == []


async def test_a_clock_that_jumps_does_not_end_all_sessions(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock, day_s = TrioClock(), 86_400
    async with serving_memory(clock) as broker:
        for number in range(8):
            Client(broker, f"n{number}").open(expiry_s=2 * day_s).leave()
        await durable(broker)
        clock.skew_ms = 365 * day_s * 1000
        session, existed = Client(broker, "n0").attach(expiry_s=None)
        assert existed, "nobody can tell whether it has ended"
        await trio.sleep(90)
        assert len(broker.sessions) == 8
        assert caplog.text.count("7 sessions are overdue by more than an hour") == 1
        await trio.sleep(2.5 / 7 * day_s)
        assert len(broker.sessions) == 6, "one by one, all of them within a day"
        clock.skew_ms = 0
        await trio.sleep(day_s)
        assert len(broker.sessions) == 6, "somebody set the clock right"
        assert session.name == "n0"
        await trio.sleep(day_s)
        assert len(broker.sessions) == 1


async def test_where_a_client_is_that_wants_little_is_noted_now_and_then() -> None:
    async with broker_in_memory() as broker:
        client = Client(broker)
        session = client.open()
        session.where = lambda: DISTANCE_BYTES
        await sweep(broker)
        assert said(client.stored())["position"] == 0
        session.where = lambda: DISTANCE_BYTES + 1
        await sweep(broker)
        assert said(client.stored())["position"] == DISTANCE_BYTES + 1


# retention


async def test_session_state_is_noted_again_before_retention_removes_it() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        table = broker.sessions.table
        away, here, late = (Client(broker, name) for name in ("away", "here", "late"))
        session = away.open()
        session.subscribe("a")
        session.leave()
        session = here.open()
        session.subscribe("b")
        await durable(broker)
        end = broker.store.appended
        late.open().subscribe("c")
        await durable(broker)
        since = late.stored().since  # type: ignore[union-attr]
        session.hand_out(1, [5], 6)  # not stored when it is noted again
        before = [said(client.stored()) for client in (away, late)]
        assert table.floor() < end
        finish_now(table.roll(0, end))
        await durable(broker)
        assert end <= table.floor() <= since
        assert [said(client.stored()) for client in (away, late)] == before
        assert said(here.stored()) == said(session)
        assert here.lost == []
        state = late.stored()
        assert state is not None
        assert state.since == since
        # What comes after a start that knows nothing of the records before.
        fresh = SessionTable(broker.sessions.journal.topic)
        queue = broker.store.queue(broker.sessions.journal.topic, 0)
        result = broker.store.readers.read(queue, 0, 1000, 1 << 20)
        records = [each for each in record_views(b"".join(result.pieces)) if each.position >= end]
        fresh.apply(records)
        assert [said(fresh.get(f"toy {client.name}")) for client in (away, late, here)] == [*before, said(session)]


async def test_a_table_without_sessions_needs_no_record() -> None:
    async with broker_in_memory() as broker:
        client = Client(broker)
        session = client.open()
        await durable(broker)
        assert broker.sessions.table.floor() < broker.store.appended
        session.end()
        await durable(broker)
        assert broker.sessions.table.floor() > broker.store.appended


async def test_a_snapshot_is_of_the_moment_at_which_it_was_begun() -> None:
    async with broker_in_memory() as broker:
        session = Client(broker).open()
        session.subscribe("a")
        await durable(broker)
        before = said(session)
        steps = broker.sessions.table.freeze()
        next(steps)
        session.subscribe("b")
        session.hand_out(1, [1], 2)
        Client(broker, "another").open()
        await durable(broker)
        table = SessionTable("t")
        finish_now(table.restore(b"".join(finish_now(steps)), 0))
        assert len(table) == 1
        assert said(table.get("toy client ä/1")) == before


async def test_sessions_before_the_beginning_of_the_log_are_dropped() -> None:
    table = SessionTable("t")
    for number in range(4):
        note = encode_note(BEGIN, f"toy {number}", 0, "", 0, -1)
        table._apply(*decode_note(note), number * 100)
    again = SessionTable("t")
    finish_now(again.restore(b"".join(finish_now(table.freeze())), 200))
    assert sorted(again) == ["toy 2", "toy 3"]
    assert again.floor() == 200


@pytest.mark.parametrize("data", [b"\x00", b"\xc1", b"no snapshot"])
def test_a_snapshot_that_cannot_be_read_is_logged(data: bytes) -> None:
    with pytest.raises(StoreError):
        finish_now(SessionTable("t").restore(data, 0))


@pytest.mark.parametrize("note", [b"", b"\xc1", b"\x01", b"\x92\x01\xa1k"])
def test_an_invalid_note_is_logged(note: bytes) -> None:
    with pytest.raises(StoreError):
        decode_note(note)


def test_a_note_of_an_unknown_kind_is_logged() -> None:
    with pytest.raises(StoreError, match="kind 99"):
        SessionState("k", "", 0, -1).change(99, ())


# codec

STATES = st.builds(
    lambda key, owner, position, expiry, filters, flight, data, ends, passed: (
        key,
        owner,
        position,
        expiry,
        filters,
        flight,
        data,
        ends,
        passed,
    ),
    st.text(max_size=30),
    st.text(max_size=8),
    POSITIONS,
    st.integers(-1, 1 << 32),
    st.dictionaries(st.text(max_size=20), st.tuples(st.binary(max_size=4), POSITIONS | st.just(0)), max_size=20),
    st.dictionaries(st.integers(0, 70_000), POSITIONS | st.just(NO_MESSAGE), max_size=40),
    st.binary(max_size=10),
    st.integers(0, NEVER_MS),
    st.dictionaries(st.text(max_size=4), st.integers(0, 1 << 40), max_size=2),
)


@given(made=STATES, bytes_max=st.integers(400, 4000))
def test_a_state_comes_back_as_it_was(made: tuple[Any, ...], bytes_max: int) -> None:
    key, owner, position, expiry, filters, flight, data, ends, passed = made
    state = SessionState(key, owner, position, expiry)
    for topic_filter, (options, begin) in filters.items():
        state.change(FILTER, (topic_filter, options, position, *([begin] if begin else [])))
    for number, at in flight.items():
        state.change(SENT, encode_sent(number, [at], position))
    state.change(12, (data,))
    state.ends_ms, state.passed = ends, passed
    for back in (SessionState.unpack(key, state.pack()), state.copy()):
        assert said_all(back) == said_all(state)
    table = SessionTable("t")
    notes = encode_whole(state, bytes_max)
    for note in notes:
        table._apply(*decode_note(note), 9)
    found = table.get(key)
    assert found is not None
    assert said_all(found) == said_all(state)
    assert found.since == 9


def said_all(state: SessionState) -> dict[str, Any]:
    more = ("key", "number", "ends_ms", "expiry_s", "size", "passed")
    return {**said(state), **{name: getattr(state, name) for name in more}}


def test_a_state_of_an_earlier_version_is_read() -> None:
    """It has no beginnings, and ``passed`` only if that is not empty."""
    fields = ["ada", 50, 100, 3, b"data", {"a": b"1"}, [1, 40]]
    for rest, passed in (([], {}), ([{"t": 4}], {"t": 4})):
        packed = HEAD.pack(9, 12, 4) + msgpack.packb([*fields, *rest])
        assert packed_position(packed) == (50, bool(passed))
        table = SessionTable("t")
        table._apply(WHOLE, "k", 4, [12, *fields, *rest], 9)
        for state in (SessionState.unpack("k", packed), table.get("k")):
            assert state is not None
            assert (said_all(state)["passed"], state.begins, state.pack()) == (passed, {}, packed)


# where filters begin


async def test_a_filter_begins_where_it_is_said_until_the_session_has_passed_that() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client = Client(broker)
        session = client.open(position=10)
        session.subscribe("a", b"1")
        session.subscribe("b", b"1", 50)
        session.subscribe("c", b"1", 70)
        session.subscribe("past", b"1", 10)
        assert dict(session.begins) == {"b": 50, "c": 70}
        session.subscribe("b", b"2")
        session.record_progress("c", b"2")
        session.move(60)
        await durable(broker)
        assert said(client.stored())["begins"] == {"c": 70}
        session.leave()
        await durable(broker)
        assert said(client.stored())["begins"] == {"c": 70}
        session = client.open()
        session.subscribe("c", b"3", 80)
        session.unsubscribe("a")
        await durable(broker)
        assert said(client.stored())["begins"] == said(session)["begins"] == {"c": 80}
        session.move(80)
        await durable(broker)
        assert session.begins == {}
        assert said(client.stored()) == said(session)
        session.subscribe("d", b"", 90)
        session.unsubscribe("d")
        assert dict(session.begins) == {}


async def test_beginnings_are_as_before_when_complete_states_follow_known_ones() -> None:
    disk, clock = FakeDisk(), ManualClock()
    async with brokers(disk, clock) as broker:
        client = Client(broker)
        session = client.open(position=10)
        for number in range(2000):
            session.subscribe(f"filter/{number}", b"1", 20 + number % 7)
        session.move(22)
        await durable(broker)
        before = said(session)
        assert len(before["begins"]) == sum(number % 7 > 2 for number in range(2000))
        for leaves in (False, True):
            if leaves:
                session.leave()
                await durable(broker)
            finish_now(broker.sessions.table.roll(0, broker.store.appended))
            await durable(broker)
            assert said(client.stored()) == before
            notes = encode_whole(session.state, 1 << 14)
            assert len(notes) > 10
            table = SessionTable("t")
            for note in notes:
                table._apply(*decode_note(note), 9)
            assert said(table.get("toy client ä/1")) == before


# how much


async def test_an_offline_session_takes_100_bytes_on_the_disk_and_a_kibibyte_of_memory() -> None:
    disk, clock, count = FakeDisk(), ManualClock(), 5000
    sizes = {"segment_bytes": 1 << 22, "page_bytes": 1 << 18, "cache_bytes": 1 << 22}
    async with brokers(disk, clock, **sizes) as broker:
        gc.collect()
        tracemalloc.start()
        for number in range(count):
            session = Client(broker, f"client-{number:06}").open(expiry_s=604_800)
            session.subscribe(f"site/{number}/temperature/#", b"\x01")
            session.leave()
            if number % 100 == 0:
                broker.store.committer.commit()
        del session
        await durable(broker)
        gc.collect()
        ours = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(False, disk_module.__file__), tracemalloc.Filter(False, "*/store/*")]
        )
        used = sum(each.size for each in ours.statistics("filename"))
        tracemalloc.stop()
        table = broker.sessions.table
        began = time.perf_counter()
        steps = table.freeze()
        next(steps)
        took_ms = (time.perf_counter() - began) * 1000
        size = sum(map(len, finish_now(steps)))
        print(f"{used / count:.0f} B of memory, {size / count:.1f} B of snapshot; freeze {took_ms:.3f} ms")
        assert len(table) == count
        assert size <= 100 * count
        assert used <= 1024 * count


async def test_publishing_continues_while_sessions_change() -> None:
    """Notes are in the commits of messages; sessions wait for nothing."""
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        session = Client(broker).open()
        for number in range(20):
            session.subscribe(f"f/{number}")
            publish(broker, "t", 0, b"x")
        await durable(broker)
        assert said(Client(broker).stored()) == said(session)
