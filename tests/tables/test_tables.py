"""The JSON tables of config/: RocketMQ's bytes are read, ours are what RocketMQ reads."""

import contextlib
import json
from collections.abc import Mapping

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import StoreError
from martlet.runtime.steps import finish_now
from martlet.tables.rocketmq_json import DataVersion, parse, render_in_steps
from martlet.testing.stores import ManualClock

NAMES = st.text("%|abcXYZ019_-", min_size=1, max_size=20)
OFFSETS = st.dictionaries(st.integers(0, 2**31 - 1), st.integers(-1, 2**63 - 1), max_size=5)


def render(name: str, table: Mapping[str, object], *, bare_keys: bool = False) -> bytes:
    return b"".join(
        finish_now(render_in_steps({"dataVersion": {"counter": 1}}, name, table.items(), bare_keys=bare_keys))
    )


@given(st.dictionaries(st.builds("{}@{}".format, NAMES, NAMES), OFFSETS, max_size=5))
def test_offsets_come_back_as_they_were(table: dict[str, dict[int, int]]) -> None:
    data = render("offsetTable", table, bare_keys=True)
    back = parse(data, "consumerOffset.json")["offsetTable"]
    assert {key: {int(k): v for k, v in inner.items()} for key, inner in back.items()} == table


@given(st.recursive(st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.none(), st.lists, max_leaves=5))
def test_values_come_back_as_they_were(value: object) -> None:
    """Also texts that look like a key with a number."""
    table = {"a": {"value": value, "trap": '{1:2,"3":4, 5 : 6'}}
    assert parse(render("t", table), "x")["t"] == table
    assert parse(render("t", table, bare_keys=True), "x")["t"] == table


@given(st.dictionaries(st.text("0123456789", min_size=1), st.integers(0, 9), max_size=4))
def test_a_topic_whose_name_is_a_number_stays_a_text(table: dict[str, int]) -> None:
    data = render("topicConfigTable", table)
    assert json.loads(data)["topicConfigTable"] == table, "it is JSON, which any reader takes"


def test_integer_keys_are_written_bare_as_rocketmq_does() -> None:
    data = render("offsetTable", {"T@G": {0: 12, 1: 7}, "U@G": {0: 1}}, bare_keys=True)
    assert data == b'{"dataVersion":{"counter":1},\n"offsetTable":{\n"T@G":{0:12,1:7},\n"U@G":{0:1}\n}}'


@pytest.mark.parametrize(
    "data",
    [
        b'{"offsetTable":{"T@G":{0:12,1:7}}}',
        b'{"offsetTable":{"T@G":{ 0 : 12 , 1 : 7 }}}',
        b'{\n\t"offsetTable":{\n\t\t"T@G":{0:12,\n1:7\n\t\t}\n\t}\n}',
        b'{"offsetTable":{"T@G":{"0":12,"1":7}}}',
    ],
)
def test_keys_are_read_bare_or_quoted(data: bytes) -> None:
    assert parse(data, "x") == {"offsetTable": {"T@G": {"0": 12, "1": 7}}}


def test_a_text_that_looks_like_a_bare_key_is_left_alone() -> None:
    data = b'{"a":"{1:2","b\\"{3:":",4:5","offsetTable":{6:7}}'
    assert parse(data, "x") == {"a": "{1:2", 'b"{3:': ",4:5", "offsetTable": {"6": 7}}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"1", b"null", b'{"a":}', b"\xff\xfe", b'{"a":1}x', b"{1:", b"\x00" * 99]
)
def test_what_is_not_a_table_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(StoreError, match=r"topics\.json is not"):
        parse(data, "topics.json")


@given(st.binary(max_size=60))
def test_any_bytes_are_a_table_or_a_store_error(data: bytes) -> None:
    with contextlib.suppress(StoreError):
        assert isinstance(parse(data, "x"), dict)


def test_a_version_counts_changes_and_says_when() -> None:
    clock = ManualClock(5000)
    version = DataVersion()
    version.next(clock)
    clock.ms += 10
    version.next(clock)
    assert version.as_json() == {"counter": 2, "stateVersion": 0, "timestamp": 5010}
    assert orjson.loads(orjson.dumps(version.as_json())) == version.as_json()


@pytest.mark.parametrize("table", [None, [], "x", {"counter": "7"}, {"counter": True, "timestamp": 1.5}])
def test_a_version_that_is_none_changes_nothing(table: object) -> None:
    version = DataVersion(3, 1, 99)
    version.load(table)
    assert version.as_json() == {"counter": 3, "stateVersion": 1, "timestamp": 99}


def test_a_version_of_4x_has_no_state_version() -> None:
    version = DataVersion()
    version.load({"counter": 7, "timestamp": 1700000000000})
    assert version.as_json() == {"counter": 7, "stateVersion": 0, "timestamp": 1700000000000}
