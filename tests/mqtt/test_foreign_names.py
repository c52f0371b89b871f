"""Records of RocketMQ producers: a tag that MQTT does not allow as a topic name reaches no MQTT client on any path."""

from pathlib import Path
from typing import cast

import pytest
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker

from martlet.contracts import RecordView
from martlet.message import Message
from martlet.records.compression import compress
from martlet.sessions.session import Session
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.outbound.shares import select_names
from martlet_mqtt.shared.retained import RETAINED_TOPIC
from martlet_mqtt.wire.codes import V4, V5
from martlet_mqtt.wire.names import Names
from martlet_mqtt.wire.packets import Disconnect

BYTES_MAX = 1000
INVALID = [
    b"a/+",
    b"a/#",
    b"+",
    b"a+b",
    b"a\x1fb",
    b"a\x7fb",
    "a\x85b".encode(),
    b"a" * (BYTES_MAX + 1),
    b"a" + b"/a" * 200,
    b"$SYS/broker/version",
    b"$CONTROL/martlet/v1/response",
    b"$x",
    b"a\xff",
    b"a/\xed\xa0\x80",
    b"\xc3",
]
VALID = [b"a||b", b"a b", "ä/日本".encode(), "a\ufffd".encode(), b"a" * BYTES_MAX, b"a" + b"/a" * 199, b"/", b"a/$x"]
FILTERS = ["#", "+", "+/#", "a/+", "a/#", "$SYS/#", "$SYS", "$CONTROL/#", "$x", "$x/#"]
# Properties after the tag: with none but these the tag is read without decoding the others.
MORE = [b"", b"MQTT_QOS\x012\x02", b"colour\x01red\x02"]


def put(mqtt: MqttBroker, name: bytes, more: bytes, body: bytes = b"x", topic: str = "mqtt", sys_flag: int = 0) -> int:
    """Store a record as a producer of RocketMQ does; return its position."""
    message = Message(topic, body, b"TAGS\x01%b\x02" % name + more, 0, 0, sys_flag)
    if topic == "mqtt":
        return mqtt.broker.publish(message).position
    return mqtt.broker.store.writer.append(message, 0).position


