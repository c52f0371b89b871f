"""How much memory one connection can use, and which permissions a held pull has when it is woken."""

import orjson
import pytest
from tests.remoting.conftest import FakeClient, Harness, OpenHarness, pull_ext, send_ext

from martlet.message import Message
from martlet.tables.groups import Group
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

HOLD = {"sysFlag": "6"}  # suspend, and with its subscription


# what a peer makes the broker hold


@pytest.mark.parametrize("offset", [{}, {"offset": "0"}])
async def test_a_queue_that_is_not_there_is_not_reset(harness: Harness, offset: dict[str, str]) -> None:
    harness.topic("T", queues=2)
    harness.broker.groups.update(Group("G"))
    ext = {"topic": "T", "group": "G", "timestamp": "0", "isForce": "true", **offset}
    client = harness.client()
    refused = await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {**ext, "queueId": "2"})
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert "has queues 0 to 1" in (refused.remark or "")
    assert harness.broker.groups.offsets.topics_of("G") == []
    assert (await client.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, {**ext, "queueId": "1"})).code == 0


async def test_a_deleted_group_takes_along_what_it_was_forbidden(harness: Harness) -> None:
    groups = harness.broker.groups
    groups.update(Group("G"))
    client = harness.client()
    forbid = {"group": "G", "topic": "T", "readable": "false"}
    assert (await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, forbid)).code == 0
    await client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, {"groupName": "G"})
    assert not groups.is_forbidden("G", "T")


