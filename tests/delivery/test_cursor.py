"""Cursors behind the tail: in log order, nothing twice, nothing lost, and one pass for all that return together."""

from collections.abc import Callable, Hashable
from errno import EIO, ENOSPC
from itertools import pairwise
from typing import Final

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.delivery.pushing import broker_in_memory

from martlet.broker import Broker
from martlet.contracts import Identity, LoginOrigin, Quota
from martlet.delivery import beginnings
from martlet.delivery import cursor as cursor_module
from martlet.delivery.catch_up import departures, sweep, sweeps
from martlet.delivery.catch_up.departures import FILTERS_A_TURN
from martlet.delivery.catch_up.sweeps import Sweeps
from martlet.delivery.cursor import Cursor, CursorPlace, Permit
from martlet.delivery.fanout import Encoding, parts
from martlet.delivery.feed import Feed
from martlet.delivery.routing.route_cache import RouteCache
from martlet.delivery.tail_routing import RECEIVER_US, RECEIVERS_COUNTED
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.records.layout import ENTRY_BYTES
from martlet.runtime.steps import per_slice
from martlet.store import Queue, Store
from martlet.store.queues.queues import BlockDamaged
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import RecordingPeer

# They are counted in groups of RECEIVERS_COUNTED.
RECEIVERS_A_SLICE: Final = -(-per_slice(RECEIVER_US) // RECEIVERS_COUNTED) * RECEIVERS_COUNTED


class Client:
    """A receiver that collects when the test says so."""

    def __init__(
        self,
        feed: Feed,
        *filters: str,
        position: int | None = None,
        pending_bytes_max: int = 1 << 20,
        permit: Permit | None = None,
        droppable: Callable[[tuple[Hashable, ...]], bool] | None = None,
        is_paused: bool = False,
    ) -> None:
        self.wakes = 0
        self.bodies: list[str] = []
        self.positions: list[int] = []
        wanted = {each: number for number, each in enumerate(filters)}
        self.cursor: Cursor = feed.open(self._woken, wanted, position, pending_bytes_max, permit, droppable, is_paused)

    def _woken(self) -> None:
        self.wakes += 1

    def take(self, budget_bytes: int = 1 << 20) -> list[str]:
        self.wakes = 0
        came = [record for run, _ in self.cursor.collect(budget_bytes) for record in run.records()]
        self.positions += [record.position for record in came]
        self.bodies += [bytes(record.body).decode() for record in came]
        return [bytes(record.body).decode() for record in came]


def send(broker: Broker, name: str, body: str, queue_id: int = 0, topic: str = "t") -> int:
    """Publish a message and return its log position."""
    return broker.publish(Message(topic, body.encode(), f"TAGS\x01{name}\x02".encode(), queue_id)).position


async def settle(broker: Broker) -> None:
    """Commit, flush, and run sweeps until they have nothing left to do."""
    broker.store.committer.commit()
    await broker.store.flusher.wait_flushed(broker.store.appended)
    await trio.testing.wait_all_tasks_blocked()


def place(client: Client) -> CursorPlace:
    return client.cursor.place


def feed_of(broker: Broker, queues: int = 1, *topics: str) -> Feed:
    for topic in topics or ("t",):
        broker.topics.ensure(topic, queues)
    return broker.cursors.open(topics or ("t",))


async def test_a_cursor_goes_from_its_position_over_to_the_tail() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker, 3)
        positions = [send(broker, "a" if n % 3 else "b", str(n), n % 2) for n in range(30)]
        await settle(broker)
        client = Client(feed, "a", position=positions[10])
        assert place(client) is CursorPlace.BEHIND
        await settle(broker)
        assert place(client) is CursorPlace.TAIL
        assert client.wakes
        assert client.take() == [str(n) for n in range(10, 30) if n % 3]
        send(broker, "a", "live", 2)
        await settle(broker)
        assert client.wakes == 1
        assert client.take() == ["live"]
        assert client.cursor.position == broker.store.readable
        assert feed.catch_up.sweeps == 1


async def test_several_topics_are_swept_in_log_order() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker, 2, "t", "u", "v")
        for number in range(30):
            send(broker, "n", str(number), number % 2, "tuv"[number % 3])
        await settle(broker)
        client = Client(feed, "#", position=0)
        await settle(broker)
        assert client.take() == [str(number) for number in range(30)]


@pytest.mark.parametrize("order", ["aba", "abb", "bab", "bba", "abcba", "cabac"])
async def test_at_the_tail_several_topics_come_in_log_order(order: str) -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker, 1, *sorted(set(order)))
        client, other = Client(feed, "#"), Client(feed, "a/#", "c/#")
        positions = [send(broker, f"{topic}/x", str(number), topic=topic) for number, topic in enumerate(order)]
        await settle(broker)
        for number, position in enumerate(positions):
            assert client.cursor.position <= position
            [(run, _)] = client.cursor.collect(1, messages_max=1)
            assert [record.position for record in run.records()] == [position]
            reopened = Client(feed, "#", position=client.cursor.position)
            await settle(broker)
            assert reopened.take() == [str(each) for each in range(number + 1, len(order))]
            reopened.cursor.close()
        assert other.take() == [str(number) for number, topic in enumerate(order) if topic != "b"]


