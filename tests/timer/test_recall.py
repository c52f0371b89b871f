"""A recalled message is never delivered, and nothing but the right time, topic and key recalls it."""

from errno import EIO
from random import Random

import pytest
import trio
from tests.cold_disk import cold_disk
from tests.timer.timer_talk import timed
from trio.testing import MockClock

from martlet.contracts import Timers
from martlet.errors import Reason, Refused
from martlet.message import decode_properties
from martlet.tables.topics import TIMER_TOPIC
from martlet.testing.clock import START_MS, TrioClock
from martlet.testing.disk import FakeDisk
from martlet_timer.timers.records import key_of, out_of

DUE_MS = START_MS + 5000
OUT_MS = out_of(DUE_MS)


async def test_a_recalled_message_is_not_delivered(autojump_clock: MockClock) -> None:
    async with timed() as made:
        for number in range(3):
            made.publish(body=b"%d" % number, UNIQ_KEY=f"K{number}", TIMER_DELIVER_MS=DUE_MS)
        await trio.sleep(1)
        capability = made.broker.capability(Timers)
        assert capability is not None
        assert capability.recall is not None
        end = await capability.recall("T", OUT_MS, "K1", "producers")
        assert end == made.broker.store.written
        await made.broker.store.flusher.wait_flushed(end)
        assert made.statistics["pending"] == 2
        await trio.sleep(5)
        assert made.bodies() == [b"0", b"2"]
        assert made.statistics["recalled"] == 1
        # What RocketMQ reads if it opens this store: 5.5 compares the second key, later versions the first.
        for record, key in zip(made.records(TIMER_TOPIC)[-2:], ("T+K1", "K1"), strict=True):
            assert record.body == b"0"
            assert decode_properties(record.properties) == {
                "TAGS": "_RECALL_TAG_",
                "TIMER_DEL_UNIQKEY": key,
                "UNIQ_KEY": "K1",
                "TIMER_DELIVER_MS": str(DUE_MS),
                "PGROUP": "producers",
                "TIMER_OUT_MS": str(OUT_MS),
                "REAL_TOPIC": "T",
                "REAL_QID": "0",
            }


@pytest.mark.parametrize(
    ("topic", "out_ms", "unique"),
    [
        ("other", OUT_MS, "K0"),
        ("T", OUT_MS + 1, "K0"),
        ("T", OUT_MS, "K1"),
        ("T", OUT_MS, ""),
        ("T+K0", OUT_MS, ""),
        ("T", OUT_MS, "K0\x01"),
        ("T", 1 << 70, "K0"),
    ],
)
async def test_a_forged_handle_recalls_nothing(autojump_clock: MockClock, topic: str, out_ms: int, unique: str) -> None:
    async with timed(topics=("T", "other")) as made:
        made.publish(UNIQ_KEY="K0", TIMER_DELIVER_MS=DUE_MS)
        await trio.sleep(1)
        assert await made.plugin.recalls.recall(topic, out_ms, unique) == 0
        await trio.sleep(5)
        assert len(made.records()) == 1


async def test_a_key_with_the_same_hash_recalls_nothing(autojump_clock: MockClock) -> None:
    async with timed() as made:
        placed = made.publish(UNIQ_KEY="K0", TIMER_DELIVER_MS=DUE_MS)
        await trio.sleep(1)
        pending = made.plugin.timers.pending
        pending.remove(DUE_MS, placed.position)
        pending.add(DUE_MS, placed.position, key_of("T", "another"))
        assert await made.plugin.recalls.recall("T", OUT_MS, "another") == 0


