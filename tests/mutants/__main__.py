"""Measure what the tests notice: change one place of a module, run the tests that reach it, see whether one fails.

    python -m tests.mutants martlet/store/store.py            20 mutants of one module, two at a time
    python -m tests.mutants 'martlet/store/*' --sample 5       5 of each module of the store
    python -m tests.mutants martlet/store/store.py --tests tests/store/test_log.py
    python -m tests.mutants martlet/store/store.py --again    those that survived last time, after you wrote a test

A mutant is killed if a test fails, hangs or crashes; it survives if all tests pass that run its line. Survivors are
printed as diffs. The checkout is not touched: mutants are made in a copy. See docs/testing.md.
"""

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from . import reach
from .mutations import Mutant, mutants, sample
from .processes import PACKAGES, package_folder, source_of
from .trial import Fate, Plan, plan, try_out
from .workers import Workers

SHELVES = ("core/", "plugins/remoting/", "plugins/stomp/", "plugins/timer/")
Outcomes = dict[Mutant, Fate]


def main(words: Sequence[str] | None = None) -> int:
    """Return 1 when there was nothing to measure, else 0: a survivor is a question, not an error."""
    options = _parser().parse_args(words)
    modules = _modules(options.modules)
    if not modules:
        print(f"no module matches {' '.join(options.modules)!r}; one is martlet/store/store.py", file=sys.stderr)
        return 1
    folder: Path = options.cache or reach.cache_folder()
    outcomes: Outcomes = {}
    with Workers(options.jobs) as workers:
        near = {module: _tests(module, options) for module in modules}
        _measure(workers, folder, near)
        plans = [step for module in modules for step in _plans(module, near[module], options, folder)]
        for mutant, fate in workers.run("mutants", [(step.mutant, partial(try_out, step)) for step in plans]):
            outcomes[mutant] = fate
            _print_survivor(mutant, fate)
    _print_table(modules, outcomes)
    survivors = [mutant.name for mutant, fate in outcomes.items() if fate is not Fate.KILLED]
    (folder / "survivors.json").write_text(json.dumps(survivors))
    return 0


def _parser() -> argparse.ArgumentParser:
    about, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("modules", nargs="+", metavar="MODULE", help="such as martlet/store/store.py or 'martlet_client/*'")
    add("--sample", type=int, default=20, help="mutants of each module (default: 20)")
    add("--seed", type=int, default=1, help="chooses the sample (default: 1)")
    add("--tests", nargs="+", metavar="PATH", help="test files or folders (default: those near each module)")
    add("--again", action="store_true", help="only mutants that survived the last run")
    add("--limit", type=float, default=60, help="seconds after which one test counts as hanging (default: 60)")
    add("--budget", type=float, default=60, help="seconds of tests for a mutant (default: 60)")
    add("--jobs", type=int, default=2, help="processes at once (default: 2)")
    add("--cache", type=Path, help="where measurements are kept (default: .mutants in the checkout)")
    return parser


def _modules(patterns: Sequence[str]) -> list[str]:
    """Return the modules that match, whether they are given as imported or as they lie in the checkout."""
    wanted = [pattern.removeprefix(SHELVES[0]).removeprefix(SHELVES[1]) for pattern in patterns]
    known = [
        f"{package}/{path.relative_to(package_folder(package))}"
        for package in PACKAGES
        for path in sorted(package_folder(package).rglob("*.py"))
    ]
    return [module for module in known if any(fnmatch(module, pattern) for pattern in wanted)]


def _tests(module: str, options: argparse.Namespace) -> list[str]:
    return reach.files_of(options.tests) if options.tests else reach.near_tests(module)


def _measure(workers: Workers, folder: Path, tests: Mapping[str, Sequence[str]]) -> None:
    """Find out which tests run which lines of each module, unless that is known since the last run."""
    wanted: dict[str, list[str]] = {}
    for module, files_of in tests.items():
        for test_file in files_of:
            wanted.setdefault(test_file, []).append(module)
    missing = {
        test_file: near
        for test_file, near in wanted.items()
        if not all(reach.is_measured(folder, test_file, module) for module in near)
    }
    work = [(test_file, partial(reach.measure, folder, test_file, near)) for test_file, near in missing.items()]
    for _, complaint in workers.run("what the tests run", work):
        if complaint:
            print(f"note: {complaint}; what failed is not used", file=sys.stderr)


def _plans(module: str, files_of: Sequence[str], options: argparse.Namespace, folder: Path) -> list[Plan]:
    source = source_of(module)
    known = reach.read(folder, files_of, module)
    chosen = mutants(module, source)
    if options.again:
        survivors = set(json.loads((folder / "survivors.json").read_text()))
        chosen = [mutant for mutant in chosen if mutant.name in survivors]
    else:
        chosen = sample(chosen, source, options.sample, options.seed)
    return [plan(one, known, options.budget, options.limit) for one in chosen]


def _print_survivor(mutant: Mutant, fate: Fate) -> None:
    if fate is not Fate.KILLED:
        print(f"{fate.value}: {mutant.name}\n{mutant.diff(source_of(mutant.module))}", flush=True)


def _print_table(modules: Sequence[str], outcomes: Outcomes) -> None:
    print("| module | mutants | killed | survived | no test runs it | score |\n|---|---|---|---|---|---|")
    for name in [*modules, "all"]:
        fates = [fate for mutant, fate in outcomes.items() if name in (mutant.module, "all")]
        counts = [fates.count(fate) for fate in Fate]
        score = f"{counts[0] / len(fates):.0%}" if fates else "-"
        print(f"| {name} | {len(fates)} | {' | '.join(map(str, counts))} | {score} |")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not to leave workers behind
    sys.exit(main())
