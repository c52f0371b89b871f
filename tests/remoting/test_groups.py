import math
from itertools import pairwise
from typing import cast

import orjson
import pytest
import trio

from martlet.runtime.steps import Steps, finish_now
from martlet.tables.groups import Group
from martlet_remoting.consumers import members
from martlet_remoting.handlers import bodies
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command, MessageQueue

from .conftest import FakeClient, Harness, OpenHarness

NOTIFY = RequestCode.NOTIFY_CONSUMER_IDS_CHANGED


def notices(client: FakeClient) -> list[str]:
    """The groups that the client was told to rebalance, in order; each notice is a oneway request."""
    while client.harness.state.members.tell_some():
        pass
    client.receive()
    found, client.requests = client.requests, []
    assert all(request.code == NOTIFY and request.is_oneway for request in found)
    return [str(request.ext["consumerGroup"]) for request in found]


async def member_ids(client: FakeClient, group: str = "G") -> list[str]:
    answer = await client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
    if answer.code != ResponseCode.SUCCESS:
        assert (answer.code, answer.body) == (ResponseCode.SYSTEM_ERROR, b"")
        return []
    found = orjson.loads(answer.body)["consumerIdList"]
    assert isinstance(found, list)
    return found


async def test_a_heartbeat_makes_group_and_retry_topic_before_it_is_answered(harness: Harness) -> None:
    client = harness.client()
    made: list[str] = []
    harness.broker.topics.changed.append(lambda topic: made.append(topic.name if topic else ""))
    client.send(RequestCode.HEART_BEAT, body=b'{"clientID":"c","consumerDataSet":[{"groupName":"G"}]}')
    assert made == ["%RETRY%G"]
    await harness.step()
    (answer,) = client.answers.values()
    assert (answer.code, answer.version >= 232) == (0, True)
    assert dict(answer.ext) == {"IS_SUPPORT_HEART_BEAT_V2": "true", "IS_SUB_CHANGE": "true"}
    assert harness.broker.groups.get("G") == Group("G")
    topic = harness.broker.topics.get("%RETRY%G")
    assert topic is not None
    assert (topic.read_queues, topic.write_queues, topic.perm, topic.sys_flag) == (1, 1, 6, 0)


async def test_the_retry_topic_follows_the_groups_policy(harness: Harness) -> None:
    harness.broker.groups.update(Group("Wide", retry_queue_nums=3))
    harness.broker.groups.update(Group("None", retry_queue_nums=0))
    client = harness.client()
    await client.heartbeat("c", "Wide", unitMode=True)
    await client.heartbeat("c", "None")
    wide = harness.broker.topics.get("%RETRY%Wide")
    assert wide is not None
    assert (wide.write_queues, wide.sys_flag) == (3, 2)
    assert harness.broker.topics.get("%RETRY%None") is None


async def test_every_member_is_listed_the_asking_one_too_and_hears_of_changes(harness: Harness) -> None:
    first, second = harness.client(), harness.client()
    assert await member_ids(first) == []
    await first.heartbeat("c1", "G", "T")
    assert notices(first) == ["G"]
    assert await member_ids(first) == ["c1"]
    await first.heartbeat("c1", "G", "T")
    assert notices(first) == []
    await second.heartbeat("c2", "G", "T")
    assert (notices(first), notices(second)) == (["G"], ["G"])
    assert await member_ids(second) == ["c1", "c2"]
    # A topic more, and a topic less.
    await second.heartbeat("c2", "G", "T", "U")
    assert notices(first) == ["G"]
    await second.heartbeat("c2", "G", "T")
    assert notices(first) == ["G"]
    notices(second)
    await second.ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "c2", "consumerGroup": "G", "producerGroup": ""})
    assert (notices(first), notices(second)) == (["G"], [])
    assert await member_ids(first) == ["c1"]


