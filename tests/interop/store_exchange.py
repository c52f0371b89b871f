"""What is sent, read and compared when a store goes from one broker to the other."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from . import rocketmq
from .java import Java, Queue, Received, found, message
from .martlet_process import Martlet
from .process import eventually

TOPIC, GROUP = "Kept", "kept_group"
COUNT = 60
RealBroker = Callable[..., rocketmq.Broker]
OurBroker = Callable[..., Martlet]
# How the first broker ended, and whether both write record CRCs and check them.
ENDS = ["stopped", "killed", "killed, with record CRCs"]
QUOTED = re.compile(r"([{,]\s*)(\d+):")  # RocketMQ writes number keys without quotes


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
