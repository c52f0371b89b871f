"""The codes of entries: remembered for the tags that are in use, and supplied by a plugin for its topics."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.store.conftest import OpenStore

from martlet.message import find_property
from martlet.records.codec import tags_code
from martlet.records.layout import ENTRY
from martlet.store.format import tags
from martlet.store.format.tags import REMEMBERED_BYTES_MAX, TagCodes, find_tags
from martlet.testing.stores import message


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The tags whose code is computed from now on."""
    computed: list[bytes] = []

    def compute(found: bytes) -> int:
        computed.append(found)
        return tags_code(found)

    monkeypatch.setattr(tags, "tags_code", compute)
    return computed


def test_the_codes_of_twenty_thousand_names_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed, codes = counted(monkeypatch), TagCodes()
    names = [b"site/%d/temperature" % number for number in range(20_000)]
    for _ in range(3):
        for name in names:
            assert codes.of(b"TAGS\x01%b\x02" % name) == tags_code(name)
    assert len(computed) == 20_000


def test_names_in_use_outlive_others_that_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "REMEMBERED_MAX", 100)
    computed, codes = counted(monkeypatch), TagCodes()
    for number in range(1000):
        codes.of(b"TAGS\x01once%d\x02" % number)
        codes.of(b"TAGS\x01usual%d\x02" % (number % 10))
    assert len([name for name in computed if name.startswith(b"usual")]) == 10
    assert len(codes._codes) + len(codes._before) <= 200


@given(st.lists(st.sampled_from([b"TAGS\x01a", b"TAGS\x01", b"xTAGS\x01b", b"\x02", b"TAGS", b"K\x01TAGS\x01c", b"d"])))
def test_the_tags_are_those_that_readers_find(pieces: list[bytes]) -> None:
    properties = b"".join(pieces)
    assert find_tags(properties) == find_property(properties, b"TAGS")
    assert TagCodes().of(properties) == tags_code(find_property(properties, b"TAGS"))


def test_long_names_take_no_memory() -> None:
    codes = TagCodes()
    long = b"x" * (REMEMBERED_BYTES_MAX + 1)
    assert codes.of(b"TAGS\x01%b\x02" % long) == tags_code(long)
    assert not codes._codes


async def test_without_a_dispatcher_no_topic_is_special(open_store: OpenStore) -> None:
    store = await open_store()
    one = message(b"x", "SCHEDULE_TOPIC_XXXX", "tag")
    store.writer.append(one, 0)
    entry = store.queues.entries(store.queue("SCHEDULE_TOPIC_XXXX", 0), 0, 1)
    assert ENTRY.unpack(entry)[2] == tags_code(b"tag")
