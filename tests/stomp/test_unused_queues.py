"""Queues that nobody consumes any more: personal ones go with their client, others when nothing can be missed."""

from pathlib import Path

import pytest
import trio
from tests.stomp.test_control import ask
from tests.wire_clients.stomp import StompBroker, StompClient, stomp_broker
from trio.testing import MockClock

from martlet.contracts import Identity
from martlet.groups.group import SharedGroup
from martlet.groups.leaving import LEAVES_A_SLICE
from martlet.groups.queues.group_members import GroupMember
from martlet.settings import DeliveryConfig
from martlet_stomp.config import StompConfig

EXPIRY_S = 50
CONFIG = StompConfig(queue_expiry_s=EXPIRY_S)


async def pass_time(stomp: StompBroker) -> None:
    await stomp.idle()
    await trio.sleep(EXPIRY_S + 1)
    await stomp.idle()


def topics(stomp: StompBroker) -> list[str]:
    return [topic.name for topic in stomp.broker.topics if topic.name.startswith("my")]


@pytest.mark.parametrize("ack", ["auto", "client"])
async def test_a_personal_queue_goes_with_its_client(tmp_path: Path, ack: str) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        sender, talk = await stomp.connect(), await stomp.connect()
        for number in range(3):
            await talk.subscribe(f"/queue/my{number}", ack, str(number), auto_delete="true", durable="false")
        await sender.publish("/queue/my1", b"1")
        (message,) = await talk.messages(1)
        if ack == "client":
            await talk.ack(message)
        assert topics(stomp) == ["my0", "my1", "my2"]
        await talk.unsubscribe("0")
        await stomp.idle()
        assert topics(stomp) == ["my1", "my2"]
        talk.hang_up()
        await stomp.idle()
        assert topics(stomp) == []
        assert await ask(sender, "queues") == []


