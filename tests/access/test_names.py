"""Authorizers decide about names inside a topic: of messages, and of topic filters."""

from collections.abc import Callable

import pytest
import trio.testing
from tests.access.test_gate import ANN, Ledger, refused, tuple_for
from tests.delivery.pushing import LINES, broker_in_memory

from martlet.access import Gate
from martlet.broker import Broker
from martlet.contracts import AccessEvent, Identity
from martlet.delivery.cursor import Cursor, CursorPlace
from martlet.delivery.feed import Feed
from martlet.errors import Refused
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import Message, Placed
from martlet.plugins.loader import guarded_authorizer
from martlet.store.append.items import AppendItem
from martlet.testing.peers import RecordingPeer


def named(name: str, body: bytes = b"x", topic: str = "t") -> Message:
    return Message(topic, body, f"TAGS\x01{name}\x02".encode(), 0)


def tuple_of(name: str) -> AppendItem:
    queue, body, _, *rest = tuple_for("t")
    return (queue, body, f"TAGS\x01{name}\x02".encode(), *rest)  # type: ignore[return-value]


def feed_of(broker: Broker) -> Feed:
    broker.topics.ensure("t", 1)
    return broker.cursors.open(["t"])


async def settle(broker: Broker) -> None:
    broker.store.committer.commit()
    await broker.store.flusher.wait_flushed(broker.store.appended)
    await trio.testing.wait_all_tasks_blocked()


def bodies(cursor: Cursor) -> list[str]:
    return [bytes(record.body).decode() for run, _ in cursor.collect(1 << 20) for record in run.records()]


@pytest.mark.parametrize("of_name", [True, False, None])
@pytest.mark.parametrize("of_topic", [True, False, None])
async def test_the_opinion_about_the_name_decides_unless_the_topic_is_denied(
    of_topic: bool | None, of_name: bool | None
) -> None:
    async with broker_in_memory() as broker:
        feed = feed_of(broker)
        opinions = {"t": of_topic, "t/a": of_name}
        broker.authorizers = (lambda identity, action, name: opinions.get(name),)
        gate = broker.gate(ANN)
        may = of_topic is not False and (of_name is True or (of_name is None and of_topic is True))
        assert gate.allows("publish", "t/a") is may
        assert gate.may_follow(feed, "a") is may
        [result] = gate.publish_all([named("a")]).outcomes()
        assert isinstance(result, Placed) is may


PUBLISHES: dict[str, Callable[[Gate, str], object]] = {
    "publish": lambda gate, name: gate.publish(named(name)),
    "all or none": lambda gate, name: gate.publish_all([named("open"), named(name)], atomic=True),
    "each for itself": lambda gate, name: gate.publish_all([named("open"), named(name)]).placed(1),
    "tuples, all or none": lambda gate, name: gate.publish_all([tuple_of("open"), tuple_of(name)], atomic=True),
    "tuples": lambda gate, name: gate.publish_all([tuple_of("open"), tuple_of(name)]).placed(1),
    "one tuple": lambda gate, name: gate.publish_all([tuple_of(name)]).placed(0),
}


@pytest.mark.parametrize("way", PUBLISHES)
async def test_a_denied_name_is_published_on_no_path(way: str) -> None:
    async with broker_in_memory() as broker:
        feed_of(broker)
        ledger = Ledger(("publish", "t/secret"))
        broker.authorizers = (ledger,)
        gate = broker.gate(ANN)
        for _ in range(3):
            assert refused(lambda: PUBLISHES[way](gate, "secret")) == "'ann' may not publish to 'secret' in topic[t]"
            PUBLISHES[way](gate, "also open")
        assert gate.find_queue("t", 0) is None  # a run would pass the names by
        # Once for each name, and once more for the topic each time that one is new.
        asked = [name for _, action, name in ledger.asked if action == "publish"]
        assert sorted(name for name in asked if name != "t") == sorted(
            {f"t/{n}" for n in ("also open", "secret")} | (set() if way in ("publish", "one tuple") else {"t/open"})
        )
        assert asked.count("t") == len(asked) - asked.count("t")