async def test_cursors_that_return_together_share_one_pass() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker, 2)
        for number in range(400):
            send(broker, f"device/{number % 100}", str(number), number % 2)
        await settle(broker)
        clients = [Client(feed, f"device/{number}/#", position=0) for number in range(100)]
        await settle(broker)
        assert (feed.catch_up.sweeps, feed.catch_up.viewed) == (1, 400)
        for number, client in enumerate(clients):
            assert client.take() == [str(number + 100 * turn) for turn in range(4)]


async def test_names_without_wildcards_are_found_by_their_codes_alone() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        for number in range(1000):
            send(broker, f"n{number % 100}", str(number))
        await settle(broker)
        clients = [Client(feed, f"n{number}", position=0) for number in (3, 7)]
        await settle(broker)
        assert feed.catch_up.viewed == 20
        assert [client.take()[:2] for client in clients] == [["3", "103"], ["7", "107"]]


async def test_a_cursor_that_comes_while_others_are_swept_begins_at_its_own_position(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "MESSAGES_A_SLICE", 8)
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        positions = [send(broker, "a", str(n)) for n in range(64)]
        await settle(broker)
        early = Client(feed, "a", position=0)
        late = Client(feed, "a", position=positions[37])
        latest = Client(feed, "a", position=positions[63])
        await settle(broker)
        assert early.take() == [str(n) for n in range(64)]
        assert late.take() == [str(n) for n in range(37, 64)]
        assert latest.take() == ["63"]
        assert (feed.catch_up.sweeps, feed.catch_up.viewed) == (1, 64)


async def test_cursors_with_many_filters_change_places_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "FILTERS_A_SLICE", 10)
    added: list[int] = []
    add = RouteCache[Cursor].add

    def counted(routes: RouteCache[Cursor], topic_filter: str, subscriber: Cursor, value: Hashable = None) -> None:
        added[-1] += 1
        add(routes, topic_filter, subscriber, value)

    monkeypatch.setattr(RouteCache, "add", counted)
    for kind, step in ((Sweeps, "_add_near_cursors"), (Feed, "_join_cursors")):
        original = getattr(kind, step)

        def noted(owner: object, *arguments: object, original: Callable[..., object] = original) -> object:
            added.append(0)
            return original(owner, *arguments)

        monkeypatch.setattr(kind, step, noted)
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        send(broker, "name 3", "x")
        await settle(broker)
        clients = [Client(feed, *[f"name {number}" for number in range(count)], position=0) for count in (4, 4, 4, 30)]
        await settle(broker)
        assert {place(each) for each in clients} == {CursorPlace.TAIL}
        assert [each.take() for each in clients] == [["x"]] * 4
    assert sum(added) == 2 * 42
    assert set(added) <= {0, 4, 8, 30}


async def test_a_closed_cursor_with_many_filters_leaves_a_few_at_a_time() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        count = 3 * FILTERS_A_TURN
        closed, other = Client(feed, *[f"name {number}" for number in range(count)]), Client(feed, "name 1")
        await settle(broker)
        closed.cursor.close()
        assert (place(closed), len(feed), len(feed._tail)) == (CursorPlace.CLOSED, 1, count + 1)
        send(broker, "name 1", "x")
        await settle(broker)
        assert (closed.wakes, closed.cursor.has_pending, other.take()) == (0, False, ["x"])
        assert len(feed._tail) == 1


async def test_a_cursor_with_many_filters_joins_the_tail_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginnings, "FILTERS_A_SLICE", 10)
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        idle = Client(feed, *[f"idle {number}" for number in range(35)])
        await settle(broker)
        assert len(feed._tail) == 35  # though nothing was published
        idle.cursor.close()
        await settle(broker)
        client = Client(feed, *[f"name {number}" for number in range(35)])
        assert len(feed._tail) == 10
        for number in (34, 0, 17):
            send(broker, f"name {number}", str(number))
        await settle(broker)
        assert (client.take(), len(feed._tail)) == (["34", "0", "17"], 35)


