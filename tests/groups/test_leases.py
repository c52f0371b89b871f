"""Who holds what: against a model, and the promises one by one."""

import math
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from martlet.errors import LocalProtocolError
from martlet.groups.leases.queue_leases import Leases
from martlet.groups.leases.table import SETTLED_MIN

HOLDERS: Final = ("ada", "bob", "cyn")


def handed_out(count: int, window: int = 100, deliveries_max: int = 0) -> Leases:
    leases = Leases(10, window=window, deliveries_max=deliveries_max)
    leases.hand_out("ada", range(10, 10 + count), 30.0)
    return leases


def test_what_was_handed_out_is_held_and_the_low_mark_waits_for_it() -> None:
    leases = handed_out(3)
    assert leases.table.held("ada") == [10, 11, 12]
    assert (leases.table.low, leases.table.next, leases.table.unsettled, leases.table.room) == (10, 13, 3, 97)


def test_the_low_mark_passes_only_what_is_settled() -> None:
    leases = handed_out(3)
    assert leases.ack("ada", 11)
    assert leases.table.low == 10
    assert leases.ack("ada", 10)
    assert leases.table.low == 12
    assert leases.ack("ada", 12)
    assert leases.table.low == leases.table.next == 13


def test_only_its_holder_settles_a_message_and_only_once() -> None:
    leases = handed_out(1)
    assert not leases.ack("bob", 10)
    assert leases.ack("ada", 10)
    assert not leases.ack("ada", 10)
    assert not leases.ack("ada", 99)


def test_a_message_of_a_dead_holder_goes_to_another() -> None:
    leases = handed_out(2)
    for offset in leases.table.held("ada"):
        assert leases.give_back("ada", offset)
    assert leases.table.held("ada") == []
    assert leases.hand_again("bob", 5, 60.0) == [(10, 2), (11, 2)]
    assert not leases.ack("ada", 10)
    assert leases.ack("bob", 10)


def test_several_messages_are_settled_together() -> None:
    leases = handed_out(6)
    assert list(leases.ack_held("ada", range(10, 13))) == [10, 11, 12]
    assert (leases.table.low, leases.table.held("ada")) == (13, [13, 14, 15])
    assert list(leases.ack_held("ada", [15, 99, 12, 14, 14])) == [15, 14]
    assert (leases.table.low, leases.table.held("ada"), leases.table.unsettled) == (13, [13], 1)
    assert list(leases.ack_held("ada", ())) == []
    assert list(leases.ack_held("bob", [13])) == []
    assert list(leases.ack_held("ada", [13])) == [13]
    assert (leases.table.low, leases.table.held("ada"), list(leases.ack_held("ada", [13]))) == (16, [], [])


def test_of_another_holders_messages_none_is_settled_in_a_run() -> None:
    leases = handed_out(2)
    leases.hand_out("bob", range(12, 14), 30.0)
    assert list(leases.ack_held("ada", range(10, 14))) == [10, 11]
    assert leases.begin_settling("bob", 12, 20.0)
    assert list(leases.ack_held("bob", range(10, 14))) == [13]
    assert leases.table.held("bob") == [12]


def test_what_a_holder_leaves_is_available_again_in_order() -> None:
    leases = Leases(0, window=1000, deliveries_max=2)
    leases.hand_out("bob", range(3), math.inf)
    leases.hand_out("ada", range(3, 400), math.inf)
    assert leases.give_back_all("ada", [*range(3, 300), 5, 900]) == list(range(3, 300))
    assert leases.give_back_all("bob", range(3)) == [0, 1, 2]
    assert (leases.table.held("ada"), leases.table.held("bob")) == (list(range(300, 400)), [])
    assert leases.hand_again("cyn", 999, math.inf) == [(offset, 2) for offset in range(300)]
    assert leases.table.held_by_deliveries("cyn") == {2: list(range(300))}
    assert leases.give_back_all("cyn", range(10), 50.0, counts=False) == list(range(10))
    assert (leases.dead(), leases.waiting, leases.lapse(49.0), leases.lapse(50.0)) == ([], 0, 0, 10)
    assert leases.give_back_all("cyn", range(10, 300)) == list(range(10, 300))
    assert (leases.waiting, leases.dead()) == (10, list(range(10, 300)))


