"""The power is cut at every call that changes the disk while transactions begin, end, are checked and moved.

Every two steps one after the other; then long random work. ``MARTLET_CRASH_STEPS`` makes the random work longer
(default 40 steps); ``MARTLET_CRASH_SEEDS`` runs more of it, and every two steps with each kind of pause between them.
"""

import os
from itertools import product
from random import Random

import pytest
from tests.state.power_cuts import count_changes, cut_everywhere
from tests.tx.steps import STEPS, Work

from martlet.testing.disk import FakeDisk

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


@pytest.mark.parametrize(("pair", "between"), SOME if len(SEEDS) == 1 else list(product(PAIRS, BETWEEN)))
async def test_two_steps_lead_to_one_outcome_wherever_the_power_is_cut(pair: tuple[str, str], between: str) -> None:
    begin = await count_changes(Work(FakeDisk(), "sync", BEGIN, Random(0).choice, closes=False))
    names = [*BEGIN, pair[0], *([between] if between else []), pair[1], "flush"]
    choose = Random(len(pair[0]) + len(between)).choice
    assert await cut_everywhere(Work(FakeDisk(), "sync", names, choose), begin) > 3


@pytest.mark.parametrize("between", BETWEEN)
async def test_transactions_that_end_together_have_one_outcome_wherever_the_power_is_cut(between: str) -> None:
    names = [*["prepare"] * 5, "flush", "together", *([between] if between else []), "commit", "flush"]
    assert await cut_everywhere(Work(FakeDisk(), "sync", names, Random(len(between)).choice)) > 10


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_random_steps_lead_to_one_outcome_wherever_the_power_is_cut(seed: int, flush: str) -> None:
    names = Random(seed).choices(STEPS, WEIGHTS, k=LENGTH)
    assert await cut_everywhere(Work(FakeDisk(), flush, names, Random(seed).choice)) > LENGTH
