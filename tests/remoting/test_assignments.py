"""The broker shares out queues as RocketMQ 5.5.0 does: its answers to the same questions are the facts here."""

from collections.abc import Mapping, Sequence

import orjson
import pytest
import trio
from trio.testing import MockClock

from martlet.errors import RemoteProtocolError, StoreError
from martlet.runtime.steps import finish_now
from martlet.tables.topics import QUEUES_MAX
from martlet_remoting.cluster.other_brokers import FRESH_S, PATIENCE_S, OtherBrokers
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.routes import TopicQueues

from .conftest import FakeClient, Harness, OpenHarness

ASK = RequestCode.QUERY_ASSIGNMENT
SET_MODE = RequestCode.SET_MESSAGE_REQUEST_MODE
QUESTION: Mapping[str, object] = {
    "clientId": "c1",
    "consumerGroup": "G",
    "messageModel": "CLUSTERING",
    "strategyName": "AVG",
    "topic": "T",
}


async def ask(client: FakeClient, **changes: object) -> Command:
    return await client.ask(ASK, body=orjson.dumps({**QUESTION, **changes}))


def places(answer: Command, mode: str = "PULL") -> list[tuple[str, int]] | None:
    """The queues of an answer; None for no list, after which a client keeps what it has."""
    assert (answer.code, answer.remark) == (0, None)
    body = orjson.loads(answer.body)
    if "messageQueueAssignments" not in body:
        assert body == {}
        return None
    found = body["messageQueueAssignments"]
    assert all(set(item) == {"messageQueue", "mode"} and item["mode"] == mode for item in found)
    assert len({item["messageQueue"]["topic"] for item in found}) <= 1
    return sorted((item["messageQueue"]["brokerName"], item["messageQueue"]["queueId"]) for item in found)


async def numbers(client: FakeClient, **changes: object) -> list[int] | None:
    found = places(await ask(client, **changes))
    return None if found is None else [number for _, number in found]


async def join(harness: Harness, *client_ids: str, topic: str = "T") -> list[FakeClient]:
    clients = [harness.client() for _ in client_ids]
    for client, client_id in zip(clients, client_ids, strict=True):
        await client.heartbeat(client_id, "G", topic)
    return clients


async def test_members_share_a_topics_queues(harness: Harness) -> None:
    harness.topic("T", 4)
    client, *_ = await join(harness, "c1", "c2", "c3")
    assert [await numbers(client, clientId=member) for member in ("c1", "c2", "c3")] == [[0, 1], [2], [3]]
    circle = [await numbers(client, clientId=m, strategyName="AVG_BY_CIRCLE") for m in ("c1", "c2", "c3")]
    assert circle == [[0, 3], [1], [2]]


async def test_the_order_of_joining_does_not_matter(harness: Harness) -> None:
    harness.topic("T", 4)
    client, *_ = await join(harness, "c3", "c1", "c2")
    assert [await numbers(client, clientId=member) for member in ("c1", "c2", "c3")] == [[0, 1], [2], [3]]


async def test_joining_and_leaving_change_the_shares(harness: Harness) -> None:
    harness.topic("T", 4)
    (one,) = await join(harness, "c1")
    assert await numbers(one) == [0, 1, 2, 3]
    (two,) = await join(harness, "c2")
    assert await numbers(one) == [0, 1]
    two.close()
    assert await numbers(one) == [0, 1, 2, 3]


async def test_a_retry_topic_is_shared_as_well(harness: Harness) -> None:
    harness.topic("T", 4)
    client, _ = await join(harness, "c1", "c2")
    answers = [places(await ask(client, topic="%RETRY%G", clientId=member)) for member in ("c1", "c2")]
    assert answers == [[("martlet", 0)], []]


async def test_in_broadcast_everybody_gets_everything(harness: Harness) -> None:
    harness.topic("T", 4)
    assert await numbers(harness.client(), messageModel="BROADCASTING", clientId="") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"topic": "Nowhere"},
        {"topic": "WriteOnly"},
        {"consumerGroup": "Nobody"},
        {"clientId": ""},
        {"clientId": None},
        {"strategyName": "MACHINE_ROOM"},
        {"strategyName": ""},
        {"strategyName": None},
    ],
)
async def test_without_an_answer_a_client_keeps_its_queues(harness: Harness, changes: dict[str, object]) -> None:
    harness.topic("T", 4)
    harness.topic("WriteOnly", 4, perm=2)
    (client,) = await join(harness, "c1")
    assert await numbers(client, **changes) is None


