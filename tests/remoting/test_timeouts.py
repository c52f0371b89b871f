from typing import ClassVar

import trio
import trio.testing

from martlet_remoting.consumers.timeouts import EXPIRED_A_TURN, TICK_S, Timeouts


class Alarm:
    def __init__(self) -> None:
        self.bucket = -1
        self.rung_at: list[float] = []

    def expire(self) -> None:
        self.rung_at.append(trio.current_time())


async def test_each_rings_once_not_early_and_at_most_a_tick_late(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    timeouts = Timeouts()
    nursery.start_soon(timeouts.run)
    start = trio.current_time()
    wanted = [start + after for after in (0.01, 0.25, 3.3, 15.0, 15.1, 100.0)]
    alarms = [Alarm() for _ in wanted]
    for alarm, at in zip(alarms, wanted, strict=True):
        timeouts.add(alarm, at)
    assert len(timeouts) == len(alarms)
    await trio.sleep(200)
    for alarm, at in zip(alarms, wanted, strict=True):
        (rung,) = alarm.rung_at
        assert at <= rung <= at + TICK_S + 0.001
    assert len(timeouts) == 0


async def test_a_cancelled_timeout_never_expires(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    timeouts = Timeouts()
    nursery.start_soon(timeouts.run)
    early, late = Alarm(), Alarm()
    timeouts.add(early, trio.current_time() + 1)
    timeouts.add(late, trio.current_time() + 1)
    timeouts.give_up(early)
    timeouts.give_up(early)
    await trio.sleep(10)
    assert early.rung_at == []
    assert len(late.rung_at) == 1


async def test_one_added_while_others_wait_is_not_late(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    timeouts = Timeouts()
    nursery.start_soon(timeouts.run)
    far, near = Alarm(), Alarm()
    timeouts.add(far, trio.current_time() + 60)
    await trio.sleep(1)
    at = trio.current_time() + 2
    timeouts.add(near, at)
    await trio.sleep(120)
    assert at <= near.rung_at[0] <= at + TICK_S + 0.001


async def test_very_many_that_are_due_together_ring_over_several_turns(
    nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    class Turns(trio.abc.Instrument):
        counts: ClassVar[list[int]] = [0]

        def before_io_wait(self, timeout: float) -> None:
            rung = sum(len(alarm.rung_at) for alarm in alarms)
            self.counts.append(rung - sum(self.counts))

    timeouts, turns = Timeouts(), Turns()
    nursery.start_soon(timeouts.run)
    alarms = [Alarm() for _ in range(3000)]
    at = trio.current_time() + 1
    for alarm in alarms:
        timeouts.add(alarm, at)
    trio.lowlevel.add_instrument(turns)
    await trio.sleep(2)
    trio.lowlevel.remove_instrument(turns)
    assert (sum(turns.counts), max(turns.counts), len(timeouts)) == (3000, EXPIRED_A_TURN, 0)
