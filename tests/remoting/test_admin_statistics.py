"""What tools see of queues, groups, clients and rates."""

import orjson
import pytest
import trio
import trio.testing

from martlet.errors import Reason, Refused
from martlet.records.codec import decode_record
from martlet.tables import offsets as core_offsets
from martlet.tables.groups import Group
from martlet_remoting.consumers.rates import Series
from martlet_remoting.wire import fastjson
from martlet_remoting.wire.codes import FLAG_RESPONSE, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command, MessageQueue

from .conftest import FakeClient, Harness, pull_ext, send_ext

T0 = 1_700_000_000_000


def queue(topic: str, number: int) -> MessageQueue:
    return MessageQueue(topic, "martlet", number)


async def ask(client: FakeClient, code: int, body: bytes = b"", /, **ext: object) -> Command:
    answer = await client.ask(code, ext, body)
    assert (answer.code, answer.remark) == (0, None)
    return answer


async def told(client: FakeClient, code: int, body: bytes = b"", /, **ext: object) -> object:
    return fastjson.loads((await ask(client, code, body, **ext)).body)


async def fill(harness: Harness, topic: str = "T", queues: int = 2) -> FakeClient:
    """Three messages a second apart in queue 0 of *topic*."""
    client = harness.client()
    harness.topic(topic, queues)
    for number in range(3):
        harness.clock.ms = T0 + number * 1000
        await ask(client, RequestCode.SEND_MESSAGE_V2, b"body", **send_ext(topic, properties="TAGS\x01A\x02"))
    return client


async def test_topic_statistics_are_written_as_java_tools_read_them(harness: Harness) -> None:
    client = await fill(harness)
    answer = await ask(client, RequestCode.GET_TOPIC_STATS_INFO, topic="T")
    assert answer.body == (
        b'{"offsetTable":{'
        b'{"brokerName":"martlet","queueId":0,"topic":"T"}:'
        b'{"lastUpdateTimestamp":1700000002000,"maxOffset":3,"minOffset":0},'
        b'{"brokerName":"martlet","queueId":1,"topic":"T"}:'
        b'{"lastUpdateTimestamp":0,"maxOffset":0,"minOffset":0}},"topicPutTps":0.0}'
    )


async def test_requests_continue_while_a_wide_topic_is_answered(harness: Harness) -> None:
    client = harness.client()
    harness.topic("Wide", 1000)
    wide = client.send(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "Wide"})
    await ask(client, RequestCode.GET_TOPIC_CONFIG, topic="Wide")
    await harness.step()
    loaded = fastjson.loads(client.answers[wide].body)
    assert isinstance(loaded, dict)
    assert len(loaded["offsetTable"]) == 1000


async def test_wide_work_that_fails_on_the_way_is_answered(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    client = harness.client()
    harness.topic("Wide", 1000)

    def fail(topic: str, queue_id: int) -> None:
        if queue_id == 500:
            raise Refused(Reason.BUSY, "enough")

    monkeypatch.setattr(harness.store.queues, "find", fail)
    answer = await client.ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "Wide"})
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_BUSY, "enough")


