"""A wrong argument is one helpful sentence at once: nothing is sent, and nothing fails obscurely later."""

import asyncio
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from martlet_client import (
    Admin,
    AverageByCircle,
    ClientSettings,
    ConsistentHash,
    ConsumeFrom,
    Message,
    MessageModel,
    MessageQueue,
    MessageRefused,
    Producer,
    PullConsumer,
    PushConsumer,
    ReceivedMessage,
    SigningKey,
    Sql,
    aio,
    blocking,
    select_by_hash,
)
from martlet_remoting.wire.codes import RequestCode

from .fake import Cluster, ThreadCluster
from .listening import Listener

QUEUE = MessageQueue("T", "broker-a", 0)
ALL = {"T": "*"}
MESSAGE = Message("T", b"x")

# What is wrong with a message, and what the sentence says.
MESSAGES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"body": "x"}, TypeError, r"body 'x' is of type str; it must be bytes, for example text.encode\(\)"),
    ({"body": None}, TypeError, "body None is of type NoneType; it must be bytes"),
    ({"body": 5}, TypeError, "body 5 is of type int"),
    ({"body": bytearray(b"x")}, TypeError, r"is of type bytearray; .* bytes\(buffer\)"),
    ({"topic": b"T"}, TypeError, "topic b'T' is of type bytes; it must be str"),
    ({"topic": None}, TypeError, "topic None is of type NoneType"),
    ({"topic": "no spaces"}, MessageRefused, "has forbidden characters"),
    ({"keys": 5}, TypeError, "keys 5 is of type int; give a str, or a list"),
    ({"keys": None}, TypeError, "keys None is of type NoneType"),
    ({"keys": b"k"}, TypeError, "keys b'k' is of type bytes"),
    ({"keys": {"k"}}, TypeError, "is of type set; give a str, or a list"),
    ({"keys": [5]}, TypeError, r"key 5 is of type int; it must be str, for example str\(key\)"),
    ({"keys": ["order 1"]}, MessageRefused, "key 'order 1' is empty or has a space.*give several keys as a list"),
    ({"keys": "order 1"}, MessageRefused, "key 'order 1' is empty or has a space"),
    ({"keys": ["a", ""]}, MessageRefused, "key '' is empty"),
    ({"tags": 5}, TypeError, "tags 5 is of type int"),
    ({"tags": ["A", "B"]}, TypeError, "is of type list; it must be str, a message has one tag"),
    ({"tags": "A || B"}, MessageRefused, "could never be selected; give one tag"),
    ({"tags": " A"}, MessageRefused, "could never be selected"),
    ({"tags": "*"}, MessageRefused, "could never be selected"),
    ({"properties": None}, TypeError, "properties None is of type NoneType; it must be Mapping, for example"),
    ({"properties": [("a", "b")]}, TypeError, "is of type list; it must be Mapping"),
    ({"properties": {"a": 1}}, TypeError, r"properties 'a': 1 is of type int; .* for example str\(value\)"),
    ({"properties": {1: "a"}}, TypeError, "name in properties 1 is of type int"),
    ({"properties": {"a": ""}}, MessageRefused, "property 'a' is empty, and brokers drop empty ones"),
    ({"properties": {"a": "\ud800"}}, MessageRefused, "half a surrogate pair"),
    ({"properties": {"KEYS": "a"}}, MessageRefused, "property 'KEYS' is the broker's own"),
    ({"delay_level": "3"}, TypeError, "delay_level '3' is of type str; it must be int"),
    ({"delay_level": True}, TypeError, "delay_level True is of type bool"),
    ({"delay_level": -3}, MessageRefused, "delay_level -3 is out of range; it must be 0 to 2147483647"),
    ({"delay_ms": 1.5}, TypeError, "delay_ms 1.5 is of type float"),
    ({"delay_ms": -1}, MessageRefused, "delay_ms -1 is out of range; it must be at least 0"),
    (
        {"deliver_at_ms": 1.7e12},
        TypeError,
        r"is of type float; .* int\(time.time\(\) \* 1000\)",
    ),
    ({"deliver_at_ms": 1_700_000_000}, MessageRefused, "it must be in milliseconds, not in seconds"),
    ({"flag": "a"}, TypeError, "flag 'a' is of type str"),
    ({"flag": 1 << 31}, MessageRefused, "flag 2147483648 is out of range"),
    ({"wait_stored": "no"}, TypeError, "wait_stored 'no' is of type str; it must be bool"),
]


