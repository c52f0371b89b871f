"""The queues to which topics can be written."""

from collections.abc import Sequence
from typing import Final, final

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import Cluster, UnknownTopic
from martlet_spark.connection import ConnectionBroken, attempts
from martlet_spark.errors import WriteError

__all__ = ["TEMPLATE_QUEUES", "TEMPLATE_TOPIC", "WritableQueues", "master", "write_queues"]

# The topic whose brokers create other topics with their first message; they get its number of queues.
TEMPLATE_TOPIC: Final = "TBW102"
TEMPLATE_QUEUES: Final = 4


def write_queues(cluster: Cluster, topic: str) -> Sequence[MessageQueue]:
    """Return the queues to write *topic* to; for an unknown topic, the queues that its first message will create.

    Waits while the name servers know no topic at all: name servers or brokers have just started, as a broker may do
    between two batches of a stream.

    Raises:
      UnknownTopic: the topic does not exist, and no broker creates it.
      WriteError: no queue can be written to.
    """
    for _ in attempts(cluster.timeout_s):
        try:
            return _write_queues(cluster, topic)
        except UnknownTopic as error:
            unknown = error
            if not cluster.knows_no_topic():
                break
    raise unknown


def _write_queues(cluster: Cluster, topic: str) -> Sequence[MessageQueue]:
    try:
        queues = cluster.route(topic).write_queues(topic)
    except UnknownTopic as error:
        try:
            queues = cluster.route(TEMPLATE_TOPIC).write_queues(topic, TEMPLATE_QUEUES)
        except UnknownTopic:
            text = f"topic {topic!r} does not exist, and no broker creates topics; create it"
            raise UnknownTopic(f"{text}, or turn on broker.auto_create_topics") from error
    if not queues:
        raise WriteError(f"topic {topic!r} has no queue to write to; its broker is down or the topic is read-only")
    return queues


def master(cluster: Cluster, queue: MessageQueue) -> str:
    """Return the address of the broker of *queue*, whose topic was known before, or may have left the broker.

    Raises:
      ConnectionBroken: the broker is not registered at the moment.
    """
    for topic in (queue.topic, TEMPLATE_TOPIC):
        try:
            found = cluster.route(topic).master(queue.broker_name)
        except UnknownTopic:  # a name server that has just started does not know all topics yet
            continue
        if found is not None:
            return found
    found = cluster.masters().get(queue.broker_name)
    if found is not None:
        return found
    raise ConnectionBroken(f"broker {queue.broker_name!r} is not registered with the name servers")


@final
class WritableQueues:
    """The queues to which each topic can be written, as of the first look."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._found: dict[str, Sequence[MessageQueue]] = {}

    def __call__(self, topic: str) -> Sequence[MessageQueue]:
        if topic not in self._found:
            self._found[topic] = write_queues(self._cluster, topic)
        return self._found[topic]
