"""A protocol that pushes, in one file: FEED TOPIC starts a feed of messages, MORE NUMBER asks for more of them."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, final

from martlet.broker import Broker
from martlet.config import Settings, setting
from martlet.contracts import Buffer, Connection, Handler, Peer, Protocol
from martlet.delivery.fanout import Encoding, parts
from martlet.delivery.subscriptions import TopicSubscription, from_earliest
from martlet.errors import ConfigError, Refused, RemoteProtocolError
from martlet.net.addresses import split_address
from martlet.plugins.hooks import Hooks

__all__ = ["FeedConfig", "FeedPlugin"]

LINE_BYTES_MAX: Final = 300
BODY_BYTES_MAX: Final = 4 << 20
COMPRESSED: Final = 0x1  # of sysFlag; the next bits tell the algorithm
COMPRESSION_BITS: Final = 0x700
ZLIB: Final = (0x000, 0x300)


# Bytes to commands: no input or output, no broker.


@final
@dataclass(frozen=True, slots=True)
class Feed:
    topic: str


@final
@dataclass(frozen=True, slots=True)
class More:
    count: int


Command: TypeAlias = Feed | More


@final
class FeedConnection:
    """One connection as a state machine (martlet.contracts.Connection)."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def buffered_bytes(self) -> int:
        return len(self._data)

    def receive_data(self, data: bytes, now: float) -> None:
        self._data += data

    def events(self) -> Iterator[Command]:
        while b"\n" in self._data:
            line, _, rest = bytes(self._data).partition(b"\n")
            self._data[:] = rest
            yield _command(line.decode("ascii", "replace").split())
        if len(self._data) > LINE_BYTES_MAX:
            raise RemoteProtocolError(f"line is longer than {LINE_BYTES_MAX} bytes; send FEED or MORE")

    def farewell(self, error: Exception) -> bytes:
        return b"ERROR %b\n" % str(error).encode()

    def deadline(self) -> float:
        return float("inf")

    def handle_timeout(self, now: float) -> None:
        """There is no deadline."""


def _command(words: list[str]) -> Command:
    match words:
        case ["FEED", topic]:
            return Feed(topic)
        case ["MORE", count] if count.isdecimal() and len(count) < 7:
            return More(int(count))
    raise RemoteProtocolError(f"line {' '.join(words)!r} is not a command; send FEED TOPIC or MORE NUMBER")


# Records to bytes: once for all connections at the end of a queue.


def encode(piece: Buffer) -> list[bytes]:
    """Return a frame for each record in *piece*: its length in decimal, a newline, and the body."""
    frames: list[bytes] = []
    for _queue_id, _offset, sys_flag, body, _properties in parts(piece):
        plain = _decompressed(body, sys_flag)
        frames.append(b"%d\n%b" % (len(plain), plain))
    return frames


def _decompressed(body: bytes, sys_flag: int) -> bytes:
    """Return *body* decompressed: producers compress large bodies, and the broker stores them as they came."""
    if not sys_flag & COMPRESSED or sys_flag & COMPRESSION_BITS not in ZLIB:
        return body
    stream = zlib.decompressobj()
    try:
        return stream.decompress(body, BODY_BYTES_MAX)
    except zlib.error:
        return body


ENCODING: Final = Encoding("feed", encode)


# Commands to the broker.


@final
class FeedHandler:
    """Acts on the commands of one connection (martlet.contracts.Handler)."""

    def __init__(self, peer: Peer, broker: Broker, config: "FeedConfig") -> None:
        self._peer = peer
        self._broker = broker
        self._config = config
        self._feed: TopicSubscription | None = None

    def handle(self, event: Command) -> None:
        try:
            if isinstance(event, Feed):
                self._start(event.topic)
            elif self._feed is not None:
                self._feed.add_credit(min(event.count, self._config.credit_max - self._feed.credit))
        except Refused as refused:
            raise RemoteProtocolError(f"{refused.reason.value}: {refused}") from refused

    def _start(self, topic: str) -> None:
        if self._feed is not None:
            raise RemoteProtocolError("this connection has a feed; open another connection")
        gate = self._broker.gate(self._peer.identity, self._peer.login_origin(), self._peer)
        gate.find_topic(topic, "subscribe", self._config.new_topic_queues)
        self._feed = gate.subscribe(self._peer, topic, ENCODING, start=from_earliest, credit=self._config.credit)

    def refuse(self, answer: Buffer, refused: Refused) -> None:
        """Nothing is published here."""

    def collect(self, budget_bytes: int) -> None:
        if self._feed is None:
            return
        if self._feed.gone:
            self._peer.close("topic was deleted")
            return
        try:
            deliveries = self._feed.collect(budget_bytes)
        except Refused as refused:
            self._peer.close(str(refused))
            return
        for delivery in deliveries:
            self._peer.send(delivery.data)

    def closed(self, reason: str) -> None:
        if self._feed is not None:
            self._feed.close()


# The plugin.


class FeedConfig(Settings):
    listen: str = setting("127.0.0.1:10930", "where clients connect; port 0 is any free one")
    credit: int = setting(10, "messages that a client gets before it sends MORE", low=0)
    credit_max: int = setting(10_000, "messages that a client may ask for in advance", low=1)
    new_topic_queues: int = setting(1, "queues of a topic that the first FEED creates", low=1, high=64)


class FeedPlugin(Hooks):
    """Serves feeds on the configured port."""

    config_class: ClassVar[type[Settings] | None] = FeedConfig

    def __init__(self, config: FeedConfig) -> None:
        super().__init__(config)
        split_address(config.listen)
        if config.credit > config.credit_max:
            text = (
                f"config key 'feed.credit' is {config.credit}; it must be at most feed.credit_max, {config.credit_max}"
            )
            raise ConfigError(text)

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        def handle(peer: Peer, connection: Connection) -> Handler:
            return FeedHandler(peer, broker, self.config)

        return (Protocol("feed", self.config.listen, lambda now: FeedConnection(), handle),)
