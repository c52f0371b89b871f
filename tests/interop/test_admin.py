"""The official admin tool sees what it sees on a real broker."""

import difflib
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from . import admin, fetch
from .conftest import RocketMQ, Target
from .java import Java, Jvm, message, write_log_config
from .martlet_process import Martlet
from .process import Process, eventually

Outputs = dict[str, str]
T = TypeVar("T")

# The tool gives up an answer after 3, 5 or 6 s, which cannot be set. A scene in which a command took that long, and did
# not say what it should, is played again: maybe the machine stood still. What is wrong is wrong each time.
SLOW_S = 2.5
PLAYS = 4


@pytest.fixture(scope="module")
def outputs(
    target_kind: str, jvms: Callable[[str], Jvm], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Outputs]:
    """A function from a tool's version to the output of every step, played once against a broker of its own."""
    played: dict[str, Outputs] = {}
    failed: dict[str, Exception] = {}

    def of(version: str) -> Outputs:
        if version not in played:
            try:
                played[version] = play_in_peace(version)
            except Exception as failure:
                failed[version] = failure
        if version in failed:
            raise RuntimeError(f"the tool {version} stopped") from failed[version]
        return played[version]

    def play_in_peace(version: str) -> Outputs:
        for _ in range(PLAYS - 1):
            outputs, disturbed = play(version)
            if not disturbed:
                return outputs
        return play(version)[0]

    def play(version: str) -> tuple[Outputs, bool]:
        """Return what each step said, and whether a slow one said something else than it should."""
        outputs: Outputs = {}
        disturbed = False
        folder = tmp_path_factory.mktemp("admin")
        target = young_broker(target_kind, folder)
        clients = Java(jvms(version), target.name_server)
        try:
            begun = time.monotonic()
            for step, output in admin.play(clients, target.address, folder / "files"):
                outputs[step.name] = output
                disturbed |= time.monotonic() - begun > SLOW_S and complaint(version, step, output) != ""
                begun = time.monotonic()
        finally:
            clients.close()
            target.close()
        return outputs, disturbed

    return of


def young_broker(kind: str, folder: Path) -> RocketMQ | Martlet:
    return RocketMQ(folder) if kind == "rocketmq" else Martlet(folder, {"broker.name": admin.BROKER})


def difference(real: str, ours: str) -> str:
    lines = difflib.unified_diff(real.splitlines(), ours.splitlines(), "real broker", "target", lineterm="", n=0)
    return "\n".join(lines)


def complaint(version: str, step: admin.Step, said: str) -> str:
    """Return what is wrong with a step's output; empty if nothing is."""
    expected = admin.recorded(version, step)
    if step.how != "keys":
        return "" if said == expected else difference(expected, said)
    ours, theirs = set(said.split()), set(expected.split())
    strange, missing = sorted(ours - theirs), sorted(set(step.must) - ours)
    return f"{strange} are unknown to the real broker, {missing} are what tools look for" if strange or missing else ""


CASES = [(version, step) for version in fetch.CLIENT_VERSIONS for step in admin.steps(version)]


@pytest.mark.parametrize(("version", "step"), CASES, ids=[f"{version}-{step.name}" for version, step in CASES])
def test_a_command_gives_the_real_brokers_output(
    outputs: Callable[[str], Outputs], version: str, step: admin.Step
) -> None:
    complained = complaint(version, step, outputs(version)[step.name])
    assert not complained, complained


USERS, CONTROLLER = "users and rules are managed in the plugin", "this cluster has no controller"
# Commands for what Martlet does not have: each is refused with a remark that says what to do instead.
REFUSED = (
    ("createUser -b {address} -u bob -p secret -t Normal", USERS),
    ("updateUser -b {address} -u bob -p secret", USERS),
    ("getUser -b {address} -u bob", USERS),
    ("listUser -b {address}", USERS),
    ("deleteUser -b {address} -u bob", USERS),
    ("copyUser -f {address} -t {address} -u bob", USERS),
    ("createAcl -b {address} -s User:bob -r Topic:T -a Pub -d Allow", USERS),
    ("updateAcl -b {address} -s User:bob -r Topic:T -a Pub -d Allow", USERS),
    ("getAcl -b {address} -s User:bob", USERS),
    ("listAcl -b {address}", USERS),
    ("deleteAcl -b {address} -s User:bob", USERS),
    ("copyAcl -f {address} -t {address} -s User:bob", USERS),
    ("getControllerMetaData -a {names}", CONTROLLER),
    ("getControllerConfig -a {names}", CONTROLLER),
    ("updateControllerConfig -a {names} -k a -v b", CONTROLLER),
    ("getSyncStateSet -a {names} -b b", CONTROLLER),
    ("cleanBrokerMetadata -a {names} -bn b -c c", CONTROLLER),
    ("getBrokerEpoch -c DefaultCluster", CONTROLLER),
    ("addBroker -c {address} -b {folder}/topics.json", "start another one with martlet run"),
    ("removeBroker -c {address} -b c:b:0", "start another one with martlet run"),
    ("resetMasterFlushOffset -b {address} -o 0", "a broker has no slaves"),
    ("checkRocksdbCqWriteProgress -c DefaultCluster", "nothing is kept in RocksDB"),
    ("exportPopRecord -c DefaultCluster", "nothing is kept in RocksDB"),
    ("rocksDBConfigToJson -t topics -c DefaultCluster", "nothing is kept in RocksDB"),
    ("updateStaticTopic -t Static -qn 2 -c DefaultCluster", "create the topic with updateTopic"),
    ("setCommitLogReadAheadMode -b {address} -m 0", "there is no read-ahead mode"),
)


