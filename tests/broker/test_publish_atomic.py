"""What a broker promises of messages that are published together, and of stages that a message has passed already."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from martlet.broker import Broker
from martlet.contracts import Stage
from martlet.errors import LocalProtocolError, Reason, Refused
from martlet.message import Message
from martlet.records.codec import decode_record
from martlet.settings import BrokerConfig
from martlet.store.append.items import AppendItem
from martlet.tables.topics import READ
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import ManualClock, placed_of, small_config


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    config = BrokerConfig(message_bytes_max=100)
    store = small_config(group_messages_max=4)
    async with serving(Path("/data"), store=store, broker=config, clock=ManualClock(), disk=FakeDisk()) as made:
        made.broker.topics.update("A", 4, 4)
        made.broker.topics.update("B", 1, 1)
        made.broker.topics.update("Closed", 1, 1, perm=READ)
        yield made.broker


def to(topic: str, body: bytes = b"x", queue_id: int = 0) -> Message:
    return Message(topic, body, b"", queue_id)


def add_stages(broker: Broker, *plugins: str) -> None:
    def run(plugin: str, message: Message) -> Message:
        if message.body == b"bad":
            raise Refused(Reason.ILLEGAL, f"{plugin} does not like it")
        message.body += plugin.encode()
        return message

    broker.set_stages([(plugin, Stage(partial(run, plugin))) for plugin in plugins])


def body_at(broker: Broker, position: int) -> bytes:
    return decode_record(broker.store.pages.read(position, 500)).body


async def test_messages_of_several_topics_are_stored_together(broker: Broker) -> None:
    placed = placed_of(broker.publish_all([to("A", queue_id=2), to("B"), to("A", queue_id=-1)], atomic=True))
    assert [each.position for each in placed[1:]] == [each.end for each in placed[:-1]]
    assert placed[0].queue_id == 2
    assert 0 <= placed[2].queue_id < 4


async def test_nothing_to_publish_is_nothing(broker: Broker) -> None:
    assert broker.publish_all([], atomic=True).outcomes() == []
    assert broker.store.appended == 0


async def test_a_group_may_have_notes_alone(broker: Broker) -> None:
    assert broker.publish_all([], atomic=True, notes=[(broker.journal("j"), b"note")]).outcomes() == []
    assert broker.store.appended > 0


async def test_a_run_is_stored_with_notes_and_records_of_a_plugin(broker: Broker) -> None:
    journal = broker.journal("j")

    def own(message: Message) -> Message:
        return Message("martlet.toy", b"own of " + message.body, b"TAGS\x01a\x02")

    run: list[Message | AppendItem] = [to("A", b"one", 1), broker.store.writer.item(to("A", b"two", 2), 2)]
    result = broker.publish_all(run, atomic=True, notes=[(journal, b"note")], own=own)
    assert [body_at(broker, position) for position in result.positions] == [b"one", b"two"]
    assert (result.offsets, result.refused, len(result.ends)) == ([0, 0], {}, 2)
    assert result.end > result.ends[1]
    broker.store.committer.commit()
    await broker.store.flusher.wait_flushed(broker.store.appended)
    assert body_at(broker, result.ends[1]) == b"own of one"
    noted = broker.store.queues.find(journal.topic, 0)
    assert noted is not None
    assert noted.next_offset == 1
    for read in broker.store.lookup.known_record, broker.store.lookup.record_at:
        data = read(result.ends[1])
        assert (data is not None) == (read == broker.store.lookup.known_record), "others get no internal records"
    far = await broker.store.lookup.known_record_far(result.ends[1])
    assert far is not None
    assert decode_record(far).topic == "martlet.toy"
    assert await broker.store.lookup.known_record_far(result.ends[1] + 1) is None


@pytest.mark.parametrize("bad", [to("Nowhere"), to("A", b"x" * 101)])
async def test_a_run_that_is_refused_stores_no_notes_either(broker: Broker, bad: Message) -> None:
    journal, before = broker.journal("j"), broker.store.appended
    with pytest.raises(Refused):
        broker.publish_all([to("A"), bad], atomic=True, notes=[(journal, b"note")])
    assert broker.store.appended == before
    assert broker.store.queues.find(journal.topic, 0) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (to("Nowhere"), Reason.NO_TOPIC),
        (to("Closed"), Reason.NO_PERMISSION),
        (to("A", bytes(101)), Reason.ILLEGAL),
        (to("A", queue_id=4), Reason.PARAMETER),
        (to("A", b"bad"), Reason.ILLEGAL),
    ],
)
async def test_one_refusal_refuses_the_whole_group(broker: Broker, bad: Message, reason: Reason) -> None:
    add_stages(broker, "s")
    for messages in ([to("A"), bad], [bad, to("A")], [to("A"), bad, to("B")]):
        with pytest.raises(Refused) as caught:
            broker.publish_all(messages, atomic=True, notes=[(broker.journal("j"), b"note")])
        assert caught.value.reason is reason
    assert broker.store.appended == 0


async def test_messages_and_notes_have_one_limit(broker: Broker) -> None:
    acknowledgements = [(broker.journal(name), b"note") for name in ("j", "k")]
    broker.publish_all([to("A"), to("B")], atomic=True, notes=acknowledgements)
    with pytest.raises(Refused, match="the group has 5 messages; the maximum is 4"):
        broker.publish_all([to("A")] * 3, atomic=True, notes=acknowledgements)


async def test_every_member_runs_through_every_stage(broker: Broker) -> None:
    add_stages(broker, "1", "2")
    placed = placed_of(broker.publish_all([to("A", b"a"), to("B", b"b")], atomic=True))
    assert [body_at(broker, each.position) for each in placed] == [b"a12", b"b12"]


@pytest.mark.parametrize(("passed", "rest"), [("", b"1223"), ("1", b"223"), ("2", b"3"), ("3", b"")])
async def test_a_message_that_a_stage_kept_back_runs_through_the_later_ones(
    broker: Broker, passed: str, rest: bytes
) -> None:
    add_stages(broker, "1", "2", "2", "3")
    assert body_at(broker, broker.publish(to("A", b"m"), passed=passed).position) == b"m" + rest
    placed = broker.publish_all([to("A", b"m")], atomic=True, passed=passed).placed(0)
    assert body_at(broker, placed.position) == b"m" + rest


async def test_nobody_passes_stages_that_are_not_there(broker: Broker) -> None:
    add_stages(broker, "1")
    with pytest.raises(LocalProtocolError, match="'2' has no stage"):
        broker.publish(to("A"), passed="2")
