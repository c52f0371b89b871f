"""Sends messages: acknowledged, oneway, or in batches."""

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Final, TypeAlias, TypedDict, final
from zlib import crc32

import trio

from martlet_remoting.batches import BatchMessage, encode_batch
from martlet_remoting.codes import RequestCode, ResponseCode
from martlet_remoting.compression import compress
from martlet_remoting.headers import SendHeader
from martlet_remoting.packets import Command, MessageQueue

from .errors import (
    Attempt,
    BrokerError,
    ClientClosed,
    ClientError,
    ConnectionLost,
    MessageRefused,
    RequestTimeout,
    RouteNotFound,
    SendFailed,
)
from .messages import BODY_BYTES_MAX, RETRY_PREFIX, Message, SendResult, SendStatus, check_group, encoded
from .network import TEMPLATE_TOPIC, Client, Network, Settings, heartbeat_body
from .routes import Route

__all__ = ["Producer", "ProducerOptions", "Selector", "select_by_hash"]

Selector: TypeAlias = Callable[[Sequence[MessageQueue], Message, object], MessageQueue]

# What RocketMQ's producer tries again (DefaultMQProducer.retryResponseCodes); everything else would fail again.
RETRIED_CODES: Final = frozenset(
    (
        ResponseCode.SYSTEM_ERROR,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.SERVICE_NOT_AVAILABLE,
        ResponseCode.NO_PERMISSION,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.NO_BUYER_ID,
        ResponseCode.NOT_IN_CURRENT_UNIT,
        ResponseCode.GO_AWAY,
    )
)
_STORED: Final = {status.value: status for status in SendStatus}
# How long a broker that failed once, twice, ... in a row is passed over, in seconds; one success forgives all.
_AVOIDED_S: Final = (0.5, 2.0, 5.0, 10.0, 30.0)
# Before the same broker is tried again at once.
_PAUSE_S: Final = 0.05


