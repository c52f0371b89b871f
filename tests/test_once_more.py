"""Which failures get a second run, tried with small suites in processes of their own."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .small_suite import run_module

SUITE = """
import os
from pathlib import Path

import pytest

def passes_from(attempt, name):
    with open("attempts", "a") as log:
        log.write(name + "\\n")
    assert Path("attempts").read_text().split().count(name) >= attempt, f"{name} failed"

@pytest.mark.interop
def test_client():
    passes_from(CLIENT, "client")

@pytest.mark.interop
def test_good_client():
    passes_from(1, "good_client")

def test_plain():
    passes_from(PLAIN, "plain")
"""
NEVER = 99


def run(folder: Path, *arguments: str, suite: str = SUITE, client: int = 1, plain: int = 1) -> tuple[int, str]:
    """Run a suite in which each test passes from a certain attempt on; return the exit code and the output."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -ra\nmarkers =\n interop: real client\n spark: Spark\n")
    (folder / "test_suite.py").write_text(suite.replace("CLIENT", str(client)).replace("PLAIN", str(plain)))
    done = run_module(folder, "tests.once_more", *arguments)
    return done.returncode, done.stdout


def attempts(folder: Path) -> Counter[str]:
    return Counter((folder / "attempts").read_text().split())


def summaries(output: str) -> Sequence[str]:
    """Return pytest's closing lines without their times."""
    closing = [line.strip("= ") for line in output.splitlines() if line.startswith("==") and line.endswith("==")]
    return [line.partition(" in ")[0] for line in closing if " in " in line]


def test_a_suite_that_passes_runs_once(tmp_path: Path) -> None:
    code, output = run(tmp_path)
    assert (code, summaries(output)) == (0, ["3 passed"])
    assert attempts(tmp_path) == {"client": 1, "good_client": 1, "plain": 1}


def test_an_interop_test_that_failed_alone_decides_on_its_second_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, client=2)
    assert (code, summaries(output)) == (0, ["1 failed, 2 passed", "1 passed"])
    assert "client failed" in output
    assert "once more, alone: 1 test" in output
    assert attempts(tmp_path) == {"client": 2, "good_client": 1, "plain": 1}


def test_an_interop_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    code, output = run(tmp_path, client=NEVER)
    assert (code, summaries(output)) == (1, ["1 failed, 2 passed", "1 failed"])
    assert attempts(tmp_path)["client"] == 2


def test_no_other_test_is_repeated(tmp_path: Path) -> None:
    code, output = run(tmp_path, plain=2)
    assert (code, summaries(output)) == (1, ["1 failed, 2 passed"])
    assert attempts(tmp_path)["plain"] == 1


def test_nothing_is_repeated_when_another_test_failed_too(tmp_path: Path) -> None:
    code, output = run(tmp_path, client=2, plain=2)
    assert (code, summaries(output)) == (1, ["2 failed, 1 passed"])


def test_the_second_run_has_one_process_and_the_options_of_the_first(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-n", "2", "--dist", "loadfile", "-k", "client", client=2)
    assert code == 0
    assert "2 workers" in output.partition("once more")[0]
    assert "workers" not in output.partition("once more")[2]
    assert attempts(tmp_path) == {"client": 2, "good_client": 1}


def test_a_run_that_stops_at_its_first_failure_is_not_repeated(tmp_path: Path) -> None:
    code, output = run(tmp_path, "-x", client=2)
    assert (code, summaries(output)) == (1, ["1 failed"])
    assert attempts(tmp_path) == {"client": 1}


def test_a_spark_test_is_repeated_only_if_spark_gave_up(tmp_path: Path) -> None:
    spark = SUITE.replace("@pytest.mark.interop\ndef test_client", "@pytest.mark.spark\ndef test_client")
    gave_up = spark.replace("{name} failed", "Python worker failed to connect back")
    for name, suite, runs in (("gave_up", gave_up, 2), ("lost_rows", spark, 1)):
        (folder := tmp_path / name).mkdir()
        code, output = run(folder, suite=suite, client=2)
        assert (code, len(summaries(output))) == (2 - runs, runs)


def test_a_run_that_lost_a_worker_is_not_repeated(tmp_path: Path) -> None:
    crash = SUITE.replace('passes_from(CLIENT, "client")', "os._exit(1)")
    code, output = run(tmp_path, "-n", "1", suite=crash)
    assert (code, summaries(output)) == (1, ["1 failed, 2 passed"])
    assert "crashed while running" in output
    assert attempts(tmp_path) == {"good_client": 1, "plain": 1}


def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    code, output = run(tmp_path, "--continue-on-collection-errors", client=2)
    assert (code, summaries(output)) == (1, ["1 failed, 2 passed, 1 error"])


def test_a_fixture_that_failed_is_tried_again(tmp_path: Path) -> None:
    fixture = '@pytest.fixture\ndef peer():\n    passes_from(2, "peer")\n\n@pytest.mark.interop\ndef test_client(peer):'
    code, output = run(tmp_path, suite=SUITE.replace("@pytest.mark.interop\ndef test_client():", fixture))
    assert (code, summaries(output)) == (0, ["2 passed, 1 error", "1 passed"])