@pytest.mark.parametrize(("fields", "error", "text"), MESSAGES, ids=lambda value: f"{value!r:.40}")
async def test_a_wrong_message_is_refused_before_anything_is_sent(
    cluster: Cluster, autojump_clock: MockClock, fields: dict[str, Any], error: type[Exception], text: str
) -> None:
    message = Message(**{"topic": "T", "body": b"x", **fields})
    async with Producer(cluster.settings(), "P") as producer:
        for send in (producer.send, producer.send_oneway):
            with pytest.raises(error, match=text):
                await send(message)
        with pytest.raises(error, match=text):
            await producer.send_batch([message])
    assert cluster.connected == []


async def test_keys_come_back_as_they_were_given(cluster: Cluster, autojump_clock: MockClock) -> None:
    listener = Listener()
    async with (
        Producer(cluster.settings(), "P") as producer,
        PushConsumer(cluster.settings(), "G", listener, ALL, consume_from=ConsumeFrom.FIRST),
    ):
        for keys in ("", "k", ["k", "l\tm"], ("k",)):
            await producer.send(Message("T", b"x", keys=keys))
        await listener.wait_count(4)
    assert sorted(message.keys for message in listener.messages) == [(), ("k",), ("k",), ("k", "l\tm")]


def producing(call: Callable[[Producer, Any], Any]) -> Callable[[Any], Any]:
    async def run(settings: Any) -> None:
        async with Producer(settings, "P") as producer:
            await call(producer, MESSAGE)

    return run


def pulling(call: Callable[[PullConsumer], Any]) -> Callable[[Any], Any]:
    async def run(settings: Any) -> None:
        async with PullConsumer(settings, "G") as consumer:
            await call(consumer)

    return run


def asking(call: Callable[[Admin], Any]) -> Callable[[Any], Any]:
    async def run(settings: Any) -> None:
        async with Admin(settings) as admin:
            await call(admin)

    return run


def subscribing(topic: Any, *expression: Any) -> Callable[[Any], Any]:
    async def run(settings: Any) -> None:
        async with PushConsumer(settings, "G", print, {}) as consumer:
            await consumer.subscribe(topic, *expression)

    return run


def bad(value: object) -> Any:
    """What no type checker would let through."""
    return value