async def test_of_many_messages_those_with_denied_names_alone_are_refused() -> None:
    async with broker_in_memory() as broker:
        feed_of(broker)
        broker.topics.ensure("plain", 1)
        broker.authorizers = (Ledger(("publish", "t/b"), ("publish", "gone")),)
        messages = [named("a"), named("b"), Message("plain", b"x"), named("a", topic="gone"), named("a")]
        results = broker.gate(ANN).publish_all(messages).outcomes()
        assert [type(result) for result in results] == [Placed, Refused, Placed, Refused, Placed]
        placed = [result.position for result in results if isinstance(result, Placed)]
        assert placed == sorted(placed)


async def test_a_message_without_a_name_needs_permission_for_the_topic() -> None:
    async with broker_in_memory() as broker:
        feed_of(broker)
        broker.authorizers = (lambda identity, action, name: True if name.startswith("t/") else None,)
        gate = broker.gate(ANN)
        gate.publish(named("a"))
        assert refused(lambda: gate.publish(Message("t", b"x"))) == "'ann' may not publish to topic[t]"


async def test_nobody_creates_a_topic_of_names_by_a_permission_for_a_name() -> None:
    async with broker_in_memory() as broker:
        feed_of(broker)
        broker.topics.delete("t")
        broker.authorizers = (lambda identity, action, name: True if name.startswith("t/") else None,)
        refused(lambda: broker.gate(ANN).find_topic("t", "publish", 1))
        refused(lambda: broker.gate(ANN).publish(named("a")))
        assert broker.topics.get("t") is None


async def test_without_authorizers_names_are_not_looked_at() -> None:
    async with broker_in_memory() as broker:
        feed_of(broker)
        gate = broker.gate(ANN)
        gate.publish(named("a"))
        assert list(gate.publishable) == ["t"]
        assert gate.find_queue("t", 0) is not None
        broker.authorizers = (Ledger(("publish", "t/a")),)
        refused(lambda: gate.publish(named("a")))


async def test_a_topic_that_is_followed_later_is_asked_about_by_name_from_then_on() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.authorizers = (Ledger(("publish", "t/a")),)
        gate = broker.gate(ANN)
        placed = gate.publish(named("a"))  # a tag like any other
        feed_of(broker)
        assert refused(lambda: gate.publish(named("a"))) == "'ann' may not publish to 'a' in topic[t]"
        assert broker.store.appended == placed.end


async def test_decisions_about_names_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.access.rules.NAMES_MAX", 10)
    async with broker_in_memory() as broker:
        feed_of(broker)
        broker.authorizers = (Ledger(),)
        gates = [broker.gate(Identity(f"user {number}")) for number in range(5)]
        for number in range(50):
            gates[number % 5].publish(named(f"n{number}"))
        held = [broker.rules.of(gate.identity)._find_cache().of_names for gate in gates]
        assert sum(len(names) for by_action in held for names in by_action.values()) <= 10


# filters


async def test_an_authorizer_sees_the_text_of_each_filter() -> None:
    async with broker_in_memory() as broker:
        feed = feed_of(broker)
        ledger = Ledger(("read", "t/#"), ("read", "t/b/+"))
        broker.authorizers = (ledger,)
        gate = broker.gate(ANN)
        assert (
            refused(lambda: gate.follow(feed, lambda: None, {"a/+": 0, "#": 0}))
            == "'ann' may not subscribe to '#' in topic[t]"
        )
        assert len(feed) == 0
        cursor = gate.follow(feed, lambda: None, {"a/+": 0})
        refused(lambda: cursor.add_filter("b/+"))
        refused(lambda: cursor.check("b/+"))
        cursor.add_filter("c")
        assert [*cursor.filters] == ["a/+", "c"]
        assert ("ann", "read", "t/a/+") in ledger.asked


@pytest.mark.parametrize("position", [None, 0], ids=["tail", "sweep"])
async def test_a_wildcard_brings_the_names_that_may_be_read_and_each_is_asked_about_once(position: int | None) -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        ledger = Ledger(("read", "t/b"))
        broker.authorizers = (lambda identity, action, name: ledger(identity, action, name) or identity.name == "eve",)

        def write(turn: int) -> None:
            for name in "abc":
                broker.publish(named(name, f"{name}{turn}".encode()))

        if position == 0:
            for turn in range(5):
                write(turn)
            await settle(broker)
        gate = broker.gate(ANN)
        cursors = [gate.follow(feed, lambda: None, {"#": 0}, position) for _ in range(3)]
        other = broker.gate(Identity("eve")).follow(feed, lambda: None, {"#": 0}, position)
        if position is None:
            for turn in range(5):
                write(turn)
        await settle(broker)
        expected = [f"{name}{turn}" for turn in range(5) for name in "ac"]
        assert [bodies(cursor) for cursor in cursors] == [expected] * 3
        assert bodies(other) == [f"{name}{turn}" for turn in range(5) for name in "abc"]
        asked = [name for who, action, name in ledger.asked if who == "ann" and "/" in name]
        assert sorted(asked) == ["t/#", "t/a", "t/b", "t/c"]


