"""What RocketMQ's exporter and dashboard ask a cluster, through the admin client that both use."""

from collections.abc import Callable
from typing import Final

import pytest

from .conftest import RocketMQ
from .java import Failed, Java, found, message
from .martlet_process import Martlet
from .process import eventually

Name = Callable[[str], str]
COUNT: Final = 12
TOPIC_NOT_EXIST: Final = 17

# The exporter parses each of these, and reports nothing of a broker that lacks one (BrokerRuntimeStats).
INTEGERS: Final = (
    "bootTimestamp",
    "brokerVersion",
    "commitLogMaxOffset",
    "commitLogMinOffset",
    "dispatchBehindBytes",
    "dispatchMaxBuffer",
    "earliestMessageTimeStamp",
    "getMessageEntireTimeMax",
    "msgGetTotalTodayMorning",
    "msgGetTotalTodayNow",
    "msgGetTotalYesterdayMorning",
    "msgPutTotalTodayMorning",
    "msgPutTotalTodayNow",
    "msgPutTotalYesterdayMorning",
    "pageCacheLockTimeMills",
    "pullThreadPoolQueueCapacity",
    "pullThreadPoolQueueHeadWaitTimeMills",
    "pullThreadPoolQueueSize",
    "putMessageEntireTimeMax",
    "putMessageSizeTotal",
    "putMessageTimesTotal",
    "queryThreadPoolQueueCapacity",
    "queryThreadPoolQueueHeadWaitTimeMills",
    "queryThreadPoolQueueSize",
    "remainTransientStoreBufferNumbs",
    "sendThreadPoolQueueCapacity",
    "sendThreadPoolQueueHeadWaitTimeMills",
    "sendThreadPoolQueueSize",
    "startAcceptSendRequestTimeStamp",
)
FLOATS: Final = ("commitLogDiskRatio", "consumeQueueDiskRatio", "putMessageAverageSize")
RATES: Final = ("getFoundTps", "getMissTps", "getTotalTps", "getTransferedTps", "putTps")


@pytest.fixture
def topic(java: Java, target: RocketMQ | Martlet, name: Name) -> str:
    """A topic with messages that the group of the same name has consumed."""
    made = name("watched")
    java.queries().create_topic(made, target.address, 2)
    bodies = [f"{number}".encode() for number in range(COUNT)]
    java.producer().send(*(message(made, body) for body in bodies))
    java.push(made, made).wait_bodies(bodies)
    return made


def test_the_exporter_gets_every_figure_that_it_reports(java: Java, target: RocketMQ | Martlet, topic: str) -> None:
    admin = java.monitor()
    [(cluster, brokers)] = admin.call("examineBrokerClusterInfo")["clusterAddrTable"].items()
    assert len(brokers) == 1
    assert target.address in str(admin.call("examineBrokerClusterInfo"))
    runtime = admin.call("fetchBrokerRuntimeStats", target.address)["table"]
    assert {key: int(runtime[key]) for key in INTEGERS}["brokerVersion"] > 300
    assert {key: float(runtime[key]) for key in FLOATS}
    assert [len([float(rate) for rate in runtime[key].split()]) for key in RATES] == [3] * len(RATES)
    words = runtime["commitLogDirCapacity"].split(" ")
    assert (float(words[2]) > 0, words[3][-1], float(words[6]) > 0, words[7][-1]) == (True, ",", True, ".")
    assert float(runtime["remainHowManyDataToFlush"].split(" ")[0]) >= 0
    times = [each.split(":") for each in runtime["putMessageDistributeTime"].split()]
    assert all(int(count) >= 0 for _, count in times)

    def minute(statistic: str, key: str) -> dict[str, float] | None:
        shown = found(lambda: admin.call("viewBrokerStatsData", target.address, statistic, key))
        window: dict[str, float] | None = shown["statsMinute"] if shown else None
        return window if window and window["sum"] > 0 else None

    of_group = f"{topic}@{topic}"
    assert eventually(lambda: minute("TOPIC_PUT_NUMS", topic))["sum"] == COUNT
    size = eventually(lambda: minute("TOPIC_PUT_SIZE", topic))
    assert 100 * COUNT < size["sum"] < 1000 * COUNT
    assert 100 < size["avgpt"] < 1000
    assert eventually(lambda: minute("GROUP_GET_NUMS", of_group))["sum"] == COUNT
    assert eventually(lambda: minute("GROUP_GET_SIZE", of_group))["avgpt"] > 100
    for statistic in ("BROKER_PUT_NUMS", "BROKER_GET_NUMS"):
        assert eventually(lambda statistic=statistic: minute(statistic, cluster))["tps"] > 0  # type: ignore[misc]