async def test_recalls_that_come_too_late_say_so(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(UNIQ_KEY="K0", TIMER_DELIVER_MS=DUE_MS)
        made.publish(UNIQ_KEY="K1", TIMER_DELIVER_MS=DUE_MS)
        await trio.sleep(1)
        await made.plugin.recalls.recall("T", OUT_MS, "K0")
        assert await made.plugin.recalls.recall("T", OUT_MS, "K0") == 0
        await trio.sleep(5)
        text = f"message 'K1' of topic\\[T\\] was due at {DUE_MS} ms and cannot be recalled any more"
        with pytest.raises(Refused, match=text) as refused:
            await made.plugin.recalls.recall("T", OUT_MS, "K1")
        assert refused.value.reason == Reason.NOT_FOUND


async def test_both_copies_of_a_message_that_was_sent_twice_are_recalled(autojump_clock: MockClock) -> None:
    async with timed() as made:
        for _ in range(2):
            made.publish(UNIQ_KEY="K0", TIMER_DELIVER_MS=DUE_MS)
        await trio.sleep(1)
        await made.plugin.recalls.recall("T", OUT_MS, "K0")
        await trio.sleep(5)
        assert made.records() == []
        assert made.statistics["recalled"] == 2


async def test_a_recall_that_is_refused_changes_nothing(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(UNIQ_KEY="K0", TIMER_DELIVER_MS=DUE_MS)
        await trio.sleep(1)
        made.broker.store.admission.close("no room for a test")
        with pytest.raises(Refused, match="no room for a test"):
            await made.plugin.recalls.recall("T", OUT_MS, "K0")
        made.broker.store.admission.refusal = ""
        await made.plugin.recalls.recall("T", OUT_MS, "K0")
        await trio.sleep(5)
        assert made.records() == []


async def test_a_recall_that_cannot_read_the_message_does_not_say_that_it_is_gone(autojump_clock: MockClock) -> None:
    _, disk = cold_disk()
    async with timed(disk, topics=("T", "other"), segment_bytes=8192, page_bytes=1024, cache_bytes=16_384) as made:
        made.publish(UNIQ_KEY="K0", TIMER_DELIVER_MS=DUE_MS)
        for _ in range(40):
            made.publish("other", b"x" * 900)
        await trio.sleep(1)
        disk.fail_next("read", EIO)
        with pytest.raises(Refused, match=r"cannot be read; Input.output error, check the disk") as refused:
            await made.plugin.recalls.recall("T", OUT_MS, "K0")
        assert refused.value.reason == Reason.UNAVAILABLE
        await made.plugin.recalls.recall("T", OUT_MS, "K0")
        await trio.sleep(5)
        assert made.records() == []


async def test_a_recall_waits_for_a_timer_that_is_being_moved(autojump_clock: MockClock) -> None:
    async with timed() as made:
        made.publish(UNIQ_KEY="K0", TIMER_DELAY_MS=60_000)
        await trio.sleep(1)
        ((timer,),) = made.plugin.timers.pending.in_range(0, made.broker.store.appended)
        assert made.plugin.timers.schedule.hold(timer)
        began = trio.current_time()
        with pytest.raises(Refused, match="has been in delivery for 10 s; try again") as busy:
            await made.plugin.recalls.recall("T", out_of(timer[0]), "K0")
        assert busy.value.reason == Reason.BUSY
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.plugin.recalls.recall, "T", out_of(timer[0]), "K0")
            await trio.sleep(5)
            assert made.statistics["recalled"] == 0
            made.plugin.timer_delivery.give_back([timer])
        assert trio.current_time() - began == pytest.approx(15)
        assert made.statistics["recalled"] == 1


async def test_recalls_deliveries_and_moves_at_the_same_time(autojump_clock: MockClock) -> None:
    random = Random(4)
    async with timed(segment_bytes=1 << 20) as made:
        due = {f"K{number}": START_MS + 1000 + random.randrange(2000) for number in range(300)}
        for unique, due_ms in due.items():
            made.publish(body=unique.encode(), UNIQ_KEY=unique, TIMER_DELIVER_MS=due_ms)
        recalled: set[bytes] = set()
        reasons: set[Reason] = set()

        async def recall() -> None:
            for unique in random.sample(sorted(due), 150):
                await trio.sleep(random.random() / 30)
                try:
                    end = await made.plugin.recalls.recall("T", out_of(due[unique]), unique)
                except Refused as refused:
                    reasons.add(refused.reason)
                else:
                    await made.broker.store.flusher.wait_flushed(end)
                    if end:
                        recalled.add(unique.encode())

        async def move() -> None:
            for _ in range(20):
                await made.broker.turns.finish(made.plugin.timers.roll(0, made.broker.store.appended))
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(recall)
            nursery.start_soon(recall)
            nursery.start_soon(move)
        await trio.sleep(3)
        came = made.bodies()
        assert len(recalled) > 50
        assert reasons == {Reason.NOT_FOUND}
        assert sorted(came) == sorted({unique.encode() for unique in due} - recalled)


async def test_a_recall_survives_a_restart(autojump_clock: MockClock) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with timed(disk, clock) as made:
        made.publish(UNIQ_KEY="K0", TIMER_DELIVER_MS=DUE_MS)
        await trio.sleep(1)
        await made.plugin.recalls.recall("T", OUT_MS, "K0")
    async with timed(disk, clock) as made:
        await trio.sleep(6)
        assert made.records() == []
