"""Hypothesis strategies for packets of every kind and version."""

from typing import Any

from hypothesis import strategies as st

from martlet_mqtt.wire.codes import V5, PacketType
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
    Will,
)
from martlet_mqtt.wire.properties import NO_PROPERTIES, WILL, Properties, Property, allowed_in

TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
DATA = st.binary(max_size=30)
IDS = st.integers(1, 65_535)
VERSIONS = st.sampled_from([3, 4, 5])
# One of each type of value; the rest of the table is compared with the specification.
_VALUES: dict[Property, st.SearchStrategy[Any]] = {
    Property.PAYLOAD_FORMAT: st.integers(0, 1),
    Property.MESSAGE_EXPIRY: st.integers(0, 2**32 - 1),
    Property.CONTENT_TYPE: TEXTS,
    Property.CORRELATION_DATA: DATA,
    Property.RECEIVE_MAXIMUM: st.integers(1, 65_535),
    Property.REASON_STRING: TEXTS,
    Property.SESSION_EXPIRY: st.integers(0, 2**32 - 1),
    Property.TOPIC_ALIAS: st.integers(1, 65_535),
}


def properties(place: int, version: int) -> st.SearchStrategy[Properties]:
    """Return properties that a packet of type *place* may have."""
    if version != V5:
        return st.just(NO_PROPERTIES)
    values = {which: values for which, values in _VALUES.items() if allowed_in(which, place)}
    identifiers = st.lists(st.integers(1, 268_435_455), max_size=1 if place == PacketType.SUBSCRIBE else 3)
    return st.builds(
        Properties,
        st.fixed_dictionaries({}, optional=values),
        st.lists(st.tuples(TEXTS, TEXTS), max_size=3),
        identifiers if place in (PacketType.SUBSCRIBE, PacketType.PUBLISH) else st.just([]),
    )


def packets(version: int) -> st.SearchStrategy[Packet]:
    """Return packets of *version*, of both sides."""
    is_newest = version == V5
    reasons = st.integers(0, 255) if is_newest else st.just(0)

    def of(kind: PacketType) -> st.SearchStrategy[Properties]:
        return properties(kind, version)

    wills = st.builds(Will, TEXTS, DATA, st.integers(0, 2), st.booleans(), properties(WILL, version))
    subscriptions = st.builds(
        FilterSubscription,
        TEXTS,
        st.integers(0, 2),
        st.booleans() if is_newest else st.just(False),
        st.booleans() if is_newest else st.just(False),
        st.integers(0, 2) if is_newest else st.just(0),
    )
    acks = [
        st.builds(Ack, st.just(kind), IDS, reasons, of(kind))
        for kind in (PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP)
    ]
    found: list[st.SearchStrategy[Packet]] = [
        st.builds(
            Connect,
            TEXTS,
            st.just(version),
            st.booleans(),
            st.integers(0, 65_535),
            st.none() | wills,
            TEXTS,
            st.none() | DATA,
            of(PacketType.CONNECT),
        ),
        st.builds(Connack, st.booleans(), st.integers(0, 255), of(PacketType.CONNACK)),
        st.builds(Publish, TEXTS, DATA, st.just(0), st.booleans(), properties=of(PacketType.PUBLISH)),
        st.builds(Publish, TEXTS, DATA, st.integers(1, 2), st.booleans(), st.booleans(), IDS, of(PacketType.PUBLISH)),
        *acks,
        st.builds(Subscribe, IDS, st.lists(subscriptions, min_size=1, max_size=3).map(tuple), of(PacketType.SUBSCRIBE)),
        st.builds(Suback, IDS, st.lists(st.integers(0, 0x80), max_size=3).map(tuple), of(PacketType.SUBACK)),
        st.builds(Unsubscribe, IDS, st.lists(TEXTS, min_size=1, max_size=3).map(tuple), of(PacketType.UNSUBSCRIBE)),
        st.just(Pingreq()),
        st.just(Pingresp()),
    ]
    if is_newest:
        found += [
            st.builds(Unsuback, IDS, st.lists(st.integers(0, 255), max_size=3).map(tuple), of(PacketType.UNSUBACK)),
            st.builds(Disconnect, reasons, of(PacketType.DISCONNECT)),
            st.builds(Auth, reasons, of(PacketType.AUTH)),
        ]
    else:
        found += [st.builds(Unsuback, IDS), st.just(Disconnect())]
    return st.one_of(found)
