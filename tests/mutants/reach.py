"""Which tests run which lines, and how long each takes, measured once with coverage and kept in `.mutants`."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from coverage import Coverage, CoverageData

from .processes import OUTPUT, PACKAGES, ROOT, run_pytest, source_of

__all__ = ["Reach", "cache_folder", "files_of", "is_measured", "measure", "near_tests", "read"]

MEASURE_LIMIT_S: Final = 1800.0

# The tests that are near a module: the first prefix that fits counts.
NEAR: Final = (
    ("martlet/store/format/atomic.py", ("tests/store", "tests/broker/test_publish_atomic.py")),
    ("martlet/store/append/committer.py", ("tests/store", "tests/state/test_journal.py", "tests/net/test_rounds.py")),
    ("martlet/store/queue_reader.py", ("tests/store", "tests/broker")),
    ("martlet/store/", ("tests/store",)),
    ("martlet/state/", ("tests/state", "tests/store/test_atomic_groups.py")),
    ("martlet/access/", ("tests/access", "tests/broker", "tests/groups", "tests/remoting/test_permission.py")),
    ("martlet/tables/", ("tests/tables", "tests/remoting")),
    ("martlet/cli/", ("tests/cli",)),
    ("martlet/delivery/", ("tests/delivery", "tests/access", "tests/state")),
    ("martlet/groups/", ("tests/groups", "tests/access", "tests/state")),
    ("martlet/sessions/", ("tests/sessions", "tests/state")),
    ("martlet/net/", ("tests/net",)),
    ("martlet/plugins/", ("tests/plugins",)),
    ("martlet/runtime/", ("tests/runtime", "tests/net")),
    ("martlet/app/", ("tests/app", "tests/cli")),
    ("martlet/offline/", ("tests/store", "tests/damage")),
    ("martlet/", ("tests/broker",)),
    ("martlet_client/", ("tests/client",)),
    ("martlet_remoting/commands/", ("tests/cli",)),
    ("martlet_remoting/", ("tests/remoting",)),
    ("martlet_stomp/", ("tests/stomp",)),
    ("martlet_timer/", ("tests/timer",)),
)


@dataclass
class Reach:
    """The tests that run each line of one module, and the seconds that each test takes."""

    lines: dict[int, set[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def tests(self, lines: Sequence[int]) -> list[str]:
        """Return the tests that run one of *lines*: the quickest of each file, the second of each, and so on.

        Tests of one file are alike, so what none of its quickest notices the others hardly do.
        """
        found = set().union(*(self.lines.get(line, set()) for line in lines))
        ranks: Counter[str] = Counter()
        ranked: list[tuple[int, float, str]] = []
        for seconds, test in sorted((self.seconds[test], test) for test in found):
            test_file = test.partition("::")[0]
            ranked.append((ranks[test_file], seconds, test))
            ranks[test_file] += 1
        return [test for _, _, test in sorted(ranked)]


def near_tests(module: str) -> list[str]:
    """Return the test files near *module*, relative to the root of the checkout."""
    return files_of(next(places for prefix, places in NEAR if module.startswith(prefix)))


def files_of(places: Sequence[str]) -> list[str]:
    """Return the test files that *places* names: files, and folders with all of theirs."""
    paths = (path for place in places for path in sorted((ROOT / place).glob("test_*.py")) or [ROOT / place])
    return [os.path.relpath(path, ROOT) for path in paths]


def cache_folder() -> Path:
    """Return the folder in the checkout that keeps what was measured; git ignores it."""
    folder = ROOT / ".mutants"
    folder.mkdir(exist_ok=True)
    return folder


def _digest(test_file: str, module: str) -> str:
    return hashlib.sha256((ROOT / test_file).read_bytes() + source_of(module).encode()).hexdigest()


def _paths(folder: Path, test_file: str) -> tuple[Path, Path]:
    name = test_file.replace("/", "-")
    return folder / f"{name}.coverage", folder / f"{name}.json"


def is_measured(folder: Path, test_file: str, module: str) -> bool:
    """Whether *folder* has what *test_file* as it is now runs in *module* as it is now."""
    _, notes = _paths(folder, test_file)
    return notes.exists() and json.loads(notes.read_text())["digests"].get(module) == _digest(test_file, module)


def measure(folder: Path, test_file: str, modules: Sequence[str], packages: Path) -> str:
    """Run *test_file* under coverage and keep the result in *folder*; return what went wrong, usually nothing."""
    data, notes = _paths(folder, test_file)
    data.unlink(missing_ok=True)
    notes.unlink(missing_ok=True)
    recorder = _Recorder(packages, data, notes, {module: _digest(test_file, module) for module in modules})
    code = run_pytest(packages, [test_file], [recorder], MEASURE_LIMIT_S)
    if code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    return f"{test_file} fails without a mutant (exit code {code}):\n{(packages / OUTPUT).read_text()[-1000:]}"


def read(folder: Path, files: Sequence[str], module: str) -> Reach:
    """Return what the test *files* run of *module*."""
    reach = Reach()
    for test_file in files:
        path, notes = _paths(folder, test_file)
        if not (notes.exists() and path.exists()):
            continue
        note = json.loads(notes.read_text())
        reach.seconds.update(note["seconds"])
        data = CoverageData(str(path))
        data.read()
        name = next((name for name in data.measured_files() if name.endswith("/" + module)), None)
        for line, contexts in data.contexts_by_lineno(name).items() if name else ():
            reach.lines.setdefault(line, set()).update(set(contexts) & note["seconds"].keys())
    return reach


class _Recorder:
    """A pytest plugin that records the lines of each test; a test that fails is left out."""

    def __init__(self, packages: Path, data: Path, notes: Path, digests: dict[str, str]) -> None:
        self._notes = notes
        self._digests = digests
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        included = [f"{packages}/{package}/*" for package in PACKAGES]
        self._coverage = Coverage(data_file=str(data), config_file=False, include=included)
        self._coverage.set_option("run:disable_warnings", ["no-data-collected"])

    def pytest_sessionstart(self) -> None:
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()
        seconds = {test: taken for test, taken in self._seconds.items() if test not in self._failed}
        self._notes.write_text(json.dumps({"digests": self._digests, "seconds": seconds}))
