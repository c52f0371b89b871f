"""Wildcards find the same retained messages as subscriptions find live ones, in pieces."""

from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.mqtt.mqtt_talk import mqtt_broker

from martlet.delivery.interest import FilterTrie
from martlet.store import Store
from martlet.testing.stores import ManualClock
from martlet_mqtt.packets import Publish
from martlet_mqtt.properties import Property
from martlet_mqtt.retained import LOOKS_A_PAUSE, Retained

LEVELS = st.sampled_from(["a", "b", "", "$x"])
NAMES = st.lists(LEVELS, min_size=1, max_size=4).map("/".join).filter(bool)
FILTERS = st.tuples(
    st.lists(st.sampled_from(["a", "b", "", "$x", "+"]), max_size=4), st.sampled_from([["#"], ["+"], ["a"]])
).map(lambda parts: "/".join([*parts[0], *parts[1]]))


def retained(*names: str) -> Retained:
    found = Retained(cast(Store, None), ManualClock())
    for position, name in enumerate(names):
        found._put(name, position, 1, 0)
    return found


@given(st.sets(NAMES, max_size=30), FILTERS)
def test_a_filter_matches_the_names_that_a_subscription_matches(names: set[str], topic_filter: str) -> None:
    trie: FilterTrie[str] = FilterTrie()
    trie.add(topic_filter, "subscriber")
    found = [name for name in retained(*names).matches(topic_filter) if name]
    assert sorted(found) == sorted(name for name in names if trie.match(name))


@pytest.mark.parametrize("topic_filter", ["+/wanted", "#", "+"])
def test_a_search_over_many_names_pauses(topic_filter: str) -> None:
    names = [f"{number}/unwanted" for number in range(4 * LOOKS_A_PAUSE)]
    found = list(retained(*names, "0/wanted").matches(topic_filter))
    assert found.count("") >= 4
    assert len([name for name in found if name]) == {"+/wanted": 1, "#": len(names) + 1, "+": 0}[topic_filter]


def test_messages_come_and_go_during_a_search() -> None:
    messages = retained(*(f"{number}/a" for number in range(1000)))
    search = messages.matches("#")
    found = [next(search) for _ in range(10)]
    for number in range(500, 1000):
        del messages._entries[f"{number}/a"]
        messages._drop_levels(f"{number}/a")
    messages._put("later/a", 1, 1, 0)
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
