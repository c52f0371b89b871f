"""Cursors, credit and selection: what a subscriber is sent, when, and what it costs while it is slow."""

from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.delivery.pushing import Collector, broker_in_memory, publish, subscribe, told

from martlet.delivery import subscriptions
from martlet.delivery.routing.selection import Selection
from martlet.delivery.subscriptions import from_earliest, from_offset, from_tail
from martlet.errors import Reason, Refused
from martlet.records.codec import tags_code
from martlet.records.layout import RecordView
from martlet.settings import DeliveryConfig
from martlet.testing.disk import FakeDisk


async def test_a_message_wakes_the_subscriber_and_is_collected_once() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t")
        assert collector.peer.wakes == 0
        publish(broker, "t", 0, b"a", b"b")
        assert collector.peer.wakes == 1
        assert await collector.turn() == ["0:0:a", "0:1:b"]
        assert collector.peer.wakes == 0
        assert collector.subscription.collect(1000) == []


async def test_nothing_is_collected_before_it_is_durable() -> None:
    async with broker_in_memory(flush="sync") as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t")
        publish(broker, "t", 0, b"a")
        assert collector.peer.wakes == 0
        assert collector.subscription.collect(1000) == []
        await broker.store.flusher.wait_flushed(broker.store.appended)
        assert await collector.drain() == ["0:0:a"]


async def test_a_subscriber_from_the_tail_gets_no_earlier_messages() -> None:
    async with broker_in_memory(flush="sync") as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, b"before")
        collector = subscribe(broker, "t")
        publish(broker, "t", 0, b"after")
        await broker.store.flusher.wait_flushed(broker.store.appended)
        assert await collector.drain() == ["0:1:after"]


@pytest.mark.parametrize(
    ("start", "first"),
    [(from_earliest, 2), (from_offset(0), 2), (from_offset(4), 4), (from_offset(99), 6), (from_tail, 6)],
)
async def test_a_start_is_kept_within_the_queue(start: Callable[..., int], first: int) -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *(b"%d" % n for n in range(6)))
        broker.store.queue("t", 0).store_from(2)  # as retention leaves it
        collector = subscribe(broker, "t", start=start)
        assert collector.subscription.cursor(0) == first
        assert await collector.drain() == [f"0:{n}:{n}" for n in range(first, 6)]


async def test_credit_is_spent_by_messages_and_waited_for() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t", credit=2)
        publish(broker, "t", 0, b"a", b"b", b"c")
        assert await collector.drain() == ["0:0:a", "0:1:b"]
        assert collector.subscription.credit == 0
        publish(broker, "t", 0, b"d")
        assert collector.peer.wakes == 0
        collector.subscription.add_credit(1)
        assert await collector.drain() == ["0:2:c"]
        collector.subscription.add_credit(5)
        assert await collector.drain() == ["0:3:d"]
        assert collector.subscription.credit == 4


async def test_a_budget_ends_a_turn_and_the_rest_wakes_again() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t")
        publish(broker, "t", 0, *(b"x" * 100 for _ in range(20)))
        first = await collector.turn(250)
        assert 2 <= len(first) <= 3
        assert collector.peer.wakes == 1
        assert len(await collector.drain(250)) == 20 - len(first)


async def test_small_messages_of_many_queues_are_collected_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MESSAGES_A_COLLECT", 20)
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 8)
        collector = subscribe(broker, "t")
        for queue_id in range(8):
            publish(broker, "t", queue_id, *[b"x"] * 10)
        assert len(await collector.turn()) == 20
        assert len(await collector.drain()) == 60


async def test_a_message_larger_than_the_budget_gets_through() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t")
        publish(broker, "t", 0, b"x" * 3000, b"y")
        assert [line[:5] for line in await collector.turn(10)] == ["0:0:x"]
        assert await collector.drain(10) == ["0:1:y"]


async def test_queues_take_turns() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 4)
        collector = subscribe(broker, "t")
        for queue_id in range(4):
            publish(broker, "t", queue_id, *(b"x" * 100 for _ in range(10)))
        turns = [await collector.turn(300) for _ in range(4)]
        assert {line[0] for turn in turns for line in turn} == {"0", "1", "2", "3"}


