"""Reading where one says, and asking and changing what brokers hold."""

import pytest
import trio
from trio.testing import MockClock

from martlet_client import (
    Admin,
    BadAnswer,
    BrokerError,
    ClientError,
    ConnectionLost,
    Message,
    MessageNotFound,
    MessageQueue,
    Producer,
    PullConsumer,
    PullStatus,
    QueueLag,
    RouteNotFound,
    SendFailed,
    Sql,
)
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.answers.messages import parse_message_id
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import decode_pull_header
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.routes import decode_route

from .fake import Cluster, Reply

QUEUE = MessageQueue("T", "broker-a", 0)


async def test_pull_gives_what_is_there(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in range(5):
        cluster.broker.put("T", 0, b"%d" % number, "A" if number % 2 else "B")
    async with PullConsumer(cluster.settings(), "G") as consumer:
        assert await consumer.queues("T") == [MessageQueue("T", "broker-a", number) for number in range(4)]
        pulled = await consumer.pull(QUEUE, 1, messages_max=3)
        assert [message.body for message in pulled.messages] == [b"1", b"2", b"3"]
        assert (pulled.status, pulled.next_offset, pulled.max_offset) == (PullStatus.FOUND, 4, 5)
        tagged = await consumer.pull(QUEUE, 0, expression="A")
        assert [message.body for message in tagged.messages] == [b"1", b"3"]
        assert (await consumer.pull(QUEUE, 5)).status is PullStatus.NO_NEW_MESSAGE
        moved = await consumer.pull(QUEUE, 77)
        assert (moved.status, moved.next_offset) == (PullStatus.OFFSET_MOVED, 5)


async def test_pull_with_wait_is_held_by_the_broker(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with PullConsumer(cluster.settings(), "G") as consumer, trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(3)
            cluster.broker.put("T", 0, b"x")

        start = trio.current_time()
        assert (await consumer.pull(QUEUE, 0, wait_s=2)).status is PullStatus.NO_NEW_MESSAGE
        assert trio.current_time() - start == pytest.approx(2)
        nursery.start_soon(later)
        pulled = await consumer.pull(QUEUE, 0, wait_s=20)
        assert [message.body for message in pulled.messages] == [b"x"]


async def test_sql_is_left_to_the_broker(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"x", "A")
    async with PullConsumer(cluster.settings(), "G") as consumer:
        assert len((await consumer.pull(QUEUE, 0, expression=Sql("a > 5"))).messages) == 1
    header = decode_pull_header(cluster.broker.asked(RequestCode.PULL_MESSAGE)[0])
    assert (header.expression_type, header.expression, header.sys_flag) == ("SQL92", "a > 5", 4)


async def test_read_stops_at_the_end_or_follows(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in range(100):
        cluster.broker.put("T", 0, b"%d" % number)
    async with PullConsumer(cluster.settings(), "G") as consumer:
        assert [message.queue_offset async for message in consumer.read(QUEUE)] == list(range(100))
        assert [message.queue_offset async for message in consumer.read(QUEUE, 98)] == [98, 99]
        cluster.nursery.start_soon(put_later, cluster)
        async for message in consumer.read(QUEUE, 100, follow=True):
            assert message.body == b"later"
            break


async def put_later(cluster: Cluster) -> None:
    await trio.sleep(40)
    cluster.broker.put("T", 0, b"later")


async def test_damaged_message_stops_a_read(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"damaged")
    records = cluster.broker.queues["T", 0]
    records[0] = records[0].replace(b"damaged", b"dam_ged")
    async with PullConsumer(cluster.settings(), "G") as consumer:
        assert "CRC" in (await consumer.pull(QUEUE, 0)).damaged[0].text
        with pytest.raises(ClientError, match="damaged"):
            [message async for message in consumer.read(QUEUE)]


async def test_poll_moves_the_position_and_commit_keeps_it(cluster: Cluster, autojump_clock: MockClock) -> None:
    for number in range(40):
        cluster.broker.put("T", 0, b"%d" % number)
    async with PullConsumer(cluster.settings(), "G") as consumer:
        assert len((await consumer.poll(QUEUE)).messages) == 32
        assert len((await consumer.poll(QUEUE)).messages) == 8
        consumer.seek(QUEUE, 35)
        assert len((await consumer.poll(QUEUE)).messages) == 5
        await consumer.commit(QUEUE, 20)
    async with PullConsumer(cluster.settings(), "G") as consumer:
        assert await consumer.position(QUEUE) == 20
        assert (await consumer.max_offset(QUEUE), await consumer.min_offset(QUEUE)) == (40, 0)


async def test_unknown_topic_and_broker_have_no_route(cluster: Cluster, autojump_clock: MockClock) -> None:
    async with PullConsumer(cluster.settings(), "G") as consumer:
        with pytest.raises(RouteNotFound, match="Nope"):
            await consumer.queues("Nope")
        with pytest.raises(RouteNotFound, match="broker-z"):
            await consumer.pull(MessageQueue("T", "broker-z", 0), 0)


async def test_group_lag_reads_the_brokers_dialect(cluster: Cluster, autojump_clock: MockClock) -> None:
    stats = {"brokerOffset": 10, "consumerOffset": 4, "lastTimestamp": 99}
    cluster.broker.overrides[RequestCode.GET_CONSUME_STATS] = lambda command: Reply(
        body=fastjson.dumps({"consumeTps": 0.0, "offsetTable": {QUEUE: stats}})
    )
    async with Admin(cluster.settings()) as admin:
        (lag,) = await admin.group_lag("G")
        assert lag == QueueLag(QUEUE, 10, 4, 99)
        assert lag.lag == 6
        assert await admin.group_lag("G", "T") == [lag]


async def test_group_that_is_not_online_is_reset_all_the_same(cluster: Cluster, autojump_clock: MockClock) -> None:
    """Brokers before 5.0 answer 206; RocketMQ's own tool commits by itself then."""
    for number in range(3):
        cluster.broker.put("T", number, b"x")
    refuse = Reply(ResponseCode.CONSUMER_NOT_ONLINE, remark="Consumer not online")
    cluster.broker.overrides[RequestCode.INVOKE_BROKER_TO_RESET_OFFSET] = lambda command: refuse
    async with Admin(cluster.settings()) as admin:
        found = await admin.reset_offsets("G", "T")
    assert list(found.values()) == [1, 1, 1, 0]
    assert cluster.broker.offsets == {("G", "T", queue): offset for queue, offset in enumerate([1, 1, 1, 0])}


async def test_topics_are_created_on_every_master(two_brokers: Cluster, autojump_clock: MockClock) -> None:
    for broker in two_brokers.brokers:
        broker.overrides[RequestCode.UPDATE_AND_CREATE_TOPIC] = lambda command: Reply()
    async with Admin(two_brokers.settings()) as admin:
        assert await admin.create_topic("New", queues=3) == ["broker-a", "broker-b"]
        with pytest.raises(ClientError, match="cluster 'nope' has no broker"):
            await admin.create_topic("New", cluster="nope")
    (asked,) = two_brokers.brokers[1].asked(RequestCode.UPDATE_AND_CREATE_TOPIC)
    assert (asked.text("topic"), asked.integer("readQueueNums"), asked.integer("perm")) == ("New", 3, 6)


async def test_message_ids_that_lead_nowhere_are_not_found(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[RequestCode.QUERY_MESSAGE] = lambda command: Reply(ResponseCode.QUERY_NOT_FOUND)
    async with Admin(cluster.settings()) as admin:
        for message_id in ("xyz", "0" * 32, "ZZ" * 16):
            with pytest.raises(MessageNotFound, match=message_id):
                await admin.message(message_id)
            with pytest.raises(MessageNotFound, match=message_id):
                await admin.message(message_id, "T")


async def test_messages_by_key_leave_out_what_only_hashes_alike(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.put("T", 0, b"right", properties=b"KEYS\x01k other\x02")
    cluster.broker.put("T", 0, b"wrong", properties=b"KEYS\x01kk\x02")
    cluster.broker.put("U", 0, b"elsewhere", properties=b"KEYS\x01k\x02")
    everything = b"".join(cluster.broker.queues["T", 0] + cluster.broker.queues["U", 0])
    cluster.broker.overrides[RequestCode.QUERY_MESSAGE] = lambda command: Reply(body=everything)
    async with Admin(cluster.settings()) as admin:
        assert [message.body for message in await admin.messages_by_key("T", "k")] == [b"right"]


async def test_broker_settings_are_lines(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[RequestCode.GET_BROKER_CONFIG] = lambda command: Reply(body=b"a=1\nb=x=y\n\nnonsense\n")
    async with Admin(cluster.settings()) as admin:
        assert await admin.broker_config("a:1") == {"a": "1", "b": "x=y"}


async def test_refusal_carries_code_and_remark(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[RequestCode.GET_TOPIC_STATS_INFO] = lambda command: Reply(17, remark="topic[T] not exist")
    async with Admin(cluster.settings()) as admin:
        with pytest.raises(BrokerError, match=r"17 \(TOPIC_NOT_EXIST\): topic\[T\] not exist") as caught:
            await admin.topic_stats("T")
    assert (caught.value.code, caught.value.remark) == (17, "topic[T] not exist")


@pytest.mark.parametrize("quoted", [True, False])
def test_routes_read_the_same_with_quoted_and_bare_keys(quoted: bool) -> None:
    body = (
        '{"brokerDatas":[{"brokerAddrs":{0:"h:1"},"brokerName":"b","cluster":"c"}],"filterServerTable":{},'
        '"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":2,"topicSysFlag":0,"writeQueueNums":1},'
        '{"brokerName":"gone","perm":6,"readQueueNums":9,"topicSysFlag":0,"writeQueueNums":9}]}'
    )
    route = decode_route((body.replace("{0:", '{"0":') if quoted else body).encode())
    assert route.read_queues("T") == [MessageQueue("T", "b", 0), MessageQueue("T", "b", 1)]
    assert route.write_queues("T") == [MessageQueue("T", "b", 0)]
    assert route.master("b") == "h:1"


def test_slaves_and_permissions_shape_the_queues() -> None:
    body = (
        b'{"brokerDatas":[{"brokerAddrs":{1:"h:1"},"brokerName":"slave","cluster":"c"},'
        b'{"brokerAddrs":{0:"h:2"},"brokerName":"mute","cluster":"c"}],"filterServerTable":{},'
        b'"queueDatas":[{"brokerName":"slave","perm":6,"readQueueNums":1,"writeQueueNums":1},'
        b'{"brokerName":"mute","perm":4,"readQueueNums":1,"writeQueueNums":1}]}'
    )
    route = decode_route(body)
    assert route.write_queues("T") == []
    assert len(route.read_queues("T")) == 2
    assert (route.master("slave"), route.address("slave")) == (None, "h:1")


def test_ordered_topic_has_the_queues_of_its_configuration() -> None:
    body = (
        b'{"brokerDatas":[{"brokerAddrs":{0:"h:1"},"brokerName":"b","cluster":"c"}],"orderTopicConf":"b:2;z:1",'
        b'"queueDatas":[{"brokerName":"b","perm":6,"readQueueNums":8,"writeQueueNums":8}]}'
    )
    assert decode_route(body).write_queues("T") == [
        MessageQueue("T", "b", 0),
        MessageQueue("T", "b", 1),
        MessageQueue("T", "z", 0),
    ]


def test_offset_message_id_names_address_and_position() -> None:
    assert parse_message_id("7F000001000078BF00000000000001CC") == ("127.0.0.1:30911", 460)


BAD_ROUTES = [b"", b"[]", b"{", b'{"brokerDatas":1}', b'{"brokerDatas":[{"brokerName":"b","brokerAddrs":{"x":"h:1"}}]}']


@pytest.mark.parametrize("body", BAD_ROUTES)
async def test_route_that_is_none_is_a_bad_answer(cluster: Cluster, autojump_clock: MockClock, body: bytes) -> None:
    cluster.overrides[RequestCode.GET_ROUTEINFO_BY_TOPIC] = lambda command: Reply(body=body)
    async with Producer(cluster.settings(), "P") as producer:
        with pytest.raises(BadAnswer):
            await producer.send(Message("T", b"x"))


async def test_answer_without_its_fields_is_a_bad_answer(cluster: Cluster, autojump_clock: MockClock) -> None:
    cluster.broker.overrides[RequestCode.SEND_MESSAGE_V2] = lambda command: Reply(0, {"msgId": "A", "queueId": "x"})
    cluster.broker.overrides[RequestCode.PULL_MESSAGE] = lambda command: Reply(0, {"minOffset": 0})
    cluster.broker.overrides[RequestCode.GET_MAX_OFFSET] = lambda command: Reply()
    async with Producer(cluster.settings(), "P") as producer, PullConsumer(cluster.settings(), "G") as consumer:
        with pytest.raises(BadAnswer, match="queueId 'x'"):
            await producer.send(Message("T", b"x"))
        with pytest.raises(BadAnswer, match="nextBeginOffset"):
            await consumer.pull(QUEUE, 0)
        with pytest.raises(BadAnswer, match="offset"):
            await consumer.max_offset(QUEUE)
        cluster.broker.overrides[RequestCode.PULL_MESSAGE] = lambda command: Reply(0, body=b"no records")
        with pytest.raises(BadAnswer, match="broker-a"):
            await consumer.pull(QUEUE, 0)


async def test_broker_that_talks_garbage_is_left(cluster: Cluster, autojump_clock: MockClock) -> None:
    def garbage(command: Command) -> Reply | None:
        cluster.nursery.start_soon(cluster.broker.connections[-1].send, b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return None

    cluster.broker.overrides[RequestCode.SEND_MESSAGE_V2] = garbage
    async with Producer(cluster.settings(), "P", retries=0) as producer:
        with pytest.raises(SendFailed, match="was closed: frame length") as caught:
            await producer.send(Message("T", b"x"))
        assert type(caught.value.attempts[0].error) is ConnectionLost
        cluster.broker.overrides.clear()
        await producer.send(Message("T", b"x"))
