import random
from collections.abc import Mapping
from unittest.mock import create_autospec

import pytest
import trio

from martlet.contracts import Stage, Timers, Transactions
from martlet.errors import Reason, Refused
from martlet.message import Message, Record, decode_properties
from martlet.records.codec import decode_record, decode_records
from martlet_remoting.handlers.send import BATCH_AT_ONCE
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, long_ext, pull_ext, send_ext

V2 = RequestCode.SEND_MESSAGE_V2


async def stored(harness: Harness, topic: str, queue_id: int = 0) -> list[Record]:
    """Every record of a queue, as a consumer of another group than G gets them."""
    client, found = harness.client(), list[Record]()
    while True:
        ext = pull_ext(topic, len(found), queue_id, consumerGroup="Other")
        answer = await client.ask(RequestCode.PULL_MESSAGE, ext)
        if answer.code != ResponseCode.SUCCESS:
            return found
        found += decode_records(answer.body)


async def test_a_sent_message_is_answered_with_its_place_and_can_be_pulled(harness: Harness) -> None:
    topic = harness.topic("T")
    client = harness.client()
    properties = "UNIQ_KEY\x01ABC1\x02WAIT\x01true\x02TAGS\x01A\x02"
    answer = await client.ask(V2, send_ext(topic, 2, properties, f="1", h="7"), b"hello")
    assert (answer.code, answer.remark) == (0, None)
    assert dict(answer.ext) == {
        "msgId": "7F00000100002A9F" + "0" * 16,
        "queueId": "2",
        "queueOffset": "0",
        "transactionId": "ABC1",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }
    (record,) = await stored(harness, topic, 2)
    assert (record.body, record.flag, record.sys_flag, record.queue_offset) == (b"hello", 7, 1, 0)
    assert (record.born_ms, record.born_host) == (1_700_000_000_000, client.peer.host)
    assert decode_properties(record.properties) == {
        "UNIQ_KEY": "ABC1",
        "WAIT": "true",
        "TAGS": "A",
        "CLUSTER": "DefaultCluster",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }


@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2])
async def test_long_and_short_field_names_mean_the_same(harness: Harness, code: int) -> None:
    topic = harness.topic("T")
    ext: Mapping[str, object] = long_ext(topic) if code == RequestCode.SEND_MESSAGE else send_ext(topic, 1)
    answer = await harness.client().ask(code, ext, b"x")
    assert (answer.code, answer.ext["queueId"]) == (0, "1")


@pytest.mark.parametrize("name", ["", "with space", "sla/sh"])
@pytest.mark.parametrize("code", [RequestCode.SEND_MESSAGE, RequestCode.SEND_MESSAGE_V2])
async def test_a_name_that_no_topic_can_have_is_refused_in_either_form(harness: Harness, code: int, name: str) -> None:
    ext: Mapping[str, object] = long_ext(name) if code == RequestCode.SEND_MESSAGE else send_ext(name, 1)
    answer = await harness.client().ask(code, ext, b"x")
    assert (answer.code, bool(answer.remark)) == (ResponseCode.INVALID_PARAMETER, True)


async def test_bare_numbers_and_booleans_in_the_header_are_taken(harness: Harness) -> None:
    topic = harness.topic("T")
    ext = send_ext(topic) | {"d": 4, "e": 3, "f": 0, "g": 1, "h": 0, "j": 0, "k": False, "m": False}
    client = harness.client()
    raw = (
        b'{"code":310,"extFields":{'
        + b",".join(
            f'"{k}":{str(v).lower() if not isinstance(v, str) else chr(34) + v + chr(34)}'.encode()
            for k, v in ext.items()
        )
        + b'},"flag":0,"language":"CPP","opaque":5,"version":373}'
    )
    frame = (4 + len(raw) + 1).to_bytes(4, "big") + len(raw).to_bytes(4, "big") + raw + b"x"
    client.connection.receive_data(frame, 0.0)
    for command in client.connection.events():
        client.handle(command)
    await harness.step()
    assert (client.answers[5].code, client.answers[5].ext["queueId"]) == (0, "3")


