"""Several sweeps: one client that was away for long keeps no others waiting, and records are not read too often."""

from collections import Counter
from errno import EIO

import pytest
import trio
from tests.delivery.pushing import broker_in_memory
from tests.delivery.test_cursor import Client, feed_of, place, send, settle
from trio.testing import MockClock

from martlet.broker import Broker
from martlet.delivery.catch_up import reader as catch_up_reader
from martlet.delivery.catch_up import sweep, sweeps
from martlet.delivery.catch_up.sweep import Sweep
from martlet.delivery.catch_up.sweep_turns import SweepTurns
from martlet.delivery.catch_up.sweeps import SWEEPS_MAX, Sweeps, distance_class
from martlet.delivery.cursor import CursorPlace
from martlet.delivery.tail_reader import READ_AGAIN_S
from martlet.groups.queues.finder import Finder, MessageSelection

COUNT = 1500


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices, and distances that do not matter, of a few messages."""
    monkeypatch.setattr(sweep, "MESSAGES_A_SLICE", 8)
    for module in (sweep, sweeps):
        monkeypatch.setattr(module, "AHEAD_BYTES", 500)
    monkeypatch.setattr(sweeps, "NEAR_BYTES", 1000)


async def filled(broker: Broker, count: int = COUNT, names: int = 1) -> list[int]:
    """Publish; return the positions of the messages."""
    positions = [send(broker, f"n{number % names}", str(number)) for number in range(count)]
    await settle(broker)
    return positions


def numbers(start: int, end: int = COUNT) -> list[str]:
    return [str(number) for number in range(start, end)]


async def until_at_tail(client: Client) -> None:
    while place(client) is not CursorPlace.TAIL:
        await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("far_first", [True, False])
async def test_a_cursor_that_is_nearly_at_the_tail_does_not_wait_for_one_far_behind(far_first: bool) -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, positions = feed_of(broker), await filled(broker)
        starts = [positions[0], positions[-40]]
        clients = [Client(feed, "#", position=each) for each in (starts if far_first else starts[::-1])]
        far, near = clients if far_first else clients[::-1]
        await until_at_tail(near)
        assert place(far) is CursorPlace.SWEPT
        assert feed.catch_up.viewed <= 40 * 2 + 100
        assert near.take() == numbers(COUNT - 40)
        await settle(broker)
        assert far.take() == numbers(0)


async def test_one_far_behind_gets_on_though_others_return_again_and_again() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, positions = feed_of(broker), await filled(broker)
        far, near = Client(feed, "#", position=0), Client(feed, "#", position=positions[-40])
        returned = 0
        while place(far) is not CursorPlace.TAIL:
            await until_at_tail(near)
            near.cursor.close()
            near = Client(feed, "#", position=positions[-40])
            returned += 1
        assert returned * 40 <= 4 * COUNT
        assert far.take() == numbers(0)


async def test_cursors_at_mixed_distances_cost_little_more_than_one_pass() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, positions = feed_of(broker), await filled(broker)
        clients = {start: Client(feed, "#", position=positions[start]) for start in range(0, COUNT, 11)}
        await settle(broker)
        assert feed.catch_up.viewed <= 1.5 * COUNT
        assert all(client.take() == numbers(start) for start, client in clients.items())


async def test_each_sweep_of_those_that_return_one_after_the_other_serves_many() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, clients = feed_of(broker), list[Client]()
        await filled(broker)
        while len(clients) < 300:
            clients.append(Client(feed, "#", position=0))
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            classes = Counter(distance_class(broker.store.readable - each.swept_to) for each in feed.catch_up.running)
            assert classes[distance_class(broker.store.readable)] <= SWEEPS_MAX
            assert sum(classes.values()) <= SWEEPS_MAX * (1 + distance_class(broker.store.readable))
        await settle(broker)
        assert feed.catch_up.sweeps < 60
        assert all(client.take() == numbers(0) for client in clients)


async def test_a_name_is_followed_by_its_code_though_others_sweep_everything() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, _ = feed_of(broker), await filled(broker, names=100)
        everything, name = Client(feed, "#", position=0), Client(feed, "n7", position=0)
        await until_at_tail(name)
        assert place(everything) is CursorPlace.SWEPT
        assert feed.catch_up.viewed < COUNT / 4
        assert name.take() == [str(number) for number in range(7, COUNT, 100)]
        await settle(broker)
        assert everything.take() == numbers(0)


async def test_more_names_than_are_worth_it_are_found_by_reading_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catch_up_reader, "CODES_MAX", 3)
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, _ = feed_of(broker), await filled(broker, names=10)
        clients = [Client(feed, f"n{number}", position=0) for number in range(5)]
        everything = Client(feed, "#", position=0)
        await settle(broker)
        assert everything.take() == numbers(0)
        assert feed.catch_up.viewed == COUNT + 3 * COUNT // 10
        assert all(each.take() == [str(number) for number in range(at, COUNT, 10)] for at, each in enumerate(clients))
        Client(feed, *(f"n{number}" for number in range(4)), position=0).cursor.close()
        assert (feed.catch_up._name_counts, feed.catch_up._name_total) == ({}, 0)


async def test_sweeps_that_meet_go_on_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, positions = feed_of(broker), await filled(broker)
        monkeypatch.setattr(broker.cursors, "find_sweep", lambda feed: None)
        far, near = Client(feed, "#", position=0), Client(feed, "#", "n0", position=positions[-100])
        behind, ahead = sorted(feed.catch_up.plan(), key=lambda each: each.swept_to)
        for each in (behind, ahead, ahead, ahead):
            await feed.go_on(each)
        assert (len(behind.cursors), len(ahead.cursors)) == (1, 1)
        while not ahead.has_met:
            await feed.go_on(behind)
        assert behind.swept_to == ahead.swept_to
        await feed.go_on(ahead)
        assert ahead.is_over
        assert place(near) is CursorPlace.BEHIND
        while not behind.is_over:
            await feed.go_on(behind)
        assert feed.catch_up.viewed == COUNT + 3 * 8
        assert (place(far), place(near)) == (CursorPlace.TAIL, CursorPlace.TAIL)
        assert (far.take(), near.take()) == (numbers(0), numbers(COUNT - 100))


async def test_a_filter_that_begins_later_makes_a_sweep_by_codes_read_everything_from_there_on() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, _ = feed_of(broker), await filled(broker, names=100)
        client = Client(feed, "n7", position=0)
        client.cursor.add_filter("#")
        for number in range(40):
            send(broker, "other", f"late {number}")
        await settle(broker)
        assert client.take() == [str(each) for each in range(7, COUNT, 100)] + [f"late {each}" for each in range(40)]
        assert feed.catch_up.viewed <= COUNT / 100 + 40 + 8


async def test_a_feed_whose_last_cursor_is_closed_in_a_sweep_begins_anew() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, _ = feed_of(broker), await filled(broker)
        client = Client(feed, "#", position=0)
        while place(client) is not CursorPlace.SWEPT:
            await trio.lowlevel.checkpoint()
        client.cursor.close()
        again = Client(feed, "#", position=0)
        await settle(broker)
        assert again.take() == numbers(0)
        assert (feed.catch_up.running, feed.catch_up.is_sweeping) == ([], False)


def test_the_nearest_have_three_of_four_turns_and_the_others_of_a_class_take_turns() -> None:
    turns = SweepTurns[str]()
    for name, nearness in (("far", 7), ("near", 0), ("middle", 3), ("other", 0)):
        turns.add(name, nearness)
    classes = {"far": 7, "near": 0, "middle": 3, "other": 0}
    taken: list[str] = []
    for _ in range(64):
        taken.append(turns.take())
        turns.add(taken[-1], classes[taken[-1]])
    assert Counter(taken) == {"near": 24, "other": 24, "middle": 12, "far": 4}
    assert taken[:5] == ["near", "other", "near", "middle", "other"]


@pytest.mark.parametrize(
    ("distance", "expected"), [(-1, 0), (0, 0), (999, 0), (1000, 1), (3999, 1), (4000, 2), (15_999, 2), (16_000, 3)]
)
def test_a_class_is_four_times_as_wide_as_the_one_before(distance: int, expected: int) -> None:
    assert distance_class(distance) == expected


async def test_a_shared_group_that_is_far_behind_does_not_keep_others_waiting() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, positions = feed_of(broker), await filled(broker)
        woken: list[None] = []
        finder = Finder(MessageSelection(feed, "#"), "t", 0, lambda: woken.append(None))
        finder.go_on()
        while not woken:
            await trio.lowlevel.checkpoint()
        near = Client(feed, "#", position=positions[-40])
        await until_at_tail(near)
        assert near.take() == numbers(COUNT - 40)
        assert feed.catch_up.is_sweeping
        await settle(broker)
        assert [each.offset for each in finder.take(COUNT)] == list(range(COUNT))


async def test_a_sweep_that_cannot_read_keeps_no_others_waiting(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    go_on, is_broken = Sweep.go_on, True

    async def broken(each: Sweep, limit: int) -> bool:
        if each.swept_to == 0 and is_broken:
            raise OSError(EIO, "input/output error")
        return await go_on(each, limit)

    monkeypatch.setattr(Sweep, "go_on", broken)
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, positions = feed_of(broker), await filled(broker)
        far = Client(feed, "#", position=0)
        while not caplog.records:
            await trio.lowlevel.checkpoint()
        began = trio.current_time()
        near = Client(feed, "#", position=positions[-40])
        await until_at_tail(near)
        assert trio.current_time() == began
        assert near.take() == numbers(COUNT - 40)
        is_broken = False
        await trio.sleep(READ_AGAIN_S)
        await settle(broker)
        assert far.take() == numbers(0)


async def test_a_cursor_that_was_paused_at_the_end_follows_the_tail_from_there() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        await filled(broker, 10)
        for number in range(100):  # not readable yet
            send(broker, "a", f"old {number}")
        client = Client(feed, position=broker.store.appended, is_paused=True)
        client.cursor.add_filter("a")
        client.cursor.resume()
        assert (place(client), client.wakes) == (CursorPlace.TAIL, 1)
        send(broker, "a", "new")
        await settle(broker)
        assert client.take() == ["new"]


async def test_cursors_beyond_the_readable_end_need_one_sweep() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, _ = feed_of(broker), await filled(broker, 10)
        clients = [Client(feed, "#", position=0) for _ in range(3)]
        planned = Sweeps(lambda start: pytest.fail(f"a sweep begins at {start}"))
        for number, client in enumerate(clients):
            client.cursor.close()
            client.cursor.move_to(CursorPlace.BEHIND, 5000 * (number + 1))
            planned.waiting.add(client.cursor)
        assert planned._new_sweep_starts(1000) == [5000]


async def test_no_cursor_that_needs_only_the_log_waits_for_a_sweep_that_waits_for_the_cold_tier() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed, _ = feed_of(broker), await filled(broker, 10)
        clients = [Client(feed, "#", position=0) for _ in range(5)]
        planned = Sweeps(lambda start: pytest.fail(f"a sweep begins at {start}"))
        for number, client in enumerate(clients):
            client.cursor.close()
            client.cursor.move_to(CursorPlace.BEHIND, 1000 * (number + 1))
            planned.waiting.add(client.cursor)
        assert planned._new_sweep_starts(1 << 20) == [1000]
        assert planned._new_sweep_starts(1 << 20, cold_to=3000) == [1000, 3000]
        assert planned._new_sweep_starts(1 << 20, cold_to=1 << 19) == [1000]
