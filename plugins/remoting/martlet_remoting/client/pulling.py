"""One pull of a queue, and what a subscription selects of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Final, TypeAlias, final

from martlet.errors import CorruptRecord
from martlet.store.codec import decode_records, tags_code
from martlet_remoting.codes import ResponseCode
from martlet_remoting.headers import PullHeader
from martlet_remoting.packets import Command, MessageQueue

from . import bodies
from .errors import BadAnswer, BrokerError, RouteNotFound
from .messages import DamagedMessage, ReceivedMessage, received
from .network import Network

__all__ = ["PullStatus", "Pulled", "Sql", "Subscription", "pull", "subscription_of"]

TAG: Final = "TAG"
SQL92: Final = "SQL92"
# A broker may look every 5 s whether a held pull's time is up (PullRequestHoldService).
ANSWER_MARGIN_S: Final = 10.0


@final
@unique
class PullStatus(Enum):
    """What a pull found; the codes are those of the answer."""

    FOUND = ResponseCode.SUCCESS
    NO_NEW_MESSAGE = ResponseCode.PULL_NOT_FOUND
    NO_MATCHED_MESSAGE = ResponseCode.PULL_RETRY_IMMEDIATELY
    OFFSET_MOVED = ResponseCode.PULL_OFFSET_MOVED


_STATUSES: Final[Mapping[int, PullStatus]] = {status.value: status for status in PullStatus}


@final
@dataclass(frozen=True, slots=True)
class Sql:
    """An SQL92 expression over message properties, evaluated by the broker alone."""

    expression: str


Expression: TypeAlias = str | Sql


@final
@dataclass(frozen=True, slots=True)
class Subscription:
    """What a group wants of a topic; ``tags`` is empty when it wants all, or selects by SQL92."""

    topic: str
    expression: str
    expression_type: str
    version: int
    tags: frozenset[str]

    def selects(self, message: ReceivedMessage) -> bool:
        """Whether the message is wanted: brokers compare only the hash of its tag."""
        return not self.tags or message.tags in self.tags

    def fields(self) -> dict[str, object]:
        """Return it as a heartbeat has it."""
        return {
            "classFilterMode": False,
            "codeSet": sorted(tags_code(tag) for tag in self.tags),
            "expressionType": self.expression_type,
            "subString": self.expression,
            "subVersion": self.version,
            "tagsSet": sorted(self.tags),
            "topic": self.topic,
        }


def subscription_of(topic: str, expression: Expression, version: int) -> Subscription:
    """Return the subscription to *topic* by ``*``, by ``tag || tag``, or by `Sql`."""
    if isinstance(expression, Sql):
        return Subscription(topic, expression.expression, SQL92, version, frozenset())
    tags = frozenset(tag for part in expression.split("||") if (tag := part.strip()))
    if not tags or tags == {"*"}:
        return Subscription(topic, "*", TAG, version, frozenset())
    return Subscription(topic, expression, TAG, version, tags)


@final
@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull gave: go on at ``next_offset``; the queue holds from ``min_offset`` to before ``max_offset``."""

    status: PullStatus
    messages: list[ReceivedMessage]
    damaged: list[DamagedMessage]
    next_offset: int
    min_offset: int
    max_offset: int
    suggested_broker_id: int


async def pull(network: Network, queue: MessageQueue, header: PullHeader, code: int, broker_id: int = 0) -> Pulled:
    """Return what the broker of *queue* answers; messages that a tag hash let through wrongly are still in it.

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
    return _pulled(answer, status, queue.broker_name)


def _pulled(answer: Command, status: PullStatus, broker_name: str) -> Pulled:
    found = decode_messages(answer.body, broker_name) if status is PullStatus.FOUND else []
    return Pulled(
        status,
        [message for message in found if isinstance(message, ReceivedMessage)],
        [message for message in found if isinstance(message, DamagedMessage)],
        bodies.header_integer(answer, "nextBeginOffset"),
        bodies.header_integer(answer, "minOffset"),
        bodies.header_integer(answer, "maxOffset"),
        bodies.header_integer(answer, "suggestWhichBrokerId", 0),
    )


def decode_messages(body: bytes, broker_name: str) -> list[ReceivedMessage | DamagedMessage]:
    """Return the messages of *body*, records as a broker stores them.

    Raises:
      BadAnswer: the bytes are no records.
    """
    try:
        records = decode_records(body, check_body=False)
    except CorruptRecord as error:
        raise BadAnswer(f"answer of broker {broker_name!r}: {error}") from error
    return [received(record, broker_name) for record in records]