async def test_subscribers_at_the_tail_share_what_was_encoded_once() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collectors = [subscribe(broker, "t") for _ in range(10)]
        publish(broker, "t", 0, b"a", b"b", b"c")
        datas = [collector.subscription.collect(1000)[0].data for collector in collectors]
        assert all(data is datas[0] for data in datas)
        assert datas[0] == b"0:0:a\n0:1:b\n0:2:c\n"


async def test_a_shared_batch_is_cut_to_the_credit_and_the_cursor_of_each() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        rich, poor = subscribe(broker, "t"), subscribe(broker, "t", credit=1)
        publish(broker, "t", 0, b"a", b"b", b"c")
        assert await rich.drain() == ["0:0:a", "0:1:b", "0:2:c"]
        assert await poor.drain() == ["0:0:a"]
        poor.subscription.add_credit(9)
        assert await poor.drain() == ["0:1:b", "0:2:c"]


async def test_slow_and_absent_consumers_hold_numbers_only() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collectors = [subscribe(broker, "t", credit=0) for _ in range(100)]
        for _ in range(50):
            publish(broker, "t", 0, *(b"x" * 200 for _ in range(10)))
        assert broker.subscriptions.encodings.kept_bytes == 0
        assert all(collector.peer.wakes == 0 for collector in collectors)
        collectors[7].subscription.add_credit(1000)
        assert len(await collectors[7].drain()) == 500


async def test_the_memory_of_tails_is_bounded() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(encoded_bytes=2000)) as broker:
        broker.topics.ensure("t", 1)
        collectors = [subscribe(broker, "t") for _ in range(3)]
        for _ in range(20):
            publish(broker, "t", 0, *(b"x" * 90 for _ in range(10)))
            await collectors[0].drain()
            assert broker.subscriptions.encodings.kept_bytes <= 2000
        assert len(await collectors[1].drain()) == 200
        assert len(await collectors[2].drain()) == 200


async def test_far_behind_the_tail_the_loop_does_not_wait_for_the_disk() -> None:
    async with broker_in_memory(cache_bytes=0) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *(b"%0200d" % n for n in range(100)))
        collector = subscribe(broker, "t", start=from_earliest)
        assert await collector.turn() == []
        assert len(collector.peer.started) == 1
        assert collector.peer.wakes == 0
        assert len(await collector.drain()) == 100


async def test_a_peer_that_may_start_no_more_reads_continues_when_it_is_woken() -> None:
    async with broker_in_memory(cache_bytes=0) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *(b"%0200d" % n for n in range(50)))
        collector = subscribe(broker, "t", start=from_earliest)

        def busy(*arguments: object) -> None:
            raise Refused(Reason.BUSY, "64 are under way")

        allowed, collector.peer.start = collector.peer.start, busy  # type: ignore[method-assign, assignment]
        assert await collector.drain() == []
        collector.peer.start = allowed  # type: ignore[method-assign]
        collector.peer.wake()
        assert len(await collector.drain()) == 50


async def test_a_read_that_ends_after_its_subscription_changes_nothing() -> None:
    async with broker_in_memory(cache_bytes=0) as broker:
        broker.topics.ensure("t", 1)
        publish(broker, "t", 0, *(b"%0200d" % n for n in range(50)))
        collector = subscribe(broker, "t", start=from_earliest)
        collector.subscription.collect(1000)
        collector.subscription.close()
        await collector.peer.run_started()
        assert broker.subscriptions.encodings.kept_bytes == 0
        assert broker.subscriptions.statistics()["subscriptions"] == 0


async def test_a_selection_skips_what_nobody_wants() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        wanted = Selection(
            "tag A",
            frozenset({tags_code("Aa")}),
            lambda record: record.property("TAGS") == "Aa",
        )
        collector = subscribe(broker, "t", selection=wanted)
        publish(broker, "t", 0, *(b"no" for _ in range(3000)), properties=b"TAGS\x01C\x02")
        publish(broker, "t", 0, b"collision", properties=b"TAGS\x01BB\x02")
        publish(broker, "t", 0, b"yes", properties=b"TAGS\x01Aa\x02")
        assert await collector.drain() == ["0:3001:yes"]
        assert collector.subscription.cursor(0) == 3002