async def test_a_negative_queue_lets_the_broker_choose(harness: Harness) -> None:
    topic = harness.topic("T", 4)
    client = harness.client()
    chosen = {(await client.ask(V2, send_ext(topic, -1), b"x")).ext["queueId"] for _ in range(40)}
    assert chosen == {"0", "1", "2", "3"}


async def test_a_message_without_a_unique_key_gets_one(harness: Harness) -> None:
    topic = harness.topic("T")
    answer = await harness.client().ask(V2, send_ext(topic, 0, "TAGS\x01A"), b"x")
    (record,) = await stored(harness, topic)
    properties = decode_properties(record.properties)
    assert properties["TAGS"] == "A"
    assert len(properties["UNIQ_KEY"]) == 32
    assert answer.ext["transactionId"] == properties["UNIQ_KEY"]


@pytest.mark.parametrize(
    ("properties", "wanted"),
    [
        ("WAIT\x01true\x02", {"WAIT": "true"}),
        ("WAIT\x01false\x02", {"WAIT": "false"}),
        ("AWAIT\x01true\x02", {"AWAIT": "true"}),
        ("POP_CK\x01x\x02a\x01b\x02", {"a": "b"}),
        ("CLUSTER\x01other\x02MSG_REGION\x01r\x02TRACE_ON\x01false\x02", {}),
        ("a\x01b", {"a": "b"}),
    ],
)
async def test_the_broker_writes_its_own_properties_and_keeps_the_rest(
    harness: Harness, properties: str, wanted: dict[str, str]
) -> None:
    topic = harness.topic("T")
    await harness.client().ask(V2, send_ext(topic, 0, properties), b"x")
    (record,) = await stored(harness, topic)
    found = decode_properties(record.properties)
    del found["UNIQ_KEY"]
    ours = {"CLUSTER": "DefaultCluster", "MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert found == ours | wanted
    assert record.properties.count(b"CLUSTER\x01") == 1


async def test_a_queue_that_shrank_away_takes_messages_while_it_is_read(harness: Harness) -> None:
    """Senders learn of a topic's new shape up to 30 s later; what they send meanwhile must not be lost."""
    harness.broker.topics.update("T", 4, 2)
    client = harness.client()
    assert (await client.ask(V2, send_ext("T", 3), b"x")).code == 0
    assert len(await stored(harness, "T", 3)) == 1
    harness.broker.topics.update("T", 2, 2)
    assert (await client.ask(V2, send_ext("T", 3), b"x")).code == 0, "it has messages, so it is still read"
    harness.broker.topics.update("T", 2, 2, force=True)
    answer = await client.ask(V2, send_ext("T", 3), b"x")
    assert (answer.code, "queues 0 to 1" in str(answer.remark)) == (ResponseCode.INVALID_PARAMETER, True)


async def test_an_unknown_topic_is_made_after_its_template(harness: Harness) -> None:
    client = harness.client()
    assert (await client.ask(V2, send_ext("New", 3), b"x")).code == 0
    topic = harness.broker.topics.get("New")
    assert topic is not None
    assert (topic.read_queues, topic.write_queues, topic.perm) == (4, 4, 6)


async def test_a_topic_that_may_not_be_made_is_refused_with_what_to_do(open_harness: OpenHarness) -> None:
    harness = await open_harness(broker={"auto_create_topics": False}, store={"flush": "async"})
    client = harness.client()
    answer = await client.ask(V2, send_ext("New"), b"x")
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert "topic[New] not exist, apply first please!" in str(answer.remark)
    assert "broker.auto_create_topics" in str(answer.remark)
    # A retry topic is the broker's own business.
    assert (await client.ask(V2, send_ext("%RETRY%G"), b"x")).code == 0
    assert (await client.ask(V2, send_ext("New", c="nope"), b"x")).code == ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize(
    ("ext", "body", "code", "says"),
    [
        (send_ext("a/b"), b"x", 29, "illegal characters"),
        (send_ext("x" * 128), b"x", 29, "max length is 127"),
        (send_ext(" "), b"x", 29, "blank"),
        (send_ext("T", 4), b"x", 29, "queues 0 to 3"),
        (send_ext("T"), b"", 1, "empty"),
        (send_ext("T"), bytes(4 * 1024 * 1024 + 1), 13, "broker.message_bytes_max is 4194304"),
        (send_ext("T", 0, "a\x01" + "b" * 32767), b"x", 13, "properties"),
        (send_ext("SCHEDULE_TOPIC_XXXX"), b"x", 16, "forbidden"),
        (send_ext("ReadOnly"), b"x", 16, "not writable"),
        (send_ext("T", h="99999999999"), b"x", 29, "32 bits"),
        (send_ext("T", e="first"), b"x", 1, "not a 64-bit integer"),
        ({"b": "T"}, b"x", 1, "lacks the header field"),
        (send_ext("T", 0, "TRAN_MSG\x01true\x02PGROUP\x01P\x02"), b"x", 16, "add the plugin tx to plugins.enabled"),
        (send_ext("T", f="4"), b"x", 16, "add the plugin tx to plugins.enabled"),
        (send_ext("T", 0, "DELAY\x013\x02"), b"x", 13, "does not support delayed messages"),
        (send_ext("T", 0, "TIMER_DELAY_MS\x011000\x02"), b"x", 13, "does not support delayed messages"),
        (send_ext("T", 0, "TIMER_CRON\x01* * * * *\x02"), b"x", 13, "does not support delayed messages"),
        (send_ext("T", 0, "TIMER_REPEAT\x01-1\x02"), b"x", 13, "does not support delayed messages"),
    ],
)
async def test_invalid_messages_are_refused_with_the_code_and_the_reason(
    harness: Harness, ext: dict[str, object], body: bytes, code: int, says: str
) -> None:
    harness.topic("T")
    harness.topic("ReadOnly", perm=4)
    harness.topic("SCHEDULE_TOPIC_XXXX")
    client = harness.client()
    answer = await client.ask(V2, ext, body)
    assert answer.code == code
    assert says in str(answer.remark)
    assert "failed in its stage" not in str(answer.remark)
    assert harness.store.appended == 0


@pytest.mark.parametrize(
    "properties", ["DELAY\x010\x02", "DELAYED\x013\x02", "TRAN_MSG\x01false\x02", "MY_TIMER_X\x01\x02"]
)
async def test_a_message_that_only_looks_delayed_or_transactional_is_stored(harness: Harness, properties: str) -> None:
    topic = harness.topic("T")
    assert (await harness.client().ask(V2, send_ext(topic, 0, properties), b"x")).code == 0


async def test_delays_and_transactions_pass_where_a_plugin_understands_them(harness: Harness) -> None:
    def stage(message: Message) -> Message:
        return message

    harness.broker.set_stages([("anything", Stage(stage))])
    harness.broker.capabilities = {Timers: Timers(), Transactions: create_autospec(Transactions, instance=True)}
    topic = harness.topic("T")
    client = harness.client()
    assert (await client.ask(V2, send_ext(topic, 0, "DELAY\x013\x02"), b"x")).code == 0
    assert (await client.ask(V2, send_ext(topic, 0, "TRAN_MSG\x01true\x02", f="4"), b"x")).code == 0


async def test_delays_and_transactions_are_refused_once_their_plugin_has_gone(harness: Harness) -> None:
    # A stage with the name of such a plugin says nothing about what it does.
    harness.broker.set_stages(
        [*harness.broker.stages.pairs, *((name, Stage(lambda message: message)) for name in ("timer", "tx"))]
    )
    harness.broker.capabilities = {Timers: Timers(), Transactions: create_autospec(Transactions, instance=True)}
    topic, client, end = harness.topic("T"), harness.client(), harness.store.appended
    harness.broker.capabilities = {}
    assert (await client.ask(V2, send_ext(topic, 0, "DELAY\x013\x02"), b"x")).code == ResponseCode.MESSAGE_ILLEGAL
    half = send_ext(topic, 0, "TRAN_MSG\x01true\x02", f="4")
    assert (await client.ask(V2, half, b"x")).code == ResponseCode.NO_PERMISSION
    assert harness.store.appended == end


async def test_a_stage_that_refuses_is_answered_in_its_words(harness: Harness) -> None:
    def stage(message: Message) -> Message:
        raise Refused(Reason.BUSY, "not now")

    harness.broker.set_stages([("stamp", Stage(stage))])
    answer = await harness.client().ask(V2, send_ext(harness.topic("T")), b"x")
    assert (answer.code, answer.remark) == (ResponseCode.SYSTEM_BUSY, "not now")


async def test_a_oneway_send_is_stored_and_never_answered(harness: Harness) -> None:
    topic = harness.topic("T")
    client = harness.client()
    client.send(V2, send_ext(topic), b"good", flag=2)
    client.send(V2, send_ext(topic, 99), b"bad", flag=2)
    await harness.step()
    assert (client.answers, client.requests) == ({}, [])
    assert [record.body for record in await stored(harness, topic)] == [b"good"]


async def test_a_request_nobody_knows_is_refused_and_the_connection_stays(harness: Harness) -> None:
    client = harness.client()
    for code in (9999, -5, 0, 105, 32768):
        answer = await client.ask(code)
        assert (answer.code, answer.remark) == (3, f" request type {code} not supported")
    client.send(9999, flag=2)
    await harness.step()
    assert client.answers == {}


async def test_with_sync_flush_the_answer_waits_for_the_disk(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "sync"})
    topic = harness.topic("T")
    client = harness.client()
    client.send(V2, send_ext(topic), b"x")
    assert client.peer.held_until == harness.store.appended > harness.store.readable
    await harness.step()
    assert harness.store.durable == client.peer.held_until


