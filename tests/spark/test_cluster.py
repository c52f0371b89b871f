"""What the connector refuses of what name servers say."""

import pytest

from martlet_spark.cluster import BrokerGone, Cluster
from martlet_spark.connection import Security
from martlet_spark.errors import ReadError

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
