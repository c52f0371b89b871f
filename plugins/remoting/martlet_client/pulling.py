"""Pulls of a queue, and which messages a subscription selects."""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum, unique
from typing import Final, TypeAlias, final

import trio
from msgspec import Struct

from martlet.errors import CorruptRecord, Refused
from martlet.message import Record
from martlet.records.codec import decode_records, tags_code
from martlet_client.arguments import check_type, check_utf8
from martlet_client.network import Network
from martlet_client.outages import level_of
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BadAnswer, BrokerError, ClientError, RouteNotFound
from martlet_remoting.wire.answers.messages import DamagedMessage, ReceivedMessage, received
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import PULL_COMMIT_OFFSET, PULL_SUSPEND, PullHeader
from martlet_remoting.wire.inner_batches import is_inner_batch, unroll
from martlet_remoting.wire.packets import Command, MessageQueue

__all__ = ["PAUSE_S", "PullStatus", "Pulled", "QueuePulls", "Sql", "TopicSelection", "pull", "subscription_of"]

log = logging.getLogger(__name__)

# A tag may contain these characters, but hardly between spaces.
COMPARISON: Final = re.compile(r"\s(?:=|<>|[<>]=?)\s")
TAG: Final = "TAG"
SQL92: Final = "SQL92"
# RocketMQ's client asks for no more at once (pullBatchSize), and brokers return fewer.
PULL_MESSAGES_MAX: Final = 1024
# From Java's push consumer: how long a pull may wait, and the pause after a failure.
SUSPEND_MS: Final = 15_000
PAUSE_S: Final = 3.0
# RocketMQ checks only every 5 s whether a waiting pull has timed out (PullRequestHoldService).
ANSWER_MARGIN_S: Final = 10.0
_UNKNOWN_TO_BROKER: Final = (
    ResponseCode.SUBSCRIPTION_NOT_EXIST,
    ResponseCode.SUBSCRIPTION_NOT_LATEST,
    ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
)


@final
@unique
class PullStatus(Enum):
    """The result of a pull.

    ``FOUND``: messages. ``NO_NEW_MESSAGE``: the offset is the end of the queue. ``NO_MATCHED_MESSAGE``: none of
    the checked messages is selected; continue at ``next_offset``. ``OFFSET_MOVED``: the queue does not have this
    offset (any more); ``next_offset`` is the nearest one.
    """

    FOUND = ResponseCode.SUCCESS
    NO_NEW_MESSAGE = ResponseCode.PULL_NOT_FOUND
    NO_MATCHED_MESSAGE = ResponseCode.PULL_RETRY_IMMEDIATELY
    OFFSET_MOVED = ResponseCode.PULL_OFFSET_MOVED


_STATUSES: Final[Mapping[int, PullStatus]] = {status.value: status for status in PullStatus}


@final
class Sql(Struct, frozen=True):
    """Selects messages by an SQL92 expression over their properties, for example ``Sql("price > 5")``.

    The broker evaluates it; a broker without SQL92 refuses the subscription.
    """

    expression: str


# Selects messages: ``*`` for all, ``tag`` or ``tag || tag``, or an `Sql` expression.
Expression: TypeAlias = str | Sql


@final
class TopicSelection(Struct, frozen=True):
    """Which messages of a topic a group wants; ``tags`` is empty if it wants all, or selects by SQL92."""

    topic: str
    expression: str
    expression_type: str
    version: int
    tags: frozenset[str]

    def selects(self, message: ReceivedMessage) -> bool:
        """Whether the message is selected; brokers compare only the hash of its tag."""
        return not self.tags or message.tags in self.tags

    def fields(self) -> dict[str, object]:
        """Return its fields in a heartbeat."""
        return {
            "classFilterMode": False,
            "codeSet": sorted(tags_code(tag) for tag in self.tags),
            "expressionType": self.expression_type,
            "subString": self.expression,
            "subVersion": self.version,
            "tagsSet": sorted(self.tags),
            "topic": self.topic,
        }


def subscription_of(topic: str, expression: Expression, version: int) -> TopicSelection:
    """Return the subscription to *topic* by ``*``, by ``tag || tag``, or by `Sql`.

    Raises:
      TypeError: *expression* is neither a str nor `Sql`.
      ValueError: it selects nothing, mixes ``*`` with tags, or is SQL92 in a plain str.
    """
    if isinstance(expression, Sql):
        check_type("SQL92 expression", expression.expression, str)
        check_utf8("SQL92 expression", expression.expression)
        if not expression.expression.strip():
            raise ValueError("SQL92 expression is empty; give '*' instead of Sql to select every message")
        return TopicSelection(topic, expression.expression, SQL92, version, frozenset())
    check_type(f"expression for topic {topic!r},", expression, str, "for example '*' or 'tagA || tagB', or Sql")
    check_utf8(f"expression for topic {topic!r},", expression)
    tags = frozenset(tag for part in expression.split("||") if (tag := part.strip()))
    if not tags:
        raise ValueError(f"expression {expression!r} for topic {topic!r} names no tag; '*' selects every message")
    if tags == {"*"}:
        return TopicSelection(topic, "*", TAG, version, frozenset())
    if "*" in tags:
        raise ValueError(f"expression {expression!r} for topic {topic!r} mixes '*' with tags; give one or the other")
    if COMPARISON.search(expression):
        raise ValueError(f"expression {expression!r} for topic {topic!r} looks like SQL92; pass Sql({expression!r})")
    return TopicSelection(topic, expression, TAG, version, tags)


