"""What the interop tests run against: one broker of the chosen kind, one JVM a client version, for a session."""

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from . import fetch, rocketmq
from .java import Java, Jvm
from .martlet_process import Martlet
from .mqtt_broker import MqttMartlet
from .mqtt_clients import PahoClients
from .other_clients import Program
from .store_exchange import OurBroker, RealBroker

HERE = Path(__file__).parent
TIMEOUT_S = 900.0  # the slowest takes 65 s; one that waits in vain says for what after 180 to 300 s


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.interop)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if isinstance(item, pytest.Function) and is_of_older_client(item):
                item.add_marker(pytest.mark.full)


def is_of_older_client(item: pytest.Function) -> bool:
    """Whether the test repeats with an older Java client what it does with the newest."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and not set(fetch.CLIENT_VERSIONS[:-1]).isdisjoint(map(str, callspec.params.values()))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a file that skips itself into a failure, as below."""
    report = yield
    if report.skipped and collector.path.is_relative_to(HERE):
        report.outcome = "failed"
        report.longrepr = f"an interop test must not skip: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure: what is not there must be installed, or nobody learns that nothing was tried."""
    report = yield
    if report.skipped and item.path.is_relative_to(HERE):
        report.outcome = "failed"
        report.longrepr = f"an interop test must not skip: {report.longrepr}"
    return report


class Target(Protocol):
    """A broker with its name server, and how to end and start it."""

    address: str
    name_server: str

    def start(self) -> None: ...
    def stop(self) -> object: ...
    def kill(self) -> None: ...


class RocketMQ(rocketmq.Broker):
    """A real broker with a real name server of its own."""

    def __init__(self, folder: Path, settings: dict[str, str] | None = None, *, tls: bool = False) -> None:
        self.names = rocketmq.NameServer(folder / "names", tls=tls)
        try:
            super().__init__(folder / "broker", self.names.address, settings, tls=tls)
        except BaseException:
            self.names.stop()
            raise

    def close(self) -> None:
        self.kill()
        self.names.process.kill()


@pytest.fixture(scope="session")
def target_kind(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--target"))


@pytest.fixture(scope="session")
def target(target_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """The broker that is under test."""
    folder = tmp_path_factory.mktemp(target_kind)
    if target_kind == "rocketmq":
        real = RocketMQ(folder, {"enablePropertyFilter": "true", "traceTopicEnable": "true"})
        yield real
        real.close()
    else:
        martlet = Martlet(folder)
        yield martlet
        martlet.stop()


@pytest.fixture(scope="session")
def jvms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Jvm]]:
    """A function from a client version to its JVM, which lives as long as the session."""
    running: dict[str, Jvm] = {}

    def of(version: str) -> Jvm:
        if version not in running:
            # The default is 20 s; the test of a dying consumer shows that nobody has to wait for it.
            properties = {"rocketmq.client.rebalance.waitInterval": "1000"}
            running[version] = Jvm(version, tmp_path_factory.mktemp(f"java-{version}"), properties)
        return running[version]

    yield of
    for jvm in running.values():
        jvm.stop()


@pytest.fixture(params=fetch.CLIENT_VERSIONS)
def java(request: pytest.FixtureRequest, jvms: Callable[[str], Jvm], target: Target) -> Iterator[Java]:
    """RocketMQ's Java client, each version in turn, against the target."""
    clients = Java(jvms(request.param), target.name_server)
    yield clients
    clients.leave()


@pytest.fixture
def newest(jvms: Callable[[str], Jvm], target: Target) -> Iterator[Java]:
    """The newest Java client alone, where the client's version is not what is tested."""
    clients = Java(jvms(fetch.CLIENT_VERSIONS[-1]), target.name_server)
    yield clients
    clients.leave()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MqttMartlet]:
    """A Martlet that serves MQTT, also with TLS, and STOMP."""
    martlet = MqttMartlet(tmp_path_factory.mktemp("mqtt"))
    yield martlet
    martlet.stop()


@pytest.fixture
def mqtt() -> Iterator[PahoClients]:
    clients = PahoClients()
    yield clients
    clients.close()


@pytest.fixture
def cpp(tmp_path: Path) -> Iterator[Program]:
    """The program over the C++ client."""
    program = Program([str(fetch.cpp_python()), str(HERE / "cpp" / "client.py")], tmp_path / "cpp")
    yield program
    program.close()


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Program]:
    """The program over the Go client."""
    program = Program([str(fetch.go_program())], tmp_path / "go")
    yield program
    program.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Program]:
    """The program over the Node client."""
    program = Program(fetch.node_program("node", HERE / "node" / "client.js"), tmp_path / "node")
    yield program
    program.close()


_unique = itertools.count(1)


@pytest.fixture
def name() -> Callable[[str], str]:
    """A function that makes a topic or group name nobody else has: the tests share one broker."""
    stem = f"{os.getpid()}_{next(_unique)}"
    return lambda kind: f"{kind}_{stem}"


# Where RocketMQ and Martlet take turns to have one directory open, a broker's first check of its disk must not delete
# what the other one wrote.
RESERVED_HOURS = "72"


@pytest.fixture(scope="session")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rocketmq.NameServer]:
    """A real name server. The real brokers of the tests take turns: it forgets a broker whose connection is closed."""
    server = rocketmq.NameServer(tmp_path_factory.mktemp("names"))
    yield server
    server.process.kill()


@pytest.fixture
def jvm(jvms: Callable[[str], Jvm]) -> Jvm:
    return jvms(fetch.CLIENT_VERSIONS[-1])


@pytest.fixture
def real_broker(tmp_path: Path, names: rocketmq.NameServer, data: Path) -> Iterator[RealBroker]:
    """Starts a RocketMQ broker on the data; it ends with the test at the latest."""
    places = {"storePathRootDir": str(data), "storePathCommitLog": str(data / "commitlog")}
    with ExitStack() as running:

        def start(
            *, record_crcs: bool = False, light: bool = False, settings: Mapping[str, str] | None = None
        ) -> rocketmq.Broker:
            crcs, lights = str(record_crcs).lower(), str(light).lower()
            said = {**places, "enabledAppendPropCRC": crcs, "forceVerifyPropCRC": crcs}
            said |= {"enableLmq": lights, "enableMultiDispatch": lights, "fileReservedTime": RESERVED_HOURS}
            broker = rocketmq.Broker(tmp_path / "real", names.address, said | dict(settings or {}))
            running.callback(broker.kill)
            return broker

        yield start


@pytest.fixture
def martlet(tmp_path: Path, data: Path) -> Iterator[OurBroker]:
    """Starts a Martlet on the data; it ends with the test at the latest."""
    with ExitStack() as running:

        def start(
            *, record_crcs: bool = False, light: bool = False, settings: Mapping[str, str] | None = None
        ) -> Martlet:
            said = {"broker.name": "broker-a", "store.segment_bytes": str(64 << 20)}
            said["store.record_crcs"] = str(record_crcs).lower()
            said["remoting.light_queues"] = str(light).lower()
            broker = Martlet(tmp_path / "ours", said | dict(settings or {}), data=data)
            running.callback(broker.close)
            return broker

        yield start


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"