def join_all(harness: Harness, count: int) -> list[FakeClient]:
    """Clients that all join one group within one turn of the loop."""
    clients = [harness.client() for _ in range(count)]
    for number, client in enumerate(clients):
        body = {"clientID": f"c{number}", "consumerDataSet": [{"groupName": "G"}]}
        client.send(RequestCode.HEART_BEAT, body=orjson.dumps(body))
    return clients


async def test_members_hear_once_of_many_changes(harness: Harness) -> None:
    clients = join_all(harness, 200)
    await harness.step()
    assert [notices(client) for client in clients] == [["G"]] * 200
    assert len(await member_ids(clients[0])) == 200


async def test_a_turn_of_the_loop_tells_a_bounded_number_of_members(harness: Harness) -> None:
    join_all(harness, 200)
    told = [sum(len(client.peer.sent) for client in harness.clients)]
    while True:
        more = harness.state.members.tell_some()
        told.append(sum(len(client.peer.sent) for client in harness.clients))
        if not more:
            break
    assert [after - before for before, after in pairwise(told)] == [64, 64, 64, 8]


async def test_a_change_during_a_notification_is_notified_to_all_again(harness: Harness) -> None:
    clients = join_all(harness, 100)
    members = harness.state.members
    assert members.tell_some()
    group = members.consumers["G"]
    for _ in range(5):
        members.notify(group)
    clients[70].close()
    heard = [notices(client) for client in (clients[0], clients[99])]
    assert heard == [["G", "G"], ["G", "G"]]


async def test_the_list_of_members_is_rendered_once_until_one_comes_or_goes(harness: Harness) -> None:
    first, second = harness.client(), harness.client()
    await first.heartbeat("c1", "G", "T")
    group = harness.state.members.consumers["G"]
    assert group.client_ids_as_json() is group.client_ids_as_json()
    await second.heartbeat("c2", "G", "T")
    assert await member_ids(first) == ["c1", "c2"]
    await second.heartbeat("renamed", "G", "T")
    assert await member_ids(first) == ["c1", "renamed"]
    second.close()
    assert await member_ids(first) == ["c1"]


async def test_a_closed_connection_leaves_all_its_groups(harness: Harness) -> None:
    first, second = harness.client(), harness.client()
    for group in ("G", "H"):
        await first.heartbeat("c1", group, "T")
        await second.heartbeat("c2", group, "T")
    await second.heartbeat_body({"clientID": "c2", "producerDataSet": [{"groupName": "P"}]})
    notices(first)
    second.close()
    assert sorted(notices(first)) == ["G", "H"]
    assert (await member_ids(first), await member_ids(first, "H")) == (["c1"], ["c1"])
    assert harness.state.members.producers == {}
    first.close()
    assert harness.state.members.consumers == {}
    assert harness.state.contexts == {}


async def test_a_silent_client_leaves_its_groups(harness: Harness, autojump_clock: trio.testing.MockClock) -> None:
    first, second = harness.client(), harness.client()
    await first.heartbeat("c1", "G", "T")
    await second.heartbeat_body(
        {"clientID": "c2", "consumerDataSet": [{"groupName": "G"}], "producerDataSet": [{"groupName": "P"}]}
    )
    await trio.sleep(100)
    await first.heartbeat("c1", "G", "T")
    notices(first)
    await trio.sleep(30)
    finish_now(harness.state.members.expire(harness.state.now() - harness.config.client_expiry_s))
    assert notices(first) == ["G"]
    assert await member_ids(first) == ["c1"]
    assert harness.state.members.producers == {}


