"""Sends arrive, are tried again elsewhere, or say what became of every attempt."""

import logging
import zlib
from collections import Counter

import pytest
import trio
from trio.testing import MockClock

from martlet.message import decode_properties
from martlet_client import (
    BrokerError,
    ClientClosed,
    ConnectionLost,
    Message,
    MessageQueue,
    MessageRefused,
    NameServerUnreachable,
    Producer,
    RequestTimeout,
    RouteNotFound,
    SendFailed,
    SendStatus,
    select_by_hash,
)
from martlet_remoting.wire.batches import decode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import decode_send_header
from martlet_remoting.wire.packets import Command

from .fake import Broker, Cluster, Reply

SEND = RequestCode.SEND_MESSAGE_V2


def stored(broker: Broker, topic: str = "T") -> int:
    return sum(len(records) for (name, _), records in broker.queues.items() if name == topic)


async def test_sends_take_the_queues_in_turn(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        results = [await producer.send(Message("T", b"x")) for _ in range(8)]
    assert Counter(result.queue.queue_id for result in results) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert {result.status for result in results} == {SendStatus.OK}
    assert len({result.message_id for result in results}) == 8


async def test_properties_keys_and_tags_go_with_the_message(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        sent = Message("T", b"x", tags="A", keys=["k", "l"], properties={"colour": "red"}, delay_level=3, flag=7)
        result = await producer.send(sent)
    header = decode_send_header(cluster.broker.asked(SEND)[0])
    properties = decode_properties(header.properties.encode())
    assert (header.producer_group, header.topic, header.default_topic, header.flag) == ("P", "T", "TBW102", 7)
    assert properties == {
        "TAGS": "A",
        "KEYS": "k l",
        "colour": "red",
        "DELAY": "3",
        "WAIT": "true",
        "UNIQ_KEY": result.message_id,
    }


@pytest.mark.parametrize("code", [1, 2, 14, 16, 17, 204, 205, 1500])
async def test_retried_codes_go_to_the_other_broker(two_brokers: Cluster, autojump_clock: MockClock, code: int) -> None:
    bad, good = two_brokers.brokers
    bad.overrides[SEND] = lambda command: Reply(code, remark="no")
    async with Producer(two_brokers.settings(), "P") as producer:
        for _ in range(8):
            assert (await producer.send(Message("T", b"x"))).queue.broker_name == good.name
    assert stored(good) == 8


@pytest.mark.parametrize("code", [13, 26, 29, 3])
async def test_other_codes_fail_at_once(two_brokers: Cluster, autojump_clock: MockClock, code: int) -> None:
    for broker in two_brokers.brokers:
        broker.overrides[SEND] = lambda command: Reply(code, remark="because")
    async with Producer(two_brokers.settings(), "P") as producer:
        with pytest.raises(BrokerError, match="because") as caught:
            await producer.send(Message("T", b"x"))
    assert caught.value.code == code
    assert sum(len(broker.asked(SEND)) for broker in two_brokers.brokers) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (10, SendStatus.FLUSH_DISK_TIMEOUT),
        (11, SendStatus.SLAVE_NOT_AVAILABLE),
        (12, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
async def test_less_safely_stored_is_a_status(
    cluster: Cluster, autojump_clock: MockClock, code: int, status: SendStatus
) -> None:
    cluster.broker.overrides[SEND] = lambda command: Reply(code, {"msgId": "A", "queueId": 1, "queueOffset": 5})
    async with Producer(cluster.settings(), "P") as producer:
        result = await producer.send(Message("T", b"x"))
    assert (result.status, result.queue.queue_id, result.queue_offset) == (status, 1, 5)


async def test_failed_send_names_every_attempt(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[SEND] = lambda command: Reply(ResponseCode.SYSTEM_BUSY, remark="busy, really")
    async with Producer(cluster.settings(), "P", retries=3) as producer:
        with pytest.raises(SendFailed, match=r"4 attempts.*busy, really") as caught:
            await producer.send(Message("T", b"x"))
    errors = [attempt.error for attempt in caught.value.attempts]
    assert [type(error) for error in errors] == [BrokerError] * 4
    assert caught.value.__cause__ is errors[-1]


async def test_silent_broker_costs_the_timeout_and_no_more(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[SEND] = lambda command: None
    async with Producer(cluster.settings(), "P", send_timeout_s=2.0) as producer:
        start = trio.current_time()
        with pytest.raises(SendFailed) as caught:
            await producer.send(Message("T", b"x"))
        assert trio.current_time() - start == pytest.approx(2.0)
    assert [type(attempt.error) for attempt in caught.value.attempts] == [RequestTimeout]


async def test_unreachable_broker_is_left_for_the_other(two_brokers: Cluster, autojump_clock: MockClock) -> None:
    first, second = two_brokers.brokers
    async with Producer(two_brokers.settings(), "P") as producer:
        await producer.send(Message("T", b"x"))
        first.down = True
        await first.drop_connections()
        results = [await producer.send(Message("T", b"x")) for _ in range(6)]
    assert {result.queue.broker_name for result in results} == {second.name}


async def test_failed_broker_is_passed_over_for_a_while(two_brokers: Cluster, autojump_clock: MockClock) -> None:
    bad, good = two_brokers.brokers
    async with Producer(two_brokers.settings(), "P") as producer:
        bad.overrides[SEND] = lambda command: Reply(ResponseCode.SYSTEM_BUSY)
        for _ in range(8):
            await producer.send(Message("T", b"x"))
        assert len(bad.asked(SEND)) == 1
        bad.overrides.clear()
        await trio.sleep(1.0)
        for _ in range(8):
            await producer.send(Message("T", b"x"))
    assert stored(bad) >= 3
    assert stored(good) >= 8


async def test_selected_queue_is_tried_once(two_brokers: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(two_brokers.settings(), "P") as producer:
        chosen = {(await producer.send(Message("T", b"x"), selector=select_by_hash, argument="k")).queue for _ in "abc"}
        assert len(chosen) == 1
        wanted = MessageQueue("T", "broker-b", 2)
        assert (await producer.send(Message("T", b"x"), queue=wanted)).queue == wanted
        two_brokers.brokers[1].overrides[SEND] = lambda command: None
        with pytest.raises(SendFailed, match="after 1 attempt:"):
            await producer.send(Message("T", b"x"), queue=wanted)


async def test_oneway_is_marked_and_not_waited_for(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        await producer.send_oneway(Message("T", b"x"))
        await trio.testing.wait_all_tasks_blocked()
    (command,) = cluster.broker.asked(SEND)
    assert command.is_oneway
    assert stored(cluster.broker) == 1


async def test_large_bodies_are_compressed(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        await producer.send(Message("T", b"x" * 4096))
        await producer.send(Message("T", b"x" * 4097))
    small, large = cluster.broker.asked(SEND)
    assert (small.body, decode_send_header(small).sys_flag) == (b"x" * 4096, 0)
    assert (zlib.decompress(large.body), decode_send_header(large).sys_flag) == (b"x" * 4097, 0x301)


async def test_batch_is_stored_in_one_queue(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        result = await producer.send_batch([Message("T", b"%d" % number, tags="A") for number in range(5)])
    (command,) = cluster.broker.asked(RequestCode.SEND_BATCH_MESSAGE)
    assert command.boolean("m"), "RocketMQ takes a batch for one message otherwise"
    members = decode_batch(command.body)
    assert [member.body for member in members] == [b"0", b"1", b"2", b"3", b"4"]
    keys = [decode_properties(member.properties)["UNIQ_KEY"] for member in members]
    assert result.message_id == ",".join(keys)
    assert len(result.offset_message_id.split(",")) == 5
    assert len(cluster.broker.queues["T", result.queue.queue_id]) == 5


BAD_BATCHES: list[tuple[str, list[Message]]] = [
    ("batch is empty", []),
    ("must have one", [Message("T", b"x"), Message("U", b"x")]),
    ("delayed message", [Message("T", b"x"), Message("T", b"x", delay_level=1)]),
    ("retry topic", [Message("%RETRY%g", b"x")]),
    ("over the limit of 1000; send smaller batches", [Message("T", b"x" * 400)] * 3),
    ("wait_stored", [Message("T", b"x"), Message("T", b"x", wait_stored=False)]),
]


@pytest.mark.parametrize(("text", "messages"), BAD_BATCHES)
async def test_bad_batches_are_refused_before_they_are_sent(
    cluster: Cluster, autojump_clock: MockClock, text: str, messages: list[Message]
) -> None:
    async with Producer(cluster.settings(), "P", body_bytes_max=1000) as producer:
        with pytest.raises(MessageRefused, match=text):
            await producer.send_batch(messages)
    assert cluster.broker.requests == []


BAD_MESSAGES: list[tuple[str, Message]] = [
    ("no body", Message("T", b"")),
    ("over the limit of 1000", Message("T", b"x" * 1001)),
    ("topic is empty", Message("", b"x")),
    ("forbidden characters", Message("a b", b"x")),
    ("127 are the limit", Message("x" * 128, b"x")),
    ("the broker's own", Message("T", b"x", properties={"UNIQ_KEY": "x"})),
    ("several delays", Message("T", b"x", delay_level=1, delay_ms=5)),
    (r"U\+0001", Message("T", b"x", properties={"a": "\x01"})),
    ("over the limit of 32767", Message("T", b"x", properties={"a": "x" * 33000})),
]


@pytest.mark.parametrize(("text", "message"), BAD_MESSAGES)
async def test_bad_messages_are_refused_before_they_are_sent(
    cluster: Cluster, autojump_clock: MockClock, text: str, message: Message
) -> None:
    async with Producer(cluster.settings(), "P", body_bytes_max=1000) as producer:
        with pytest.raises(MessageRefused, match=text):
            await producer.send(message)
    assert cluster.broker.requests == []


async def test_unknown_topic_goes_where_it_may_be_created(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P", default_queues=2) as producer:
        queues = {(await producer.send(Message("New", b"x"))).queue for _ in range(4)}
        assert queues == {MessageQueue("New", "broker-a", 0), MessageQueue("New", "broker-a", 1)}
        cluster.topics["New"] = 3
        assert len(await producer.queues("New")) == 3
    header = decode_send_header(cluster.broker.asked(SEND)[0])
    assert (header.default_topic, header.default_queues) == ("TBW102", 2)


async def test_topic_that_nobody_may_create_has_no_route(cluster: Cluster, autojump_clock: MockClock) -> None:
    del cluster.topics["TBW102"]
    async with Producer(cluster.settings(), "P") as producer:
        with pytest.raises(RouteNotFound, match="New"):
            await producer.send(Message("New", b"x"))


async def test_second_name_server_stands_in(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.names_down.add("dead:9876")
    async with Producer(cluster.settings(name_server="dead:9876;names:9876"), "P") as producer:
        await producer.send(Message("T", b"x"))
        cluster.topics["U"] = 1
        await producer.send(Message("U", b"x"))
    assert cluster.connected.count("dead:9876") == 1


async def test_no_name_server_is_said_with_every_failure(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.names_down = {"x:9876", "y:9876"}
    async with Producer(cluster.settings(name_server="x:9876;y:9876"), "P") as producer:
        with pytest.raises(NameServerUnreachable, match=r"x:9876.*refused.*y:9876.*refused"):
            await producer.send(Message("T", b"x"))


async def test_route_is_asked_again_every_30_s(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer:
        await producer.send(Message("T", b"x"))
        cluster.brokers.append(Broker(cluster, "broker-new", "new:1"))
        assert len(await producer.queues("T")) == 4
        await trio.sleep(31)
        assert len(await producer.queues("T")) == 8


async def test_broker_learns_of_the_producer_and_of_its_departure(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings("me"), "P") as producer:
        await producer.send(Message("T", b"x"))
        before = len(cluster.broker.asked(RequestCode.HEART_BEAT))
        assert before == 1
        await trio.sleep(61)
        assert len(cluster.broker.asked(RequestCode.HEART_BEAT)) == before + 2
    (gone,) = cluster.broker.asked(RequestCode.UNREGISTER_CLIENT)
    assert (gone.text("clientID"), gone.text("producerGroup")) == ("me", "P")


async def test_many_sends_share_one_connection(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P") as producer, trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(producer.send, Message("T", b"x"))
    assert cluster.connected.count("a:1") == 1
    assert stored(cluster.broker) == 50


async def test_answers_may_come_in_any_order(cluster: Cluster, autojump_clock: MockClock) -> None:
    release = trio.Event()
    held: list[Command] = []

    def hold_first(command: Command) -> Reply | None:
        ext: dict[str, object] = {"msgId": command.body.decode(), "queueId": 0, "queueOffset": 0}
        if command.body == b"first" and not held:
            held.append(command)
            return Reply(hold=release)
        return Reply(0, ext)

    cluster.broker.overrides[SEND] = hold_first
    async with Producer(cluster.settings(), "P") as producer, trio.open_nursery() as nursery:
        found: list[str] = []

        async def send(body: bytes) -> None:
            found.append((await producer.send(Message("T", body))).offset_message_id)

        nursery.start_soon(send, b"first")
        await trio.testing.wait_all_tasks_blocked()
        await send(b"second")
        release.set()
    assert found == ["second", "first"]


async def test_cancelled_send_leaves_the_connection_usable(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[SEND] = lambda command: None
    async with Producer(cluster.settings(), "P") as producer:
        with trio.move_on_after(0.5):
            await producer.send(Message("T", b"x"))
        cluster.broker.overrides.clear()
        await producer.send(Message("T", b"y"))
    assert cluster.connected.count("a:1") == 1


async def test_closed_producer_says_so(cluster: Cluster, autojump_clock: MockClock) -> None:
    producer = Producer(cluster.settings(), "P")
    with pytest.raises(ClientClosed, match="not open"):
        await producer.send(Message("T", b"x"))
    async with producer:
        pass
    with pytest.raises(ClientClosed, match="opened before"):
        async with producer:
            pass


async def test_error_of_the_body_comes_out_as_it_is(cluster: Cluster, autojump_clock: MockClock) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with Producer(cluster.settings(), "P"):
            raise KeyError("mine")


async def test_lost_connection_is_named(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[SEND] = lambda command: None
    async with Producer(cluster.settings(), "P", retries=0) as producer, trio.open_nursery() as nursery:

        async def cut() -> None:
            await trio.sleep(0.5)
            await cluster.broker.drop_connections()

        nursery.start_soon(cut)
        with pytest.raises(SendFailed) as caught:
            await producer.send(Message("T", b"x"))
    assert type(caught.value.attempts[0].error) is ConnectionLost


async def test_refusal_is_not_asked_for_again(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[SEND] = lambda command: Reply(ResponseCode.NO_PERMISSION, remark="not by you")
    async with Producer(cluster.settings(), "P") as producer:
        with pytest.raises(SendFailed, match=r"after 1 attempt: broker-a: .*NO_PERMISSION\): not by you$"):
            await producer.send(Message("T", b"x"))
    assert len(cluster.broker.asked(SEND)) == 1


async def test_what_one_broker_refuses_another_may_take(two_brokers: Cluster, autojump_clock: MockClock) -> None:
    for broker in two_brokers.brokers:
        broker.overrides[SEND] = lambda command: Reply(ResponseCode.NO_PERMISSION, remark="not by you")
    async with Producer(two_brokers.settings(), "P") as producer:
        with pytest.raises(
            SendFailed, match=r"after 2 attempts: .*broker-[ab]: .*not by you; broker-[ab]: .*not by you"
        ):
            await producer.send(Message("T", b"x"))
        assert [len(broker.asked(SEND)) for broker in two_brokers.brokers] == [1, 1]
        del two_brokers.brokers[1].overrides[SEND]
        assert (await producer.send(Message("T", b"x"))).queue.broker_name == "broker-b"


async def test_reason_of_several_attempts_is_said_once(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[SEND] = lambda command: Reply(ResponseCode.SYSTEM_BUSY, remark="full")
    async with Producer(cluster.settings(), "P") as producer:
        with pytest.raises(SendFailed, match="after 3 attempts: broker-a: ") as caught:
            await producer.send(Message("T", b"x"))
    assert str(caught.value).count("full") == 1
    assert len(caught.value.attempts) == 3


async def test_a_send_waits_for_brokers_that_restart(
    cluster: Cluster, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """As long as nothing can be sent, the time limit counts and not the number of retries."""
    async with Producer(cluster.settings(), "P") as producer, trio.open_nursery() as nursery:
        await producer.send(Message("T", b"before"))
        await cluster.stop()

        async def restart() -> None:
            await trio.sleep(1.5)
            cluster.names_down.clear()  # the brokers register later
            await trio.sleep(0.5)
            cluster.restart()

        nursery.start_soon(restart)
        began = trio.current_time()
        await producer.send(Message("T", b"after"))
        assert 2 <= trio.current_time() - began < 3
    assert len(cluster.broker.asked(SEND)) == 2
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    said = [(line.split()[0], "answers again" in line) for line in lines]
    assert said == [("broker", False), ("name", False), ("name", True), ("broker", True)], lines


async def test_a_send_fails_once_the_time_is_up(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(), "P", send_timeout_s=2) as producer:
        await producer.send(Message("T", b"before"))
        await cluster.stop()
        began = trio.current_time()
        with pytest.raises(SendFailed, match="was not sent after 1 attempt") as caught:
            await producer.send(Message("T", b"after"))
        assert 1 < trio.current_time() - began <= 2.1
        assert isinstance(caught.value.__cause__, NameServerUnreachable)


async def test_the_port_of_a_broker_is_recognized(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with Producer(cluster.settings(name_server="a:1"), "P") as producer:
        with pytest.raises(BrokerError, match=r"^a:1 answered 3 .*; this is the port of a broker: give that of a name"):
            await producer.send(Message("T", b"x"))