async def test_a_filter_that_is_dropped_while_its_cursor_is_away_brings_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(departures, "FILTERS_A_TURN", 1)
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        client = Client(feed, "a", "b", "c", pending_bytes_max=500)
        for number in range(9):
            send(broker, "a", f"{number:0100d}")
            broker.store.committer.commit()
            await broker.store.flusher.wait_flushed(broker.store.appended)
            if place(client) is CursorPlace.FULL:
                break
        assert place(client) is CursorPlace.FULL
        assert len(feed._tail) > 0  # not all filters have gone yet
        for each in ("a", "b", "c"):
            client.cursor.remove_filter(each)
        client.cursor.add_filter("b")
        client.take()
        await settle(broker)
        for name in ("a", "b", "c"):
            send(broker, name, name)
        await settle(broker)
        client.take()
        assert (client.bodies[-1], place(client), len(feed._tail)) == ("b", CursorPlace.TAIL, 1)
        assert not {"a", "c"} & set(client.bodies)


async def test_a_full_cursor_keeps_its_position_and_continues_when_it_is_collected() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        slow, quick = Client(feed, "a", pending_bytes_max=2000), Client(feed, "a")
        for number in range(50):
            send(broker, "a", f"{number:0100d}")
            await settle(broker)
        assert (place(slow), place(quick)) == (CursorPlace.FULL, CursorPlace.TAIL)
        assert slow.cursor._pending_bytes <= 2000
        for _ in range(50):
            slow.take()
            await settle(broker)
        assert [int(body) for body in slow.bodies] == list(range(50))
        assert place(slow) is CursorPlace.TAIL
        assert len(quick.take()) == 50


async def test_cursors_that_have_much_together_are_full_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor_module, "PENDING_BYTES_ALL", 20_000)
    monkeypatch.setattr(cursor_module, "PENDING_BYTES_LEAST", 1000)
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        clients = [Client(feed, "a", pending_bytes_max=1 << 20) for _ in range(4)]
        for number in range(50):
            send(broker, "a", f"{number:0100d}")
            await settle(broker)
        assert {place(each) for each in clients} == {CursorPlace.FULL}
        assert 20_000 < feed.pending_bytes == sum(each.cursor._pending_bytes for each in clients) < 22_000
        clients.pop().cursor.close()
        for _ in range(50):
            for each in clients:
                each.take()
            await settle(broker)
        assert [[int(body) for body in each.bodies] for each in clients] == [list(range(50))] * 3
        assert feed.pending_bytes == 0


async def test_a_full_cursor_that_is_closed_keeps_the_position_of_what_was_not_collected() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        slow = Client(feed, "a", pending_bytes_max=2000)
        positions: list[int] = []
        for number in range(50):
            positions.append(send(broker, "a", f"{number:0100d}"))
            await settle(broker)
        assert place(slow) is CursorPlace.FULL
        slow.cursor.close()
        assert slow.cursor.position == positions[0]


async def test_a_full_cursor_at_the_tail_drops_what_may_be_dropped_and_waits_for_the_rest() -> None:
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        slow = Client(feed, "a", "b", pending_bytes_max=2000, droppable=lambda values: values == (0,))
        for number in range(40):
            send(broker, "a", f"{number:0100d}")
            await settle(broker)
        assert place(slow) is CursorPlace.TAIL
        kept = len(slow.take())
        assert 0 < kept < 40
        assert (slow.cursor.dropped, slow.cursor.position) == (40 - kept, broker.store.readable)
        for number in range(40, 80):
            send(broker, "a" if number < 70 else "b", f"{number:0100d}")
            await settle(broker)
        assert place(slow) is CursorPlace.FULL
        for _ in range(20):
            slow.take()
            await settle(broker)
        assert [int(body) for body in slow.bodies][-10:] == list(range(70, 80))
        assert slow.cursor.dropped + len(slow.bodies) == 80
        assert place(slow) is CursorPlace.TAIL


async def test_its_position_is_that_of_the_first_message_not_collected() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        client = Client(feed, "a", "b")
        positions = [send(broker, "ab"[n % 2], str(n)) for n in range(6)]
        await settle(broker)
        assert client.cursor.position == positions[0]
        assert client.take(1) == ["0"]
        assert (client.cursor.position, client.wakes) == (positions[1], 1)
        client.cursor.close()
        again = Client(feed, "a", "b", position=positions[1])
        await settle(broker)
        assert again.take() == ["1", "2", "3", "4", "5"]


async def test_a_sweep_continues_after_a_failed_read(
    autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, cache_bytes=0, page_bytes=256) as broker:
        feed = feed_of(broker)
        positions = [send(broker, "a", str(n)) for n in range(100)]
        await settle(broker)
        client = Client(feed, "a", position=positions[0])
        disk.fail_next("read", EIO)
        with trio.fail_after(60):
            while len(client.bodies) < 100:
                client.take()
                await trio.sleep(1)
        assert client.bodies == [str(n) for n in range(100)]
    assert "cursors behind the tail cannot read, retrying in 5 s" in caplog.text


async def test_a_cursor_that_skips_to_the_tail_gets_no_older_messages() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        send(broker, "a", "old")
        await settle(broker)
        client = Client(feed, "a", position=0)
        client.cursor.skip_to_tail()
        send(broker, "a", "new")
        await settle(broker)
        assert client.take() == ["new"]