CALLS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a text is no message": (
        producing(lambda p, m: p.send(bad("x"))),
        TypeError,
        "message 'x' is of type str; .*Message",
    ),
    "a number is no queue": (
        producing(lambda p, m: p.send(m, queue=bad(3))),
        TypeError,
        r"queue 3 is of type int; it must be MessageQueue, as queues\(\) lists them",
    ),
    "a oneway number is no queue": (
        producing(lambda p, m: p.send_oneway(m, queue=bad(3))),
        TypeError,
        "queue 3 is of type int",
    ),
    "the queue of another topic": (
        producing(lambda p, m: p.send(m, queue=MessageQueue("U", "broker-a", 0))),
        ValueError,
        r"is not a queue of topic 'T'; queues\('T'\) lists them",
    ),
    "queue and selector": (
        producing(lambda p, m: p.send(m, queue=QUEUE, selector=select_by_hash)),
        ValueError,
        "give one of them",
    ),
    "an argument without a selector": (
        producing(lambda p, m: p.send(m, argument=7)),
        ValueError,
        "argument 7 has no effect; give selector=select_by_hash",
    ),
    "a selector that is none": (
        producing(lambda p, m: p.send(m, selector=bad("k"))),
        TypeError,
        r"selector 'k' is of type str; it must be a function: def selector\(queues, message, argument\)",
    ),
    "a selector of one argument": (
        producing(lambda p, m: p.send(m, selector=bad(len))),
        TypeError,
        "selector .* does not fit, too many positional arguments; it must be a function",
    ),
    "a selector that returns an index": (
        producing(lambda p, m: p.send(m, selector=bad(lambda queues, message, argument: 1))),
        TypeError,
        "queue 1 is of type int; it must be MessageQueue",
    ),
    "a negative timeout": (
        producing(lambda p, m: p.send(m, timeout_s=-1)),
        ValueError,
        "timeout_s -1 is out of range; it must be more than 0 seconds",
    ),
    "a timeout that is no number": (
        producing(lambda p, m: p.send(m, timeout_s=math.nan)),
        ValueError,
        "timeout_s nan is out of range",
    ),
    "a timeout in words": (
        producing(lambda p, m: p.send_batch([m], timeout_s=bad("1"))),
        TypeError,
        "timeout_s '1' is of type str; it must be a number of seconds",
    ),
    "one message is no batch": (
        producing(lambda p, m: p.send_batch(m)),
        TypeError,
        "is of type Message; it must be Sequence, for example a list of messages",
    ),
    "a batch of bodies": (
        producing(lambda p, m: p.send_batch([bad(b"x")])),
        TypeError,
        "message in a batch b'x' is of type bytes",
    ),
    "queues of bytes": (producing(lambda p, m: p.queues(bad(b"T"))), TypeError, "topic b'T' is of type bytes"),
    "pull of a number": (pulling(lambda c: c.pull(bad(0), 0)), TypeError, "queue 0 is of type int"),
    "pull before the beginning": (pulling(lambda c: c.pull(QUEUE, -5)), ValueError, "offset -5 is out of range"),
    "pull of a text": (pulling(lambda c: c.pull(QUEUE, bad("0"))), TypeError, "offset '0' is of type str"),
    "pull of nothing": (
        pulling(lambda c: c.pull(QUEUE, 0, messages_max=0)),
        ValueError,
        "messages_max 0 is out of range; it must be 1 to 1024",
    ),
    "pull that waits for ever": (
        pulling(lambda c: c.pull(QUEUE, 0, wait_s=math.inf)),
        ValueError,
        "wait_s inf is out of range; it must be at least 0 and at most 3600 seconds",
    ),
    "pull that waited": (pulling(lambda c: c.pull(QUEUE, 0, wait_s=-1)), ValueError, "wait_s -1 is out of range"),
    "pull of no expression": (
        pulling(lambda c: c.pull(QUEUE, 0, expression=bad(None))),
        TypeError,
        r"expression for topic 'T', None is of type NoneType; it must be str, for example '\*'",
    ),
    "poll of a text": (pulling(lambda c: c.poll(bad("T"))), TypeError, "queue 'T' is of type str"),
    "read of a text": (pulling(lambda c: c.read(bad("T"))), TypeError, "queue 'T' is of type str"),
    "read before the beginning": (pulling(lambda c: c.read(QUEUE, -1)), ValueError, "start -1 is out of range"),
    "read of no tags": (pulling(lambda c: c.read(QUEUE, expression="")), ValueError, "expression '' .* names no tag"),
    "seek to a text": (pulling(lambda c: c.seek(QUEUE, bad("0"))), TypeError, "offset '0' is of type str"),
    "commit of a text": (pulling(lambda c: c.commit(QUEUE, bad("3"))), TypeError, "offset '3' is of type str"),
    "commit of -1": (pulling(lambda c: c.commit(QUEUE, -1)), ValueError, "offset -1 is out of range"),
    "committed of a text": (pulling(lambda c: c.committed(bad("T"))), TypeError, "queue 'T' is of type str"),
    "search in seconds": (
        pulling(lambda c: c.search_offset(QUEUE, 1_700_000_000)),
        ValueError,
        "in milliseconds, not in seconds",
    ),
    "queues of None": (pulling(lambda c: c.queues(bad(None))), TypeError, "topic None is of type NoneType"),
    "topic of 0 queues": (
        asking(lambda a: a.create_topic("X", queues=0)),
        ValueError,
        "queues 0 is out of range; it must be 1 to 16384",
    ),
    "topic with a perm in words": (asking(lambda a: a.create_topic("X", perm=bad("rw"))), TypeError, "perm 'rw'"),
    "topic with a map of attributes": (
        asking(lambda a: a.create_topic("X", attributes=bad({"a": "b"}))),
        TypeError,
        "attributes .* is of type dict; it must be str",
    ),
    "topic on a list of clusters": (
        asking(lambda a: a.create_topic("X", cluster=bad(["c"]))),
        TypeError,
        "cluster",
    ),
    "deletion of None": (asking(lambda a: a.delete_topic(bad(None))), TypeError, "topic None"),
    "statistics of bytes": (asking(lambda a: a.topic_stats(bad(b"T"))), TypeError, "topic b'T'"),
    "route of a list": (asking(lambda a: a.topic_route(bad(["T"]))), TypeError, "topic .* is of type list"),
    "group None": (asking(lambda a: a.create_group(bad(None))), TypeError, "group None is of type NoneType"),
    "group with too few retries": (asking(lambda a: a.create_group("G", retry_max_times=-2)), ValueError, "-2 is out"),
    "lag of bytes": (asking(lambda a: a.group_lag(bad(b"G"))), TypeError, "group b'G'"),
    "members of None": (asking(lambda a: a.group_members(bad(None))), TypeError, "group None"),
    "reset in seconds": (
        asking(lambda a: a.reset_offsets("G", "T", 1_700_000_000)),
        ValueError,
        "timestamp_ms 1700000000 is in 1973 or earlier; it must be in milliseconds",
    ),
    "reset before the beginning": (asking(lambda a: a.reset_queue_offset("G", QUEUE, -1)), ValueError, "offset -1"),
    "config of nobody": (asking(lambda a: a.broker_config(bad(None))), TypeError, "address None is of type NoneType"),
    "config of no address": (asking(lambda a: a.broker_config("nowhere")), ValueError, "address 'nowhere'"),
    "a setting that is a number": (
        asking(lambda a: a.update_broker_config("a:1", {"x": bad(1)})),
        TypeError,
        "settings 'x': 1 is of type int",
    ),
    "a setting of two lines": (
        asking(lambda a: a.update_broker_config("a:1", {"x": "1\ny=2"})),
        ValueError,
        "setting 'x' = .* has a newline",
    ),
    "message None": (asking(lambda a: a.message(bad(None))), TypeError, "message_id None"),
    "a key that is a number": (asking(lambda a: a.messages_by_key("T", bad(5))), TypeError, "key 5 is of type int"),
    "lag of a list of topics": (asking(lambda a: a.group_lag("G", bad([]))), TypeError, r"topic \[\] is of type list"),
    "message of no topic": (asking(lambda a: a.message("x", bad(None))), TypeError, "topic None is of type NoneType"),
    "half a surrogate pair in a key": (
        asking(lambda a: a.messages_by_key("T", "\udcff")),
        ValueError,
        r"key '\\udcff' has half a surrogate pair; decode it with errors='replace'",
    ),
    "half a surrogate pair in a signed key": (
        lambda settings: asking(lambda a: a.messages_by_key("T", "\udcff"))(
            replace(settings, signing_key=SigningKey("ann", "secret"))
        ),
        ValueError,
        r"key '\\udcff' has half a surrogate pair",
    ),
    "no messages of a key": (
        asking(lambda a: a.messages_by_key("T", "k", messages_max=0)),
        ValueError,
        "messages_max 0",
    ),
    "subscription to None": (subscribing(None), TypeError, "topic None"),
    "subscription to several tags": (
        subscribing("T", ["A", "B"]),
        TypeError,
        r"expression for topic 'T', \['A', 'B'\] is of type list; it must be str, .*'tagA \|\| tagB'",
    ),
    "subscription to nothing": (subscribing("T", " || "), ValueError, r"names no tag; '\*' selects every message"),
    "subscription to half a surrogate pair": (subscribing("T", "\udcff"), ValueError, "has half a surrogate pair"),
    "subscription to all and some": (subscribing("T", "* || A"), ValueError, r"mixes '\*' with tags"),
    "SQL92 as a text": (subscribing("T", "price > 5"), ValueError, r"looks like SQL92; pass Sql\('price > 5'\)"),
    "SQL92 of a number": (subscribing("T", Sql(bad(5))), TypeError, "SQL92 expression 5 is of type int"),
    "SQL92 of nothing": (subscribing("T", Sql(" ")), ValueError, "SQL92 expression is empty"),
}


