"""Stages declare which messages they want; they get these, whichever way they are published, and no others."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from martlet.broker import Broker
from martlet.contracts import Router, Stage
from martlet.errors import LocalProtocolError, Reason, Refused
from martlet.message import Message
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import serving
from martlet.testing.stores import ManualClock, small_config

PLAIN = b"TAGS\x01DELAYED\x02KEYS\x01TRAN_MSG\x02"
EMPTY = b"DELAY\x01\x02TRAN_MSG\x01\x02"
# What one of the stages below wants.
WANTED = [
    (b"DELAY\x013\x02", 0),
    (b"TAGS\x01a\x02DELAY\x013", 0),
    (b"DELAY_MS\x0150\x02", 0),
    (b"TAGS\x01a\x02TRAN_MSG\x01true\x02", 0),
    (b"", 0x4),
    (PLAIN, 0x8),
]
UNWANTED = [(b"", 0), (PLAIN, 0x1), (EMPTY, 0x703), (b"XDELAY\x013\x02", 0), (b"DELAYS\x013\x02", 0)]


class Seen:
    """Stages that note which messages they get."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, int]] = []

    def change(self, message: Message) -> Message:
        self.messages.append((message.properties, message.sys_flag))
        return message

    def install(self, broker: Broker) -> None:
        timer = Stage(self.change, properties=("DELAY", "DELAY_MS"))
        broker.set_stages([("timer", timer), ("tx", Stage(self.change, properties=("TRAN_MSG",), sys_flag=0xC))])


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with serving(Path("/data"), store=small_config(), disk=FakeDisk(), clock=ManualClock()) as running:
        running.broker.topics.update("t", read_queues=4, write_queues=4)
        yield running.broker


def message(properties: bytes, sys_flag: int) -> Message:
    return Message("t", b"x", properties, 1, sys_flag=sys_flag)


async def test_a_stage_gets_the_messages_that_it_wants_and_no_others(broker: Broker) -> None:
    seen = Seen()
    seen.install(broker)
    for properties, sys_flag in UNWANTED:
        broker.publish(message(properties, sys_flag))
    broker.publish_all([message(*each) for each in UNWANTED])
    broker.publish_all([message(*each) for each in UNWANTED], atomic=True)
    queue = broker.find_queue("t", 1)
    assert queue is not None, "runs stay possible"
    broker.publish_all(
        [(queue, b"x", properties, 0, 0, sys_flag, 0, bytes(8), 0, 0) for properties, sys_flag in UNWANTED]
    )
    assert seen.messages == []
    assert queue.next_offset == 4 * len(UNWANTED)


@pytest.mark.parametrize(("properties", "sys_flag"), WANTED)
async def test_a_wanted_message_is_found_among_others_in_every_way_of_publishing(
    broker: Broker, properties: bytes, sys_flag: int
) -> None:
    seen = Seen()
    seen.install(broker)
    mixed = [*UNWANTED, (properties, sys_flag), *UNWANTED]
    broker.publish(message(properties, sys_flag))
    broker.publish_all([message(*each) for each in mixed])
    broker.publish_all([message(*each) for each in mixed], atomic=True)
    assert seen.messages == [(properties, sys_flag)] * 3


@pytest.mark.parametrize(("properties", "sys_flag"), WANTED)
async def test_whoever_searches_for_the_words_of_all_stages_finds_what_they_want(
    broker: Broker, properties: bytes, sys_flag: int
) -> None:
    Seen().install(broker)
    stages = broker.stages
    assert stages.words == ("DELAY", "TRAN_MSG")
    assert sys_flag & stages.sys_flag or any(word in properties.decode() for word in stages.words)
    assert stages.may_want(message(properties, sys_flag))
    assert stages.may_want_any([*(message(*each) for each in UNWANTED), message(properties, sys_flag)])


async def test_an_item_that_a_caller_has_checked_passes_no_stage(broker: Broker) -> None:
    seen = Seen()
    seen.install(broker)
    queue = broker.find_queue("t", 1)
    assert queue is not None
    item = (queue, b"x", b"DELAY\x011\x02", 0, 0, 0, 0, bytes(8), 0, 0)
    assert broker.publish_all([item]).offsets == [0]
    assert seen.messages == []
    long = bytes(broker.config.message_bytes_max + 1)
    with pytest.raises(Refused, match="message body is"):
        broker.publish_all([(queue, long, *item[2:])]).placed(0)
    broker.set_stages([*broker.stages.pairs, ("every", Stage(seen.change))])
    assert broker.find_queue("t", 1) is None
    with pytest.raises(LocalProtocolError, match="a stage wants every message"):
        broker.publish_all([item])
    assert queue.next_offset == 1


async def test_a_later_stage_sees_what_an_earlier_one_has_added(broker: Broker) -> None:
    seen = Seen()

    def delay(message: Message) -> Message:
        message.properties += b"TRAN_MSG\x01true\x02"
        return message

    stages = [("first", Stage(delay, properties=("DELAY",))), ("second", Stage(seen.change, properties=("TRAN_MSG",)))]
    broker.set_stages(stages)
    broker.publish(message(b"DELAY\x011\x02", 0))
    assert seen.messages == [(b"DELAY\x011\x02TRAN_MSG\x01true\x02", 0)]


@pytest.mark.parametrize("result", [None, 42])
async def test_a_stage_that_returns_no_message_is_named(broker: Broker, result: object) -> None:
    broker.set_stages([("absent", Stage(lambda message: cast(Message, result)))])
    with pytest.raises(Refused, match="plugin 'absent' failed in its stage; TypeError") as caught:
        broker.publish(message(PLAIN, 0))
    assert caught.value.reason is Reason.UNAVAILABLE
    (refused,) = broker.publish_all([message(PLAIN, 0)]).outcomes()
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("result", [None, [None], [b"%LMQ%a"]])
async def test_a_router_that_returns_no_names_is_named(broker: Broker, result: object) -> None:
    broker.set_stages([], [("absent", Router(lambda message: cast(list[str], result)))])
    with pytest.raises(Refused, match="plugin 'absent' failed in its router; TypeError"):
        broker.publish(message(PLAIN, 0))
