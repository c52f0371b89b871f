"""A real process, killed while requests are under way: what it acknowledged is there afterwards, in its place."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.interop.martlet_process import Martlet
from tests.kills import ROUNDS
from tests.wire_clients.remoting import BlockingRemotingClient, send_request

from martlet.records.codec import decode_records
from martlet_remoting.wire.codes import RequestCode

TOPIC = "Killed"
QUEUES = 4
WINDOW = 32


def light_topics_of(key: str) -> list[str]:
    """The light topics of a message."""
    return [name for name, each in (("%LMQ%all", 1), ("%LMQ%third", 3)) if int(key) % each == 0]


class Journal:
    """What was sent, and what of it was acknowledged: key -> (queue, offset)."""

    def __init__(self, *, light: bool = False) -> None:
        self.light = light
        self.sent: dict[str, bytes] = {}
        self.acknowledged: dict[str, tuple[int, int]] = {}

    def send(self, remote: BlockingRemotingClient) -> Iterator[int]:
        """Keep a window of sends under way for ever; yields the number acknowledged after each answer."""
        under_way: dict[int, str] = {}
        number = 0
        while True:
            while len(under_way) < WINDOW:
                number += 1
                key = f"{len(self.sent):032d}"
                self.sent[key] = key.encode() * (1 + number % 40)
                under_way[number] = key
                names = light_topics_of(key) if self.light else []
                remote.send(send_request(TOPIC, number % QUEUES, key, self.sent[key], number, names))
            answer = remote.receive()
            assert answer.code == 0, answer.remark
            self.acknowledged[under_way.pop(answer.opaque)] = (answer.integer("queueId"), answer.integer("queueOffset"))
            yield len(self.acknowledged)


def stored(address: str) -> dict[str, tuple[int, int, bytes]]:
    """Return all that a consumer can read: key -> (queue, offset, body)."""
    found: dict[str, tuple[int, int, bytes]] = {}
    with BlockingRemotingClient(address) as remote:
        for queue_id in range(QUEUES):
            offset = 0
            while (answer := remote.pull(TOPIC, queue_id, offset)).code == 0:
                for record in decode_records(answer.body):
                    assert record.queue_offset == offset
                    found[record.property("UNIQ_KEY")] = (queue_id, record.queue_offset, record.body)
                    offset += 1
    return found


def check_light_queues(address: str, found: dict[str, tuple[int, int, bytes]]) -> None:
    """Each light queue has exactly the messages that name it, in one order."""
    with BlockingRemotingClient(address) as remote:
        for name in ("%LMQ%all", "%LMQ%third"):
            keys: list[str] = []
            while (answer := remote.pull(name, 0, len(keys))).code == 0:
                for record in decode_records(answer.body):
                    assert (record.queue_id, record.queue_offset) == (0, len(keys))
                    keys.append(record.property("UNIQ_KEY"))
                    assert record.body == found[keys[-1]][2]
            assert sorted(keys) == sorted(key for key in found if name in light_topics_of(key))


def test_light_queues_agree_with_what_was_stored_after_kill_9(tmp_path: Path) -> None:
    chance = random.Random(8)
    broker = Martlet(tmp_path, {"store.segment_bytes": "4194304", "remoting.light_queues": "true"})
    journal = Journal(light=True)
    try:
        for number in range(ROUNDS):
            with BlockingRemotingClient(broker.address) as remote:
                until = len(journal.acknowledged) + chance.randrange(1, 3000)
                for acknowledged in journal.send(remote):
                    if acknowledged >= until:
                        break
                broker.kill()
            if number % 2:
                shutil.rmtree(broker.data / "consumequeue")
            broker.start()
            found = stored(broker.address)
            for key, place in journal.acknowledged.items():
                assert found[key][:2] == place
            check_light_queues(broker.address, found)
    finally:
        broker.stop()
    assert len(journal.acknowledged) >= ROUNDS


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_what_was_acknowledged_survives_kill_9(tmp_path: Path, flush: str) -> None:
    chance = random.Random(7)
    broker = Martlet(tmp_path, {"store.flush": flush, "store.segment_bytes": "4194304"})
    journal = Journal()
    try:
        for _ in range(ROUNDS):
            with BlockingRemotingClient(broker.address) as remote:
                until = len(journal.acknowledged) + chance.randrange(1, 4000)
                for acknowledged in journal.send(remote):
                    if acknowledged >= until:
                        break
                broker.kill()
            broker.start()
            found = stored(broker.address)
            for key, place in journal.acknowledged.items():
                assert found[key][:2] == place
            for key, (_, _, body) in found.items():
                assert journal.sent[key] == body
    finally:
        broker.stop()
    assert len(journal.acknowledged) >= ROUNDS


def test_an_administrators_change_that_was_confirmed_survives_kill_9(tmp_path: Path) -> None:
    broker = Martlet(tmp_path, {})
    try:
        for number in range(ROUNDS):
            topic = {"topic": f"Made{number}", "readQueueNums": "3", "writeQueueNums": "3", "perm": "6"}
            with BlockingRemotingClient(broker.address) as remote:
                made = remote.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, topic)
                assert made.code == 0, made.remark
                body = f'{{"groupName":"made{number}","retryMaxTimes":{number + 3}}}'.encode()
                assert remote.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body).code == 0
                broker.kill()
            broker.start()
            with BlockingRemotingClient(broker.address) as remote:
                topic_found = remote.ask(RequestCode.GET_TOPIC_CONFIG, {"topic": f"Made{number}"})
                assert b'"readQueueNums":3' in topic_found.body
                group_found = remote.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": f"made{number}"})
                assert f'"retryMaxTimes":{number + 3}'.encode() in group_found.body
    finally:
        broker.stop()
