"""The disk is full at each write of each step of an external transaction; then there is space, or a new process.

What was acknowledged stays, what was refused has no effect once it is given up, and in the end nothing is staged.
"""

from collections.abc import Awaitable, Callable
from errno import ENOSPC
from random import Random

import pytest
from tests.tx.external_talk import OTHER, TOPIC, Sink, numbered, sink
from trio.testing import MockClock

from martlet.errors import Reason, Refused
from martlet.testing.disk import Cut, FakeDisk
from martlet_tx.external.deliveries import RETRY_S

# Two groups of messages, in two topics.
STAGED = {TOPIC: numbered(0, 24), OTHER: numbered(24, 24, "n")}
PARTS = [("a", 1), ("b", 1)]
STEPS = ("begin", "stage", "prepare", "commit", "commit prepared", "abort", "abort prepared", "fence")
WRITES_MAX = 100


class Full:
    """A disk without space from write number *number* on, until `free`."""

    def __init__(self) -> None:
        self.disk = FakeDisk()
        self.left = -1
        self.hits = 0
        self.disk.on_change = self._change

    def fill(self, number: int) -> None:
        self.left = number

    def free(self) -> None:
        self.left = -1

    def _change(self, name: str) -> None:
        if self.left < 0 or name != "write":
            return
        if self.left:
            self.left -= 1
            return
        self.hits += 1
        raise OSError(ENOSPC, "No space left on device")


async def stage(found: Sink, epoch: int) -> None:
    for (part, _), (topic, bodies) in zip(PARTS, STAGED.items(), strict=True):
        await found.stage(0, part, bodies, epoch=epoch, topic=topic)


async def ready(found: Sink, step: str) -> int:
    """Do what comes before *step*; return the epoch of the run."""
    if step == "begin":
        return 0
    epoch, _ = await found.begin("run-1")
    if step != "stage":
        await stage(found, epoch)
    if step.endswith("prepared"):
        await found.prepare(0, PARTS, epoch=epoch)
        epoch, _ = await found.begin("run-2")
    return epoch


def work(found: Sink, step: str, epoch: int) -> Callable[[], Awaitable[object]]:
    """Return what asks for *step*, and may be called again."""
    asked: dict[str, Callable[[], Awaitable[object]]] = {
        "begin": lambda: found.begin("run-1"),
        "stage": lambda: stage(found, epoch),
        "prepare": lambda: found.prepare(0, PARTS, epoch=epoch),
        "commit": lambda: found.commit(0, PARTS, epoch=epoch),
        "commit prepared": lambda: found.commit(0, None, epoch=epoch),
        "abort": lambda: found.abort(0, epoch=epoch),
        "abort prepared": lambda: found.abort_prepared(0, epoch=epoch),
        "fence": lambda: found.begin("run-2"),
    }
    return asked[step]


def check(found: Sink, step: str, is_done: bool) -> None:
    """See that all or nothing was delivered, and that it was if *step* is a commit that is done."""
    stored = {topic: found.stored(topic) for topic in STAGED}
    assert stored in ({TOPIC: [], OTHER: []}, STAGED)
    assert not is_done or (stored == STAGED) is step.startswith("commit")


async def end(found: Sink, step: str) -> None:
    """Do *step* again, and see what it leads to; then a new run ends what is left, and works as ever."""
    epoch = {"begin": 0, "fence": 1}.get(step, 2 if step.endswith("prepared") else 1)
    await work(found, step, epoch)()
    check(found, step, is_done=True)
    if step == "stage":
        assert (await found.commit(0, PARTS, epoch=epoch)).messages == 48
        check(found, "commit", is_done=True)
    if step == "fence":
        with pytest.raises(Refused) as refused:
            await found.commit(0, PARTS, epoch=epoch)
        assert refused.value.reason is Reason.FENCED
        check(found, step, is_done=True)
    run = await found.begin_at("run-3")
    if run.prepared >= 0:
        await found.abort_prepared(run.prepared, epoch=run.epoch)
    before = {topic: found.stored(topic) for topic in STAGED}
    await found.stage(1, "c", ["last"], epoch=run.epoch)
    assert (await found.commit(1, [("c", 1)], epoch=run.epoch)).messages == 1
    assert found.stored(TOPIC) == [*before[TOPIC], "last"]
    assert found.stored(OTHER) == before[OTHER]
    assert (len(found.state.parts), len(found.state.chunks), found.state.messages) == (0, 0, 0)
    assert len(found.state.deliveries) == 0


async def fail_at(step: str, number: int, after: str, flush: str, clock: MockClock) -> int:
    """Let the disk be full from write *number* of *step* on; return how many writes had no space."""
    full = Full()
    found = await sink(full.disk, flush=flush)
    epoch = await ready(found, step)
    full.fill(number)
    is_refused = False
    try:
        await asked_while_full(found, full, work(found, step, epoch), clock)
    except Refused as refused:
        is_refused = refused.reason in (Reason.UNAVAILABLE, Reason.NOT_FOUND)
        if not is_refused:
            raise
    if after == "space":
        full.free()
        await found.settle()
        check(found, step, is_done=False)
        again = found
    else:
        found.store.crash()
        again = await sink(full.disk.after_power_cut(Cut.KILLED, Random(number)), flush=flush)
        await again.go_on()
        check(again, step, is_done=not is_refused and step != "stage")
    await end(again, step)
    again.store.crash()
    return full.hits


async def asked_while_full(found: Sink, full: Full, asked: Callable[[], Awaitable[object]], clock: MockClock) -> None:
    """Ask; if it waits for space, as a delivery that is decided does, there is some when it tries again."""
    settle, turns = found.settle, 0

    async def settle_and_free() -> None:
        nonlocal turns
        turns += full.hits > 0
        if turns > 3:
            full.free()
            clock.jump(RETRY_S)
        await settle()

    found.settle = settle_and_free  # type: ignore[method-assign]
    try:
        await asked()
    finally:
        found.settle = settle  # type: ignore[method-assign]


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("after", ["space", "kill"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_full_disk_loses_nothing_and_leaves_nothing_behind(
    step: str, after: str, flush: str, mock_clock: MockClock
) -> None:
    for number in range(WRITES_MAX):
        try:
            if not await fail_at(step, number, after, flush, mock_clock):
                break
        except BaseException as error:
            error.add_note(f"full from write {number} on")
            raise
    assert 0 < number < WRITES_MAX - 1