@pytest.mark.parametrize(("denied", "left"), [("T", ["G"]), ("%RETRY%G", ["G"]), ("U", ["H"]), ("", [])])
async def test_a_member_that_may_no_longer_consume_leaves_with_its_next_heartbeat(
    harness: Harness, denied: str, left: list[str]
) -> None:
    first, second = harness.client(), harness.client()
    for client, name in (first, "c1"), (second, "c2"):
        await client.heartbeat(name, "G", "T")
        await client.heartbeat(name, "H", "U")
    notices(second)
    harness.broker.authorizers = (lambda identity, action, name: action != "read" or name != denied,)
    consumers = [
        {"groupName": group, "subscriptionDataSet": [{"topic": topic, "subString": "*", "subVersion": 1}]}
        for group, topic in (("G", "T"), ("H", "U"))
    ]
    answer = await first.heartbeat_body({"clientID": "c1", "consumerDataSet": consumers})
    assert answer.code == (ResponseCode.NO_PERMISSION if left else 0)
    assert notices(second) == left
    for group in "G", "H":
        held = harness.state.members.group(group)
        assert held is not None
        assert held.sorted_ids() == (["c2"] if group in left else ["c1", "c2"])


async def test_a_denied_heartbeat_removes_no_other_client_of_its_connection(harness: Harness) -> None:
    proxy = harness.client()
    await proxy.heartbeat("c1", "G", "T")
    harness.broker.authorizers = (lambda identity, action, name: name != "T",)
    assert (await proxy.heartbeat("c2", "G", "T")).code == ResponseCode.NO_PERMISSION
    held = harness.state.members.group("G")
    assert held is not None
    assert held.sorted_ids() == ["c1"]


async def test_members_on_the_vip_port_belong_to_the_same_groups(harness: Harness) -> None:
    main, fast = harness.client(), harness.client(fast=True)
    await main.heartbeat("c1", "G", "T")
    assert await member_ids(fast) == ["c1"]


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        (Group("G", notify_consumer_ids_changed_enable=False), {}),
        (Group("G"), {"messageModel": "BROADCASTING"}),
        (Group("G"), {"messageModel": 0}),
    ],
)
async def test_some_groups_are_not_notified(harness: Harness, policy: Group, more: dict[str, object]) -> None:
    harness.broker.groups.update(policy)
    first, second = harness.client(), harness.client()
    await first.heartbeat("c1", "G", "T", **more)
    await second.heartbeat("c2", "G", "T", **more)
    assert (notices(first), notices(second)) == ([], [])
    assert await member_ids(first) == ["c1", "c2"]


async def test_every_clients_dialect_of_a_heartbeat_is_understood(harness: Harness) -> None:
    client = harness.client()
    java = {"topic": "J", "subString": "A||B", "expressionType": "TAG", "subVersion": 7, "codeSet": [65, 66]}
    go = {"topic": "O", "subString": "A||B", "subVersion": 1700000000000000000, "codeSet": ["65"], "tagsSet": None}
    cpp = {"topic": "C", "subString": "A || B", "subVersion": "9", "codeSet": [0, 0], "tagsSet": ["A", "B"]}
    body = {
        "clientID": "c",
        "consumerDataSet": [
            {
                "groupName": "G",
                "consumeType": 1,
                "messageModel": 1,
                "consumeFromWhere": 4,
                "subscriptionDataSet": [java, go, cpp],
            },
            {"groupName": "", "subscriptionDataSet": None},
        ],
    }
    assert (await client.heartbeat_body(body)).code == 0
    group = harness.state.members.consumers["G"]
    assert (group.kind, group.model, group.from_where) == (
        "CONSUME_PASSIVELY",
        "CLUSTERING",
        "CONSUME_FROM_FIRST_OFFSET",
    )
    found = group.subscriptions
    assert {topic: s.version for topic, s in found.items()} == {"J": 7, "O": 1_700_000_000_000_000_000, "C": 9}
    for subscription in found.values():
        assert subscription.selection is not None
        assert subscription.selection.codes == frozenset((65, 66))
        assert subscription.as_json()["codeSet"] == [65, 66]
    assert set(harness.state.members.consumers) == {"G"}


async def test_only_a_newer_subscription_replaces_the_held_one(harness: Harness) -> None:
    client = harness.client()
    for version, expression, held in ((5, "A", "A"), (5, "B", "A"), (4, "C", "A"), (6, "D", "D")):
        await client.heartbeat_with("c", "G", [{"topic": "T", "subString": expression, "subVersion": version}])
        assert harness.state.members.consumers["G"].subscriptions["T"].expression == held


