"""What outlives a socket: names, their cursors, who may have them, and when they are forgotten."""

import msgpack  # type: ignore[import-untyped]
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.pushing import broker_in_memory, publish
from trio.testing import MockClock

from martlet.delivery.sessions import Session, Sessions
from martlet.delivery.subscriptions import from_earliest, from_tail
from martlet.errors import Reason, Refused, StoreError
from martlet.settings import DeliveryConfig
from martlet.tables.groups import Group, Groups
from martlet.testing.clock import TrioClock
from martlet.testing.stores import ManualClock
from martlet.turns import finish_now


class Room:
    """Sessions over real groups and a clock set by hand."""

    def __init__(self, **limits: int) -> None:
        self.clock = ManualClock()
        self.groups = Groups(self.clock, auto_create=True)
        self.sessions = Sessions(self.groups, self.clock, DeliveryConfig(**limits))
        self.lost: list[str] = []

    def open(self, name: str = "N", who: str = "first", owner: str = "") -> tuple[Session, bool]:
        return self.sessions.open("line", owner, name, self.callback(who))

    def callback(self, who: str) -> "Callback":
        return Callback(self.lost, who)


def holder(session: Session) -> object:
    return session.lost


def dirty(room: Room) -> bool:
    return room.sessions.table.dirty


class Callback:
    """Says who was taken over; equal only to itself."""

    def __init__(self, lost: list[str], who: str) -> None:
        self._lost = lost
        self._who = who

    def __call__(self, reason: str) -> None:
        assert reason == "another connection uses the name"
        self._lost.append(self._who)


def test_a_name_is_new_once_and_known_afterwards() -> None:
    room = Room()
    session, existed = room.open()
    assert not existed
    assert session.group == "N"
    assert room.groups.get("N") is not None
    again, existed = room.open()
    assert existed
    assert again is session


def test_who_comes_with_the_name_of_an_attached_peer_takes_over() -> None:
    room = Room()
    room.open(who="first")
    room.open(who="second")
    assert room.lost == ["first"]
    room.open(who="third")
    assert room.lost == ["first", "second"]


def test_a_peer_that_lost_its_session_does_not_end_it_for_the_new_one() -> None:
    room = Room()
    first, second = room.callback("first"), room.callback("second")
    session, _ = room.sessions.open("line", "", "N", first)
    room.sessions.open("line", "", "N", second)
    room.sessions.leave(session, first)
    assert holder(session) is second
    room.sessions.leave(session, second)
    assert holder(session) is None
    assert session.left_ms == room.clock.ms


def test_a_name_belongs_to_who_made_it() -> None:
    room = Room()
    room.open(owner="ada")
    with pytest.raises(Refused, match="belongs to somebody else") as caught:
        room.open(owner="bob")
    assert caught.value.reason is Reason.NO_PERMISSION
    assert room.lost == []


def test_protocols_have_names_of_their_own() -> None:
    room = Room()
    one, _ = room.open()
    two, existed = room.sessions.open("mqtt", "", "N", room.callback("x"), group="mqtt-N")
    assert not existed
    assert one is not two
    assert room.sessions.get("mqtt", "N") is two


async def test_a_durable_subscription_goes_on_at_its_cursor() -> None:
    async with broker_in_memory() as broker:
        topic = broker.topics.ensure("t", 2)
        publish(broker, "t", 0, b"a", b"b", b"c")
        sessions = broker.sessions
        session, _ = sessions.open("line", "", "N", lambda reason: None)
        start = sessions.subscribe(session, topic, from_earliest)
        assert [start(topic.queue(n)) for n in range(2)] == [0, 0]
        sessions.commit(session, "t", 0, 2)
        sessions.commit(session, "t", 0, 1)
        assert broker.groups.offset("N", "t", 0) == 2
        start = sessions.subscribe(session, topic, from_tail)
        assert [start(topic.queue(n)) for n in range(2)] == [2, 0]


async def test_a_durable_subscription_at_the_tail_misses_nothing_from_its_first_moment() -> None:
    async with broker_in_memory() as broker:
        topic = broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"before")
        session, _ = broker.sessions.open("line", "", "N", lambda reason: None)
        broker.sessions.subscribe(session, topic, from_tail)(topic.queue(0))
        publish(broker, "t", 0, b"after")
        assert broker.sessions.subscribe(session, topic, from_tail)(topic.queue(0)) == 1


async def test_an_administrators_reset_moves_the_cursor() -> None:
    async with broker_in_memory() as broker:
        topic = broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *(b"x" for _ in range(9)))
        session, _ = broker.sessions.open("line", "", "N", lambda reason: None)
        broker.sessions.subscribe(session, topic, from_earliest)(topic.queue(0))
        broker.groups.reset("N", "t", {0: 4})
        assert broker.sessions.subscribe(session, topic, from_earliest)(topic.queue(0)) == 4
        broker.sessions.commit(session, "t", 0, 6)
        assert broker.groups.offset("N", "t", 0) == 6