async def test_what_retention_removed_is_skipped() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t", credit=0)
        publish(broker, "t", 0, *(b"%d" % n for n in range(9)))
        broker.store.queue("t", 0).store_from(6)
        collector.subscription.add_credit(100)
        assert await collector.drain() == ["0:6:6", "0:7:7", "0:8:8"]


async def test_messages_in_memory_that_have_expired_are_skipped() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        fast, slow = subscribe(broker, "t"), subscribe(broker, "t", credit=0)
        publish(broker, "t", 0, *(b"%d" % n for n in range(9)))
        assert len(await fast.drain()) == 9
        broker.store.queue("t", 0).expire_to(6)
        slow.subscription.add_credit(100)
        assert await slow.drain() == ["0:6:6", "0:7:7", "0:8:8"]


async def test_new_queues_of_a_topic_are_followed_from_their_beginning() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        collector = subscribe(broker, "t")
        broker.topics.update("t", 3, 3)
        publish(broker, "t", 2, b"a")
        assert await collector.drain() == ["2:0:a"]


async def test_what_a_queue_held_before_it_could_be_read_is_delivered() -> None:
    async with broker_in_memory() as broker:
        broker.topics.update("t", 1, 2)
        collector = subscribe(broker, "t")
        publish(broker, "t", 1, b"early")
        broker.topics.update("t", 2, 2)
        assert await collector.drain() == ["1:0:early"]


async def test_a_deleted_topic_is_told() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 1)
        broker.topics.ensure("u", 1)
        gone, stays = subscribe(broker, "t"), subscribe(broker, "u")
        broker.topics.delete("t")
        assert (gone.subscription.gone, gone.peer.wakes) == (True, 1)
        assert (stays.subscription.gone, stays.peer.wakes) == (False, 0)


async def test_closing_removes_everything_from_memory() -> None:
    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 2)
        collectors = [subscribe(broker, "t") for _ in range(3)]
        publish(broker, "t", 0, b"a")
        collectors[0].subscription.collect(1000)
        for collector in collectors:
            collector.subscription.close()
            collector.subscription.close()
        assert all(broker.store.queue("t", n).watchers is None for n in range(2))
        assert broker.subscriptions.statistics() == {"subscriptions": 0, "encoded_bytes": 0}


async def test_a_topic_that_is_not_readable_is_refused() -> None:
    async with broker_in_memory(delivery=DeliveryConfig(subscriptions_max=1)) as broker:
        broker.topics.update("sealed", 1, 1, 2)
        broker.topics.ensure("t", 1)
        for topic, reason in (("none", Reason.NO_TOPIC), ("sealed", Reason.NO_PERMISSION)):
            with pytest.raises(Refused) as caught:
                subscribe(broker, topic)
            assert caught.value.reason is reason
        subscribe(broker, "t")
        with pytest.raises(Refused, match=r"delivery\.subscriptions_max is 1"):
            subscribe(broker, "t")