def test_the_end_of_a_lease_kills_no_message_if_that_does_not_count() -> None:
    leases = Leases(0, window=10, deliveries_max=1, lapses_count=False)
    leases.hand_out("ada", range(2), 30.0)
    assert leases.lapse(30.0) == 2
    assert leases.hand_again("ada", 2, 60.0) == [(0, 2), (1, 2)]
    assert leases.give_back("ada", 1)
    assert (leases.lapse(60.0), leases.dead()) == (1, [1])


def test_an_acknowledgement_that_is_withdrawn_leaves_the_lease_as_it_was() -> None:
    leases = handed_out(1)
    assert leases.begin_settling("ada", 10, 20.0)
    assert not leases.ack("ada", 10)
    assert leases.end_settling(10, done=False) == "ada"
    assert (leases.lapse(29.0), leases.table.held("ada")) == (0, [10])
    assert leases.lapse(30.0) == 1


def test_messages_to_redeliver_and_dead_messages_are_listed() -> None:
    leases = handed_out(4, deliveries_max=2)
    assert leases.returns.first(9) == []
    for offset in (12, 10):
        leases.give_back("ada", offset)
    leases.give_back("ada", 11, 100.0)
    assert (leases.returns.first(1), leases.returns.first(9)) == ([10], [10, 12])
    assert [leases.returns.has(offset) for offset in (10, 11, 12, 13, 99)] == [True, False, True, False, False]
    assert leases.hand_again("bob", 9, 60.0) == [(10, 2), (12, 2)]
    leases.give_back("bob", 10)
    assert (leases.is_dead(10), leases.returns.has(10), leases.is_dead(12)) == (True, False, False)


def test_a_silent_holder_loses_its_message_at_the_deadline_and_not_before() -> None:
    leases = handed_out(1)
    assert leases.deadline() == 30.0
    assert leases.lapse(29.9) == 0
    assert leases.lapse(30.0) == 1
    assert not leases.ack("ada", 10)
    assert leases.hand_again("ada", 1, 60.0) == [(10, 2)]


def test_a_lease_is_made_longer_and_shorter() -> None:
    leases = handed_out(1)
    assert leases.renew("ada", 10, 50.0)
    assert leases.lapse(49.0) == 0
    assert leases.table.held("ada") == [10]
    assert leases.renew("ada", 10, 49.5)
    assert leases.deadline() <= 49.5
    assert leases.lapse(49.4) == 0
    assert leases.lapse(49.5) == 1
    assert not leases.renew("ada", 10, 99.0)


def test_each_renewal_makes_another_handle_even_at_the_same_time() -> None:
    leases = handed_out(1)
    generations = []
    for _ in range(3):
        assert leases.renew("ada", 10, 50.0, generation=7)
        generations.append(leases.table.generation(10))
    assert generations == [7, 8, 9]
    for generation in (10, 11):
        assert leases.give_back("ada", 10, -math.inf)
        assert leases.hand_again("ada", 1, 60.0, generation=7)
        assert leases.table.generation(10) == generation


def test_a_message_that_was_given_back_comes_again_after_its_delay() -> None:
    leases = handed_out(2)
    assert leases.give_back("ada", 10, 100.0)
    assert leases.give_back("ada", 11)
    assert not leases.give_back("ada", 11)
    assert leases.hand_again("bob", 5, 200.0) == [(11, 2)]
    assert leases.lapse(99.0) == 0
    assert leases.lapse(100.0) == 1
    assert leases.hand_again("bob", 5, 200.0) == [(10, 2)]


def test_a_message_whose_deliveries_are_used_up_is_dead_until_it_is_settled() -> None:
    leases = handed_out(1, deliveries_max=2)
    leases.give_back("ada", 10)
    assert leases.dead() == []
    leases.hand_again("bob", 1, 60.0)
    leases.lapse(60.0)
    assert leases.dead() == [10]
    assert leases.waiting == 0
    assert leases.table.low == 10
    leases.settle_dead(10)
    assert leases.table.low == 11
    assert leases.dead() == []


