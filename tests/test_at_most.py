"""With ``--at-most N``, each test runs with N of its parameter sets, the same ones in each run."""

import re
from pathlib import Path

import pytest

from .small_suite import run_module

CONFTEST = """
from tests.at_most import pytest_addoption, pytest_collection_modifyitems
"""
SUITE = """
import pytest

@pytest.mark.parametrize("inner", range(4))
@pytest.mark.parametrize("outer", range(8))
def test_product(outer, inner): pass

@pytest.mark.parametrize("value", ["a", "b"])
def test_pair(value): pass

class TestGroup:
    def test_alone(self): pass
"""
EACH = {"test_product": 32, "test_pair": 2, "test_alone": 1}


def passed(folder: Path, *words: str) -> set[str]:
    """Run the suite; return which of its tests passed."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_suite.py").write_text(SUITE)
    done = run_module(folder, "pytest", "-rA", "--color=no", *words)
    assert done.returncode == 0, done.stdout
    return set(re.findall(r"^PASSED \S*::(\S+)$", done.stdout, re.MULTILINE))


def counts(names: set[str]) -> dict[str, int]:
    return {test: sum(name.partition("[")[0] == test for name in names) for test in EACH}


@pytest.mark.parametrize("most", [1, 2, 5])
def test_each_test_runs_with_so_many_of_its_parameters(tmp_path: Path, most: int) -> None:
    assert counts(passed(tmp_path, "--at-most", str(most))) == {test: min(each, most) for test, each in EACH.items()}


def test_without_the_option_all_run(tmp_path: Path) -> None:
    assert counts(passed(tmp_path)) == EACH


def test_each_run_has_the_same_of_all_values(tmp_path: Path) -> None:
    found = passed(tmp_path, "--at-most", "8")
    assert passed(tmp_path, "--at-most", "8", "-n", "2") == found
    inner = {name for name in found if name.startswith("test_product")}
    assert len({name.partition("-")[0] for name in inner}) > 2
    assert len({name.partition("-")[2] for name in inner}) > 2