@final
class Pulled(Struct, frozen=True):
    """The answer to one pull.

    The next pull continues at ``next_offset``. The queue has the offsets from ``min_offset`` to below
    ``max_offset``. ``damaged`` are the records that cannot be delivered.
    """

    status: PullStatus
    messages: list[ReceivedMessage]
    damaged: list[DamagedMessage]
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int


async def pull(network: Network, queue: MessageQueue, header: PullHeader, code: int, broker_id: int = 0) -> Pulled:
    """Return the answer of the queue's broker; it may contain messages whose tag only has the same hash.

    Raises:
      BrokerError: it refused.
      RouteNotFound: the queue's broker is not known.
      ConnectionLost, RequestTimeout: it did not answer.
    """
    route = await network.route(queue.topic)
    address = route.address(queue.broker_name, broker_id)
    if address is None:
        raise RouteNotFound(queue.topic, f"has no broker {queue.broker_name!r} at the moment")
    header.broker_name = queue.broker_name
    timeout_s = network.settings.request_timeout_s + header.suspend_ms / 1000 + ANSWER_MARGIN_S
    answer = await network.ask_any(address, code, header.to_ext(), b"", timeout_s)
    status = _STATUSES.get(answer.code)
    if status is None:
        raise BrokerError(answer.code, answer.remark or "", address)
    return _decode_pull(answer, status, queue.broker_name, header.offset)


@final
class QueuePulls:
    """Pulls of *queue* by a member of *group*; those of a group that shares its messages also commit its offset."""

    def __init__(
        self,
        network: Network,
        group: str,
        queue: MessageQueue,
        subscription: TopicSelection,
        messages_max: int,
        is_clustering: bool,
    ) -> None:
        self.network = network
        self.group = group
        self.queue = queue
        self.subscription = subscription
        self.last_ms = 0
        self._messages_max = messages_max
        self._is_clustering = is_clustering
        self._broker_id = 0

    async def pull(self, offset: int, commit_offset: int) -> Pulled:
        """Return what the broker has from *offset* on; it waits for messages, and commits *commit_offset* if above 0.

        Raises:
          BrokerError, RouteNotFound, ConnectionLost, RequestTimeout: as `pull`; call `recover` before the next one.
        """
        sys_flag, commit = PULL_SUSPEND, 0
        if self._is_clustering and commit_offset > 0:
            sys_flag, commit = sys_flag | PULL_COMMIT_OFFSET, commit_offset
        header = PullHeader(
            self.group,
            self.queue.topic,
            self.queue.queue_id,
            offset,
            self._messages_max,
            sys_flag,
            commit,
            SUSPEND_MS,
            sub_version=self.subscription.version,
            expression_type=self.subscription.expression_type,
        )
        self.last_ms = self.network.clock.now_ms()
        pulled = await pull(self.network, self.queue, header, RequestCode.PULL_MESSAGE, self._broker_id)
        if pulled.status is not PullStatus.OFFSET_MOVED:
            self._broker_id = pulled.suggested_broker_id
        return pulled

    async def recover(self, error: ClientError) -> None:
        """Pause after *error*, and tell brokers of this member again if they do not know it."""
        log.log(level_of(error), "pull of %s for group %r failed: %s", self.queue, self.group, error)
        self._broker_id = 0
        if isinstance(error, BrokerError) and error.code in _UNKNOWN_TO_BROKER:
            await self.network.send_heartbeats()
        await trio.sleep(PAUSE_S)


def _decode_pull(answer: Command, status: PullStatus, broker_name: str, first_offset: int) -> Pulled:
    messages = _decode_messages_of_pull(answer.body, broker_name, first_offset) if status is PullStatus.FOUND else []
    return Pulled(
        status,
        [message for message in messages if isinstance(message, ReceivedMessage)],
        [message for message in messages if isinstance(message, DamagedMessage)],
        bodies.header_integer(answer, "nextBeginOffset"),
        bodies.header_integer(answer, "minOffset"),
        bodies.header_integer(answer, "maxOffset"),
        bodies.header_integer(answer, "suggestWhichBrokerId", 0),
    )


def decode_messages(body: bytes, broker_name: str) -> list[ReceivedMessage | DamagedMessage]:
    """Return the messages in *body*, which has records as a broker stores them.

    Raises:
      BadAnswer: the bytes are not records.
    """
    return [received(record, broker_name) for record in _records(body, broker_name)]


def _decode_messages_of_pull(
    body: bytes, broker_name: str, first_offset: int
) -> list[ReceivedMessage | DamagedMessage]:
    """Like `decode_messages`, but return the messages of inner batches, from *first_offset* on, in place of these."""
    messages: list[ReceivedMessage | DamagedMessage] = []
    for record in _records(body, broker_name):
        if is_inner_batch(record.sys_flag):
            messages += _members(record, broker_name, first_offset)
        else:
            messages.append(received(record, broker_name))
    return messages


def _members(batch: Record, broker_name: str, first_offset: int) -> list[ReceivedMessage | DamagedMessage]:
    batch_message = received(batch, broker_name)
    if isinstance(batch_message, ReceivedMessage):
        try:
            return [received(each, broker_name) for each in unroll(batch, first_offset)]
        except Refused as error:
            batch_message = DamagedMessage(
                batch_message.queue, batch.queue_offset, batch.position, batch.topic, str(error)
            )
    return [replace(batch_message, queue_offset=max(batch.queue_offset, first_offset))]


def _records(body: bytes, broker_name: str) -> list[Record]:
    try:
        return decode_records(body, check_body=False)
    except CorruptRecord as error:
        raise BadAnswer(f"answer of broker {broker_name!r}: {error}") from error
