"""Bridges of Mosquitto's broker, from Debian, with Martlet at the other end."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from . import mosquitto
from .mqtt_broker import MqttMartlet
from .mqtt_clients import Link
from .process import eventually, free_port

VERSIONS = {3: "mqttv31", 4: "mqttv311", 5: "mqttv50"}
DIRECTIONS = ("in", "out", "both")
NOTIFICATIONS = (True, False)

Start = Callable[[Link, str], mosquitto.Subscriber]


def bridge(name: str, port: int, version: int, *lines: str) -> list[str]:
    """Return the lines of a bridge to the broker at *port*."""
    head = [f"connection {name}", f"address 127.0.0.1:{port}", f"bridge_protocol_version {VERSIONS[version]}"]
    return [*head, "restart_timeout 1", f"remote_clientid far-{name}", "cleansession false", *lines]


def stem(version: int, direction: str, *, notifies: bool) -> str:
    return f"v{version}-{direction}-{'loud' if notifies else 'quiet'}"


CASES = list(product(VERSIONS, DIRECTIONS, NOTIFICATIONS))


@pytest.fixture(scope="module")
def martlet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MqttMartlet]:
    broker = MqttMartlet(tmp_path_factory.mktemp("martlet"), f"127.0.0.1:{free_port()}")
    yield broker
    broker.close()


@pytest.fixture(scope="module")
def bridges(tmp_path_factory: pytest.TempPathFactory, martlet: MqttMartlet) -> Iterator[mosquitto.MosquittoBroker]:
    """A Mosquitto with one bridge for each case."""
    lines: list[str] = []
    for version, direction, notifies in CASES:
        name = stem(version, direction, notifies=notifies)
        settings = [f"topic {name}/# {direction} 1", f"notifications {str(notifies).lower()}"]
        lines += bridge(name, martlet.port, version, *settings)
    broker = mosquitto.MosquittoBroker(tmp_path_factory.mktemp("bridges"), *lines)
    yield broker
    broker.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start mosquitto_sub in the background, with RETAIN as published; it ends with the test at the latest."""
    running: list[mosquitto.Subscriber] = []

    def begin(link: Link, topic_filter: str) -> mosquitto.Subscriber:
        words = ("-t", topic_filter, "-q", "1", "--retain-as-published")
        running.append(mosquitto.Subscriber(link, tmp_path / f"sub-{len(running)}.log", *words))
        return running[-1]

    yield begin
    for subscriber in running:
        subscriber.close()


def seen(subscriber: mosquitto.Subscriber, last: str) -> list[tuple[str, int]]:
    """Wait for the message *last*; return what came before it, and whether it was retained."""

    def look() -> list[tuple[str, int]] | None:
        found = [(str(each["payload"]), int(each["retain"])) for each in subscriber.now()]
        return found if any(payload == last for payload, _ in found) else None

    return [each for each in eventually(look) if each[0] != last]


def wait_connected(near: Link, far: Link, name: str, direction: str, start: Start) -> None:
    """Wait until messages pass the bridge *name*, which may take Mosquitto a second."""
    source, target = (far, near) if direction == "in" else (near, far)
    watcher = start(target, f"{name}/ready")

    def look() -> bool | None:
        mosquitto.publish(source, "-t", f"{name}/ready", "-m", "ready", "-q", "1")
        return True if watcher.now() else None

    eventually(look)


@pytest.mark.parametrize(("version", "direction", "notifies"), CASES)
def test_a_bridge_carries_each_message_once_with_its_retain_flag(
    martlet: MqttMartlet,
    bridges: mosquitto.MosquittoBroker,
    start: Start,
    version: int,
    direction: str,
    notifies: bool,
) -> None:
    near, far, name = bridges.link(), martlet.link(), stem(version, direction, notifies=notifies)
    wait_connected(near, far, name, direction, start)
    at_near, at_far = start(near, f"{name}/data/#"), start(far, f"{name}/data/#")
    for link, place in (near, "near"), (far, "far"):
        mosquitto.publish(link, "-t", f"{name}/data/a", "-m", f"event at {place}", "-q", "1")
        mosquitto.publish(link, "-t", f"{name}/data/{place}", "-m", f"state at {place}", "-q", "1", "-r")
    # What would be echoed would come before these.
    for link, place in (near, "near"), (far, "far"), (near, "near"):
        mosquitto.publish(link, "-t", f"{name}/data/a", "-m", f"end at {place}", "-q", "1")
    of_near, of_far = ([(f"event at {place}", 0), (f"state at {place}", 1)] for place in ("near", "far"))
    got_near, got_far = direction in ("in", "both"), direction in ("out", "both")
    found = seen(at_near, "end at far" if got_near else "end at near")
    assert sorted(each for each in found if each[0] != "end at near") == sorted(of_near + (of_far if got_near else []))
    found = seen(at_far, "end at near" if got_far else "end at far")
    assert sorted(each for each in found if each[0] != "end at far") == sorted(of_far + (of_near if got_far else []))
    if got_far:
        late = mosquitto.subscribe(far, "-t", f"{name}/data/near", "-C", "1")
        assert (late[0]["payload"], late[0]["retain"]) == ("state at near", 1)


def wait_state(watcher: mosquitto.Subscriber, state: str) -> None:
    eventually(lambda: True if state in [each["payload"] for each in watcher.now()][-1:] else None)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_state_of_a_bridge_is_seen_at_both_ends(
    martlet: MqttMartlet, tmp_path: Path, start: Start, version: int
) -> None:
    topic = f"$SYS/broker/connection/far-state{version}/state"
    lines = bridge(f"state{version}", martlet.port, version, f"topic state{version}/# both 1")
    broker = mosquitto.MosquittoBroker(tmp_path / "mosquitto", *lines)
    try:
        for link in broker.link(), martlet.link():
            watcher = start(link, topic)
            wait_state(watcher, "1")
    finally:
        broker.close()
    wait_state(watcher, "0")
    late = mosquitto.subscribe(martlet.link(), "-t", topic, "-C", "1")
    assert (late[0]["payload"], late[0]["retain"]) == ("0", 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_bridge_delivers_what_came_while_an_end_was_down(
    martlet: MqttMartlet, tmp_path: Path, start: Start, version: int
) -> None:
    name = f"down{version}"
    lines = bridge(name, martlet.port, version, f"topic {name}/# both 1")
    broker = mosquitto.MosquittoBroker(tmp_path / "mosquitto", *lines)
    try:
        wait_connected(broker.link(), martlet.link(), name, "both", start)
        broker.close()
        mosquitto.publish(martlet.link(), "-t", f"{name}/far", "-m", "while mosquitto was down", "-q", "1", "-r")
        broker.start()
        at_near = start(broker.link(), f"{name}/far")
        assert seen(at_near, "while mosquitto was down") == []
        martlet.kill()
        mosquitto.publish(broker.link(), "-t", f"{name}/near", "-m", "while martlet was down", "-q", "1", "-r")
        martlet.start()
        at_far = start(martlet.link(), f"{name}/near")
        assert seen(at_far, "while martlet was down") == []
        assert all(each["retain"] == 1 for each in at_near.now() + at_far.now())
    finally:
        broker.close()
