"""A day in the life of the official admin tool: its everyday commands in order, and their output made comparable.

`python -m tests.interop.admin` runs them against a real broker and writes what it answers below admin/; the tests run
them against the target and compare. What differs from run to run (addresses, ids, times, rates) becomes a word in <>.
"""

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import fetch
from .java import Java, Jvm, message
from .process import eventually

RECORDED = Path(__file__).parent / "admin"
TOPIC, OTHER, GROUP, CLONE, BROKER = "AdminTopic", "OtherTopic", "admin_group", "cloned_group", "broker-a"


@dataclass(frozen=True)
class Step:
    """One command. `how` its output compares: "text" line by line, "lines" in any order, "keys" by the names of its
    values alone (the target may have fewer, but has those in `must`); it is repeated until *until* matches it.
    """

    name: str
    words: str
    how: str = "text"
    until: str = ""
    must: tuple[str, ...] = ()
    since: str = "4"
    integers: bool = True


STATUS = (
    "bootTimestamp brokerVersionDesc commitLogDiskRatio commitLogMaxOffset commitLogMinOffset earliestMessageTimeStamp "
    "getTotalTps getTransferredTps msgGetTotalTodayNow msgPutTotalTodayNow pageCacheLockTimeMills "
    "pullThreadPoolQueueHeadWaitTimeMills pullThreadPoolQueueSize putMessageAverageSize putTps runtime "
    "sendThreadPoolQueueHeadWaitTimeMills sendThreadPoolQueueSize"
)
# Both queues' offsets are with the broker: the client sends them every second, after its first ten.
COMMITTED = rf"{TOPIC} {BROKER} 0 3 3 .*\n{TOPIC} {BROKER} 1 3 3 "
ALL_CONSUMED = rf"{TOPIC} {BROKER} 0 (\d+) \1 .*\n{TOPIC} {BROKER} 1 (\d+) \2 "
CONFIG = "autoCreateTopicEnable brokerClusterName brokerId brokerName brokerPermission fileReservedTime flushDiskType"

EXPORTED = "brokerClusterName brokerId brokerName brokerRole fileReservedTime flushDiskType maxMessageSize namesrvSize"
METRICS = "groupSize normalInTps normalOneDayInNum rocketmqVersion topicSize totalTps"
LISTS = {
    "topics.json": [{"topicName": "ListedTopic", "readQueueNums": 3, "writeQueueNums": 3, "perm": 6}],
    "groups.json": [{"groupName": "listed_group", "retryQueueNums": 2, "retryMaxTimes": 5}],
}