def select_by_hash(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """Return the same queue for the same *argument* as long as their number stays: keeps an order per key."""
    return queues[crc32(str(argument).encode()) % len(queues)]


@final
class BrokerFaults:
    """Which brokers failed lately, and until when to pass over them."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}

    def failed(self, broker_name: str) -> None:
        """Pass over the broker for a while, longer each time in a row."""
        times = self._failures.get(broker_name, (0, 0.0))[0]
        pause = _AVOIDED_S[min(times, len(_AVOIDED_S) - 1)]
        self._failures[broker_name] = times + 1, trio.current_time() + pause

    def succeeded(self, broker_name: str) -> None:
        """Forget the broker's failures."""
        self._failures.pop(broker_name, None)

    def avoids(self, broker_name: str) -> bool:
        """Whether the broker should be passed over now."""
        return trio.current_time() < self._failures.get(broker_name, (0, 0.0))[1]


@final
class QueueChoice:
    """Takes a topic's queues in turn, passing over brokers that failed while there are others."""

    def __init__(self, faults: BrokerFaults) -> None:
        self._faults = faults
        # Many producers that start together should not all begin with queue 0.
        self._turns = count(random.randrange(1 << 16))

    def next_queue(self, queues: Sequence[MessageQueue], last_broker: str) -> MessageQueue:
        """Return the next queue, not of *last_broker* if another is left."""
        for wanted in (self._is_healthy, self._is_other):
            for _ in queues:
                queue = queues[next(self._turns) % len(queues)]
                if wanted(queue, last_broker):
                    return queue
        return queues[next(self._turns) % len(queues)]

    def _is_healthy(self, queue: MessageQueue, last_broker: str) -> bool:
        return queue.broker_name != last_broker and not self._faults.avoids(queue.broker_name)

    def _is_other(self, queue: MessageQueue, last_broker: str) -> bool:
        return queue.broker_name != last_broker


@final
class Sending:
    """Brings one ready request to a broker, with retries; shared by producers and consumers that send back."""

    def __init__(self, network: Network, group: str, retries: int, timeout_s: float, default_queues: int = 4) -> None:
        self.network = network
        self.group = group
        self.retries = retries
        self.timeout_s = timeout_s
        self.default_queues = default_queues
        self.faults = BrokerFaults()
        self.choice = QueueChoice(self.faults)

    async def publish_route(self, topic: str) -> tuple[Route, list[MessageQueue]]:
        """Return where *topic* can be sent to; a topic nobody knows goes where it may be created.

        Raises:
          RouteNotFound: nobody knows it and nobody may create it, or no broker takes writes.
        """
        route = self.network.routes.get(topic)
        queues = route.write_queues(topic) if route is not None else []
        if route is None or not queues:
            try:
                route = await self.network.fetch_route(topic)
                queues = route.write_queues(topic)
            except RouteNotFound as error:
                route, queues = await self._template_route(topic, error)
        if not queues:
            raise RouteNotFound(topic, "has no queue that takes messages; a broker is down or read-only")
        return route, queues

    async def _template_route(self, topic: str, error: RouteNotFound) -> tuple[Route, list[MessageQueue]]:
        """The template's brokers create the topic with the first message; its own route is asked for again then."""
        try:
            route = await self.network.fetch_route(TEMPLATE_TOPIC)
        except RouteNotFound:
            raise error from None
        return route, route.write_queues(topic, self.default_queues)

    async def send(self, header: SendHeader, body: bytes, code: int, timeout_s: float | None = None) -> "Sent":
        """Return the answer of the first broker that stored it.

        Raises:
          SendFailed: none did within the retries and the time.
          BrokerError: a broker refused it for a reason that another would share.
        """
        route, queues = await self.publish_route(header.topic)
        deadline = trio.current_time() + (self.timeout_s if timeout_s is None else timeout_s)
        attempts: list[Attempt] = []
        while True:
            queue = await self._next_queue(queues, attempts, deadline)
            try:
                return await self.send_to(route, queue, header, body, code, deadline - trio.current_time())
            except ClientError as error:
                if not _is_retried(error):
                    raise
                last = error
                attempts.append(Attempt(queue, error))
                self._failed(header.topic, queue, error)
            if len(attempts) > self.retries or trio.current_time() >= deadline:
                break
            try:
                route, queues = await self.publish_route(header.topic)
            except ClientError as error:
                last = error
                break
        raise SendFailed(header.topic, tuple(attempts)) from last

    async def _next_queue(
        self, queues: Sequence[MessageQueue], attempts: Sequence[Attempt], deadline: float
    ) -> MessageQueue:
        """Choose where to try next; wait a little if it can only be the broker that just failed."""
        last_broker = attempts[-1].queue.broker_name if attempts else ""
        queue = self.choice.next_queue(queues, last_broker)
        if queue.broker_name == last_broker:
            await trio.sleep(min(_PAUSE_S * 2 ** len(attempts), max(0.0, deadline - trio.current_time())))
        return queue

    def _failed(self, topic: str, queue: MessageQueue, error: ClientError) -> None:
        self.faults.failed(queue.broker_name)
        if isinstance(error, ConnectionLost | RouteNotFound):
            # The broker may have moved: ask again rather than try the old address.
            self.network.routes.pop(topic, None)

    async def send_to(
        self, route: Route, queue: MessageQueue, header: SendHeader, body: bytes, code: int, timeout_s: float
    ) -> "Sent":
        """Return the answer of the broker that has *queue*; one attempt."""
        address = _master(route, queue)
        header.queue_id, header.broker_name = queue.queue_id, queue.broker_name
        answer = await self.network.ask_any(address, code, header.to_ext(), body, timeout_s)
        status = _STORED.get(answer.code)
        if status is None:
            raise BrokerError(answer.code, answer.remark or "", address)
        self.faults.succeeded(queue.broker_name)
        return Sent(answer, status, queue)


def _is_retried(error: ClientError) -> bool:
    """Whether another attempt may go better."""
    if isinstance(error, BrokerError):
        return error.code in RETRIED_CODES
    return not isinstance(error, ClientClosed)


def _master(route: Route, queue: MessageQueue) -> str:
    address = route.master(queue.broker_name)
    if address is None:
        raise RouteNotFound(queue.topic, f"has no master at broker {queue.broker_name!r}")
    return address


@final
class Sent:
    """A broker's answer to a send that it stored."""

    __slots__ = ("answer", "queue", "status")

    def __init__(self, answer: Command, status: SendStatus, queue: MessageQueue) -> None:
        self.answer = answer
        self.status = status
        self.queue = queue

    def result(self, message_id: str) -> SendResult:
        """Return it as what a producer's caller gets."""
        answer = self.answer
        queue = MessageQueue(self.queue.topic, self.queue.broker_name, answer.integer("queueId"))
        return SendResult(
            self.status,
            message_id,
            answer.text("msgId"),
            queue,
            answer.integer("queueOffset"),
            answer.text("transactionId", ""),
            answer.text("MSG_REGION", "DefaultRegion"),
        )


class ProducerOptions(TypedDict, total=False):
    """The keyword arguments of `Producer`, for its asyncio and blocking twins."""

    retries: int
    send_timeout_s: float
    compress_over_bytes: int
    body_bytes_max: int
    default_queues: int


@final
class Producer(Client):
    """Sends messages of one producer group.

        async with Producer("127.0.0.1:9876", "my-group") as producer:
            result = await producer.send(Message("Greetings", b"hello"))

    Args:
      name_server: ``host:port``, several separated by ``;``, or `Settings`.
      retries: how often a failed send is tried again, on another broker where there is one.
      send_timeout_s: for one send with all its retries, from when its route is known.
      compress_over_bytes: larger bodies are compressed (ZLIB, level 5).
      default_queues: of a topic that the first message creates.
    """

    def __init__(
        self,
        name_server: str | Settings,
        group: str,
        *,
        retries: int = 2,
        send_timeout_s: float = 3.0,
        compress_over_bytes: int = 4096,
        body_bytes_max: int = BODY_BYTES_MAX,
        default_queues: int = 4,
    ) -> None:
        check_group(group)
        super().__init__(Settings.of(name_server))
        self.group = group
        self.compress_over_bytes = compress_over_bytes
        self.body_bytes_max = body_bytes_max
        self._sending = Sending(self.network, group, retries, send_timeout_s, default_queues)
        self.network.heartbeat = lambda: heartbeat_body(self.client_id, [group], [])

    async def _open(self, nursery: trio.Nursery) -> None:
        """Connections are opened by the first send."""

    async def _close(self) -> None:
        await unregister(self.network, producer_group=self.group)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues that *topic* can be sent to."""
        return (await self._sending.publish_route(topic))[1]

    async def send(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Return where *message* was stored, once the broker says that it is.

        With *queue*, or with *selector*, which is given the queues, the message and *argument*
        and returns one of them, only that queue is tried, and only once: an order must not break.

        Raises:
          MessageRefused: it cannot be sent as it is.
          SendFailed: no broker stored it; a timeout among the attempts may have stored it all the same.
          BrokerError: a broker refused it.
          RouteNotFound, NameServerUnreachable: nobody knows where to send it.
        """
        header, body, key = self._prepare(message)
        code = RequestCode.SEND_MESSAGE_V2
        if queue is None and selector is None:
            return (await self._sending.send(header, body, code, timeout_s)).result(key)
        route, queues = await self._sending.publish_route(message.topic)
        chosen = queue if selector is None else selector(queues, message, argument)
        assert chosen is not None
        seconds = self._sending.timeout_s if timeout_s is None else timeout_s
        try:
            sent = await self._sending.send_to(route, chosen, header, body, code, seconds)
        except (ConnectionLost, RequestTimeout) as error:
            self.network.routes.pop(message.topic, None)
            raise SendFailed(message.topic, (Attempt(chosen, error),)) from error
        return sent.result(key)

    async def send_oneway(self, message: Message, *, queue: MessageQueue | None = None) -> None:
        """Send *message* without waiting; nothing tells whether it was stored.

        Raises:
          MessageRefused: it cannot be sent as it is.
          ConnectionLost: its broker cannot be reached.
        """
        header, body, _ = self._prepare(message)
        route, queues = await self._sending.publish_route(message.topic)
        chosen = queue or self._sending.choice.next_queue(queues, "")
        header.queue_id, header.broker_name = chosen.queue_id, chosen.broker_name
        await self.network.tell(_master(route, chosen), RequestCode.SEND_MESSAGE_V2, header.to_ext(), body)

    async def send_batch(self, messages: Sequence[Message], *, timeout_s: float | None = None) -> SendResult:
        """Return where *messages* were stored: all in one queue one after the other, or none.

        Raises:
          MessageRefused: there are none, they differ in topic, one is delayed, or together they
            are over ``body_bytes_max``; nothing is split silently.
          SendFailed, BrokerError, RouteNotFound, NameServerUnreachable: as `send`.
        """
        topic = self._check_batch(messages)
        keys = [self.network.identity.keys.next_key() for _ in messages]
        members = [
            BatchMessage(message.body, message.encode_properties(key), message.flag)
            for message, key in zip(messages, keys, strict=True)
        ]
        body = encode_batch(members)
        if len(body) > self.body_bytes_max:
            raise MessageRefused(
                f"batch of {len(messages)} messages has {len(body)} bytes, over the limit of {self.body_bytes_max}; "
                "send smaller batches"
            )
        header = self._header(topic, 0, encoded({"UNIQ_KEY": self.network.identity.keys.next_key()}), 0)
        header.batch = True
        sent = await self._sending.send(header, body, RequestCode.SEND_BATCH_MESSAGE, timeout_s)
        return sent.result(",".join(keys))

    def _check_batch(self, messages: Sequence[Message]) -> str:
        if not messages:
            raise MessageRefused("batch is empty; it needs at least one message")
        topic = messages[0].topic
        if topic.startswith(RETRY_PREFIX):
            raise MessageRefused(f"batch for retry topic {topic!r} is not allowed; send the messages one by one")
        for message in messages:
            message.check(self.body_bytes_max)
            if message.topic != topic:
                raise MessageRefused(f"batch has topics {topic!r} and {message.topic!r}; it must have one")
            if message.delay_level or message.delay_ms or message.deliver_at_ms:
                raise MessageRefused("batch has a delayed message; send that one by itself")
            if message.wait_stored != messages[0].wait_stored:
                raise MessageRefused("batch has messages that differ in wait_stored; they must agree")
        return topic

    def _prepare(self, message: Message) -> tuple[SendHeader, bytes, str]:
        message.check(self.body_bytes_max)
        key = self.network.identity.keys.next_key()
        body, sys_flag = message.body, 0
        if len(body) > self.compress_over_bytes:
            body, sys_flag = compress(body)
        return self._header(message.topic, sys_flag, message.encode_properties(key), message.flag), body, key

    def _header(self, topic: str, sys_flag: int, properties: bytes, flag: int) -> SendHeader:
        return SendHeader(
            self.group,
            topic,
            TEMPLATE_TOPIC,
            self._sending.default_queues,
            -1,
            sys_flag,
            self.network.clock.now_ms(),
            flag,
            properties,
        )


async def unregister(network: Network, producer_group: str = "", consumer_group: str = "") -> None:
    """Tell every connected broker that we leave; best effort, a broken connection says the same."""
    ext = {"clientID": network.client_id}
    if producer_group:
        ext["producerGroup"] = producer_group
    if consumer_group:
        ext["consumerGroup"] = consumer_group

    async def leave(address: str) -> None:
        try:
            await network.ask(address, RequestCode.UNREGISTER_CLIENT, ext)
        except ClientError:
            return

    async with trio.open_nursery() as nursery:
        for address in network.connected_brokers():
            nursery.start_soon(leave, address)