async def test_too_much_that_waits_for_the_disk_is_answered_busy(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "sync"}, unflushed_bytes_max=1 << 20)
    topic = harness.topic("T")
    client = harness.client()
    for _ in range(12):
        client.send(V2, send_ext(topic), bytes(100_000))
    await harness.step()
    codes = [answer.code for answer in client.answers.values()]
    assert codes == [0] * 11 + [ResponseCode.SYSTEM_BUSY]
    assert "remoting.unflushed_bytes_max is 1048576" in str(list(client.answers.values())[-1].remark)
    assert (await client.ask(V2, send_ext(topic), b"x")).code == 0


async def test_authorizers_are_asked_before_a_send(harness: Harness) -> None:
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("publish", "Secret"),)
    harness.topic("Secret")
    harness.topic("T")
    client = harness.client()
    assert (await client.ask(V2, send_ext("Secret"), b"x")).code == ResponseCode.NO_PERMISSION
    assert (await client.ask(V2, send_ext("T"), b"x")).code == 0


# batches


def members(*bodies: bytes, properties: bytes = b"") -> bytes:
    return encode_batch(
        BatchMessage(body, b"UNIQ_KEY\x01K%d\x02" % number + properties, number) for number, body in enumerate(bodies)
    )


BATCHES: list[tuple[int, dict[str, object]]] = [
    (RequestCode.SEND_BATCH_MESSAGE, {}),
    (RequestCode.SEND_BATCH_MESSAGE, {"m": "true"}),
    (RequestCode.SEND_MESSAGE_V2, {"m": "true"}),
]


