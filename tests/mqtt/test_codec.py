"""Packets to bytes and back; bytes that are no packets; and runs, which say the same as their packets one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.mqtt.packet_strategies import DATA, IDS, TEXTS, VERSIONS, packets

from martlet_mqtt.wire.codec import decode_packet, encode_packet, packet_bytes
from martlet_mqtt.wire.codes import V3, V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.errors import Malformed, MqttError
from martlet_mqtt.wire.names import Names, check_client_id, check_filter, check_name, check_user_name, split_shared
from martlet_mqtt.wire.packets import (
    Ack,
    Auth,
    Disconnect,
    Packet,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from martlet_mqtt.wire.properties import NO_PROPERTIES, encode_varint
from martlet_mqtt.wire.scanner import PUBREL, AckRun, PublishRun, acks_of, scan_acks, scan_publishes


def head_bytes(data: bytes) -> int:
    at = 2
    while data[at - 1] > 127:
        at += 1
    return at


def decoded(data: bytes, version: int) -> Packet:
    assert packet_bytes(data, 0) == len(data)
    return decode_packet(data[0], data[head_bytes(data) :], version)


@given(VERSIONS.flatmap(lambda version: st.tuples(st.just(version), packets(version))))
def test_a_packet_comes_out_as_it_went_in(case: tuple[int, Packet]) -> None:
    version, packet = case
    assert decoded(encode_packet(packet, version), version) == packet


def cut_packets(packet: Packet, version: int, size: int) -> dict[int, Packet]:
    """Return the packets that the first bytes of a content of *size* bytes are, by the number of these bytes."""
    found: dict[int, Packet] = {}
    match packet:
        case Publish():
            least = size - len(packet.payload)
            found = {
                least + each: replace(packet, payload=packet.payload[:each]) for each in range(len(packet.payload))
            }
        case Suback() | Unsuback() if version == V5 or isinstance(packet, Suback):
            least = size - len(packet.codes)
            found = {least + each: replace(packet, codes=packet.codes[:each]) for each in range(len(packet.codes))}
        case Subscribe():
            for each in range(len(packet.subscriptions) - 1, 0, -1):
                size -= 3 + len(packet.subscriptions[each].topic_filter.encode())
                found[size] = replace(packet, subscriptions=packet.subscriptions[:each])
        case Unsubscribe():
            for each in range(len(packet.filters) - 1, 0, -1):
                size -= 2 + len(packet.filters[each].encode())
                found[size] = replace(packet, filters=packet.filters[:each])
        case Ack() | Disconnect() | Auth() if version == V5:  # reason and properties may be left out
            least = 2 if isinstance(packet, Ack) else 0
            found = {least: replace(packet, reason=0, properties=NO_PROPERTIES)}
            found[least + 1] = replace(packet, properties=NO_PROPERTIES)
        case _:
            pass
    return found


@given(VERSIONS.flatmap(lambda version: st.tuples(st.just(version), packets(version))))
def test_a_packet_that_is_cut_is_malformed_or_a_shorter_one(case: tuple[int, Packet]) -> None:
    version, packet = case
    data = encode_packet(packet, version)
    content = data[head_bytes(data) :]
    shorter = cut_packets(packet, version, len(content))
    for size in range(len(content)):
        if size in shorter:
            assert decode_packet(data[0], content[:size], version) == shorter[size]
        else:
            with pytest.raises(MqttError):
                decode_packet(data[0], content[:size], version)


def continued(packet: Packet, version: int, size: int) -> Packet | None:
    """Return what *packet*, whose content has *size* bytes, is with one more byte, 0; None: no packet."""
    match packet:
        case Publish():
            return replace(packet, payload=packet.payload + b"\0")
        case Suback():
            return replace(packet, codes=(*packet.codes, 0))
        case Unsuback() if version == V5:
            return replace(packet, codes=(*packet.codes, 0))
        case Ack() if version == V5 and size < 4:  # the byte is a reason, or the length of no properties
            return packet
        case Disconnect() | Auth() if version == V5 and size < 2:
            return packet
        case _:
            return None


@given(VERSIONS.flatmap(lambda version: st.tuples(st.just(version), packets(version))))
def test_a_packet_that_continues_is_malformed_or_a_longer_one(case: tuple[int, Packet]) -> None:
    version, packet = case
    data = encode_packet(packet, version)
    content = data[head_bytes(data) :]
    longer = continued(packet, version, len(content))
    if longer is None:
        with pytest.raises(MqttError):
            decode_packet(data[0], content + b"\0", version)
    else:
        assert decode_packet(data[0], content + b"\0", version) == longer


@given(st.integers(0, 255), st.binary(max_size=80), VERSIONS)
def test_any_bytes_are_a_packet_or_an_error_of_the_protocol(first: int, data: bytes, version: int) -> None:
    reasons = list[ReasonCode]()
    try:
        encode_packet(decode_packet(first, data, version), version)
    except MqttError as error:
        reasons.append(error.reason)
    assert all(reason >= ReasonCode.UNSPECIFIED_ERROR for reason in reasons)


@pytest.mark.parametrize("value", [0, 1, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, 268_435_455])
def test_lengths_have_up_to_four_bytes(value: int) -> None:
    encoded = encode_varint(value)
    assert packet_bytes(b"\x30" + encoded, 0) == value + 1 + len(encoded)
    for size in range(len(encoded)):
        assert packet_bytes((b"\x30" + encoded)[: size + 1], 0) == 0


@pytest.mark.parametrize("data", [b"\x30\xff\xff\xff\xff", b"\x30\x80\x80\x80\x80\x01"])
def test_a_length_of_five_bytes_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        packet_bytes(data, 0)


FILTERS = {
    "#": True,
    "+": True,
    "a/#": True,
    "a/+/b": True,
    "+/+": True,
    "/+": True,
    "/": True,
    "+/#": True,
    "": False,
    "a#": False,
    "a/#/b": False,
    "a+": False,
    "+a": False,
    "##": False,
    "a/+b": False,
    "#/": False,
    "a\0": False,
    "a\x1f": False,
    "a/" * 200: False,
}


@pytest.mark.parametrize("topic_filter", list(FILTERS))
def test_which_filters_are_valid(topic_filter: str) -> None:
    if FILTERS[topic_filter]:
        check_filter(topic_filter)
    else:
        with pytest.raises(MqttError) as caught:
            check_filter(topic_filter)
        assert caught.value.reason == ReasonCode.TOPIC_FILTER_INVALID


@pytest.mark.parametrize("name", ["", "a/+", "#", "a\0b", "a\x7f"])
def test_names_have_no_wildcards_and_no_control_characters(name: str) -> None:
    with pytest.raises(MqttError) as caught:
        check_name(name)
    assert caught.value.reason == ReasonCode.TOPIC_NAME_INVALID


@pytest.mark.parametrize("name", ["a\0b", "a\x7f", "a\x85"])
def test_clients_and_users_have_no_control_characters(name: str) -> None:
    with pytest.raises(MqttError) as caught:
        check_client_id(name)
    assert caught.value.reason == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    with pytest.raises(MqttError) as caught:
        check_user_name(name)
    assert caught.value.reason == ReasonCode.BAD_USER_NAME_OR_PASSWORD


@pytest.mark.parametrize("name", ["", "+4917712345", "a#b", "Zm9v+/8=", "me+tag@example.org"])
def test_they_may_have_wildcards(name: str) -> None:
    check_client_id(name)
    check_user_name(name)


def test_the_parts_of_shared_filters() -> None:
    assert split_shared("a/$share/b") is None
    found = split_shared("$share/g/a/+")
    assert found is not None
    assert tuple(found) == ("g", "a/+")
    for wrong in ("$share/", "$share/g", "$share/g/", "$share//a", "$share/+/a", "$share/#/a"):
        with pytest.raises(MqttError) as caught:
            split_shared(wrong)
        assert caught.value.reason == ReasonCode.TOPIC_FILTER_INVALID


# runs

KNOWN = ["a", "a/b", "a/b/c", "x" * 200, "ü"]
PUBLISHES = st.builds(
    Publish, st.sampled_from([*KNOWN, "unknown"]), DATA | st.binary(min_size=120, max_size=140), st.just(0)
) | st.builds(Publish, st.sampled_from(KNOWN), DATA, st.integers(1, 2), packet_id=IDS)


def names() -> Names:
    found = Names(4096)
    for name in KNOWN:
        found.find(name)
    return found


def rest_of(data: bytes, version: int, known: Names) -> list[Packet]:
    """Return the packets in *data*, taken as runs where that is possible."""
    found: list[Packet] = []
    at = 0
    while at < len(data):
        run: PublishRun | None = None
        if data[at] in (0x30, 0x32, 0x34):
            run = scan_publishes(data, at, version, known, len(data))
        acks = scan_acks(data, at)
        if run is not None:
            ids = [int.from_bytes(each) for each in run.ids] or [0] * len(run.ends)
            for name, body, packet_id in zip(run.names, run.bodies, ids, strict=True):
                found.append(Publish(name.text, body, run.qos, packet_id=packet_id))
            assert (run.start, len(run.ends) <= 5) == (at, True)
            at = run.ends[-1]
        elif acks is not None:
            found += [Ack(acks[0].kind, packet_id) for packet_id in acks[0].ids]
            at = acks[1]
        else:
            end = at + packet_bytes(data, at)
            found.append(decoded(data[at:end], version))
            at = end
    return found


@given(VERSIONS.flatmap(lambda version: st.tuples(st.just(version), st.lists(PUBLISHES | packets(version)))))
def test_runs_say_what_their_packets_say_one_by_one(case: tuple[int, list[Packet]]) -> None:
    version, sent = case
    data = b"".join(encode_packet(packet, version) for packet in sent)
    assert rest_of(data, version, names()) == sent


@pytest.mark.parametrize("version", [V3, V4, V5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_run_has_many_packets(version: int, qos: int) -> None:
    sent = [Publish("a/b", b"%d" % index, qos, packet_id=index if qos else 0) for index in range(1, 301)]
    data = b"".join(encode_packet(packet, version) for packet in sent)
    run = scan_publishes(data, 0, version, names(), 1024)
    assert run is not None
    assert (len(run.bodies), run.ends[-1]) == (300, len(data))
    for cut in range(len(data)):  # it ends before what is incomplete
        part = scan_publishes(data[:cut], 0, version, names(), 1024) if cut else None
        complete = sum(1 for end in run.ends if end <= cut)
        assert (len(part.ends) if part is not None else 0) == complete


@pytest.mark.parametrize(
    "data",
    [
        b"\x32\x05\x00\x01a\x00\x00",  # identifier 0
        b"\x30\x03\x00\x02a",  # the name goes beyond the packet
        b"\x30\x02\x00\x00",  # no name
        b"\x30\x01\x00",
        b"\x30\x80\x80\x80\x80\x01",
        b"\x30\x03\x00\x01\xff",  # no UTF-8
        b"\x40\x02\x00\x00",
        b"\x62\x03\x00\x01\x00",
    ],
)
def test_packets_with_errors_are_in_no_run(data: bytes) -> None:
    assert scan_acks(data, 0) is None
    if data[0] not in (0x40, 0x62):
        assert scan_publishes(data, 0, V4, names(), 1000) is None


def test_acknowledgements_of_one_kind_are_a_run() -> None:
    data = b"".join(encode_packet(Ack(PacketType.PUBREC, each), V4) for each in (5, 65_535, 1))
    assert scan_acks(data + b"\x40\x02\x00\x01", 0) == (AckRun(PacketType.PUBREC, (5, 65_535, 1)), 12)
    assert scan_acks(data[:11], 0) == (AckRun(PacketType.PUBREC, (5, 65_535)), 8)


@pytest.mark.parametrize("reason", [0, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND])
@given(st.lists(st.integers(1, 65_535), min_size=1))
def test_acknowledgements_are_encoded_together_as_one_by_one(reason: int, ids: list[int]) -> None:
    packets = [encode_packet(Ack(PacketType.PUBREL, each, reason), V5) for each in ids]
    assert acks_of(PUBREL, ids, reason) == b"".join(packets)


@given(st.integers(1, 65_535), st.integers(1, 2000))
def test_the_identifiers_of_a_run_are_a_range_if_they_are_consecutive(first: int, count: int) -> None:
    ids = range(first, min(first + count, 65_536))
    run, _ = scan_acks(acks_of(PUBREL, ids), 0, 2000) or pytest.fail("it is no run")
    assert run.ids == ids
    for reason in (0, 0x92):
        assert acks_of(PUBREL, ids, reason) == acks_of(PUBREL, list(ids), reason)
    if len(ids) > 2:
        gap = [*ids[:1], *ids[2:]]
        run, _ = scan_acks(acks_of(PUBREL, gap), 0, 2000) or pytest.fail("it is no run")
        assert run.ids == tuple(gap)


@given(TEXTS, TEXTS)
def test_names_are_kept_once(first: str, second: str) -> None:
    known = Names(100)
    for each in (first, second, first):
        try:
            found = known.find(each)
        except MqttError:
            continue
        assert found is known.find_raw(each.encode())
        assert found.text == each


@pytest.mark.parametrize("version", [V4, V5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("more", [1, 2, 3])
def test_a_length_with_needless_bytes_is_left_to_the_codec(version: int, qos: int, more: int) -> None:
    """Subscribers would get it as it came [MQTT-1.5.5-1]."""
    usual = encode_packet(Publish("a", b"x", qos, packet_id=1 if qos else 0), version)
    unusual = usual[:1] + bytes((usual[1] | 0x80,)) + b"\x80" * (more - 1) + b"\0" + usual[2:]
    assert scan_publishes(unusual, 0, version, names(), 1000) is None
    run = scan_publishes(usual + unusual, 0, version, names(), 1000)
    assert run is not None
    assert len(run.ends) == 1
    found = decode_packet(unusual[0], unusual[2 + more :], version)
    assert isinstance(found, Publish)
    assert found.payload == b"x"