@pytest.mark.parametrize(("call", "error", "text"), CALLS.values(), ids=CALLS)
async def test_a_wrong_call_says_what_is_wrong(
    cluster: Cluster, autojump_clock: MockClock, call: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    start = trio.current_time()
    with pytest.raises(error, match=text):
        await call(cluster.settings())
    assert trio.current_time() == start


def listen(message: ReceivedMessage) -> None:
    """A listener that does nothing."""


def consumer(**changes: Any) -> Callable[[], object]:
    arguments: dict[str, Any] = {"group": "G", "listener": listen, "subscriptions": ALL, **changes}
    return lambda: PushConsumer("a:1", **arguments)


def pair(one: object, two: object) -> None:
    """No listener: RocketMQ's Java listeners are given messages and a context."""


OBJECTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no name server": (
        lambda: Producer(bad(None), "P"),
        TypeError,
        "name_server None is of type NoneType; it must be str, for",
    ),
    "a list of name servers": (lambda: Admin(bad(["a:1"])), TypeError, "is of type list; .* join several with ';'"),
    "name server of bytes": (lambda: PullConsumer(bad(b"a:1"), "G"), TypeError, "name_server b'a:1' is of type bytes"),
    "name server without a port": (lambda: Admin(ClientSettings("nowhere")), ValueError, "'nowhere'"),
    "negative timeout": (
        lambda: ClientSettings("a:1", request_timeout_s=-1),
        ValueError,
        "request_timeout_s -1 is out of range; it must be more than 0 seconds",
    ),
    "timeout None": (
        lambda: ClientSettings("a:1", close_timeout_s=bad(None)),
        TypeError,
        "close_timeout_s None is of type NoneType",
    ),
    "no pause between heartbeats": (
        lambda: ClientSettings("a:1", heartbeat_interval_s=0),
        ValueError,
        "heartbeat_interval_s",
    ),
    "tls True": (
        lambda: ClientSettings("a:1", tls=bad(True)),
        TypeError,
        r"tls True is of type bool; it must be SSLContext, for example ssl.create_default_context\(\)",
    ),
    "client id of a number": (lambda: ClientSettings("a:1", client_id=bad(5)), TypeError, "client_id 5 is of type int"),
    "producer without a group": (lambda: Producer("a:1", bad(None)), TypeError, "group None is of type NoneType"),
    "producer of an empty group": (lambda: Producer("a:1", ""), MessageRefused, "group is empty"),
    "negative retries": (lambda: Producer("a:1", "P", retries=-1), ValueError, "retries -1 is out of range"),
    "retries in words": (lambda: Producer("a:1", "P", retries=bad("2")), TypeError, "retries '2' is of type str"),
    "negative send timeout": (lambda: Producer("a:1", "P", send_timeout_s=-1), ValueError, "send_timeout_s -1"),
    "no default queues": (lambda: Producer("a:1", "P", default_queues=0), ValueError, "default_queues 0"),
    "negative compression": (lambda: Producer("a:1", "P", compress_over_bytes=-1), ValueError, "compress_over_bytes"),
    "bodies of 0 bytes": (lambda: Producer("a:1", "P", body_bytes_max=0), ValueError, "body_bytes_max 0"),
    "group of bytes": (consumer(group=b"G"), TypeError, "group b'G' is of type bytes"),
    "half a surrogate pair as a client": (
        lambda: ClientSettings("a:1", client_id="\udcff"),
        ValueError,
        r"client_id '\\udcff' has half a surrogate pair",
    ),
    "no listener": (consumer(listener=None), TypeError, r"listener None .* a function: def listener\(message\)"),
    "a Java listener": (consumer(listener=pair), TypeError, "does not fit, missing a required argument: 'two'"),
    "a listener of nothing": (consumer(listener=lambda: None), TypeError, "does not fit, too many positional"),
    "list of subscriptions": (
        consumer(subscriptions=["T"]),
        TypeError,
        r"subscriptions \['T'\] is of type list; it must be Mapping, for example {'Greetings': '\*'}",
    ),
    "subscription in words": (consumer(subscriptions="T"), TypeError, "subscriptions 'T' is of type str"),
    "no subscriptions": (consumer(subscriptions=None), TypeError, "subscriptions None"),
    "subscription to None": (consumer(subscriptions={"T": None}), TypeError, "expression for topic 'T', None"),
    "topic of bytes": (consumer(subscriptions={b"T": "*"}), TypeError, "topic b'T' is of type bytes"),
    "concurrency 0": (consumer(concurrency=0), ValueError, "concurrency 0 is out of range; it must be 1 to 10000"),
    "concurrency without end": (consumer(concurrency=math.inf), TypeError, "concurrency inf is of type float"),
    "concurrency in words": (consumer(concurrency="5"), TypeError, "concurrency '5' is of type str"),
    "model in words": (
        consumer(model="BROADCASTING"),
        TypeError,
        "model 'BROADCASTING' is of type str; it must be MessageModel, for example MessageModel.BROADCASTING",
    ),
    "start in words": (consumer(consume_from="FIRST"), TypeError, "consume_from 'FIRST' .* ConsumeFrom.FIRST"),
    "start in seconds": (
        consumer(consume_from=ConsumeFrom.TIMESTAMP, consume_from_ms=1_700_000_000),
        ValueError,
        "in milliseconds",
    ),
    "start time that is not used": (
        consumer(consume_from_ms=1_700_000_000_000),
        ValueError,
        "consume_from_ms 1700000000000 has no effect; give consume_from=ConsumeFrom.TIMESTAMP",
    ),
    "orderly in words": (consumer(orderly="yes"), TypeError, "orderly 'yes' is of type str; it must be bool"),
    "too few retries": (consumer(max_reconsume_times=-2), ValueError, "max_reconsume_times -2"),
    "no such delay": (consumer(retry_delay_level=-2), ValueError, "retry_delay_level -2"),
    "no pause in order": (consumer(suspend_s=0), ValueError, "suspend_s 0 is out of range; it must be more than 0"),
    "too large pulls": (consumer(pull_messages=1025), ValueError, "pull_messages 1025 .* 1 to 1024"),
    "no cache": (consumer(cached_messages_max=0), ValueError, "cached_messages_max 0"),
    "no bytes cached": (consumer(cached_bytes_max=0), ValueError, "cached_bytes_max 0"),
    "folder in words": (
        consumer(model=MessageModel.BROADCASTING, offsets_folder="x"),
        TypeError,
        "offsets_folder 'x' is of type str; it must be Path",
    ),
    "the class of an allocation": (
        consumer(allocation=AverageByCircle),
        TypeError,
        r"allocation AverageByCircle is a class; give an object: AverageByCircle\(\)",
    ),
    "allocation in words": (consumer(allocation="AVG"), TypeError, "allocation 'AVG' has no method allocate"),
    "no virtual nodes": (lambda: ConsistentHash(0), ValueError, "virtual_nodes 0"),
    "asyncio, a Java listener": (lambda: aio.PushConsumer("a:1", "G", bad(pair), ALL), TypeError, "does not fit"),
    "blocking, a list of subscriptions": (
        lambda: blocking.PushConsumer("a:1", "G", listen, bad(["T"])),
        TypeError,
        "is of type list; it must be Mapping",
    ),
}