@pytest.mark.parametrize(("code", "more"), BATCHES)
async def test_a_batch_is_stored_message_by_message_in_one_queue(
    harness: Harness, code: int, more: dict[str, object]
) -> None:
    topic = harness.topic("T")
    ext = send_ext(topic, 1, "UNIQ_KEY\x01WRAP\x02WAIT\x01true\x02", **more)
    answer = await harness.client().ask(code, ext, members(b"a", b"bb", b"ccc"))
    assert (answer.code, answer.ext["queueId"], answer.ext["queueOffset"]) == (0, "1", "0")
    records = await stored(harness, topic, 1)
    ids = str(answer.ext["msgId"]).split(",")
    assert ids == [f"7F00000100002A9F{record.position:016X}" for record in records]
    assert [(r.body, r.flag, r.properties) for r in records] == [
        (b"a", 0, b"UNIQ_KEY\x01K0\x02"),
        (b"bb", 1, b"UNIQ_KEY\x01K1\x02"),
        (b"ccc", 2, b"UNIQ_KEY\x01K2\x02"),
    ]
    assert [r.queue_offset for r in records] == [0, 1, 2]


@pytest.mark.parametrize(("stages", "queue_id"), [(True, 1), (True, -1), (False, -1)])
async def test_a_batch_passes_the_stages_and_may_leave_the_queue_to_the_broker(
    harness: Harness, stages: bool, queue_id: int
) -> None:
    topic, seen = harness.topic("T"), list[bytes]()

    def stage(message: Message) -> Message:
        seen.append(message.body)
        return message

    harness.broker.set_stages([("test", Stage(stage))] if stages else [])
    answer = await harness.client().ask(V2, send_ext(topic, queue_id, m="true"), members(b"a", b"b"))
    assert answer.code == 0
    records = await stored(harness, topic, int(str(answer.ext["queueId"])))
    assert [record.body for record in records] == [b"a", b"b"]
    assert str(answer.ext["msgId"]).split(",") == [f"7F00000100002A9F{record.position:016X}" for record in records]
    assert seen == ([b"a", b"b"] if stages else [])


