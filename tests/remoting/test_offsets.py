import pytest

from martlet_remoting.consumers.pulled_groups import NAMES_MAX, PulledGroups
from martlet_remoting.handlers import offsets
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, pull_ext, send_ext

QUERY, UPDATE = RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET


async def fill(harness: Harness, topic: str, count: int, *, step_ms: int = 0, queue_id: int = 0) -> None:
    client = harness.client()
    for _ in range(count):
        await client.ask(RequestCode.SEND_MESSAGE_V2, send_ext(topic, queue_id), b"x")
        harness.clock.ms += step_ms
    client.close()


def place(topic: str = "T", queue_id: object = 0, **more: object) -> dict[str, object]:
    return {"consumerGroup": "G", "topic": topic, "queueId": str(queue_id), **more}


async def commit(client: FakeClient, offset: object, **more: object) -> Command:
    return await client.ask(UPDATE, place(commitOffset=str(offset)) | more)


async def query(client: FakeClient, **more: object) -> tuple[int, object]:
    answer = await client.ask(QUERY, place() | more)
    return answer.code, answer.ext.get("offset")


async def test_a_group_gets_back_what_it_committed(harness: Harness) -> None:
    harness.topic("T")
    client, fast = harness.client(), harness.client(fast=True)
    await client.heartbeat("c", "G", "T")
    assert (await commit(client, 5)).code == 0
    assert await query(client) == (0, "5")
    # Backwards as well, by the other port, and without an answer.
    assert (await commit(fast, 3)).code == 0
    assert await query(fast) == (0, "3")
    client.send(UPDATE, place(commitOffset="9"), flag=2)
    assert await query(client) == (0, "9")


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"consumerGroup": "Nobody"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"topic": "Nowhere"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"queueId": "4"}, ResponseCode.INVALID_PARAMETER),
        ({"queueId": "-1"}, ResponseCode.INVALID_PARAMETER),
        ({"queueId": None}, ResponseCode.INVALID_PARAMETER),
        ({"commitOffset": None}, ResponseCode.INVALID_PARAMETER),
        ({"commitOffset": "9" * 30}, ResponseCode.SYSTEM_ERROR),
        ({"consumerGroup": None}, ResponseCode.SYSTEM_ERROR),
    ],
)
async def test_a_commit_that_cannot_be_is_refused(harness: Harness, more: dict[str, object], code: int) -> None:
    harness.topic("T")
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    assert (await commit(client, 1, **more)).code == code
    assert harness.broker.groups.offsets.topics_of("G") == []


@pytest.mark.parametrize("negative", ["-1", "-2", "-9223372036854775808"])
async def test_a_negative_commit_is_accepted_and_keeps_what_was_committed(harness: Harness, negative: str) -> None:
    """ali-ons sends -1 for each queue of which it has consumed nothing."""
    harness.topic("T")
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    assert (await commit(client, negative)).code == 0
    assert harness.broker.groups.offsets.topics_of("G") == []
    assert (await commit(client, 5)).code == 0
    assert (await commit(client, negative)).code == 0
    assert await query(client) == (0, "5")


async def test_a_new_group_begins_a_young_queue_at_its_start(harness: Harness) -> None:
    harness.topic("T")
    client = harness.client()
    assert await query(client) == (0, "0")
    await fill(harness, "T", 3)
    assert await query(client) == (0, "0")
    assert (await query(client, setZeroIfNotFound="false"))[0] == ResponseCode.QUERY_NOT_FOUND
    assert await query(client, topic="Nowhere") == (0, "0")