async def test_what_groups_are_forbidden_has_a_limit(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.tables.groups.FORBIDDEN_MAX", 2)
    client = harness.client()

    async def forbid(group: str, topic: str, readable: str = "false") -> int:
        ext = {"group": group, "topic": topic, "readable": readable}
        return (await client.ask(RequestCode.UPDATE_AND_GET_GROUP_FORBIDDEN, ext)).code

    assert [await forbid("a/b", "T"), await forbid("G", "a/b")] == [29, 29]
    assert [await forbid("G", "A"), await forbid("G", "A"), await forbid("H", "A")] == [0, 0, 0]
    assert await forbid("G", "B") == ResponseCode.SYSTEM_BUSY
    assert [await forbid("G", "A", "true"), await forbid("G", "B")] == [0, 0]


async def producers(client: FakeClient, name: str) -> int:
    body = {"clientID": "c", "producerDataSet": [{"groupName": name}], "consumerDataSet": []}
    return (await client.heartbeat_body(body)).code


async def test_a_producer_group_has_no_endless_name(harness: Harness) -> None:
    client = harness.client()
    assert await producers(client, "P" * 255) == 0
    assert await producers(client, "P" * 256) == ResponseCode.INVALID_PARAMETER
    assert list(harness.state.members.producers) == ["P" * 255]


async def test_what_a_connection_subscribes_to_has_a_limit(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, subscribed_chars_peer_max=65_536)
    client = harness.client()
    long: list[dict[str, object]] = [
        {"topic": "T", "subString": "||".join(f"tag{n}" for n in range(1500)), "subVersion": "1"}
    ]
    codes = [(await client.heartbeat_with("c", f"G{n}", long)).code for n in range(8)]
    assert 0 < codes.index(ResponseCode.SYSTEM_BUSY) < 7
    assert set(codes) == {0, ResponseCode.SYSTEM_BUSY}
    held = codes.count(0)
    assert len(harness.state.members.consumers) == held
    # What it holds already may come again, and what it gives up makes room.
    assert (await client.heartbeat_with("c", "G0", long)).code == 0
    await client.ask(RequestCode.UNREGISTER_CLIENT, {"clientID": "c", "consumerGroup": "G0"})
    assert (await client.heartbeat_with("c", "G9", long)).code == 0
    assert (await harness.client().heartbeat_with("d", "H", long)).code == 0


async def test_unknown_words_in_requests_are_not_kept(harness: Harness) -> None:
    client = harness.client()
    long = "X" * 100_000
    await client.heartbeat("c", "G", "T", consumeType=long, messageModel=long, consumeFromWhere=long)
    group = harness.state.members.group("G")
    assert group is not None
    assert (group.kind, group.model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert len(group.from_where) < 100


async def test_a_look_at_a_queue_reads_no_message(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.topic("T")
    client = harness.client()
    for _ in range(3):
        await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext("T", properties="TAGS\x01A\x02"), b"x")

    def fail(*arguments: object) -> object:
        raise AssertionError("the log was read on the loop")

    monkeypatch.setattr(type(harness.store.readers), "read", fail)
    ext = {"topic": "T", "queueId": "0", "index": "1", "count": "5"}
    shown = orjson.loads((await client.ask(RequestCode.QUERY_CONSUME_QUEUE, ext)).body)
    assert [entry["tagsCode"] for entry in shown["queueData"]] == [65, 65]


# a pull that waits


async def parked(harness: Harness) -> tuple[FakeClient, int]:
    """A client whose pull waits at the end of queue 1 of topic T."""
    harness.topic("T", queues=2)
    client = harness.client()
    opaque = client.send(RequestCode.PULL_MESSAGE, pull_ext("T", 0, 1, **HOLD))
    await harness.step()
    assert opaque not in client.answers
    return client, opaque


async def came(harness: Harness, client: FakeClient, opaque: int) -> tuple[int, bytes]:
    """The answer to a held pull when a message arrives."""
    harness.store.writer.append(Message("T", b"secret", b"", 1), 1)
    await harness.step()
    answer = client.answers.pop(opaque)
    return answer.code, answer.body


async def test_a_pull_that_waits_ends_with_the_permission_to_read(harness: Harness) -> None:
    client, opaque = await parked(harness)
    harness.broker.topics.update("T", 2, 2, perm=2)
    assert await came(harness, client, opaque) == (ResponseCode.NO_PERMISSION, b"")


async def test_a_pull_that_waits_ends_with_its_groups_permission(harness: Harness) -> None:
    client, opaque = await parked(harness)
    harness.broker.groups.update(Group("G", consume_enable=False))
    assert await came(harness, client, opaque) == (ResponseCode.NO_PERMISSION, b"")


async def test_a_pull_that_waits_gets_what_comes_before_its_queue_is_taken_away(harness: Harness) -> None:
    client, opaque = await parked(harness)
    harness.broker.topics.update("T", 1, 2)  # who may write there is read
    code, body = await came(harness, client, opaque)
    assert (code, b"secret" in body) == (ResponseCode.SUCCESS, True)


async def test_a_pull_that_waits_ends_with_what_authorizers_allow(harness: Harness) -> None:
    client, opaque = await parked(harness)
    harness.broker.authorizers = (lambda identity, action, topic: action != "read",)
    assert await came(harness, client, opaque) == (ResponseCode.NO_PERMISSION, b"")


# what takes long to read


@pytest.mark.parametrize("code", [RequestCode.HEART_BEAT, RequestCode.LOCK_BATCH_MQ])
@pytest.mark.parametrize(
    ("body", "remark"),
    [
        (b"{" + b",".join(b"%d:1" % n for n in range(100_000)) + b"}", "about 100001 values are too many"),
        (b'{"a":[' + b",".join([b"[]"] * 200_000) + b"]}", "values are too many"),
        (b'{"a":"' + bytes(1 << 20) + b'"}', "1048584 bytes are too many"),
    ],
)
async def test_a_body_with_more_than_clients_send_is_not_read(
    harness: Harness, code: int, body: bytes, remark: str
) -> None:
    refused = await harness.client().ask(code, body=body)
    assert refused.code == ResponseCode.SYSTEM_ERROR
    assert remark in (refused.remark or "")


async def test_a_long_heartbeat_in_a_tolerant_dialect_is_read_in_slices(harness: Harness) -> None:
    subscriptions = b",".join(b'{0:1,"topic":"t%d","subString":"*"}' % number for number in range(4000))
    body = b'{"clientID":"c","consumerDataSet":[{"groupName":"G","subscriptionDataSet":[%b]}]}' % subscriptions
    turns = harness.broker.turns
    before = turns.slices
    assert (await harness.client().ask(RequestCode.HEART_BEAT, body=body)).code == 0
    assert turns.slices - before > 20
    assert len(harness.state.members.consumers["G"].subscriptions) == 4000


async def test_a_heartbeat_of_many_groups_registers_them_in_slices(harness: Harness) -> None:
    named = [{"groupName": f"g{number}"} for number in range(1000)]
    turns = harness.broker.turns
    before = turns.slices
    assert (await harness.client().heartbeat_body({"clientID": "c", "consumerDataSet": named})).code == 0
    assert turns.slices - before > 50
    assert len(harness.state.members.consumers) == 1000


async def test_a_lock_of_many_queues_takes_slices_and_holds_all_or_what_it_held(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, locks_peer_max=2000)
    harness.topic("T", 4000)
    client, turns = harness.client(), harness.broker.turns

    async def lock(count: int) -> Command:
        queues = [{"topic": "T", "brokerName": "b", "queueId": n} for n in range(count)]
        body = orjson.dumps({"consumerGroup": "G", "clientId": "c", "mqSet": queues})
        return await client.ask(RequestCode.LOCK_BATCH_MQ, body=body)

    assert (await lock(10)).code == 0
    before = turns.slices
    assert (await lock(3000)).code == ResponseCode.SYSTEM_BUSY
    assert len(harness.state.locks) == 10
    assert len(orjson.loads((await lock(2000)).body)["lockOKMQSet"]) == 2000
    assert turns.slices - before > 10


@pytest.mark.parametrize("kind", ["consumerDataSet", "producerDataSet"])
async def test_a_heartbeat_does_not_name_groups_without_end(open_harness: OpenHarness, kind: str) -> None:
    harness = await open_harness(store={"flush": "async"}, groups_peer_max=10)
    named = [{"groupName": "a/b"} for _ in range(11)]  # none of them can be
    client = harness.client()
    assert (await client.heartbeat_body({"clientID": "c", kind: named})).code == ResponseCode.SYSTEM_BUSY
    assert (await client.heartbeat_body({"clientID": "c", kind: named[1:]})).code == 0


async def test_a_client_does_not_unlock_queues_without_end(harness: Harness) -> None:
    queues = [{"topic": "T", "brokerName": "b", "queueId": n} for n in range(16_385)]
    body = orjson.dumps({"consumerGroup": "G", "clientId": "c", "mqSet": queues})
    answer = await harness.client().ask(RequestCode.UNLOCK_BATCH_MQ, body=body)
    assert answer.code == ResponseCode.INVALID_PARAMETER
