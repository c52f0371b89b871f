"""Requests and replies between clients of STOMP and of other protocols."""

from pathlib import Path

import pytest
from tests.wire_clients.stomp import StompBroker, stomp_broker

from martlet.access import Gate
from martlet.contracts import Identity
from martlet.errors import Reason, Refused
from martlet.message import Message, Placed, decode_properties, encode_properties
from martlet.records.compression import compress

ANYBODY = Identity("server")
ADDRESS = "192.0.2.1@7#8:9%"


class Requesters:
    """Clients of another protocol; those with `ADDRESS` wait for replies."""

    def __init__(self, stomp: StompBroker) -> None:
        self.replies: list[Message] = []
        stomp.broker.replies.add("", self._take)

    def _take(self, gate: Gate, address: str, reply: Message) -> Placed:
        if address != ADDRESS:
            raise Refused(Reason.NOT_FOUND, "nobody waits")
        self.replies.append(reply)
        return Placed(0, 0, 0, 0, 0)


async def ask(stomp: StompBroker, **more: str) -> None:
    """Send a request of another protocol."""
    properties = {"CORRELATION_ID": "c 1", "REPLY_TO_CLIENT": ADDRESS, "CLUSTER": "x", "TTL": "3000", **more}
    await stomp.publish("work", b"question", encode_properties(properties))


async def test_a_client_of_stomp_answers_one_of_another_protocol(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        requesters, server = Requesters(stomp), await stomp.connect()
        await server.subscribe("/queue/work")
        await ask(stomp)
        (question,) = await server.messages(1)
        assert question["correlation-id"] == "c 1"
        assert not {"CLUSTER", "TTL", "REPLY_TO_CLIENT"} & set(question.headers)
        await server.publish(
            question["reply-to"], b"answer", correlation_id=question["correlation-id"], colour="red", KEYS="k"
        )
        (reply,) = requesters.replies
        assert reply.body == b"answer"
        assert decode_properties(reply.properties) == {"CORRELATION_ID": "c 1", "colour": "red", "KEYS": "k"}


async def test_a_requester_that_does_not_wait_any_more_is_no_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        Requesters(stomp)
        server = await stomp.connect()
        await server.publish("/reply/192.0.2.2@1", b"answer", correlation_id="1")
        assert stomp.context.statistics()["unanswered"] == 1


async def test_a_reply_needs_the_correlation_id(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        server = await stomp.connect()
        await server.send(server.frame("SEND", b"answer", destination="/reply/192.0.2.2@1", receipt="r"))
        error = await server.error()
        assert error["receipt-id"] == "r"
        assert b"send that of the request" in error.body


async def test_a_reply_to_another_protocol_cannot_be_in_a_transaction(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        server = await stomp.connect()
        await server.send(
            server.frame("BEGIN", transaction="t"),
            server.frame("SEND", destination="/reply/a", correlation_id="1", transaction="t", receipt="r"),
        )
        error = await server.error()
        assert error["receipt-id"] == "r"
        assert "transaction" in error["message"]


async def test_the_address_can_be_passed_on(tmp_path: Path) -> None:
    """A STOMP client asks another one to answer its own requester."""
    async with stomp_broker(tmp_path) as stomp:
        requesters, front, back = Requesters(stomp), await stomp.connect(), await stomp.connect()
        await front.subscribe("/queue/work")
        await back.subscribe("/queue/back")
        await ask(stomp)
        (question,) = await front.messages(1)
        same = {"reply_to": question["reply-to"], "correlation_id": question["correlation-id"]}
        await front.publish("/queue/back", question.body, **same)
        (question,) = await back.messages(1)
        await back.publish(question["reply-to"], b"answer", correlation_id=question["correlation-id"])
        assert [reply.body for reply in requesters.replies] == [b"answer"]


# the other way


def reply_to(stomp: StompBroker, topic: str, body: bytes = b"answer", sys_flag: int = 0, **properties: str) -> None:
    """Answer the last message of *topic* as clients of RocketMQ do, and store that."""
    request = decode_properties(stomp.records(topic)[-1].properties)
    address, correlation = request["REPLY_TO_CLIENT"], request["CORRELATION_ID"]
    kept = {"CORRELATION_ID": correlation, "MSG_TYPE": "reply", "TTL": request["TTL"], "CLUSTER": request["CLUSTER"]}
    message = Message("", body, encode_properties({**kept, **properties}), 0, 0, sys_flag)
    stomp.broker.gate(ANYBODY).reply(address, message)


@pytest.mark.parametrize("reply", ["/queue/answers", "/topic/answers", "/temp-queue/answers", "/temp-topic/a b"])
@pytest.mark.parametrize("correlation", ["c:1", None])
async def test_a_client_of_another_protocol_answers_one_of_stomp(
    tmp_path: Path, reply: str, correlation: str | None
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe(reply)
        more = {"correlation_id": correlation} if correlation is not None else {}
        await client.publish("/queue/work", b"question", reply_to=reply, **more)
        await stomp.settle()
        reply_to(stomp, "work", colour="red", KEYS="k", CONTENT_TYPE="text/plain")
        await stomp.settle()
        (answer,) = await client.messages(1)
        assert (answer.body, answer["destination"]) == (b"answer", reply)
        assert answer.headers.get("correlation-id") == correlation
        assert (answer["colour"], answer["KEYS"], answer["content-type"]) == ("red", "k", "text/plain")
        assert not {"MSG_TYPE", "TTL", "CLUSTER", "TAGS"} & set(answer.headers)


async def test_a_compressed_answer_is_decompressed(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.publish("/queue/work", b"question", reply_to="/temp-queue/a")
        await stomp.settle()
        reply_to(stomp, "work", *compress(b"answer" * 100))
        await stomp.settle()
        assert await client.bodies(1) == [b"answer" * 100]


async def test_the_answer_for_a_connection_that_is_gone_is_refused(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.publish("/queue/work", b"question", reply_to="/temp-queue/a")
        await client.disconnect()
        with pytest.raises(Refused) as refused:
            reply_to(stomp, "work")
        assert refused.value.reason is Reason.NOT_FOUND


async def test_who_answers_needs_the_permission_to_send_there(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.publish("/queue/work", b"question", reply_to="/queue/secret")
        await stomp.settle()
        stomp.broker.authorizers = (lambda identity, action, name: name != "secret",)
        with pytest.raises(Refused) as refused:
            reply_to(stomp, "work")
        assert refused.value.reason is Reason.NO_PERMISSION


@pytest.mark.parametrize(
    "address",
    [
        "stomp:",
        "stomp:text:",
        "stomp:text:/queue/",
        "stomp:text:/reply/a",
        "stomp:text:/queue/stomp_temp",
        "stomp:x:/y",
    ],
)
async def test_an_address_that_the_broker_did_not_make_is_refused(tmp_path: Path, address: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        with pytest.raises(Refused) as refused:
            stomp.broker.gate(ANYBODY).reply(address, Message("", b"", encode_properties({"CORRELATION_ID": "1"})))
        assert refused.value.reason is Reason.ILLEGAL


async def test_a_reply_to_of_another_broker_is_passed_on(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        client = await stomp.connect()
        await client.subscribe("/queue/a")
        await client.publish("/queue/a", b"", reply_to="/elsewhere/amq.direct/x", correlation_id="1")
        (message,) = await client.messages(1)
        assert (message["reply-to"], message["correlation-id"]) == ("/elsewhere/amq.direct/x", "1")
        assert b"REPLY_TO_CLIENT" not in stomp.records("a")[0].properties