def test_the_exporter_may_ask_about_every_topic_there_is(java: Java, target: RocketMQ | Martlet, topic: str) -> None:
    admin = java.monitor()
    topics = admin.call("fetchAllTopicList")["topicList"]
    assert {topic, "RMQ_SYS_TRANS_HALF_TOPIC"} <= set(topics)
    for each in topics:
        offsets = found(lambda each=each: admin.call("examineTopicStats", each)["offsetTable"])  # type: ignore[misc]
        groups = found(lambda each=each: admin.call("queryTopicConsumeByWho", each)["groupList"])  # type: ignore[misc]
        if each == topic:
            assert sum(int(queue["maxOffset"]) for queue in (offsets or {}).values()) == COUNT
            assert topic in (groups or ())
    consumed = admin.call("examineConsumeStats", topic, topic)["offsetTable"]
    assert sum(int(queue["brokerOffset"]) for queue in consumed.values()) == COUNT
    connected = admin.call("examineConsumerConnectionInfo", topic)
    assert len(connected["connectionSet"]) == 1


def test_a_group_that_was_deleted_stays_away_from_an_open_dashboard(
    java: Java, target: RocketMQ | Martlet, topic: str, name: Name
) -> None:
    """It looks up the retry topic of each group that it lists, over a connection that got other routes before."""
    admin, group = java.monitor(), name("deleted")
    java.mqadmin("updateSubGroup", "-b", target.address, "-g", group)
    assert group in admin.call("getAllSubscriptionGroup", target.address, 60_000)["subscriptionGroupTable"]
    assert topic in admin.call("fetchAllTopicList")["topicList"]
    admin.call("examineTopicRouteInfo", topic)
    admin.call("deleteSubscriptionGroup", target.address, group, True)
    for each in (group, name("mistyped")):
        with pytest.raises(Failed) as caught:
            admin.call("examineTopicRouteInfo", f"%RETRY%{each}")
        assert caught.value.code == TOPIC_NOT_EXIST
        assert each not in admin.call("getAllSubscriptionGroup", target.address, 60_000)["subscriptionGroupTable"]


def test_tools_read_half_messages(java: Java, target: RocketMQ | Martlet, name: Name) -> None:
    topic = name("half")
    java.queries().create_topic(topic, target.address)
    body = f"undecided {topic}"
    java.transactions(topic).send(message(topic, body, properties={"local": "unknown", "check": "unknown"}))
    printed = java.mqadmin("printMsg", "-t", "RMQ_SYS_TRANS_HALF_TOPIC", "-d", "true")
    assert body in printed
    assert f'"topic":"{topic}"' not in java.mqadmin("printMsg", "-t", topic, "-d", "true")


def test_a_topic_has_any_type_that_the_dashboard_offers(newest: Java, target: RocketMQ | Martlet, name: Name) -> None:
    for kind in ("NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "LITE"):
        topic = name(kind.lower())
        said = newest.mqadmin("updateTopic", "-b", target.address, "-t", topic, "-a", f"+message.type={kind}")
        assert "success" in said
        config = newest.monitor().call("examineTopicConfig", target.address, topic)
        assert config["attributes"] == {"message.type": kind}
