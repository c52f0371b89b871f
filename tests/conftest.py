"""Options and fixtures of the whole suite."""

import gc
import logging
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.writer import Writer
from martlet.store.disk.files import RealDisk
from martlet_timer.handover import wheel_files

from . import at_most, mock_clock, time_limits

# A test says the same of the same code wherever it runs: its examples are drawn alike, and no time limit is set, for a
# busy machine keeps none. With ``--hypothesis-profile explore`` others are drawn each time.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("steady", settings.get_profile("explore"), derandomize=True)
settings.load_profile("steady")


ROOT = Path(__file__).parents[1]

# The files that take longest, in seconds. Started first, they leave no worker alone with one of them at the end.
SLOWEST = {
    "test_rocketmq.py": 400,  # with all files that share its Spark session
    "test_chaos.py": 260,
    "test_sim.py": 150,
    "test_pop.py": 120,
    "test_admin.py": 120,
    "test_consume.py": 110,
    "test_timers.py": 110,
    "test_external_crash.py": 100,
    "test_connect.py": 90,
    "test_stomp_peers.py": 90,
    "test_store_light_queues.py": 90,
    "test_other_clients.py": 80,
    "test_transactions.py": 75,
    "test_store_from_martlet.py": 70,
    "test_store_from_rocketmq.py": 70,
    "test_delays.py": 70,
    "test_derived_files.py": 70,
    "test_sql92.py": 70,
    "test_many_pops.py": 60,
    "test_mixed_cluster.py": 60,
    "test_mqtt_clients.py": 50,
    "test_verify.py": 50,
    "test_store_groups.py": 40,
    "test_message_kinds.py": 40,
    "test_python_client.py": 40,
    "test_external_full_disk.py": 30,
    "test_restart.py": 30,
    "test_users.py": 30,
    "test_store_to_and_fro.py": 25,
    "test_credentials.py": 25,
    "test_crash.py": 25,
    "test_mqtt_fuzz.py": 25,
    "test_kill.py": 25,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -SLOWEST.get(item.path.name, 0))


@cache
def scope_of(path: str) -> str:
    """What one worker runs: the tests of a file, or those of all files with the fixture `spark`, which share a JVM."""
    shares = path.startswith("tests/spark/") and "spark: SparkSession" in (ROOT / path).read_text()
    return "spark" if shares else path


class OneSpark(LoadFileScheduling):  # type: ignore[misc]
    """Gives each worker the tests of one scope at a time."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.split("::", 1)[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneSpark | None:
    return OneSpark(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(time_limits)
    config.pluginmanager.register(mock_clock)


def pytest_sessionstart(session: pytest.Session) -> None:
    # pytest adds its handlers to loggers that do not propagate too, and those of PySpark would make them write JSON.
    logs = session.config.pluginmanager.get_plugin("logging-plugin")
    assert logs is not None
    for handler in (logs.caplog_handler, logs.report_handler):
        handler.setFormatter = _keep_formatter


def _keep_formatter(formatter: logging.Formatter | None) -> None:
    """Leave the formatter of a handler as it is."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.register(at_most)
    parser.addoption(
        "--target",
        choices=("martlet", "rocketmq"),
        default="martlet",
        help="the broker that the interop tests run against (rocketmq: the real one, which proves the tests right)",
    )


@pytest.fixture(scope="session", autouse=True)
def small_wheels() -> Iterator[None]:
    """Write 1 MB instead of 140 MB of zeros where RocketMQ would look for timers; `whole_wheel` writes them all."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wheel_files, "LOG_BYTES", wheel_files.LOG_BYTES // 200)
        patched.setattr(wheel_files, "SLOTS", wheel_files.SLOTS // 100)
        yield


@pytest.fixture
def whole_wheel(monkeypatch: pytest.MonkeyPatch, small_wheels: None) -> None:
    monkeypatch.setattr(wheel_files, "LOG_BYTES", wheel_files.LOG_BYTES * 200)
    monkeypatch.setattr(wheel_files, "SLOTS", wheel_files.SLOTS * 100)


@pytest.fixture
def nothing_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read from the disk has to be waited for."""
    monkeypatch.setattr(RealDisk, "read_now", lambda *_: None)


@pytest.fixture
def all_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is read from the disk has to be waited for; tmpfs, for one, cannot tell that of what it holds."""
    monkeypatch.setattr(RealDisk, "read_now", RealDisk.read)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Disable garbage collection, and logging, whose records would keep exceptions alive."""
    logging.disable()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


@pytest.fixture
def appended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of messages of each call that appends."""
    counts: list[int] = []
    real = Writer.append_all

    def counted(self: Writer, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        counts.append(len(items))
        return real(self, items, atomic=atomic)

    monkeypatch.setattr(Writer, "append_all", counted)
    return counts
