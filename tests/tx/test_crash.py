"""The power is cut at every call that changes the disk while transactions begin, end, are checked and moved.

Every two steps one after the other; then long random work. ``MARTLET_CRASH_STEPS`` makes the random work longer
(default 40 steps); ``MARTLET_CRASH_SEEDS`` runs more of it, and every two steps with each kind of pause between them.
"""

import os
from functools import partial
from itertools import product
from random import Random

import pytest
from tests.state import power_cuts
from tests.state.power_cuts import Left, copied, count_changes, cut_of
from tests.tx.steps import CONFIG, SIZES, STEPS, Work, steps_of
from tests.tx.talk import sellers

from martlet.testing.disk import FakeDisk
from martlet.testing.stores import ManualClock

LENGTH = int(os.environ.get("MARTLET_CRASH_STEPS", "40"))
SEEDS = range(int(os.environ.get("MARTLET_CRASH_SEEDS", "1")))
WEIGHTS = (8, 5, 4, 2, 4, 3, 2, 3, 6, 1)
CHANGES = ("commit", "rollback", "check", "resume", "roll")
# The checks park the second transaction, so that there is one to resume.
BEGIN = ["prepare", "prepare", "flush", "check", "check", "check", "prepare", "flush"]


BETWEEN = ("", "write", "flush", "save")
PAIRS = list(product(CHANGES, CHANGES))
# Each pair with one kind of pause; together with all of them.
SOME = [(pair, BETWEEN[number % len(BETWEEN)]) for number, pair in enumerate(PAIRS)]


async def cut_everywhere(names: list[str], seed: int, flush: str, first: int = 0) -> int:
    """Do the steps *names*, and check what a power cut at each change of the disk leaves; return how many there are.

    The power is not cut in the first *first* changes.
    """
    disk = FakeDisk()
    work = Work(disk, ManualClock(), flush)
    cuts = await power_cuts.cut_everywhere(
        disk,
        steps_of(work, names, Random(seed).choice),
        lambda: copied(work, work.disk, work.found),
        partial(cut_of, flush=flush),
        first,
    )
    for cut in cuts:
        await check_after(cut, seed, flush)
    return len(cuts)


async def check_after(cut: Left[Work], seed: int, flush: str) -> None:
    try:
        found = await sellers(cut.disk, ManualClock(cut.known.clock.ms), flush, CONFIG, **SIZES)
        await cut.known.check(found)
    except BaseException as error:
        error.add_note(f"seed {seed}, {cut.kind.name} at change {cut.number}")
        raise
    found.store.crash()


@pytest.mark.parametrize(("pair", "between"), SOME if len(SEEDS) == 1 else list(product(PAIRS, BETWEEN)))
async def test_two_steps_lead_to_one_outcome_wherever_the_power_is_cut(pair: tuple[str, str], between: str) -> None:
    disk = FakeDisk()
    begin = await count_changes(disk, steps_of(Work(disk, ManualClock(), "sync"), BEGIN, min, closes=False))
    names = [*BEGIN, pair[0], *([between] if between else []), pair[1], "flush"]
    assert await cut_everywhere(names, len(pair[0]) + len(between), "sync", begin) > 3


@pytest.mark.parametrize("between", BETWEEN)
async def test_transactions_that_end_together_have_one_outcome_wherever_the_power_is_cut(between: str) -> None:
    names = [*["prepare"] * 5, "flush", "together", *([between] if between else []), "commit", "flush"]
    assert await cut_everywhere(names, len(between), "sync") > 10


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_steps_lead_to_one_outcome_wherever_the_power_is_cut(seed: int, flush: str) -> None:
    random = Random(seed)
    names = random.choices(STEPS, WEIGHTS, k=LENGTH)
    assert await cut_everywhere(names, seed, flush) > LENGTH