async def test_a_batch_with_an_empty_member_is_refused_whole(harness: Harness) -> None:
    answer = await harness.client().ask(V2, send_ext(harness.topic("T"), m="true"), members(b"a", b""))
    assert (answer.code, answer.remark) == (
        ResponseCode.SYSTEM_ERROR,
        "message body is empty; send at least one byte",
    )
    assert harness.store.appended == 0


@pytest.mark.parametrize("queue_id", [1, -1])
@pytest.mark.parametrize("count", [BATCH_AT_ONCE, 2 * BATCH_AT_ONCE + 10])
async def test_a_long_batch_is_stored_in_turns_between_which_others_send(
    harness: Harness, count: int, queue_id: int
) -> None:
    topic, long, other = harness.topic("T", 4), harness.client(), harness.client()
    long.send(V2, send_ext(topic, queue_id, m="true"), members(*(b"%d" % number for number in range(count))))
    for _ in range(20):
        other.send(V2, send_ext(topic, 3), b"other")
        await trio.lowlevel.checkpoint()
    await harness.step()
    (answer,) = long.answers.values()
    assert answer.code == 0
    records = [r for r in await stored(harness, topic, int(str(answer.ext["queueId"]))) if r.body != b"other"]
    assert [record.body for record in records] == [b"%d" % number for number in range(count)]
    assert str(answer.ext["msgId"]).split(",") == [f"7F00000100002A9F{record.position:016X}" for record in records]
    assert answer.ext["queueOffset"] == str(records[0].queue_offset)
    others = await stored(harness, topic, 3)
    between = [r for r in others if r.body == b"other" and records[0].position < r.position < records[-1].position]
    assert bool(between) == (count > BATCH_AT_ONCE)


@pytest.mark.parametrize("last", [b"", b"cut"])
async def test_a_long_batch_with_a_bad_member_at_its_end_is_refused_whole(harness: Harness, last: bytes) -> None:
    body = members(*(b"x",) * (2 * BATCH_AT_ONCE), last)
    answer = await harness.client().ask(V2, send_ext(harness.topic("T"), m="true"), body if not last else body[:-1])
    assert answer.code != 0
    assert harness.store.appended == 0


@pytest.mark.parametrize("word", ["1", "yes", "false"])
async def test_a_batch_says_so_with_the_word_true_alone(harness: Harness, word: str) -> None:
    """As java.lang.Boolean.parseBoolean."""
    topic = harness.topic("T")
    answer = await harness.client().ask(V2, send_ext(topic, m=word), b"one message")
    assert answer.code == 0
    assert [record.body for record in await stored(harness, topic)] == [b"one message"]


async def test_a_batch_under_long_field_names_is_one_too(harness: Harness) -> None:
    topic = harness.topic("T")
    answer = await harness.client().ask(RequestCode.SEND_MESSAGE, long_ext(topic, batch="true"), members(b"a", b"b"))
    assert answer.code == 0
    assert len(await stored(harness, topic, 1)) == 2


