"""A change of the rules ends what waits, without another message, a little in each turn of the event loop."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
from tests.delivery.pushing import LINES, broker_in_memory, told

from martlet.access import Revocation
from martlet.access.revocation import RECHECK_US
from martlet.broker import Broker
from martlet.contracts import AccessEvent, Identity
from martlet.delivery.cursor import CHECKED_AT_ONCE
from martlet.errors import Reason, Refused
from martlet.groups.membership import Membership
from martlet.message import Message
from martlet.runtime.steps import Steps, per_slice
from martlet.testing.peers import RecordingPeer

ANN, BOB = Identity("ann"), Identity("bob")
A_SLICE = per_slice(RECHECK_US)


class Asked:
    """Counts how often it is asked; with *steps* it takes as many slices."""

    def __init__(self, steps: int = 0) -> None:
        self.count = 0
        self._steps = steps

    def recheck(self) -> Steps[None] | None:
        self.count += 1
        return self._in_steps() if self._steps else None

    def _in_steps(self) -> Steps[None]:
        for _ in range(self._steps):
            yield


class Broken:
    def recheck(self) -> None:
        raise ZeroDivisionError("a defect")


def yielding(*waiters: Any) -> Callable[[], Iterator[Any]]:
    return lambda: iter(waiters)


def test_each_turn_visits_a_slice_of_what_waits() -> None:
    revocation, waiters = Revocation(), [Asked() for _ in range(3 * A_SLICE)]
    revocation.waiting += [yielding(*waiters[:-1]), yielding(waiters[-1])]
    revocation.recheck_all()
    counts = [0]
    while revocation.is_visiting:
        revocation.visit_some()
        counts.append(sum(waiter.count for waiter in waiters))
    assert counts == [0, A_SLICE, 2 * A_SLICE, 3 * A_SLICE, 3 * A_SLICE]


def test_a_waiter_with_many_questions_takes_several_turns() -> None:
    revocation, long, short = Revocation(), Asked(steps=3), Asked()
    revocation.waiting.append(yielding(long, short))
    revocation.recheck_all()
    for _ in range(3):
        revocation.visit_some()
        assert (long.count, short.count) == (1, 0)
    revocation.visit_some()
    assert short.count == 1
    assert not revocation.is_visiting


def test_changes_during_a_visit_are_followed_by_one_more() -> None:
    revocation, waiters = Revocation(), [Asked() for _ in range(2 * A_SLICE)]
    revocation.waiting.append(yielding(*waiters))
    for _ in range(3):
        revocation.recheck_all()
    revocation.visit_some()
    for _ in range(3):
        revocation.recheck_all()
    while revocation.is_visiting:
        revocation.visit_some()
    assert {waiter.count for waiter in waiters} == {2}


def test_a_bug_in_one_waiter_is_logged_and_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    revocation, asked = Revocation(), Asked()
    revocation.waiting.append(yielding(Broken(), asked))
    revocation.recheck_all()
    while revocation.is_visiting:
        revocation.visit_some()
    assert asked.count == 1
    assert "a permission was not checked because of a bug" in caplog.text


# what waits in the core


class Rules:
    """Denies what the test sets."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.denied: set[tuple[str, str]] = set()
        self.asked = 0
        self.refusals = 0  # that listeners, such as an audit trail, were told
        broker.authorizers = (self,)
        broker.rules.listeners.append(self._note)

    def _note(self, event: AccessEvent) -> None:
        self.refusals += not event.verdict.allowed

    def __call__(self, identity: Identity, action: str, name: str) -> bool:
        self.asked += 1
        return (identity.name, name) not in self.denied

    async def deny(self, *denied: tuple[str, str]) -> None:
        self.denied = set(denied)
        self._broker.rules.changed()
        await visited(self._broker)


async def visited(broker: Broker) -> None:
    while broker.revocation.is_visiting:
        await trio.lowlevel.checkpoint()


def refused(collect: Callable[[], object]) -> str:
    with pytest.raises(Refused) as error:
        collect()
    assert error.value.reason is Reason.NO_PERMISSION
    return str(error.value)


