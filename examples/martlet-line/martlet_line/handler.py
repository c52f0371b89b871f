"""Executes the commands of a client.

Each subscription of a connection is a `_Feed`, by the number in the answer to SUB. A plain
one has a core `TopicSubscription`; a durable one also has a `Session`, which stores the cursors
that ACK moves; one of a group has a `Member` of a core `SharedGroup`.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, final

from martlet.access import Gate
from martlet.contracts import Action, Buffer, Identity, LoginOrigin, Password, Peer
from martlet.delivery.fanout import Encoding
from martlet.delivery.routing.selection import Selection, select_tags
from martlet.delivery.subscriptions import (
    Delivery,
    Start,
    TopicSubscription,
    from_earliest,
    from_offset,
    from_tail,
)
from martlet.errors import NotReady, Reason, Refused
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.message import Message, Placed
from martlet.runtime.clock import Clock
from martlet.runtime.steps import Steps, resume
from martlet.sessions.session import Session
from martlet.tables.topics import DLQ_PREFIX, RETRY_PREFIX, Topic, is_reserved
from martlet_line.codec import HELP, encode_error, frames
from martlet_line.config import LineConfig
from martlet_line.connection import Event
from martlet_line.cursors import Cursors
from martlet_line.packets import (
    Ack,
    Credit,
    Extend,
    Help,
    Idle,
    Login,
    Malformed,
    Nack,
    Ping,
    Pong,
    Publish,
    Quit,
    Subscribe,
    Unsubscribe,
)

__all__ = ["BrokerParts", "Counters", "LineHandler"]

PROTOCOL: Final = "line"
ENCODING: Final = Encoding("line", frames)
TOPICS_REMEMBERED: Final = 1000


@final
@dataclass(slots=True)
class Counters:
    """Counters of all connections since startup; ``subscriptions`` are those that are open."""

    published: int = 0
    publishes_refused: int = 0
    delivered: int = 0
    subscriptions: int = 0
    errors: int = 0


@dataclass(frozen=True, slots=True)
class BrokerParts:
    """The parts of the broker that a handler uses."""

    config: LineConfig
    counters: Counters
    clock: Clock
    authenticate: Callable[[Password, LoginOrigin], Awaitable[Identity]]
    gate: Callable[[Identity, LoginOrigin, Peer], Gate]
    selection: Callable[[str, str], Selection]
    finish: Callable[[Steps[None]], Awaitable[None]]
    choose: Callable[[int], int]


@final
@dataclass(slots=True)
class _Feed:
    """One subscription of this connection; a durable one has a *session*."""

    topic: str
    group: str  # empty for a subscription without a group
    source: TopicSubscription | Member
    session: Session | None = None
    cursors: Cursors | None = None

    @property
    def gone(self) -> bool:
        """Whether the topic was deleted or closed to readers."""
        return self.source.gone if isinstance(self.source, TopicSubscription) else self.source.group.gone


@final
class LineHandler:
    """Acts on the commands of one connection (martlet.contracts.Handler)."""

    __slots__ = ("_feeds", "_last_id", "_own_gate", "_parts", "_peer", "_queues", "_sessions", "_turn")

    def __init__(self, peer: Peer, parts: BrokerParts) -> None:
        self._peer = peer
        self._parts = parts
        self._feeds: dict[int, _Feed] = {}
        self._last_id = 0
        self._turn = 0
        self._sessions: dict[str, Session] = {}
        # A publisher's messages stay in order: its messages of one topic go to one queue.
        self._queues: dict[str, int] = {}
        self._own_gate: Gate | None = None

    @property
    def _gate(self) -> Gate:
        """The gate for the client's identity, which is known after the TLS handshake or after LOGIN."""
        if self._own_gate is None:
            self._own_gate = self._parts.gate(self._peer.identity, self._peer.login_origin(), self._peer)
        return self._own_gate

    def handle(self, event: Event) -> Awaitable[None] | None:
        try:
            match event:
                case Login():
                    return self._login(event)
                case Publish():
                    self._publish(event)
                case Ack():
                    self._ack(event)
                case Credit():
                    self._credit(event)
                case Subscribe():
                    return self._subscribe(event)
                case Nack() | Extend() | Unsubscribe():
                    self._settle_otherwise(event)
                case Malformed(text):
                    self._parts.counters.errors += 1
                    self._peer.send(encode_error("SYNTAX", text))
                case _:
                    self._chat(event)
        except Refused as refused:
            self._parts.counters.errors += 1
            self._peer.send(_error(refused))
        return None

    def _login(self, packet: Login) -> Awaitable[None]:
        if self._feeds:
            raise Refused(Reason.ILLEGAL, "LOGIN must come before SUB; end the subscriptions with UNSUB first")
        return self._authenticate(Password(packet.user, packet.password))

    async def _authenticate(self, password: Password) -> None:
        """Take the identity that *password* proves. A failed login closes the connection: each guess costs one."""
        try:
            identity = await self._parts.authenticate(password, self._peer.login_origin())
        except Refused as refused:
            self._parts.counters.errors += 1
            self._peer.send(_error(refused))
            self._peer.close("its login was refused")
            return
        self._peer.identity = identity
        self._own_gate = None
        self._peer.send(f"OK {identity.name}".rstrip().encode() + b"\n")

    def refuse(self, answer: Buffer, refused: Refused) -> bytes:
        return _error(refused) * bytes(answer).count(b"\n")

    def collect(self, budget_bytes: int) -> None:
        """Send messages of the subscriptions; those without room in the budget are woken again."""
        feeds = list(self._feeds.items())
        self._turn = (self._turn + 1) % (len(feeds) or 1)
        for number, feed in feeds[self._turn :] + feeds[: self._turn]:
            if feed.gone:
                self._end(number, self._end_of(feed.topic))
            elif budget_bytes <= 0:
                self._peer.wake()
                return
            else:
                budget_bytes -= self._deliver(number, feed, budget_bytes)

    def _end_of(self, topic: str) -> str:
        try:
            there = self._gate.queries.topic(topic).get() is not None
        except Refused as refused:
            return str(refused)
        return f"topic[{topic}] may not be read any more" if there else "the topic was deleted"

    def _deliver(self, number: int, feed: _Feed, budget_bytes: int) -> int:
        """Send messages of *feed*, return their bytes; end it if its filter fails or reading is no longer allowed."""
        try:
            deliveries = feed.source.collect(budget_bytes)
        except Refused as refused:
            self._end(number, str(refused))
            return 0
        for delivery in deliveries:
            self._peer.send(_batch_line(number, delivery), delivery.data)
            self._parts.counters.delivered += delivery.count
        return sum(delivery.size for delivery in deliveries)

    def closed(self, reason: str) -> None:
        for number in list(self._feeds):
            self._drop(number)

    # publishing

    def _publish(self, packet: Publish) -> None:
        parts, peer = self._parts, self._peer
        topic = self._topic(packet.topic, "publish")
        queue_id = self._queues.get(packet.topic, -1)
        if not 0 <= queue_id < topic.write_queues:
            queue_id = self._choose_queue(topic)
        now, host = parts.clock.now_ms(), peer.host
        messages = [
            Message(packet.topic, body, properties, queue_id, 0, 0, now, host)
            for body, properties in zip(packet.bodies, packet.properties, strict=True)
        ]
        results = self._gate.publish_all(messages).outcomes()
        ends = [result.end for result in results if isinstance(result, Placed)]
        if ends:
            peer.hold_until(ends[-1])
        peer.send(b"".join(map(_result, results)))
        parts.counters.published += len(ends)
        parts.counters.publishes_refused += len(results) - len(ends)

    def _choose_queue(self, topic: Topic) -> int:
        if len(self._queues) >= TOPICS_REMEMBERED:
            self._queues.clear()
        queue_id = self._parts.choose(topic.write_queues) if topic.write_queues else 0
        self._queues[topic.name] = queue_id
        return queue_id

    def _topic(self, name: str, action: Action) -> Topic:
        """Return topic *name*, created if that is allowed. Raises `Refused`."""
        if action == "publish" and name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            raise Refused(Reason.NO_PERMISSION, f"topic[{name}]: publish is for the broker itself; take another topic")
        topic = self._gate.find_topic(name, action, self._parts.config.new_topic_queues)
        if topic is None:
            text = f"topic[{name}] does not exist; "
            own = "only the broker creates it" if is_reserved(name) else "create it, or set broker.auto_create_topics"
            raise Refused(Reason.NO_TOPIC, text + own)
        return topic

    # subscribing

    def _subscribe(self, packet: Subscribe) -> Awaitable[None] | None:
        parts = self._parts
        limit = parts.config.subscriptions_max
        if len(self._feeds) >= limit:
            raise Refused(Reason.BUSY, f"{limit} subscriptions of this connection; line.subscriptions_max is {limit}")
        topic = self._topic(packet.topic, "subscribe")
        credit = parts.config.credit_default if packet.credit < 0 else packet.credit
        self._check_credit(credit)
        if packet.name and not packet.group:
            return self._begin(self._open_durable(packet, topic, credit))
        source = self._join(packet, credit) if packet.group else self._open(packet, _start(packet), credit)
        self._add(_Feed(packet.topic, packet.group, source))
        return None

    def _add(self, feed: _Feed) -> None:
        self._last_id += 1
        self._feeds[self._last_id] = feed
        self._parts.counters.subscriptions += 1
        self._peer.send(b"OK %d\n" % self._last_id)

    def _begin(self, steps: Steps[None]) -> Awaitable[None] | None:
        """Run the first slice, which usually completes the command; return an awaitable that runs the rest."""
        try:
            steps = resume(next(steps), steps)
        except StopIteration:
            return None
        except NotReady as error:
            self._refuse_not_ready(error)
            return None
        return self._finish(steps)

    async def _finish(self, steps: Steps[None]) -> None:
        try:
            await self._parts.finish(steps)
        except NotReady as error:
            self._refuse_not_ready(error)
        except Refused as refused:
            self._parts.counters.errors += 1
            self._peer.send(_error(refused))

    def _refuse_not_ready(self, error: NotReady) -> None:
        self._parts.counters.errors += 1
        self._peer.send(encode_error(Reason.BUSY.name, str(error)))

    def _open(self, packet: Subscribe, start: Start, credit: int) -> TopicSubscription:
        return self._gate.subscribe(
            self._peer, packet.topic, ENCODING, selection=self._selection(packet), start=start, credit=credit
        )

    def _open_durable(self, packet: Subscribe, topic: Topic, credit: int) -> Steps[None]:
        """Continue at the cursors of the name's session, taking it over from the connection that has it."""
        name = packet.name
        session = self._attach(name)
        try:
            if any(feed.session is session and feed.topic == topic.name for feed in self._feeds.values()):
                raise Refused(
                    Reason.ILLEGAL, f"{name!r} is already subscribed to topic[{topic.name}] on this connection"
                )
            cursors = Cursors(session.filters.get(topic.name, b""))
            # A queue that was added in the meantime is read from its beginning.
            otherwise = from_earliest if topic.name in session.filters else _start(packet)
            figures = self._gate.queries.topic(topic.name)
            yield from cursors.check(figures)
            if self._sessions.get(name) is not session:
                raise Refused(Reason.BUSY, f"another connection took {name!r} over; subscribe again to take it back")
            source = self._open(packet, cursors.start(otherwise, figures), credit)
            try:
                session.subscribe(topic.name, cursors.pack())
            except Refused:
                source.close()
                raise
            self._peer.hold_until(session.until)
            self._add(_Feed(topic.name, "", source, session, cursors))
        finally:
            self._detach_unused(name)

    def _attach(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:

            def lost(reason: str) -> None:
                self._lose(name, reason)

            expiry_s = self._parts.config.session_expiry_s
            session, _ = self._gate.open_session(PROTOCOL, name, 0, lost, expiry_s=expiry_s)
            self._sessions[name] = session
        return session

    def _detach_unused(self, name: str) -> None:
        """Leave the session if no subscription of this connection uses it; end it if it has no filters either."""
        session = self._sessions.get(name)
        if session is not None and not any(feed.session is session for feed in self._feeds.values()):
            del self._sessions[name]
            if session.filters:
                session.leave()
            else:
                session.end()

    def _lose(self, name: str, reason: str) -> None:
        """End the subscriptions of session *name*, which this connection lost."""
        session = self._sessions.pop(name)
        for number in [number for number, feed in self._feeds.items() if feed.session is session]:
            self._end(number, reason)

    def _join(self, packet: Subscribe, credit: int) -> Member:
        config = self._parts.config
        lease_s = config.lease_default_s if packet.lease_s < 0 else packet.lease_s
        if not 1 <= lease_s <= config.lease_max_s:
            text = f"a lease of {lease_s} s is out of range; it is 1 to {config.lease_max_s} (line.lease_max_s)"
            raise Refused(Reason.PARAMETER, text)
        membership = Membership(lease_s=lease_s, credit=credit, selection=self._selection(packet), start=_start(packet))
        return self._gate.join(self._peer, packet.topic, packet.group, ENCODING, membership)

    def _selection(self, packet: Subscribe) -> Selection:
        """Return the selection by the tags and the expression of *packet*. Raises `Refused`."""
        tagged = select_tags(packet.tags)
        if not packet.language:
            return tagged
        return tagged.both(self._parts.selection(packet.language, packet.expression))

    def _credit(self, packet: Credit) -> None:
        source = self._feed(packet.id).source
        self._check_credit(source.credit + packet.count)
        source.add_credit(packet.count)

    def _check_credit(self, credit: int) -> None:
        limit = self._parts.config.credit_max
        if credit > limit:
            raise Refused(Reason.PARAMETER, f"credit would be {credit}; line.credit_max is {limit}")

    def _feed(self, number: int) -> _Feed:
        feed = self._feeds.get(number)
        if feed is None:
            raise Refused(Reason.NOT_FOUND, f"subscription {number} does not exist; SUB answers with its number")
        return feed

    # settling

    def _ack(self, packet: Ack) -> None:
        feed = self._feed(packet.id)
        source = feed.source
        if isinstance(source, TopicSubscription):
            self._commit(feed, source, packet)
            return
        limit = self._parts.config.ack_range_max
        if packet.last - packet.offset >= limit:
            raise Refused(Reason.PARAMETER, f"more than {limit} messages; line.ack_range_max is {limit}")
        for offset in range(packet.offset, packet.last + 1):
            if not source.ack(packet.queue_id, offset):
                self._peer.send(_not_held(packet.id, packet.queue_id, offset))

    def _commit(self, feed: _Feed, source: TopicSubscription, packet: Ack) -> None:
        if feed.session is None or feed.cursors is None:
            raise Refused(
                Reason.ILLEGAL, f"subscription {packet.id} is neither durable nor of a group; there is nothing to ACK"
            )
        if packet.last >= source.cursor(packet.queue_id):
            text = f"message {packet.last} of queue {packet.queue_id} was not sent; ACK only messages that were"
            raise Refused(Reason.PARAMETER, text)
        if feed.cursors.move(packet.queue_id, packet.last + 1, self._gate.queries.topic(feed.topic).readable):
            feed.session.subscribe(feed.topic, feed.cursors.pack())

    def _settle_otherwise(self, packet: Nack | Extend | Unsubscribe) -> None:
        feed = self._feed(packet.id)
        if isinstance(packet, Unsubscribe):
            self._unsubscribe(packet, feed)
            return
        member = feed.source
        if isinstance(member, TopicSubscription):
            raise Refused(Reason.ILLEGAL, f"subscription {packet.id} is not of a group; it holds no leases")
        if isinstance(packet, Nack):
            limit = self._parts.config.nack_delay_max_ms
            if packet.delay_ms > limit:
                raise Refused(Reason.PARAMETER, f"delay {packet.delay_ms} ms; line.nack_delay_max_ms is {limit}")
            held = member.nack(packet.queue_id, packet.offset, packet.delay_ms / 1000)
        else:
            held = member.extend(packet.queue_id, packet.offset)
        if not held:
            self._peer.send(_not_held(packet.id, packet.queue_id, packet.offset))

    def _unsubscribe(self, packet: Unsubscribe, feed: _Feed) -> None:
        if packet.forget and feed.session is None:
            raise Refused(Reason.ILLEGAL, f"subscription {packet.id} is not durable; there is nothing to forget")
        if packet.forget and feed.session is not None:
            feed.session.unsubscribe(feed.topic)
            self._peer.hold_until(feed.session.until)
        self._drop(packet.id)
        self._peer.send(b"OK %d\n" % packet.id)

    def _end(self, number: int, reason: str) -> None:
        """Tell the client that a subscription has ended."""
        if number in self._feeds:
            self._drop(number)
            self._peer.send(f"END {number} {reason}\n".encode())
            self._peer.wake()

    def _drop(self, number: int) -> None:
        feed = self._feeds.pop(number)
        self._parts.counters.subscriptions -= 1
        if isinstance(feed.source, TopicSubscription):
            feed.source.close()
        else:
            feed.source.leave()
        if feed.session is not None:
            self._detach_unused(feed.session.name)

    # the rest

    def _chat(self, event: Ping | Pong | Help | Quit | Idle) -> None:
        match event:
            case Ping(text):
                self._peer.send(b"PONG %b\n" % text.encode() if text else b"PONG\n")
            case Idle():
                self._peer.send(b"PING\n")
            case Help():
                self._peer.send(b"".join(b"INFO %b\n" % line.encode() for line in HELP))
            case Quit():
                self._peer.send(b"BYE\n")
                self._peer.close("")
            case Pong():
                return


def _start(packet: Subscribe) -> Start:
    if packet.start == "tail":
        return from_tail
    return from_earliest if packet.start == "earliest" else from_offset(packet.start)


def _batch_line(number: int, delivery: Delivery) -> bytes:
    size = delivery.size
    if delivery.delivery > 1:
        return b"BATCH %d %d %d delivery=%d\n" % (number, delivery.count, size, delivery.delivery)
    return b"BATCH %d %d %d\n" % (number, delivery.count, size)


def _result(result: Placed | Refused) -> bytes:
    if isinstance(result, Refused):
        return _error(result)
    return b"OK %d %d\n" % (result.queue_id, result.queue_offset)


def _error(refused: Refused) -> bytes:
    return encode_error(refused.reason.name, str(refused))


def _not_held(number: int, queue_id: int, offset: int) -> bytes:
    text = f"subscription {number} does not hold message {offset} of queue {queue_id}; its lease may have ended"
    return encode_error("NOT_HELD", text)