async def test_a_client_that_is_no_member_gets_nothing(harness: Harness) -> None:
    harness.topic("T", 4)
    (client,) = await join(harness, "c1")
    assert await numbers(client, clientId="stranger") == []


@pytest.mark.parametrize(
    "changes", [{"topic": None}, {"consumerGroup": None}, {"messageModel": None}, {"messageModel": "X"}]
)
async def test_a_question_that_lacks_something_is_refused(harness: Harness, changes: dict[str, object]) -> None:
    answer = await ask(harness.client(), **changes)
    assert (answer.code, bool(answer.remark)) == (ResponseCode.SYSTEM_ERROR, True)


@pytest.mark.parametrize("body", [b"", b"junk", b"[]"])
@pytest.mark.parametrize("code", [ASK, SET_MODE])
async def test_a_body_that_is_no_object_is_refused(harness: Harness, code: int, body: bytes) -> None:
    assert (await harness.client().ask(code, body=body)).code == ResponseCode.SYSTEM_ERROR


async def test_a_client_that_may_not_consume_gets_no_answer(harness: Harness) -> None:
    harness.topic("T", 4)
    (client,) = await join(harness, "c1")
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("read", "T"),)
    assert (await ask(client)).code == ResponseCode.NO_PERMISSION


# topics that other brokers have as well


class Elsewhere:
    """Name servers that say what a test wants."""

    def __init__(self, *, inside: Sequence[TopicQueues] = (), elsewhere: Sequence[TopicQueues] | None = None) -> None:
        self.inside = inside
        self.asks_elsewhere = elsewhere is not None
        self.elsewhere = elsewhere or ()
        self.failure: Exception | None = None
        self.delay_s = 0.0
        self.asked: list[str] = []

    def queues_inside(self, topic: str) -> Sequence[TopicQueues]:
        return self.inside

    async def queues_elsewhere(self, topic: str) -> Sequence[TopicQueues]:
        self.asked.append(topic)
        await trio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        return self.elsewhere


def queues(broker: str, count: int = 2, perm: int = 6) -> TopicQueues:
    return TopicQueues(broker, count, count, perm)


def with_others(harness: Harness, routes: Elsewhere) -> Elsewhere:
    harness.state.others = OtherBrokers(routes)
    return routes


async def test_queues_of_other_brokers_are_shared_out_too(harness: Harness) -> None:
    with_others(harness, Elsewhere(inside=[queues("zebra"), queues("ape"), queues("closed", perm=2)]))
    harness.topic("T", 2)
    client, _ = await join(harness, "c1", "c2")
    everything = [("ape", 0), ("ape", 1), ("martlet", 0), ("martlet", 1), ("zebra", 0), ("zebra", 1)]
    assert places(await ask(client)) == everything[:3]
    assert places(await ask(client, clientId="c2")) == everything[3:]


async def test_for_its_own_queues_the_broker_uses_its_own_table(harness: Harness) -> None:
    with_others(harness, Elsewhere(inside=[queues("martlet", 9)]))
    harness.topic("T", 2)
    (client,) = await join(harness, "c1")
    assert places(await ask(client)) == [("martlet", 0), ("martlet", 1)]


async def test_a_name_server_elsewhere_is_asked_once_for_all_members_and_again_after_a_while(
    harness: Harness, autojump_clock: MockClock
) -> None:
    routes = with_others(harness, Elsewhere(elsewhere=[queues("ape")]))
    routes.delay_s = 1
    harness.topic("T", 2)
    clients = await join(harness, "c1", "c2", "c3")
    numbers = [client.send(ASK, body=orjson.dumps({**QUESTION, "clientId": "c1"})) for client in clients]
    await trio.sleep(1.5)
    await harness.step()
    answers = [places(client.answers.pop(number)) for client, number in zip(clients, numbers, strict=True)]
    assert answers == [[("ape", 0), ("ape", 1)]] * 3
    assert routes.asked == ["T"]
    await trio.sleep(FRESH_S + 1)
    routes.delay_s, routes.elsewhere = 0, [queues("bear")]
    assert places(await ask(clients[0])) == [("bear", 0), ("bear", 1)]
    assert routes.asked == ["T", "T"]


