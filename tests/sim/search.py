"""Looks for seeds in which the simulation finds a planted bug."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from random import Random
from time import process_time
from typing import Final

from .bugs import Bug, planted
from .world import Outcome, Plan, simulate

__all__ = ["SEEDS_TRIED", "find_seed", "simulate_for", "why_found"]

# A test tries so many. Each takes up to five seconds, and ten times as long on a slow machine.
SEEDS_TRIED: Final = 16
# Seeds before the search for a better one ends, and the processor time in which a good one finds its bug.
SEEDS_SEARCHED: Final = 400
GOOD_S: Final = 5.0
# How a bug that was planted in other code than that of now shows.
MISFITS: Final = ("TypeError", "AttributeError")


def simulate_for(seed: int, bug: Bug, *, plant: bool) -> Outcome:
    """Run the world of *seed* with the plan and the script in which *bug* shows; with *plant*, with the bug as well."""
    plan = replace(Plan.draw(Random(seed)), **bug.plan) if bug.plan else None
    with planted(bug) if plant else contextlib.nullcontext():
        return simulate(seed, plan, bug.script)


def why_found(bug: Bug, first: int) -> str:
    """Return the violation by which one of `SEEDS_TRIED` seeds, from *first* on, finds *bug*; empty if none does.

    Raises:
      ValueError: the bug does not fit the code any more.
    """
    for seed in range(first, first + SEEDS_TRIED):
        failure = simulate_for(seed, bug, plant=True).failure
        if failure is None:
            continue
        if any(each in str(failure) for each in MISFITS):
            raise ValueError(f"planted bug {bug.name!r} does not fit the code any more; change it: {failure}")
        return str(failure)
    return ""


def find_seed(bug: Bug) -> Iterator[str]:
    """Yield a line for each seed that was tried, until one finds *bug* in a short time and passes without it."""
    for seed in count():
        if seed == SEEDS_SEARCHED:
            yield f"{SEEDS_SEARCHED} seeds have not found it soon; give it a plan or a script in which it shows"
            return
        began = process_time()
        failure = simulate_for(seed, bug, plant=True).failure
        took_s = process_time() - began
        yield f"seed {seed}: {failure or 'not found'} ({took_s:.1f} s)"
        if failure is not None and took_s < GOOD_S and simulate_for(seed, bug, plant=False).failure is None:
            yield f"write first={seed} into the bug {bug.name!r} in tests/sim/bugs.py"
            return
