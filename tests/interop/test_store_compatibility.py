"""A store that RocketMQ wrote opens in Martlet, and the other way round."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from . import fetch, rocketmq
from .java import Java, Jvm, Queue, Received, found, message
from .martlet_process import Martlet
from .process import eventually

TOPIC, GROUP = "Kept", "kept_group"
COUNT = 60
RealBroker = Callable[..., rocketmq.Broker]
OurBroker = Callable[..., Martlet]
# How the first broker ended, and whether both seal every record and look at each seal.
ENDS = ["stopped", "killed", "sealed and killed"]
# A broker's first check of its disk must not delete what the other one wrote.
RESERVED_HOURS = "72"
QUOTED = re.compile(r"([{,]\s*)(\d+):")  # RocketMQ writes number keys without quotes


@pytest.fixture
def names(tmp_path: Path) -> Iterator[rocketmq.NameServer]:
    server = rocketmq.NameServer(tmp_path / "names")
    yield server
    server.process.kill()


@pytest.fixture
def jvm(jvms: Callable[[str], Jvm]) -> Jvm:
    return jvms(fetch.CLIENT_VERSIONS[-1])


@pytest.fixture
def real_broker(tmp_path: Path, names: rocketmq.NameServer, data: Path) -> Iterator[RealBroker]:
    """Starts a RocketMQ broker on the data; it ends with the test at the latest."""
    places = {"storePathRootDir": str(data), "storePathCommitLog": str(data / "commitlog")}
    with ExitStack() as running:

        def start(*, sealed: bool = False) -> rocketmq.Broker:
            seals = str(sealed).lower()
            settings = {**places, "enabledAppendPropCRC": seals, "forceVerifyPropCRC": seals}
            settings["fileReservedTime"] = RESERVED_HOURS
            broker = rocketmq.Broker(tmp_path / "real", names.address, settings)
            running.callback(broker.kill)
            return broker

        yield start


@pytest.fixture
def martlet(tmp_path: Path, data: Path) -> Iterator[OurBroker]:
    """Starts a Martlet on the data; it ends with the test at the latest."""
    with ExitStack() as running:

        def start(*, sealed: bool = False) -> Martlet:
            settings = {"broker.name": "broker-a", "store.segment_bytes": str(64 << 20)}
            settings["store.seal_records"] = str(sealed).lower()
            broker = Martlet(tmp_path / "ours", settings, data=data)
            running.callback(broker.close)
            return broker

        yield start


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def sent_bodies(prefix: str) -> list[bytes]:
    return [f"{prefix} {i}".encode() for i in range(COUNT)]


def fill(java: Java, prefix: str) -> None:
    """Send plain messages, a batch, a compressed one; the first half with tag A, the rest with tag B."""
    producer = java.producer(queues=4)
    for i in range(COUNT):
        said = message(TOPIC, f"{prefix} {i}", tags="A" if i < COUNT // 2 else "B", keys=f"{prefix}-{i}")
        producer.send(said)
    producer.send(*(message(TOPIC, f"{prefix} batch {i}", keys=f"{prefix}-batch") for i in range(10)), how="batch")
    producer.send(message(TOPIC, f"{prefix} " * 10_000))


def everything(prefix: str) -> Counter[bytes]:
    bodies = sent_bodies(prefix) + [f"{prefix} batch {i}".encode() for i in range(10)]
    return Counter([*bodies, f"{prefix} ".encode() * 10_000])


def read(java: Java, count: int) -> list[Received]:
    return java.lite("another_reader", TOPIC, assign=True).poll_until(count)


def consume_all(java: Java, data: Path) -> None:
    """Consume everything with a group, and wait until its offsets are on disk."""
    consumer = java.push(GROUP, TOPIC)
    consumer.wait(COUNT + 11)

    def written() -> bool | None:
        try:
            table = json.loads(QUOTED.sub(r'\1"\2":', (data / "config" / "consumerOffset.json").read_text()))
        except (OSError, ValueError):
            return None
        offsets = table["offsetTable"].get(f"{TOPIC}@{GROUP}", {})
        return True if sum(offsets.values()) == COUNT + 11 else None

    eventually(written)
    consumer.stop()


def places(messages: list[Received]) -> dict[tuple[int, int], tuple[bytes, str, str | None, str | None]]:
    return {(m.queue, m.offset): (m.body, m.offset_msg_id[16:], m.tags, m.keys) for m in messages}


def check(java: Java, before: list[Received], prefix: str) -> None:
    """See that everything is where it was, that keys and ids find it, and that it goes on."""
    got = read(java, COUNT + 11)
    assert Counter(m.body for m in got) == everything(prefix)
    assert places(got) == places(before)
    queries = java.queries()
    [by_key] = eventually(lambda: found(lambda: queries.by_key(TOPIC, f"{prefix}-17")))
    assert by_key.body == f"{prefix} 17".encode()
    batch = eventually(lambda: found(lambda: queries.by_key(TOPIC, f"{prefix}-batch")))
    assert len(batch) == 10
    [one] = [m for m in got if m.body == f"{prefix} 5".encode()]
    assert eventually(lambda: found(lambda: queries.view(TOPIC, one.msg_id))).body == one.body
    assert queries.offset_at(Queue(TOPIC, "broker-a", one.queue), one.stored_ms) <= one.offset
    fill(java, "later")
    group = java.push(GROUP, TOPIC)
    seen = group.wait(COUNT + 11)
    assert Counter(m.body for m in seen) == everything("later"), "the group goes on where it was"
    tagged = java.push("tagged", TOPIC, expression="B")
    wanted = [body for name in (prefix, "later") for body in sent_bodies(name)[COUNT // 2 :]]
    assert Counter(m.body for m in tagged.wait_bodies(wanted)) == Counter(wanted)


@pytest.mark.parametrize("end", ENDS)
def test_a_store_written_by_rocketmq_opens_in_martlet(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, end: str
) -> None:
    sealed = end.startswith("sealed")
    real = real_broker(sealed=sealed)
    clients = Java(jvm, names.address)
    fill(clients, "real")
    consume_all(clients, data)
    before = read(clients, COUNT + 11)
    clients.close()
    if end == "stopped":
        real.stop()
    else:
        real.kill()
    ours = martlet(sealed=sealed)
    clients = Java(jvm, ours.name_server)
    assert all(("__CRC32#" in m.properties) == sealed for m in before)
    check(clients, before, "real")
    clients.close()
    assert ours.stop() == 0


@pytest.mark.parametrize("end", ENDS)
def test_a_store_written_by_martlet_opens_in_rocketmq(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, end: str
) -> None:
    sealed = end.startswith("sealed")
    ours = martlet(sealed=sealed)
    clients = Java(jvm, ours.name_server)
    fill(clients, "ours")
    consume_all(clients, data)
    before = read(clients, COUNT + 11)
    assert all(("__CRC32#" in m.properties) == sealed for m in before)
    clients.close()
    if end == "stopped":
        assert ours.stop() == 0
    else:
        ours.kill()
    real_broker(sealed=sealed)
    clients = Java(jvm, names.address)
    check(clients, before, "ours")
    clients.close()


def test_a_store_goes_to_and_fro(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm
) -> None:
    ours = martlet()
    clients = Java(jvm, ours.name_server)
    fill(clients, "one")
    clients.close()
    assert ours.stop() == 0
    real = real_broker()
    clients = Java(jvm, names.address)
    fill(clients, "two")
    clients.close()
    real.stop()
    ours.start()
    clients = Java(jvm, ours.name_server)
    fill(clients, "three")
    got = read(clients, 3 * (COUNT + 11))
    clients.close()
    assert ours.stop() == 0
    assert Counter(m.body for m in got) == everything("one") + everything("two") + everything("three")
    for queue in range(4):
        offsets = sorted(m.offset for m in got if m.queue == queue)
        assert offsets == list(range(len(offsets)))