async def test_a_cursor_is_never_behind_the_end_of_its_queue() -> None:
    async with broker_in_memory() as broker:
        topic = broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"a")
        broker.groups.commit("N", "t", 0, 5)
        session, _ = broker.sessions.open("line", "", "N", lambda reason: None)
        assert broker.sessions.subscribe(session, topic, from_earliest)(topic.queue(0)) == 1
        assert broker.groups.offset("N", "t", 0) == 1


async def test_an_attached_peer_is_told_of_a_reset() -> None:
    async with broker_in_memory() as broker:
        told: list[str] = []
        topic = broker.topics.ensure("t", 1)
        session, _ = broker.sessions.open("line", "", "N", told.append)
        broker.groups.reset("N", "t", {0: 4})
        assert told == []
        broker.sessions.subscribe(session, topic, from_earliest)
        broker.groups.reset("N", "u", {0: 4})
        broker.groups.reset("M", "t", {0: 4})
        assert told == []
        broker.groups.reset("N", "t", {0: 4})
        assert told == ["its offsets were reset; subscribe again"]
        broker.sessions.leave(session, told.append)
        broker.groups.reset("N", "t", {0: 5})
        assert len(told) == 1


async def test_the_last_unsubscribe_takes_the_session_and_only_its_own_cursors() -> None:
    async with broker_in_memory() as broker:
        session, _ = broker.sessions.open("line", "", "N", lambda reason: None)
        for name in ("t", "u"):
            broker.sessions.subscribe(session, broker.topics.ensure(name, 1), from_earliest)(
                broker.store.queue(name, 0)
            )
        broker.sessions.unsubscribe(session, "t")
        assert broker.groups.offset("N", "t", 0) == -1
        assert broker.groups.offset("N", "u", 0) == 0
        assert broker.sessions.get("line", "N") is session
        broker.sessions.unsubscribe(session, "u")
        assert broker.sessions.get("line", "N") is None


async def test_limits_are_named() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(sessions_max=1, session_subscriptions_max=1)) as broker:
        session, _ = broker.sessions.open("line", "", "N", lambda reason: None)
        with pytest.raises(Refused, match=r"delivery\.sessions_max is 1"):
            broker.sessions.open("line", "", "M", lambda reason: None)
        broker.sessions.subscribe(session, broker.topics.ensure("t", 1), from_tail)
        broker.sessions.subscribe(session, broker.topics.ensure("t", 1), from_tail, "again")
        with pytest.raises(Refused, match=r"delivery\.session_subscriptions_max is 1"):
            broker.sessions.subscribe(session, broker.topics.ensure("u", 1), from_tail)


async def test_a_group_that_may_not_consume_has_no_durable_subscription() -> None:
    async with broker_in_memory() as broker:
        session, _ = broker.sessions.open("line", "", "N", lambda reason: None)
        broker.groups.update(Group("N", consume_enable=False))
        with pytest.raises(Refused, match="may not consume"):
            broker.sessions.subscribe(session, broker.topics.ensure("t", 1), from_tail)
        assert session.topics == {}
        broker.groups.auto_create = False
        with pytest.raises(Refused) as caught:
            broker.sessions.open("line", "", "M", lambda reason: None)
        assert caught.value.reason is Reason.NO_GROUP


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 121, "\x00"])
def test_a_name_that_cannot_be_a_group_is_refused(name: str) -> None:
    room = Room()
    with pytest.raises(Refused) as caught:
        room.open(name)
    assert caught.value.reason is Reason.PARAMETER
    assert len(room.sessions) == 0


def test_who_stays_away_too_long_is_forgotten_with_the_cursors() -> None:
    room = Room(session_expiry_s=60)
    attached = room.callback("attached")
    room.open("stays")
    session, _ = room.sessions.open("line", "", "leaves", attached)
    session.topics["t"] = ""
    room.groups.commit("leaves", "t", 0, 7)
    room.sessions.leave(session, attached)
    room.clock.ms += 59_999
    assert room.sessions.expire() == []
    room.clock.ms += 1
    assert room.sessions.expire() == ["leaves"]
    assert room.sessions.get("line", "stays") is not None
    assert room.groups.offset("leaves", "t", 0) == -1


async def test_expiry_happens_by_itself(autojump_clock: MockClock) -> None:
    clock = TrioClock()
    groups = Groups(clock, auto_create=True)
    sessions = Sessions(groups, clock, DeliveryConfig(session_expiry_s=100))
    session, _ = sessions.open("line", "", "N", print)
    sessions.leave(session, print)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sessions.run)
        await trio.sleep(90)
        assert len(sessions) == 1
        await trio.sleep(100)
        assert len(sessions) == 0
        nursery.cancel_scope.cancel()


async def test_a_clock_that_jumps_does_not_end_all_sessions(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    day_s = 86_400
    clock = TrioClock()
    sessions = Sessions(Groups(clock, auto_create=True), clock, DeliveryConfig(session_expiry_s=7 * day_s))
    for number in range(7):
        session, _ = sessions.open("line", "", f"n{number}", print)
        sessions.leave(session, print)
    clock.skew_ms = 30 * day_s * 1000
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sessions.run)
        await trio.sleep(3600)
        assert len(sessions) == 7
        assert caplog.text.count("7 sessions are overdue by more than an hour") == 1
        await trio.sleep(2.5 * day_s)
        assert len(sessions) == 5, "one by one, all within the time that one would have had"
        clock.skew_ms = 0
        await trio.sleep(3 * day_s)
        assert len(sessions) == 5, "somebody set the clock right"
        await trio.sleep(1.5 * day_s)
        assert len(sessions) == 0
        nursery.cancel_scope.cancel()


