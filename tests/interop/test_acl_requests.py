"""Who may send which request: Martlet with the plugin acl answers as RocketMQ 5.5.0 with the same users and rules."""

from collections.abc import Callable, Iterator, Mapping

import pytest

from martlet_remoting.wire.codes import RequestCode

from . import fetch, wire
from .acl_brokers import ROOT, Brokers, signed
from .java import Failed, Java, Jvm, message

NO_PERMISSION = 16
NO_ROUTE = 10005  # of the client
FUTURE_MS = 9_000_000_000_000  # of a pop that is never late
CREATE_USER, UPDATE_USER = RequestCode.AUTH_CREATE_USER, RequestCode.AUTH_UPDATE_USER
CREATE_ACL = RequestCode.AUTH_CREATE_ACL

# Rules as decision, actions, resource and networks; those of the default policy come after None.
Rules = list[tuple[str, str, str, str] | None]
USERS: Mapping[str, Rules] = {
    "publisher": [("Allow", "Pub", "Topic:orders*", "")],
    "consumer": [("Allow", "Sub", "Topic:orders*", ""), ("Allow", "Sub", "Group:workers*", "")],
    "monitor": [("Allow", "Get,List", f"{kind}:*", "") for kind in ("Topic", "Group", "Cluster")],
    "far": [("Allow", "All", "*", "10.0.0.0/8,2001:db8::/32")],
    "near": [("Allow", "All", "*", "192.0.2.1,127.0.0.0/8")],
    "mixed": [
        ("Allow", "All", "*", ""),
        ("Deny", "All", "Topic:secret", ""),
        ("Deny", "Pub", "Topic:orders*", ""),
        ("Allow", "Pub,Sub", "Topic:orders1", ""),
        ("Deny", "All", "Group:*", ""),
        ("Allow", "Sub", "Group:workers", ""),
    ],
    "layered": [
        ("Allow", "Pub", "Topic:orders1", ""),
        ("Deny", "Sub", "Topic:*", "10.0.0.0/8"),
        None,
        ("Deny", "Pub", "Topic:orders*", ""),
        ("Allow", "All", "Topic:*", ""),
        ("Allow", "All", "Group:*", ""),
    ],
    "everything": [("Allow", "All", "*", "")],
    "manager": [("Allow", "Update,Get", "Cluster:*", "")],
    "nobody": [],
}
SUPER = "boss"
TOPICS = ("orders1", "orders2", "secret", "other")


def user(name: str) -> dict[str, str]:
    return ROOT if name == "root" else {"access_key": name, "secret_key": f"{name}'s secret"}


SEND = {
    "producerGroup": "P",
    "defaultTopic": "TBW102",
    "defaultTopicQueueNums": "1",
    "queueId": "0",
    "sysFlag": "0",
    "bornTimestamp": "1",
    "flag": "0",
    "properties": "",
}


def publish(topic: str) -> tuple[int, dict[str, object], object]:
    return RequestCode.SEND_MESSAGE, {**SEND, "topic": topic}, b"x"


def pull(topic: str, group: str, code: int = RequestCode.PULL_MESSAGE) -> tuple[int, dict[str, object], object]:
    place = {"consumerGroup": group, "topic": topic, "queueId": 0, "queueOffset": 0, "maxMsgNums": 1, "sysFlag": 4}
    times = {"commitOffset": 0, "suspendTimeoutMillis": 0, "subVersion": 0}
    return code, {**place, **times, "subscription": "*", "expressionType": "TAG"}, b""


def pop(topic: str, group: str) -> tuple[int, dict[str, object], object]:
    place = {"consumerGroup": group, "topic": topic, "queueId": 0, "maxMsgNums": 1, "invisibleTime": 60_000}
    return (
        RequestCode.POP_MESSAGE,
        {**place, "pollTime": 0, "bornTime": FUTURE_MS, "initMode": 0, "order": "false"},
        b"",
    )


def heartbeat(topic: str, group: str) -> tuple[int, dict[str, object], object]:
    data = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [{"topic": topic, "subString": "*"}],
    }
    return RequestCode.HEART_BEAT, {}, {"clientID": "c", "consumerDataSet": [data], "producerDataSet": []}


def lock(topic: str, group: str) -> tuple[int, dict[str, object], object]:
    queue = {"topic": topic, "brokerName": "b", "queueId": 0}
    return RequestCode.LOCK_BATCH_MQ, {}, {"consumerGroup": group, "clientId": "c", "mqSet": [queue]}


REQUESTS: Mapping[str, tuple[int, dict[str, object], object]] = {
    "publish orders1": publish("orders1"),
    "publish orders2": publish("orders2"),
    "publish secret": publish("secret"),
    "pull orders1": pull("orders1", "workers"),
    "pull orders2 as others": pull("orders2", "others"),
    "pull secret": pull("secret", "workers"),
    "pop other": pop("other", "workers"),
    "join with orders1": heartbeat("orders1", "workers"),
    "lock orders2": lock("orders2", "workers"),
    "members": (RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "workers"}, b""),
    "delete a topic": (RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "missing"}, b""),
    "delete a group": (RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "missing", "cleanOffset": "false"}, b""),
    "statistics": (RequestCode.VIEW_BROKER_STATS_DATA, {"statsName": "TOPIC_PUT_NUMS", "statsKey": "orders1"}, b""),
    "show a user": (RequestCode.AUTH_GET_USER, {"username": "nobody"}, b""),
    "change a user": (UPDATE_USER, {"username": "nobody"}, {"userStatus": "enable"}),
    "change an administrator": (UPDATE_USER, {"username": SUPER}, {"userType": "Super"}),
}