@pytest.mark.parametrize(
    ("ext", "body", "says"),
    [
        (send_ext("%RETRY%G"), members(b"a"), "does not support retry group"),
        (send_ext("T", 0, "DELAY\x011\x02"), members(b"a"), "cannot be delayed"),
        (send_ext("T", f="4"), members(b"a"), "transactional"),
        (send_ext("T"), members(b"a", properties=b"DELAY\x011\x02"), "cannot be delayed"),
        (send_ext("T"), members(b"a", properties=b"TIMER_PERIOD_MS\x011000\x02"), "cannot be delayed"),
        (send_ext("T"), members(b"a", properties=b"TRAN_MSG\x01true\x02"), "transactional"),
        (send_ext("T"), members(bytes(3 << 20), bytes(3 << 20)), "broker.message_bytes_max"),
        (send_ext("T"), b"", "empty"),
        (send_ext("T"), members(b"a", b"b")[:-1], "claims"),
        (send_ext("T"), b"\x00\x00\x00\x01", "cut short"),
    ],
)
async def test_a_batch_that_cannot_be_is_refused_whole(
    harness: Harness, ext: dict[str, object], body: bytes, says: str
) -> None:
    harness.topic("T")
    harness.topic("%RETRY%G", 1)
    answer = await harness.client().ask(RequestCode.SEND_BATCH_MESSAGE, ext, body)
    assert answer.code == ResponseCode.MESSAGE_ILLEGAL
    assert says in str(answer.remark)
    assert harness.store.appended == 0


# retries that consumers send themselves


async def retry(client: FakeClient, **more: object) -> Command:
    properties = "DELAY\x014\x02RETRY_TOPIC\x01T\x02UNIQ_KEY\x01U\x02"
    return await client.ask(V2, send_ext("%RETRY%G", 0, properties, **more), b"again")


async def test_a_consumers_own_retry_is_taken_although_it_has_a_delay(harness: Harness) -> None:
    client = harness.client()
    assert (await retry(client, j="3", l="16")).code == 0
    (record,) = await stored(harness, "%RETRY%G")
    assert (record.body, record.reconsume_times) == (b"again", 3)
    topic = harness.broker.topics.get("%RETRY%G")
    assert topic is not None
    assert (topic.write_queues, topic.perm) == (1, 6)


@pytest.mark.parametrize(("times", "most", "dead"), [("16", "16", False), ("17", "16", True), ("1", "0", True)])
async def test_a_message_that_came_back_too_often_goes_to_the_dead_letters(
    harness: Harness, times: str, most: str, dead: bool
) -> None:
    assert (await retry(harness.client(), j=times, l=most)).code == 0
    topic = "%DLQ%G" if dead else "%RETRY%G"
    (record,) = await stored(harness, topic)
    assert record.topic == topic
    if dead:
        assert decode_properties(record.properties)["DELAY"] == "-1"
        found = harness.broker.topics.get(topic)
        assert found is not None
        assert (found.write_queues, found.perm) == (1, 6)


async def test_without_its_own_limit_the_groups_rules(harness: Harness) -> None:
    client = harness.client()
    assert (await retry(client, j="17")).code == 0
    assert len(await stored(harness, "%DLQ%G")) == 1
    # Before 3.4.9 the header's limit was not looked at.
    old = client.send(V2, send_ext("%RETRY%G", 0, "", j="17", l="99"), b"again", version=120)
    await harness.step()
    assert client.answers.pop(old).code == 0
    assert len(await stored(harness, "%DLQ%G")) == 2


async def test_an_ordered_consumer_gives_up_at_once(harness: Harness) -> None:
    harness.topic("T")
    client = harness.client()
    lock = b'{"clientId":"c","consumerGroup":"G","mqSet":[{"topic":"T","brokerName":"b","queueId":0}]}'
    assert (await client.ask(RequestCode.LOCK_BATCH_MQ, body=lock)).code == 0
    assert (await retry(client, j="1", l="16")).code == 0
    assert len(await stored(harness, "%DLQ%G")) == 1


async def test_no_retry_of_a_group_that_may_not_be(open_harness: OpenHarness) -> None:
    harness = await open_harness(broker={"auto_create_groups": False}, store={"flush": "async"})
    answer = await retry(harness.client(), j="1")
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


