"""The state machine: every packet in every state, limits, time, and every cutting of the bytes."""

import math

import pytest
from msgspec.structs import replace

from martlet.testing.peers import check_connection
from martlet_mqtt.wire.codec import decode_packet, encode_packet
from martlet_mqtt.wire.codes import V3, V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.connection import (
    ACK_ROOM,
    LARGE_BYTES,
    TRANSITIONS,
    LargePublish,
    Limits,
    MqttConnection,
    State,
)
from martlet_mqtt.wire.errors import MqttError
from martlet_mqtt.wire.names import Names
from martlet_mqtt.wire.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import Properties, Property
from martlet_mqtt.wire.scanner import RUN_PACKETS_MAX, AckRun, PublishRun, acks_of

LIMITS = Limits(connect_bytes_max=300, packet_bytes_max=1000, connect_s=10.0)
PACKETS: dict[PacketType, Packet] = {
    PacketType.CONNECT: Connect("c", V5),
    PacketType.CONNACK: Connack(False),
    PacketType.PUBLISH: Publish("a", b"x", 1, packet_id=1),
    PacketType.PUBACK: Ack(PacketType.PUBACK, 1, 0x10),
    PacketType.PUBREC: Ack(PacketType.PUBREC, 1, 0x10),
    PacketType.PUBREL: Ack(PacketType.PUBREL, 1, 0x92),
    PacketType.PUBCOMP: Ack(PacketType.PUBCOMP, 1, 0x92),
    PacketType.SUBSCRIBE: Subscribe(1, (FilterSubscription("a", 1),)),
    PacketType.SUBACK: Suback(1, (0,)),
    PacketType.UNSUBSCRIBE: Unsubscribe(1, ("a",)),
    PacketType.UNSUBACK: Unsuback(1, (0,)),
    PacketType.PINGREQ: Pingreq(),
    PacketType.PINGRESP: Pingresp(),
    PacketType.DISCONNECT: Disconnect(),
    PacketType.AUTH: Auth(),
}


def connect(state: State = State.NEW, version: int = V5, names: Names | None = None) -> MqttConnection:
    connection = MqttConnection(LIMITS, names or Names(100), 0.0)
    if state is not State.NEW:
        connection.receive_data(encode_packet(Connect("c", version), version), 0.0)
        assert [type(event) for event in connection.events()] == [Connect]
    if state in (State.OPEN, State.ENDED):
        connection.open(version, 60, 0.0)
    if state is State.ENDED:
        connection.end()
    assert connection.state is state
    return connection


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("kind", list(PACKETS))
@pytest.mark.parametrize("version", [V3, V4, V5])
def test_every_packet_in_every_state(state: State, kind: PacketType, version: int) -> None:
    connection, packet = connect(state, version), PACKETS[kind]
    if isinstance(packet, Connect):
        packet = Connect("c", version)
    if isinstance(packet, Ack) and version != V5:
        packet = Ack(kind, 1)
    connection.receive_data(encode_packet(packet, version), 1.0)
    after = TRANSITIONS.get((state, kind))
    if state is State.ENDED:
        assert list(connection.events()) == []
        assert connection.buffered_bytes == 0
    elif after is None or (kind is PacketType.AUTH and version != V5):
        with pytest.raises(MqttError) as caught:
            list(connection.events())
        farewell = connection.farewell(caught.value)
        assert connection.state is State.ENDED
        if version == V5 and state is State.OPEN:
            last = decode_packet(farewell[0], farewell[2:], version)
            assert isinstance(last, Disconnect)
            assert last.reason in (ReasonCode.PROTOCOL_ERROR, ReasonCode.MALFORMED_PACKET)
        elif state is not State.ACCEPTING:
            assert farewell == b""
    else:
        (event,) = connection.events()
        assert connection.state is after
        if isinstance(event, AckRun):
            event = Ack(event.kind, event.ids[0])
        if isinstance(event, PublishRun):
            event = Publish(event.names[0].text, event.bodies[0], event.qos, packet_id=int.from_bytes(event.ids[0]))
        assert event == packet


@pytest.mark.parametrize("before", [0, 3])
def test_a_packet_over_the_limit_is_in_no_run(before: int) -> None:
    connection = connect(State.OPEN)
    small, large = (encode_packet(Publish("a", bytes(size)), V5) for size in (10, LIMITS.packet_bytes_max))
    connection.receive_data(small * before + large, 1.0)
    events = connection.events()
    if before:
        run = next(events)
        assert isinstance(run, PublishRun)
        assert len(run.ends) == before
    with pytest.raises(MqttError, match=r"at most 1000 are accepted \(broker.message_bytes_max and") as caught:
        next(events)
    assert caught.value.reason is ReasonCode.PACKET_TOO_LARGE


