"""A consumer continues only while it is allowed to: a topic may be closed to readers, a group forbidden to consume."""

from collections.abc import Callable

import pytest
from tests.delivery.pushing import broker_in_memory, publish, subscribe
from tests.groups.test_shared_groups import Competitor

from martlet.broker import Broker
from martlet.tables.groups import Group


def close_topic(broker: Broker) -> None:
    broker.topics.update("t", 1, 1, perm=2)


def close_group(broker: Broker) -> None:
    broker.groups.update(Group("G", consume_enable=False))


def forbid_group(broker: Broker) -> None:
    broker.groups.set_forbidden("G", "t", readable=False)


def open_all(broker: Broker) -> None:
    broker.groups.set_forbidden("G", "t", readable=True)
    broker.groups.update(Group("G"))
    broker.topics.update("t", 1, 1)


async def test_a_subscription_ends_with_the_permission_to_read() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        reader = subscribe(broker, "t")
        broker.topics.update("t", 1, 1, perm=2)
        assert reader.subscription.gone
        assert reader.peer.wakes
        broker.topics.update("t", 1, 1)
        assert not reader.subscription.gone


@pytest.mark.parametrize("close", [close_topic, close_group, forbid_group])
async def test_a_share_rests_while_it_may_not_be_read(close: Callable[[Broker], None]) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        publish(broker, "t", 0, b"a", b"b")
        assert one.turn() == ["0:0:a", "0:1:b"]
        assert one.member.ack(0, 1)
        close(broker)
        assert one.member.group.gone
        assert one.peer.wakes
        publish(broker, "t", 0, b"c")
        one.member.leave()
        open_all(broker)
        # What was settled is remembered meanwhile.
        two = Competitor(broker)
        assert not two.member.group.gone
        assert two.turn() == ["0:0:a", "0:2:c"]


async def test_members_that_stayed_continue_when_reading_is_allowed_again() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        one = Competitor(broker)
        close_topic(broker)
        open_all(broker)
        assert not one.member.group.gone