async def test_a_heartbeat_without_groups_keeps_what_is_there(harness: Harness) -> None:
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    assert (await client.heartbeat_body({"clientID": "c"})).code == 0
    assert await member_ids(client) == ["c"]


async def test_heartbeats_of_the_second_kind_send_subscriptions_only_when_they_change(harness: Harness) -> None:
    client = harness.client()

    async def beat(fingerprint: int, *, full: bool) -> object:
        subscriptions = [{"topic": "T", "subString": "*", "subVersion": 1}] if full else []
        body = {
            "clientID": "c",
            "heartbeatFingerprint": fingerprint,
            "withoutSub": not full,
            "consumerDataSet": [{"groupName": "G", "subscriptionDataSet": subscriptions}],
        }
        return (await client.heartbeat_body(body)).ext["IS_SUB_CHANGE"]

    # After our restart we hold nothing, and ask for the whole.
    assert await beat(77, full=False) == "true"
    assert await beat(77, full=True) == "false"
    assert await beat(77, full=False) == "false"
    assert list(harness.state.members.consumers["G"].subscriptions) == ["T"]
    assert await beat(78, full=False) == "true"
    assert list(harness.state.members.consumers["G"].subscriptions) == ["T"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"consumerDataSet":[]}',
        b'{"clientID":""}',
        b'{"clientID":7}',
        b"\xff" * 9,
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
async def test_a_body_that_is_no_heartbeat_is_refused(harness: Harness, body: bytes) -> None:
    answer = await harness.client().ask(RequestCode.HEART_BEAT, body=body)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert harness.state.members.consumers == {}


async def test_garbage_inside_a_heartbeat_is_passed_over(harness: Harness) -> None:
    client = harness.client()
    body = {
        "clientID": "c",
        "consumerDataSet": [
            3,
            None,
            {"groupName": 5},
            {"groupName": "a b"},
            {"groupName": "G", "subscriptionDataSet": [1, {"topic": ""}, {"topic": "T", "subVersion": "x" * 50}]},
        ],
        "producerDataSet": [{"groupName": None}, "P"],
    }
    assert (await client.heartbeat_body(body)).code == 0
    assert list(harness.state.members.consumers) == ["G"]
    assert harness.state.members.consumers["G"].subscriptions["T"].version == 0
    assert harness.state.members.producers == {}


async def test_a_group_that_may_not_be_made_is_passed_over(open_harness: OpenHarness) -> None:
    harness = await open_harness(broker={"auto_create_groups": False}, store={"flush": "async"})
    client = harness.client()
    assert (await client.heartbeat("c", "G", "T")).code == 0
    assert await member_ids(client) == []


async def test_one_connection_joins_a_bounded_number_of_groups(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, groups_peer_max=2)
    client = harness.client()
    await client.heartbeat("c", "G1", "T")
    await client.heartbeat("c", "G2", "T")
    answer = await client.heartbeat("c", "G3", "T")
    assert (answer.code, "remoting.groups_peer_max is 2" in str(answer.remark)) == (ResponseCode.SYSTEM_BUSY, True)
    assert (await client.heartbeat("c", "G2", "T")).code == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 0),
        (b'{"clientId":"c","group":"G"}', 0),
        (b'{"subscriptionData":null}', 0),
        (b'{"subscriptionData":{"topic":"T","subString":"A"}}', 0),
        (b'{"subscriptionData":{"topic":"T","subString":"a > 1","expressionType":"SQL92"}}', 1),
        (b'{"subscriptionData":{"topic":"T","subString":"good","expressionType":"LIKE"}}', 0),
        (b'{"subscriptionData":{"topic":"T","subString":"bad","expressionType":"LIKE"}}', 23),
    ],
)
async def test_a_consumer_learns_at_its_start_whether_its_expression_is_served(
    harness: Harness, body: bytes, code: int
) -> None:
    from martlet.contracts import Predicate
    from martlet.errors import Reason, Refused

    def compile_expression(expression: str) -> Predicate:
        if expression == "bad":
            raise Refused(Reason.ILLEGAL, "column 1: bad")
        return lambda record: True

    harness.broker.filters["LIKE"] = compile_expression
    assert (await harness.client().ask(RequestCode.CHECK_CLIENT_CONFIG, body=body)).code == code


