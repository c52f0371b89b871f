"""Sends messages: acknowledged, oneway, or in batches."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias, TypedDict
from zlib import crc32

import trio

from martlet.records.compression import compress
from martlet_client.arguments import I32_MAX, check_callable, check_integer, check_queue, check_seconds, check_type
from martlet_client.messages import BODY_BYTES_MAX, Message, SendResult, check_group, check_topic, encoded
from martlet_client.network import TEMPLATE_TOPIC, ClientSettings, Network, NetworkClient, heartbeat_body
from martlet_client.request_reply import Reply, ReplyTo, Waiters
from martlet_client.sending import Sending, master_of
from martlet_remoting.wire.answers.bodies import header_text
from martlet_remoting.wire.answers.errors import (
    Attempt,
    ClientError,
    ConnectionLost,
    MessageRefused,
    NoReply,
    RequestTimeout,
    SendFailed,
)
from martlet_remoting.wire.answers.messages import RETRY_PREFIX, ReceivedMessage
from martlet_remoting.wire.batches import BatchMessage, encode_batch
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.headers import SendHeader
from martlet_remoting.wire.packets import MessageQueue
from martlet_remoting.wire.recall_handles import decode_handle

__all__ = ["Producer", "ProducerOptions", "Selector", "select_by_hash"]

# RocketMQ refuses a topic with more queues.
QUEUES_MAX: Final = 16384

# Chooses one of the queues for a message; the last argument is the *argument* of `Producer.send`.
Selector: TypeAlias = Callable[[Sequence[MessageQueue], Message, object], MessageQueue]


def select_by_hash(queues: Sequence[MessageQueue], message: Message, argument: object) -> MessageQueue:
    """A `Selector` that keeps order per key: one *argument* gets one queue, until the number of queues changes."""
    return queues[crc32(str(argument).encode()) % len(queues)]


class ProducerOptions(TypedDict, total=False):
    """The keyword arguments of `Producer`, also for the asyncio and blocking classes."""

    retries: int
    send_timeout_s: float
    compress_over_bytes: int
    body_bytes_max: int
    default_queues: int


class Producer(NetworkClient):
    """Sends messages.

    Example:
        async with Producer("127.0.0.1:9876", "my-group") as producer:
            result = await producer.send(Message("Greetings", b"hello"))

    Args:
      name_server: ``host:port``, several separated by ``;``, or `ClientSettings`.
      group: the producer group, under which brokers list this client.
      retries: how often a failed send is tried again, on another broker if there is one.
      send_timeout_s: how long one send with all its retries may take, once its route is known.
      compress_over_bytes: larger bodies are compressed (ZLIB, level 5).
      body_bytes_max: larger bodies and batches are refused.
      default_queues: the number of queues of a topic that its first message creates.

    Raises:
      TypeError, ValueError: an argument is wrong.
      MessageRefused: the group has a name that brokers refuse.
    """

    def __init__(
        self,
        name_server: str | ClientSettings,
        group: str,
        *,
        retries: int = 2,
        send_timeout_s: float = 3.0,
        compress_over_bytes: int = 4096,
        body_bytes_max: int = BODY_BYTES_MAX,
        default_queues: int = 4,
    ) -> None:
        check_group(group)
        super().__init__(ClientSettings.of(name_server))
        check_integer("retries", retries)
        check_seconds("send_timeout_s", send_timeout_s)
        check_integer("compress_over_bytes", compress_over_bytes)
        check_integer("body_bytes_max", body_bytes_max, 1, I32_MAX)
        check_integer("default_queues", default_queues, 1, QUEUES_MAX)
        self.group = group
        self.compress_over_bytes = compress_over_bytes
        self.body_bytes_max = body_bytes_max
        self._sending = Sending(self.network, group, retries, send_timeout_s, default_queues)
        self._waiters = Waiters(self.network)
        self.network.heartbeat = lambda: heartbeat_body(self.client_id, [group], [])

    async def _open(self, nursery: trio.Nursery) -> None:
        """Connections are opened by the first send."""

    async def _close(self) -> None:
        await unregister(self.network, producer_group=self.group)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the queues that *topic* can be sent to.

        Raises:
          RouteNotFound: the topic does not exist and no broker may create it.
        """
        check_topic(topic)
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
        """Return where *message* was stored, once the broker confirms that it is.

        With *queue* or *selector* only that queue is tried, and only once, so that an order cannot break. The
        selector gets the queues, the message and *argument*, and returns one of the queues. *timeout_s* replaces
        ``send_timeout_s``.

        Raises:
          TypeError, ValueError: an argument is wrong.
          MessageRefused: the message cannot be sent as it is.
          SendFailed: no broker confirmed it. After a timeout you cannot know whether it was stored.
          BrokerError: a broker refused it.
          RouteNotFound, NameServerUnreachable: nobody knows where to send it.
        """
        return await self._send(message, {}, queue, selector, argument, timeout_s)

    async def _send(
        self,
        message: Message,
        client_properties: Mapping[str, str],
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Like `send`, with properties that only the client may set."""
        _check_choice(queue, selector, argument)
        header, body, key = self._prepare(message, queue, timeout_s, client_properties)
        code = RequestCode.SEND_MESSAGE_V2
        if queue is None and selector is None:
            return (await self._sending.send(header, body, code, timeout_s)).result(key)
        route, queues = await self._sending.publish_route(message.topic)
        target = queue if selector is None else selector(queues, message, argument)
        check_queue(target, message.topic)
        assert target is not None
        seconds = self._sending.timeout_s if timeout_s is None else timeout_s
        try:
            sent = await self._sending.send_to(route, target, header, body, code, seconds)
        except (ConnectionLost, RequestTimeout) as error:
            self.network.routes.pop(message.topic, None)
            raise SendFailed(message.topic, (Attempt(target, error),)) from error
        return sent.result(key)

    async def request(
        self,
        message: Message,
        *,
        queue: MessageQueue | None = None,
        selector: Selector | None = None,
        argument: object = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send *message* and return the reply of the consumer that receives it.

        The consumer replies with `reply`, or with the client of another language. The other arguments are those of
        `send`; *timeout_s* is also how long to wait for the reply.

        Raises:
          NoReply: the message was stored, but no reply arrived in time.
          BadAnswer: the reply is damaged or compressed in an unknown way.
          TypeError, ValueError, MessageRefused, SendFailed, BrokerError, RouteNotFound, NameServerUnreachable: as
            for `send`.
        """
        check_type("message", message, Message, "for example Message('Greetings', b'hello')")
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        check_topic(message.topic)
        seconds = self._sending.timeout_s if timeout_s is None else timeout_s
        route, _ = await self._sending.publish_route(message.topic)
        await self._waiters.announce(route)
        waiter = self._waiters.begin()
        deadline = trio.current_time() + seconds
        try:
            client_properties = self._waiters.properties(waiter, seconds)
            sent = await self._send(message, client_properties, queue, selector, argument, seconds)
            with trio.move_on_at(deadline):
                return await waiter.wait_reply()
        finally:
            self._waiters.end(waiter)
        raise NoReply(message.topic, sent.message_id, seconds)

    async def reply(
        self,
        request: ReceivedMessage,
        body: bytes,
        *,
        tags: str = "",
        keys: str | Sequence[str] = "",
        properties: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> SendResult:
        """Send *body* as the reply to *request*; return once the requester has it.

        Raises:
          TypeError, ValueError: an argument is wrong.
          MessageRefused: *request* was not sent with `request`, or the reply cannot be sent as it is.
          SendFailed: no broker could deliver it; the requester may have gone.
          BrokerError, RouteNotFound, NameServerUnreachable: as for `send`.
        """
        check_type("request", request, ReceivedMessage, "the message that the consumer received")
        to = ReplyTo.of(request)
        message = to.message(body, tags, keys, properties or {})
        header, data, key = self._prepare(message, timeout_s=timeout_s, own=to.properties)
        return (await self._sending.send(header, data, RequestCode.SEND_REPLY_MESSAGE_V2, timeout_s)).result(key)

    async def send_oneway(self, message: Message, *, queue: MessageQueue | None = None) -> None:
        """Send *message* without waiting for an answer; you cannot know whether it was stored.

        Raises:
          TypeError, ValueError: an argument is wrong.
          MessageRefused: the message cannot be sent as it is.
          ConnectionLost: its broker cannot be reached.
          RouteNotFound, NameServerUnreachable: nobody knows where to send it.
        """
        header, body, _ = self._prepare(message, queue)
        route, queues = await self._sending.publish_route(message.topic)
        chosen = queue or self._sending.choice.next_queue(queues, "")
        header.queue_id, header.broker_name = chosen.queue_id, chosen.broker_name
        await self.network.tell(master_of(route, chosen), RequestCode.SEND_MESSAGE_V2, header.to_ext(), body)

    async def recall(self, topic: str, handle: str, *, timeout_s: float | None = None) -> str:
        """Recall a message that was sent with a time or a delay in ms; return its unique key.

        *handle* is the `SendResult.recall_handle` of the message.

        Raises:
          TypeError, ValueError: an argument is wrong.
          BrokerError: the message was delivered already, or the broker does not recall messages.
          RouteNotFound, NameServerUnreachable: nobody knows where the message is.
          ConnectionLost, RequestTimeout: its broker did not answer. You cannot know whether it was recalled.
        """
        check_topic(topic)
        check_type("recall handle", handle, str, "the recall_handle of a SendResult")
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        broker = decode_handle(handle).broker
        route, _ = await self._sending.publish_route(topic)
        address = master_of(route, MessageQueue(topic, broker, 0))
        ext = {"producerGroup": self.group, "topic": topic, "recallHandle": handle, "bname": broker}
        seconds = self._sending.timeout_s if timeout_s is None else timeout_s
        answer = await self.network.ask(address, RequestCode.RECALL_MESSAGE, ext, timeout_s=seconds)
        return header_text(answer, "msgId", "")

    async def send_batch(self, messages: Sequence[Message], *, timeout_s: float | None = None) -> SendResult:
        """Return where *messages* were stored: all of them in one queue, in order, or none.

        Raises:
          TypeError, ValueError: an argument is wrong.
          MessageRefused: there are no messages, they differ in topic, one is delayed, or together they
            exceed ``body_bytes_max``; a batch is never split.
          SendFailed, BrokerError, RouteNotFound, NameServerUnreachable: as for `send`.
        """
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
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
        check_type("batch", messages, Sequence, "for example a list of messages")
        for message in messages:
            check_type("message in a batch", message, Message)
        if not messages:
            raise MessageRefused("batch is empty; it needs at least one message")
        topic = messages[0].topic
        check_topic(topic)
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

    def _prepare(
        self,
        message: Message,
        queue: MessageQueue | None = None,
        timeout_s: float | None = None,
        own: Mapping[str, str] | None = None,
    ) -> tuple[SendHeader, bytes, str]:
        check_type("message", message, Message, "for example Message('Greetings', b'hello')")
        if queue is not None:
            check_queue(queue, message.topic)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        message.check(self.body_bytes_max)
        key = self.network.identity.keys.next_key()
        body, sys_flag = message.body, 0
        if len(body) > self.compress_over_bytes:
            body, sys_flag = compress(body)
        return self._header(message.topic, sys_flag, message.encode_properties(key, own), message.flag), body, key

    def _header(self, topic: str, sys_flag: int, properties: bytes, flag: int) -> SendHeader:
        return SendHeader(
            producer_group=self.group,
            topic=topic,
            default_topic=TEMPLATE_TOPIC,
            default_queues=self._sending.default_queues,
            queue_id=-1,
            sys_flag=sys_flag,
            born_ms=self.network.clock.now_ms(),
            flag=flag,
            properties=properties.decode(),
        )


def _check_choice(queue: object, selector: object, argument: object) -> None:
    if selector is not None:
        check_callable("selector", selector, "def selector(queues, message, argument): ...", 3)
        if queue is not None:
            raise ValueError("queue and selector are both given; give one of them")
    elif argument is not None:
        raise ValueError(f"argument {argument!r:.60} has no effect; give selector=select_by_hash, or your own")


async def unregister(network: Network, producer_group: str = "", consumer_group: str = "") -> None:
    """Tell every connected broker that this client leaves; best effort, as a broken connection has the same effect."""
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