async def test_filters_can_be_changed_wherever_the_cursor_is() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        send(broker, "b", "0")
        await settle(broker)
        client = Client(feed, "a", position=0)
        client.cursor.add_filter("b")
        send(broker, "b", "1")
        await settle(broker)
        client.cursor.remove_filter("b")
        client.cursor.add_filter("c/#")
        for name in ("a", "b", "c"):
            send(broker, name, name)
        await settle(broker)
        assert client.take() == ["1", "a", "c"]
        with pytest.raises(Refused) as refused:
            client.cursor.add_filter("c#")
        assert refused.value.reason is Reason.ILLEGAL


async def test_filters_that_a_paused_cursor_gets_begin_where_it_is() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        positions = [send(broker, "abc"[number % 3], str(number)) for number in range(6)]
        await settle(broker)
        client, closed = (Client(feed, position=positions[2], is_paused=True) for _ in range(2))
        for name in ("a", "b"):
            client.cursor.add_filter(name)
            await settle(broker)
        assert (client.cursor.position, client.wakes, feed.catch_up.sweeps) == (positions[2], 0, 0)
        closed.cursor.close()
        closed.cursor.resume()
        assert closed.cursor.position == positions[2]
        client.cursor.resume()
        await settle(broker)
        assert client.take() == ["3", "4"]
        client.cursor.resume()
        assert place(client) is CursorPlace.TAIL


async def test_what_retention_removed_is_skipped() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        for number in range(10):
            send(broker, "a", str(number))
        await settle(broker)
        broker.store.queue("t", 0).store_from(6)
        client = Client(feed, "#", position=0)
        await settle(broker)
        assert client.take() == ["6", "7", "8", "9"]


async def test_closing_removes_everything_from_memory() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        clients = [Client(feed, "a"), Client(feed, "b", position=0)]
        clients[0].cursor.close()
        clients[0].cursor.close()
        feed.close()
        send(broker, "a", "x")
        await settle(broker)
        assert clients[1].take() == []
        assert broker.cursors.statistics() == {"feeds": 0, "cursors": 0, "sweeps": 0, "viewed": 0}
        assert broker.tails.statistics()["followed"] == 0
        assert broker.store.queue("t", 0).watchers is None
        with pytest.raises(Refused):
            broker.cursors.open(["nope"])


STEP = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), st.sampled_from(["a", "a/b", "c"])),
    st.tuples(st.just("commit"), st.just(0), st.just("")),
    st.tuples(st.just("open"), st.integers(0, 60), st.sampled_from(["a", "#", "a/#", "+"])),
    st.tuples(st.just("follow"), st.just(0), st.sampled_from(["a", "#", "a/#", "+"])),
    st.tuples(st.just("filter"), st.integers(0, 5), st.sampled_from(["a", "#", "a/#", "+"])),
    st.tuples(st.just("take"), st.integers(0, 5), st.just("")),
    st.tuples(st.just("turn"), st.sampled_from([0, 1]), st.just("")),
)
WANTED: dict[str, Callable[[str], bool]] = {
    "a": lambda name: name == "a",
    "#": lambda name: True,
    "a/#": lambda name: name.startswith("a"),
    "+": lambda name: "/" not in name,
}


@settings(max_examples=80)
@given(
    st.lists(STEP, max_size=50),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([1, 300, 1 << 20]),
    st.booleans(),
    st.booleans(),
)
def test_every_cursor_gets_what_it_wants_once_and_in_order_whatever_happens(
    steps: list[tuple[str, int, str]], slice_messages: int, near_bytes: int, several_topics: bool, one_at_a_time: bool
) -> None:
    """With *one_at_a_time*, a turn adds one filter, or removes one."""
    others = ("z/1", "z/2") if one_at_a_time else ()
    topics = [f"t{number}" for number in range(3)] if several_topics else ["t"]

    async def scenario() -> None:
        async with broker_in_memory(flush="sync", cache_bytes=0, page_bytes=1024) as broker:
            feed = feed_of(broker, 1 if several_topics else 3, *topics)
            sent: list[tuple[int, str]] = []
            clients: list[tuple[Client, int, str]] = []
            for what, number, text in steps:
                if what == "send":
                    place_of = (0, topics[number]) if several_topics else (number, "t")
                    sent.append((send(broker, text, str(len(sent)), *place_of), text))
                elif what == "commit":
                    broker.store.committer.commit()
                elif what == "open":
                    position = sent[min(number, len(sent) - 1)][0] if sent else 0
                    client = Client(feed, text, *others, position=position, pending_bytes_max=400)
                    clients.append((client, position, text))
                elif what == "follow":
                    client = Client(feed, *others, text, pending_bytes_max=400)
                    clients.append((client, broker.store.appended, text))
                elif what == "filter" and clients:
                    _, position, _ = clients[number % len(clients)]
                    added = Client(feed, "z", *others, position=position, pending_bytes_max=400)
                    added.cursor.add_filter(text)
                    clients.append((added, broker.store.appended, text))
                elif what == "take" and clients:
                    clients[number % len(clients)][0].take(200)
                elif number:
                    await trio.testing.wait_all_tasks_blocked()
                else:
                    await trio.lowlevel.checkpoint()
                for client, position, wanted_name in clients:
                    missing = {p for p, name in sent if p >= position and WANTED[wanted_name](name)}
                    assert client.cursor.position <= min(missing.difference(client.positions), default=1 << 62)
            await settle(broker)
            for _ in range(len(sent) + 2):
                for client, _, _ in clients:
                    client.take()
                await settle(broker)
            for client, position, text in clients:
                assert place(client) is CursorPlace.TAIL
                wanted = [p for p, name in sent if p >= position and WANTED[text](name)]
                assert client.positions == wanted

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweep, "MESSAGES_A_SLICE", slice_messages)
        for module in (sweep, sweeps):
            patched.setattr(module, "AHEAD_BYTES", near_bytes)
        patched.setattr(sweeps, "NEAR_BYTES", near_bytes)
        if one_at_a_time:
            patched.setattr(beginnings, "FILTERS_A_SLICE", 1)
            patched.setattr(departures, "FILTERS_A_TURN", 1)
        trio.run(scenario)


