"""The pop consumer: takes messages for a time, and acknowledges each one when it is done (RocketMQ's POP)."""

import logging
from collections.abc import Mapping, Sequence
from typing import Final, final

import trio
from msgspec import Struct
from msgspec.structs import replace

from martlet_client.arguments import check_integer, check_seconds, check_type
from martlet_client.messages import check_group, check_topic
from martlet_client.network import ClientSettings, NetworkClient
from martlet_client.pulling import ANSWER_MARGIN_S, Expression, TopicSelection, decode_messages, subscription_of
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BadAnswer, BrokerError, RouteNotFound
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import PopHeader
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.pop_handles import Handle, bit_set, parse_handle, real_topic, retry_flag

__all__ = ["PopConsumer", "PoppedMessage"]

log = logging.getLogger(__name__)

COUNT_MAX: Final = 32  # RocketMQ's limit
WAIT_S: Final = 15.0
WAIT_MAX_S: Final = 3600.0
INVISIBLE_S: Final = 60.0
INVISIBLE_MAX_S: Final = 10 * 365 * 86_400.0
POP_CK: Final = "POP_CK"
NOTHING: Final = frozenset((ResponseCode.POLLING_TIMEOUT, ResponseCode.PULL_NOT_FOUND))


@final
class PoppedMessage(Struct, frozen=True):
    """A message that is this consumer's until its invisible time is over; ``handle`` acknowledges it."""

    message: ReceivedMessage
    handle: Handle

    @property
    def body(self) -> bytes:
        """The body of the message."""
        return self.message.body


@final
class PopConsumer(NetworkClient):
    """Takes messages of *group* that nobody else gets for a time; those not acknowledged by then come again.

    Example:
        async with PopConsumer("127.0.0.1:9876", "my-group") as consumer:
            for popped in await consumer.receive("Greetings", wait_s=15):
                print(popped.body)
                await consumer.ack(popped)

    Consumers of a group share all queues, and any of them can acknowledge a message. After as many failed deliveries
    as the group's ``retryMaxTimes`` allows, Martlet makes a message a dead letter.

    Args:
      name_server: ``host:port``, several separated by ``;``, or `ClientSettings`.
      group: the consumer group; its members share the messages.
      from_newest: whether a new group begins with new messages instead of the oldest ones; as `ConsumeFrom.LAST`.

    Raises:
      TypeError, ValueError: an argument is wrong.
      MessageRefused: the group has a name that brokers refuse.
    """

    def __init__(self, name_server: str | ClientSettings, group: str, *, from_newest: bool = False) -> None:
        check_group(group)
        check_type("from_newest", from_newest, bool)
        super().__init__(ClientSettings.of(name_server))
        self.group = group
        self._init_mode = int(from_newest)
        self._turn = 0

    async def _open(self, nursery: trio.Nursery) -> None:
        """Connections are opened by the first call."""

    async def _close(self) -> None:
        """Nothing was registered."""

    async def receive(
        self,
        topic: str,
        *,
        messages_max: int = COUNT_MAX,
        invisible_s: float = INVISIBLE_S,
        wait_s: float = 0.0,
        expression: Expression = "*",
        in_order: bool = False,
    ) -> list[PoppedMessage]:
        """Return up to *messages_max* messages, at most 32, which are invisible to others for *invisible_s* seconds.

        If there are none a broker waits up to *wait_s* seconds for one to arrive. With *in_order* a queue gives no
        message until its earlier ones are acknowledged or come again. All members should use the same *expression*.

        Raises:
          TypeError, ValueError: an argument is wrong.
          BrokerError, RouteNotFound, ConnectionLost, RequestTimeout: the topic cannot be popped.
        """
        check_topic(topic)
        check_integer("messages_max", messages_max, 1, COUNT_MAX)
        check_seconds("invisible_s", invisible_s, high=INVISIBLE_MAX_S)
        check_seconds("wait_s", wait_s, zero=True, high=WAIT_MAX_S)
        check_type("in_order", in_order, bool)
        subscription = subscription_of(topic, expression, self.network.clock.now_ms())
        header = PopHeader(
            self.group,
            topic,
            -1,
            poll_ms=0,
            expression_type=subscription.expression_type,
            expression=subscription.expression,
            in_order=in_order,
            count_max=messages_max,
            invisible_ms=int(invisible_s * 1000),
            init_mode=self._init_mode,
        )
        brokers = sorted({queue.broker_name for queue in (await self.network.route(topic)).read_queues(topic)})
        if not brokers:
            raise RouteNotFound(topic, "has no queue that can be read")
        self._turn += 1
        found: list[PoppedMessage] = []
        for number in range(len(brokers)):
            is_last = number == len(brokers) - 1
            header.poll_ms = int(wait_s * 1000) if is_last else 0
            found = await self._pop(brokers[(self._turn + number) % len(brokers)], header, subscription)
            if found:
                break
        return found

    async def _pop(self, broker_name: str, header: PopHeader, subscription: TopicSelection) -> list[PoppedMessage]:
        header.born_ms = self.network.clock.now_ms()
        address = await self.network.broker_address(header.topic, broker_name)
        timeout_s = self.network.settings.request_timeout_s + header.poll_ms / 1000 + ANSWER_MARGIN_S
        ext = {**header.to_ext(), "bname": broker_name}
        answer = await self.network.ask_any(address, RequestCode.POP_MESSAGE, ext, b"", timeout_s)
        if answer.code in NOTHING:
            return []
        if answer.code != ResponseCode.SUCCESS:
            raise BrokerError(answer.code, answer.remark or "", address)
        popped_messages = _decode_popped(answer, broker_name)
        selected_messages = [popped for popped in popped_messages if subscription.selects(popped.message)]
        if len(selected_messages) < len(popped_messages):  # brokers compare only the hashes of tags
            await self.ack(*[popped for popped in popped_messages if not subscription.selects(popped.message)])
        return selected_messages

    async def ack(self, *popped: PoppedMessage) -> None:
        """Acknowledge messages; they do not come again. Does nothing for those whose invisible time has ended.

        Raises:
          TypeError: an argument is not a popped message.
          BrokerError, RouteNotFound, ConnectionLost, RequestTimeout: it may not be acknowledged.
        """
        for each in popped:
            check_type("popped", each, PoppedMessage, "as receive() returns them")
        for broker_name in sorted({each.handle.broker_name for each in popped}):
            batch = [each for each in popped if each.handle.broker_name == broker_name]
            address = await self.network.broker_address(batch[0].message.topic, broker_name)
            if len(batch) == 1:
                await self.network.ask(address, RequestCode.ACK_MESSAGE, self._where(batch[0]))
            else:
                body = {"brokerName": broker_name, "acks": self._batch(batch)}
                await self.network.ask(address, RequestCode.BATCH_ACK_MESSAGE, {}, bodies.dump(body))

    async def change_invisible(self, popped: PoppedMessage, invisible_s: float) -> PoppedMessage:
        """Make a message come again in *invisible_s* seconds from now, at once with 0; return it with its new handle.

        Raises:
          TypeError, ValueError: an argument is wrong.
          BrokerError: its invisible time has ended, or it was acknowledged (code 208).
          RouteNotFound, ConnectionLost, RequestTimeout: its broker did not answer.
        """
        check_type("popped", popped, PoppedMessage, "as receive() returns them")
        check_seconds("invisible_s", invisible_s, zero=True, high=INVISIBLE_MAX_S)
        handle = popped.handle
        address = await self.network.broker_address(popped.message.topic, handle.broker_name)
        ext = {**self._where(popped), "invisibleTime": int(invisible_s * 1000)}
        answer = await self.network.ask(address, RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext)
        changed = replace(
            handle,
            first=handle.offset,
            pop_ms=bodies.header_integer(answer, "popTime"),
            invisible_ms=bodies.header_integer(answer, "invisibleTime"),
            revive_queue=bodies.header_integer(answer, "reviveQid"),
        )
        return PoppedMessage(popped.message, changed)

    def _where(self, popped: PoppedMessage) -> dict[str, object]:
        handle = popped.handle
        return {
            "consumerGroup": self.group,
            "topic": real_topic(popped.message.topic, self.group, handle.retry),
            "queueId": handle.queue_id,
            "extraInfo": str(handle),
            "offset": handle.offset,
            "bname": handle.broker_name,
        }

    def _batch(self, popped: Sequence[PoppedMessage]) -> list[dict[str, object]]:
        """Return one acknowledgement for the messages of each queue that were popped together."""
        together: dict[tuple[str, Handle], list[int]] = {}
        for each in popped:
            key = each.message.topic, replace(each.handle, offset=0)
            together.setdefault(key, []).append(each.handle.offset - each.handle.first)
        return [
            {
                "c": self.group,
                "t": topic,
                "r": handle.retry,
                "so": handle.first,
                "q": handle.queue_id,
                "rq": handle.revive_queue,
                "pt": handle.pop_ms,
                "it": handle.invisible_ms,
                "b": bit_set(numbers),
            }
            for (topic, handle), numbers in together.items()
        ]


