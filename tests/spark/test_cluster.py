"""What the connector refuses of what name servers say."""

from collections.abc import Iterator

import pytest

from martlet_spark.cluster import BrokerGone, Cluster, UnknownTopic
from martlet_spark.connection import Security
from martlet_spark.errors import ReadError
from martlet_spark.options import BATCH, parse
from martlet_spark.read.topics import Subscribed

from .fake_brokers import FakeBroker, fake_cluster, route

MAPPING = {"a": {"bname": "a", "currIdMap": {"0": 0}, "epoch": 1, "topic": "Orders", "totalQueues": 2}}


def behind(broker: FakeBroker, timeout_s: float = 30, **fields: object) -> Cluster:
    """A cluster whose name server, *broker* itself, gives the topic Orders a route with these *fields*."""
    broker.topics["Orders"] = {**route([broker], 2), **fields}
    return Cluster([broker.address], Security(), timeout_s)


def test_static_topics_are_refused() -> None:
    with fake_cluster("a") as (_, (broker,)):
        mappings: tuple[object, ...] = (None, {})
        for mapping in mappings:
            found = behind(broker, topicQueueMappingByBroker=mapping).route("Orders")
            assert len(found.read_queues("Orders")) == 2
        with pytest.raises(ReadError, match=r"topic 'Orders' is a static topic of RocketMQ: .* use a topic"):
            behind(broker, topicQueueMappingByBroker=MAPPING).route("Orders")


def test_a_slave_is_not_taken_for_its_master() -> None:
    """It may lack the last messages, which would seem lost."""
    with fake_cluster("a") as (_, (broker,)):
        slave = {"cluster": "c", "brokerName": "a", "brokerAddrs": {"1": broker.address}}
        cluster = behind(broker, 0, brokerDatas=[slave])
        with pytest.raises(BrokerGone, match="broker 'a' has no master at the moment, only slaves"):
            cluster.bounds(cluster.routes(["Orders"]))
        assert not broker.asked


def test_a_query_that_starts_while_all_brokers_restart_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that restarts takes its topics along; a query that knows none of them yet looks for them again."""
    with fake_cluster("a") as (_, (broker,)):

        def registered_after_two(timeout_s: float) -> Iterator[int]:
            assert timeout_s == 60
            yield from (0, 1)
            broker.topics["Parcels"] = route([broker], 2)
            yield 2

        monkeypatch.setattr("martlet_spark.read.topics.attempts", registered_after_two)
        options = parse({"endpoints": broker.address, "subscribe": "Parcels"}, BATCH)
        subscribed = Subscribed(Cluster([broker.address], Security(), 60), options)
        assert list(subscribed.routes()) == ["Parcels"]


def test_a_topic_that_does_not_exist_fails_a_query_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cluster("a") as (_, (broker,)):
        broker.topics["TBW102"] = route([broker], 8)
        monkeypatch.setattr("martlet_spark.read.topics.attempts", lambda _: iter([0]))
        options = parse({"endpoints": broker.address, "subscribe": "Parcels"}, BATCH)
        with pytest.raises(UnknownTopic, match="topic 'Parcels' is unknown"):
            Subscribed(Cluster([broker.address], Security(), 60), options).routes()
