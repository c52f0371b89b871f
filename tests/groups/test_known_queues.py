"""The queues of shared groups are found by group and by topic, as a set of keys would find them."""

from hypothesis import given
from hypothesis import strategies as st

from martlet.groups.journal.journal_codec import Key
from martlet.groups.journal.state import KnownQueues

KEYS = st.builds(
    Key, st.sampled_from(("", "mqtt")), st.sampled_from(("g", "h")), st.sampled_from("tu"), st.integers(0, 3)
)


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=60))
def test_known_lanes_are_a_set(operations: list[tuple[bool, Key]]) -> None:
    known, expected = KnownQueues(), set[Key]()
    for is_added, key in operations:
        if is_added:
            known.add(key)
            expected.add(key)
        else:
            known.discard(key)
            expected.discard(key)
        assert (key in known) == is_added
        assert len(known) == len(expected)
    assert set(known.topics()) == {key.topic for key in expected}
    all_queues = len(expected)
    for topic in "tu":
        assert set(known.on(topic)) == {key for key in expected if key.topic == topic}
        assert set(known.groups(topic)) == {key[:2] for key in expected if key.topic == topic}
        queues, groups = len(known.on(topic)), len(known.groups(topic))
        all_queues += 4 * groups - queues
        assert known.count_with(topic, 4) == all_queues
        for name in (("", "g"), ("mqtt", "h")):
            of = {key for key in expected if key[:3] == (*name, topic)}
            assert set(known.of(*name, topic)) == of
            assert known.count_of(*name, topic) == len(of)
    for key in expected:
        known.discard(key)
    assert known.count_with("t", 4) == 0
    known.add(Key("", "g", "t", 0))
    known.clear()
    assert not len(known)
    assert known.topics() == []