async def test_a_run_is_split_where_the_receiver_takes_no_more_messages() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        client, other = Client(feed, "#"), Client(feed, "#")
        positions = [send(broker, "a", str(number)) for number in range(7)]
        await settle(broker)
        encoding = Encoding("bodies", lambda piece: [body for _, _, _, body, _ in parts(piece)])
        came: list[tuple[int, int, bytes]] = []
        for count in (1, 2, 1, 9):
            assert client.cursor.position == positions[len(b"".join(data for _, _, data in came))]
            (run, _), *more = client.cursor.collect(1 << 20, count)
            assert more == []
            frames = run.frames(encoding)
            assert frames.ends == list(range(1, run.count + 1))
            assert client.cursor.has_pending is (len(came) < 3)
            came.append((run.position, run.end, frames.data))
        assert [data for _, _, data in came] == [b"0", b"12", b"3", b"456"]
        assert [position for position, _, _ in came] == [positions[at] for at in (0, 1, 3, 4)]
        assert [end for _, end, _ in came] == [*(positions[at] for at in (1, 3, 4)), broker.store.readable]
        assert other.take() == [str(number) for number in range(7)]


@pytest.mark.parametrize("has_quota", [False, True])
async def test_a_run_is_split_for_a_quota_only_and_stays_shared_without_one(has_quota: bool) -> None:
    """A broker whose plugin has quotas, but none for these clients, still encodes each message once."""
    async with broker_in_memory(flush="sync") as broker:
        quotas = [Quota(bytes_out=100)] if has_quota else []
        broker.quotas.sources = (lambda identity: quotas,)
        feed = feed_of(broker)
        gates = [broker.gate(Identity(name), LoginOrigin(), RecordingPeer()) for name in ("ann", "bob")]
        cursors = [gate.follow(feed, lambda: None, {"#": 0}) for gate in gates]
        for _ in range(20):
            send(broker, "a", "x" * 100)
        await settle(broker)
        first, second = ([run for run, _ in cursor.collect(200)] for cursor in cursors)
        assert len(first) == len(second) == 1
        assert (first[0] is second[0]) is not has_quota
        assert (first[0].count == 20) is not has_quota


async def test_a_receiver_that_may_read_no_more_is_refused() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        gate = broker.gate(Identity("me"))
        cursor = gate.follow(feed, lambda: None, {"#": 0})
        send(broker, "a", "1")
        await settle(broker)
        broker.authorizers = (lambda identity, action, name: False,)
        with pytest.raises(Refused) as caught:
            cursor.collect(1000)
        assert caught.value.reason is Reason.NO_PERMISSION
        with pytest.raises(Refused):
            gate.follow(feed, lambda: None, {"#": 0})


async def test_a_cursor_that_is_closed_leaves_the_others_and_the_last_one_the_tail() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        topic = broker.topics.get("t")
        assert topic is not None
        reader = broker.tails.of(topic)
        one, two = Client(feed, "a"), Client(feed, "a")
        one.cursor.close()
        send(broker, "a", "1")
        await settle(broker)
        assert (one.take(), two.take(), len(feed)) == ([], ["1"], 1)
        two.cursor.close()
        reads = reader.reads
        send(broker, "a", "2")
        await settle(broker)
        assert (two.take(), len(feed), reader.reads) == ([], 0, reads)
        three = Client(feed, "a")
        send(broker, "a", "3")
        await settle(broker)
        assert three.take() == ["3"]