async def test_messages_of_an_ipv6_client_say_so(harness: Harness) -> None:
    topic = harness.topic("T")
    client = harness.client()
    client.peer.host = bytes(15) + b"\x01" + (5).to_bytes(4, "big")
    await client.ask(V2, send_ext(topic), b"x")
    answer = await client.ask(RequestCode.PULL_MESSAGE, pull_ext(topic, 0))
    record = decode_record(answer.body)
    assert (record.born_host, record.sys_flag) == (client.peer.host, 0x10)


# the quick way for usual messages

FRAGMENTS = [
    "UNIQ_KEY\x01AB12\x02",
    "UNIQ_KEY\x01a-b\x02",
    "UNIQ_KEY\x01\x02",
    "XUNIQ_KEY\x01no\x02",
    "WAIT\x01true\x02",
    "WAIT\x01false\x02",
    "AWAIT\x01true\x02",
    "TAGS\x01größe\x02",
    "CLUSTER\x01c\x02",
    "MSG_REGION\x01r\x02",
    "POP_CK\x01p\x02",
    "DELAY\x010\x02",
    "DELAY\x013\x02",
    "TRAN_MSG\x01true\x02",
    "a\x01b",
    "\x02",
]
LONG_NAMES = {
    "a": "producerGroup",
    "b": "topic",
    "c": "defaultTopic",
    "d": "defaultTopicQueueNums",
    "e": "queueId",
    "f": "sysFlag",
    "g": "bornTimestamp",
    "h": "flag",
    "i": "properties",
    "j": "reconsumeTimes",
    "k": "unitMode",
    "l": "maxReconsumeTimes",
    "m": "batch",
}
ODD_FIELDS = [("f", "1"), ("f", "4"), ("f", "-1"), ("g", "-5"), ("g", "x"), ("h", "-7"), ("h", "3000000000")]
ODD_FIELDS += [("j", "2"), ("m", "true"), ("d", "0"), ("l", "3"), ("e", "1.5")]


async def test_the_quick_way_stores_and_answers_as_the_long_one(harness: Harness) -> None:
    """Random sends with code 310, which has a fast path, and with code 10, which has none, give the same result."""
    harness.topic("T")
    harness.topic("%RETRY%G", 2)
    choice = random.Random(5)
    client = harness.client()
    for _ in range(400):
        properties = "".join(choice.choices(FRAGMENTS, k=choice.randrange(4)))
        ext = send_ext(choice.choice(["T", "T", "T", "%RETRY%G"]), choice.choice([0, 1, 9]), properties)
        if choice.random() < 0.5:
            field, value = choice.choice(ODD_FIELDS)
            ext[field] = value
        body = choice.choice([b"body", b""])
        quick = await client.ask(V2, ext, body)
        long = await client.ask(RequestCode.SEND_MESSAGE, {LONG_NAMES[k]: v for k, v in ext.items()}, body)
        assert (quick.code, quick.ext.keys()) == (long.code, long.ext.keys()), ext
        if quick.code == 0:
            first, second = (_stored(harness, answer) for answer in (quick, long))
            assert first == second, ext
    assert len(harness.state.counters.refusals) >= 4


def _stored(harness: Harness, answer: Command) -> tuple[object, ...]:
    data = harness.store.lookup.record_at(int(str(answer.ext["msgId"])[16:], 16))
    assert data is not None
    record = decode_record(data)
    assert (str(record.queue_id), str(record.queue_offset)) == (answer.ext["queueId"], answer.ext["queueOffset"])
    properties = decode_properties(record.properties)
    assert answer.ext["transactionId"] == properties["UNIQ_KEY"]
    if len(properties["UNIQ_KEY"]) == 32:
        del properties["UNIQ_KEY"]  # made by the broker, another each time
    head = (record.topic, record.queue_id, record.flag, record.sys_flag, record.born_ms, record.reconsume_times)
    return (*head, record.body, properties)


async def test_a_client_that_may_not_send_creates_no_topic(harness: Harness) -> None:
    harness.broker.authorizers = (lambda identity, action, topic: False,)
    answer = await harness.client().ask(RequestCode.SEND_MESSAGE_V2, send_ext("New"), b"x")
    assert answer.code == ResponseCode.NO_PERMISSION
    assert harness.broker.topics.get("New") is None