def _decode_popped(answer: Command, broker_name: str) -> list[PoppedMessage]:
    """Return the messages of *answer* with their handles.

    Raises:
      BadAnswer: the fields do not fit the messages.
    """
    starts = _starts(answer.text("startOffsetInfo", ""))
    pop_ms, invisible_ms, revive = (
        bodies.header_integer(answer, name) for name in ("popTime", "invisibleTime", "reviveQid")
    )
    popped_messages: list[PoppedMessage] = []
    for message in decode_messages(answer.body, broker_name):
        if not isinstance(message, ReceivedMessage):
            log.warning("a popped message is damaged, it comes again until it is a dead letter: %s", message)
            continue
        stored_handle = message.properties.get(POP_CK)  # RocketMQ writes it into retries
        if stored_handle is not None:
            popped_messages.append(PoppedMessage(message, parse_handle(stored_handle)))
            continue
        retry, queue_id = retry_flag(message.queue.topic), message.queue.queue_id
        first_offset = starts.get((retry, queue_id), message.queue_offset)
        handle = Handle(first_offset, pop_ms, invisible_ms, revive, retry, broker_name, queue_id, message.queue_offset)
        popped_messages.append(PoppedMessage(message, handle))
    return popped_messages


def _starts(text: str) -> Mapping[tuple[str, int], int]:
    """Return the first offset of each queue in an answer, by retry flag and queue id."""
    try:
        parts = [part.split(" ") for part in text.split(";") if part]
        return {(retry, int(queue_id)): int(start) for retry, queue_id, start in parts}
    except ValueError as error:
        raise BadAnswer(f"startOffsetInfo {text!r:.80} of a pop is malformed: {error}") from error
