"""Runs small test suites in processes of their own, to test how the tests themselves are run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGINS = "xdist.plugin,pytest_trio.plugin,pytest_timeout"


def run_module(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python module there, with no other pytest plugins than these; stderr comes with stdout."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": PLUGINS}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
