"""The mutation script: which mutants it makes, and that it tells tests that notice from tests that do not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from .mutations import mutants, sample
from .processes import ROOT

SOURCE = '''\
"""A store that is too small to be true."""

LIMIT = 100


class Store:
    async def append(self, size: int | None, /) -> "int | None":
        if size is None or size > 5:
            return None
        self.end += size
        log.debug("appended %s", size + 0)
        await self.disk.sync()
        return self.end
'''


def made() -> list[str]:
    return [mutant.apply(SOURCE) or "" for mutant in mutants("toy.py", SOURCE)]


def changed(source: str) -> str:
    """The line of a mutant that is not in the original."""
    (line,) = (new for new, old in zip(source.splitlines(), SOURCE.splitlines(), strict=True) if new != old)
    return line.strip()


def test_a_mutant_differs_in_one_line_of_a_function() -> None:
    lines = [changed(source) for source in made()]
    assert "if size is not None or size > 5:" in lines
    assert "if size is None and size > 5:" in lines
    assert "if size is None or size >= 5:" in lines
    assert "LIMIT = 101" not in lines
    assert not any("int & None" in line for line in lines)


def test_statements_that_have_an_effect_are_removed() -> None:
    removed = [source for source in made() if changed(source) == "pass"]
    assert [line in source for source in removed for line in ("self.end += size", "await self.disk.sync()")] == [
        *(False, True),
        *(True, False),
    ]


def test_a_seed_chooses_the_same_mutants_again() -> None:
    everything = mutants("toy.py", SOURCE)
    first = sample(everything, SOURCE, 5, seed=1)
    assert first == sample(everything, SOURCE, 5, seed=1)
    assert len(first) == 5
    assert any(sample(everything, SOURCE, 5, seed=seed) != first for seed in range(2, 12))


CARELESS = """
from martlet.runtime.steps import Budget, finish_now

def steps():
    yield
    return 7

def test_what_asserts_nothing():
    budget = Budget()
    budget.spend(1)
    budget.is_over()
    budget.is_over(500)
    finish_now(steps())
"""


def row_of(cache: Path, *words: str) -> list[str]:
    """Run the script on a few mutants of a small module; return the row of its table."""
    command = [
        sys.executable,
        "-m",
        "tests.mutants",
        "martlet/runtime/steps.py",
        "--sample",
        "6",
        "--cache",
        str(cache),
        *words,
    ]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("| martlet/runtime/steps.py"))
    return row.strip("| ").split(" | ")


def test_what_careless_tests_let_live_careful_ones_kill(tmp_path: Path) -> None:
    careless = tmp_path / "test_careless.py"
    careless.write_text(CARELESS)
    _, tried, _, survived, unreached, _ = row_of(tmp_path, "--tests", str(careless))
    assert tried == "6"
    survivors = json.loads((tmp_path / "survivors.json").read_text())
    assert len(survivors) == int(survived) + int(unreached) > 0

    _, tried, killed, *_ = row_of(tmp_path, "--tests", "tests/runtime/test_turns.py", "--again", "--jobs", "1")
    assert tried == str(len(survivors))
    assert int(killed) > 0