async def test_a_filter_that_is_added_during_a_sweep_gets_messages_published_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "MESSAGES_A_SLICE", 8)
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        for number in range(64):
            send(broker, "ab"[number % 2], str(number))
        await settle(broker)
        client = Client(feed, "a", position=0)
        places: list[CursorPlace] = []

        def add() -> None:
            if not places:
                places.append(place(client))
                client.cursor.add_filter("b")

        client.cursor.wake = add
        while not places:
            await trio.lowlevel.checkpoint()
        assert places == [CursorPlace.SWEPT]
        send(broker, "b", "new")
        await settle(broker)
        assert client.take() == [*(str(number) for number in range(0, 64, 2)), "new"]


class Allowing:
    """A permit for filters and names that begin with one of *beginnings*."""

    generation = 0

    def __init__(self, *beginnings: str) -> None:
        self._beginnings = beginnings

    def check(self, topic_filter: str) -> None:
        if not self.allows(topic_filter):
            raise Refused(Reason.NO_PERMISSION, f"filter {topic_filter!r} is not allowed")

    def allows(self, name: str) -> bool:
        return name.startswith(self._beginnings)


async def test_a_filter_that_the_receiver_may_not_follow_is_not_added() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        woken: list[None] = []
        cursor = feed.open(lambda: woken.append(None), {"a": None}, permit=Allowing("a"))
        with pytest.raises(Refused, match="filter 'b' is not allowed"):
            cursor.add_filter("b")
        cursor.add_filter("a/b")
        assert set(cursor.filters) == {"a", "a/b"}
        send(broker, "b", "b")
        await settle(broker)
        assert woken == []


async def test_a_feed_reads_each_slice_of_a_queue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MESSAGES_A_SLICE", 8)
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        for number in range(64):
            send(broker, "a", str(number))
        await settle(broker)
        client = Client(feed, "#", position=0)
        await settle(broker)
        assert (len(client.take()), feed.catch_up.reads, feed.catch_up.viewed) == (64, 8, 64)


def having(clients: list[Client], *bodies: str) -> int:
    """Return how many clients have collected exactly *bodies*."""
    for client in clients:
        client.take()
    return sum(client.bodies == list(bodies) for client in clients)


async def test_a_message_for_very_many_cursors_takes_several_turns() -> None:
    async with broker_in_memory() as broker:
        feed = feed_of(broker)
        clients = [Client(feed, "#") for _ in range(3 * RECEIVERS_A_SLICE)]
        first = send(broker, "a", "one")
        broker.store.committer.commit()
        assert having(clients, "one") == RECEIVERS_A_SLICE
        early, late = clients[0], clients[-1]
        assert early.cursor.position > first >= late.cursor.position
        late.cursor.close()
        new = Client(feed, "#")
        send(broker, "b", "two")
        await settle(broker)
        assert having(clients[:-1], "one", "two") == len(clients) - 1
        assert (late.bodies, new.take()) == ([], ["two"])
        again = Client(feed, "#", position=late.cursor.position)
        await settle(broker)
        assert again.take() == ["one", "two"]


class NamePermit:
    """Allows all names except ``denied``; counts the questions."""

    generation = 0
    denied = ""
    asked = 0

    def check(self, topic_filter: str) -> None:
        """Every filter is allowed."""

    def allows(self, name: str) -> bool:
        self.asked += 1
        return name != self.denied


@pytest.mark.parametrize("place_of", [CursorPlace.TAIL, CursorPlace.SWEPT])
async def test_permissions_of_very_many_cursors_are_checked_in_several_turns(place_of: CursorPlace) -> None:
    async with broker_in_memory() as broker:
        feed, permit = feed_of(broker), NamePermit()
        broker.cursors.asks = lambda: True
        permit.denied = "secret"
        start = None
        if place_of is CursorPlace.SWEPT:
            start = send(broker, "secret", "hidden")
            send(broker, "a", "one")
            await settle(broker)
        clients = [Client(feed, "#", position=start, permit=permit) for _ in range(4 * RECEIVERS_A_SLICE)]
        if place_of is CursorPlace.TAIL:
            send(broker, "secret", "hidden")
            send(broker, "a", "one")
            broker.store.committer.commit()
        most = before = permit.asked
        while permit.asked < 2 * len(clients):
            await trio.lowlevel.checkpoint()
            most, before = max(most, permit.asked - before), permit.asked
        # Trio may run the other task twice between two looks.
        assert most <= 2 * (RECEIVERS_A_SLICE + RECEIVERS_COUNTED)
        await settle(broker)
        assert having(clients, "one") == len(clients)


