"""Messages, acknowledgements, transactions, receipts and heart-beats: what takes a broker to show."""

import re
from pathlib import Path

import pytest
import trio
from tests.stomp.normative import statement
from tests.wire_clients.stomp import V1_0, V1_1, V1_2, Frame, StompBroker, StompClient, frame, stomp_broker
from trio.testing import MockClock

from martlet_stomp.wire.packets import Version

LATER = pytest.mark.parametrize("version", [V1_1, V1_2])
ALL = pytest.mark.parametrize("version", list(Version))
QUEUE = "/queue/a"


async def held(stomp: StompBroker, version: Version, ack: str, count: int) -> tuple[StompClient, list[Frame]]:
    """Return a client that holds *count* messages of `QUEUE`, whose bodies are their numbers."""
    sender, talk = await stomp.connect(version), await stomp.connect(version)
    await sender.publish(QUEUE, *[b"%d" % each for each in range(count)])
    await talk.subscribe(QUEUE, ack)
    return talk, await talk.messages(count)


async def left(stomp: StompBroker) -> list[tuple[bytes, bool]]:
    """Return what another client gets of `QUEUE`, and whether it is marked as redelivered."""
    talk = await stomp.connect()
    await talk.subscribe(QUEUE, "client-individual", prefetch_count="100")
    found = [(each.body, each.headers.get("redelivered") == "true") for each in await talk.rest()]
    await talk.disconnect()
    return found


# connecting