# {...} are places that the scene knows. Order matters: the steps tell one story.
BEFORE = (
    Step("updateTopic", f"updateTopic -c DefaultCluster -t {TOPIC} -r 2 -w 2"),
    Step("updateTopic-broker", f"updateTopic -b {{address}} -t {OTHER} -r 4 -w 4"),
    Step("updateSubGroup", f"updateSubGroup -b {{address}} -g {GROUP} -r 2"),
    Step("updateSubGroup-clone", f"updateSubGroup -b {{address}} -g {CLONE} -r 2"),
)
ONLINE = (
    Step("consumerProgress", f"consumerProgress -g {GROUP}", "lines", until=COMMITTED),
    Step("consumerProgress-all", "consumerProgress", "lines", integers=False),
    Step("consumerConnection", f"consumerConnection -g {GROUP}", "lines"),
    Step("producerConnection", f"producerConnection -g interop_producer -t {TOPIC}", until="<client>"),
    Step("topicList", "topicList", "lines"),
    Step("topicList-clusters", "topicList -c", "lines"),
    Step("topicRoute", f"topicRoute -t {TOPIC}"),
    Step("topicStatus", f"topicStatus -t {TOPIC}"),
    Step("topicClusterList", f"topicClusterList -t {TOPIC}"),
    # The tool of 4.x trips over the spelling of a 5.x broker's counters.
    Step("clusterList", "clusterList", since="5", integers=False),
    Step("clusterList-more", "clusterList -m", integers=False),
    Step("brokerStatus", "brokerStatus -b {address}", "keys", must=tuple(STATUS.split())),
    Step("getBrokerConfig", "getBrokerConfig -b {address}", "keys", must=tuple(CONFIG.split())),
    Step("getConsumerConfig", f"getConsumerConfig -g {GROUP}", since="5"),
    Step("queryMsgById", f"queryMsgById -t {TOPIC} -i {{offset_id}}", since="5"),
    Step("queryMsgByKey", f"queryMsgByKey -t {TOPIC} -k key-1", until="<id>"),
    Step("queryMsgByUniqueKey", f"queryMsgByUniqueKey -t {TOPIC} -i {{unique_id}}"),
    Step("queryMsgByOffset", f"queryMsgByOffset -t {TOPIC} -b {BROKER} -i 0 -o 0"),
    Step("printMsg", f"printMsg -t {TOPIC} -d true", "lines"),
    Step("printMsgByQueue", f"printMsgByQueue -t {TOPIC} -a {BROKER} -i 0 -d true -p true"),
    Step("queryCq", f"queryCq -t {TOPIC} -q 0 -i 0 -b {{address}} -c 2"),
    Step("statsAll", f"statsAll -t {TOPIC}", integers=False),
    Step("resetOffsetByTime", f"resetOffsetByTime -g {GROUP} -t {TOPIC} -s 0", "lines"),
    Step("sendMessage", f"sendMessage -t {TOPIC} -p hello -k kk -c TagB -b {BROKER} -i 1"),
    Step("consumeMessage", f"consumeMessage -t {TOPIC} -b {BROKER} -i 0 -o 0 -c 2"),
    Step("updateBrokerConfig", "updateBrokerConfig -b {address} -k fileReservedTime -v 71"),
    Step("updateKvConfig", "updateKvConfig -s interop -k a -v b"),
    Step("deleteKvConfig", "deleteKvConfig -s interop -k a"),
)
# Everything that would change what the steps above say.
ONLINE_TOO = (
    Step("getNamesrvConfig", "getNamesrvConfig", "keys", must=("listenPort", "orderMessageEnable")),
    Step("consumerStatus", f"consumerStatus -g {GROUP}"),
    Step("producer", "producer -b {address}", "lines", until="interop_producer"),
    Step(
        "queryMsgById-consume",
        f"queryMsgById -t {TOPIC} -i {{offset_id}} -g {GROUP} -d {{client}}",
        integers=False,
        since="5",
    ),
    Step(
        "queryMsgByUniqueKey-consume",
        f"queryMsgByUniqueKey -t {TOPIC} -i {{unique_id}} -g {GROUP} -d {{client}}",
        integers=False,
    ),
    Step("queryMsgById-send", f"queryMsgById -t {OTHER} -i {{other_id}} -s true -u unit", integers=False, since="5"),
    Step("consumerProgress-again", f"consumerProgress -g {GROUP}", "lines", until=ALL_CONSUMED),
    Step("cloneGroupOffset", f"cloneGroupOffset -s {GROUP} -d {CLONE} -t {TOPIC}"),
    Step("cloneGroupOffset-unknown", f"cloneGroupOffset -s {GROUP} -d unknown -t {TOPIC}"),
    Step("cloneGroupOffset-nobody", f"cloneGroupOffset -s nobody -d {CLONE} -t {TOPIC}"),
    Step("checkMsgSendRT", f"checkMsgSendRT -t {OTHER} -a 3 -s 10", integers=False),
    Step("sendMsgStatus", f"sendMsgStatus -b {BROKER} -s 10 -c 2", integers=False),
    Step("deleteExpiredCommitLog", "deleteExpiredCommitLog -b {address}"),
    Step("deleteExpiredCommitLog-cluster", "deleteExpiredCommitLog -c DefaultCluster"),
    Step("updateTopicList", "updateTopicList -b {address} -f {folder}/topics.json", since="5"),
    Step("updateTopicList-route", "topicRoute -t ListedTopic -l", until="Total", since="5"),
    Step("updateSubGroupList", "updateSubGroupList -b {address} -f {folder}/groups.json", since="5"),
    Step("updateSubGroupList-config", "getConsumerConfig -g listed_group", since="5"),
    Step(
        "exportConfigs", "exportConfigs -c DefaultCluster -f {folder}", "keys", must=tuple(EXPORTED.split()), since="5"
    ),
    Step("exportMetadata", "exportMetadata -c DefaultCluster -f {folder}", "lines", since="5"),
    Step("exportMetadata-topics", "exportMetadata -c DefaultCluster -f {folder} -t", "lines"),
    Step("exportMetadata-groups", "exportMetadata -c DefaultCluster -f {folder} -g", "lines", since="5"),
    Step(
        "exportMetrics", "exportMetrics -c DefaultCluster -f {folder}", "keys", must=tuple(METRICS.split()), since="5"
    ),
    Step("setConsumeMode", f"setConsumeMode -b {{address}} -t {TOPIC} -g {GROUP} -m PULL", since="5"),
    Step("haStatus", "haStatus -b {address}", integers=False, since="5"),
    Step("haStatus-cluster", "haStatus -c DefaultCluster", integers=False, since="5"),
    Step(
        "updateColdDataFlowCtrGroupConfig",
        f"updateColdDataFlowCtrGroupConfig -b {{address}} -g {GROUP} -v 100",
        since="5",
    ),
    Step("getColdDataFlowCtrInfo", "getColdDataFlowCtrInfo -b {address}", "keys", must=(GROUP, "globalAcc"), since="5"),
    Step("removeColdDataFlowCtrGroupConfig", f"removeColdDataFlowCtrGroupConfig -b {{address}} -g {GROUP}", since="5"),
    Step(
        "getColdDataFlowCtrInfo-removed", "getColdDataFlowCtrInfo -b {address}", "keys", must=("globalAcc",), since="5"
    ),
    Step("resetOffsetByTime-queue", f"resetOffsetByTime -g {GROUP} -t {TOPIC} -s 0 -b {{address}} -q 0", since="5"),
    Step(
        "resetOffsetByTime-offset", f"resetOffsetByTime -g {GROUP} -t {TOPIC} -s 0 -b {{address}} -q 0 -o 1", since="5"
    ),
    Step("resetOffsetByTime-now", f"resetOffsetByTime -g {GROUP} -t {TOPIC} -s now", "lines", integers=False),
)
OFFLINE = (
    Step("consumerConnection-offline", f"consumerConnection -g {GROUP}", until="CODE: 206"),
    Step("skipAccumulatedMessage", f"skipAccumulatedMessage -g {GROUP} -t {TOPIC}", "lines"),
    Step("consumerProgress-offline", f"consumerProgress -g {GROUP}", "lines"),
    Step("resetOffsetByTime-offline", f"resetOffsetByTime -g {GROUP} -t {TOPIC} -s 0", "lines"),
    Step("consumerProgress-reset", f"consumerProgress -g {GROUP}", "lines"),
    Step("brokerConsumeStats", "brokerConsumeStats -b {address}", "lines"),
    Step("updateTopicPerm", f"updateTopicPerm -t {TOPIC} -b {{address}} -p 4"),
    Step("wipeWritePerm", f"wipeWritePerm -b {BROKER}"),
    Step("topicRoute-wiped", f"topicRoute -t {OTHER}"),
    Step("addWritePerm", f"addWritePerm -b {BROKER}"),
    Step("topicRoute-restored", f"topicRoute -t {OTHER}"),
    Step("updateOrderConf", f"updateOrderConf -m put -t {TOPIC} -v {BROKER}:2"),
    Step("updateOrderConf-get", f"updateOrderConf -m get -t {TOPIC}"),
    Step("allocateMQ", f"allocateMQ -t {OTHER} -i a,b"),
    Step("cleanExpiredCQ", "cleanExpiredCQ -b {address}"),
    Step("cleanUnusedTopic", "cleanUnusedTopic -b {address}"),
    Step("deleteSubGroup", f"deleteSubGroup -b {{address}} -g {GROUP}"),
    Step("deleteTopic", f"deleteTopic -c DefaultCluster -t {TOPIC}"),
    Step("topicRoute-deleted", f"topicRoute -t {TOPIC}"),
    Step("topicStatus-deleted", f"topicStatus -t {TOPIC}"),
    Step("consumerProgress-unknown", "consumerProgress -g nobody"),
)
STEPS = (*BEFORE, *ONLINE, *ONLINE_TOO, *OFFLINE)


