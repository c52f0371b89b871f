"""Clients that stay when the broker goes: they go on when it is back, and nothing acknowledged is lost."""

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from . import fetch, wire
from .conftest import RocketMQ
from .java import Java, Jvm, message
from .martlet_process import Martlet
from .process import eventually

COUNT = 50


@pytest.fixture(scope="module")
def target(target_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQ | Martlet]:
    """A broker of its own, since it is ended under its clients."""
    folder = tmp_path_factory.mktemp("restarted")
    broker = RocketMQ(folder) if target_kind == "rocketmq" else Martlet(folder)
    yield broker
    broker.close()


@pytest.fixture
def java(jvms: Callable[[str], Jvm], target: RocketMQ | Martlet) -> Iterator[Java]:
    clients = Java(jvms(fetch.CLIENT_VERSIONS[-1]), target.name_server)
    yield clients
    clients.close()


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_clients_go_on_after_a_restart(java: Java, target: RocketMQ | Martlet, end: str) -> None:
    topic = f"restart_{end}"
    producer = java.producer(queues=2)
    before = [f"before {i}".encode() for i in range(COUNT)]
    after = [f"after {i}".encode() for i in range(COUNT)]
    producer.send(*(message(topic, body, keys="all") for body in before))
    consumer = java.push(f"group_{end}", topic)
    orderly = java.push(f"orderly_{end}", topic, orderly=True)
    for group in (consumer, orderly):
        group.wait_bodies(before)
    if end == "stopped":
        target.stop()
    else:
        target.kill()
    target.start()
    eventually(lambda: producer.try_send(message(topic, "awake"))[0].error is None or None)
    producer.send(*(message(topic, body, keys="all") for body in after))
    for group in (consumer, orderly):
        seen = {m.body for m in group.wait_bodies(after)}
        assert seen >= {*before, *after}
    stored = java.lite(f"reader_{end}", topic, assign=True).poll_bodies([*before, *after])
    counts = Counter(m.body for m in stored)
    assert {body: counts[body] for body in [*before, *after]} == dict.fromkeys([*before, *after], 1)


def test_what_was_acknowledged_survives_a_kill_under_load(java: Java, target: RocketMQ | Martlet) -> None:
    """The broker dies three times while a producer sends; what was answered is there afterwards, once."""
    topic = "under_load"
    producer = java.producer(queues=4, retries=0)
    producer.send(message(topic, "first"))
    queues = producer.queues(topic)
    queries = java.queries()
    answered: Counter[bytes] = Counter([b"first"])
    for turn in range(3):
        finish = producer.flood(topic, f"{turn}")
        enough = answered.total() + 200
        eventually(lambda enough=enough: sum(queries.offsets(q)["max"] for q in queues) > enough or None)  # type: ignore[misc]
        target.kill()
        results = finish()
        assert results[-1].error is not None, "the broker died while messages were sent"
        answered.update(f"{turn} {i}".encode() for i, sent in enumerate(results) if sent.error is None)
        target.start()
        eventually(lambda: producer.try_send(message(topic, "awake"))[0].error is None or None)
    stored = sum(queries.offsets(q)["max"] for q in queues)
    got = Counter(m.body for m in java.lite("auditor", topic, assign=True).poll_until(stored))
    assert answered - got == Counter()
    assert {body: got[body] for body in answered} == dict.fromkeys(answered, 1)


def test_a_message_that_failed_comes_again_although_the_broker_is_killed(
    java: Java, target: RocketMQ | Martlet
) -> None:
    """The broker dies right after it took the message back, before it is due again."""
    topic, group = "failed", "failed_group"
    [sent] = java.producer(queues=1).send(message(topic, "again"))
    position = int(sent.offset_msg_id[-16:], 16)
    fields = {"offset": f"{position}", "group": group, "delayLevel": "0", "originTopic": topic}
    answer = wire.ask(target.address, wire.CONSUMER_SEND_MSG_BACK, fields)
    assert answer is not None
    assert answer.code == 0
    target.kill()
    target.start()
    # A message that cannot fail again: what is delivered now is the one retry.
    consumer = java.push(group, topic, failures=0)
    [retry] = [m for m in consumer.wait(lambda seen: any(m.reconsume_times for m in seen)) if m.reconsume_times]
    assert (retry.body, retry.topic, retry.reconsume_times) == (b"again", topic, 1)