async def test_group_statistics_say_how_far_a_group_is(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.offsets.commit("G", "T", 0, 2)
    harness.broker.groups.offsets.commit("G", "gone", 0, 2)
    expected = {
        queue("T", 0): {"brokerOffset": 3, "consumerOffset": 2, "lastTimestamp": T0 + 1000, "pullOffset": 2},
        queue("T", 1): {"brokerOffset": 0, "consumerOffset": 0, "lastTimestamp": 0, "pullOffset": 0},
    }
    for ext in ({}, {"topic": "T"}, {"topicList": "T;gone"}):
        assert await told(client, RequestCode.GET_CONSUME_STATS, consumerGroup="G", **ext) == {
            "consumeTps": 0.0,
            "offsetTable": expected,
        }
    everyone = await told(client, RequestCode.GET_BROKER_CONSUME_STATS, isOrder="false")
    assert isinstance(everyone, dict)
    assert everyone["totalDiff"] == 0
    harness.broker.groups.update(Group("G"))
    everyone = await told(client, RequestCode.GET_BROKER_CONSUME_STATS, isOrder="false")
    assert isinstance(everyone, dict)
    assert everyone["totalDiff"] == 1
    assert {"G": [{"consumeTps": 0.0, "offsetTable": expected}]} in everyone["consumeStatsList"]
    ordered = await told(client, RequestCode.GET_BROKER_CONSUME_STATS, isOrder="true")
    assert isinstance(ordered, dict)
    assert {"G": []} in ordered["consumeStatsList"]


async def test_topics_that_nobody_wants_any_more_are_left_out(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.offsets.commit("G", "T", 0, 2)
    await client.heartbeat("c", "G", "U")
    stats = await told(client, RequestCode.GET_CONSUME_STATS, consumerGroup="G")
    assert stats == {"consumeTps": 0.0, "offsetTable": {}}


async def test_time_span_contains_the_delay_of_a_group(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.offsets.commit("G", "T", 0, 1)
    harness.clock.ms = T0 + 10_000
    spans = await told(client, RequestCode.QUERY_CONSUME_TIME_SPAN, topic="T", group="G")
    empty = {"consumeTimeStamp": -1, "delayTime": 0, "maxTimeStamp": -1, "minTimeStamp": -1}
    assert spans == {
        "consumeTimeSpanSet": [
            {
                "consumeTimeStamp": T0,
                "delayTime": 9000,
                "maxTimeStamp": T0 + 2000,
                "messageQueue": {"brokerName": "martlet", "queueId": 0, "topic": "T"},
                "minTimeStamp": T0,
            },
            {**empty, "messageQueue": {"brokerName": "martlet", "queueId": 1, "topic": "T"}},
        ]
    }


async def test_who_consumes_what(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.offsets.commit("Old", "T", 0, 1)
    await client.heartbeat("c", "Live", "T")
    assert await told(client, RequestCode.QUERY_TOPIC_CONSUME_BY_WHO, topic="T") == {"groupList": ["Live", "Old"]}
    topics = await told(client, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="Old")
    assert topics == {"brokerAddr": "", "topicList": ["T"]}
    found = await told(client, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, group="Live", topic="T")
    assert isinstance(found, dict)
    assert found["subscriptionData"]["subString"] == "*"
    found = await told(client, RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER, group="Old", topic="T")
    assert found == {"group": "Old", "topic": "T"}


async def test_all_offsets_are_the_offset_file(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.offsets.commit("G", "T", 0, 2)
    table = await told(client, RequestCode.GET_ALL_CONSUMER_OFFSET)
    assert isinstance(table, dict)
    assert table["offsetTable"] == {"T@G": {"0": 2}}


async def test_correction_goes_back_to_the_slowest_other_group(harness: Harness) -> None:
    client = await fill(harness)
    groups = harness.broker.groups
    for name, offset in (("Slow", 1), ("Slower", 0), ("Mine", 3), ("Behind", 0)):
        groups.offsets.commit(name, "T", 0, offset)

    async def correction(group: str, left_out: str) -> object:
        ext = {"topic": "T", "compareGroup": group, "filterGroups": left_out}
        return await told(client, RequestCode.QUERY_CORRECTION_OFFSET, **ext)

    assert await correction("Mine", "Mine,Behind") == {"correctionOffsets": {"0": 0}}
    assert await correction("Mine", "Mine,Slower,Behind") == {"correctionOffsets": {"0": 1}}
    assert await correction("Behind", "Slower,Behind") == {"correctionOffsets": {"0": 2**63 - 1}}


async def test_entries_of_a_consume_queue(harness: Harness) -> None:
    client = await fill(harness)
    ext = {"topic": "T", "queueId": "0", "index": "1", "count": "5", "consumerGroup": ""}
    shown = await told(client, RequestCode.QUERY_CONSUME_QUEUE, **ext)
    assert isinstance(shown, dict)
    assert (shown["minQueueIndex"], shown["maxQueueIndex"], len(shown["queueData"])) == (0, 3, 2)
    entry = shown["queueData"][0]
    record = harness.store.lookup.record_at(entry["physicOffset"], entry["physicSize"])
    assert record is not None
    assert decode_record(record).queue_offset == 1
    assert (entry["tagsCode"], entry["eval"]) == (65, False)
    await client.heartbeat("c", "G", "T")
    shown = await told(client, RequestCode.QUERY_CONSUME_QUEUE, **ext | {"consumerGroup": "G"})
    assert isinstance(shown, dict)
    assert shown["queueData"][0]["eval"] is True
    assert shown["subscriptionData"]["topic"] == "T"
    unused = await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext | {"queueId": "1"})
    assert (unused.code, unused.remark) == (0, "Index 1 of 1@T is not exist!")
    missing = await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext | {"queueId": "9"})
    assert missing.code == ResponseCode.SYSTEM_ERROR


# connections and relays


async def test_connections_are_listed(harness: Harness) -> None:
    client = harness.client()
    await client.heartbeat("c1", "G", "T")
    await client.heartbeat_body({"clientID": "c1", "producerDataSet": [{"groupName": "P"}]})
    connection = {"clientAddr": client.peer.address, "clientId": "c1", "language": "JAVA", "version": 479}
    group = await told(client, RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="G")
    assert isinstance(group, dict)
    assert group["connectionSet"] == [connection]
    assert (group["consumeType"], group["messageModel"]) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert group["consumeFromWhere"] == "CONSUME_FROM_LAST_OFFSET"
    assert group["subscriptionTable"]["T"]["subString"] == "*"
    producers = await told(client, RequestCode.GET_PRODUCER_CONNECTION_LIST, producerGroup="P")
    assert producers == {"connectionSet": [connection]}
    everyone = await told(client, RequestCode.GET_ALL_PRODUCER_INFO)
    shown = {
        "clientId": "c1",
        "language": "JAVA",
        "lastUpdateTimestamp": T0,
        "remoteIP": client.peer.address,
        "version": 479,
    }
    assert everyone == {"data": {"P": [shown]}}


async def test_absent_groups_have_codes_of_their_own(harness: Harness) -> None:
    client = harness.client()
    offline = await client.ask(RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert offline.code == ResponseCode.CONSUMER_NOT_ONLINE
    for code, ext in (
        (RequestCode.GET_PRODUCER_CONNECTION_LIST, {"producerGroup": "P"}),
        (RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "G", "clientId": "c"}),
        (RequestCode.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "G", "clientId": "c"}),
        (RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"group": "G", "topic": "T"}),
    ):
        answer = await client.ask(code, ext)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert answer.remark


def answer_to(asked: Command, code: int = 0, body: bytes = b"", remark: str | None = None) -> Command:
    return Command(code, {"x": "y"}, body, asked.opaque, FLAG_RESPONSE, remark)


async def take_request(harness: Harness, client: FakeClient, code: int) -> Command:
    await harness.step()
    (asked,) = [request for request in client.requests if request.code == code]
    client.requests.clear()
    return asked


async def test_running_info_is_asked_of_the_client_and_given_back_untouched(harness: Harness) -> None:
    consumer, tool = harness.client(), harness.client()
    await consumer.heartbeat("c1", "G", "T")
    ext = {"consumerGroup": "G", "clientId": "c1", "jstackEnable": "true"}
    opaque = tool.send(RequestCode.GET_CONSUMER_RUNNING_INFO, ext, b"in")
    asked = await take_request(harness, consumer, RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert (asked.ext, asked.body) == (ext, b"in")
    consumer.send_command(answer_to(asked, 1, b'{"droped":{0:1}}', "as I say"))
    await harness.step()
    answer = tool.answers[opaque]
    assert (answer.code, answer.ext, answer.body, answer.remark) == (1, {"x": "y"}, b'{"droped":{0:1}}', "as I say")


async def test_message_is_consumed_directly(harness: Harness) -> None:
    client = await fill(harness)
    consumer = harness.client()
    await consumer.heartbeat("c1", "G", "T")
    ext = {"consumerGroup": "G", "clientId": "c1", "msgId": harness.state.templates.message_id(0), "topic": "T"}
    client.send(RequestCode.CONSUME_MESSAGE_DIRECTLY, ext)
    asked = await take_request(harness, consumer, RequestCode.CONSUME_MESSAGE_DIRECTLY)
    assert asked.ext == {**ext, "brokerName": "martlet"}
    assert asked.body == harness.store.lookup.record_at(0)
    for wrong in ("7F", "z" * 32, harness.state.templates.message_id(1)):
        answer = await client.ask(RequestCode.CONSUME_MESSAGE_DIRECTLY, ext | {"msgId": wrong})
        assert answer.code == ResponseCode.SYSTEM_ERROR


async def test_client_that_goes_or_is_silent_is_a_timeout(harness: Harness) -> None:
    consumer, tool = harness.client(), harness.client()
    await consumer.heartbeat("c1", "G", "T")
    opaque = tool.send(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "G", "clientId": "c1"})
    consumer.close()
    await harness.step()
    assert tool.answers[opaque].code == ResponseCode.CONSUME_MSG_TIMEOUT


async def test_clients_of_old_are_not_asked(harness: Harness) -> None:
    consumer, tool = harness.client(), harness.client()
    body = b'{"clientID":"c1","consumerDataSet":[{"groupName":"G"}]}'
    await consumer.ask(RequestCode.HEART_BEAT, body=body, version=20)
    for code in (RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS):
        answer = await tool.ask(code, {"consumerGroup": "G", "clientId": "c1", "group": "G", "topic": "T"})
        assert answer.code == ResponseCode.SYSTEM_ERROR
    assert [request.code for request in consumer.requests] == [RequestCode.NOTIFY_CONSUMER_IDS_CHANGED]


async def test_status_is_gathered_from_all_members(harness: Harness) -> None:
    members = [harness.client() for _ in range(3)]
    for number, member in enumerate(members):
        await member.heartbeat(f"c{number}", "G", "T")
        member.receive()
    for member in members:
        member.requests.clear()
    tool = harness.client()
    opaque = tool.send(RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"group": "G", "topic": "T"})
    code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
    asked = [await take_request(harness, member, code) for member in members]
    body = b'{"messageQueueTable":{{"brokerName":"b","queueId":0,"topic":"T"}:7}}'
    members[0].send_command(answer_to(asked[0], 0, body))
    members[1].send_command(answer_to(asked[1], 0, b"no json"))
    await harness.step()
    assert opaque not in tool.answers
    members[2].close()
    await harness.step()
    assert tool.answers[opaque].body == (b'{"consumerTable":{"c0":{{"brokerName":"b","queueId":0,"topic":"T"}:7}}}')
    nobody = await told(tool, RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, group="G", topic="T", clientAddr="x")
    assert nobody == {"consumerTable": {}}