@pytest.mark.parametrize(("words", "instead"), REFUSED, ids=[words.split()[0] for words, _ in REFUSED])
def test_a_command_for_what_is_absent_says_what_to_do_instead(
    newest: Java, target: Target, target_kind: str, tmp_path: Path, words: str, instead: str
) -> None:
    (tmp_path / "topics.json").write_text("")
    said = newest.mqadmin(*words.format(address=target.address, names=target.name_server, folder=tmp_path).split())
    if target_kind != "rocketmq":  # it has these, or fails in its own words
        assert "CODE: 3" in said
        assert instead in said


def test_the_trace_of_a_message_names_its_producer_and_its_consumer(
    java: Java, target: Target, name: Callable[[str], str]
) -> None:
    topic, group = name("traced"), name("tracing")
    consumer = java.push(group, topic, trace=True)
    [sent] = java.producer(trace=True).send(message(topic, "followed", keys="k"))
    consumer.wait(1)
    words = ["queryMsgTraceById", "-i", sent.msg_id]

    def look() -> str | None:
        said = java.mqadmin(*words)
        return said if "Pub" in said and group in said else None

    said = eventually(look)
    assert re.search(r"^Pub +interop_producer .* success *$", said, re.MULTILINE)
    assert re.search(rf"^Sub +{group} .* success *$", said, re.MULTILINE)


class Endless:
    """An admin command that runs until it is ended, in a process of its own."""

    def __init__(self, version: str, folder: Path, name_server: str, *words: str) -> None:
        folder.mkdir(parents=True)
        log_folders = [f"-D{name}={folder}" for name in ("user.home", "rocketmq.home.dir", "rocketmq.client.logRoot")]
        write_log_config(folder)
        main = [fetch.tool("java"), "-Xmx96m", *log_folders, "-cp", f"{fetch.client_jars(version)}/*", TOOL]
        self.words, self.log, self.environment = [*main, *words], folder / "tool.log", {"NAMESRV_ADDR": name_server}
        self.process = self._start()

    def _start(self) -> Process:
        return Process(self.words, self.log, self.environment)

    def wait_until(self, ready: Callable[[], T | None], what: str) -> T:
        """As `Process.wait_until`; a tool that gave up, because an answer took longer than 3 s, is started again."""
        for _ in range(PLAYS - 1):
            try:
                return self.process.wait_until(ready, what)
            except RuntimeError:
                self.process = self._start()
        return self.process.wait_until(ready, what)


TOOL = "org.apache.rocketmq.tools.command.MQAdminStartup"


@pytest.mark.parametrize("version", fetch.CLIENT_VERSIONS)
def test_cluster_rt_measures_sends_again_and_again(target: Target, tmp_path: Path, version: str) -> None:
    words = ("clusterRT", "-a", "3", "-s", "10", "-i", "1")
    tool = Endless(version, tmp_path / "tool", target.name_server, *words)
    line = re.compile(r"^DefaultCluster +\S+ +[\d.]+ +3 +0 *$", re.MULTILINE)
    try:
        tool.wait_until(lambda: True if len(line.findall(tool.process.output())) >= 2 else None, "clusterRT")
    finally:
        tool.process.kill()
    assert len(line.findall(tool.process.output())) >= 2


@pytest.mark.parametrize("version", fetch.CLIENT_VERSIONS)
def test_the_monitor_follows_what_happens(newest: Java, target: Target, tmp_path: Path, version: str) -> None:
    tool = Endless(version, tmp_path / "tool", target.name_server, "startMonitoring")
    online = r"OFFSET_MOVED_EVENT +\*"
    try:

        def look() -> str | None:
            said = newest.mqadmin("consumerConnection", "-g", "__MONITOR_CONSUMER")
            return said if re.search(online, said) else None

        assert "@MonitorService_" in tool.wait_until(look, "startMonitoring")
    finally:
        tool.process.kill()
