"""The tests that a change needs: ``python -m tests.changed [BASE]`` prints their paths, or nothing if all run.

BASE is a commit that passed all tests; the default is ``origin/main``. Pages need the tests whose source names them,
the Spark connector and its examples need the tests whose source names Spark; both need the tests in `ALWAYS`. A change
of any other file needs all tests. So does no change, and a base that is not there.
"""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
BASE: Final = "origin/main"
# The tests that look at all pages, all packages or all tests.
ALWAYS: Final = (
    "tests/access/test_borders.py",
    "tests/cli/test_pages.py",
    "tests/stomp/test_coming_from.py",
    "tests/test_architecture.py",
    "tests/test_changed.py",
    "tests/test_kinds_table.py",
    "tests/test_tidy.py",
)
SPARK: Final = ("examples/spark/", "spark_connector/", "tests/spark/")


def changed_files(root: Path, base: str) -> list[str]:
    """Return the files in which the checkout *root* differs from the commit *base*, new ones included.

    Raises:
      CalledProcessError: *root* is no checkout, or has no such commit.
    """
    commands = (
        ["git", "diff", "--name-only", "--no-renames", "-z", f"{base}^{{commit}}", "--"],
        ["git", "ls-files", "--others", "--exclude-standard", "-z"],
    )
    outputs = [subprocess.run(words, cwd=root, capture_output=True, text=True, check=True).stdout for words in commands]
    return sorted({name for output in outputs for name in output.split("\0") if name})


def needed_tests(root: Path, changed: Iterable[str]) -> list[str]:
    """Return the paths of the tests that these files need; empty if they need all tests."""
    words = {_word(name) for name in changed}
    if None in words or not words:
        return []
    paths = [path for folder in ("examples", "tests") for path in (root / folder).rglob("test_*.py")]
    texts = {path.relative_to(root).as_posix(): path.read_text().lower() for path in paths}
    return sorted({*ALWAYS, *(path for path, text in texts.items() if any(word in text for word in words if word))})


def _word(name: str) -> str | None:
    """Return what the tests that this file needs have in their source, in lower case; None if it needs all tests."""
    if name.startswith(SPARK):
        return "spark"
    return Path(name).name.lower() if name.endswith(".md") else None


def main(arguments: Sequence[str]) -> int:
    base = arguments[0] if arguments else BASE
    try:
        changed = changed_files(ROOT, base)
    except subprocess.CalledProcessError as error:
        print(f"cannot compare with {base!r}, so all tests run: {error.stderr.strip()}", file=sys.stderr)
        return 0
    for path in needed_tests(ROOT, changed):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