def test_a_gap_between_offsets_counts_as_settled() -> None:
    leases = Leases(0, window=10, deliveries_max=0)
    leases.hand_out("ada", [2, 5], 30.0)
    assert leases.table.low == 2
    leases.ack("ada", 2)
    assert leases.table.low == 5
    leases.skip_to(9)
    assert (leases.table.low, leases.table.next) == (5, 9)
    leases.ack("ada", 5)
    assert leases.table.low == 9


def test_the_window_is_never_exceeded_and_never_handed_out_twice() -> None:
    leases = handed_out(3, window=3)
    with pytest.raises(LocalProtocolError, match="exceed the room of 0"):
        leases.hand_out("bob", [13], 30.0)
    leases.ack("ada", 11)
    assert leases.table.room == 0  # 11 is remembered until 10 is settled
    leases.ack("ada", 10)
    assert leases.table.room == 2
    with pytest.raises(LocalProtocolError, match="was delivered before"):
        leases.hand_out("bob", [12], 30.0)


def test_messages_delivered_together_end_and_change_one_by_one() -> None:
    leases = Leases(0, window=10, deliveries_max=0)
    leases.hand_out("ada", range(4), 30.0, 7)
    assert leases.renew("ada", 1, 50.0, 8)
    assert leases.give_back("ada", 2)
    assert leases.ack("ada", 3)
    assert [leases.table.generation(offset) for offset in range(4)] == [7, 8, 7, 0]
    assert leases.lapse(30.0) == 1
    assert (leases.returns.first(9), leases.table.held("ada"), leases.deadline()) == ([0, 2], [1], 50.0)


def test_timers_of_messages_delivered_together_do_not_pile_up() -> None:
    leases = Leases(0, window=1000, deliveries_max=0)
    leases.hand_out("ada", [0], 5000.0)
    for first in range(1, 10_000, 100):
        leases.hand_out("ada", range(first, first + 100), 1000.0 + first)
        for offset in range(first, first + 100):
            assert leases.ack("ada", offset)
        leases.table.window += 100  # those are remembered until the first is settled
    assert leases.deadline() >= 5000.0


def test_timers_of_settled_messages_do_not_pile_up() -> None:
    leases = Leases(0, window=10, deliveries_max=0)
    for offset in range(1000):
        leases.hand_out("ada", [offset], 1000.0 + offset)
        leases.ack("ada", offset)
    assert leases.deadline() >= 1900.0