@pytest.mark.parametrize("asks", [False, True])
async def test_what_is_being_delivered_when_the_rules_change_continues_by_the_new_ones(asks: bool) -> None:
    async with broker_in_memory() as broker:
        feed, permit = feed_of(broker), NamePermit()
        broker.cursors.asks = lambda: asks
        clients = [Client(feed, "#", permit=permit) for _ in range(2 * RECEIVERS_A_SLICE)]
        few = Client(feed, "b", permit=permit)
        send(broker, "a", "one")
        send(broker, "b", "two")
        broker.store.committer.commit()
        assert having(clients, "one") == RECEIVERS_A_SLICE
        permit.denied = "a"
        broker.cursors.forget_routes()
        assert having(clients, "one") == RECEIVERS_A_SLICE, "a change of rules delivers nothing in its own turn"
        await settle(broker)
        assert few.take() == ["two"]
        assert having(clients, "one", "two") == (RECEIVERS_A_SLICE if asks else len(clients))
        assert having(clients, "two") == (RECEIVERS_A_SLICE if asks else 0)


async def test_a_sweep_of_very_many_cursors_takes_several_turns() -> None:
    async with broker_in_memory() as broker:
        feed = feed_of(broker)
        position = send(broker, "a", "one")
        await settle(broker)
        clients = [Client(feed, "#", position=position) for _ in range(2 * RECEIVERS_A_SLICE)]
        counts = [0]
        while any(place(client) is not CursorPlace.TAIL for client in clients):
            await trio.lowlevel.checkpoint()
            counts.append(sum(client.wakes > 0 for client in clients))
        assert max(new - old for old, new in pairwise(counts)) <= RECEIVERS_A_SLICE
        assert having(clients, "one") == len(clients)


@pytest.mark.parametrize("change", ["close", "rules", "skip"])
async def test_a_cursor_that_leaves_during_a_sweeps_turns_gets_nothing_twice(change: str) -> None:
    async with broker_in_memory() as broker:
        feed = feed_of(broker)
        position = send(broker, "a", "one")
        await settle(broker)
        clients = [Client(feed, "#", position=position) for _ in range(2 * RECEIVERS_A_SLICE)]
        while not any(client.wakes for client in clients):
            await trio.lowlevel.checkpoint()
        waiting = next(client for client in clients if not client.wakes)
        if change == "close":
            waiting.cursor.close()
        elif change == "skip":
            waiting.cursor.skip_to_tail()
        else:
            broker.cursors.forget_routes()
        await settle(broker)
        assert waiting.take() == (["one"] if change == "rules" else [])
        send(broker, "a", "two")
        await settle(broker)
        assert waiting.take() == ([] if change == "close" else ["two"])


async def test_a_collect_of_exactly_a_run_leaves_nothing_pending() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        client = Client(feed, "a")
        for number in range(3):
            send(broker, "a", str(number))
        await settle(broker)
        ((run, _),) = client.cursor.collect(1 << 20, 3)
        assert run.count == 3
        client.wakes = 0
        assert client.cursor.collect(1 << 20) == []
        assert (client.wakes, client.cursor.position) == (0, broker.store.readable)


async def test_a_cursor_that_was_full_gets_new_messages_after_those_that_it_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep, "MESSAGES_A_SLICE", 1)
    async with broker_in_memory(flush="sync", segment_bytes=1 << 22) as broker:
        feed = feed_of(broker)
        client = Client(feed, "a", pending_bytes_max=2000)
        for number in range(30):
            send(broker, "a", f"{number:0100d}")
            await settle(broker)
        assert place(client) is CursorPlace.FULL
        client.take()
        for _ in range(1000):
            await trio.lowlevel.checkpoint()
            if place(client) is CursorPlace.SWEPT:
                break
        assert place(client) is CursorPlace.SWEPT
        send(broker, "a", f"{30:0100d}")
        broker.store.committer.commit()
        broker.store.flusher.flush_now()
        for _ in range(40):
            client.take()
            await settle(broker)
        assert [int(body) for body in client.bodies] == list(range(31))


async def filled_and_damaged(disk: FakeDisk) -> list[int]:
    """Fill two queues, and flip a bit in the middle entry of one; return the positions of the messages."""
    async with broker_in_memory(disk, flush="sync", segment_bytes=1 << 22) as broker:
        feed_of(broker, 2)
        positions = [send(broker, f"name {number % 2}", str(number), number % 2) for number in range(400)]
        await settle(broker)
    first, at = 96 * ENTRY_BYTES, 4 * ENTRY_BYTES  # entry 100
    file = disk.files[f"/data/consumequeue/t/0/{first:020d}"]
    file.data[at] ^= 1
    file.stable[at] = file.data[at]
    return positions


async def test_a_damaged_queue_costs_a_cursor_nothing_of_the_others() -> None:
    disk = FakeDisk()
    positions = await filled_and_damaged(disk)
    async with broker_in_memory(disk, flush="sync", segment_bytes=1 << 22) as broker:
        client, all_names = (Client(feed_of(broker, 2), each, position=positions[300]) for each in ("name 1", "#"))
        await settle(broker)
        assert client.take() == [str(number) for number in range(301, 400, 2)]
        assert all_names.take() == [str(number) for number in range(300, 400)]


