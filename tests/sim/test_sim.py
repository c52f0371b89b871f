"""Seeds in which nothing forbidden happens, the same seed twice, and bugs that must not stay hidden."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from .bugs import BUGS, Bug
from .search import SEEDS_TRIED, why_found
from .world import Outcome, simulate

SEEDS = 16
ROOT = Path(__file__).parents[2]


@cache
def outcome_of(seed: int) -> Outcome:
    """What the first run of *seed* came to; several tests look at the same seeds."""
    return simulate(seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_forbidden_happens(seed: int) -> None:
    outcome = outcome_of(seed)
    assert outcome.failure is None, outcome.report()


def test_much_happens_in_a_few_seeds() -> None:
    """Otherwise the test above could pass because nothing happened."""
    outcomes = [outcome_of(seed) for seed in range(6)]
    assert sum(outcome.groups for outcome in outcomes) > 100
    assert sum(outcome.acknowledged for outcome in outcomes) > 1000
    assert sum(outcome.delivered for outcome in outcomes) > 1000
    assert sum(outcome.delayed for outcome in outcomes) > 50
    assert sum(outcome.recalled for outcome in outcomes) > 2
    assert sum(outcome.committed for outcome in outcomes) > 20
    assert sum(outcome.checks for outcome in outcomes) > 20
    assert sum(outcome.popped for outcome in outcomes) > 500
    assert sum(outcome.pops_settled for outcome in outcomes) > 200
    assert sum(outcome.crashes for outcome in outcomes) >= 5
    assert sum(outcome.starts for outcome in outcomes) >= 12


@pytest.mark.parametrize("seed", [1, 9])
def test_the_same_seed_makes_the_same_trace(seed: int) -> None:
    first, second = outcome_of(seed), simulate(seed)
    assert first.trace == second.trace
    assert first.digest == second.digest
    assert outcome_of(seed + 1).digest != first.digest


def test_another_process_makes_the_same_trace() -> None:
    """Also where sets of texts are walked in another order."""
    code = "from tests.sim.world import simulate; print(simulate(4).digest)"
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert digests == {outcome_of(4).digest + "\n"}


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_found(bug: Bug) -> None:
    """A change of the broker gives all seeds other runs, so a seed may find a bug no more."""
    text = f"seeds {bug.first} to {bug.first + SEEDS_TRIED - 1} do not find it; `python -m tests.sim --find-bug"
    assert why_found(bug, bug.first), f"{text} {bug.name!r}` finds a seed that does"