# locks


def queues(*numbers: int, topic: str = "T", broker: str = "martlet") -> list[dict[str, object]]:
    return [{"brokerName": broker, "queueId": number, "topic": topic} for number in numbers]


async def lock(
    client: FakeClient,
    client_id: str,
    *numbers: int,
    code: int = RequestCode.LOCK_BATCH_MQ,
    group: str = "G",
    topic: str = "T",
    broker: str = "martlet",
) -> Command:
    body = {"clientId": client_id, "consumerGroup": group, "mqSet": queues(*numbers, topic=topic, broker=broker)}
    return await client.ask(code, body=orjson.dumps(body))


async def held(
    client: FakeClient, client_id: str, *numbers: int, topic: str = "T", broker: str = "martlet"
) -> list[int]:
    answer = await lock(client, client_id, *numbers, topic=topic, broker=broker)
    found = orjson.loads(answer.body)["lockOKMQSet"]
    assert all(queue.keys() == {"brokerName", "queueId", "topic"} for queue in found)
    return sorted(queue["queueId"] for queue in found)


def test_the_queues_of_a_lock_request_are_read_in_slices() -> None:
    named: list[dict[object, object]] = [{"brokerName": "b", "queueId": n, "topic": "T"} for n in range(3000)]
    found: list[MessageQueue] = []

    def read() -> Steps[None]:
        found.extend((yield from bodies.queues(named)))

    assert sum(1 for _ in read()) > 10
    assert found == [MessageQueue("T", "b", number) for number in range(3000)]


async def test_a_queue_is_held_by_one_client_until_it_is_given_back(harness: Harness) -> None:
    harness.topic("T")
    client = harness.client()
    fast = harness.client(fast=True)
    assert await held(client, "a", 0, 1) == [0, 1]
    assert await held(fast, "b", 1, 2) == [2]
    assert await held(client, "a", 0, 1, 2) == [0, 1]
    assert (await lock(client, "a", 1, 2, code=RequestCode.UNLOCK_BATCH_MQ)).code == 0
    assert await held(client, "b", 0, 1, 2) == [1, 2]
    assert await held(client, "b") == []


async def test_a_lock_ends_when_it_is_not_renewed(harness: Harness, autojump_clock: trio.testing.MockClock) -> None:
    harness.topic("T")
    client = harness.client()
    assert await held(client, "a", 0, 1) == [0, 1]
    await trio.sleep(40)
    assert await held(client, "a", 0) == [0]
    await trio.sleep(30)
    assert await held(client, "b", 0, 1) == [1]
    locks = harness.state.locks
    assert (len(locks), locks.any_held("G", harness.state.now())) == (2, True)
    await trio.sleep(61)
    assert locks.any_held("G", harness.state.now()) is False
    finish_now(locks.expire(harness.state.now()))
    assert len(locks) == 0


async def test_made_up_queues_are_had_by_everybody_and_cost_nothing(harness: Harness) -> None:
    harness.topic("T", 2)
    one, two = harness.client(), harness.client()
    numbers = list(range(16_384))
    assert await held(one, "a", *numbers) == numbers
    assert await held(two, "b", *numbers) == numbers[2:]
    assert await held(one, "a", *numbers, topic="Unknown") == numbers
    assert await held(two, "b", *numbers, topic="Unknown") == numbers
    assert len(harness.state.locks) == 2


async def test_a_queue_is_the_same_under_every_name_of_the_broker(harness: Harness) -> None:
    harness.topic("T", 2)
    one, two = harness.client(), harness.client()
    assert await held(one, "a", 0, broker="before-it-was-renamed") == [0]
    assert await held(two, "b", 0, 1) == [1]
    await lock(one, "a", 0, code=RequestCode.UNLOCK_BATCH_MQ)
    assert await held(two, "b", 0, 1) == [0, 1]