async def test_a_sweep_that_must_begin_too_early_brings_what_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FakeDisk()
    positions = await filled_and_damaged(disk)

    async def damaged(store: Store, queue: Queue, position: int) -> int:
        if queue.queue_id == 0:
            raise BlockDamaged(queue)
        return positions.index(position) // 2

    monkeypatch.setattr(sweep, "_search_offset", damaged)
    async with broker_in_memory(disk, flush="sync", segment_bytes=1 << 22) as broker:
        client = Client(feed_of(broker, 2), "#", position=positions[300])
        assert client.cursor.position == positions[300]
        await settle(broker)
        assert client.take() == [str(number) for number in range(300, 400)]


async def test_what_was_published_before_is_not_live_though_it_becomes_readable_later() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        early = Client(feed, "#")
        send(broker, "a", "old")
        follower, adding = Client(feed, "a"), Client(feed, "b")
        adding.cursor.add_filter("a")
        end = broker.store.appended
        skipping = Client(feed, "a", position=0)
        skipping.cursor.skip_to_tail()
        assert (follower.cursor.position, skipping.cursor.position) == (end, end)
        send(broker, "a", "new")
        await settle(broker)
        assert early.take() == ["old", "new"]
        assert [each.take() for each in (follower, adding, skipping)] == [["new"]] * 3


async def test_a_filter_begins_though_nothing_comes_that_it_matches() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed, other = feed_of(broker), feed_of(broker, 1, "u")
        Client(other, "#")
        client = Client(feed, "a")
        send(broker, "x", "other", topic="u")
        client.cursor.add_filter("b")
        assert set(broker.cursors._with_later_filters) == {feed}
        await settle(broker)
        assert (client.cursor.begins, broker.cursors._with_later_filters) == (None, {})


async def test_a_filter_begins_where_the_log_goes_on_after_a_failed_commit() -> None:
    disk = FakeDisk()
    async with broker_in_memory(disk, flush="sync") as broker:
        feed = feed_of(broker)
        behind = Client(feed, "z", position=0)
        await settle(broker)
        send(broker, "a", "lost")
        clients = [Client(feed, "a"), Client(feed, "b"), behind]
        for each in clients[1:]:
            each.cursor.add_filter("a")
        disk.fail_next("write", ENOSPC)
        with pytest.raises(Refused):
            broker.store.committer.commit()
        broker.store.admission.refusal = ""
        send(broker, "a", "kept")
        await settle(broker)
        assert [each.take() for each in clients] == [["kept"]] * 3


async def test_a_live_filter_of_a_paused_cursor_brings_nothing_old() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        for number in range(6):
            send(broker, "ab"[number % 2], str(number))
        await settle(broker)
        client = Client(feed, position=0, is_paused=True)
        client.cursor.add_filter("a")
        client.cursor.add_filter("b", is_live=True)
        send(broker, "b", "live")
        client.cursor.resume()
        await settle(broker)
        assert client.take() == ["0", "2", "4", "live"]


async def test_a_filter_of_a_paused_cursor_begins_where_it_is_said() -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed = feed_of(broker)
        positions = [send(broker, "ab"[number % 2], str(number)) for number in range(6)]
        await settle(broker)
        client, ahead = Client(feed, position=0, is_paused=True), Client(feed, position=0, is_paused=True)
        client.cursor.add_filter("a", begin=positions[2])
        client.cursor.add_filter("b", begin=positions[4])
        ahead.cursor.add_filter("a", begin=1 << 60)  # a power failure cut the log
        ahead.cursor.add_filter("b", begin=1)
        for each in (client, ahead):
            each.cursor.resume()
        send(broker, "a", "live")
        await settle(broker)
        assert client.take() == ["2", "4", "5", "live"]
        assert ahead.take() == ["1", "3", "5", "live"]


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("start", [None, 0])
async def test_a_filter_brings_nothing_from_before_it_when_the_rules_change(is_live: bool, start: int | None) -> None:
    async with broker_in_memory(flush="sync") as broker:
        feed, permit = feed_of(broker), NamePermit()
        for number in range(3):
            send(broker, "ab"[number % 2], str(number))
        await settle(broker)
        client = Client(feed, "a", position=start, permit=permit, is_paused=is_live and start is not None)
        send(broker, "a", "3")
        send(broker, "b", "4")
        await settle(broker)
        client.cursor.add_filter("b", is_live=is_live)
        client.cursor.resume()
        send(broker, "b", "5")
        await settle(broker)
        permit.generation += 1
        assert client.take() == []
        await settle(broker)
        assert client.take() == [*(["0", "2"] if start == 0 else []), "3", "5"]
        client.cursor.remove_filter("b")
        assert client.cursor.begins is None