NAMES = st.from_regex(r"[a-zA-Z0-9_-]{1,20}", fullmatch=True)


@settings(deadline=None)
@given(
    rows=st.dictionaries(
        st.tuples(st.sampled_from(["line", "mqtt"]), NAMES),
        st.tuples(st.text(max_size=9), st.booleans(), st.dictionaries(NAMES, st.text(max_size=9), max_size=3)),
        max_size=5,
    )
)
def test_a_restart_finds_the_sessions_again(rows: dict[tuple[str, str], tuple[str, bool, dict[str, str]]]) -> None:
    room = Room()
    for (protocol, name), (owner, attached, topics) in rows.items():
        callback = room.callback(name)
        session, _ = room.sessions.open(protocol, owner, name, callback)
        session.topics.update(topics)
        if not attached:
            room.sessions.leave(session, callback)
    room.clock.ms += 500
    other = Room()
    other.clock.ms = room.clock.ms
    other.sessions.load(b"".join(finish_now(room.sessions.bytes_in_steps())))
    assert len(other.sessions) == len(rows)
    for (protocol, name), (owner, attached, topics) in rows.items():
        found = other.sessions.get(protocol, name)
        assert found is not None
        assert (found.owner, found.group, found.topics, found.lost) == (owner, name, topics, None)
        assert found.left_ms == room.clock.ms - (0 if attached else 500)


@settings(deadline=None)
@given(data=st.binary(max_size=40))
def test_garbage_is_no_table(data: bytes) -> None:
    with pytest.raises(StoreError):
        Room().sessions.load(data)


@pytest.mark.parametrize(
    "table",
    [
        [],
        [2, []],
        [1, [[1, 2]]],
        [1, [["line", "", "N", "N", "x", {}]]],
        [1, [["line", "", "N", "N", 0, []]]],
        [1, 5],
        [1, None],
        {"a": 1},
    ],
)
def test_another_table_is_refused_and_changes_nothing(table: object) -> None:
    room = Room()
    room.open()
    with pytest.raises(StoreError):
        room.sessions.load(msgpack.packb(table))
    assert room.sessions.get("line", "N") is not None


def test_what_changed_is_to_be_saved() -> None:
    room = Room()
    assert not dirty(room)
    callback = room.callback("x")
    session, _ = room.sessions.open("line", "", "N", callback)
    assert dirty(room)
    room.sessions.table.dirty = False
    room.sessions.leave(session, callback)
    assert dirty(room)


def test_statistics_tell_how_many_are_attached() -> None:
    room = Room()
    room.open("a")
    callback = room.callback("b")
    session, _ = room.sessions.open("line", "", "b", callback)
    room.sessions.leave(session, callback)
    assert room.sessions.statistics() == {"sessions": 2, "attached": 1}


async def test_a_queue_that_came_while_its_subscriber_was_away_is_read_from_its_beginning() -> None:
    async with broker_in_memory() as broker:
        topic = broker.topics.ensure("t", 1)
        sessions = broker.sessions
        session, _ = sessions.open("line", "", "N", lambda reason: None)
        start = sessions.subscribe(session, topic, from_tail)
        assert start(topic.queue(0)) == 0
        topic = broker.topics.update("t", 2, 2)
        publish(broker, "t", 1, b"a", b"b")
        start = sessions.subscribe(session, topic, from_tail)
        assert [start(topic.queue(n)) for n in range(2)] == [0, 0]


def test_who_was_attached_when_the_broker_died_stayed_away_only_since_the_next_start() -> None:
    room = Room(session_expiry_s=100)
    session, _ = room.open()
    session.topics["t"] = ""
    gone, _ = room.open("gone")
    gone.topics["t"] = ""
    room.sessions.leave(gone, gone.lost or room.callback(""))
    saved = b"".join(finish_now(room.sessions.bytes_in_steps()))
    room.clock.ms += 101_000
    after = Room(session_expiry_s=100)
    after.clock.ms = room.clock.ms
    after.sessions.load(saved)
    assert after.sessions.expire() == ["gone"]
    after.clock.ms += 100_000
    assert after.sessions.expire() == ["N"]


def test_a_session_that_subscribed_to_nothing_can_be_forgotten() -> None:
    room = Room(sessions_max=1)
    callback = room.callback("first")
    session, _ = room.sessions.open("line", "", "N", callback)
    room.sessions.forget_empty(session)
    assert len(room.sessions) == 1  # somebody has it
    room.sessions.leave(session, callback)
    session.topics["t"] = ""
    room.sessions.forget_empty(session)
    assert len(room.sessions) == 1  # there is something to come back for
    session.topics.clear()
    room.sessions.forget_empty(session)
    assert len(room.sessions) == 0
