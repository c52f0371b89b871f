"""Who may send, subscribe and receive: asked on every path, and again when rights are withdrawn."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from tests.wire_clients.stomp import StompBroker, StompClient, stomp_broker

from martlet.contracts import Identity

# What the tests themselves need.
ALWAYS = ("* read probe",)
GROUPS = "* read $share/stomp/*"


class Room:
    """A broker with rights such as ``ann publish orders``, in which ``*`` stands for anything."""

    def __init__(self, stomp: StompBroker) -> None:
        self.stomp = stomp
        self._rights: tuple[str, ...] = ALWAYS
        for topic in ("orders", "mqtt", "probe"):
            stomp.broker.topics.ensure(topic, 1)
        stomp.broker.authorizers = (self._opinion,)

    def allow(self, *rights: str) -> None:
        """Have these rights and no others."""
        self._rights = rights + ALWAYS
        self.stomp.broker.rules.changed()

    def _opinion(self, identity: Identity, action: str, name: str) -> bool | None:
        asked = f"{identity.name} {action} {name}"
        return True if any(fnmatchcase(asked, right.replace("[", "[[]")) for right in self._rights) else None


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with room_of(tmp_path) as found:
        yield found


@asynccontextmanager
async def room_of(directory: Path) -> AsyncIterator[Room]:
    async with stomp_broker(directory) as stomp:
        yield Room(stomp)


async def refused(talk: StompClient, *frames: bytes, receipt: str = "r") -> str:
    """Send *frames*, and return the message of the ERROR for the one with *receipt*."""
    await talk.send(*frames)
    while (error := await talk.receive()).command == "RECEIPT":
        pass
    assert (error.command, error["receipt-id"]) == ("ERROR", receipt)
    assert await talk.is_closed()
    return error["message"]


# to send


async def one(talk: StompClient, destination: str) -> str:
    return await refused(talk, talk.frame("SEND", b"x", destination=destination, receipt="r"))


async def in_a_run(talk: StompClient, destination: str) -> str:
    frames = [talk.frame("SEND", b"x", destination=destination) for _ in range(3)]
    return await refused(talk, talk.frame("SEND", b"x", destination=destination, receipt="r"), *frames)


async def in_a_transaction(talk: StompClient, destination: str) -> str:
    return await refused(
        talk,
        talk.frame("BEGIN", transaction="t"),
        talk.frame("SEND", b"x", destination="/queue/allowed", transaction="t"),
        talk.frame("SEND", b"x", destination=destination, transaction="t", receipt="r"),
        talk.frame("COMMIT", transaction="t", receipt="r"),
    )


@pytest.mark.parametrize("way", [one, in_a_run, in_a_transaction])
@pytest.mark.parametrize(
    "destination",
    ["/queue/orders", "/topic/orders", "/topic/mqtt/garden", "/queue/new", "/amq/queue/orders", "/amq/queue/new"],
)
async def test_a_message_that_may_not_be_sent_is_an_error_and_not_stored(
    room: Room, way: Callable[[StompClient, str], str], destination: str
) -> None:
    room.allow("ann publish mqtt/home/*", "ann publish allowed")
    ann = await room.stomp.connect_as("ann")
    assert "'ann' may not publish to" in await way(ann, destination)  # type: ignore[misc]
    for topic in ("orders", "mqtt", "allowed"):
        assert room.stomp.records(topic) == []
    assert room.stomp.broker.topics.get("new") is None


async def test_a_run_is_stored_up_to_the_message_that_may_not_be_sent(room: Room) -> None:
    room.allow("ann publish mqtt/home/*")
    ann = await room.stomp.connect_as("ann")
    names = ["home/a", "home/b", "garden", "home/c"]
    await ann.send(*(ann.frame("SEND", b"x", destination=f"/topic/mqtt/{name}", receipt=name) for name in names))
    await ann.receipt("home/a")
    await ann.receipt("home/b")
    assert (await ann.error())["receipt-id"] == "garden"
    assert len(room.stomp.records("mqtt")) == 2


async def test_a_refused_transaction_leaves_what_it_acknowledged(room: Room) -> None:
    room.allow("ann read orders", GROUPS, "ann publish orders")
    ann = await room.stomp.connect_as("ann")
    await ann.subscribe("/queue/orders", "client-individual")
    await ann.publish("/queue/orders", b"x")
    (message,) = await ann.messages(1)
    await ann.send(
        ann.frame("BEGIN", transaction="t"),
        ann.settling("ACK", message, transaction="t"),
        ann.frame("SEND", b"x", destination="/queue/orders", transaction="t", receipt="sent"),
    )
    await ann.receipt("sent")
    await ann.rest()
    room.allow("ann read orders", GROUPS)
    await ann.send(ann.frame("COMMIT", transaction="t", receipt="r"))
    assert (await ann.error())["receipt-id"] == "r"
    ann = await room.stomp.connect_as("ann")
    await ann.subscribe("/queue/orders", "client-individual")
    assert await ann.bodies(1) == [b"x"]


# to subscribe


@pytest.mark.parametrize(
    ("rights", "headers"),
    [
        ([GROUPS], {"destination": "/queue/orders"}),
        (["ann read orders"], {"destination": "/queue/orders"}),
        ([GROUPS], {"destination": "/topic/orders"}),
        ([GROUPS], {"destination": "/topic/orders", "durable": "true"}),
        (["ann read orders"], {"destination": "/topic/orders", "durable": "true"}),
        ([GROUPS], {"destination": "/queue/orders", "browser": "true"}),
        (["ann read mqtt/home/*"], {"destination": "/topic/mqtt/#"}),
        (["ann read mqtt/home/*"], {"destination": "/topic/mqtt"}),
        (["ann read mqtt/home/*", GROUPS], {"destination": "/queue/mqtt/garden"}),
        (["ann read mqtt/home/*"], {"destination": "/queue/mqtt/home/door"}),
        (["ann read stomp_temp/bob/*"], {"destination": "/temp-queue/a"}),
        (["ann read stomp_temp/bob/*"], {"destination": "/temp-topic/a"}),
        ([GROUPS], {"destination": "/queue/new"}),
        ([GROUPS], {"destination": "/amq/queue/orders"}),
        ([GROUPS], {"destination": "/amq/queue/new"}),
    ],
)
async def test_a_subscription_needs_the_right_to_read(room: Room, rights: list[str], headers: dict[str, str]) -> None:
    room.allow(*rights)
    ann = await room.stomp.connect_as("ann")
    assert "'ann' may not" in await refused(ann, ann.frame("SUBSCRIBE", id="1", receipt="r", **headers))
    assert room.stomp.broker.topics.get("new") is None


@pytest.mark.parametrize(
    ("rights", "headers"),
    [
        (["read orders", "read $share/stomp/queue"], {"destination": "/queue/orders"}),
        (["read mqtt/home/+", "read $share/stomp/queue/home/+"], {"destination": "/queue/mqtt/home/+"}),
        (["read orders"], {"destination": "/topic/orders"}),
        (["read orders", "read $share/stomp/queue"], {"destination": "/queue/orders", "browser": "true"}),
        (["read mqtt/home/+"], {"destination": "/topic/mqtt/home/+"}),
        (["read orders", "read $share/stomp/topic/ann//1"], {"destination": "/topic/orders", "durable": "true"}),
        (["read stomp_temp/ann/*/queue/a"], {"destination": "/temp-queue/a"}),
        (["read stomp_temp/ann/*/topic/a"], {"destination": "/temp-topic/a"}),
    ],
)
async def test_these_rights_are_enough_to_subscribe_and_each_is_needed(
    room: Room, rights: list[str], headers: dict[str, str]
) -> None:
    for missing in (*rights, None):
        room.allow(*(f"ann {right}" for right in rights if right != missing))
        ann = await room.stomp.connect_as("ann")
        frame = ann.frame("SUBSCRIBE", id="1", receipt="r", **headers)
        if missing is None:
            await ann.send(frame)
            await ann.receipt("r")
        else:
            assert "'ann' may not subscribe to" in await refused(ann, frame)


async def test_a_durable_subscription_belongs_to_its_user(room: Room) -> None:
    room.allow("* read orders", "* publish orders", GROUPS)
    durable = {"durable": "true", "auto_delete": "false"}
    ann, bob = await room.stomp.connect_as("ann"), await room.stomp.connect_as("bob")
    await ann.subscribe("/topic/orders", **durable)
    await bob.subscribe("/topic/orders", **durable)
    await ann.publish("/topic/orders", b"x")
    assert await ann.bodies(1) == await bob.bodies(1) == [b"x"]


async def test_who_may_send_to_a_queue_need_not_read_it(room: Room) -> None:
    room.allow("ann publish orders", "bob read orders", GROUPS)
    ann, bob = await room.stomp.connect_as("ann"), await room.stomp.connect_as("bob")
    await bob.subscribe("/queue/orders", "client-individual")
    await ann.publish("/queue/orders", b"x")
    (message,) = await bob.messages(1)
    await bob.nack(message, requeue="false")  # what becomes of it is the broker's affair
    await room.stomp.idle()
    assert [record.body for record in room.stomp.records("stomp_dead_letters")] == [b"x"]


# rights that are withdrawn


@pytest.mark.parametrize(
    ("destination", "headers"),
    [
        ("/queue/orders", {}),
        ("/queue/orders", {"ack": "client"}),
        ("/topic/orders", {}),
        ("/topic/orders", {"ack": "client"}),
        ("/topic/orders", {"durable": "true"}),
        ("/topic/mqtt/home/#", {}),
        ("/queue/mqtt/home/#", {}),
        ("/topic/mqtt", {}),
    ],
)
async def test_a_client_that_may_not_read_any_more_gets_nothing_and_an_error(
    room: Room, destination: str, headers: dict[str, str]
) -> None:
    send_to = "/topic/mqtt/home/door" if "mqtt" in destination else destination
    sender = "sender publish *"
    room.allow("ann read *", sender)
    ann, other = await room.stomp.connect_as("ann"), await room.stomp.connect_as("sender")
    await ann.subscribe(destination, **headers)
    await other.publish(send_to, b"1")
    assert await ann.bodies(1) == [b"1"]
    room.allow(sender, GROUPS)
    await other.publish(send_to, b"2")
    error = await ann.error()
    assert "may not" in error["message"] or "may not" in error.body.decode()
    assert ann.came == []


async def test_what_a_client_may_not_read_any_more_goes_to_one_that_may(room: Room) -> None:
    room.allow("* read orders", "* publish orders", GROUPS)
    ann, bob = await room.stomp.connect_as("ann"), await room.stomp.connect_as("bob")
    await ann.subscribe("/queue/orders", "client")
    await bob.publish("/queue/orders", b"1")
    assert await ann.bodies(1) == [b"1"]
    room.allow("bob read orders", "* publish orders", GROUPS)
    await bob.publish("/queue/orders", b"2")
    await ann.error()
    await bob.subscribe("/queue/orders", "client")
    messages = await bob.messages(2)
    assert [message.body for message in messages] == [b"1", b"2"]
    assert messages[0]["redelivered"] == "true"


async def test_a_temporary_destination_that_may_not_be_read_any_more_gets_nothing(room: Room) -> None:
    rights = ("* publish *", GROUPS, "bob read *")
    room.allow("ann read stomp_temp/ann/*", *rights)
    ann, bob = await room.stomp.connect_as("ann"), await room.stomp.connect_as("bob")
    await bob.subscribe("/queue/orders")
    await ann.publish("/queue/orders", b"what?", reply_to="/temp-queue/mine")
    (request,) = await bob.messages(1)
    room.allow(*rights)
    await bob.publish(request["reply-to"], b"that")
    await ann.error()
    assert ann.came == []