async def test_one_connection_holds_a_bounded_number_of_queues(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, locks_peer_max=4)
    harness.topic("T", 6)
    one, two = harness.client(), harness.client()
    assert await held(one, "a", 0, 1, 2) == [0, 1, 2]
    for group in ("G", "H"):
        answer = await lock(one, "a", 3, 4, group=group)
        assert answer.code == ResponseCode.SYSTEM_BUSY
        assert "remoting.locks_peer_max is 4" in str(answer.remark)
    assert await held(one, "a", 0, 1, 2, 3) == [0, 1, 2, 3]
    assert await held(two, "b", 3, 4, 5) == [4, 5]
    # The client comes by another connection: its locks count for that one.
    assert await held(two, "a", 0, 1) == [0, 1]
    assert await held(one, "a", 0) == [0]
    await lock(one, "a", 2, 3, code=RequestCode.UNLOCK_BATCH_MQ)
    assert await held(one, "a", 2, 3) == [2, 3]


async def test_at_the_limit_locks_of_closed_connections_make_room(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "LOCKS_MAX", 3)
    harness.topic("T", 4)
    gone, there, late = harness.client(), harness.client(), harness.client()
    assert await held(gone, "a", 0) == [0]
    assert await held(there, "b", 1, 2) == [1, 2]
    assert (await lock(late, "c", 3)).code == ResponseCode.SYSTEM_BUSY
    gone.close()
    # It may come back: without need nobody gets its queue.
    assert await held(late, "c", 0) == []
    assert await held(late, "c", 3) == [3]
    assert await held(there, "b", 1, 2) == [1, 2]
    for client in (there, late):
        client.close()
    finish_now(harness.state.locks.expire(math.inf))
    assert len(harness.state.locks) == 0


def test_a_lock_ends_at_its_time_and_not_before() -> None:
    locks = members.QueueLocks(60.0, 10, lambda topic, queue_id: True)
    queue = [MessageQueue("T", "b", 0)]

    def held(line: str, client_id: str, now: float) -> bool:
        return finish_now(locks.lock(cast(members.ClientConnection, line), "G", client_id, queue, now)) == queue

    assert held("one", "a", 0.0)
    assert not held("two", "b", 59.9)
    assert locks.any_held("G", 59.9)
    assert not locks.any_held("G", 60.0)
    finish_now(locks.expire(59.9))
    assert len(locks) == 1
    assert held("two", "b", 60.0)
    assert not held("one", "a", 60.0)
    finish_now(locks.expire(120.0))
    assert len(locks) == 0


async def test_a_client_with_a_very_long_name_gets_no_locks(harness: Harness) -> None:
    client = harness.client()
    for client_id, group in (("c" * 1025, "G"), ("c", "g" * 256)):
        assert (await lock(client, client_id, group=group)).code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("body", [b"{}", b'{"clientId":"c"}', b'{"consumerGroup":"G"}', b"x"])
async def test_a_lock_needs_a_group_and_a_client(harness: Harness, body: bytes) -> None:
    for code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
        assert (await harness.client().ask(code, body=body)).code == ResponseCode.SYSTEM_ERROR


@pytest.mark.parametrize(
    "subscriptions",
    [
        [{"topic": f"t{number}"} for number in range(4097)],
        [{"topic": "T", "subString": "x" * 16_385}],
        [{"topic": "T" * 256}],
    ],
)
async def test_a_refused_heartbeat_creates_no_group(harness: Harness, subscriptions: list[dict[str, object]]) -> None:
    client = harness.client()
    assert (await client.heartbeat_with("c", "G", subscriptions)).code == ResponseCode.INVALID_PARAMETER
    assert harness.state.members.group("G") is None
    client.close()
    assert not harness.state.members.consumers
