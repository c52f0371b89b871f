"""Wildcards find the same retained messages as subscriptions find live ones, in pieces."""

import tracemalloc
from pathlib import Path
from random import Random
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire_clients.mqtt import mqtt_broker

from martlet.delivery.routing.route_cache import RouteCache
from martlet.store import Store
from martlet.testing.stores import ManualClock
from martlet_mqtt.shared.retained import Entry, Retained
from martlet_mqtt.shared.retained_names import BLOCK_NAMES, LOOKS_A_PAUSE, SortedNames
from martlet_mqtt.wire.names import LEVELS_MAX
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Property

# Some have a character just before or after the separator, so that they are between "a" and "a/" or after "a/".
LEVELS = ["a", "b", "", "$x", "a-", "a0", "a.b", " "]
NAMES = st.lists(st.sampled_from(LEVELS), min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = (
    st.tuples(
        st.lists(st.sampled_from([*LEVELS, "+"]), max_size=4), st.sampled_from([["#"], ["+"], ["a"], ["a-"], [""]])
    )
    .map(lambda parts: "/".join([*parts[0], *parts[1]]))
    .filter(bool)
)


def retained(*names: str) -> Retained:
    found = Retained(cast(Store, None), ManualClock())
    for position, name in enumerate(names):
        found._put_entry(name, Entry(position, position, 1, 0))
    return found


@given(st.sets(NAMES, max_size=30), FILTERS)
def test_a_filter_matches_the_names_that_a_subscription_matches(names: set[str], topic_filter: str) -> None:
    routes: RouteCache[str] = RouteCache()
    routes.add(topic_filter, "subscriber")
    found = [name for name in retained(*names).matches(topic_filter) if name]
    assert sorted(found) == sorted(name for name in names if routes.match(name))


@pytest.mark.parametrize("topic_filter", ["+/wanted", "#", "+"])
def test_a_search_over_many_names_pauses(topic_filter: str) -> None:
    names = [f"{number}/unwanted" for number in range(4 * LOOKS_A_PAUSE)]
    found = list(retained(*names, "0/wanted").matches(topic_filter))
    assert found.count("") >= 4
    assert len([name for name in found if name]) == {"+/wanted": 1, "#": len(names) + 1, "+": 0}[topic_filter]


def looks(names: SortedNames, topic_filter: str) -> int:
    """Return how many names a search looks at."""
    count, first_from = 0, SortedNames.first_from

    def counted(self: SortedNames, text: str) -> str | None:
        nonlocal count
        count += 1
        return first_from(self, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SortedNames, "first_from", counted)
        for _ in names.matches(topic_filter):
            pass
    return count


def test_a_search_skips_the_names_that_cannot_match() -> None:
    names = SortedNames()
    for site in range(50):
        for sensor in range(100):
            names.add(f"site{site:02}/{sensor:02}/value")
    assert looks(names, "site07/#") <= 100 + 5
    assert looks(names, "+/42/+") <= 4 * 50
    assert looks(names, "+/42/none") <= 4 * 50
    assert looks(names, "+/none/#") <= 4 * 50
    assert looks(names, "+") <= 4 * 50
    assert looks(names, "none/+/value") <= 3


@pytest.mark.parametrize("seed", range(3))
def test_names_stay_in_order_in_many_blocks(seed: int) -> None:
    chance, names, present = Random(seed), SortedNames(), set[str]()
    pool = [f"{number % 7}/{number}" for number in range(4 * BLOCK_NAMES)]
    for rising in (True, False):
        chance.shuffle(pool)
        for name in pool:
            if name not in present and (rising or chance.random() < 0.1):
                names.add(name)
                present.add(name)
            elif name in present and chance.random() < 0.9:
                names.remove(name)
                present.discard(name)
        assert [name for name in names.matches("#") if name] == sorted(present)
    for name in present:
        names.remove(name)
    assert list(names.matches("#")) == []
    assert names.first_from("") is None


def test_a_name_with_many_levels_takes_no_more_than_one_with_few() -> None:
    """No limit counts what a name takes in memory, so it must not depend on what the client sends but for its text."""
    count, messages = 500, retained()
    names = ["/".join(f"{number:03}{level:03}" for level in range(LEVELS_MAX)) for number in range(count)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for position, name in enumerate(names):
            messages._put_entry(name, Entry(position, position, 1, 0))
        assert tracemalloc.get_traced_memory()[0] - before < 500 * count
    finally:
        tracemalloc.stop()


def test_messages_come_and_go_during_a_search() -> None:
    messages = retained(*(f"{number}/a" for number in range(1000)))
    search = messages.matches("#")
    found = [next(search) for _ in range(10)]
    for number in range(500, 1000):
        del messages._entries[f"{number}/a"]
        messages._names.remove(f"{number}/a")
    messages._put_entry("later/a", Entry(1, 1, 1, 0))
    found += search
    assert {f"{number}/a" for number in range(500)} <= set(found)
    assert not {f"{number}/a" for number in range(500, 1000)} & set(found)


async def test_many_retained_messages_come_in_time_with_acknowledgements(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        names = {f"kept/{number}" for number in range(300)}
        for name in names:
            await publisher.send(Publish(name, b"x", 0, retain=True))
        await publisher.publish("last", b"", 1)
        await mqtt.settle()
        talk = await mqtt.connect("c")
        await talk.subscribe("kept/+", qos=1)
        found = set[str]()
        while len(found) < len(names):
            (message,) = await talk.messages(1)
            assert message.retain
            assert message.topic not in found
            found.add(message.topic)
            await talk.acknowledge(message)
        assert found == names
        assert await talk.rest() == []


async def test_nothing_more_comes_for_a_filter_that_was_unsubscribed(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        publisher = await mqtt.connect("p")
        for number in range(300):
            await publisher.publish(f"kept/{number}", b"x", 1, retain=True)
        await mqtt.settle()
        talk = await mqtt.connect("c", values={Property.RECEIVE_MAXIMUM: 5})
        await talk.subscribe("kept/+", qos=1)
        found = await talk.messages(5)
        assert await talk.unsubscribe("kept/+") == (0,)
        count = 0
        while found:  # a few more were read from the log already
            count += len(found)
            for message in found:
                await talk.acknowledge(message)
            found = await talk.rest()
        assert count < 100
