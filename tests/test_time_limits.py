"""A test that hangs shows where, fails, and leaves the other tests alone."""

import re
from pathlib import Path

import pytest

from .small_suite import run_module

CONFTEST = """
from tests import time_limits

def pytest_configure(config):
    config.pluginmanager.register(time_limits)
    time_limits.GRACE_S = 2
"""

SUITE = """
import threading
import time

import pytest
import trio

limited = pytest.mark.timeout(2)

@limited
def test_waits_for_a_thread():
    threading.Event().wait()

@limited
async def test_waits_for_a_task():
    async def wait_for_nothing():
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_nothing)

@limited
async def test_waits_with_a_clock(autojump_clock):
    await trio.sleep_forever()

@limited
async def test_keeps_the_loop_busy():
    while True:
        pass

@limited
async def test_swallows_its_cancellation():
    try:
        await trio.sleep_forever()
    except trio.Cancelled:
        pass

@pytest.fixture
async def slow_to_close():
    yield
    await trio.sleep_forever()

@limited
async def test_waits_for_a_fixture(slow_to_close):
    pass

@limited
def test_runs_trio_itself():
    trio.run(trio.sleep_forever)
"""

AFTER = """
def test_after():
    pass

async def test_after_in_trio():
    await trio.lowlevel.checkpoint()
"""

SHIELDED = """
@limited
async def test_cannot_be_cancelled():
    with trio.CancelScope(shield=True):
        await trio.sleep_forever()

"""


def run(folder: Path, suite: str, workers: str) -> tuple[str, dict[str, str]]:
    """Run *suite*; return the output, and PASSED or FAILED for each test."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -rfEp\ntrio_mode = true\nfilterwarnings = error\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_suite.py").write_text(suite)
    output = run_module(folder, "pytest", "-n", workers).stdout
    results = re.findall(r"^([A-Z]+) test_suite.py::(\w+)", output, re.MULTILINE)
    return output, {name: result for result, name in results}


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_test_over_its_limit_shows_where_it_waits_and_fails(tmp_path: Path, workers: str) -> None:
    output, results = run(tmp_path, SUITE + AFTER, workers)
    tests = re.findall(r"def (test_\w+)", SUITE + AFTER)
    assert results == {name: "PASSED" if name.startswith("test_after") else "FAILED" for name in tests}, output
    assert "threading.Event().wait()" in output
    assert re.search(r"task test_suite.*wait_for_nothing\n +\S+test_suite.py:\d+ wait_for_nothing: ", output)
    assert re.search(r'test_suite.py", line \d+, in test_keeps_the_loop_busy\n', output)


def test_one_that_cannot_be_cancelled_ends_its_worker_and_nothing_else(tmp_path: Path) -> None:
    output, results = run(tmp_path, SUITE.partition("@limited")[0] + SHIELDED + AFTER, "1")
    passed = {"test_after": "PASSED", "test_after_in_trio": "PASSED"}
    assert results == {"test_cannot_be_cancelled": "FAILED", **passed}, output
    assert re.search(r"test_suite.py:\d+ test_cannot_be_cancelled: await trio.sleep_forever", output)