@pytest.mark.parametrize("failure", [OSError("away"), RemoteProtocolError("not now"), trio.BrokenResourceError()])
async def test_without_an_answer_of_a_name_server_its_last_one_is_used(
    harness: Harness, autojump_clock: MockClock, failure: Exception
) -> None:
    routes = with_others(harness, Elsewhere(elsewhere=[queues("ape")]))
    (client,) = await join(harness, "c1")
    routes.failure = failure
    refused = await ask(client)
    assert (refused.code, "no name server answered" in str(refused.remark)) == (14, True)
    routes.failure = None
    assert places(await ask(client)) == [("ape", 0), ("ape", 1)]
    await trio.sleep(FRESH_S + 1)
    routes.failure = failure
    assert places(await ask(client)) == [("ape", 0), ("ape", 1)]


async def test_a_name_server_that_does_not_answer_is_not_waited_for_longer_than_a_client_waits(
    harness: Harness, autojump_clock: MockClock
) -> None:
    routes = with_others(harness, Elsewhere(elsewhere=[]))
    routes.delay_s = 1000
    client = harness.client()
    number = client.send(ASK, body=orjson.dumps(QUESTION))
    await trio.sleep(PATIENCE_S + 0.1)
    await harness.step()
    assert client.answers.pop(number).code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert PATIENCE_S < 3


async def test_more_queues_than_a_topic_can_have_are_not_shared_out(harness: Harness) -> None:
    with_others(harness, Elsewhere(inside=[queues("ape", QUEUES_MAX), queues("bear", 1 << 31)]))
    (client,) = await join(harness, "c1")
    assert (await ask(client)).code == ResponseCode.SYSTEM_BUSY


# the mode


async def set_mode(client: FakeClient, **changes: object) -> Command:
    body = {"consumerGroup": "G", "topic": "T", "mode": "PULL", "popShareQueueNum": 0}
    return await client.ask(SET_MODE, body=orjson.dumps({**body, **changes}))


@pytest.mark.parametrize("mode", ["PULL", 0, None])
async def test_a_group_can_be_put_in_pull_mode(harness: Harness, mode: object) -> None:
    harness.topic("T", 2)
    (client,) = await join(harness, "c1")
    assert (await set_mode(client, mode=mode)).code == 0
    assert await numbers(client) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"mode": "WRONG"}, ResponseCode.SYSTEM_ERROR),
        ({"topic": "%RETRY%G"}, ResponseCode.NO_PERMISSION),
        ({"topic": "Nowhere"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"topic": None}, ResponseCode.SYSTEM_ERROR),
        ({"consumerGroup": None}, ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_a_mode_that_cannot_be_set_is_refused(harness: Harness, changes: dict[str, object], code: int) -> None:
    harness.topic("T", 2)
    (client,) = await join(harness, "c1")
    answer = await set_mode(client, **changes)
    assert (answer.code, bool(answer.remark)) == (code, True)
    assert await numbers(client) == [0, 1]


async def test_a_client_that_may_not_manage_a_group_cannot_set_its_mode(harness: Harness) -> None:
    harness.topic("T", 2)
    harness.broker.authorizers = (lambda identity, action, topic: (action, topic) != ("manage", "%RETRY%G"),)
    assert (await set_mode(harness.client())).code == ResponseCode.NO_PERMISSION


async def pops(client: FakeClient, member: str, **changes: object) -> list[int]:
    found = places(await ask(client, clientId=member, **changes), "POP")
    assert found is not None
    return [number for _, number in found]


async def test_members_of_a_group_in_pop_mode_pop_all_queues_of_each_broker(harness: Harness) -> None:
    with_others(harness, Elsewhere(inside=[queues("ape", 3)]))
    harness.topic("T", 4)
    client, *_ = await join(harness, "c1", "c2", "c3")
    for mode in ("POP", 1):
        assert (await set_mode(client, mode=mode)).code == 0
        for member in ("c1", "c2", "c3"):
            assert places(await ask(client, clientId=member), "POP") == [("ape", -1), ("martlet", -1)]
    assert (await set_mode(client, mode="PULL")).code == 0
    assert len(places(await ask(client)) or ()) == 3


@pytest.mark.parametrize(
    ("shared", "found"),
    [
        (-1, [[-1]] * 4),
        (0, [[-1]] * 4),
        (1, [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7], [0, 1, 6, 7]]),
        (2, [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5, 6, 7], [0, 1, 4, 5, 6, 7], [0, 1, 2, 3, 6, 7]]),
        (3, [[-1]] * 4),
        (1 << 60, [[-1]] * 4),
    ],
)
async def test_members_may_pop_the_queues_of_those_after_them_too(
    harness: Harness, shared: int, found: list[list[int]]
) -> None:
    harness.topic("T", 8)
    client, *_ = await join(harness, "c1", "c2", "c3", "c4")
    assert (await set_mode(client, mode="POP", popShareQueueNum=shared)).code == 0
    assert [await pops(client, f"c{number}") for number in range(1, 5)] == found


