"""Puts one mutant into a copy of the packages and runs the tests that reach it."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from .mutations import Mutant
from .processes import run_pytest, source_of
from .reach import Reach

__all__ = ["Fate", "Plan", "plan", "try_out"]

STARTUP_S = 60.0  # for pytest to import and collect on a busy machine


class Fate(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    UNREACHED = "no test runs it"


@dataclass(frozen=True)
class Plan:
    """The tests for one mutant in the order they run, and how long they may take."""

    mutant: Mutant
    tests: tuple[str, ...]
    limit_s: float  # for one test
    all_s: float


def plan(mutant: Mutant, reach: Reach, budget_s: float, limit_s: float) -> Plan:
    """Choose of the tests that reach *mutant* as many as fill *budget_s*, at least one."""
    tests: list[str] = []
    spent = 0.0
    for test in reach.tests(mutant.lines):
        spent += reach.seconds[test]
        if tests and spent > budget_s:
            break
        tests.append(test)
    return Plan(mutant, tuple(tests), limit_s, STARTUP_S + 5 * spent + limit_s)


def try_out(work: Plan, packages: Path) -> Fate:
    """Run the tests of *work* against its mutant; the *packages* are afterwards as they were."""
    if not work.tests:
        return Fate.UNREACHED
    path = packages / work.mutant.module
    source = source_of(work.mutant.module)
    mutated = work.mutant.apply(source)
    assert mutated is not None
    path.write_text(mutated)
    try:
        files = sorted({test.partition("::")[0] for test in work.tests})
        arguments = ["-x", f"--timeout={work.limit_s}", *files]
        code = run_pytest(packages, arguments, [_Chosen(work.tests)], work.all_s)
    finally:
        path.write_text(source)
    assert code != pytest.ExitCode.NO_TESTS_COLLECTED, f"{work.mutant.name}: none of its tests were found"
    return Fate.SURVIVED if code == 0 else Fate.KILLED


class _Chosen:
    """A pytest plugin that runs the chosen tests, in their order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])