async def test_a_new_group_decides_itself_on_an_old_queue(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.topic("T")
    await fill(harness, "T", 3)
    client = harness.client()
    monkeypatch.setattr(offsets, "NEAR_BYTES", 500)
    assert (await query(client))[0] == ResponseCode.QUERY_NOT_FOUND
    monkeypatch.setattr(offsets, "NEAR_BYTES", 1 << 30)
    harness.store.queue("T", 0).store_from(1)
    assert (await query(client))[0] == ResponseCode.QUERY_NOT_FOUND


async def test_a_reset_is_answered_to_pulls_and_commits_wait_for_that(harness: Harness) -> None:
    harness.topic("T")
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    await commit(client, 5)
    harness.broker.groups.offsets.reset("G", "T", {0: 2})
    assert await query(client) == (0, "2")
    assert (await commit(client, 7)).code == 0
    assert await query(client) == (0, "2")


async def test_a_queues_end_is_after_what_was_sent_before_and_is_told_once_that_may_be_read(harness: Harness) -> None:
    harness.topic("T")
    await fill(harness, "T", 3)
    client = harness.client()

    async def ask(code: int, **more: object) -> object:
        answer = await client.ask(code, place() | more)
        assert answer.code == 0
        return answer.ext["offset"]

    assert (await ask(RequestCode.GET_MIN_OFFSET), await ask(RequestCode.GET_MAX_OFFSET)) == ("0", "3")
    client.send(RequestCode.SEND_MESSAGE_V2, send_ext("T"), b"not committed yet")
    number = client.send(RequestCode.GET_MAX_OFFSET, place())
    client.receive()
    assert client.answers.pop(number).ext["offset"] == "4"
    assert client.peer.held_until == harness.store.appended
    await harness.step()
    for more in ({"topic": "Nowhere"}, {"queueId": "77"}, {"queueId": "-1"}):
        for code in (RequestCode.GET_MIN_OFFSET, RequestCode.GET_MAX_OFFSET):
            assert await ask(code, **more) == "0"


@pytest.mark.parametrize(
    ("after_ms", "lower", "upper"),
    [(-5, "0", "0"), (0, "0", "0"), (1, "1", "0"), (100, "1", "1"), (150, "2", "1"), (999, "3", "2")],
)
async def test_a_time_is_turned_into_an_offset(harness: Harness, after_ms: int, lower: str, upper: str) -> None:
    harness.topic("T")
    begin = harness.clock.ms
    await fill(harness, "T", 3, step_ms=100)
    client = harness.client()
    for boundary, expected in ((None, lower), ("LOWER", lower), ("UPPER", upper), ("upper", upper)):
        ext = place(timestamp=str(begin + after_ms), boundaryType=boundary)
        answer = await client.ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, ext)
        assert (answer.code, answer.ext["offset"]) == (0, expected)


@pytest.mark.parametrize("what", ["by time", "of a new group", "oldest time"])
async def test_what_a_damaged_block_says_is_answered_once_it_is_repaired(harness: Harness, what: str) -> None:
    harness.topic("T")
    begin = harness.clock.ms
    await fill(harness, "T", 200, step_ms=100)
    store = harness.store
    queue = store.queue("T", 0)
    await store.flusher.flush()
    await store.upkeep.checkpointer.checkpoint()
    store.queues.save(queue, store.durable)  # what was saved before leaves the memory
    assert queue.tail_offset > 100
    path = store.queues.files.path_of(queue, 0)
    store.segments.files.write(path, b"\x77", 5 * 20 + 7)
    store.queues.forget_blocks(queue)
    code, ext, name, expected = {
        "by time": (RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, {"timestamp": str(begin + 500)}, "offset", "5"),
        "of a new group": (QUERY, {}, "offset", "0"),
        "oldest time": (RequestCode.GET_EARLIEST_MSG_STORETIME, {}, "timestamp", str(begin)),
    }[what]
    client = harness.client()
    number = client.send(code, place(**ext))
    client.receive()
    assert client.answers == {}, "the repair reads the log, which must not stop the event loop"
    while number not in client.answers:
        await harness.step()
    answer = client.answers.pop(number)
    assert (answer.code, answer.ext[name]) == (0, expected)


async def test_a_time_on_a_queue_nobody_used_is_0(harness: Harness) -> None:
    answer = await harness.client().ask(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, place("Nowhere", timestamp="5"))
    assert (answer.code, answer.ext["offset"]) == (0, "0")


async def test_the_time_of_the_oldest_message_is_answered(harness: Harness) -> None:
    harness.topic("T")
    begin = harness.clock.ms
    client = harness.client()
    code = RequestCode.GET_EARLIEST_MSG_STORETIME
    assert (await client.ask(code, place())).ext["timestamp"] == "-1"
    await fill(harness, "T", 2, step_ms=50)
    assert (await client.ask(code, place())).ext["timestamp"] == str(begin)


async def test_authorizers_are_asked_for_offsets_too(harness: Harness) -> None:
    harness.topic("T")
    client = harness.client()
    await client.heartbeat("c", "G", "T")
    harness.broker.authorizers = (lambda identity, action, topic: False,)
    for code in offsets.TABLE:
        ext = place(commitOffset="1", timestamp="1")
        assert (await client.ask(code, ext)).code == ResponseCode.NO_PERMISSION


async def test_who_pulls_without_a_heartbeat_can_commit(harness: Harness) -> None:
    await fill(harness, "T", 2)
    client, other = harness.client(), harness.client()
    for offset in (2, -1):
        assert (await commit(other, offset)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert (await client.ask(RequestCode.PULL_MESSAGE, pull_ext("T", 0))).code == 0
    assert harness.broker.groups.get("G") is None, "anybody can pull with any name"
    assert (await commit(other, -1)).code == 0
    assert harness.broker.groups.get("G") is None
    assert (await commit(other, 2)).code == 0
    assert harness.broker.groups.get("G") is not None
    assert await query(client) == (0, "2")


def test_the_names_of_groups_that_pulled_are_limited() -> None:
    groups = PulledGroups()
    for number in range(NAMES_MAX + 1):
        groups.add(str(number))
        groups.add("0")
    assert ("0" in groups, "1" in groups, "2" in groups) == (True, False, True)
