"""Queues: each message is with one client, until it is acknowledged."""

from pathlib import Path

import pytest
import trio
from tests.wire_clients.stomp import V1_0, V1_2, Frame, StompClient, stomp_broker

from martlet_stomp.config import StompConfig
from martlet_stomp.wire.packets import Version

QUEUE = "/queue/orders"
BODIES = [b"%d" % number for number in range(6)]

every_version = pytest.mark.parametrize("version", Version)


@every_version
async def test_a_message_comes_whole(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE)
        await talk.publish(QUEUE, b"body \0 with NUL\n", content_length="16", content_type="text/plain", colour="blue")
        (message,) = await talk.messages(1)
        assert message.body == b"body \0 with NUL\n"
        assert dict(message.headers) == {
            "subscription": "0",
            "message-id": "orders-0-0",
            "destination": QUEUE,
            "content-type": "text/plain",
            "content-length": "16",
            "timestamp": message["timestamp"],
            "colour": "blue",
        }


@every_version
async def test_messages_without_a_consumer_wait_for_one_in_order(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.publish(QUEUE, *BODIES)
        other = await stomp.connect(version)
        await other.subscribe(QUEUE)
        assert await other.bodies(6) == BODIES


async def test_a_message_goes_to_one_consumer(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        one, two = await stomp.connect(), await stomp.connect()
        await one.subscribe(QUEUE)
        await two.subscribe(QUEUE)
        sender = await stomp.connect()
        await sender.publish(QUEUE, *BODIES)
        came = [message.body for talk in (one, two) for message in await talk.rest()]
        assert sorted(came) == BODIES


@every_version
async def test_an_individual_acknowledgement_settles_one_message(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, *BODIES)
        messages = await talk.messages(6)
        await talk.ack(messages[1], messages[3], messages[4])
        await talk.disconnect()
        other = await stomp.connect(version)
        await other.subscribe(QUEUE, "client-individual")
        assert await other.bodies(3) == [b"0", b"2", b"5"]
        assert await other.rest() == []


@every_version
async def test_a_cumulative_acknowledgement_settles_the_messages_before(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE, "client")
        await talk.publish(QUEUE, *BODIES)
        messages = await talk.messages(6)
        await talk.ack(messages[1])
        await talk.ack(messages[2], messages[3])
        talk.hang_up()
        other = await stomp.connect(version)
        await other.subscribe(QUEUE)
        assert await other.bodies(2) == [b"4", b"5"]
        assert await other.rest() == []


async def test_a_cumulative_acknowledgement_is_about_one_subscription(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client", "a")
        await talk.subscribe("/queue/others", "client", "b")
        await talk.publish(QUEUE, b"1")
        await talk.publish("/queue/others", b"2")
        messages = await talk.messages(2)
        await talk.ack(*(message for message in messages if message["subscription"] == "b"))
        await talk.disconnect()
        other = await stomp.connect()
        await other.subscribe(QUEUE, name="a")
        await other.subscribe("/queue/others", name="b")
        assert await other.bodies(1) == [b"1"]
        assert await other.rest() == []


async def test_cumulative_acknowledgements_follow_the_order_of_delivery(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.topics.ensure("orders", 3)
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client")
        for number in range(9):
            await stomp.publish("orders", b"%d" % number, queue_id=number % 3)
        messages = await talk.messages(9)
        await talk.ack(messages[4])
        await talk.disconnect()
        other = await stomp.connect()
        await other.subscribe(QUEUE, "client")
        assert sorted(await other.bodies(4)) == sorted(message.body for message in messages[5:])
        assert await other.rest() == []


async def test_unacknowledged_messages_come_again_in_order_and_marked(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish(QUEUE, *BODIES)
        for delivery in range(1, 5):
            again = await stomp.connect()
            await again.subscribe(QUEUE, "client-individual")
            messages = await again.messages(6)
            assert [message.body for message in messages] == BODIES
            marks = {
                (message.headers.get("redelivered"), message.headers.get("delivery-count")) for message in messages
            }
            assert marks == {(None, None) if delivery == 1 else ("true", str(delivery))}
            assert {message["message-id"] for message in messages} == {f"orders-0-{n}" for n in range(6)}
            again.hang_up()


async def test_messages_return_at_unsubscribe(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, *BODIES)
        messages = await talk.messages(6)
        await talk.unsubscribe()
        await talk.publish(QUEUE, b"more")
        assert await talk.rest() == []
        await talk.send(*(talk.settling("ACK", message) for message in messages))  # others have them by now
        other = await stomp.connect()
        await other.subscribe(QUEUE)
        assert await other.bodies(7) == [*BODIES, b"more"]


@every_version
@pytest.mark.parametrize("destination", [QUEUE, "/topic/orders"])
@pytest.mark.parametrize("command", ["ACK", "NACK"])
async def test_only_a_late_acknowledgement_that_asks_for_a_receipt_is_an_error(
    tmp_path: Path, version: Version, command: str, destination: str
) -> None:
    """A client may not know yet that its subscription has ended; a receipt would tell it what is not true."""
    if version is V1_0 and command == "NACK":
        return  # STOMP 1.0 has none
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(destination, "client-individual", "ended")
        await talk.publish(destination, *BODIES[:3])
        late = await talk.messages(3)
        await talk.unsubscribe("ended")
        await talk.subscribe("/queue/others", "client-individual", "open")
        await talk.publish("/queue/others", b"1", b"2")
        held = await talk.messages(2)
        settling = [talk.settling(command, message) for message in (late[0], held[0], late[1], late[2])]
        await talk.send(*settling, talk.settling("ACK", held[1], receipt="held"))
        await talk.receipt("held")
        await talk.send(settling[0], talk.settling(command, late[1], receipt="late"), settling[1])
        error = await talk.error()
        assert error["receipt-id"] == "late"
        assert f"{command} is for message 1-0-1, which the client does not hold" in error["message"]
        assert "its subscription has ended" in error["message"]


async def test_a_late_acknowledgement_in_a_transaction_is_an_error(tmp_path: Path) -> None:
    """COMMIT says that all of the transaction is done."""
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, b"1")
        (message,) = await talk.messages(1)
        await talk.unsubscribe()
        await talk.send(talk.frame("BEGIN", transaction="t"), talk.settling("ACK", message, transaction="t"))
        assert "its subscription has ended" in (await talk.error())["message"]


@every_version
async def test_a_refused_message_comes_again_after_a_pause(
    tmp_path: Path, version: Version, autojump_clock: object
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, *BODIES[:2])
        first, second = await talk.messages(2)
        await talk.send(talk.settling("NACK", first, receipt="n"))
        await talk.receipt("n")
        await talk.ack(second)
        (again,) = await talk.messages(1)
        assert (again.body, again["delivery-count"]) == (b"0", "2")
        await talk.ack(again)
        await talk.disconnect()


async def test_a_message_that_is_refused_too_often_becomes_a_dead_letter(
    tmp_path: Path, autojump_clock: object
) -> None:
    async with stomp_broker(tmp_path, StompConfig(redeliveries_max=2)) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.subscribe("/queue/stomp_dead_letters", name="dead")
        await talk.publish(QUEUE, b"poison", colour="black")
        for delivery in range(1, 4):
            (message,) = await talk.messages(1)
            assert message.headers.get("delivery-count", "1") == str(delivery)
            await talk.nack(message)
        (letter,) = await talk.messages(1)
        assert (letter.body, letter["colour"], letter["subscription"]) == (b"poison", "black", "dead")
        assert letter["original-destination"] == QUEUE
        assert await talk.rest() == []


async def test_a_message_that_must_not_be_requeued_is_dead_at_once(tmp_path: Path, autojump_clock: object) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.subscribe("/queue/stomp_dead_letters", name="dead")
        await talk.publish(QUEUE, b"poison")
        (message,) = await talk.messages(1)
        await talk.nack(message, requeue="false")
        (letter,) = await talk.messages(1)
        assert (letter.body, letter["subscription"]) == (b"poison", "dead")
        assert int(letter["DLQ_ORIGIN_MESSAGE_ID"][16:], 16) == stomp.records("orders")[0].position


@pytest.mark.parametrize("requeue", ["true", "false"])
@pytest.mark.parametrize("destination", ["/queue/stomp_dead_letters", "/topic/stomp_dead_letters"])
async def test_a_refused_dead_letter_stays_where_it_is_until_it_is_acknowledged(
    tmp_path: Path, autojump_clock: object, destination: str, requeue: str
) -> None:
    """A copy at the end of the topic would be refused again, and so on."""
    durable = {"activemq.subscriptionName": "s"} if destination.startswith("/topic/") else {}
    async with stomp_broker(tmp_path, StompConfig(redeliveries_max=2)) as stomp:
        talk = await stomp.connect(client_id="c")
        await talk.subscribe(destination, "client-individual", "dead", **durable)
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, b"poison")
        (message,) = await talk.messages(1)
        await talk.nack(message, requeue="false")
        for delivery in range(1, 10):
            (letter,) = await talk.messages(1)
            assert (letter.body, letter.headers.get("delivery-count", "1")) == (b"poison", str(delivery))
            await talk.nack(letter, requeue=requeue)
        assert [record.body for record in stomp.records("stomp_dead_letters")] == [b"poison"]
        (letter,) = await talk.messages(1)
        await talk.ack(letter)
        await trio.sleep(60)
        assert await talk.rest() == []


async def test_nack_is_cumulative_with_cumulative_acknowledgements(tmp_path: Path, autojump_clock: object) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client")
        await talk.publish(QUEUE, *BODIES)
        messages = await talk.messages(6)
        await talk.nack(messages[2])
        await talk.ack(messages[5])
        again = await talk.messages(3)
        assert [message.body for message in again] == [b"0", b"1", b"2"]
        await talk.ack(again[2])
        assert await talk.rest() == []


async def test_prefetch_bounds_what_a_client_holds(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, StompConfig(prefetch=3)) as stomp:
        sender = await stomp.connect()
        await sender.publish(QUEUE, *BODIES)
        for headers, count in (({}, 3), ({"prefetch_count": "2"}, 2), ({"activemq.prefetchSize": "1"}, 1)):
            talk = await stomp.connect()
            await talk.subscribe(QUEUE, "client-individual", **headers)
            messages = await talk.rest()
            assert [message.body for message in messages] == BODIES[:count]
            talk.hang_up()
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual", prefetch_count="1")
        for body in BODIES:
            (message,) = await talk.messages(1)
            assert message.body == body
            await talk.ack(message)


async def test_without_acknowledgements_prefetch_is_no_bound(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, StompConfig(prefetch=2)) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, prefetch_count="1")
        await talk.publish(QUEUE, *BODIES)
        assert await talk.bodies(6) == BODIES


async def unknown(talk: StompClient, text: str) -> Frame:
    name = "id" if talk.version is V1_2 else "message_id"
    more = {} if talk.version is V1_2 else {"subscription": "0"}
    await talk.send(talk.frame("ACK", receipt="r", **{name: text}, **more))
    error = await talk.error()
    assert error["receipt-id"] == "r"
    return error


@every_version
async def test_an_acknowledgement_of_an_unknown_message_is_an_error(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for text in ("1-0-0", "1-0-1", "1-7-0", "9-0-0", "77", "orders-0-0"):
            talk = await stomp.connect(version)
            await talk.subscribe(QUEUE, "client-individual", prefetch_count="1")
            if text != "1-0-0":
                await talk.publish(QUEUE, b"x")
            error = await unknown(talk, text)
            assert "ACK" in error["message"]


@pytest.mark.parametrize("ack", ["client", "client-individual"])
async def test_a_second_acknowledgement_is_an_error_and_the_others_count(tmp_path: Path, ack: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, ack)
        await talk.publish(QUEUE, *BODIES[:3])
        messages = await talk.messages(3)
        frames = [talk.settling("ACK", each, receipt=each["ack"]) for each in (messages[0], messages[0], messages[2])]
        await talk.send(*frames)
        await talk.receipt(messages[0]["ack"])
        assert (await talk.error())["receipt-id"] == messages[0]["ack"]
        other = await stomp.connect()
        await other.subscribe(QUEUE)
        assert len(await other.rest()) < 3


async def test_an_acknowledged_message_does_not_come_again_after_a_restart(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, *BODIES)
        messages = await talk.messages(6)
        await talk.ack(*messages[:3], messages[4])
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        assert await talk.bodies(2) == [b"3", b"5"]
        assert await talk.rest() == []


async def test_acknowledgements_of_several_subscriptions_in_one_read_all_count(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        names = [f"/queue/q{number}" for number in range(3)]
        for name in names:
            await talk.subscribe(name, "client-individual", name)
            await talk.publish(name, *BODIES[:3])
        messages = await talk.messages(9)
        order = [messages[place] for place in (0, 3, 4, 1, 8, 7, 2, 5, 6)]
        await talk.ack(*order)
        await talk.disconnect()
        other = await stomp.connect()
        for name in names:
            await other.subscribe(name, "client-individual", name)
        assert await other.rest() == []


async def test_a_slow_consumer_leaves_messages_to_others(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        slow, fast = await stomp.connect(), await stomp.connect()
        await slow.subscribe(QUEUE, "client-individual", prefetch_count="2")
        await fast.subscribe(QUEUE, "client-individual", prefetch_count="2")
        sender = await stomp.connect()
        await sender.publish(QUEUE, *BODIES)
        held = await slow.messages(2)
        came: list[bytes] = []
        while len(came) < len(BODIES) - len(held):
            (message,) = await fast.messages(1)
            came.append(message.body)
            await fast.ack(message)
        assert sorted([*came, *(message.body for message in held)]) == BODIES


async def test_messages_that_arrive_together_are_shared_by_the_consumers(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        consumers = [await stomp.connect() for _ in range(3)]
        for talk in consumers:
            await talk.subscribe(QUEUE, "client-individual")
        sender = await stomp.connect()
        await sender.publish(QUEUE, *(b"%d" % number for number in range(30)))
        counts = [len(await talk.rest()) for talk in consumers]
        assert sum(counts) == 30
        assert min(counts) >= 5
