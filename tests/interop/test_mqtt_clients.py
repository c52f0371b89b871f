"""Unmodified MQTT clients against Martlet: paho-mqtt, MQTT.js and Paho's Java client over TCP, TLS and WebSocket."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from .mqtt_broker import MqttMartlet
from .mqtt_clients import Client, Clients, Link, Message, PahoClients, Steered, java_words, node_words
from .process import eventually

WAYS = {
    "paho-3": ("paho", "mqtt", 4),
    "paho-5": ("paho", "mqtt", 5),
    "paho-tls-5": ("paho", "mqtts", 5),
    "paho-ws-3": ("paho", "ws", 4),
    "paho-wss-5": ("paho", "wss", 5),
    "node-3": ("node", "mqtt", 4),
    "node-5": ("node", "mqtt", 5),
    "node-tls-3": ("node", "mqtts", 4),
    "node-ws-5": ("node", "ws", 5),
    "java-5": ("java", "mqtt", 5),
    "java-tls-5": ("java", "mqtts", 5),
    "java-ws-5": ("java", "ws", 5),
}
EXPIRY_S = 3600


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Clients]]:
    """Each client library; the processes live as long as the tests of this file."""
    node = Steered(node_words(), tmp_path_factory.mktemp("node"))
    java = Steered(java_words(), tmp_path_factory.mktemp("java"))
    yield {"paho": PahoClients(), "node": node, "java": java}
    node.stop()
    java.stop()


class Way:
    """One library over one transport, with one version of MQTT; names are those of one test."""

    def __init__(self, clients: Clients, link: Link, stem: str) -> None:
        self.clients = clients
        self.link = link
        self.stem = stem

    def connect(self, name: str = "", *, clean: bool = True, expiry_s: int = 0, will: Message | None = None) -> Client:
        client_id = f"{self.stem}-{name or next(_numbers)}"
        return self.clients.connect(self.link, client_id, clean=clean, expiry_s=expiry_s, will=will)


_numbers = itertools.count(1)


@pytest.fixture
def ways(broker: MqttMartlet, libraries: dict[str, Clients]) -> Iterator[Callable[[str], Way]]:
    yield lambda way: Way(libraries[WAYS[way][0]], broker.link(*WAYS[way][1:]), f"{way}-{next(_numbers)}")
    for clients in libraries.values():
        clients.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, ways: Callable[[str], Way]) -> Way:
    return ways(request.param)


# Paho's Java client leaves a TLS connection open that it should cut: it closes one half first, which Java refuses to do
# with TLS, and gives up.
@pytest.fixture(params=[way for way in WAYS if way != "java-tls-5"])
def cuttable(request: pytest.FixtureRequest, ways: Callable[[str], Way]) -> Way:
    """A way whose clients can end a connection without DISCONNECT."""
    return ways(request.param)


@pytest.fixture(params=[way for way in WAYS if WAYS[way][2] == 5])
def newest(request: pytest.FixtureRequest, ways: Callable[[str], Way]) -> Way:
    """A way with MQTT 5."""
    return ways(request.param)


def test_messages_of_each_qos_arrive_with_the_lower_qos_and_in_order(way: Way) -> None:
    subscriber, publisher = way.connect(), way.connect()
    assert [subscriber.subscribe(f"{way.stem}/{qos}/#", qos) for qos in range(3)] == [0, 1, 2]
    sent = [
        Message(f"{way.stem}/{granted}/{qos}", b"%d %d %d" % (granted, qos, number), qos)
        for number in range(5)
        for granted in range(3)
        for qos in range(3)
    ]
    odd = [Message(f"{way.stem}/2/odd", payload) for payload in (b"", b"\0\xff", b"large " * 50_000)]
    for message in sent + odd:
        publisher.publish(message)
    got = subscriber.inbox.wait(len(sent + odd))
    by_name: dict[str, list[Message]] = {}
    for message in got:
        by_name.setdefault(message.topic, []).append(message)
    expected: dict[str, list[Message]] = {}
    for message in sent:
        granted = int(message.topic.split("/")[1])
        expected.setdefault(message.topic, []).append(replace(message, qos=min(message.qos, granted)))
    expected[f"{way.stem}/2/odd"] = odd
    assert by_name == expected
    subscriber.disconnect()
    publisher.disconnect()


def test_a_retained_message_is_sent_to_later_subscribers_until_it_is_removed(way: Way) -> None:
    early, publisher = way.connect(), way.connect()
    early.subscribe(f"{way.stem}/#")
    for payload in (b"old", b"new"):
        publisher.publish(Message(f"{way.stem}/state", payload, 2, retain=True))
    assert [(m.payload, m.retain) for m in early.inbox.wait(2)] == [(b"old", False), (b"new", False)]
    late = way.connect()
    late.subscribe(f"{way.stem}/+")
    assert late.inbox.wait(1) == [Message(f"{way.stem}/state", b"new", 2, retain=True)]
    publisher.publish(Message(f"{way.stem}/state", b"", 1, retain=True))
    latest = way.connect()
    latest.subscribe(f"{way.stem}/#")
    publisher.publish(Message(f"{way.stem}/end", b"end"))
    assert [m.payload for m in latest.inbox.wait(1)] == [b"end"]


def test_a_will_is_published_only_for_a_client_that_is_cut_off(cuttable: Way) -> None:
    way = cuttable
    watcher = way.connect()
    watcher.subscribe(f"{way.stem}/#")
    names = ("polite", "cut")
    wills = {name: Message(f"{way.stem}/will", name.encode(), 2, retain=True) for name in names}
    clients = {name: way.connect(name, will=wills[name]) for name in names}
    clients["polite"].disconnect()
    clients["cut"].drop()
    assert watcher.inbox.wait(1) == [replace(wills["cut"], retain=False)]
    watcher.disconnect()
    late = way.connect()
    late.subscribe(f"{way.stem}/will", 1)
    assert late.inbox.wait(1) == [replace(wills["cut"], qos=1)]


def test_a_durable_session_gets_what_it_missed_in_order(way: Way) -> None:
    first = way.connect("durable", clean=False, expiry_s=EXPIRY_S)
    assert not first.session_present
    first.subscribe(f"{way.stem}/a/#")
    first.subscribe(f"{way.stem}/b", 1)
    first.disconnect()
    publisher = way.connect()
    sent = [Message(f"{way.stem}/a/{number % 3}", b"%d" % number, 1 + number % 2) for number in range(30)]
    for message in sent:
        publisher.publish(message)
    sent.append(Message(f"{way.stem}/a/0", b"of QoS 0, but in the log", 0))
    publisher.publish(sent[-1])
    publisher.publish(Message(f"{way.stem}/b", b"last", 2))
    sent.append(Message(f"{way.stem}/b", b"last", 1))
    second = way.connect("durable", clean=False, expiry_s=EXPIRY_S)
    assert second.session_present
    got = second.inbox.wait(len(sent))
    for qos in range(3):  # clients show a message of QoS 2 when its exchange is complete
        assert [m for m in got if m.qos == qos] == [m for m in sent if m.qos == qos]
    second.disconnect()
    publisher.publish(Message(f"{way.stem}/b", b"again"))
    third = way.connect("durable", clean=False, expiry_s=EXPIRY_S)
    assert third.session_present
    assert third.inbox.wait(1)[-1].payload == b"again"
    third.disconnect()
    fresh = way.connect("durable")
    assert not fresh.session_present


def test_each_message_goes_to_one_member_of_a_group(newest: Way) -> None:
    members = [newest.connect() for _ in range(3)]
    for number, member in enumerate(members):
        member.subscribe(f"$share/group/{newest.stem}/#", 1 + number % 2)
    publisher = newest.connect()

    def publish(payloads: list[bytes]) -> None:
        for payload in payloads:
            publisher.publish(Message(f"{newest.stem}/work", payload, 1))

    sent, rest = ([b"%s %d" % (which, number) for number in range(40)] for which in (b"first", b"then"))
    publish(sent)
    assert _gathered(members, sent) == Counter(sent)
    members[0].disconnect()
    publish(rest)
    # What the first member had not acknowledged yet goes to another one.
    found = _gathered(members, sent + rest)
    assert {payload: found[payload] for payload in rest} == dict.fromkeys(rest, 1)


def _gathered(members: list[Client], wanted: list[bytes]) -> Counter[bytes]:
    """Return what all members got, once nothing of *wanted* is missing."""

    def look() -> Counter[bytes] | None:
        found = Counter(message.payload for member in members for message in member.inbox.now())
        return None if Counter(wanted) - found else found

    return eventually(look)


def whole(name: str, payload: bytes = b"caf\xc3\xa9") -> Message:
    """Return a message with every property that a publisher can give."""
    return Message(
        name,
        payload,
        1,
        user=(("colour", "red"), ("colour", "dark red"), ("empty", ""), ("größe", "groß")),
        content_type="text/plain",
        response_topic=f"{name}/answer",
        correlation=b"\0\xff\x01 7",
        expiry_s=100_000,
        is_text=True,
    )


def arrived(message: Message) -> Message:
    """Return *message* as it was sent, if its expiry was counted down and not more than that."""
    assert message.expiry_s is None or 90_000 < message.expiry_s <= 100_000
    return replace(message, expiry_s=100_000 if message.expiry_s else None)


def test_each_client_gets_the_properties_that_any_other_gives(ways: Callable[[str], Way]) -> None:
    readers = {way: ways(way).connect() for way in ("paho-3", "paho-5", "node-3", "node-5", "java-5")}
    for reader in readers.values():
        reader.subscribe("whole/#")
    writers = {way: ways(way).connect() for way in readers}
    for way, writer in writers.items():
        writer.publish(whole(f"whole/{way}"))
    for way, reader in readers.items():
        got = {message.topic: arrived(message) for message in reader.inbox.wait(len(writers))}
        expected = {f"whole/{each}": whole(f"whole/{each}") for each in writers}
        expected = {
            name: message.plain() if name.endswith("-3") or way.endswith("-3") else message
            for name, message in expected.items()
        }
        assert got == expected, way


def test_a_will_of_mqtt_5_has_its_properties(ways: Callable[[str], Way]) -> None:
    watcher = ways("paho-5").connect()
    watcher.subscribe("last-words/+")
    for way in ("paho-5", "node-5", "java-5"):
        ways(way).connect(will=whole(f"last-words/{way}")).drop()
    got = {message.topic: arrived(message) for message in watcher.inbox.wait(3)}
    assert got == {f"last-words/{way}": whole(f"last-words/{way}") for way in ("paho-5", "node-5", "java-5")}


def test_clients_are_told_that_the_broker_stops(tmp_path: Path) -> None:
    broker = MqttMartlet(tmp_path / "stopping")
    clients = PahoClients()
    try:
        client = clients.connect(broker.link(), "last")
        assert broker.stop() == 0
        assert client.wait_end() == "Server shutting down"
    finally:
        broker.close()