class LeasesModel(RuleBasedStateMachine):
    """`Leases` beside plain dictionaries."""

    @initialize(window=st.integers(1, 12), deliveries_max=st.integers(0, 3))
    def begin(self, window: int, deliveries_max: int) -> None:
        self.leases = Leases(5, window=window, deliveries_max=deliveries_max)
        self.window = window
        self.deliveries_max = deliveries_max
        self.now = 0.0
        self.next = 5
        self.holder: dict[int, str] = {}  # held now
        self.until: dict[int, float] = {}
        self.delayed: dict[int, float] = {}
        self.waiting: set[int] = set()
        self.parked: set[int] = set()
        self.dead: set[int] = set()
        self.deliveries: dict[int, int] = {}
        self.acked: set[int] = set()
        self.gaps: set[int] = set()
        self.dead_lettered: set[int] = set()

    def _settled(self, offset: int) -> bool:
        return offset in self.acked or offset in self.gaps or offset in self.dead_lettered

    def _low(self) -> int:
        return next((offset for offset in range(5, self.next) if not self._settled(offset)), self.next)

    def _return(self, offset: int, at: float = -math.inf) -> None:
        del self.holder[offset], self.until[offset]
        if self.deliveries_max and self.deliveries[offset] >= self.deliveries_max:
            self.dead.add(offset)
        elif at == -math.inf:
            self.waiting.add(offset)
        else:
            self.delayed[offset] = at

    @rule(holder=st.sampled_from(HOLDERS), gaps=st.lists(st.integers(0, 2), max_size=5), seconds=st.integers(1, 20))
    def hand_out(self, holder: str, gaps: list[int], seconds: int) -> None:
        offsets = []
        at = self.next
        for gap in gaps[: self.leases.table.room]:
            self.gaps.update(range(at, at + gap))
            offsets.append(at + gap)
            at += gap + 1
        self.leases.hand_out(holder, offsets, self.now + seconds)
        self.next = at
        for offset in offsets:
            self.holder[offset] = holder
            self.until[offset] = self.now + seconds
            self.deliveries[offset] = 1

    @rule(count=st.integers(0, 3))
    def skip(self, count: int) -> None:
        self.leases.skip_to(self.next + count)
        self.gaps.update(range(self.next, self.next + count))
        self.next += count

    @rule(count=st.integers(1, 3))
    def park(self, count: int) -> None:
        count = min(count, self.leases.table.room)
        if count:
            offsets = range(self.next, self.next + count)
            self.leases.park(offsets)
            self.next += count
            self.parked.update(offsets)
            self.deliveries.update(dict.fromkeys(offsets, 0))

    @precondition(lambda self: self.waiting)
    @rule()
    def park_returned(self) -> None:
        self.leases.returns.park()
        self.parked.add(min(self.waiting))
        self.waiting.remove(min(self.waiting))

    @rule()
    def unpark(self) -> None:
        self.leases.returns.unpark()
        self.waiting |= self.parked
        self.parked.clear()

    @rule(holder=st.sampled_from(HOLDERS), count=st.integers(0, 4), seconds=st.integers(1, 20))
    def hand_again(self, holder: str, count: int, seconds: int) -> None:
        expected = sorted(self.waiting)[:count]
        given = self.leases.hand_again(holder, count, self.now + seconds)
        for offset in expected:
            self.waiting.remove(offset)
            self.deliveries[offset] += 1
            self.holder[offset] = holder
            self.until[offset] = self.now + seconds
        assert given == [(offset, self.deliveries[offset]) for offset in expected]

    @precondition(lambda self: self.next > 5)
    @rule(holder=st.sampled_from(HOLDERS), data=st.data())
    def ack(self, holder: str, data: st.DataObject) -> None:
        offset = data.draw(st.integers(5, self.next - 1))
        held = self.holder.get(offset) == holder
        assert self.leases.ack(holder, offset) is held
        if held:
            assert offset not in self.acked, "settled twice"
            del self.holder[offset], self.until[offset]
            self.acked.add(offset)

    @precondition(lambda self: self.next > 5)
    @rule(holder=st.sampled_from(HOLDERS), data=st.data(), is_run=st.booleans())
    def ack_held(self, holder: str, data: st.DataObject, is_run: bool) -> None:
        known = st.integers(5, self.next - 1)
        first = data.draw(known)
        offsets = range(first, data.draw(known) + 1) if is_run else data.draw(st.lists(known, max_size=5))
        held = [offset for offset in dict.fromkeys(offsets) if self.holder.get(offset) == holder]
        assert list(self.leases.ack_held(holder, offsets)) == held
        for offset in held:
            del self.holder[offset], self.until[offset]
            self.acked.add(offset)

    @precondition(lambda self: self.holder)
    @rule(data=st.data(), delay=st.integers(0, 10))
    def give_back(self, data: st.DataObject, delay: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.holder)))
        at = self.now + delay if delay else -math.inf
        assert self.leases.give_back(self.holder[offset], offset, at)
        self._return(offset, at)

    @precondition(lambda self: self.holder)
    @rule(data=st.data(), seconds=st.integers(0, 30))
    def extend(self, data: st.DataObject, seconds: int) -> None:
        offset = data.draw(st.sampled_from(sorted(self.holder)))
        assert self.leases.renew(self.holder[offset], offset, self.now + seconds)
        self.until[offset] = self.now + seconds

    @rule(holder=st.sampled_from(HOLDERS), delay=st.integers(0, 10))
    def drop(self, holder: str, delay: int) -> None:
        held = self.leases.table.held(holder)
        at = self.now + delay if delay else -math.inf
        assert self.leases.give_back_all(holder, held, at) == held
        for offset in held:
            self._return(offset, at)
        assert self.leases.table.held(holder) == []

    @rule(seconds=st.integers(0, 15))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        due = [*self.until.values(), *self.delayed.values()]
        if any(at <= self.now for at in due):
            assert self.leases.deadline() <= self.now, "the clock would not have called"
        before = len(self.waiting)
        for offset in [offset for offset, until in self.until.items() if until <= self.now]:
            self._return(offset)
        for offset in [offset for offset, at in self.delayed.items() if at <= self.now]:
            del self.delayed[offset]
            self.waiting.add(offset)
        assert self.leases.lapse(self.now) == len(self.waiting) - before

    @rule()
    def settle_dead(self) -> None:
        assert sorted(self.leases.dead()) == sorted(self.dead)
        for offset in sorted(self.dead):
            self.leases.settle_dead(offset)
            self.dead_lettered.add(offset)
        self.dead.clear()

    @invariant()
    def nothing_is_lost_and_nothing_is_held_twice(self) -> None:
        if not hasattr(self, "leases"):
            return
        held = [offset for holder in HOLDERS for offset in self.leases.table.held(holder)]
        assert len(held) == len(set(held))
        assert {offset: holder for holder in HOLDERS for offset in self.leases.table.held(holder)} == self.holder
        assert self.leases.waiting == len(self.waiting)
        assert self.leases.table.next == self.next
        assert len(self.leases.returns.parked) == len(self.parked)
        places = set(self.holder) | self.waiting | self.parked | set(self.delayed) | self.dead
        assert places == {offset for offset in range(5, self.next) if not self._settled(offset)}

    @invariant()
    def the_low_mark_is_the_first_unsettled_message(self) -> None:
        if hasattr(self, "leases"):
            assert self.leases.table.low == self._low()
            assert self.leases.table.size <= self.window
            assert self.leases.table.room >= 0


