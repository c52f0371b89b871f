"""Identity of the message at an offset: a topic that was deleted and created again has other messages there."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial

from martlet_columns.errors import RecordError
from martlet_columns.records import Records
from martlet_remoting.wire.codes import ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.routes import TopicRoute
from martlet_spark.cluster import Cluster
from martlet_spark.connection import BrokerConnection
from martlet_spark.errors import ReadError
from martlet_spark.read.exchange import OUTSTANDING_MAX, pull_only, request_one
from martlet_spark.read.offsets import Offsets

__all__ = ["identities", "identity_of"]

log = logging.getLogger("martlet.spark")


def identities(cluster: Cluster, routes: Mapping[str, TopicRoute], offsets: Offsets) -> dict[MessageQueue, str]:
    """Return the identity of the message at each of *offsets*, except messages that are gone or cannot be read now."""
    by_broker: dict[str, list[MessageQueue]] = {}
    for queue in sorted(offsets):
        if queue.topic in routes:
            by_broker.setdefault(queue.broker_name, []).append(queue)
    found: dict[MessageQueue, str] = {}
    for broker, queues in by_broker.items():
        topic = queues[0].topic
        try:
            found |= cluster.ask_broker(topic, routes[topic], broker, partial(_ask, queues, offsets))
        except ReadError as error:  # the read of the messages raises it too
            log.info("the last messages of topics on broker %r are unknown: %s", broker, error)
    return found


def _ask(queues: Sequence[MessageQueue], offsets: Offsets, connection: BrokerConnection) -> dict[MessageQueue, str]:
    identity_by_queue: dict[MessageQueue, str] = {}
    queues_left = list(queues)
    is_pull_only = is_refused = False
    while queues_left and not (is_pull_only and is_refused):
        is_pull_only, is_refused = connection.address in pull_only, False
        queue_by_request = {
            request_one(connection, queue, offsets[queue], 0, 1): queue for queue in queues_left[:OUTSTANDING_MAX]
        }
        while queue_by_request:
            answer = connection.receive()
            queue = queue_by_request.get(answer.opaque)
            if queue is None:
                continue
            if answer.body and (identity := _identity(answer.body, offsets[queue])):
                identity_by_queue[queue] = identity
            if answer.ext.get("more") == "true":
                continue
            del queue_by_request[answer.opaque]
            connection.outstanding -= 1
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                is_refused = True
                pull_only.add(connection.address)
            else:
                queues_left.remove(queue)
    return identity_by_queue


def _identity(body: bytearray | memoryview, offset: int) -> str:
    """Return the identity of the message at *offset* if the first record of *body* is or contains it, else ""."""
    try:
        head = Records(body).heads[0]
    except RecordError:
        return ""
    if not head["offset"] <= offset:
        return ""
    return identity_of(int(head["born_ms"]), int(head["crc"]))


def identity_of(born_ms: int, crc: int) -> str:
    """Return the identity of a message by its time of creation and the CRC of its body.

    Neither field changes. Others may: the broker may get another address, and compaction changes the position.
    """
    return f"{born_ms:x}-{crc:x}"
