"""The table of pending transactions, against a dictionary; and what a million of them cost."""

import tracemalloc
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from martlet.runtime.steps import finish_now
from martlet.state import pack_rows, unpack_rows
from martlet_tx.halves import BLOCKS_MAX, CHECKS_MAX, PAGE, Halves, OpBlocks


class HalvesModel(RuleBasedStateMachine):
    """Every operation on the table, on a dictionary as well; offsets are close enough together to share pages."""

    @initialize(first=st.sampled_from((0, 1, PAGE - 3, PAGE * 7)))
    def begin(self, first: int) -> None:
        self.halves = Halves()
        self.model: dict[int, int] = {}
        self.next = first

    @rule(gap=st.sampled_from((0, 0, 0, 1, PAGE // 2, PAGE * 3)), checks=st.integers(0, 300))
    def add(self, gap: int, checks: int) -> None:
        offset = self.next + gap
        self.halves.add(offset, offset * 100, offset, checks)
        self.model[offset] = min(checks, CHECKS_MAX)
        self.next = offset + 1

    @rule(gap=st.sampled_from((0, 0, 1, PAGE * 3)), count=st.integers(1, PAGE))
    def add_all(self, gap: int, count: int) -> None:
        offset = self.next + gap
        count = min(count, PAGE - offset % PAGE)
        self.halves.add_all(offset, count, offset * 100, offset)
        self.model.update(dict.fromkeys(range(offset, offset + count), 0))
        self.next = offset + count

    @rule(data=st.data())
    def end_all(self, data: Any) -> None:
        offsets = data.draw(st.lists(st.integers(0, self.next + PAGE) | st.sampled_from([0, *self.model])))
        self.halves.end_all(offsets)
        for offset in offsets:
            self.model.pop(offset, None)

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        offset = data.draw(st.integers(0, self.next + PAGE))
        assert self.halves.end(offset) == (self.model.pop(offset, None) is not None)

    @rule(data=st.data(), checks=st.integers(0, 300))
    def set_checks(self, data: Any, checks: int) -> None:
        offset = data.draw(st.integers(0, self.next + PAGE))
        self.halves.set_checks(offset, checks)
        if offset in self.model:
            self.model[offset] = min(checks, CHECKS_MAX)

    @rule(data=st.data())
    def end_before(self, data: Any) -> None:
        offset = data.draw(st.integers(0, self.next + PAGE))
        self.halves.end_before(offset)
        self.model = {each: checks for each, checks in self.model.items() if each >= offset}

    @rule()
    def save_and_restore(self) -> None:
        frozen, before = self.halves.freeze(), dict(self.model)
        for offset in list(before)[::2]:
            self.end_one(offset)
        data = b"".join(finish_now(pack_rows(1, frozen)))
        restored = Halves()
        restored.next = self.halves.next
        for number, page in unpack_rows(1, data):
            restored.restore(number, *page)
        self.halves, self.model = restored, before

    def end_one(self, offset: int) -> None:
        assert self.halves.end(offset)

    @invariant()
    def is_as_the_model(self) -> None:
        halves = self.halves
        found = [offset for number in halves.pages() for offset in halves.pending_in(number)]
        assert found == sorted(self.model)
        assert halves.pending == len(self.model)
        assert {offset: halves.checks(offset) for offset in found} == self.model
        assert halves.first() == (found[0] if found else halves.next)
        floor = halves.floor()
        assert (floor is None) == (not found)
        assert floor is None or floor[0] <= found[0] * 100


HalvesModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHalves = HalvesModel.TestCase


def test_a_million_half_messages_of_which_a_tenth_is_pending_take_two_mebibytes() -> None:
    """A fifth of them, because the measurement takes long."""
    random = Random(5)
    tracemalloc.start()
    try:
        halves, ops = Halves(), OpBlocks()
        for offset in range(200_000):
            halves.add(offset, offset * 1000, 1_700_000_000_000 + offset)
            if random.random() >= 0.1:
                halves.end(offset)
                ops.add(ops.next, offset)
        assert 18_000 < halves.pending < 22_000
        del random
        size, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 2 * 1024 * 1024 // 5, f"{peak} bytes, {size} in the end"


def test_op_blocks_never_leave_out_an_op_record() -> None:
    random = Random(11)
    ops = OpBlocks()
    named: list[int] = []
    half = 0
    for offset in range(30_000):
        half += random.randrange(3)
        highest = max(half - random.randrange(2000), 0)
        ops.add(offset, highest)
        named.append(highest)
        if random.randrange(500) == 0:
            bound = max(half - 2500, 0)
            ops.drop_before(bound)
            first = ops.first_with(bound)
            assert all(each < bound for each in named[:first])
    assert ops.first_with(half + 1) == ops.next == 30_000


def test_op_blocks_are_few_and_still_right_however_long_one_transaction_is_pending() -> None:
    ops = OpBlocks()
    count = 256 * (BLOCKS_MAX + 10) * 2
    for offset in range(count):
        ops.add(offset, offset + 1)
        ops.drop_before(0)
    assert len(ops.freeze()) <= BLOCKS_MAX
    first = ops.first_with(count // 2)
    assert count // 2 - 2048 < first < count // 2
    restored = OpBlocks()
    restored.restore(ops.freeze(), ops.next)
    assert restored.first_with(count // 2) == first
    assert restored.next == count


@pytest.mark.parametrize("offset", [0, 5])
def test_without_op_records_rocketmq_reads_on_at_the_next_one(offset: int) -> None:
    ops = OpBlocks()
    ops.restore([], offset)
    assert ops.first_with(0) == offset


def test_op_blocks_come_back_from_a_snapshot() -> None:
    """There a block is a list, as msgpack has no tuples."""
    ops = OpBlocks()
    for offset in range(3):
        ops.add(offset, offset)
    ((blocks,),) = unpack_rows(1, b"".join(finish_now(pack_rows(1, [(ops.freeze(),)]))))
    again = OpBlocks()
    again.restore(blocks, ops.next)
    assert (again.freeze(), again.next) == (ops.freeze(), ops.next)
