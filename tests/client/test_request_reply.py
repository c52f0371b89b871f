"""A request gets the reply that belongs to it, or says why there is none."""

import math
from functools import partial

import pytest
import trio
from trio.testing import MockClock

from martlet.message import decode_properties, encode_properties
from martlet.records.compression import COMPRESSED
from martlet_client import (
    BadAnswer,
    Message,
    MessageQueue,
    MessageRefused,
    NoReply,
    Outcome,
    Producer,
    PushConsumer,
    ReceivedMessage,
    SendFailed,
)
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.headers import decode_send_header
from martlet_remoting.wire.packets import Command

from .fake import Broker, Cluster, Connection
from .fake import Reply as Answered

SEND = RequestCode.SEND_MESSAGE_V2
SEND_REPLY = RequestCode.SEND_REPLY_MESSAGE_V2
PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT
GONE = {"CORRELATION_ID": "c1", "REPLY_TO_CLIENT": "gone", "CLUSTER": "c"}


@pytest.fixture
def replying(cluster: Cluster) -> Cluster:
    """A cluster that marks messages with its name, as brokers do, and has its reply topic."""
    cluster.topics["c_REPLY_TOPIC"] = 1
    return cluster


def marked(command: Command) -> dict[str, str]:
    return {**decode_properties(decode_send_header(command).properties.encode()), "CLUSTER": "c"}


async def answer_all(cluster: Cluster, producer: Producer, task_status: trio.TaskStatus[None]) -> None:
    """Reply to each request for topic T with its body in capitals."""
    for broker in cluster.brokers:
        broker.overrides[SEND] = partial(store_marked, broker)

    async def listen(message: ReceivedMessage) -> Outcome:
        await producer.reply(message, message.body.upper(), tags="R", keys=["k"], properties={"colour": "red"})
        return Outcome.SUCCESS

    async with PushConsumer(cluster.settings(), "G", listen, {"T": "*"}):
        task_status.started()
        await trio.sleep_forever()


def store_marked(broker: Broker, command: Command) -> Answered:
    header = decode_send_header(command)
    message = broker.message(header, command.body, encode_properties(marked(command)))
    offset, name = broker.store(header.topic, header.queue_id, message)
    return Answered(0, {"msgId": name, "queueId": header.queue_id, "queueOffset": offset})