def test_events_are_the_same_however_the_bytes_are_cut() -> None:
    names = Names(100)
    names.find("a/b")
    sent: list[Packet] = [
        Publish("a/b", b"one", 0),
        Publish("a/b", b"two", 0),
        Publish("a/b", b"x" * 200, 1, packet_id=1),
        Publish("c", b"new name", 2, packet_id=2),
        Ack(PacketType.PUBACK, 7),
        Ack(PacketType.PUBACK, 8),
        Ack(PacketType.PUBREL, 9),
        Subscribe(3, (FilterSubscription("a/#", 2), FilterSubscription("b", 1))),
        Pingreq(),
        Publish("a/b", b"last", 0, properties=Properties({Property.CONTENT_TYPE: "t"})),
        Disconnect(),
    ]
    data = b"".join(encode_packet(packet, V5) for packet in sent)

    def flatten(event: object) -> list[object]:
        if isinstance(event, PublishRun):
            ids = [int.from_bytes(each) for each in event.ids] or [0] * len(event.ends)
            return [
                Publish(name.text, body, event.qos, packet_id=packet_id)
                for name, body, packet_id in zip(event.names, event.bodies, ids, strict=True)
            ]
        if isinstance(event, AckRun):
            return [Ack(event.kind, packet_id) for packet_id in event.ids]
        return [event]

    check_connection(lambda: connect(State.OPEN, V5, names), data, sent, flatten=flatten)


def test_nothing_is_kept_of_packets_that_are_too_long() -> None:
    connection = connect()
    connection.receive_data(b"\x10\xad\x02", 0.0)
    with pytest.raises(MqttError, match="a packet has 304 bytes") as caught:
        list(connection.events())
    assert caught.value.reason == ReasonCode.PACKET_TOO_LARGE
    connection = connect(State.OPEN)
    connection.receive_data(b"\x30\xe9\x07" + bytes(500), 0.0)
    with pytest.raises(MqttError) as caught:
        list(connection.events())
    last = connection.farewell(caught.value)
    assert last[2] == ReasonCode.PACKET_TOO_LARGE


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1", b"\x16\x03\x01", b"CONNECT\n\n\0", b"\0\0\0\0", b"\x30\x03"])
def test_other_protocols_get_no_answer(first: bytes) -> None:
    connection = connect()
    connection.receive_data(first, 0.0)
    with pytest.raises(MqttError) as caught:
        list(connection.events())
    assert connection.farewell(caught.value) == b""


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"\x10\x0d\0\4MQTT\x06\x02\0\0\0\1c", b"\x20\x03\0\x84"),  # the version after 5
        (b"\x10\x0d\0\4MQTT\x02\x02\0\0\0\1c", b"\x20\x02\0\1"),  # an older one
        (b"\x10\x0d\0\4MQTX\x04\x02\0\0\0\1c", b"\x20\x02\0\1"),
        (b"\x10\x0d\0\4MQTT\x04\x03\0\0\0\1c", b""),  # the reserved flag
        (b"\x10\x0e\0\4MQTT\x05\x03\0\0\0\0\1c", b"\x20"),
        (b"\x10\x11\0\4MQTT\x05\x02\0\0\3\x21\0\0\0\1c", b"\x20"),  # receive maximum 0
        (b"\x10\x0e\0\4MQTT\x05\x02\0\0\x05\0\1c", b"\x20"),
    ],
)
def test_a_connect_with_errors_is_answered_in_its_version(data: bytes, answer: bytes) -> None:
    connection = connect()
    connection.receive_data(data, 0.0)
    with pytest.raises(MqttError) as caught:
        list(connection.events())
    farewell = connection.farewell(caught.value)
    assert farewell[: len(answer)] == answer[: len(farewell)] or farewell[0] == answer[0]
    assert bool(farewell) == bool(answer)


def test_a_client_must_connect_and_then_speak_in_time() -> None:
    connection = connect()
    connection.receive_data(b"\x10", 9.0)
    assert connection.deadline() == 10.0
    connection.handle_timeout(9.9)
    with pytest.raises(MqttError, match="did not connect within 10 s"):
        connection.handle_timeout(10.0)
    connection = connect(State.ACCEPTING)
    connection.open(V5, 60, 5.0)
    assert connection.deadline() == 95.0
    connection.receive_data(b"\xc0\0", 50.0)
    assert connection.deadline() == 140.0
    with pytest.raises(MqttError) as caught:
        connection.handle_timeout(140.0)
    assert connection.farewell(caught.value)[2] == ReasonCode.KEEP_ALIVE_TIMEOUT
    connection = connect(State.ACCEPTING)
    connection.open(V4, 0, 5.0)
    assert connection.deadline() == math.inf