class Tagged:
    """A record of which only the tag is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def property(self, name: str | bytes) -> str | None:
        assert name == b"TAGS"
        return self._name or None


async def names_until_end(talk: MqttClient) -> list[bytes]:
    """Return the names of the messages before that of the name ``a/end``, without metrics of the broker."""
    found: list[bytes] = []
    while True:
        (message,) = await talk.messages(1)
        if message.topic == "a/end":
            return found
        if set(message.payload) == set(b"x"):
            found.append(message.topic.encode())


def session_of(mqtt: MqttBroker) -> Session:
    session = mqtt.client("c").session
    assert session is not None
    return session


@pytest.fixture(params=MORE, ids=["bare", "qos", "others"])
def more(request: pytest.FixtureRequest) -> bytes:
    found: bytes = request.param
    return found


async def test_the_broker_and_its_clients_agree_on_valid_names() -> None:
    names = Names(BYTES_MAX)
    assert [name for name in INVALID if names.learn(name) is not None] == []
    assert [name for name in VALID if names.learn(name) is None] == []


@pytest.mark.parametrize("version", [V4, V5])
async def test_new_messages_reach_subscribers_if_their_tag_is_a_valid_name(
    tmp_path: Path, more: bytes, version: int
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(name_bytes_max=BYTES_MAX)) as mqtt:
        talk = await mqtt.connect("c", version)
        await talk.subscribe(*FILTERS)
        for name in (*INVALID, *VALID, b"a/end"):
            put(mqtt, name, more)
        assert await names_until_end(talk) == VALID


@pytest.mark.parametrize("wanted", [FILTERS, ["a/end", "$x", "$SYS/broker/version", "a||b"]])
async def test_a_session_that_comes_back_gets_messages_with_valid_names(
    tmp_path: Path, more: bytes, wanted: list[str]
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(name_bytes_max=BYTES_MAX)) as mqtt:
        talk = await mqtt.connect("c", clean=False, expiry_s=100)
        await talk.subscribe(*wanted)
        await talk.send(Disconnect())
        await talk.closed()
        for name in (*INVALID, *VALID, b"a/end"):
            put(mqtt, name, more)
        await mqtt.settle()
        talk = await mqtt.connect("c", clean=False, expiry_s=100, present=True)
        assert await names_until_end(talk) == (VALID if wanted == FILTERS else [b"a||b"])


@pytest.mark.parametrize(("topic_filter", "qos"), [("#", 0), ("#", 1), ("#", 2), ("a/end", 1), ("+/+", 1)])
async def test_shared_subscriptions_bring_messages_with_valid_names(
    tmp_path: Path, more: bytes, topic_filter: str, qos: int
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(name_bytes_max=BYTES_MAX, queues=1)) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe(f"$share/g/{topic_filter}", "$share/h/$x", "$share/h/$SYS/#", qos=qos)
        for name in (*INVALID, *VALID, b"a/end"):
            put(mqtt, name, more)
        expected = {"#": VALID, "a/end": [], "+/+": [name for name in VALID if name.count(b"/") == 1]}
        assert await names_until_end(talk) == expected[topic_filter]


@pytest.mark.parametrize("topic_filter", ["#", "+", "a/#", "a/+"])
def test_shared_subscriptions_lease_nothing_that_has_a_wildcard_or_control_character(topic_filter: str) -> None:
    """Each message that is leased is settled with a note in the log."""
    predicate = select_names(topic_filter).predicate
    assert predicate is not None
    for name in ("a/+", "a/#", "+", "#", "a\x1f", "a/\x7f", "a/\x85", "$x", ""):
        assert not predicate(cast(RecordView, Tagged(name)))


async def test_what_is_sent_again_has_a_valid_name(tmp_path: Path, more: bytes) -> None:
    """An earlier version of the broker could have sent it, or one with other limits."""
    async with mqtt_broker(tmp_path, MqttConfig(name_bytes_max=BYTES_MAX)) as mqtt:
        talk = await mqtt.connect("c", clean=False, expiry_s=100)
        await talk.subscribe(*FILTERS)
        positions = [put(mqtt, each, more) for each in (*INVALID, b"a/end")]
        assert await names_until_end(talk) == []
        session = session_of(mqtt)
        session.hand_out(500, positions, session.position)
        await mqtt.settle()
        talk.hang_up()
        talk = await mqtt.connect("c", clean=False, expiry_s=100, present=True)
        assert await names_until_end(talk) == []
        assert await names_until_end(talk) == []
        assert session_of(mqtt).flight.keys() & range(500, 500 + len(INVALID)) == set()


async def test_retained_messages_have_valid_names(tmp_path: Path, more: bytes) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(name_bytes_max=BYTES_MAX)) as mqtt:
        for name in (*INVALID, b"a/end"):
            put(mqtt, name, more, topic=RETAINED_TOPIC)
        await mqtt.settle()
        talk = await mqtt.connect("c")
        await talk.subscribe(*FILTERS)
        assert await names_until_end(talk) == []


async def test_compressed_messages_have_valid_names_too(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(name_bytes_max=BYTES_MAX)) as mqtt:
        talk = await mqtt.connect("c")
        await talk.subscribe(*FILTERS)
        body, sys_flag = compress(b"x" * 100)
        for name in (*INVALID, *VALID, b"a/end"):
            put(mqtt, name, b"", body, sys_flag=sys_flag)
        assert await names_until_end(talk) == VALID


async def test_an_invalid_name_is_checked_once_for_all_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    is_valid = Names.is_valid

    def check(names: Names, name: str) -> bool:
        checked.append(name)
        return is_valid(names, name)

    monkeypatch.setattr(Names, "is_valid", check)
    async with mqtt_broker(tmp_path) as mqtt:
        talks = [await mqtt.connect(f"c{number}") for number in range(3)]
        for talk in talks:
            await talk.subscribe("#")
        for _ in range(100):
            put(mqtt, b"a/+", b"")
        put(mqtt, b"a/end", b"")
        for talk in talks:
            await names_until_end(talk)
        assert checked.count("a/+") == 1
