"""Requests and replies over messages, compatible with RocketMQ's: DefaultMQProducer.request and MessageUtil.

A request is an ordinary message that also names the client that waits and a correlation id. The reply is sent to the
reply topic of the request's cluster; the broker stores it and pushes it to the waiting client, which it finds among
the producers by the client's id. So this client sends heartbeats to every broker that may store a reply.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Final, final

import trio
from msgspec import Struct

from martlet.message import KEYS, TAGS, UNIQ_KEY, decode_properties
from martlet.records.compression import CompressionError, decompress
from martlet_client.link import Answer
from martlet_client.messages import Message
from martlet_client.network import Network
from martlet_remoting.wire.answers import bodies
from martlet_remoting.wire.answers.errors import BadAnswer, ClientError, MessageRefused, RouteNotFound
from martlet_remoting.wire.answers.messages import ReceivedMessage
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_remoting.wire.routes import TopicRoute

__all__ = ["Reply", "ReplyTo", "Waiters", "WaitingRequest"]

CLUSTER: Final = "CLUSTER"
CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO: Final = "REPLY_TO_CLIENT"
TTL: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"
CORRELATION_BYTES: Final = 16
REPLY_TOPIC: Final = "{}_REPLY_TOPIC"  # of a cluster


@final
class Reply(Struct, frozen=True):
    """The reply to a request.

    ``body`` is decompressed. ``message_id`` is the unique key from the replier. ``born_ms`` and ``store_ms`` are
    milliseconds since 1970: when the replier sent it, and when its broker stored it.
    """

    body: bytes
    message_id: str
    tags: str
    keys: tuple[str, ...]
    properties: dict[str, str]
    born_ms: int
    store_ms: int


@final
class ReplyTo(Struct, frozen=True):
    """Where a reply goes: the topic, and the properties by which the broker and the requester know it."""

    topic: str
    properties: Mapping[str, str]

    @classmethod
    def of(cls, request: ReceivedMessage) -> "ReplyTo":
        """Return where the reply to *request* goes. Raises `MessageRefused` if it is not a request."""
        properties = request.properties
        missing = [name for name in (CORRELATION_ID, REPLY_TO, CLUSTER) if not properties.get(name)]
        if missing:
            text = f"message {request.message_id} is not a request, it lacks {' and '.join(missing)}"
            raise MessageRefused(f"{text}; reply to messages that were sent with request()")
        reply_properties: dict[str, str] = {
            name: properties[name] for name in (CORRELATION_ID, REPLY_TO, TTL) if name in properties
        }
        return cls(REPLY_TOPIC.format(properties[CLUSTER]), {**reply_properties, MESSAGE_TYPE: "reply"})

    def message(self, body: bytes, tags: str, keys: str | Sequence[str], properties: Mapping[str, str]) -> Message:
        """Return the reply as a message; its own properties are added when it is encoded."""
        return Message(self.topic, body, tags, keys, properties)


@final
class WaitingRequest:
    """A request without a reply yet."""

    __slots__ = ("arrived", "correlation_id", "failure", "reply")

    def __init__(self, correlation_id: str) -> None:
        self.correlation_id = correlation_id
        self.arrived = trio.Event()
        self.reply: Reply | None = None
        self.failure: ClientError | None = None

    async def wait_reply(self) -> Reply:
        """Return the reply when it is there. Raises `BadAnswer` if it cannot be read."""
        if not self.arrived.is_set():
            await self.arrived.wait()
        if self.failure is not None:
            raise self.failure
        assert self.reply is not None
        return self.reply


@final
class Waiters:
    """The requests of one producer that wait for a reply."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._waiting: dict[str, WaitingRequest] = {}
        self._announced: set[str] = set()  # reply topics whose brokers know this client
        network.handlers[RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT] = self._take

    def begin(self) -> WaitingRequest:
        """Return a new request to wait for; end it with `end`."""
        # Whoever guesses the id of a request can forge its reply.
        waiting = WaitingRequest(secrets.token_hex(CORRELATION_BYTES))
        self._waiting[waiting.correlation_id] = waiting
        return waiting

    def end(self, waiting: WaitingRequest) -> None:
        """Wait for its reply no longer; a reply that comes later is dropped."""
        self._waiting.pop(waiting.correlation_id, None)

    def properties(self, waiting: WaitingRequest, timeout_s: float) -> dict[str, str]:
        """Return the properties that make a message a request."""
        ttl = str(round(timeout_s * 1000))
        return {CORRELATION_ID: waiting.correlation_id, REPLY_TO: self._network.client_id, TTL: ttl}

    async def announce(self, route: TopicRoute) -> None:
        """Let every broker that may store a reply to a message sent along *route* know this client."""
        clusters = {group.cluster for group in route.brokers.values()} - {""}
        topics = {REPLY_TOPIC.format(cluster) for cluster in clusters} - self._announced
        if not topics:
            return
        for topic in topics:
            try:
                await self._network.fetch_route(topic)
            except RouteNotFound:
                continue  # the brokers of the request's own topic must do
        await self._network.send_heartbeats()
        self._announced |= topics

    async def _take(self, command: Command) -> Answer:
        properties = decode_properties(command.text("properties", "").encode("utf-8", "replace"))
        waiting = self._waiting.pop(properties.get(CORRELATION_ID, ""), None)
        if waiting is not None:
            try:
                waiting.reply = _decode(command, properties)
            except (CompressionError, BadAnswer) as error:
                waiting.failure = BadAnswer(f"reply cannot be read: {error}")
            waiting.arrived.set()
        # As Java's client, also for a reply that comes too late: the replier can do nothing about that.
        return Answer()


def _decode(command: Command, properties: dict[str, str]) -> Reply:
    return Reply(
        decompress(command.body, bodies.header_integer(command, "sysFlag")),
        properties.get(UNIQ_KEY, ""),
        properties.get(TAGS, ""),
        tuple(filter(None, properties.get(KEYS, "").split(" "))),
        properties,
        bodies.header_integer(command, "bornTimestamp"),
        bodies.header_integer(command, "storeTimestamp"),
    )
