"""`.ci/test` installs what the chosen tests need, and does not fail for a step that only saves time."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Instead of installing: say what would be installed.
STUBS = """
need_system() { echo "need_system $*"; }
need_brokers() { echo "need_brokers"; }
need_venv() { echo "need_venv $*"; }
need_native() { echo "need_native $*"; }
"""
PYTHON = """#!/bin/bash
echo "python $*"
case "$*" in *interop.training*) echo "no JVM can be started" >&2; exit 1 ;; esac
"""
FOLDERS = ("store", "groups", "net", "interop", "cli")


def run(folder: Path, *words: str) -> list[str]:
    """Return the lines that ``bash .ci/test WORDS`` prints in a checkout without anything installed."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "test", folder / ".ci")
    (folder / ".ci" / "environment").write_text((ROOT / ".ci" / "environment").read_text() + STUBS)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    for name in FOLDERS:
        (folder / "tests" / name).mkdir(parents=True)
        (folder / "tests" / name / "test_one.py").touch()
    done = subprocess.run(
        ["bash", ".ci/test", *words],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "words",
    [("tests/store",), ("tests/net/",), ("tests/store/test_one.py::test_x", "tests/groups", "-n", "2", "-k", "crash")],
)
def test_tests_of_the_product_alone_need_only_python_packages(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert run(tmp_path, *words) == [
        "need_system openssl:openssl",
        "need_venv .venv test",
        f"python -m tests.once_more {' '.join(words)}",
    ]


def test_tests_of_commands_and_pages_need_the_tools_but_no_clients(tmp_path: Path) -> None:
    words = ("-n", "4", "tests/store", "tests/cli", "tests/net")
    assert run(tmp_path, *words) == [
        "need_system openssl:openssl systemd-analyze:systemd",
        "need_venv .venv",
        "need_native .venv",
        f"python -m tests.once_more {' '.join(words)}",
    ]


@pytest.mark.parametrize(
    "words", [(), ("tests/interop",), ("tests/cli", "tests/interop", "tests/store"), ("tests",), ("-k", "crash")]
)
def test_all_others_need_the_real_clients_and_brokers(tmp_path: Path, words: tuple[str, ...]) -> None:
    lines = run(tmp_path, *words)
    assert any(line.startswith("need_system java:") for line in lines)
    assert {"need_brokers", "need_venv .venv", "need_native .venv", "python -m tests.interop.fetch"} <= set(lines)
    assert "4 GB" in " ".join(lines[:3])


def test_a_failed_step_that_only_saves_time_is_shown_and_the_tests_run(tmp_path: Path) -> None:
    lines = run(tmp_path)
    failed = lines.index("no JVM can be started")
    assert lines[failed + 1] == (
        "writing class archives for RocketMQ failed (above); the tests run without it and take longer"
    )
    assert lines[failed + 2 : -1] == ["python -m tests.spark.training"]
    assert lines[-1].startswith("python -m tests.once_more -n 4 ")
