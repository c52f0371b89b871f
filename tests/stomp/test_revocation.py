"""A change of the rules ends connections of clients that may no longer read, with an ERROR and without a message."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio
from tests.stomp.test_access import GROUPS, Room, room_of
from tests.wire_clients.stomp import StompClient

SENDER = "sender publish *"
PATIENCE_S = 60
DESTINATIONS = [
    ("/topic/orders", {}),
    ("/topic/*", {}),
    ("/topic/orders,/topic/probe", {}),
    ("/queue/orders", {}),
    ("/topic/orders", {"durable": "true"}),
    ("/topic/mqtt/home/#", {}),
    ("/queue/mqtt/home/#", {}),
    ("/topic/mqtt/home/#", {"durable": "true"}),
    ("/temp-queue/mine", {}),
]


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    async with room_of(tmp_path) as found:
        yield found


async def error_of(talk: StompClient) -> str:
    with trio.fail_after(PATIENCE_S):
        return (await talk.error())["message"]


@pytest.mark.parametrize("ack", ["auto", "client-individual"])
@pytest.mark.parametrize(("destination", "headers"), DESTINATIONS)
async def test_an_idle_subscription_ends_with_an_error(
    room: Room, destination: str, headers: dict[str, str], ack: str
) -> None:
    room.allow("ann read *", "bob read *")
    talks = {user: await room.stomp.connect_as(user) for user in ("ann", "bob")}
    for talk in talks.values():
        await talk.subscribe(destination, ack, **headers)
    room.allow("bob read *", GROUPS)
    assert "'ann' may not subscribe" in await error_of(talks["ann"])
    assert await talks["bob"].rest() == []


@pytest.mark.parametrize(("destination", "headers"), [each for each in DESTINATIONS if "temp" not in each[0]])
async def test_a_subscription_whose_client_acknowledges_nothing_ends_with_an_error(
    room: Room, destination: str, headers: dict[str, str]
) -> None:
    send_to = "/topic/mqtt/home/door" if "mqtt" in destination else destination.partition(",")[0].replace("*", "orders")
    room.allow("ann read *", SENDER)
    ann, sender = await room.stomp.connect_as("ann"), await room.stomp.connect_as("sender")
    await ann.subscribe(destination, "client-individual", prefetch_count="1", **headers)
    await sender.publish(send_to, b"1", b"2")
    assert await ann.bodies(1) == [b"1"]
    room.allow(SENDER, GROUPS)
    assert "'ann' may not subscribe" in await error_of(ann)


@pytest.mark.parametrize(("destination", "headers"), [("/queue/orders", {}), ("/queue/mqtt/home/#", {})])
async def test_what_an_idle_consumer_holds_goes_to_a_permitted_one(
    room: Room, destination: str, headers: dict[str, str]
) -> None:
    send_to = "/topic/mqtt/home/door" if "mqtt" in destination else destination
    room.allow("ann read *", "bob read *", SENDER)
    ann, sender = await room.stomp.connect_as("ann"), await room.stomp.connect_as("sender")
    await ann.subscribe(destination, "client-individual", prefetch_count="5")
    await sender.publish(send_to, *[b"%d" % number for number in range(8)])
    assert len(await ann.bodies(5)) == 5
    bob = await room.stomp.connect_as("bob")
    await bob.subscribe(destination, "client-individual")
    room.allow("bob read *", GROUPS, SENDER)
    await error_of(ann)
    found = await bob.messages(8)
    assert sorted(message.body for message in found) == [b"%d" % number for number in range(8)]


async def test_a_durable_subscription_keeps_its_messages_for_the_time_when_it_is_permitted_again(room: Room) -> None:
    room.allow("ann read *", SENDER)
    ann, sender = await room.stomp.connect_as("ann"), await room.stomp.connect_as("sender")
    durable = {"durable": "true", "auto_delete": "false"}
    await ann.subscribe("/topic/orders", "client-individual", **durable)
    room.allow(SENDER, GROUPS)
    await error_of(ann)
    await sender.publish("/topic/orders", b"1", b"2")
    room.allow("ann read *", SENDER)
    ann = await room.stomp.connect_as("ann")
    await ann.subscribe("/topic/orders", "client-individual", **durable)
    assert await ann.bodies(2) == [b"1", b"2"]


async def test_a_browser_that_may_not_read_any_more_ends_with_an_error(room: Room) -> None:
    room.allow("ann read *", SENDER)
    ann, sender = await room.stomp.connect_as("ann"), await room.stomp.connect_as("sender")
    await ann.subscribe("/queue/orders", "client-individual")
    await sender.publish("/queue/orders", *[b"x" * 1000] * 3000)
    ann.hang_up()
    ann = await room.stomp.connect_as("ann")
    await ann.send(ann.frame("SUBSCRIBE", id="look", destination="/queue/orders", browser="true"))
    assert (await ann.receive()).command == "MESSAGE"  # and the broker waits for room for the others
    room.allow(SENDER, GROUPS)
    assert "'ann' may not subscribe" in await error_of(ann)
    assert len(ann.came) < 3000


async def test_a_client_without_subscriptions_stays(room: Room) -> None:
    room.allow("ann read *")
    ann = await room.stomp.connect_as("ann")
    room.allow()
    assert await ann.rest() == []