def put_users(address: str) -> None:
    """Make the users, their rules and the topics."""

    def do(code: int, fields: Mapping[str, object], body: object = b"") -> None:
        answer = signed(address, ROOT, code, fields, body)
        assert answer.code == 0, answer.remark

    for name, rules in USERS.items():
        do(CREATE_USER, {"username": name}, {"password": user(name)["secret_key"]})
        split = rules.index(None) if None in rules else len(rules)
        for level, some in (("Custom", rules[:split]), ("Default", rules[split + 1 :])):
            entries = [
                {
                    "resource": each[2],
                    "actions": each[1].split(","),
                    "sourceIps": each[3].split(",") if each[3] else [],
                    "decision": each[0],
                }
                for each in some
                if each is not None
            ]
            if entries:
                policy = {"policyType": level, "entries": entries}
                do(CREATE_ACL, {"subject": f"User:{name}"}, {"subject": f"User:{name}", "policies": [policy]})
    do(CREATE_USER, {"username": SUPER}, {"password": user(SUPER)["secret_key"], "userType": "Super"})
    for topic in TOPICS:
        queues = {"readQueueNums": 1, "writeQueueNums": 1, "perm": 6, "topicFilterType": "SINGLE_TAG", "order": "false"}
        do(RequestCode.UPDATE_AND_CREATE_TOPIC, {"topic": topic, "defaultTopic": "TBW102", "topicSysFlag": 0, **queues})


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """Brokers with the same users, rules and topics."""
    found = Brokers(tmp_path_factory.mktemp("acls"))
    try:
        for _, broker in found.both():
            put_users(broker.address)
        yield found
    finally:
        found.close()


def is_allowed(answer: wire.Answer) -> bool:
    """Whether the broker did not refuse the request for a missing permission."""
    return answer.code != NO_PERMISSION and "super user can only be" not in answer.remark


def test_each_user_may_send_the_same_requests(brokers: Brokers) -> None:
    decisions = {}
    for name in (*USERS, SUPER):
        for request, (code, fields, body) in REQUESTS.items():
            ours, real = (is_allowed(signed(b.address, user(name), code, fields, body)) for _, b in brokers.both())
            assert ours == real, f"{name} may {request}: {ours}, with RocketMQ {real}"
            decisions[name, request] = ours
    assert len(decisions) >= 60
    assert 40 < sum(decisions.values()) < len(decisions) - 40
    # A few of them in words, so that both cannot be wrong in the same way.
    for name, may in (
        ("publisher", ["publish orders1", "publish orders2"]),
        ("consumer", ["pull orders1", "join with orders1", "lock orders2", "members"]),
        ("manager", ["statistics", "show a user", "change a user"]),
        ("far", []),
        ("nobody", []),
        (SUPER, list(REQUESTS)),
    ):
        assert [request for request in REQUESTS if decisions[name, request]] == may


# What RocketMQ lets everybody do who can sign a request (docs/remoting.md, "Stricter than RocketMQ").
HOLES: Mapping[str, tuple[int, dict[str, object], object]] = {
    "pull by another number": pull("secret", "workers", RequestCode.LITE_PULL_MESSAGE),
    "make topics": (
        RequestCode.UPDATE_AND_CREATE_TOPIC_LIST,
        {},
        {"topicConfigList": [{"topicName": "made", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}]},
    ),
    "make a group": (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, {"groupName": "made"}),
    "configure": (RequestCode.UPDATE_BROKER_CONFIG, {}, b"fileReservedTime=71"),
    "show the configuration": (RequestCode.GET_BROKER_CONFIG, {}, b""),
    "show the state": (RequestCode.GET_BROKER_RUNTIME_INFO, {}, b""),
    "list topics": (RequestCode.GET_ALL_TOPIC_CONFIG, {}, b""),
    "list groups": (RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, b""),
    "list offsets": (RequestCode.GET_ALL_CONSUMER_OFFSET, {}, b""),
    "clean": (RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE, {}, b""),
    "limit a group": (RequestCode.UPDATE_COLD_DATA_FLOW_CTR_CONFIG, {}, b"workers=1"),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_user_without_rules_may_do_this_on_rocketmq_alone(brokers: Brokers, hole: str) -> None:
    code, fields, body = HOLES[hole]
    assert signed(brokers.rocketmq.address, user("nobody"), code, fields, body).code in (0, 19)
    assert signed(brokers.martlet.address, user("nobody"), code, fields, body).code == NO_PERMISSION


@pytest.mark.parametrize("kind", ["martlet", "rocketmq"])
def test_clients_do_what_their_rules_allow(brokers: Brokers, jvms: Callable[[str], Jvm], kind: str) -> None:
    broker = dict(brokers.both())[kind]
    java = Java(jvms(fetch.SERVER_VERSION), broker.name_server)
    producer = java.producer("made_orders", retries=0, **user("publisher"))
    producer.send(message("orders1", "allowed"))
    with pytest.raises(Failed) as refused:
        producer.send(message("secret", "refused"))
    assert refused.value.code == (NO_PERMISSION if kind == "rocketmq" else NO_ROUTE)  # Martlet's name server asks, too
    consumer = java.push("workers_push", "orders1", **user("consumer"))
    assert b"allowed" in {each.body for each in consumer.wait_bodies([b"allowed"])}
    java.leave()