@pytest.mark.parametrize(("make", "error", "text"), OBJECTS.values(), ids=OBJECTS)
def test_a_wrong_object_is_not_made(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_folder_of_offsets_is_for_broadcasting(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="is for broadcasting consumers; brokers keep"):
        PushConsumer("a:1", "G", print, ALL, offsets_folder=tmp_path)


def test_builtins_and_partials_may_listen() -> None:
    seen: list[ReceivedMessage] = []
    for listener in (print, seen.append, Listener(), partial(print, "prefix")):
        assert PushConsumer("a:1", "G", listener, ALL).listening._listener is listener
    with pytest.raises(TypeError, match=r"listener .* does not fit"):
        PushConsumer("a:1", "G", partial(lambda one: one, "one"), ALL)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"connect": None}, "connect None is of type NoneType; it must be a function: async def connect"),
        ({"connect": lambda host: None}, "connect .* does not fit, too many positional arguments"),
        ({"clock": 5}, "clock.now_ms None is of type NoneType; it must be a function: def now_ms"),
        ({"clock": SimpleNamespace(now_ms=lambda when: 0)}, "clock.now_ms .* does not fit"),
    ],
)
def test_a_wrong_way_to_connect_or_clock_is_refused_at_once(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        ClientSettings("a:1", **fields)


def test_the_trio_client_says_that_asyncio_needs_another() -> None:
    async def main() -> None:
        async with Producer("127.0.0.1:1", "P"):
            pass

    with pytest.raises(RuntimeError, match=r"needs trio, .* martlet_client\.aio for asyncio"):
        asyncio.run(main())


def test_facades_refuse_at_the_call_too() -> None:
    with (
        blocking.PullConsumer(ThreadCluster().settings(), "G") as consumer,
        pytest.raises(TypeError, match="queue 'T'"),
    ):
        consumer.read(bad("T"))


async def test_nothing_wrong_reaches_a_broker(cluster: Cluster, autojump_clock: MockClock) -> None:
    """The fake broker would take all of it."""
    for call, error, _ in CALLS.values():
        with pytest.raises(error):
            await call(cluster.settings())
    codes = {command.code for command in cluster.broker.requests}
    assert codes <= {RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT, RequestCode.GET_CONSUMER_LIST_BY_GROUP} | {
        RequestCode.QUERY_CONSUMER_OFFSET,
        RequestCode.GET_MAX_OFFSET,
        RequestCode.PULL_MESSAGE,
    }
