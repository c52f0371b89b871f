"""A change of pages or of the Spark connector alone runs the tests that it needs; when in doubt, all tests run."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from .changed import ALWAYS, ROOT, changed_files, main, needed_tests


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository without a remote, with one commit and its tag `landed`."""
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("*.log\n")
    for name in ("kept.py", "changed.py", "gone.py"):
        (tmp_path / name).touch()
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "First")
    git(tmp_path, "tag", "landed")
    return tmp_path


def test_what_differs_from_the_base_counts_whether_it_is_committed_or_not(checkout: Path) -> None:
    (checkout / "gone.py").rename(checkout / "moved.py")
    git(checkout, "add", ".")
    git(checkout, "commit", "-m", "Second")
    (checkout / "changed.py").write_text("1")
    (checkout / "new page.md").touch()
    (checkout / "output.log").touch()
    assert changed_files(checkout, "landed") == ["changed.py", "gone.py", "moved.py", "new page.md"]


def test_a_commit_that_was_taken_back_changes_nothing(checkout: Path) -> None:
    (checkout / "changed.py").write_text("1")
    git(checkout, "commit", "-a", "-m", "Second")
    git(checkout, "revert", "--no-edit", "HEAD")
    assert changed_files(checkout, "landed") == []


@pytest.mark.parametrize("base", ["origin/main", "0" * 40, "--help"])
def test_a_base_that_is_not_there_is_an_error(checkout: Path, base: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        changed_files(checkout, base)


def test_without_a_base_all_tests_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-commit"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "cannot compare with 'no-such-commit', so all tests run" in printed.err


@pytest.mark.parametrize(
    "changed",
    [
        [],
        ["core/martlet/broker.py"],
        ["docs/spark.md", "core/martlet/broker.py"],
        ["docs/config.md", "pyproject.toml"],
        ["spark_connector/martlet_spark/columns.py", "tests/conftest.py"],
        [".ci/run"],
        ["LICENSE"],
    ],
)
def test_all_tests_run_if_any_other_file_changed_or_none(changed: Sequence[str]) -> None:
    assert needed_tests(ROOT, changed) == []


def test_a_page_needs_the_tests_that_name_it() -> None:
    assert set(needed_tests(ROOT, ["CHANGELOG.md"])) == set(ALWAYS)
    assert {"tests/damage/test_data_files.py", "tests/interop/test_tls.py", *ALWAYS} <= set(
        needed_tests(ROOT, ["docs/operations.md", "README.md"])
    )


def test_the_spark_connector_needs_its_tests_and_those_that_name_spark() -> None:
    own = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/spark").glob("test_*.py")}
    for changed in ("spark_connector/martlet_spark/columns.py", "tests/spark/proxy.py", "examples/spark/stats.py"):
        needed = set(needed_tests(ROOT, [changed, "CHANGELOG.md"]))
        assert own | {"tests/interop/test_spark.py", "tests/cli/test_spark_source.py", *ALWAYS} <= needed
        assert not any(path.startswith("tests/tables/") for path in needed)


def test_each_test_that_looks_at_many_pages_always_runs() -> None:
    """Such a test does not name them."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    assert {path for path, text in texts.items() if '.md")' in text and ("*.md" in text or "}.md" in text)} <= set(
        ALWAYS
    )