@statement(V1_0, "connect-1", "connect-2")
@statement(V1_1, "connect-1", "CONNECTED-1", "CONNECTED-2")
@statement(V1_2, "connect-1", "CONNECTED-1", "CONNECTED-2")
@ALL
async def test_connect_is_answered_with_connected(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sessions = set()
        for _ in range(3):
            _, connected = await stomp.answer(version)
            assert connected.command == "CONNECTED"
            assert connected["version"] == version.text
            assert re.fullmatch(r"[A-Za-z]+(/\S+)?( .*)?", connected["server"])
            sessions.add(connected["session"])
        assert len(sessions) == 3


@statement(V1_1, "connect-3")
@statement(V1_2, "connect-3")
@LATER
async def test_clients_may_connect_and_disconnect_rapidly(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for round_ in range(200):
            talk = stomp.open(version)
            await talk.send(
                frame("CONNECT", accept_version=version.text, host="h"),
                talk.frame("SEND", b"x", destination=QUEUE),
                *([talk.frame("DISCONNECT", receipt="bye")] if round_ % 2 else []),
            )
            if round_ % 2:
                assert (await talk.expect("CONNECTED"))["version"] == version.text
                await talk.receipt("bye")
            else:
                assert (await talk.receive()).command == "CONNECTED"
                talk.hang_up()
        last = await stomp.connect(version)
        await last.publish(QUEUE, b"x")
        assert len(stomp.records("a")) == 201
        await last.disconnect()
        assert not stomp.context.clients


@statement(V1_0, "DISCONNECT-1")
@statement(V1_2, "RECEIPT-2", "RECEIPT-3")
@ALL
async def test_disconnect_ends_the_connection_after_all_that_came_before(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        sends = [talk.frame("SEND", b"%d" % each, destination=QUEUE) for each in range(2000)]
        await talk.send(*sends, talk.frame("DISCONNECT", receipt="77"))
        await talk.receipt("77")
        assert await talk.is_closed()
        assert len(stomp.records("a")) == 2000
        gone = await stomp.connect(version)
        await gone.send(gone.frame("SEND", b"last", destination="/queue/b"))
        gone.hang_up()
        await (await stomp.connect()).publish("/queue/c", b"x")
        assert [record.body for record in stomp.records("b")] == [b"last"]


# messages


@statement(V1_0, "SUBSCRIBE-2", "SUBSCRIBE-7", "MESSAGE-1", "MESSAGE-2", "MESSAGE-3", "MESSAGE-4")
@statement(V1_1, "SUBSCRIBE-2", "MESSAGE-1", "MESSAGE-2", "SEND-2", "content-length-4", "content-type-1")
@statement(V1_2, "SUBSCRIBE-2", "MESSAGE-1", "MESSAGE-2", "MESSAGE-3", "MESSAGE-4", "SEND-2")
@statement(V1_2, "content-length-4", "content-type-1")
@pytest.mark.parametrize("destination", ["/queue/a", "/topic/a", "a", "/queue/with spaces:ä"])
@pytest.mark.parametrize("ack", ["auto", "client", "client-individual"])
@ALL
async def test_a_message_says_where_it_was_sent_and_what_it_is(
    tmp_path: Path, version: Version, destination: str, ack: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(destination, ack, "the subscription")
        bodies = [b"one\0two", b"", b"\n\n\0"]
        user = {"foo": "World", "content_type": "text/plain", "Foo": "other"}
        for body in bodies:
            await talk.publish(destination, body, content_length=str(len(body)), **user)
        found = await talk.messages(3)
        assert [message.body for message in found] == bodies
        assert len({message["message-id"] for message in found}) == 3
        for message in found:
            assert message["destination"] == destination
            assert message["subscription"] == "the subscription"
            assert (message["foo"], message["Foo"], message["content-type"]) == ("World", "other", "text/plain")
            assert message["content-length"] == str(len(message.body))
            assert ("ack" in message.headers) == (version is V1_2 and ack != "auto")


@statement(V1_0, "UNSUBSCRIBE-1")
@statement(V1_1, "UNSUBSCRIBE-1", "UNSUBSCRIBE-2")
@statement(V1_2, "UNSUBSCRIBE-1", "UNSUBSCRIBE-2")
@pytest.mark.parametrize("destination", ["/queue/a", "/topic/a"])
@ALL
async def test_nothing_comes_after_unsubscribe(tmp_path: Path, version: Version, destination: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(destination)
        await talk.publish(destination, b"before")
        assert await talk.bodies(1) == [b"before"]
        await talk.unsubscribe()
        await talk.publish(destination, b"after")
        assert await talk.rest() == []
        await talk.send(talk.frame("UNSUBSCRIBE", id="none", receipt="r"))
        assert (await talk.error())["receipt-id"] == "r"


@statement(V1_1, "SEND-3", "ERROR-3")
@statement(V1_2, "SEND-3", "ERROR-3")
@ALL
@pytest.mark.parametrize("destination", ["/nowhere/a", "/queue/", "/topic/", "/queue/" + "x" * 500])
async def test_a_send_that_cannot_be_processed_ends_the_connection(
    tmp_path: Path, version: Version, destination: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        after = talk.frame("SEND", b"after", destination=QUEUE)
        await talk.send(talk.frame("SEND", b"x", destination=destination, receipt="r"), after)
        assert (await talk.error())["receipt-id"] == "r"
        assert stomp.records("a") == []


@statement(V1_1, "SUBSCRIBE-3", "ERROR-3")
@statement(V1_2, "SUBSCRIBE-3", "SUBSCRIBE-10", "ERROR-3")
@ALL
@pytest.mark.parametrize(
    "headers",
    [
        {"id": "1", "destination": "/nowhere/a"},
        {"id": "1", "destination": "/queue/"},
        {"id": "0", "destination": "/queue/b"},  # the id of another subscription
        {"id": "1", "destination": "/queue/b", "selector": "a ==> 1"},
    ],
)
async def test_a_subscription_that_cannot_be_created_ends_the_connection(
    tmp_path: Path, version: Version, headers: dict[str, str]
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE)
        await talk.send(talk.frame("SUBSCRIBE", receipt="r", **headers))
        assert (await talk.error())["receipt-id"] == "r"


# acknowledgements


@statement(V1_0, "SUBSCRIBE-5")
@statement(V1_1, "SUBSCRIBE-8")
@statement(V1_2, "SUBSCRIBE-8")
@ALL
async def test_with_ack_client_an_acknowledgement_counts_for_earlier_messages(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, messages = await held(stomp, version, "client", 5)
        await talk.ack(messages[2])
        talk.hang_up()
        assert await left(stomp) == [(b"3", True), (b"4", True)]


@statement(V1_1, "SUBSCRIBE-9")
@statement(V1_2, "SUBSCRIBE-9")
@LATER
async def test_with_ack_client_individual_an_acknowledgement_counts_for_one_message(
    tmp_path: Path, version: Version
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, messages = await held(stomp, version, "client-individual", 5)
        await talk.ack(messages[3], messages[1])
        talk.hang_up()
        assert await left(stomp) == [(b"0", True), (b"2", True), (b"4", True)]


@statement(V1_0, "SUBSCRIBE-3")
@statement(V1_1, "SUBSCRIBE-6")
@statement(V1_2, "SUBSCRIBE-6")
@ALL
async def test_without_ack_a_message_is_consumed_when_it_is_sent(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.publish(QUEUE, b"0", b"1")
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination=QUEUE))
        assert await talk.bodies(2) == [b"0", b"1"]
        talk.hang_up()
        assert await left(stomp) == []


@statement(V1_1, "NACK-2")
@statement(V1_2, "NACK-2")
@LATER
@pytest.mark.parametrize(("ack", "again"), [("client", [b"0", b"1", b"2"]), ("client-individual", [b"2"])])
async def test_nack_counts_for_one_message_or_for_earlier_ones_too(
    tmp_path: Path, version: Version, ack: str, again: list[bytes], autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, messages = await held(stomp, version, ack, 5)
        await talk.nack(messages[2])
        back = await talk.messages(len(again))
        assert [message.body for message in back] == again
        assert {message["redelivered"] for message in back} == {"true"}
        await trio.sleep(60)
        assert await talk.rest() == []


# transactions


@statement(V1_0, "BEGIN-1")
@statement(V1_1, "BEGIN-3")
@statement(V1_2, "BEGIN-3", "BEGIN-4")
@ALL
@pytest.mark.parametrize("end", ["COMMIT", "ABORT"])
async def test_a_transaction_is_done_as_a_whole_or_not_at_all(tmp_path: Path, version: Version, end: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, messages = await held(stomp, version, "client-individual", 2)
        await talk.send(
            talk.frame("BEGIN", transaction="t"),
            talk.frame("SEND", b"new", destination="/queue/b", transaction="t"),
            talk.settling("ACK", messages[0], transaction="t"),
            talk.frame("SEND", b"newer", destination="/queue/c", transaction="t"),
        )
        assert await talk.rest() == []
        assert stomp.records("b") == stomp.records("c") == []
        await talk.send(talk.frame(end, transaction="t", receipt="end"))
        await talk.receipt("end")
        is_done = end == "COMMIT"
        assert [record.body for record in stomp.records("b")] == [b"new"] * is_done
        assert [record.body for record in stomp.records("c")] == [b"newer"] * is_done
        talk.hang_up()
        assert await left(stomp) == [(b"0", True)] * (not is_done) + [(b"1", True)]
        again = await stomp.connect(version)
        begin = again.frame("BEGIN", transaction="t", receipt="r")
        await again.send(begin)
        await again.receipt("r")
        await again.send(begin)  # there is one of this name
        assert (await again.error())["receipt-id"] == "r"


@statement(V1_0, "COMMIT-1", "ABORT-1")
@statement(V1_1, "COMMIT-1", "ABORT-1")
@statement(V1_2, "COMMIT-1", "ABORT-1")
@ALL
@pytest.mark.parametrize("command", ["COMMIT", "ABORT", "SEND", "ACK"])
async def test_a_transaction_that_did_not_begin_is_an_error(tmp_path: Path, version: Version, command: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, messages = await held(stomp, version, "client", 1)
        named = {"transaction": "none", "receipt": "r"}
        sent = talk.settling("ACK", messages[0], **named)
        if command != "ACK":
            more = {"destination": QUEUE} if command == "SEND" else {}
            sent = talk.frame(command, **named, **more)
        await talk.send(sent)
        assert (await talk.error())["receipt-id"] == "r"


@statement(V1_1, "BEGIN-2")
@statement(V1_2, "BEGIN-2")
@LATER
@pytest.mark.parametrize("end", ["DISCONNECT", "hang up", "error"])
async def test_a_transaction_is_aborted_when_the_connection_ends(tmp_path: Path, version: Version, end: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk, messages = await held(stomp, version, "client", 1)
        await talk.send(
            talk.frame("BEGIN", transaction="t"),
            talk.frame("SEND", b"new", destination="/queue/b", transaction="t"),
            talk.settling("ACK", messages[0], transaction="t"),
        )
        if end == "DISCONNECT":
            await talk.disconnect()
        elif end == "error":
            await talk.send(talk.frame("BAD"))
            await talk.error()
        else:
            await talk.rest()
            talk.hang_up()
        assert await left(stomp) == [(b"0", True)]
        assert stomp.records("b") == []


# receipts


@statement(V1_0, "receipt-1")
@statement(V1_1, "receipt-1")
@statement(V1_2, "receipt-1")
@ALL
async def test_every_frame_but_connect_may_ask_for_a_receipt(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        sender = await stomp.connect()
        await sender.publish(QUEUE, b"0", b"1")
        talk, connected = await stomp.answer(version, receipt="none")
        assert connected.command == "CONNECTED"
        await talk.send(
            talk.frame("SEND", b"x", destination="/queue/b", receipt="send"),
            talk.frame("SUBSCRIBE", id="0", destination=QUEUE, ack="client-individual", receipt="subscribe"),
            talk.frame("BEGIN", transaction="t", receipt="begin"),
            talk.frame("COMMIT", transaction="t", receipt="commit"),
            talk.frame("BEGIN", transaction="t", receipt="begin again"),
            talk.frame("ABORT", transaction="t", receipt="abort"),
        )
        for receipt in ("send", "subscribe", "begin", "commit", "begin again", "abort"):
            await talk.receipt(receipt)
        first, second = await talk.messages(2)
        await talk.send(
            talk.settling("ACK", first, receipt="ack"),
            talk.settling("NACK", second, receipt="nack"),
            talk.frame("UNSUBSCRIBE", id="0", receipt="unsubscribe"),
            talk.frame("DISCONNECT", receipt="disconnect"),
        )
        for receipt in ("ack", "nack", "unsubscribe", "disconnect"):
            await talk.receipt(receipt)
        assert await talk.is_closed()


# heart-beats


@statement(V1_1, "beats-4")
@statement(V1_2, "beats-4")
@LATER
async def test_an_idle_client_gets_line_feeds_in_time(
    tmp_path: Path, version: Version, autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version, heart_beat="0,1000")
        heard = trio.current_time()
        for _ in range(20):
            assert set(await talk.wire.receive_some()) == set(b"\n")
            assert trio.current_time() - heard <= 1.0
            heard = trio.current_time()