async def test_with_more_members_than_queues_each_pops_one(harness: Harness) -> None:
    harness.topic("T", 2)
    client, *_ = await join(harness, "c1", "c2", "c3", "c4")
    await set_mode(client, mode="POP", popShareQueueNum=1)
    assert [await pops(client, f"c{number}") for number in range(1, 5)] == [[0], [1], [0], [1]]


async def test_the_default_mode_is_not_for_retries(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, request_mode="POP")
    for name in ("T", "%RETRY%G"):
        harness.topic(name, 2)
    (client,) = await join(harness, "c1")
    assert await pops(client, "c1") == [-1]
    assert await numbers(client, topic="%RETRY%G") == [0, 1]
    assert (await set_mode(client, mode="PULL")).code == 0
    assert await numbers(client) == [0, 1]


async def test_modes_are_listed_and_stored_as_rocketmq_does(harness: Harness) -> None:
    harness.topic("T", 2)
    (client,) = await join(harness, "c1")
    await set_mode(client, mode="POP", popShareQueueNum=3)
    answer = await client.ask(RequestCode.GET_ALL_MESSAGE_REQUEST_MODE)
    entry = {"consumerGroup": "G", "mode": "POP", "popShareQueueNum": 3, "topic": "T"}
    assert orjson.loads(answer.body) == {"messageRequestModeMap": {"T": {"G": entry}}}
    table = harness.state.request_modes.table
    assert (table.path, table.urgent, table.dirty) == ("config/messageRequestMode.json", True, True)
    stored = b"".join(finish_now(table.freeze(7)))
    parsed = orjson.loads(stored)
    assert list(parsed)[:2] == ["martletCrc", "martletPosition"]
    assert parsed["messageRequestModeMap"] == orjson.loads(answer.body)["messageRequestModeMap"]
    table.load(b'{"messageRequestModeMap":{}}')
    assert await numbers(client) == [0, 1]
    table.load(stored)
    assert await pops(client, "c1") == [-1]
    for wrong in (b"[]", b"{}", b'{"messageRequestModeMap":[7]}', b'{"messageRequestModeMap":{"T":{"G":7}}}'):
        with pytest.raises(StoreError):
            table.load(wrong)
    assert await pops(client, "c1") == [-1]


async def test_modes_end_with_their_topic_and_group(harness: Harness) -> None:
    for topic in ("T", "U"):
        harness.topic(topic, 2)
    (client,) = await join(harness, "c1")
    for topic in ("T", "U"):
        await set_mode(client, topic=topic, mode="POP")
    harness.broker.topics.delete("T")
    harness.topic("T", 2)
    assert await numbers(client) == [0, 1]
    harness.broker.groups.delete("G", clean_offsets=True)
    await join(harness, "c1", topic="U")
    assert await numbers(client, topic="U") == [0, 1]


async def test_the_number_of_modes_is_bounded(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet_remoting.consumers.request_modes.MODES_MAX", 1)
    harness.topic("T", 2)
    (client,) = await join(harness, "c1")
    assert [(await set_mode(client, consumerGroup=group)).code for group in ("G", "G", "H")] == [0, 0, 2]