async def test_an_idle_subscription_is_woken_to_be_refused_and_a_permitted_one_is_not() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        rules, peers = Rules(broker), {name: RecordingPeer() for name in ("ann", "bob")}
        ann, bob = [
            broker.gate(Identity(name)).subscribe(peer, "t", LINES, credit=credit)
            for (name, peer), credit in zip(peers.items(), (0, 9), strict=True)
        ]
        await rules.deny(("ann", "t"))
        assert [peers["ann"].wakes, peers["bob"].wakes] == [1, 0]
        assert "'ann' may not subscribe" in refused(lambda: ann.collect(1000))
        assert rules.refusals == 1
        assert bob.collect(1000) == []


async def test_an_idle_member_is_woken_to_be_refused_and_its_messages_go_to_another_one() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.groups.ensure("G")
        rules, peers = Rules(broker), [RecordingPeer(), RecordingPeer()]
        ann, bob = [
            broker.gate(identity).join(peer, "t", "G", LINES, Membership(lease_s=60.0, credit=5))
            for identity, peer in zip((ANN, BOB), peers, strict=True)
        ]
        for body in (b"a", b"b"):
            broker.publish(Message("t", body, b"", 0))
        broker.store.committer.commit()
        assert [line[-1] for line in told(ann.collect(1000))] == ["a", "b"]
        bob.collect(1000)
        for peer in peers:
            peer.wakes = 0
        await rules.deny(("ann", "%RETRY%G"))
        assert peers[0].wakes
        refused(lambda: ann.collect(1000))
        assert rules.refusals == 1
        ann.leave()
        assert peers[1].wakes
        assert [line[-1] for line in told(bob.collect(1000))] == ["a", "b"]


@pytest.mark.parametrize("filters", [1, CHECKED_AT_ONCE, CHECKED_AT_ONCE + 1, 20 * A_SLICE])
async def test_an_idle_cursor_is_woken_to_be_refused_however_many_filters_it_has(filters: int) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        feed, rules, woken = broker.cursors.open(["t"]), Rules(broker), list[Identity]()
        names = [f"a/{number}" for number in range(filters)]
        ann, bob = [
            broker.gate(identity).follow(feed, lambda identity=identity: woken.append(identity), dict.fromkeys(names))  # type: ignore[misc]
            for identity in (ANN, BOB)
        ]
        await visited(broker)
        woken.clear()
        asked = rules.asked
        rules.denied = {("ann", f"t/{names[-1]}")}
        broker.rules.changed()
        most = 0
        while broker.revocation.is_visiting:
            before = rules.asked
            await trio.lowlevel.checkpoint()
            most = max(most, rules.asked - before)
        assert rules.asked - asked >= 2 * filters
        # Two questions for a filter: about the topic and about the name. Between two turns of this task are up to two.
        assert most <= 4 * A_SLICE + 4 * CHECKED_AT_ONCE
        assert ANN in woken
        assert "'a/" in refused(lambda: ann.collect(1000))
        assert rules.refusals == 1
        broker.publish(Message("t", b"x", b"TAGS\x01a/0\x02", 0))
        broker.store.committer.commit()
        while not bob.has_pending:
            await trio.lowlevel.checkpoint()
        assert len(bob.collect(1000)) == 1
        await rules.deny()
        assert ann.check_rules(), "what is allowed again goes on"


async def test_a_cursor_with_many_filters_delivers_nothing_before_they_are_checked() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        feed, rules = broker.cursors.open(["t"]), Rules(broker)
        cursor = broker.gate(ANN).follow(feed, lambda: None, {f"a/{n}": n for n in range(CHECKED_AT_ONCE + 1)})
        await visited(broker)
        broker.publish(Message("t", b"x", b"TAGS\x01a/0\x02", 0))
        broker.store.committer.commit()
        while not cursor.has_pending:
            await trio.lowlevel.checkpoint()
        rules.denied = {("ann", "t/a/1")}
        broker.rules.changed()
        assert cursor.collect(1000) == []
        await visited(broker)
        refused(lambda: cursor.collect(1000))