async def test_what_was_found_before_a_filter_failed_is_delivered_and_then_the_failure_told() -> None:
    def fussy(record: RecordView) -> bool:
        if bytes(record.body) == b"bad":
            raise Refused(Reason.ILLEGAL, "this record does not please")
        return True

    async with broker_in_memory() as broker:
        broker.topics.ensure("t", 2)
        publish(broker, "t", 0, b"good")
        publish(broker, "t", 1, b"bad")
        collector = subscribe(broker, "t", selection=Selection("fussy", None, fussy), start=from_earliest)
        assert await collector.turn() == ["0:0:good"]
        for _ in range(2):
            with pytest.raises(Refused, match="does not please"):
                await collector.turn()
            collector.peer.wake()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 2), st.integers(1, 6)),
        st.tuples(st.just("turn"), st.integers(0, 3), st.integers(1, 900)),
        st.tuples(st.just("credit"), st.integers(0, 3), st.integers(1, 7)),
        st.tuples(st.just("open"), st.integers(0, 3), st.integers(0, 9)),
        st.tuples(st.just("flush"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


class Model:
    """Four subscribers of a topic with three queues, beside lists."""

    def __init__(self) -> None:
        self.published: list[list[str]] = [[], [], []]
        self.collectors: dict[int, Collector] = {}
        self.starts: dict[int, list[int]] = {}

    async def run(self, operations: list[tuple[str, int, int]], flush: str, cache_bytes: int) -> None:
        async with broker_in_memory(FakeDisk(), flush=flush, cache_bytes=cache_bytes) as broker:
            broker.topics.ensure("t", 3)
            for name, which, number in operations:
                if name == "publish":
                    bodies = [f"{len(self.published[which]) + n}".rjust(60, "x") for n in range(number)]
                    publish(broker, "t", which, *(body.encode() for body in bodies))
                    self.published[which] += bodies
                elif name == "open" and which not in self.collectors:
                    self.starts[which] = [min(number, len(queue)) for queue in self.published]
                    self.collectors[which] = subscribe(broker, "t", start=from_offset(number), credit=number % 3)
                elif name == "credit" and which in self.collectors:
                    self.collectors[which].subscription.add_credit(number)
                elif name == "turn" and which in self.collectors:
                    credit = self.collectors[which].subscription.credit
                    assert len(await self.collectors[which].turn(number)) <= credit
                elif name == "flush":
                    await broker.store.flusher.wait_flushed(broker.store.appended)
                self.check()
            await broker.store.flusher.wait_flushed(broker.store.appended)
            for collector in self.collectors.values():
                collector.subscription.add_credit(10_000)
                await collector.drain(500)
            self.check()
            for which, starts in self.starts.items():
                assert len(self.collectors[which].got) == sum(
                    len(queue) - start for queue, start in zip(self.published, starts, strict=True)
                )

    def check(self) -> None:
        for which, collector in self.collectors.items():
            for queue_id, start in enumerate(self.starts[which]):
                got = [line for line in collector.got if line.startswith(f"{queue_id}:")]
                expected = [f"{queue_id}:{n}:{body}" for n, body in enumerate(self.published[queue_id])][start:]
                assert got == expected[: len(got)]


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, flush=st.sampled_from(["async", "sync"]), cache_bytes=st.sampled_from([0, 4096]))
def test_every_subscriber_gets_every_message_once_in_order_and_no_wake_up_is_lost(
    operations: list[tuple[str, int, int]], flush: str, cache_bytes: int
) -> None:
    model = Model()
    trio.run(model.run, operations, flush, cache_bytes)
    assert sum(len(collector.got) for collector in model.collectors.values()) == sum(
        len(queue) - start
        for starts in model.starts.values()
        for queue, start in zip(model.published, starts, strict=True)
    )


async def test_a_subscriber_that_is_overtaken_during_a_read_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A shared batch moves the cursor before its own read has finished; the result of that read is dropped."""
    gates: list[trio.Event] = []

    async def off_loop(disk: FakeDisk, work: Callable[[], object]) -> object:
        if gates:
            await gates.pop().wait()
        return work()

    monkeypatch.setattr(FakeDisk, "off_loop", off_loop)
    async with broker_in_memory(page_bytes=4096, cache_bytes=2 * 4096, segment_bytes=1 << 20) as broker:
        broker.topics.ensure("t", 2)
        broker.topics.ensure("other", 1)
        for number in range(100):
            publish(broker, "t", number // 50, bytes(300))
        for _ in range(40):  # pushes the first ones out of the memory
            publish(broker, "other", 0, bytes(1000))
        slow = subscribe(broker, "t", start=from_earliest, credit=1000)
        quick = subscribe(broker, "t", start=from_earliest, credit=1000)
        await slow.turn()
        await quick.turn()
        gate = trio.Event()
        gates.append(gate)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slow.peer.run_started)
            await trio.testing.wait_all_tasks_blocked()
            await quick.turn()
            slow.subscription.add_credit(1)
            slow.got += told(slow.subscription.collect(1 << 20))
            slow.peer.wakes = 0
            gate.set()
        assert 0 < len(slow.got) < 100
        await slow.drain()
        assert len(slow.got) == 100