async def test_what_waits_in_a_personal_queue_goes_later(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/queue/my", "client", auto_delete="true")
        await talk.publish("/queue/my", b"1")
        await talk.messages(1)
        talk.hang_up()
        await stomp.idle()
        again = await stomp.connect()
        await again.subscribe("/queue/my", "client")
        assert await again.bodies(1) == [b"1"]
        again.hang_up()
        await pass_time(stomp)
        assert topics(stomp) == []


async def test_a_queue_without_consumers_goes_if_it_never_had_messages(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect()
        for name in ("my-empty", "my-used"):
            await talk.subscribe(f"/queue/{name}", name=name)
        await talk.publish("/queue/my-used", b"1")
        assert await talk.bodies(1) == [b"1"]
        talk.hang_up()
        await pass_time(stomp)
        assert topics(stomp) == ["my-used"]
        other = await stomp.connect()
        await other.subscribe("/queue/my-used")
        assert await other.rest() == []


async def test_a_queue_of_names_goes_once_its_consumers_had_everything(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/queue/mqtt/a/#", "client-individual")
        await talk.publish("/topic/mqtt/a/1", b"1")
        await talk.ack(*await talk.messages(1))
        talk.hang_up()
        await pass_time(stomp)
        assert await ask(await stomp.connect(), "queues") == []


async def test_a_queue_that_was_there_before_is_not_deleted(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect()
        await talk.publish("/queue/my", b"1")
        await talk.subscribe("/queue/my", auto_delete="true")
        assert await talk.bodies(1) == [b"1"]
        talk.hang_up()
        await pass_time(stomp)
        assert topics(stomp) == ["my"]


async def test_a_durable_subscription_is_never_forgotten(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect(client_id="ann")
        await talk.subscribe("/topic/my", **{"activemq.subscriptionName": "news"})
        talk.hang_up()
        await pass_time(stomp)
        (row,) = await ask(await stomp.connect(), "queues")
        assert row.items() >= {"destination": "/topic/my", "durable": "topic//ann/news", "consumers": 0}.items()


async def test_a_refused_subscription_leaves_no_topic(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, CONFIG, delivery=DeliveryConfig(shares_max=1)) as stomp:
        talk, other = await stomp.connect(), await stomp.connect()
        await talk.subscribe("/queue/my")
        await other.send(other.frame("SUBSCRIBE", id="0", destination="/queue/my-other", receipt="r"))
        assert b"delivery.shares_max is 1" in (await other.error()).body
        assert topics(stomp) == ["my"]


async def fill(talk: StompClient, first: int, count: int) -> None:
    frames = [talk.frame("SUBSCRIBE", id=str(n), destination=f"/queue/my{n}") for n in range(first, first + count)]
    await talk.send(*frames, talk.frame("SEND", destination="/queue/probe", receipt="r"))


async def test_one_connection_and_one_user_leave_room_for_others(tmp_path: Path) -> None:
    config = StompConfig(subscriptions_max=4)
    limits = DeliveryConfig(shares_max=10, shares_user_max=6)
    async with stomp_broker(tmp_path, config, delivery=limits) as stomp:
        one, two = await stomp.connect_as("ann"), await stomp.connect_as("ann")
        await fill(one, 0, 5)
        assert b"stomp.subscriptions_max" in (await one.error()).body
        one = await stomp.connect_as("ann")
        await fill(one, 0, 4)
        await one.receipt("r")
        await fill(two, 4, 3)
        assert b"user 'ann' has 6 shared groups in use; delivery.shares_user_max is 6" in (await two.error()).body
        bob = await stomp.connect_as("bob")
        await fill(bob, 10, 4)
        await bob.receipt("r")


async def test_queues_are_listed_and_freed(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk, other = await stomp.connect(), await stomp.connect()
        stomp.broker.topics.ensure("orders%2Enew", 1)
        await talk.publish("/queue/orders.new", b"1", b"2", b"3")
        await other.subscribe("/queue/orders.new", "client-individual", prefetch_count="2")
        await other.subscribe("/queue/my", "client", "1", auto_delete="true")
        await other.subscribe("/queue/mqtt/a/#", "client", "2")
        await other.messages(2)
        rows = {row["destination"]: row for row in await ask(talk, "queues")}
        expected = {
            "consumers": 1,
            "held": 2,
            "waiting": 1,
            "auto_delete": False,
            "owns_topic": False,
            "unused_s": None,
        }
        assert rows["/queue/orders.new"].items() >= expected.items()
        assert rows["/queue/my"].items() >= {"held": 0, "waiting": 0, "auto_delete": True, "owns_topic": True}.items()
        assert rows["/queue/mqtt/a/#"]["waiting"] is None
        busy = await stomp.connect()
        await busy.send(busy.frame("SUBSCRIBE", id="0", destination="/control/delete/queue/orders.new"))
        assert b"has 1 consumers" in (await busy.error()).body
        await other.unsubscribe("0")
        await other.unsubscribe("2")
        for queue in ("orders.new", "mqtt/a/#"):
            (row,) = await ask(talk, f"delete/queue/{queue}")
            assert row["destination"] == f"/queue/{queue}"
        assert [row["destination"] for row in await ask(talk, "queues")] == ["/queue/my"]
        assert stomp.broker.topics.get("orders%2Enew") is not None


async def test_deleting_needs_permission(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/queue/my")
        await talk.unsubscribe()

        def only_clients(identity: Identity, action: str, name: str) -> bool | None:
            return action != "manage"

        stomp.broker.authorizers = (only_clients,)
        await talk.send(talk.frame("SUBSCRIBE", id="0", destination="/control/delete/queue/my"))
        assert b"may not update the cluster" in (await talk.error()).body
        assert topics(stomp) == ["my"]


async def test_topics_that_clients_created_go_once_they_are_empty(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/my-watched")
        await talk.subscribe("/topic/my-left", name="1")
        await talk.unsubscribe("1")
        await talk.publish("/queue/my-sent", b"1")
        await talk.publish("/topic/my-told", b"1")
        await pass_time(stomp)
        assert topics(stomp) == ["my-watched", "my-sent", "my-told"]
        for name in ("my-sent", "my-told"):  # as retention does it
            stomp.broker.store.queue(name, 0).expire_to(1)
        await pass_time(stomp)
        assert topics(stomp) == ["my-watched"]
        await talk.unsubscribe("0")
        await pass_time(stomp)
        assert topics(stomp) == []


async def test_the_end_of_a_connection_with_many_queues_leaves_others_their_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[GroupMember] = []
    real = SharedGroup.leave

    def leave(shared_group: SharedGroup, member: GroupMember, *, keep: bool) -> None:
        left.append(member)
        real(shared_group, member, keep=keep)

    monkeypatch.setattr(SharedGroup, "leave", leave)
    async with stomp_broker(tmp_path, CONFIG) as stomp:
        talk = await stomp.connect()
        await fill(talk, 0, 3 * LEAVES_A_SLICE)
        await talk.receipt("r")
        talk.hang_up()
        while not left:
            await trio.lowlevel.checkpoint()
        assert len(left) <= LEAVES_A_SLICE
        await stomp.idle()
        assert len(left) == 3 * LEAVES_A_SLICE
        assert {row["consumers"] for row in await ask(await stomp.connect(), "queues")} == {0}