async def test_a_request_gets_the_reply_that_belongs_to_it(replying: Cluster, autojump_clock: MockClock) -> None:
    async with (
        Producer(replying.settings(), "P") as asking,
        Producer(replying.settings(), "Q") as answering,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(answer_all, replying, answering)
        found: dict[int, bytes] = {}

        async def ask(number: int) -> None:
            found[number] = (await asking.request(Message("T", b"question %d" % number))).body

        async with trio.open_nursery() as asked:
            for number in range(20):
                asked.start_soon(ask, number)
        assert found == {number: b"QUESTION %d" % number for number in range(20)}
        reply = await asking.request(Message("T", b"x" * 5000), selector=lambda queues, *_: queues[2])
        nursery.cancel_scope.cancel()
    assert (reply.body, reply.tags, reply.keys) == (b"X" * 5000, "R", ("k",))
    assert reply.properties["colour"] == "red"
    assert reply.message_id
    assert reply.store_ms >= reply.born_ms > 0
    asked_for = marked(replying.broker.asked(SEND)[-1])
    assert (asked_for["REPLY_TO_CLIENT"], asked_for["TTL"]) == (asking.client_id, "3000")
    requests = replying.broker.asked(SEND)
    starts = {marked(request)["CORRELATION_ID"][:8] for request in requests}
    assert len(starts) == len(requests) == 21  # no other client can guess them
    replied = decode_send_header(replying.broker.asked(SEND_REPLY)[-1])
    properties = decode_properties(replied.properties.encode())
    assert replied.topic == "c_REPLY_TOPIC"
    assert properties["MSG_TYPE"] == "reply"
    assert {name: properties[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")} == {
        name: asked_for[name] for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL")
    }


async def test_a_reply_over_any_broker_finds_the_requester(two_brokers: Cluster, autojump_clock: MockClock) -> None:
    two_brokers.topics["c_REPLY_TOPIC"] = 1
    async with (
        Producer(two_brokers.settings(), "P") as asking,
        Producer(two_brokers.settings(), "Q", retries=0) as answering,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(answer_all, two_brokers, answering)
        only = MessageQueue("T", two_brokers.brokers[0].name, 0)
        for _ in range(6):
            await asking.request(Message("T", b"x"), queue=only)
        nursery.cancel_scope.cancel()
    assert all(broker.asked(SEND_REPLY) for broker in two_brokers.brokers)


async def test_without_a_reply_a_request_says_so_in_time(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        begun = trio.current_time()
        with pytest.raises(NoReply, match=r"request \w+ for topic 'T' got no reply within 2 s") as caught:
            await producer.request(Message("T", b"x"), timeout_s=2)
        assert math.isclose(trio.current_time() - begun, 2)
        assert caught.value.message_id in str(caught.value)
        assert (await push(cluster, cluster.broker.asked(SEND)[0], b"late")).code == 0
        assert producer._waiters._waiting == {}


async def push(cluster: Cluster, asked: Command, body: bytes, **more: object) -> Command:
    """Push a reply to the request *asked* to its client; return the client's answer."""
    properties = decode_properties(decode_send_header(asked).properties.encode())
    told = {"properties": encode_properties({"CORRELATION_ID": properties["CORRELATION_ID"]}).decode()}
    ext: dict[str, object] = {**told, "sysFlag": 0, "bornTimestamp": 1, "storeTimestamp": 2, **more}
    return await requester(cluster, properties["REPLY_TO_CLIENT"]).ask(PUSH, ext, body)


def answer_with_pong(cluster: Cluster) -> None:
    """Let the broker push a reply to each request itself."""
    cluster.topics["c_REPLY_TOPIC"] = 1

    def answer(command: Command) -> Answered:
        cluster.nursery.start_soon(push, cluster, command, b"pong")
        return store_marked(cluster.broker, command)

    cluster.broker.overrides[SEND] = answer


def requester(cluster: Cluster, client_id: str) -> Connection:
    return next(found for found in cluster.broker.connections if client_id in found.client_ids)


@pytest.mark.parametrize("more", [{"sysFlag": COMPRESSED}, {"sysFlag": "none"}, {"bornTimestamp": "yesterday"}])
async def test_a_reply_that_cannot_be_read_fails_the_request(
    cluster: Cluster, autojump_clock: MockClock, more: dict[str, object]
) -> None:
    async with Producer(cluster.settings(), "P") as producer, trio.open_nursery() as nursery:

        async def spoil() -> None:
            await cluster.broker.arrived.wait()
            assert (await push(cluster, cluster.broker.asked(SEND)[0], b"not zlib", **more)).code == 0

        nursery.start_soon(spoil)
        with pytest.raises(BadAnswer, match="reply cannot be read"):
            await producer.request(Message("T", b"x"))


async def test_a_reply_that_names_no_request_is_dropped(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        await producer.send(Message("T", b"x"))
        answer = await requester(cluster, producer.client_id).ask(PUSH, {"properties": "no pairs"}, b"x")
    assert answer.code == 0


async def test_a_reply_to_a_requester_that_has_gone_fails(replying: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(replying.settings(), "Q", retries=1) as answering:
        with pytest.raises(SendFailed, match="channel of <gone> not found") as caught:
            await answering.reply(received(GONE), b"x")
    assert len(caught.value.attempts) == 2


def received(properties: dict[str, str]) -> ReceivedMessage:
    queue = MessageQueue("T", "broker-a", 0)
    places = {"born_ms": 0, "born_host": "", "store_ms": 0, "store_host": "", "reconsume_times": 0}
    rest = {"flag": 0, "sys_flag": 0, "position": 0, "store_bytes": 0}
    return ReceivedMessage("T", b"x", queue, 0, "ID", "", "", (), properties, **places, **rest)  # type: ignore[arg-type]


async def test_only_requests_can_be_replied_to(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        with pytest.raises(MessageRefused, match="message ID is not a request, it lacks REPLY_TO_CLIENT and CLUSTER"):
            await producer.reply(received({"CORRELATION_ID": "c1"}), b"x")
        with pytest.raises(TypeError, match="request"):
            await producer.reply(Message("T", b"x"), b"x")  # type: ignore[arg-type]
        with pytest.raises(MessageRefused, match="no body"):
            await producer.reply(received(GONE), b"")


@pytest.mark.parametrize("name", ["CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "MSG_TYPE"])
async def test_a_user_cannot_set_the_properties_of_requests(
    cluster: Cluster, autojump_clock: MockClock, name: str
) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        with pytest.raises(MessageRefused, match=f"property '{name}' is the broker's own"):
            await producer.send(Message("T", b"x", properties={name: "1"}))


async def test_a_request_that_cannot_be_sent_waits_for_nothing(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[SEND] = lambda command: Answered(1, remark="broken")
    async with Producer(cluster.settings(), "P", retries=0) as producer:
        with pytest.raises(SendFailed, match="broken"):
            await producer.request(Message("T", b"x"))
        assert producer._waiters._waiting == {}
        with pytest.raises(TypeError, match="message"):
            await producer.request(b"x")  # type: ignore[arg-type]
