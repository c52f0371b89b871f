"""How the tests of POP speak: the headers of requests, and answers read as the Java client reads them."""

from dataclasses import dataclass

import trio

from martlet.message import find_property
from martlet.records.codec import decode_records
from martlet.tables.topics import RETRY_PREFIX
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import Handle, parse_handle, real_topic, retry_flag

from .conftest import FakeClient, Harness

BROKER = "martlet"


@dataclass(frozen=True)
class Popped:
    """One message of an answer."""

    topic: str
    queue_id: int
    offset: int
    body: bytes
    times: int
    handle: Handle


def pop_ext(topic: str, queue_id: int = -1, **more: object) -> dict[str, object]:
    """The header of a pop of 32 messages for 30 s that does not wait."""
    return {
        "consumerGroup": "G",
        "topic": topic,
        "queueId": str(queue_id),
        "maxMsgNums": "32",
        "invisibleTime": "30000",
        "pollTime": "0",
        "bornTime": "0",
        "initMode": "0",
        "expType": "TAG",
        "exp": "*",
        "order": "false",
        **more,
    }


def waiting_ext(topic: str, queue_id: int = -1, **more: object) -> dict[str, object]:
    """The header of a pop that waits up to 15 s."""
    return pop_ext(topic, queue_id, **{"pollTime": "15000", **more})


def ack_ext(message: Popped, **more: object) -> dict[str, object]:
    """The header of an acknowledgement, or with ``invisibleTime`` of a change of that."""
    topic = message.topic
    return {
        "consumerGroup": "G",
        "topic": topic if topic.startswith(RETRY_PREFIX) else real_topic(topic, "G", message.handle.retry),
        "queueId": str(message.queue_id),
        "extraInfo": str(message.handle),
        "offset": str(message.offset),
        **more,
    }


def popped(answer: Command) -> list[Popped]:
    """Return the messages of *answer* with the handles that the Java client makes of its fields."""
    assert answer.code == 0, answer.remark
    starts = [text.split(" ") for text in answer.text("startOffsetInfo").split(";")]
    lines = [text.split(" ") for text in answer.text("msgOffsetInfo").split(";")]
    first = {(retry, queue): int(start) for retry, queue, start in starts}
    offsets = {(retry, queue): list(map(int, text.split(","))) for retry, queue, text in lines}
    assert len(first) == len(starts)
    assert len(offsets) == len(lines)
    pop_ms, invisible_ms, revive = (answer.integer(name) for name in ("popTime", "invisibleTime", "reviveQid"))
    found: list[Popped] = []
    for record in decode_records(answer.body):
        own = find_property(record.properties, b"POP_CK").decode()
        retry = parse_handle(own).retry if own else retry_flag(record.topic)
        key = retry, str(record.queue_id)
        assert offsets[key].pop(0) == record.queue_offset
        handle = Handle(first[key], pop_ms, invisible_ms, revive, retry, BROKER, record.queue_id, record.queue_offset)
        assert not own or own == str(handle)
        found.append(
            Popped(
                record.topic, record.queue_id, record.queue_offset, bytes(record.body), record.reconsume_times, handle
            )
        )
    assert not any(offsets.values())
    return found


def bodies(messages: list[Popped]) -> list[bytes]:
    return [message.body for message in messages]


async def pop(client: FakeClient, topic: str, queue_id: int = -1, **more: object) -> list[Popped]:
    """Pop the available messages."""
    answer = await client.ask(RequestCode.POP_MESSAGE, pop_ext(topic, queue_id, **more))
    return popped(answer) if answer.code != 210 else []


async def ack(client: FakeClient, *messages: Popped, **more: object) -> None:
    for message in messages:
        answer = await client.ask(RequestCode.ACK_MESSAGE, ack_ext(message, **more))
        assert (answer.code, answer.remark) == (0, None)


def committed(harness: Harness, topic: str, queue_id: int = 0) -> int:
    return harness.broker.groups.offsets.get("G", topic, queue_id)


async def let_pass(harness: Harness, seconds: float) -> None:
    """Advance the time and discard the answers."""
    await trio.sleep(seconds)
    await harness.step()


def run(harness: Harness, nursery: trio.Nursery) -> None:
    """Let leases and waiting pops end on time."""
    harness.clock.run()
    nursery.start_soon(harness.broker.shared_groups.run)
    nursery.start_soon(harness.state.timeouts.run)
