"""Which listeners new records wake, and how many in one turn of the event loop."""

import trio.testing
from tests.delivery.pushing import broker_in_memory, publish, subscribe

from martlet.broker import Broker
from martlet.delivery.listeners import WAKES_A_TURN
from martlet.delivery.routing.selection import EVERYTHING, Selection, select_tags
from martlet.message import Message
from martlet.store import Queue

MANY = 2 * WAKES_A_TURN + 100


class Waiting:
    """A listener that notes when it was woken, in a list that all of them share."""

    def __init__(self, number: int, woken: list[int], selection: Selection = EVERYTHING) -> None:
        self.number = number
        self.woken = woken
        self.selection = selection

    def arrived_at(self, queue: Queue) -> None:
        self.woken.append(self.number)


def crowd(broker: Broker, count: int, queues: int, *tags: str) -> tuple[list[Waiting], list[int]]:
    """*count* listeners of topic t, either for all tags or each for the next of *tags*."""
    reader, woken = broker.tails.of(broker.topics.ensure("t", queues)), list[int]()
    selections = [select_tags((tag,)) for tag in tags] or [EVERYTHING]
    waiting = [Waiting(number, woken, selections[number % len(selections)]) for number in range(count)]
    for each in waiting:
        reader.listen(each)
    return waiting, woken


def tag(name: str) -> bytes:
    return f"TAGS\x01{name}\x02".encode()


def turns(broker: Broker, woken: list[int]) -> list[int]:
    """Do what `Wakes.run` does; return how many each turn woke."""
    counts: list[int] = []
    while broker.tails.wakes.is_waking:
        before = len(woken)
        broker.tails.wakes.wake_some()
        counts.append(len(woken) - before)
    return counts


async def test_very_many_listeners_of_a_queue_are_woken_some_in_each_turn_in_their_order() -> None:
    async with broker_in_memory() as broker:
        _, woken = crowd(broker, MANY, 1)
        publish(broker, "t", 0, b"x")
        assert woken == []
        counts = turns(broker, woken)
        assert (max(counts), sum(counts), len(counts)) == (WAKES_A_TURN, MANY, 3)
        assert woken == list(range(MANY))


async def test_a_flush_of_many_queues_wakes_no_more_at_once_than_that_of_one() -> None:
    async with broker_in_memory() as broker:
        _, woken = crowd(broker, 1000, 5)
        for queue_id in range(5):
            broker.publish(Message("t", b"x", b"", queue_id))
        broker.store.committer.commit()
        assert len(woken) == WAKES_A_TURN // 1000 * 1000
        counts = turns(broker, woken)
        assert max(counts) <= WAKES_A_TURN
        assert sorted(woken) == sorted([*range(1000)] * 5)
        woken.clear()
        publish(broker, "t", 0, b"x")
        assert woken == list(range(1000))  # at once: the next flush may wake as many again


async def test_only_those_whose_tags_arrived_are_woken_however_many() -> None:
    async with broker_in_memory() as broker:
        waiting, woken = crowd(broker, MANY * 3, 1, "A", "B", "C")
        publish(broker, "t", 0, b"x", properties=tag("A"))
        assert sum(turns(broker, woken)) == MANY
        assert woken == [each.number for each in waiting if each.number % 3 == 0]


async def test_records_that_arrive_while_very_many_are_woken_reach_all_of_them_with_their_tags() -> None:
    async with broker_in_memory() as broker:
        _, woken = crowd(broker, MANY * 3, 1, "A", "B", "C")
        publish(broker, "t", 0, b"x", properties=tag("A"))
        broker.tails.wakes.wake_some()
        assert len(woken) == WAKES_A_TURN
        publish(broker, "t", 0, b"y", properties=tag("A"))
        publish(broker, "t", 0, b"z", properties=tag("B"))
        assert len(woken) == WAKES_A_TURN
        assert max(turns(broker, woken)) == WAKES_A_TURN
        first, then = woken[:MANY], woken[MANY:]
        assert first == list(range(0, MANY * 3, 3))
        assert sorted(then) == [number for number in range(MANY * 3) if number % 3 < 2]


async def test_listeners_that_come_and_leave_while_very_many_are_woken_keep_nobody_waiting() -> None:
    async with broker_in_memory() as broker:
        waiting, woken = crowd(broker, MANY, 1)
        reader = broker.tails.of(broker.topics.ensure("t", 1))
        publish(broker, "t", 0, b"x")
        for each in waiting[:10]:
            reader.leave(each)
        broker.tails.wakes.wake_some()
        for each in waiting[10 : MANY - 1]:
            reader.leave(each)
        reader.listen(Waiting(MANY, woken))
        turns(broker, woken)
        assert not set(woken) & set(range(10))
        assert waiting[-1].number in woken
        publish(broker, "t", 0, b"y")
        assert woken[-2:] == [waiting[-1].number, MANY]


async def test_a_topic_that_is_deleted_while_very_many_are_woken_leaves_nothing_behind() -> None:
    async with broker_in_memory() as broker:
        _, woken = crowd(broker, MANY, 2)
        publish(broker, "t", 0, b"x")
        publish(broker, "t", 1, b"x")
        broker.tails.wakes.wake_some()
        broker.topics.delete("t")
        assert not broker.tails.wakes.is_waking
        assert len(woken) == WAKES_A_TURN


async def test_very_many_subscriptions_get_everything_in_order() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collectors = [subscribe(broker, "t", credit=1) for _ in range(WAKES_A_TURN + 1)]
        publish(broker, "t", 0, b"x", b"y")
        assert sum(each.peer.wakes for each in collectors) == 0
        await trio.testing.wait_all_tasks_blocked()
        assert [await each.drain() for each in collectors] == [["0:0:x"]] * len(collectors)
        for each in collectors:
            each.subscription.add_credit(2)
        publish(broker, "t", 0, b"z")
        await trio.testing.wait_all_tasks_blocked()
        assert [await each.drain() for each in collectors] == [["0:1:y", "0:2:z"]] * len(collectors)
