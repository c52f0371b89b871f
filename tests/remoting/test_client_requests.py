"""What the broker asks of clients: requests with answers, and replies that are pushed."""

import pytest
import trio
from trio.testing import MockClock

from martlet.errors import Reason, Refused
from martlet.message import decode_properties
from martlet.records.codec import decode_records
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

from .conftest import FakeClient, Harness, OpenHarness, pull_ext, send_ext

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
PUSH = RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT


def respond(client: FakeClient, request: Command, code: int = 0, body: bytes = b"") -> None:
    client.send_command(Command(code, {}, body, request.opaque, 1))


def ask(client: FakeClient, found: list[Command | None]) -> None:
    client.handler.context.ask(RequestCode.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "G"}, b"?", found.append)


async def test_an_answer_finds_its_question_and_no_other(harness: Harness) -> None:
    client = harness.client()
    found: list[Command | None] = []
    ask(client, found)
    ask(client, found)
    # The client's own numbers are counted apart: this request has the number of our first.
    own = client.send(RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": "0"})
    await harness.step()
    assert (own, client.answers.pop(own).code, found) == (1, 0, [])
    first, second = client.requests
    assert (first.opaque, second.opaque) == (1, 2)
    assert (first.code, first.flag, first.body, first.ext["consumerGroup"]) == (307, 0, b"?", "G")
    respond(client, second, 0, b"two")
    respond(client, second, 0, b"once more")
    respond(client, Command(0, opaque=99))
    assert [answer.body for answer in found if answer] == [b"two"]
    respond(client, first, 1)
    assert [answer.code for answer in found if answer] == [0, 1]
    assert len(harness.state.timeouts) == 0


async def test_a_request_without_an_answer_is_reported(
    harness: Harness, nursery: trio.Nursery, autojump_clock: MockClock
) -> None:
    nursery.start_soon(harness.state.timeouts.run)
    client, going = harness.client(), harness.client()
    late: list[Command | None] = []
    gone: list[Command | None] = []
    ask(client, late)
    ask(going, gone)
    going.close()
    assert gone == [None]
    await trio.sleep(9.9)
    assert late == []
    await trio.sleep(0.5)
    assert late == [None]
    await harness.step()
    respond(client, client.requests[0])
    assert late == [None]


async def test_one_client_is_not_asked_without_end(open_harness: OpenHarness) -> None:
    harness = await open_harness(store={"flush": "async"}, requests_peer_max=2)
    client = harness.client()
    found: list[Command | None] = []
    ask(client, found)
    ask(client, found)
    with pytest.raises(Refused, match=r"remoting\.requests_peer_max is 2") as caught:
        ask(client, found)
    assert caught.value.reason is Reason.BUSY


# replies


def reply_ext(
    properties: str = "CORRELATION_ID\x01c1\x02REPLY_TO_CLIENT\x01asker\x02UNIQ_KEY\x01R1\x02",
) -> dict[str, object]:
    return send_ext(REPLY_TOPIC, 0, properties, g="5", h="3")


async def with_asker(harness: Harness) -> tuple[FakeClient, FakeClient]:
    """The client that waits for a reply, and the one that sends it."""
    harness.topic(REPLY_TOPIC, 1)
    asker, responder = harness.client(), harness.client()
    await asker.heartbeat_body({"clientID": "asker", "producerDataSet": [{"groupName": "P"}]})
    return asker, responder


async def test_a_reply_is_pushed_to_the_requester_and_stored(harness: Harness) -> None:
    asker, responder = await with_asker(harness)
    number = responder.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply_ext(), b"reply")
    await harness.step()
    assert responder.answers == {}
    (pushed,) = asker.requests
    assert (pushed.code, pushed.flag, pushed.body) == (PUSH, 0, b"reply")
    wanted = {
        "producerGroup": "P",
        "topic": REPLY_TOPIC,
        "queueId": "0",
        "sysFlag": "0",
        "bornTimestamp": "5",
        "flag": "3",
        "reconsumeTimes": "0",
        "unitMode": "false",
        "bornHost": responder.peer.address,
        "storeHost": "127.0.0.1:10911",
        "storeTimestamp": str(harness.clock.ms),
    }
    assert {name: pushed.ext[name] for name in wanted} == wanted
    properties = decode_properties(str(pushed.ext["properties"]).encode())
    assert (properties["CORRELATION_ID"], properties["PUSH_REPLY_TIME"]) == ("c1", str(harness.clock.ms))
    respond(asker, pushed)
    await harness.step()
    answer = responder.answers.pop(number)
    assert (answer.code, answer.ext["queueOffset"], answer.ext["transactionId"]) == (0, "0", "R1")
    found = await responder.ask(RequestCode.PULL_MESSAGE, pull_ext(REPLY_TOPIC, 0))
    assert [record.body for record in decode_records(found.body)] == [b"reply"]


async def test_a_reply_that_cannot_be_pushed_is_stored_and_its_sender_gets_an_error(harness: Harness) -> None:
    asker, responder = await with_asker(harness)
    answer = await responder.ask(RequestCode.SEND_REPLY_MESSAGE_V2, reply_ext("REPLY_TO_CLIENT\x01other\x02"), b"reply")
    assert (answer.code, "channel of <other> not found" in str(answer.remark)) == (ResponseCode.SYSTEM_ERROR, True)
    number = responder.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply_ext(), b"reply")
    await harness.step()
    respond(asker, asker.requests.pop(), 1)
    await harness.step()
    assert "it answered 1" in str(responder.answers.pop(number).remark)
    number = responder.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply_ext(), b"reply")
    await harness.step()
    asker.close()
    await harness.step()
    assert "did not answer" in str(responder.answers.pop(number).remark)
    found = await responder.ask(RequestCode.PULL_MESSAGE, pull_ext(REPLY_TOPIC, 0))
    assert len(decode_records(found.body)) == 3


async def test_a_reply_to_a_connection_that_went_meanwhile_harms_nobody(harness: Harness) -> None:
    asker, responder = await with_asker(harness)
    responder.send(RequestCode.SEND_REPLY_MESSAGE_V2, reply_ext(), b"reply")
    await harness.step()
    responder.close()
    respond(asker, asker.requests.pop())
    await harness.step()
    assert (await asker.ask(RequestCode.GET_MAX_OFFSET, {"topic": REPLY_TOPIC, "queueId": "0"})).ext["offset"] == "1"