def steps(version: str) -> list[Step]:
    """Return the steps that the tool of *version* knows."""
    return [step for step in STEPS if step.since <= version]


def play(java: Java, address: str, folder: Path) -> Iterator[tuple[Step, str]]:
    """Run every step in order against a young broker named broker-a; yields each with its comparable output.

    *folder* takes the files of commands that read or write some.
    """
    known = {"address": address, "folder": str(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in LISTS.items():
        (folder / file).write_text(json.dumps(content))

    def act(several: tuple[Step, ...]) -> Iterator[tuple[Step, str]]:
        for step in several:
            if step.since <= java.jvm.version:
                yield step, _run(java, step, known)

    yield from act(BEFORE)
    producer = java.producer()
    sent = []
    for i in range(6):
        said = message(TOPIC, f"body {i}", tags="TagA", keys=f"key-{i}")
        sent += producer.send(said, select=i % 2)
    other = producer.send(message(OTHER, "resent"))[0].offset_msg_id
    known |= {"offset_id": sent[0].offset_msg_id, "other_id": other, "unique_id": sent[1].msg_id}
    consumer = java.push(GROUP, TOPIC)
    consumer.wait(6)
    yield from act(ONLINE)
    [known["client"]] = CLIENT.findall(java.mqadmin("consumerConnection", "-g", GROUP))
    yield from act(ONLINE_TOO)
    consumer.stop()
    yield from act(OFFLINE)


def _run(java: Java, step: Step, known: dict[str, str]) -> str:
    def once() -> str | None:
        said = java.mqadmin(*step.words.format(**known).split())
        for path in re.findall(r"Message Body Path:\s+(\S+)", said):
            Path(path).unlink(missing_ok=True)  # the tool writes every body it shows into a shared folder
        for path in re.findall(r"^export (\S+) success", said, re.MULTILINE):
            said = said.replace(path, Path(path).name) + Path(path).read_text()
        shown = comparable(step, said)
        return shown if re.search(step.until, shown) else None

    return eventually(once)


CLIENT = re.compile(r"[\d.]+@c\d+-\d+")
PLACES = (
    (re.compile(r"\b[0-9A-F]{32}(?:[0-9A-F]{24})?(?![0-9A-F])"), "<id>"),
    (CLIENT, "<client>"),
    (re.compile(r"/?\d+\.\d+\.\d+\.\d+:\d+"), "<address>"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)?"), "<time>"),
    (re.compile(r"\b1[5-9]\d{11}\b"), "<ms>"),
    (re.compile(r"\bV\d+_\d+_\d+\w*"), "<version>"),
    (re.compile(r"\d+\.\d+"), "<n>"),
    (re.compile(r"(OK,) \d+"), r"\1 <n>"),
    (re.compile(r"^rt=\d+ms"), "rt=<n>ms"),
    # What is in flight depends on when a consumer last pulled.
    (re.compile(r"(Inflight Total:) \d+"), r"\1 <n>"),
    (re.compile(r"^(\S+ +broker-a +\d+ +\d+ +\d+ +\d+) +\d+ +(N/A|<time>)"), r"\1 <n> \2"),
    # Remarks are for people; the code is the contract.
    (re.compile(r"(CODE: \d+)\s+DESC: .*"), r"\1"),
)
# A message's properties come in the order in which a broker stored them, which says nothing.
PROPERTIES = re.compile(r"\{([^{}]*=[^{}]*)\}")


def _sorted(found: re.Match[str]) -> str:
    return "{" + ", ".join(sorted(found[1].split(", "))) + "}"


# `name : value`, `name = value` or `"name": value`, perhaps after an address.
KEY = re.compile(r'"?(\w+)"?\s*[:=] ?')
NOISE = re.compile(r"\tat |\t\.\.\. |For more information|See https?:|Message Body Path:")
# Topics that a broker keeps for itself; which ones depends on its inner life.
OWN_TOPICS = re.compile(
    r"(^|\s)(rmq_sys_|RMQ_SYS_|BenchmarkTest|OFFSET_MOVED|SELF_TEST|SCHEDULE_TOPIC|\w+_REPLY_TOPIC)"
)


def comparable(step: Step, said: str) -> str:
    """Return the output with everything that differs from run to run replaced, and without empty lines."""
    lines = []
    for line in said.splitlines():
        if NOISE.match(line) or not line.strip() or (step.name.startswith("topicList") and OWN_TOPICS.search(line)):
            continue
        if step.name.startswith("consumerProgress") and line.startswith("%RETRY%"):
            continue  # it is there once the client has sent an offset for it, which may take it 20 s
        if step.name == "producer" and not CLIENT.search(line):
            continue  # the tool itself, until the broker notices that the last command ended
        for pattern, word in PLACES:
            line = pattern.sub(word, line)
        line = PROPERTIES.sub(_sorted, line)
        if not step.integers:
            line = re.sub(r"\b\d+\b", "<n>", line)
        lines.append(" ".join(line.split()))
    if step.how == "keys":
        lines = sorted({found[1] for found in map(KEY.match, lines) if found})
    elif step.how == "lines":
        lines.sort()
    return "".join(f"{line}\n" for line in lines)


def recorded(version: str, step: Step) -> str:
    """Return what the real broker answered, without the command in the first line."""
    return (RECORDED / version / f"{step.name}.txt").read_text().partition("\n")[2]


def record() -> None:
    """Rewrite the expected answers from a real broker."""
    from .conftest import RocketMQ

    for version in fetch.CLIENT_VERSIONS:
        folder = RECORDED / version
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as work:
            real = RocketMQ(Path(work))
            jvm = Jvm(version, Path(work) / "java")
            clients = Java(jvm, real.name_server)
            for step, output in play(clients, real.address, Path(work) / "files"):
                (folder / f"{step.name}.txt").write_text(f"$ mqadmin {step.words}\n{output}")
            jvm.kill()
            real.close()


if __name__ == "__main__":
    record()