@pytest.mark.parametrize("version", [V3, V4])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_publish_of_mqtt_3_that_is_too_large_is_passed_over(version: int, qos: int) -> None:
    large = Publish("a/name", bytes(1200), qos, True, packet_id=7 if qos else 0)
    size = len(encode_packet(large, version))
    data = encode_packet(Pingreq(), version) + encode_packet(large, version) * 2 + encode_packet(Pingreq(), version)
    passed = LargePublish(replace(large, payload=b""), size)
    check_connection(lambda: connect(State.OPEN, version), data, [Pingreq(), passed, passed, Pingreq()])


def test_its_payload_is_not_kept() -> None:
    connection = connect(State.OPEN, V4)
    connection.receive_data(b"\x30\xff\xff\xff\x7f\x00\x01a" + bytes(100), 0.0)
    assert list(connection.events()) == []
    for second in range(1000):
        connection.receive_data(bytes(1000), float(second))
        assert list(connection.events()) == []
        assert connection.buffered_bytes == 0
    assert connection.deadline() == 999 + 90


# A name of 65,535 bytes with U+0000, packet identifier 0, and QoS 3.
@pytest.mark.parametrize("head", ["32ffff7fffff", "32ffff7f0001610000", "36ffff7f000161"])
def test_one_that_is_malformed_ends_the_connection(head: str) -> None:
    connection, data = connect(State.OPEN, V4), bytes.fromhex(head)
    connection.receive_data(data + bytes(70_000), 0.0)
    with pytest.raises(MqttError):
        list(connection.events())


@pytest.mark.parametrize("version", [V3, V4, V5])
def test_long_packets_come_whole_however_they_are_cut(version: int) -> None:
    payload = bytes(range(256)) * (LARGE_BYTES // 128)
    packet = Publish("a", payload, 1, packet_id=1)
    data = encode_packet(Pingreq(), version) + encode_packet(packet, version) * 2 + encode_packet(Pingreq(), version)
    for piece in (len(data), LARGE_BYTES, 300_000):
        connection = MqttConnection(Limits(), Names(100), 0.0)
        connection.receive_data(encode_packet(Connect("c", version), version), 0.0)
        list(connection.events())
        connection.open(version, 60, 0.0)
        found: list[object] = []
        for at in range(0, len(data), piece):
            connection.receive_data(data[at : at + piece], 0.0)
            for event in connection.events():
                found += event.bodies if isinstance(event, PublishRun) else [event]
        bodies = [each.payload if isinstance(each, Publish) else each for each in found]
        assert bodies == [Pingreq(), payload, payload, Pingreq()]
        assert connection.buffered_bytes == 0


@pytest.mark.parametrize(("step", "has_leases", "expected"), [(1, False, 1), (2, False, ACK_ROOM), (1, True, ACK_ROOM)])
def test_acknowledgements_that_take_long_end_a_turn_earlier(step: int, has_leases: bool, expected: int) -> None:
    connection = connect(State.OPEN)
    connection.has_leases = has_leases
    connection.receive_data(acks_of(0x40, range(1, 4000 * step + 1, step)), 0.0)
    counts = [len(event.ids) for event in connection.events() if isinstance(event, AckRun)]
    assert sum(counts) == 4000
    assert max(counts) == RUN_PACKETS_MAX // expected


def test_messages_of_new_names_end_a_turn_earlier() -> None:
    names = Names(100)
    connection, sizes = connect(State.OPEN, V4, names), list[list[int]]()
    data = b"".join([encode_packet(Publish(f"n/{number}", b"", 0), V4) for number in range(2 * RUN_PACKETS_MAX)])
    for _ in range(2):
        turns: list[int] = [0]
        connection.receive_data(data, 0.0)
        for event in connection.events():
            assert isinstance(event, PublishRun)
            turns[-1] += len(event.ends)
            if connection.is_turn_over:
                turns.append(0)
        assert sum(turns) == 2 * RUN_PACKETS_MAX
        sizes.append(turns)
    assert max(sizes[0]) == RUN_PACKETS_MAX // (1 + names.room)
    assert max(sizes[1]) == RUN_PACKETS_MAX
