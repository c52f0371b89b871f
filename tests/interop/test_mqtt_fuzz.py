"""Hostile bytes to Martlet and to Mosquitto: both answer alike, except for differences that docs/mqtt.md explains."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from tests.interop import mosquitto, mqtt_fuzz_cases
from tests.interop.mqtt_fuzz_cases import Case, split_packets

from martlet_mqtt.wire.codec import decode_packet
from martlet_mqtt.wire.codes import V3, V5, PacketType
from martlet_mqtt.wire.errors import MqttError

from .mqtt_broker import MqttMartlet
from .mqtt_clients import Message, Paho, PahoClients

PAGE = Path(__file__).parents[2] / "docs" / "mqtt.md"
KNOWN = "2.0.11"  # the version of Mosquitto that the page is about
GROWTH_BYTES_MAX = 4 << 20  # 4 KB a connection; one that is not freed has more
_FLAGS = {PacketType.PUBREL: 2, PacketType.SUBSCRIBE: 2, PacketType.UNSUBSCRIBE: 2}
_OF_BROKERS = (PacketType.CONNACK, PacketType.SUBACK, PacketType.UNSUBACK, PacketType.PINGRESP)
# A text, but not bytes, with a control character or a character that Unicode has for nobody.
_ODD = re.compile(r"(?<!b)'[^']*\\(x[0-9a-f]{2}|t|n|r|u[0-9a-f]{4})")


def _is_loose(case: Case) -> bool:
    """Whether a packet has reserved flags, is too long, or is one of brokers."""
    for first, content in split_packets(case.data):
        kind = first >> 4
        flags = first & 15
        if kind == PacketType.PUBLISH:
            if flags & 14 == 8:
                return True
        elif not kind or kind in _OF_BROKERS or flags != _FLAGS.get(PacketType(kind), 0):
            return True
        if kind == PacketType.PINGREQ and content:
            return True
        if PacketType.PUBACK <= kind <= PacketType.PUBCOMP and len(content) > (3 if case.version == V5 else 2):
            return True
    return False


def _is_of(*kinds: PacketType) -> Callable[[Case], bool]:
    return lambda case: any(first >> 4 in kinds for first, _ in split_packets(case.data))


def _is_odd(case: Case) -> bool:
    """Whether a text in a packet has odd characters."""
    for first, content in split_packets(case.data):
        try:
            if _ODD.search(repr(decode_packet(first, content, mqtt_fuzz_cases.version_of(case)))):
                return True
        except MqttError:
            continue
    return False


# When a line of the table applies.
CONDITIONS: dict[str, Callable[[Case], bool]] = {
    "an error, MQTT 5": lambda case: case.version == V5,
    "an error in CONNECT": lambda case: case.version == 0,
    "another reason": lambda case: case.version == V5,
    "reserved flags, bytes too many, packets of brokers": _is_loose,
    "CONNECT, SUBSCRIBE, UNSUBSCRIBE of MQTT 3.1": lambda case: case.version == V3 or b"MQIsdp" in case.data,
    "filters": _is_of(PacketType.SUBSCRIBE, PacketType.UNSUBSCRIBE),
    "control characters, U+FFFF": _is_odd,
    "a message without subscribers": _is_of(PacketType.PUBLISH),
    "an identifier that nobody knows": _is_of(PacketType.PUBREC, PacketType.PUBREL),
    "names with `$`, long names": _is_of(PacketType.PUBLISH),
    "a property with a wrong value, or out of place": _is_of(PacketType.PUBLISH, PacketType.CONNECT),
}


def table() -> dict[str, tuple[list[str], list[str]]]:
    """Return the patterns of the page: for Mosquitto and for Martlet, by what is sent."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    text = PAGE.read_text().partition("\n## Beside Mosquitto\n")[2]
    for line in re.findall(r"^\| (.+) \|$", text, re.MULTILINE)[1:]:
        what, theirs, ours, why = line.split(" | ")
        assert why
        found[what] = re.findall(r"`([^`]+)`", theirs), re.findall(r"`([^`]+)`", ours)
    return found


@pytest.fixture(scope="module")
def martlet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MqttMartlet]:
    broker = MqttMartlet(tmp_path_factory.mktemp("martlet"))
    yield broker
    broker.close()


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mosquitto.MosquittoBroker]:
    broker = mosquitto.MosquittoBroker(tmp_path_factory.mktemp("mosquitto"))
    yield broker
    broker.close()


def test_every_difference_to_mosquitto_is_explained(martlet: MqttMartlet, other: mosquitto.MosquittoBroker) -> None:
    cases = mqtt_fuzz_cases.cases()
    with ThreadPoolExecutor(2) as threads:
        theirs, ours = threads.map(
            lambda port: [mqtt_fuzz_cases.outcome(port, case) for case in cases], (other.port, martlet.port)
        )
    patterns = table()
    assert patterns.keys() == CONDITIONS.keys()
    unexplained: dict[tuple[str, str], list[Case]] = defaultdict(list)
    used: set[str] = set()
    for case, their, our in zip(cases, theirs, ours, strict=True):
        if their == our:
            continue
        lines = [
            what
            for what, (left, right) in patterns.items()
            if any(fnmatchcase(their, each) for each in left)
            and any(fnmatchcase(our, each) for each in right)
            and CONDITIONS[what](case)
        ]
        used.update(lines)
        if not lines:
            unexplained[their, our].append(case)
    shown = [f"Mosquitto: {a}; Martlet: {b}; {len(c)} times: {c[:3]}" for (a, b), c in unexplained.items()]
    assert not shown, "\n".join(shown)
    if mosquitto.version() == KNOWN:
        assert used == patterns.keys()


def anonymous_bytes(pid: int) -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found.group(1)) << 10


def test_others_are_served_meanwhile_and_memory_stays_flat(martlet: MqttMartlet) -> None:
    clients = PahoClients()
    try:
        client = clients.connect(martlet.link(), "bystander")
        client.subscribe("bystander/#", 1)
        _attack(martlet, client, 1)  # so that everything is loaded
        before = anonymous_bytes(martlet.process.pid)
        _attack(martlet, client, 2)
        assert anonymous_bytes(martlet.process.pid) - before < GROWTH_BYTES_MAX
        assert not client.ended
    finally:
        clients.close()
    output = martlet.process.output()
    assert "because of a bug" not in output
    assert "Traceback" not in output


def _attack(martlet: MqttMartlet, client: Paho, seed: int) -> None:
    """Send changed packets of *seed*; *client* must get its own messages all the time."""
    for index, case in enumerate(mqtt_fuzz_cases.mutated(1000, seed)):
        mqtt_fuzz_cases.outcome(martlet.port, case)
        if index % 100 == 0:
            count = len(client.inbox.now())
            client.publish(Message("bystander/state", b"%d" % index, 1))
            assert client.inbox.wait(count + 1)[-1].payload == b"%d" % index
