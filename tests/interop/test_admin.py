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
    # Without the topic of MQTT, which a list of RocketMQ's topics does not have.
    enabled = '["remoting", "nameserver", "filter_sql92", "tx", "timer"]'
    settings = {"broker.name": admin.BROKER, "plugins.enabled": enabled}
    return RocketMQ(folder) if kind == "rocketmq" else Martlet(folder, settings)


def difference(real: str, ours: str) -> str:
    lines = difflib.unified_diff(real.splitlines(), ours.splitlines(), "real broker", "target", lineterm="", n=0)
    return "\n".join(lines)


# RocketMQ 5 has dropped or respelled them.
FOR_THE_TOOL_OF_4 = {"brokerVersion", "getTransferedTps", "filterServerNums"}


def complaint(version: str, step: admin.Step, said: str) -> str:
    """Return what is wrong with a step's output; empty if nothing is."""
    expected = admin.recorded(version, step)
    if step.how != "keys":
        return "" if said == expected else difference(expected, said)
    ours, theirs = set(said.split()), set(expected.split())
    strange, missing = sorted(ours - theirs - FOR_THE_TOOL_OF_4), sorted(set(step.must) - ours)
    return f"{strange} are unknown to the real broker, {missing} are what tools look for" if strange or missing else ""


CASES = [(version, step) for version in fetch.CLIENT_VERSIONS for step in admin.steps(version)]


@pytest.mark.parametrize(("version", "step"), CASES, ids=[f"{version}-{step.name}" for version, step in CASES])
def test_a_command_gives_the_real_brokers_output(
    outputs: Callable[[str], Outputs], version: str, step: admin.Step
) -> None:
    complained = complaint(version, step, outputs(version)[step.name])
    assert not complained, complained


USERS, CONTROLLER = "users and rules are managed in the plugin", "this cluster has no controller"
LITE = "use light topics"
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
    ("electMaster -a {names} -b 0 -bn b -c c", CONTROLLER),
    ("getBrokerLiteInfo -b {address}", LITE),
    ("switchTimerEngine -b {address} -e R", "timed messages have one engine"),
)
REFUSED_4 = (  # those of the tool of 4.x alone
    ("updateAclConfig -b {address} -a RocketMQ -s 12345678", USERS),
    ("deleteAclConfig -b {address} -a RocketMQ", USERS),
    ("clusterAclConfigVersion -b {address}", USERS),
    ("updateGlobalWhiteAddr -b {address} -g 1.1.1.1", USERS),
)
ABSENT = [(fetch.CLIENT_VERSIONS[-1], *each) for each in REFUSED] + [("4.9.8", *each) for each in REFUSED_4]


@pytest.mark.parametrize(("version", "words", "instead"), ABSENT, ids=[words.split()[0] for _, words, _ in ABSENT])
def test_a_command_for_what_is_absent_says_what_to_do_instead(
    jvms: Callable[[str], Jvm],
    target: Target,
    target_kind: str,
    tmp_path: Path,
    version: str,
    words: str,
    instead: str,
) -> None:
    (tmp_path / "topics.json").write_text("")
    tool = Java(jvms(version), target.name_server)
    said = tool.mqadmin(*words.format(address=target.address, names=target.name_server, folder=tmp_path).split())
    if target_kind != "rocketmq":  # it has these, or fails in its own words
        assert "CODE: 3" in said
        assert instead in said


MUTE = (  # those that hide why they were refused
    "getLiteClientInfo -p BenchmarkTest -g g -c c",
    "getLiteGroupInfo -p BenchmarkTest -g g",
    "getLiteTopicInfo -p BenchmarkTest -l l",
    "getParentTopicInfo -p BenchmarkTest",
    "triggerLiteDispatch -g g -p BenchmarkTest",
)


@pytest.mark.parametrize("words", MUTE, ids=[words.split()[0] for words in MUTE])
def test_a_command_about_lite_topics_fails(newest: Java, words: str) -> None:
    assert "error" in newest.mqadmin(*words.split())


# What the tool of 4.x needs and RocketMQ 5 does not tell it.
MISSED = (
    ("clusterList", r"^DefaultCluster +\S+ +0 +\S+ +V5_5_0 +\d"),
    ("exportConfigs -c DefaultCluster -f {folder}", "configs.json success"),
    ("exportMetrics -c DefaultCluster -f {folder}", "metrics.json success"),
)


@pytest.mark.parametrize(("words", "says"), MISSED, ids=[words.split()[0] for words, _ in MISSED])
def test_the_older_tool_misses_nothing(
    jvms: Callable[[str], Jvm], target: Target, target_kind: str, tmp_path: Path, words: str, says: str
) -> None:
    said = Java(jvms("4.9.8"), target.name_server).mqadmin(*words.format(folder=tmp_path).split())
    trouble = "NullPointerException"
    assert (trouble in said) == (target_kind == "rocketmq")
    assert trouble in said or re.search(says, said, re.MULTILINE)


def test_the_older_tool_shows_a_group_and_a_message(
    jvms: Callable[[str], Jvm], target: Target, name: Callable[[str], str]
) -> None:
    older, topic, group = Java(jvms("4.9.8"), target.name_server), name("older"), name("group")
    assert "success" in older.mqadmin("updateSubGroup", "-b", target.address, "-g", group, "-r", "3")
    assert re.search(r"retryMaxTimes += +3", older.mqadmin("getConsumerConfig", "-g", group))
    [sent] = older.producer().send(message(topic, "x"))
    assert re.search(rf"Topic: +{topic}\n", older.mqadmin("queryMsgById", "-i", sent.offset_msg_id))
    older.leave()


def test_a_setting_of_the_name_server_is_changed(java: Java) -> None:
    said = java.mqadmin("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", "false")
    assert "update name server config success" in said


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


# Commands that read local files, or that fail before they ask a server.
LOCAL = {"dumpCompactionLog", "exportMetadataInRocksDB", "remappingStaticTopic"}
ALONE = {"updateNamesrvConfig", "queryMsgTraceById", "clusterRT", "startMonitoring"}  # each has a test of its own
TRIED = {
    "4.9.8": [*(words for words, _ in (*REFUSED_4, *MISSED)), "getConsumerConfig", "queryMsgById"],
    "5.5.0": [*(words for words, _ in REFUSED), *MUTE],
}


@pytest.mark.parametrize("version", fetch.CLIENT_VERSIONS)
def test_every_command_of_the_tool_is_tried(jvms: Callable[[str], Jvm], version: str) -> None:
    listed = re.findall(r"(?m)^ {3}(\w+) +\S", jvms(version).call("mqadmin", words=[]))
    assert len(listed) > 50
    tried = {words.split()[0] for words in (*(step.words for step in admin.steps(version)), *TRIED[version])}
    assert set(listed) - tried - LOCAL - ALONE == set()
