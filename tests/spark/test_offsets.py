"""The offsets in a checkpoint."""

import json
from typing import Any

import pytest

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.errors import SparkConnectorError
from martlet_spark.read.offsets import decode, decode_new, encode, find_queues

A0, A1, B0 = MessageQueue("T", "a", 0), MessageQueue("T", "a", 1), MessageQueue("T", "b/c", 0)


def test_offsets_come_back_from_json() -> None:
    value = json.loads(json.dumps(encode({B0: 7, A0: 5}, {A0: 2})))
    assert value == {"v": 1, "t": {"T": {"a/0": 5, "b/c/0": 7}}, "new": {"T": {"a/0": 2}}}
    assert decode(value) == {A0: 5, B0: 7}
    assert decode_new(value) == {A0: 2}
    assert decode_new(encode({A0: 5})) == {}


def test_equal_offsets_are_equal_text() -> None:
    assert json.dumps(encode({A0: 1, B0: 2})) == json.dumps(encode({B0: 2, A0: 1}))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"v": 2, "t": {}},
        {"v": 1},
        {"v": 1, "t": []},
        {"v": 1, "t": {"T": 5}},
        {"v": 1, "t": {"T": {"a/x": 5}}},
        {"v": 1, "t": {"T": {"a/0": None}}},
        {"Orders": {"0": 23}},
    ],
)
def test_the_offset_of_another_source_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(SparkConnectorError, match="which this version did not write; use the checkpoint of this query"):
        decode(value)


@pytest.mark.parametrize(("name", "found"), [("0", [A0, B0]), ("a/0", [A0]), ("b/c/0", [B0]), ("2", []), ("c/0", [])])
def test_a_name_means_queues_of_one_or_of_all_brokers(name: str, found: list[MessageQueue]) -> None:
    assert find_queues("T", name, [A0, A1, B0]) == found
    assert find_queues("U", name, [A0, A1, B0]) == []
