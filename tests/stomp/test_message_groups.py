"""Messages with the same JMSXGroupID go to one consumer of a queue, in order, as with ActiveMQ."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
from tests.wire_clients.stomp import Frame, StompBroker, StompClient, stomp_broker
from trio.testing import MockClock

from martlet.groups.member import KEPT_MAX, Member
from martlet.groups.strategy.sticky import SLOTS
from martlet_filter_sql92.plugin import Sql92Config, Sql92Plugin
from martlet_stomp.config import StompConfig

QUEUE = "/queue/orders"
GROUPS = [f"group {number}" for number in range(20)]


async def consumers(
    stomp: StompBroker, count: int, ack: str = "client-individual", **headers: str
) -> list[StompClient]:
    talks = [await stomp.connect() for _ in range(count)]
    for talk in talks:
        await talk.subscribe(QUEUE, ack, **headers)
    return talks


async def publish(talk: StompClient, numbers: Sequence[int], groups: Sequence[str] = GROUPS, **headers: str) -> None:
    for number in numbers:
        for group in groups:
            await talk.send(
                talk.frame("SEND", b"%d" % number, destination=QUEUE, JMSXGroupID=group, **headers),
            )
    await talk.send(talk.frame("SEND", destination="/queue/others", receipt="sent"))
    await talk.receipt("sent")


def by_group(messages: Sequence[Frame]) -> dict[str, list[bytes]]:
    found: dict[str, list[bytes]] = {}
    for message in messages:
        found.setdefault(message["JMSXGroupID"], []).append(message.body)
    return found


@pytest.mark.parametrize("ack", ["auto", "client", "client-individual"])
@pytest.mark.parametrize("queues", [1, 4])
async def test_a_group_stays_with_one_consumer_in_order(tmp_path: Path, ack: str, queues: int) -> None:
    async with stomp_broker(tmp_path, StompConfig(queues=queues)) as stomp:
        talks, sender = await consumers(stomp, 3, ack), await stomp.connect()
        for numbers in (range(5), range(5, 10)):
            await publish(sender, numbers)
        came = [by_group(await talk.rest()) for talk in talks]
        assert sorted(group for each in came for group in each) == sorted(GROUPS)  # each with one consumer
        assert all(each for each in came)
        for each in came:
            assert set(map(tuple, each.values())) == {tuple(b"%d" % number for number in range(10))}


async def test_a_group_stays_when_other_consumers_come(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        (first,), sender = await consumers(stomp, 1), await stomp.connect()
        await publish(sender, [0, 1])
        messages = await first.rest()
        (second,) = await consumers(stomp, 1)
        await publish(sender, [2], [*GROUPS, *(f"new {number}" for number in range(40))])
        messages += await first.rest()
        assert {group: bodies for group, bodies in by_group(messages).items() if group in GROUPS} == {
            group: [b"0", b"1", b"2"] for group in GROUPS
        }
        news = by_group(await second.rest())
        assert news
        assert all(group.startswith("new") for group in news)


@pytest.mark.parametrize("end", ["UNSUBSCRIBE", "hang up"])
async def test_groups_of_a_consumer_that_goes_continue_with_another_in_order(tmp_path: Path, end: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks, sender = await consumers(stomp, 2), await stomp.connect()
        await publish(sender, [0, 1, 2])
        came = [await talk.rest() for talk in talks]
        gone = by_group(came[0])
        for message in came[0]:
            if message.body == b"0":
                await talks[0].send(talks[0].settling("ACK", message))
        await publish(sender, [3])
        await talks[0].rest()
        if end == "UNSUBSCRIBE":
            await talks[0].unsubscribe()
        else:
            talks[0].hang_up()
        await stomp.idle()
        await publish(sender, [4])
        rest = by_group(await talks[1].rest())
        for group in gone:
            assert rest[group] == [b"1", b"2", b"3", b"4"]


async def test_a_group_stays_with_one_consumer_after_a_restart(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks, sender = await consumers(stomp, 2), await stomp.connect()
        await publish(sender, [0, 1])
        for talk in talks:
            await talk.rest()
    async with stomp_broker(tmp_path) as stomp:
        talks, sender = await consumers(stomp, 2), await stomp.connect()
        await publish(sender, [2])
        came = [by_group(await talk.rest()) for talk in talks]
        assert sorted(group for each in came for group in each) == sorted(GROUPS)
        for each in filter(None, came):
            assert set(map(tuple, each.values())) == {(b"0", b"1", b"2")}


async def test_messages_of_no_group_go_to_any_consumer(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks, sender = await consumers(stomp, 2), await stomp.connect()
        await publish(sender, range(4), ["one"])
        for _ in range(20):
            await sender.publish(QUEUE, b"free")
        came = [await talk.rest() for talk in talks]
        assert sorted(len([each for each in some if "JMSXGroupID" in each.headers]) for some in came) == [0, 4]
        assert sum(len(some) for some in came) == 24


async def test_a_slow_consumer_holds_up_its_own_groups_and_nothing_is_lost(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks, sender = await consumers(stomp, 2, **{"prefetch-count": "1"}), await stomp.connect()
        await publish(sender, [0], ["a", "b"])
        first, second = [(await talk.messages(1))[0] for talk in talks]
        slow, quick = first["JMSXGroupID"], second["JMSXGroupID"]
        await talks[1].ack(second)
        await publish(sender, range(1, 3), [slow, quick])
        for number in (1, 2):
            (message,) = await talks[1].messages(1)
            assert (message["JMSXGroupID"], message.body) == (quick, b"%d" % number)
            await talks[1].ack(message)
        count = 4 * KEPT_MAX
        await publish(sender, range(3, count), [slow])
        assert await talks[1].rest() == []
        shared_group = stomp.broker.shared_groups.find("orders", "queue", stomp.context.policy)
        assert shared_group is not None
        member = next(iter(shared_group._members.by_turn))
        assert isinstance(member, Member)
        assert member.is_full
        assert len(member._kept) <= 2 * KEPT_MAX
        message = first
        for number in range(1, count):
            await talks[0].ack(message)
            (message,) = await talks[0].messages(1)
            assert (message["JMSXGroupID"], message.body) == (slow, b"%d" % number)


async def test_consumers_with_selectors_share_groups(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(stomp.broker))
        red = await consumers(stomp, 2, selector="colour = 'red'")
        (blue,), sender = await consumers(stomp, 1, selector="colour = 'blue'"), await stomp.connect()
        for colour in ("red", "blue", "green"):
            await publish(sender, [0, 1], colour=colour)
        came = [await talk.rest() for talk in (*red, blue)]
        assert [{message["colour"] for message in some} for some in came] == [{"red"}, {"red"}, {"blue"}]
        assert not set(by_group(came[0])) & set(by_group(came[1]))
        assert len(came[0] + came[1]) == len(came[2]) == 2 * len(GROUPS)
        (rest,) = await consumers(stomp, 1)
        assert {message["colour"] for message in await rest.rest()} == {"green"}


async def test_what_the_consumer_of_a_group_does_not_select_goes_to_one_other_in_order(tmp_path: Path) -> None:
    """With ActiveMQ these messages wait until the consumer of the group leaves."""
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(stomp.broker))
        (red,) = await consumers(stomp, 1, selector="colour = 'red'")
        sender = await stomp.connect()
        await publish(sender, [0], colour="red")
        assert sorted(by_group(await red.rest())) == sorted(GROUPS)
        blue = await consumers(stomp, 2, selector="colour = 'blue'")
        came: list[list[Frame]] = [[], []]
        for number in range(1, 5):
            await publish(sender, [number], [*GROUPS, "blue alone"][number % 3 :], colour="blue")
            for talk, found in zip(blue, came, strict=True):
                found += await talk.rest()
        groups = [by_group(found) for found in came]
        assert all(groups)
        assert not set(groups[0]) & set(groups[1])
        for bodies in [*groups[0].values(), *groups[1].values()]:
            assert bodies == sorted(bodies)
        assert sum(map(len, came)) == sum(len(GROUPS) + 1 - number % 3 for number in range(1, 5))
        await publish(sender, [9], colour="red")
        more = by_group(await red.rest())
        assert (sorted(more), {body for bodies in more.values() for body in bodies}) == (sorted(GROUPS), {b"9"})
        left = set(groups[0])
        await blue[0].unsubscribe()
        rest = by_group(await blue[1].rest())
        assert {group: rest[group] for group in left} == {group: groups[0][group] for group in left}


async def test_an_exclusive_consumer_gets_all_groups(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks, sender = await consumers(stomp, 2), await stomp.connect()
        await publish(sender, [0])
        (alone,) = await consumers(stomp, 1, exclusive="true")
        await publish(sender, [1])
        assert sorted(by_group(await alone.rest())) == sorted(GROUPS)
        assert {message.body for talk in talks for message in await talk.rest()} == {b"0"}


async def test_any_number_of_groups_takes_bounded_memory(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        await consumers(stomp, 2, "auto")
        sender = await stomp.connect()
        await publish(sender, [0], [f"g{number}" for number in range(3 * SLOTS)])
        await stomp.idle()
        shared_group = stomp.broker.shared_groups.find("orders", "queue", stomp.context.policy)
        assert shared_group is not None
        assert len(shared_group._members.keepers._members) <= SLOTS


async def test_a_message_with_too_long_headers_stays_in_its_group(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks, sender = await consumers(stomp, 2), await stomp.connect()
        long = {f"h{number}": "x" * 7000 for number in range(6)}
        await publish(sender, range(2), ["a"], **long)
        came = [await talk.rest() for talk in talks]
        assert sorted(map(len, came)) == [0, 2]


async def test_large_messages_for_one_of_two_consumers_come_without_a_pause(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Whoever reads them keeps them for the other one, who then has used its turn."""
    async with stomp_broker(tmp_path) as stomp:
        stomp.broker.filters = dict(Sql92Plugin(Sql92Config()).martlet_filters(stomp.broker))
        (red,), (blue,) = [await consumers(stomp, 1, selector=f"colour = '{each}'") for each in ("red", "blue")]
        sender = await stomp.connect()
        for _ in range(20):
            await sender.send(sender.frame("SEND", b"x" * 50_000, destination=QUEUE, colour="blue"))
        with trio.fail_after(60):
            await blue.messages(20)
        assert await red.rest() == []


async def test_groups_in_a_queue_of_names_lose_nothing(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talks = [await stomp.connect() for _ in range(2)]
        for talk in talks:
            await talk.subscribe("/queue/mqtt/home/#", "client-individual", **{"prefetch-count": "1"})
        count = 2 * KEPT_MAX
        frames = [
            talks[0].frame("SEND", b"%d" % number, destination="/topic/mqtt/home/a", JMSXGroupID="g")
            for number in range(count)
        ]
        await talks[0].send(*frames)
        await stomp.idle()
        came = [await talk.rest() for talk in talks]
        keeper, message = next((talk, some[0]) for talk, some in zip(talks, came, strict=True) if some)
        assert sum(map(len, came)) == 1
        for number in range(1, count):
            await keeper.ack(message)
            (message,) = await keeper.messages(1)
            assert message.body == b"%d" % number
