"""Properties and routes as text: what Java writes is read, and what we write Java reads."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import Reason, Refused, RemoteProtocolError
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.properties import PROPERTIES_BYTES_MAX, format_properties, parse_properties
from martlet_remoting.wire.register_broker import order_topics
from martlet_remoting.wire.routes import BrokerGroup, TopicQueues, TopicRoute, Version, decode_route, encode_route

EXAMPLES = [
    (b"a=b", {"a": "b"}),
    (b"a = b c \r\n", {"a": "b c "}),
    (b"a:b\nc d\n", {"a": "b", "c": "d"}),
    (b"# note\n! note\n\n  a=1\n", {"a": "1"}),
    (b"a=one\\\n   two\n", {"a": "onetwo"}),
    (b"a=C:\\\\dir\\\\x\n", {"a": "C:\\dir\\x"}),
    (b"a\\=b=\\u00e9\\t\\n", {"a=b": "é\t\n"}),
    (b"a=\nb\n", {"a": "", "b": ""}),
    (b"a=1\na=2\n", {"a": "2"}),
    (b"a\\uD83D\\uDE00=\\uD83D\\uDE00 \\uD7FF\\u0000\n", {"a\U0001f600": "\U0001f600 \ud7ff\x00"}),
    (b"path=a=b:c\n", {"path": "a=b:c"}),
    ("a=ü\n".encode(), {"a": "ü"}),
    (b"", {}),
]


@pytest.mark.parametrize(("data", "expected"), EXAMPLES)
def test_properties_are_read_as_java_reads_them(data: bytes, expected: dict[str, str]) -> None:
    assert parse_properties(data) == expected


def test_properties_are_written_in_order_with_java_s_words_for_truth() -> None:
    assert format_properties({"b": True, "a": 5, "c": "x\\y\nz"}) == b"a=5\nb=true\nc=x\\\\y\\nz\n"


def test_no_properties_are_read_for_long() -> None:
    assert parse_properties(b"a=" + b"x" * (PROPERTIES_BYTES_MAX - 2))
    with pytest.raises(Refused, match="at most 32768 are read"):
        parse_properties(b"a=" + b"x" * PROPERTIES_BYTES_MAX)


names = st.from_regex(r"[A-Za-z][A-Za-z0-9_.]{0,10}", fullmatch=True)
values = st.text(st.characters(categories=("L", "N", "P", "S", "Zs")), max_size=20).map(str.lstrip)


@given(st.dictionaries(names, values, max_size=5))
def test_properties_round_trip(table: dict[str, str]) -> None:
    assert parse_properties(format_properties(table)) == table


@given(st.binary(max_size=60))
def test_properties_of_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        parse_properties(data)
    except Refused as error:
        assert error.reason is Reason.PARAMETER  # noqa: PT017


small = st.integers(0, 2**31 - 1)
texts = st.text(st.characters(categories=("L", "N", "P", "S", "Z", "Cc")), min_size=1, max_size=10)
routes = st.builds(
    TopicRoute,
    st.lists(st.builds(TopicQueues, texts, small, small, small, small), max_size=3).map(tuple),
    st.lists(
        st.builds(
            BrokerGroup, texts, texts, st.dictionaries(small, texts, max_size=3), st.booleans(), st.none() | texts
        ),
        max_size=3,
        unique_by=lambda group: group.name,
    ).map(lambda groups: {group.name: group for group in groups}),
    st.none() | texts,
)


@given(routes, st.booleans())
def test_both_dialects_of_a_route_say_the_same(route: TopicRoute, standard: bool) -> None:
    body = encode_route(route, standard=standard)
    assert fastjson.loads(body) == _fields(route)
    if standard:
        assert body.isascii()
        assert orjson.loads(body) == _fields(route)


@given(routes, st.booleans())
def test_a_client_reads_the_queues_and_addresses_that_were_written(route: TopicRoute, standard: bool) -> None:
    found = decode_route(encode_route(route, standard=standard))
    assert found.queues == route.queues
    assert {name: group.addresses for name, group in found.brokers.items()} == {
        name: group.addresses for name, group in route.brokers.items()
    }
    assert (found.order or "") == (route.order or "")


def _fields(route: TopicRoute) -> dict[str, object]:
    fields: dict[str, object] = {
        "brokerDatas": [
            {
                "brokerAddrs": {str(number): address for number, address in group.addresses.items()},
                "brokerName": group.name,
                "cluster": group.cluster,
                "enableActingMaster": group.acting_master,
                **({} if group.zone is None else {"zoneName": group.zone}),
            }
            for group in route.brokers.values()
        ],
        "filterServerTable": {},
        "queueDatas": [queues.as_json() for queues in route.queues],
    }
    return fields if route.order is None else {**fields, "orderTopicConf": route.order}


def test_numbers_may_come_as_text_and_old_brokers_lack_fields() -> None:
    assert Version.from_json({"counter": "7", "timestamp": 5}) == Version(7, 0, 5)
    assert Version.from_json(None) == Version()
    assert TopicQueues.from_json({"brokerName": "b", "perm": "4"}) == TopicQueues("b", 16, 16, 4)
    with pytest.raises(RemoteProtocolError, match="lacks brokerName"):
        TopicQueues.from_json({"perm": 4})


def test_order_of_topics_in_an_answer() -> None:
    assert list(order_topics(b"")) == []
    assert list(order_topics(b"{}")) == []
    assert list(order_topics(b'{"table":{"T":"b:4"}}')) == [("T", "b:4")]