async def test_what_was_pending_when_the_rules_changed_is_asked_about_again() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        ledger = Ledger()
        broker.authorizers = (ledger,)
        cursor = broker.gate(ANN).follow(feed, lambda: None, {"#": 0})
        for name in "aabba":
            broker.publish(named(name, name.encode()))
        await settle(broker)
        [(run, _)] = cursor.collect(1 << 20, 1)
        assert run.count == 1
        ledger.denied.add(("read", "t/b"))
        broker.rules.changed()
        broker.publish(named("b", b"late"))
        broker.publish(named("a", b"last"))
        await settle(broker)
        came = bodies(cursor)
        await settle(broker)
        assert [*came, *bodies(cursor)] == ["a", "a", "last"]
        assert cursor.place is CursorPlace.TAIL
        ledger.denied.clear()
        broker.rules.changed()
        broker.publish(named("b", b"again"))
        await settle(broker)
        came = bodies(cursor)
        await settle(broker)
        assert [*came, *bodies(cursor)] == ["again"]


async def test_a_filter_that_is_denied_later_ends_the_cursor() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        ledger = Ledger()
        broker.authorizers = (ledger,)
        gate = broker.gate(ANN)
        woken: list[str] = []
        cursor = gate.follow(feed, lambda: woken.append("cursor"), {"a": 0, "b": 0})
        gate.follow(feed, lambda: woken.append("closed"), {"a": 0}).close()
        ledger.denied.add(("read", "t/b"))
        broker.rules.changed()
        await settle(broker)
        assert woken == ["cursor"]  # though nothing came
        for _ in range(2):
            refused(lambda: cursor.collect(1000))
        assert [gate.may_follow(feed, each) for each in "ab"] == [True, False]


async def test_an_authorizer_that_fails_for_one_receiver_keeps_nothing_from_others() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)

        def ask(identity: Identity, action: str, name: str) -> bool:
            if identity.name == "bad" and name == "t/b":
                raise ZeroDivisionError("a defect")
            return True

        broker.authorizers = (guarded_authorizer("rules", ask),)
        cursors = [broker.gate(Identity(who)).follow(feed, lambda: None, {"#": 0}) for who in ("bad", "good")]
        for name in "abc":
            broker.publish(named(name, name.encode()))
        await settle(broker)
        assert [bodies(cursor) for cursor in cursors] == [["a", "c"], ["a", "b", "c"]]


async def test_names_in_a_feed_of_several_topics_are_asked_about_in_each() -> None:
    async with broker_in_memory(flush="sync") as broker:
        for topic in "tu":
            broker.topics.ensure(topic, 1)
        feed = broker.cursors.open(["t", "u"])
        broker.authorizers = (Ledger(("read", "u/b")),)
        gate = broker.gate(ANN)
        assert not gate.may_follow(feed, "b")
        cursor = gate.follow(feed, lambda: None, {"#": 0})
        for name in "ab":
            for topic in "tu":
                broker.publish(named(name, f"{topic}{name}".encode(), topic))
        await settle(broker)
        assert bodies(cursor) == ["ta", "ua"]


# shared groups


async def test_a_denied_member_is_noted_once_when_it_leaves() -> None:
    async with broker_in_memory() as broker:
        feed = feed_of(broker)
        ledger, told = Ledger(), list[AccessEvent]()
        broker.authorizers = (ledger,)
        broker.rules.listeners.append(told.append)
        names = MessageSelection(feed, "#")
        policy, peer = GroupPolicy("mqtt"), RecordingPeer()
        member = broker.gate(ANN).join(peer, "t", "G", LINES, Membership(lease_s=1, credit=9, names=names), policy)
        assert member.may_get("a")
        ledger.denied.add(("read", "t/#"))
        broker.rules.changed()
        assert [member.may_get("a") for _ in range(3)] == [False] * 3
        assert told == []
        member.recheck()
        refused(lambda: member.collect(1 << 20))
        assert [event.question.name for event in told] == ["t/#"]