# resets


RESET = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET


async def test_reset_waits_for_the_next_pull(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.update(Group("G"))
    harness.broker.groups.offsets.commit("G", "T", 0, 3)
    ext = {"topic": "T", "group": "G", "timestamp": str(T0 + 1000), "isForce": "true"}
    answer = await ask(client, RESET, **ext)
    assert fastjson.loads(answer.body) == {"offsetTable": {queue("T", 0): 1, queue("T", 1): 0}}
    pulled = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 3))
    assert (pulled.code, pulled.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "1")
    pulled = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 1))
    assert pulled.code == 0


async def test_held_pull_hears_of_a_reset_at_once(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.update(Group("G"))
    opaque = client.send(RequestCode.PULL_MESSAGE, pull_ext("T", 3, sysFlag="6"))
    await harness.step()
    assert opaque not in client.answers
    await ask(harness.client(), RESET, topic="T", group="G", timestamp="0", isForce="true")
    await harness.step()
    answer = client.answers[opaque]
    assert (answer.code, answer.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")


async def test_one_queue_is_reset_to_an_offset_within_it(harness: Harness) -> None:
    client = await fill(harness)
    harness.broker.groups.update(Group("G"))
    ext = {"topic": "T", "group": "G", "timestamp": "-1", "isForce": "true", "queueId": "0"}
    answer = await ask(client, RESET, **ext, offset="2")
    assert fastjson.loads(answer.body) == {"offsetTable": {queue("T", 0): 2}}
    answer = await ask(client, RESET, **ext)
    assert fastjson.loads(answer.body) == {"offsetTable": {queue("T", 0): 3}}
    outside = await client.ask(RESET, {**ext, "offset": "77"})
    assert (outside.code, outside.remark) == (1, "Target offset 77 not in consume queue range [0-3]")


async def test_reset_of_what_is_not_there(harness: Harness) -> None:
    client = await fill(harness)
    ext = {"timestamp": "-1", "isForce": "true"}
    assert (await client.ask(RESET, {**ext, "topic": "x", "group": "G"})).code == ResponseCode.TOPIC_NOT_EXIST
    answer = await client.ask(RESET, {**ext, "topic": "T", "group": "x"})
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_reset_is_pushed_to_members_where_that_is_wanted(harness: Harness) -> None:
    client = await fill(harness)
    harness.state.switches["useServerSideResetOffset"] = False
    ext = {"topic": "T", "group": "G", "timestamp": str(T0 + 1000), "isForce": "false"}
    answer = await client.ask(RESET, ext)
    assert (answer.code, answer.remark) == (1, "THe consumer group <G> not exist")
    harness.broker.groups.offsets.commit("G", "T", 0, 0)
    harness.broker.groups.offsets.commit("G", "T", 1, 0)
    assert (await client.ask(RESET, ext)).code == ResponseCode.CONSUMER_NOT_ONLINE
    member = harness.client()
    await member.heartbeat("c", "G", "T")
    member.requests.clear()
    answer = await client.ask(RESET, ext)
    assert fastjson.loads(answer.body) == {"offsetTable": {queue("T", 0): 0, queue("T", 1): 0}}
    (pushed,) = member.requests
    assert (pushed.code, pushed.is_oneway, pushed.ext) == (RequestCode.RESET_CONSUMER_CLIENT_OFFSET, True, ext)
    assert fastjson.loads(pushed.body) == {"offsetTable": {queue("T", 0): 0, queue("T", 1): 0}}
    member.requests.clear()
    await ask(client, RESET, **ext | {"isForce": "true"})
    assert fastjson.loads(member.requests[0].body) == {"offsetTable": {queue("T", 0): 1, queue("T", 1): 0}}


async def test_each_member_is_sent_a_reset_in_the_form_that_it_reads(harness: Harness) -> None:
    client = await fill(harness)
    harness.state.switches["useServerSideResetOffset"] = False
    harness.broker.groups.offsets.commit("G", "T", 0, 0)
    harness.broker.groups.offsets.commit("G", "T", 1, 0)
    members = {language: harness.client() for language in ("CPP", "JAVA")}
    for language, member in members.items():
        member.language = language
        await member.heartbeat(language, "G", "T")
    for member in members.values():
        member.requests.clear()
    await ask(client, RESET, topic="T", group="G", timestamp=str(T0 + 1000), isForce="true")
    pushed = {language: member.requests[0].body for language, member in members.items()}
    assert fastjson.loads(pushed["JAVA"]) == {"offsetTable": {queue("T", 0): 1, queue("T", 1): 0}}
    listed = orjson.loads(pushed["CPP"])["offsetTable"]
    broker_name = harness.broker.config.name
    assert [(each["topic"], each["brokerName"], each["queueId"], each["offset"]) for each in listed] == [
        ("T", broker_name, 0, 1),
        ("T", broker_name, 1, 0),
    ]


@pytest.mark.parametrize("target", ["", " ", "a b", "../B", "x" * 121])
async def test_offsets_are_cloned_only_to_what_can_be_a_group(harness: Harness, target: str) -> None:
    harness.topic("T", 1)
    harness.broker.groups.offsets.commit("A", "T", 0, 2)
    request = {"srcGroup": "A", "destGroup": target, "topic": "T", "offline": "true"}
    answer = await harness.client().ask(RequestCode.CLONE_GROUP_OFFSET, request)
    assert (answer.code, "The specified group" in str(answer.remark)) == (ResponseCode.INVALID_PARAMETER, True)
    assert harness.broker.groups.offsets.groups_of("T") == ["A"]


async def test_offsets_are_cloned_to_a_bounded_number_of_groups(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.topic("T", 1)
    harness.broker.groups.offsets.commit("A", "T", 0, 2)
    monkeypatch.setattr(core_offsets, "GROUPS_MAX", 2)
    client = harness.client()
    codes = []
    for target in ("B", "C", "B"):
        request = {"srcGroup": "A", "destGroup": target, "topic": "T", "offline": "true"}
        codes.append((await client.ask(RequestCode.CLONE_GROUP_OFFSET, request)).code)
    assert codes == [0, ResponseCode.SYSTEM_BUSY, 0]
    assert harness.broker.groups.offsets.groups_of("T") == ["A", "B"]


async def test_offsets_are_cloned_from_another_group(harness: Harness) -> None:
    client = await fill(harness)
    groups = harness.broker.groups
    groups.offsets.commit("A", "T", 0, 2)
    groups.offsets.commit("A", "gone", 0, 2)
    await ask(client, RequestCode.CLONE_GROUP_OFFSET, srcGroup="A", destGroup="B", topic="", offline="true")
    assert groups.offsets.committed("B", "T") == {0: 2}
    await client.heartbeat("c", "A", "U")
    await ask(client, RequestCode.CLONE_GROUP_OFFSET, srcGroup="A", destGroup="C", topic="T", offline="false")
    assert groups.offsets.topics_of("C") == []


# the broker


RUNTIME_KEYS = (
    "bootTimestamp brokerActive brokerVersionDesc commitLogDirCapacity commitLogDiskRatio commitLogMaxOffset "
    "commitLogMinOffset consumeQueueDiskRatio dispatchBehindBytes earliestMessageTimeStamp getFoundTps getMissTps "
    "getTotalTps getTransferredTps msgGetTotalTodayNow msgPutTotalTodayNow pageCacheLockTimeMills putTps runtime "
    "putMessageAverageSize putMessageSizeTotal putMessageTimesTotal remainHowManyDataToFlush "
    "sendThreadPoolQueueSize sendThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize "
    "startAcceptSendRequestTimeStamp timerReadBehind"
)


async def test_runtime_information_is_real_and_all_text(harness: Harness) -> None:
    client = await fill(harness)
    harness.clock.ms = T0 + 90_061_000
    answer = await told(client, RequestCode.GET_BROKER_RUNTIME_INFO)
    assert isinstance(answer, dict)
    table = answer["table"]
    assert set(RUNTIME_KEYS.split()) <= set(table)
    assert all(type(value) is str for value in table.values())
    assert list(table) == sorted(table)
    assert table["putMessageTimesTotal"] == "3"
    assert table["putMessageSizeTotal"] == table["commitLogMaxOffset"]
    assert table["runtime"] == "[ 1 days, 1 hours, 1 minutes, 1 seconds ]"
    assert (table["bootTimestamp"], table["earliestMessageTimeStamp"]) == (str(T0), str(T0))
    assert table["putMessageDistributeTime"].startswith("[<=0ms]:3 [0~10ms]:0 ")
    assert 0 <= float(table["commitLogDiskRatio"]) <= 1


async def test_configuration_is_read_and_hot_keys_change(harness: Harness) -> None:
    client = harness.client()
    answer = await ask(client, RequestCode.GET_BROKER_CONFIG)
    lines = answer.body.decode().splitlines()
    assert {"brokerName=martlet", "flushDiskType=ASYNC_FLUSH", "autoCreateTopicEnable=true"} <= set(lines)
    assert orjson.loads(str(answer.ext["version"])).keys() == {"counter", "stateVersion", "timestamp"}
    await ask(client, RequestCode.UPDATE_BROKER_CONFIG, answer.body)
    change = b"autoCreateTopicEnable=false\nautoCreateSubscriptionGroup=false\nuseServerSideResetOffset=false\n"
    await ask(client, RequestCode.UPDATE_BROKER_CONFIG, change + b"fileReservedTime=99\ndeleteWhen=12\n")
    assert harness.broker.topics.auto_create_enabled is False
    assert harness.broker.groups.auto_create is False
    assert harness.state.switches["useServerSideResetOffset"] is False
    assert (harness.store.config.file_reserved_hours, harness.store.config.delete_when) == (99, "12")
    answer = await client.ask(RequestCode.UPDATE_BROKER_CONFIG, {}, b"deleteWhen=99\n")
    assert (answer.code, "must be hours from 0 to 23" in (answer.remark or "")) == (
        ResponseCode.INVALID_PARAMETER,
        True,
    )
    assert harness.store.config.delete_when == "12"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (b"brokerName=other\nautoCreateTopicEnable=false", ResponseCode.NO_PERMISSION),
        (b"nonsense=1\nautoCreateTopicEnable=false", ResponseCode.NO_PERMISSION),
        (b"autoCreateTopicEnable=maybe", ResponseCode.INVALID_PARAMETER),
        (b"fileReservedTime=0\nautoCreateTopicEnable=false", ResponseCode.INVALID_PARAMETER),
        (b"fileReservedTime=soon", ResponseCode.INVALID_PARAMETER),
    ],
)
async def test_what_cannot_change_is_refused_whole(harness: Harness, change: bytes, code: int) -> None:
    answer = await harness.client().ask(RequestCode.UPDATE_BROKER_CONFIG, body=change)
    assert answer.code == code
    assert harness.broker.topics.auto_create_enabled is True
    assert harness.store.config.file_reserved_hours == 72


async def test_master_has_no_slaves_and_housekeeping_is_done(harness: Harness) -> None:
    client = await fill(harness)
    status = await told(client, RequestCode.GET_BROKER_HA_STATUS)
    assert isinstance(status, dict)
    assert (status["master"], status["masterCommitLogMaxOffset"]) == (True, harness.store.readable)
    for code in (RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, RequestCode.DELETE_EXPIRED_COMMITLOG):
        await ask(client, code)


# rates


async def test_rates_come_from_queues_and_pulls(harness: Harness) -> None:
    client = await fill(harness, "Old")
    rates = harness.state.rates
    harness.topic("New", 2)
    await rates.start()
    await rates.sample()
    started = harness.store.appended
    await fill(harness, "New")
    harness.broker.groups.update(Group("G"))
    pulled = await client.ask(RequestCode.PULL_MESSAGE, pull_ext("New", 0))
    assert pulled.code == 0
    await rates.sample()
    missing = await client.ask(RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "Old"})
    assert missing.code == ResponseCode.SYSTEM_ERROR
    data = await told(client, RequestCode.VIEW_BROKER_STATS_DATA, statsName="TOPIC_PUT_NUMS", statsKey="New")
    assert isinstance(data, dict)
    assert data["statsMinute"]["sum"] == 3
    assert data["statsMinute"]["tps"] > 0
    data = await told(client, RequestCode.VIEW_BROKER_STATS_DATA, statsName="GROUP_GET_NUMS", statsKey="New@G")
    assert isinstance(data, dict)
    assert data["statsMinute"]["sum"] == 3
    assert (rates.put_total, rates.found) == (3, 3)
    for name in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS"):
        data = await told(client, RequestCode.VIEW_BROKER_STATS_DATA, statsName=name, statsKey="DefaultCluster")
        assert isinstance(data, dict)
        assert data["statsMinute"]["sum"] == 3
    size = await minute(client, "TOPIC_PUT_SIZE", "New")
    assert size["sum"] == harness.store.appended - started
    assert size["avgpt"] == size["sum"] / 3
    assert (await minute(client, "GROUP_GET_NUMS", "New@G"))["avgpt"] == 3.0  # messages of one pull
    assert (await minute(client, "GROUP_GET_SIZE", "New@G"))["avgpt"] == size["sum"]
    harness.broker.topics.delete("New")
    await rates.sample()
    assert rates.put_total == 3
    for name in ("TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE"):
        assert rates.series(name, "New") is None


