"""What is said to a broker and a name server, one list of requests a conversation.

A step is (server, code, header fields, body). The text ``@msgId`` in a field stands for the
last ``msgId`` that was answered, ``@position`` for the log position inside it, ``@broker``
for the broker's address.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from martlet.message import encode_properties

BROKER = "broker"
NAMES = "nameserver"


@dataclass(frozen=True)
class Step:
    """One request."""

    code: int
    fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    server: str = BROKER
    version: int = 485


def topic(name: str, queues: int = 4, perm: int = 6) -> Step:
    """UPDATE_AND_CREATE_TOPIC."""
    numbers = {"readQueueNums": str(queues), "writeQueueNums": str(queues), "perm": str(perm)}
    rest = {"topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false"}
    return Step(17, {"topic": name, "defaultTopic": "TBW102", **numbers, **rest})


def send(name: str, body: bytes, queue: int = 0, *, key: str = "K1", tags: str = "A", code: int = 310) -> Step:
    """SEND_MESSAGE_V2 with short names, or SEND_MESSAGE with long ones."""
    properties = encode_properties({"KEYS": key, "UNIQ_KEY": "0" * 24 + key.rjust(8, "0"), "TAGS": tags}).decode()
    values = ("pg", name, "TBW102", "4", str(queue), "0", "1700000000000", "0", properties, "0", "false")
    short = dict(zip("abcdefghijk", values, strict=True))
    long = dict(zip(LONG_NAMES, values, strict=True))
    return Step(code, short if code != 10 else long, body)


LONG_NAMES = (
    *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag", "bornTimestamp"),
    *("flag", "properties", "reconsumeTimes", "unitMode"),
)


def pull(name: str, offset: int, queue: int = 0, tags: str = "*", most: int = 32, flags: int = 4) -> Step:
    """PULL_MESSAGE that is not held."""
    where = {"consumerGroup": "cg", "topic": name, "queueId": str(queue), "queueOffset": str(offset)}
    how = {"maxMsgNums": str(most), "sysFlag": str(flags), "commitOffset": "0", "suspendTimeoutMillis": "0"}
    what = {"subscription": tags, "subVersion": "0", "expressionType": "TAG"}
    return Step(11, {**where, **how, **what})


def heartbeat(client: str, name: str) -> Step:
    """HEART_BEAT of one producer and one consumer group."""
    body = (
        '{"clientID":"%s","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_FIRST_OFFSET","consumeType":'
        '"CONSUME_PASSIVELY","groupName":"cg","messageModel":"CLUSTERING","subscriptionDataSet":[{"classFilterMode":'
        'false,"codeSet":[],"expressionType":"TAG","subString":"*","subVersion":1700000000000,"tagsSet":[],"topic":'
        '"%s"}],"unitMode":false}],"heartbeatFingerprint":0,"producerDataSet":[{"groupName":"pg"}],"withoutSub":false}'
    )
    return Step(34, {}, (body % (client, name)).encode())


def queue_of(name: str, **more: str) -> dict[str, str]:
    """The fields of a request about queue 0."""
    return {"topic": name, "queueId": "0", **more}


def names(code: int, **fields: str) -> Step:
    """A request to the name server."""
    return Step(code, fields, server=NAMES)


LOCK = (
    b'{"clientId":"c1","consumerGroup":"cg","mqSet":[{"brokerName":"@name","queueId":0,"topic":"Groups"}],'
    b'"onlyThisBroker":true}'
)

CONVERSATIONS: dict[str, list[Step]] = {
    "send": [
        topic("Send"),
        send("Send", b"first"),
        send("Send", b"second", code=10, key="K2"),
        send("Send", b"third", queue=3, key="K3"),
        send("Send", b"no such queue", queue=9),
        send("No/Such", b"bad name"),
        send("SCHEDULE_TOPIC_XXXX", b"forbidden"),
        Step(9999),
    ],
    "pull": [
        topic("Pull"),
        pull("Pull", 0),
        send("Pull", b"first", tags="A"),
        send("Pull", b"second", key="K2", tags="B"),
        pull("Pull", 0),
        pull("Pull", 0, tags="B"),
        pull("Pull", 0, tags="C"),
        pull("Pull", 0, most=1),
        pull("Pull", 2),
        pull("Pull", 7),
        pull("Pull", 0, queue=9),
        pull("NoSuchTopic", 0),
    ],
    "offsets": [
        topic("Offsets"),
        send("Offsets", b"first"),
        send("Offsets", b"second", key="K2"),
        Step(30, queue_of("Offsets")),
        Step(31, queue_of("Offsets")),
        Step(29, queue_of("Offsets", timestamp="0")),
        Step(29, queue_of("Offsets", timestamp="4000000000000")),
        Step(32, queue_of("Offsets")),
        Step(14, queue_of("Offsets", consumerGroup="TOOLS_CONSUMER")),
        Step(15, queue_of("Offsets", consumerGroup="TOOLS_CONSUMER", commitOffset="1")),
        Step(14, queue_of("Offsets", consumerGroup="TOOLS_CONSUMER")),
        Step(15, queue_of("Offsets", consumerGroup="NoSuchGroup", commitOffset="1")),
    ],
    "lookup": [
        topic("Lookup"),
        send("Lookup", b"find me", key="needle"),
        Step(33, {"offset": "@position", "topic": "Lookup"}),
        Step(33, {"offset": "99999999", "topic": "Lookup"}),
    ],
    "groups": [
        topic("Groups"),
        Step(38, {"consumerGroup": "cg"}),
        heartbeat("c1", "Groups"),
        Step(38, {"consumerGroup": "cg"}),
        Step(41, {}, LOCK),
        Step(42, {}, LOCK),
        Step(35, {"clientID": "c1", "producerGroup": "pg", "consumerGroup": "cg"}),
        Step(38, {"consumerGroup": "cg"}),
    ],
    "nameserver": [
        topic("Routed"),
        names(105, topic="Routed"),
        Step(105, {"topic": "Routed"}, server=NAMES, version=317),
        names(105, topic="Routed", acceptStandardJsonOnly="true"),
        names(105, topic="NoSuchTopic"),
        names(106),
        names(100, namespace="ns", key="k", value="v"),
        names(101, namespace="ns", key="k"),
        names(219, namespace="ns"),
        names(102, namespace="ns", key="k"),
        names(101, namespace="ns", key="k"),
        names(901, clusterName="DefaultCluster", brokerName="@name"),
        names(9999),
    ],
}
