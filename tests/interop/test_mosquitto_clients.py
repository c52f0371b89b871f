"""Mosquitto's command-line clients, from Debian, against Martlet."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import mosquitto
from .mqtt_broker import MqttMartlet
from .mqtt_clients import Link, Message, PahoClients
from .process import eventually

Start = Callable[..., mosquitto.Subscriber]


@pytest.fixture(params=["mqtt-3", "mqtt-4", "mqtt-5", "mqtts-4", "mqtts-5"])
def link(request: pytest.FixtureRequest, broker: MqttMartlet) -> Link:
    scheme, version = request.param.split("-")
    return broker.link(scheme, int(version))


@pytest.fixture
def newest(broker: MqttMartlet) -> Link:
    return broker.link()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start mosquitto_sub in the background; it ends with the test at the latest."""
    running: list[mosquitto.Subscriber] = []

    def begin(link: Link, *words: str) -> mosquitto.Subscriber:
        running.append(mosquitto.Subscriber(link, tmp_path / f"sub-{len(running)}.log", *words))
        return running[-1]

    yield begin
    for subscriber in running:
        subscriber.close()


_numbers = itertools.count(1)


@pytest.fixture
def stem() -> str:
    return f"tools-{next(_numbers)}"


def seen(messages: list[dict[str, object]]) -> list[tuple[object, object, object]]:
    return [(message["payload"], message["qos"], message["retain"]) for message in messages]


def test_what_mosquitto_pub_sends_mosquitto_sub_prints(link: Link, start: Start, stem: str) -> None:
    subscriber = start(link, "-t", f"{stem}/#", "-q", "2", "-C", "4")
    for qos in range(3):
        mosquitto.publish(link, "-t", f"{stem}/qos", "-m", f"of QoS {qos}", "-q", f"{qos}")
    mosquitto.publish(link, "-t", f"{stem}/state", "-m", "kept", "-q", "1", "-r")
    expected = [(f"of QoS {qos}", qos, 0) for qos in range(3)]
    assert sorted(seen(subscriber.finish())) == sorted([*expected, ("kept", 1, 0)])
    late = ("-t", f"{stem}/#", "-q", "1")
    assert seen(mosquitto.subscribe(link, *late, "-C", "1")) == [("kept", 1, 1)]
    mosquitto.publish(link, "-t", f"{stem}/state", "-n", "-r", "-q", "1")
    last = start(link, *late, "-C", "1")
    mosquitto.publish(link, "-t", f"{stem}/end", "-m", "nothing was kept", "-q", "1")
    assert seen(last.finish()) == [("nothing was kept", 1, 0)]


def test_a_durable_mosquitto_sub_gets_what_it_missed_in_order(link: Link, stem: str) -> None:
    durable = ("-c", "-i", f"{stem}-durable", "-t", f"{stem}/#", "-q", "1")
    mosquitto.subscribe(link, *durable, "-E")
    for number in range(5):
        mosquitto.publish(link, "-t", f"{stem}/{number}", "-m", f"missed {number}", "-q", "2")
    got = seen(mosquitto.subscribe(link, *durable, "-C", "5"))
    assert got == [(f"missed {number}", 1, 0) for number in range(5)]


def test_the_will_of_a_killed_mosquitto_sub_is_published(link: Link, start: Start, stem: str) -> None:
    watcher = start(link, "-t", f"{stem}/will", "-q", "1", "-C", "1")
    words = ("--will-topic", f"{stem}/will", "--will-payload", "gone", "--will-qos", "1", "--will-retain")
    start(link, "-t", f"{stem}/other", *words).close()
    assert seen(watcher.finish()) == [("gone", 1, 0)]


def test_two_mosquitto_subs_share_a_subscription(newest: Link, start: Start, stem: str) -> None:
    members = [start(newest, "-t", f"$share/group/{stem}/#", "-q", "1") for _ in range(2)]
    numbers = [f"{number}" for number in range(20)]
    for number in numbers:
        mosquitto.publish(newest, "-t", f"{stem}/work", "-m", number, "-q", "1")

    def all_got() -> list[str] | None:
        got = [str(message["payload"]) for member in members for message in member.now()]
        return got if len(got) >= len(numbers) else None

    assert sorted(eventually(all_got)) == sorted(numbers)


def test_properties_come_through_the_tools(newest: Link, start: Start, stem: str) -> None:
    subscriber = start(newest, "-t", f"{stem}/#", "-q", "1", "-C", "1")
    values = {
        "content-type": "text/plain",
        "correlation-data": "order 7",
        "message-expiry-interval": "100000",
        "payload-format-indicator": "1",
        "response-topic": f"{stem}-answers",
    }
    words = [word for name, value in values.items() for word in ("-D", "publish", name, value)]
    user = ["-D", "publish", "user-property", "colour", "red"]
    mosquitto.publish(newest, "-t", f"{stem}/whole", "-m", "café", "-q", "1", *words, *user)
    [message] = subscriber.finish()
    found = message["properties"]
    assert message["payload"] == "café"
    assert 90_000 < found.pop("message-expiry-interval") <= 100_000
    expected = {name: int(value) if value == "1" else value for name, value in values.items()}
    del expected["message-expiry-interval"]
    assert found == {**expected, "user-properties": {"colour": "red"}}


def test_mosquitto_rr_gets_its_answer(newest: Link, stem: str) -> None:
    clients = PahoClients()
    service = clients.connect(newest, f"{stem}-service")

    def answer(asked: Message) -> None:
        assert asked.response_topic is not None
        service.send(Message(asked.response_topic, b"answer to " + asked.payload, correlation=asked.correlation))

    service.inbox.on_message = answer
    service.subscribe(f"{stem}/questions", 1)
    try:
        words = ("-t", f"{stem}/questions", "-e", f"{stem}/answers", "-q", "1", "-m", "what?", "-W", "180")
        assert mosquitto.request(newest, *words).strip() == "answer to what?"
    finally:
        clients.close()
