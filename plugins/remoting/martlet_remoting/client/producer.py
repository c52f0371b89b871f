"""Sends messages: acknowledged, oneway, or in batches."""

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict, final
from zlib import crc32

import trio

from martlet_remoting.batches import BatchMessage, encode_batch
from martlet_remoting.codes import RequestCode
from martlet_remoting.compression import compress
from martlet_remoting.headers import SendHeader
from martlet_remoting.packets import MessageQueue

from .errors import (
    Attempt,
    ClientError,
    ConnectionLost,
    MessageRefused,
    RequestTimeout,
    SendFailed,
)
from .messages import BODY_BYTES_MAX, RETRY_PREFIX, Message, SendResult, check_group, encoded
from .network import TEMPLATE_TOPIC, Client, Network, Settings, heartbeat_body
from .sending import Sending, master_of

__all__ = ["Producer", "ProducerOptions", "Selector", "select_by_hash"]

Selector: TypeAlias = Callable[[Sequence[MessageQueue], Message, object], MessageQueue]


def select_by_hash(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """Return the same queue for the same *argument* as long as their number stays: keeps an order per key."""
    return queues[crc32(str(argument).encode()) % len(queues)]


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
        await self.network.tell(master_of(route, chosen), RequestCode.SEND_MESSAGE_V2, header.to_ext(), body)

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