async def minute(client: FakeClient, name: str, key: str) -> dict[str, float]:
    """Return a statistic of the last minute."""
    data = await told(client, RequestCode.VIEW_BROKER_STATS_DATA, statsName=name, statsKey=key)
    assert isinstance(data, dict)
    found: dict[str, float] = data["statsMinute"]
    return found


async def test_stored_bytes_count_from_the_start(harness: Harness) -> None:
    """As RocketMQ's statistics do."""
    client = await fill(harness)
    rates = harness.state.rates
    await rates.start()
    await rates.sample()
    answer = await client.ask(RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_SIZE", "statsKey": "T"})
    assert answer.code == ResponseCode.SYSTEM_ERROR
    batch = b"x" * 1000
    await ask(client, RequestCode.SEND_MESSAGE_V2, batch, **send_ext("T"))
    await rates.sample()
    assert 1000 < (await minute(client, "TOPIC_PUT_SIZE", "T"))["sum"] < 1200


async def test_totals_are_remembered_at_midnight(harness: Harness) -> None:
    rates = harness.state.rates
    await rates.start()
    await fill(harness)
    await rates.sample()
    assert rates.put_at_midnight == [0, 0]
    harness.clock.ms += 86_400_000
    await rates.sample()
    assert rates.put_at_midnight == [0, 3]


async def test_sampling_runs_by_the_clock(autojump_clock: trio.testing.MockClock, harness: Harness) -> None:
    rates = harness.state.rates
    await fill(harness)
    with trio.move_on_after(61):
        await rates.run()
    series = rates.series("BROKER", "PUT")
    assert series is not None
    assert series.last == 0


def test_series_has_a_window_a_minute_an_hour_and_a_day() -> None:
    series = Series(0.0, 0, 0)
    for step in range(1, 361 * 25):
        series.sample(step * 10.0, step * 20, step * 4)
    shown = {name: window for name, window in series.as_json().items() if isinstance(window, dict)}
    assert {name: window["sum"] for name, window in shown.items()} == {
        "statsMinute": 120,
        "statsHour": 6 * 60 * 20,
        "statsDay": 24 * 360 * 20,
    }
    assert {window["tps"] for window in shown.values()} == {2.0}
    assert {window["avgpt"] for window in shown.values()} == {5.0}
    assert [series.tps(seconds) for seconds in (10.0, 60.0, 600.0)] == [2.0, 2.0, pytest.approx(2.0)]


def test_series_that_does_not_move_is_flat_after_a_day() -> None:
    series = Series(0.0, 5, 1)
    for step in range(1, 360 * 25):
        series.sample(step * 10.0, 5, 1)
        assert series.is_flat == (step >= 360)
    series.sample(1e6, 6, 2)
    assert not series.is_flat
