"""Run many seeds: ``python -m tests.sim --seeds 1000``; one again: ``python -m tests.sim --seed 7 --trace``."""

import argparse
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

from .bugs import BUGS
from .derived import ALL, Damage, damage_one
from .search import find_seed, simulate_for
from .world import Outcome, simulate


def _run(task: tuple[int, str]) -> Outcome:
    seed, name = task
    found = next((bug for bug in BUGS if bug.name == name), None)
    return simulate_for(seed, found, plant=True) if found else simulate(seed)


def _outcomes(tasks: list[tuple[int, str]], jobs: int) -> Iterable[Outcome]:
    if jobs == 1:
        yield from map(_run, tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_run, tasks, chunksize=4)


def _damage(case: tuple[str, Damage, str]) -> str:
    outcome = damage_one(*case)
    return f"{case[0]}, {case[1].__name__}, {case[2]}: {outcome.failure}" if outcome.failure else ""


def _damage_all(jobs: int) -> int:
    with ProcessPoolExecutor(jobs) as pool:
        failures = [failure for failure in pool.map(_damage, ALL) if failure]
    print("\n".join([*failures, f"{len(ALL)} cases, {len(failures)} failed"]))
    return 1 if failures else 0


def main() -> int:
    """Return 1 when a seed has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one")
    parser.add_argument("--seeds", type=int, default=100, help="run so many, one behind the other")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--bug", choices=[bug.name for bug in BUGS], default="", help="with this planted bug")
    parser.add_argument("--find-bug", choices=[bug.name for bug in BUGS], help="look for a seed that finds it soon")
    parser.add_argument("--trace", action="store_true", help="show all that happened")
    parser.add_argument("--derived", action="store_true", help="damage each derived file in each way instead")
    options = parser.parse_args()
    if options.derived:
        return _damage_all(options.jobs)
    if options.find_bug is not None:
        for line in find_seed(next(bug for bug in BUGS if bug.name == options.find_bug)):
            print(line, flush=True)
        return 0
    if options.seed is not None:
        options.first, options.seeds = options.seed, 1
    failed = 0
    messages = 0
    tasks = [(seed, options.bug) for seed in range(options.first, options.first + options.seeds)]
    for outcome in _outcomes(tasks, options.jobs):
        messages += outcome.acknowledged
        if options.trace:
            print("\n".join(outcome.trace))
        if outcome.failure:
            failed += 1
            print(outcome.report(), flush=True)
    print(f"{options.seeds} seeds, {messages} messages acknowledged, {failed} seeds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
