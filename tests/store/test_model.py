"""The store against plain lists, in any order of doing things (hypothesis)."""

from pathlib import Path
from random import Random

import trio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from martlet.message import Message
from martlet.records.codec import decode_records, tags_code
from martlet.store import ReadStatus, Store
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import HOST, ManualClock, append_batch, drain, message, small_config

CONFIG = small_config(segment_bytes=2048, page_bytes=256, cache_bytes=1024)

topics = st.sampled_from(["A", "B"])
queue_ids = st.integers(0, 1)
bodies = st.binary(max_size=300)
tags = st.sampled_from(["", "x", "y"])


class StoreMachine(RuleBasedStateMachine):
    """``stored`` holds what is readable, ``waiting`` what is appended and not durable, by queue."""

    @initialize()
    def begin(self) -> None:
        self.disk = FakeDisk()
        self.clock = ManualClock()
        self.stored: dict[tuple[str, int], list[Message]] = {}
        self.waiting: list[tuple[tuple[str, int], Message]] = []
        self.open()

    def open(self) -> None:
        async def opened() -> Store:
            return await Store.open(Path("/data"), CONFIG, self.clock, self.disk)

        self.store = trio.run(opened)
        self.store.writer.store_host = HOST

    @rule(topic=topics, queue_id=queue_ids, body=bodies, tag=tags)
    def append(self, topic: str, queue_id: int, body: bytes, tag: str) -> None:
        self.clock.ms += 1
        one = message(body, topic, tag, f"key{len(self.waiting)}")
        placed = self.store.writer.append(one, queue_id)
        place = (topic, queue_id)
        before = len(self.stored.get(place, [])) + sum(p == place for p, _ in self.waiting)
        assert placed.queue_offset == before
        self.waiting.append((place, one))

    @rule(topic=topics, queue_id=queue_ids, sizes=st.lists(st.integers(0, 120), min_size=1, max_size=6))
    def append_batch(self, topic: str, queue_id: int, sizes: list[int]) -> None:
        batch = [message(b"b" * size, topic) for size in sizes]
        placed = append_batch(self.store, batch, queue_id)
        assert placed[0].position // 2048 == (placed[-1].end - 1) // 2048
        self.waiting += [((topic, queue_id), one) for one in batch]

    @rule()
    def flush(self) -> None:
        self.store.committer.commit()
        self.store.flusher.flush_now()
        for place, one in self.waiting:
            self.stored.setdefault(place, []).append(one)
        self.waiting.clear()

    @rule()
    def save(self) -> None:
        self.flush()
        trio.run(self.store.upkeep.checkpointer.checkpoint)

    @rule()
    def stop_and_start(self) -> None:
        trio.run(self.store.close)
        for place, one in self.waiting:
            self.stored.setdefault(place, []).append(one)
        self.waiting.clear()
        self.open()

    @rule(seed=st.integers(0, 2**16))
    def lose_power(self, seed: int) -> None:
        self.disk = self.disk.after_power_cut(Cut.LOST, Random(seed))
        self.waiting.clear()
        self.open()

    @rule(
        topic=topics,
        queue_id=queue_ids,
        offset=st.integers(-1, 40),
        count=st.integers(1, 9),
        budget=st.integers(0, 900),
    )
    def read(self, topic: str, queue_id: int, offset: int, count: int, budget: int) -> None:
        wanted = self.stored.get((topic, queue_id), [])
        result = self.store.readers.read(self.store.queue(topic, queue_id), offset, count, budget)
        if 0 <= offset < len(wanted):
            records = decode_records(b"".join(result.pieces))
            assert result.status is ReadStatus.FOUND
            assert [r.body for r in records] == [m.body for m in wanted[offset : offset + result.count]]
            assert result.next_offset == offset + result.count
            assert 1 <= result.count <= count
            assert result.count == 1 or result.size <= budget
        else:
            assert not result.pieces

    @rule(topic=topics, queue_id=queue_ids, tag=tags)
    def search(self, topic: str, queue_id: int, tag: str) -> None:
        wanted = [m.body for m in self.stored.get((topic, queue_id), []) if m.property("TAGS") == tag]
        codes = frozenset((tags_code(tag),))
        queue = self.store.queue(topic, queue_id)
        found: list[bytes] = []
        offset = 0
        while offset < self.store.readers.end_offset(queue):
            result = self.store.readers.read(queue, offset, 10_000, 10**9, codes)
            assert result.next_offset > offset
            found += [r.body for r in decode_records(b"".join(result.pieces))]
            offset = result.next_offset
        assert found == wanted

    @invariant()
    def everything_is_there(self) -> None:
        for place, wanted in getattr(self, "stored", {}).items():
            assert drain(self.store, self.store.queue(*place)) == [m.body for m in wanted]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            assert self.store.readers.damaged_records == 0


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreAgainstLists = StoreMachine.TestCase