TestLeasesModel = LeasesModel.TestCase
TestLeasesModel.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_settled_messages_after_an_unsettled_one_do_not_fill_the_window() -> None:
    leases = Leases(0, window=1000, deliveries_max=0)
    leases.hand_out("bob", [0], 30.0)
    for offset in range(1, 10_000):
        leases.hand_out("ada", [offset], 30.0)
        assert leases.ack("ada", offset)
        assert leases.table.size <= 2 * leases.table.unsettled + SETTLED_MIN + 1
    assert (leases.table.low, leases.table.next) == (0, 10_000)
    assert leases.table.unsettled_leases() == [(0, 30.0, 1, 0, math.inf)]
    assert leases.ack("bob", 0)
    assert (leases.table.low, leases.table.room) == (10_000, 1000)


def test_many_leases_end_in_turns() -> None:
    leases = Leases(0, window=100, deliveries_max=0)
    for first in range(0, 100, 10):
        leases.hand_out("a", range(first, first + 10), 5.0)
    assert leases.lapse(5.0, most=25) == 30  # those that were leased together end together
    assert leases.deadline() == 5.0
    assert leases.lapse(5.0, most=1000) == 70
    assert leases.deadline() == math.inf


def test_many_renewed_leases_are_looked_at_in_turns() -> None:
    leases = Leases(0, window=100, deliveries_max=0)
    for offset in range(100):
        leases.hand_out("a", [offset], 5.0)
        assert leases.renew("a", offset, 9.0)
    assert leases.lapse(5.0, most=25) == 0
    assert (leases.looked_at, leases.deadline()) == (25, 5.0)
    assert leases.lapse(5.0) == 0
    assert (leases.looked_at, leases.deadline()) == (100, 9.0)


def test_returned_messages_are_found_in_runs_of_the_same_number_of_deliveries() -> None:
    leases = Leases(0, window=100, deliveries_max=0)
    leases.hand_out("a", range(10), 5.0)
    assert leases.ack("a", 4)
    leases.lapse(5.0)
    assert leases.returns.run(3) == (0, 3)
    assert leases.returns.run(100) == (0, 4)
    leases.hand_again("b", 7, 9.0)  # 0 to 3, 5 to 7
    assert leases.returns.run(100) == (8, 2)
    leases.give_back("b", 7)
    assert leases.returns.run(100) == (7, 1)
