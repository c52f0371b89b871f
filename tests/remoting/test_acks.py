"""Acknowledgements of popped messages: forged, old and foreign handles do nothing and get the codes of RocketMQ."""

from base64 import b64encode
from typing import Any

import orjson
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from trio.testing import MockClock

from martlet.errors import Refused
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import Handle, parse_handle, real_topic, retry_flag

from .conftest import FakeClient, Harness
from .pop_talk import Popped, ack, ack_ext, committed, let_pass, pop, run
from .test_pops import fill

ACK = RequestCode.ACK_MESSAGE
CHANGE = RequestCode.CHANGE_MESSAGE_INVISIBLETIME
BATCH = RequestCode.BATCH_ACK_MESSAGE


def bit_set(*numbers: int) -> str:
    bits = sum(1 << number for number in numbers)
    return b64encode(bits.to_bytes(max(numbers, default=0) // 8 + 1, "little")).decode()


def batch(*messages: Popped, **more: object) -> dict[str, Any]:
    """One acknowledgement of a batch: of messages of one queue that were popped together."""
    handle = messages[0].handle
    return {
        "c": "G",
        "t": messages[0].topic,
        "r": handle.retry,
        "so": handle.first,
        "q": handle.queue_id,
        "rq": handle.revive_queue,
        "pt": handle.pop_ms,
        "it": handle.invisible_ms,
        "b": bit_set(*(message.offset - handle.first for message in messages)),
        **more,
    }


async def ack_batch(client: FakeClient, *acks: dict[str, Any]) -> Command:
    return await client.ask(BATCH, body=orjson.dumps({"brokerName": "martlet", "acks": acks}))


@pytest.mark.parametrize(
    ("ext", "code", "says"),
    [
        ({"topic": "Nowhere"}, 17, "topic[Nowhere] not exist"),
        ({"queueId": "1"}, 13, "queueId[1] is illegal"),
        ({"queueId": "-1"}, 13, "queueId[-1] is illegal"),
        ({"offset": "-1"}, 208, "offset is illegal, key:T@0, commit:-1, store:0~2"),
        ({"offset": "3"}, 208, "commit:3"),
        ({"extraInfo": "nonsense"}, 1, "'nonsense' is not a handle"),
        ({"extraInfo": "0 x 0 0 0 b 0 0"}, 1, "is not a handle"),
        ({"extraInfo": "0 " + "9" * 5000}, 1, "is not a handle"),
        ({"extraInfo": None}, 1, "lacks the header field extraInfo"),
        ({"offset": "x"}, 1, "offset 'x' is not a 64-bit integer"),
    ],
)
@pytest.mark.parametrize("change", [False, True])
async def test_what_cannot_be_acknowledged_is_refused(
    harness: Harness, ext: dict[str, object], code: int, says: str, change: bool
) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    client = harness.client()
    message, _ = await pop(client, topic)
    wanted = ack_ext(message) | ext
    answer = await client.ask(CHANGE, wanted | {"invisibleTime": "1"}) if change else await client.ask(ACK, wanted)
    assert answer.code == code
    assert says in str(answer.remark)
    assert committed(harness, topic) == 0


async def test_a_change_needs_an_invisible_time_and_an_existing_message(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    client = harness.client()
    (message,) = await pop(client, topic)
    for value in (None, "-1", str(1 << 60)):
        assert (await client.ask(CHANGE, ack_ext(message, invisibleTime=value))).code == 29
    assert (await client.ask(CHANGE, ack_ext(message, offset="1", invisibleTime="1"))).code == 208
    assert (await client.ask(ACK, ack_ext(message, offset="1"))).code == 0
    assert committed(harness, topic) == 0


async def test_forged_and_foreign_handles_do_nothing(harness: Harness) -> None:
    topic, other = harness.topic("T", 2), harness.topic("Other", 2)
    client = harness.client()
    for name in (topic, other):
        await fill(harness, name, b"a", b"b")
    message, second = await pop(client, topic)
    await pop(client, topic, consumerGroup="H")
    harness.clock.ms += 5
    await pop(client, other)
    forged = [
        ack_ext(message, extraInfo=str(replace(message.handle, pop_ms=message.handle.pop_ms + 1))),
        ack_ext(message, extraInfo=str(replace(message.handle, pop_ms=0))),
        ack_ext(message, topic=other),
        ack_ext(message, consumerGroup="Unknown"),
        ack_ext(message, queueId="1", offset="0"),
    ]
    for ext in forged:
        answer = await client.ask(ACK, ext)
        assert answer.code == 0
        assert "nothing was acknowledged" in str(answer.remark)
        assert (await client.ask(CHANGE, ext | {"invisibleTime": "0"})).code == 208
    assert committed(harness, topic) == committed(harness, other) == 0
    assert harness.broker.groups.offsets.get("H", topic, 0) == 0
    await ack(client, message, second)
    assert committed(harness, topic) == 2


async def test_an_old_handle_never_settles_a_newer_lease(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    run(harness, nursery)
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    one, two = harness.client(), harness.client()
    (old,) = await pop(one, topic, invisibleTime="1000")
    await let_pass(harness, 1.1)
    (new,) = await pop(two, topic)
    harness.clock.ms -= 3_600_000  # also when the clock is set back
    assert (await one.ask(ACK, ack_ext(old))).code == 0
    assert (await one.ask(CHANGE, ack_ext(old, invisibleTime="0"))).code == 208
    assert (await ack_batch(one, batch(old))).code == 0
    assert committed(harness, topic) == 0
    await ack(two, new)
    assert committed(harness, topic) == 1


async def test_a_batch_settles_what_its_bits_say(harness: Harness) -> None:
    topic = harness.topic("T", 2)
    for queue_id in (0, 1):
        await fill(harness, topic, *[b"%d" % number for number in range(20)], queue_id=queue_id)
    client = harness.client()
    found = await pop(client, topic, 0) + await pop(client, topic, 1)
    zero, one = found[:20], found[20:]
    client.peer.holds_commit = False
    assert (await ack_batch(client, batch(*zero[:9], zero[15]), batch(*one))).code == 0
    assert client.peer.holds_commit
    assert (committed(harness, topic), committed(harness, topic, 1)) == (9, 20)
    assert (await ack_batch(client, batch(*zero[9:]))).code == 0
    assert committed(harness, topic) == 20


async def test_a_batch_skips_what_is_not_there(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    client = harness.client()
    one, two = await pop(client, topic)
    wrong = [
        batch(one, t="Nowhere"),
        batch(one, q=7),
        batch(one, r="1"),
        batch(one, pt=5),
        batch(one, so=-5),
        batch(one, b=""),
        batch(one, b=bit_set(60_000)),
        batch(one, c="Unknown"),
    ]
    assert (await ack_batch(client, *wrong, batch(two))).code == 0
    assert committed(harness, topic) == 0
    await ack(client, one)
    assert committed(harness, topic) == 2


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 208),
        (b"{}", 208),
        (b'{"acks":[]}', 208),
        (b'{"acks":[7]}', 208),
        (b"[]", 1),
        (b"nonsense", 1),
        (b'{"acks":[{"c":"G","t":"T","r":"9"}]}', 1),
        (b'{"acks":[{"c":"G","t":"T","r":"0","q":0,"b":"%%"}]}', 1),
    ],
)
async def test_a_batch_that_is_none_is_refused(harness: Harness, body: bytes, code: int) -> None:
    harness.topic("T")
    assert (await harness.client().ask(BATCH, body=body)).code == code


async def test_a_long_batch_is_acknowledged_in_slices(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a")
    client = harness.client()
    (message,) = await pop(client, topic)
    every = batch(message, b=b64encode(b"\xff" * 100_000).decode())
    opaque = client.send(BATCH, body=orjson.dumps({"acks": [every]}))
    assert not client.peer.sent
    await harness.step()
    while opaque not in client.answers:
        await harness.step()
    assert client.answers.pop(opaque).code == 0
    assert committed(harness, topic) == 1


async def test_a_oneway_acknowledgement_settles_too(harness: Harness) -> None:
    topic = harness.topic("T", 1)
    await fill(harness, topic, b"a", b"b")
    client = harness.client()
    one, two = await pop(client, topic)
    client.send(ACK, ack_ext(one), flag=2)
    client.send(BATCH, body=orjson.dumps({"acks": [batch(two)]}), flag=2)
    await harness.step()
    assert not client.answers
    assert committed(harness, topic) == 2


NUMBERS = st.integers(0, 10**18)


@given(st.builds(Handle, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.sampled_from("012"), st.just("b-1"), NUMBERS, NUMBERS))
def test_handles_are_read_as_they_are_written(handle: Handle) -> None:
    assert parse_handle(str(handle)) == handle


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "1 2 3 4 0 b 5 6 7", "1 2 3 4 0 b 5 -6", "1  2 3 0 b 5 6", "\u0661 2 3 4 0 b 5 6"]
)
def test_what_is_no_handle_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not a handle"):
        parse_handle(text)


def test_retry_topics_have_their_flags() -> None:
    assert [retry_flag(topic) for topic in ("T", "%RETRY%G_T", "%RETRY%G+T")] == ["0", "1", "2"]
    assert [real_topic("T", "G", flag) for flag in "012"] == ["T", "%RETRY%G_T", "%RETRY%G+T"]
    with pytest.raises(Refused, match="must be 0, 1 or 2"):
        real_topic("T", "G", "3")


async def test_acknowledgements_are_counted_by_topic_and_group(harness: Harness) -> None:
    """GROUP_ACK_NUMS and BROKER_ACK_NUMS, as RocketMQ's exporter asks for them."""
    topic, client = harness.topic("T"), harness.client()
    await fill(harness, topic, b"1", b"2", b"3", b"4")
    rates = harness.state.rates
    await rates.start()
    one, two, three, four = await pop(client, topic)
    assert (await client.ask(ACK, ack_ext(one))).code == 0
    assert (await client.ask(ACK, ack_ext(one))).code == 0  # again: nothing is acknowledged
    assert (await ack_batch(client, batch(two, three, four))).code == 0
    await rates.sample()
    for name, key, wanted in (("GROUP_ACK_NUMS", "T@G", 2.0), ("BROKER_ACK_NUMS", "DefaultCluster", 1.0)):
        answer = await client.ask(RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": name, "statsKey": key})
        window = orjson.loads(answer.body)["statsMinute"]
        assert (window["sum"], window["avgpt"]) == (4, wanted)
