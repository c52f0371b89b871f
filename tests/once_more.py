"""Run pytest; if only interop tests failed, run those once more, alone: python -m tests.once_more [PYTEST ARGUMENTS]

Real clients have time limits that cannot be set, and a busy machine can exceed them. So a test with the marker
`interop` fails the run only if it fails twice. The same holds for a test with the marker `spark` in which Spark gave
up a Python process because it had not connected within 10 s, and for no other failure of such a test. Nothing else is
ever repeated: no other test, and no run that was cut short or lost a worker. The results of both runs are printed, and
the exit code is that of the last one.
"""

import os
import sys
from typing import Final

import pytest

# From Spark's PythonWorkerFactory, whose limit is a constant.
SPARK_GAVE_UP: Final = "Python worker failed to connect back"


class Failures:
    """The tests that failed, seen from the process that prints the results."""

    def __init__(self) -> None:
        self.foreign: set[str] = set()  # those that may have met a time limit of a client or of Spark
        self.others: set[str] = set()
        self.cut_short = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            gave_up = "spark" in report.keywords and SPARK_GAVE_UP in report.longreprtext
            foreign = "interop" in report.keywords or gave_up
            (self.foreign if foreign else self.others).add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.others.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.cut_short = bool(session.shouldfail or session.shouldstop)

    def deserve_a_second_run(self) -> bool:
        return bool(self.foreign) and not self.others and not self.cut_short


def main(arguments: list[str]) -> int:
    failures = Failures()
    code = pytest.main(arguments, plugins=[failures])
    if code != pytest.ExitCode.TESTS_FAILED or not failures.deserve_a_second_run():
        return code
    print(f"\n== once more, alone: {len(failures.foreign)} tests that may have met a time limit", flush=True)
    again = [*arguments, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *again])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
