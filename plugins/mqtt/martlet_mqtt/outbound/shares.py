"""Shared subscriptions: ``$share/GROUP/FILTER`` brings each message to one of its subscribers (MQTT 5 section 4.8.2).

Each is a shared group of the core, which knows the holder of each message even after a restart. A message of QoS 1 is
leased: PUBACK settles it, and if the connection ends first, it goes to another subscriber. A message of QoS 2 is handed
over: one atomic group settles it and puts it in flight in the session, so no other subscriber gets it, even if the
session ends [MQTT-4.8.2-5, MQTT-4.8.2-6]. A message of QoS 0 is settled when it is sent.
"""

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final, NamedTuple, final

from martlet.access import Gate
from martlet.contracts import Buffer, Peer, RecordView
from martlet.delivery.fanout import Encoding, parts
from martlet.delivery.routing.selection import Selection, select_tags
from martlet.delivery.subscriptions import Delivery
from martlet.errors import Reason, Refused
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import TAGS
from martlet_mqtt.mapping.frames import Grant, Shape, encode_alone
from martlet_mqtt.mapping.messages import to_deliver
from martlet_mqtt.outbound.selectors import selection_of
from martlet_mqtt.shared.context import PROTOCOL, Context
from martlet_mqtt.wire.names import HIDDEN, SharedFilter, split_shared

__all__ = ["POLICY", "Leased", "SharedSubscriptions", "group_of", "select_names", "share_encoding"]

POLICY: Final = GroupPolicy(PROTOCOL)
TAGS_NAME: Final = TAGS.encode()
# A character of a name, and of one level of a name.
_ANY: Final = r"[^+#\x00-\x1f\x7f-\x9f]"
_ANY_IN_LEVEL: Final = r"[^/+#\x00-\x1f\x7f-\x9f]"
MESSAGES_A_TURN: Final = 256  # messages of QoS 0, which no window limits
# Work for a client in one turn of the event loop, in steps of 10 us: per group, per read, and per message by QoS.
STEPS_A_TURN: Final = 256
STEPS_A_GROUP: Final = 2
STEPS_A_READ: Final = 8
STEPS_OF: Final = 1, 2, 12


class Leased(NamedTuple):
    """A message of QoS 1 that the client holds."""

    member: Member
    queue_id: int
    offset: int


def group_of(shared: SharedFilter) -> str:
    """Return the name of the core's group for *shared*."""
    return f"{shared.group}/{shared.topic_filter}"


def select_names(topic_filter: str) -> Selection:
    """Return the selection of messages whose names match *topic_filter*.

    It rejects nearly all invalid names of other protocols' messages; `share_encoding` rejects the others.
    """
    levels = topic_filter.split("/")
    if topic_filter.startswith(HIDDEN):
        return Selection(f"names {topic_filter}", frozenset(), lambda record: False)
    if not {"+", "#"} & set(levels):
        return select_tags((topic_filter,))
    matches: Callable[[str], re.Match[str] | None] | None = None

    def is_wanted(record: RecordView) -> bool:
        nonlocal matches
        if matches is None:  # compiled late: only messages that come again are tested, and most filters have none
            matches = re.compile(_pattern(levels)).fullmatch
        name = record.property(TAGS_NAME)
        return name is not None and name != "" and matches(name) is not None

    return Selection(f"names {topic_filter}", None, is_wanted)


def _pattern(levels: Sequence[str]) -> str:
    """Return the regular expression for names that match a filter with *levels*."""
    pattern = f"(?!{re.escape(HIDDEN)})" if levels[0] in ("+", "#") else ""
    for index, level in enumerate(levels):
        if level == "#":
            pattern += f"(?:/{_ANY}*)?" if index else f"{_ANY}*"
        else:
            pattern += ("/" if index else "") + (f"{_ANY_IN_LEVEL}*" if level == "+" else re.escape(level))
    return pattern


def share_encoding(shape: Shape, context: Context) -> Encoding:
    """Return the encoding of a group's messages, for members with *shape*.

    The frame of a message is empty if it has expired, has an invalid name, or a body that cannot be decompressed.
    A message is encoded when a member gets it, so its remaining expiry is known.
    """

    def encode(piece: Buffer) -> list[bytes]:
        now_ms, frames, names = context.broker.clock.now_ms(), list[bytes](), context.names
        for _queue_id, _offset, sys_flag, body, properties in parts(piece):
            arrived = to_deliver(sys_flag, body, properties, context.broker.delivered_bytes_max)
            frame = b""
            if arrived is None:
                context.counters.unreadable += 1
            elif arrived.name in names.table or names.learn(arrived.name) is not None:
                frame = encode_alone(arrived, shape, "", now_ms)
            frames.append(frame)
        return frames

    return Encoding(f"shared {shape.keeps_retain:d} {shape.encoding.name}", encode)


@final
class _Waker:
    """Wakes the peer of a client for one of its filters (martlet.delivery.subscriptions.MemberPeer)."""

    __slots__ = ("_peer", "_subscriptions", "_topic_filter")

    def __init__(self, subscriptions: "SharedSubscriptions", peer: Peer, topic_filter: str) -> None:
        self._subscriptions = subscriptions
        self._peer = peer
        self._topic_filter = topic_filter

    def wake(self) -> None:
        self._subscriptions.woken(self._topic_filter)
        self._peer.wake()

    def start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        self._peer.start(work, *args)


@final
class SharedSubscriptions:
    """The shared subscriptions of one client."""

    __slots__ = ("_context", "_denied", "_due", "_gate", "_leased", "_leaving", "_members", "_peer", "_version")

    def __init__(self, peer: Peer, context: Context, gate: Gate, version: int) -> None:
        self._peer = peer
        self._context = context
        self._gate = gate
        self._version = version
        # By filter: the members, one for the group on each topic, and the grant.
        self._members: dict[str, tuple[list[Member], Grant]] = {}
        # The filters whose groups may have something for the client, the next one first.
        self._due: dict[str, None] = {}
        # Messages of QoS 1 that are not acknowledged, by packet identifier.
        self._leased: dict[int, Leased] = {}
        # Members that get no more messages, and leave once their messages are acknowledged [MQTT-3.10.4-3].
        self._leaving: set[Member] = set()
        self._denied: Member | None = None  # a member that may no longer read

    def add(self, grant: Grant, shared: SharedFilter) -> None:
        """Join a group, or change the grant; a refusal changes nothing. Raises `Refused`."""
        previous = self._members.get(grant.subscription.topic_filter)
        try:
            self._join(grant, shared)
        except Refused:
            if previous is None:
                raise
            self.remove(grant.subscription.topic_filter)  # a single member may choose another selector
            self._join_or_restore(grant, shared, previous)
        else:
            self._leave(previous[0] if previous is not None else ())
        self._context.shared_lately.add(group_of(shared))

    def _join_or_restore(self, grant: Grant, shared: SharedFilter, previous: tuple[list[Member], Grant]) -> None:
        """Join the group; if that is refused, join again as *previous*. Raises `Refused`."""
        try:
            self._join(grant, shared)
        except Refused:
            if not any(member.group.gone for member in previous[0]):
                self._join(previous[1], shared)
            raise

    def _join(self, grant: Grant, shared: SharedFilter) -> None:
        """Join the group on each topic. Raises `Refused`."""
        context = self._context
        shape = context.shapes.of(self._version, (grant,))
        encoding = share_encoding(shape, context)
        selection, condition = select_names(shared.topic_filter), None
        if grant.selector:
            chosen = selection_of(context.broker, grant.selector)
            selection, condition = selection.both(chosen), chosen.predicate
        names = MessageSelection(context.feed, shared.topic_filter, condition)
        membership = Membership(lease_s=math.inf, credit=1, selection=selection, names=names)
        context.ensure_topics()
        peer = _Waker(self, self._peer, grant.subscription.topic_filter)
        members: list[Member] = []
        required_topics = context.feed.topics_of(shared.topic_filter)
        try:
            for topic in context.feed.topics:
                with _skip_denied_topic() if topic not in required_topics else nullcontext():
                    members.append(self._gate.join(peer, topic, group_of(shared), encoding, membership, POLICY))
        except Refused:
            self._leave(members)
            raise
        self._members[grant.subscription.topic_filter] = members, grant

    def remove(self, topic_filter: str) -> None:
        """Leave a group once the client has acknowledged the group's messages that it holds."""
        membership = self._members.pop(topic_filter, None)
        self._leave(membership[0] if membership is not None else ())

    def _leave(self, members: Iterable[Member]) -> None:
        for member in members:
            member.credit = 0
            self._leaving.add(member)
        self._leave_settled()

    def leave(self) -> None:
        """Leave all groups, because the client is gone: its leased messages go to other members."""
        joined = [member for members, _ in self._members.values() for member in members]
        self._context.leaving.leave((*joined, *self._leaving))
        self._members, self._due, self._leaving, self._leased = {}, {}, set(), {}

    # acknowledgements

    @property
    def has_leased(self) -> bool:
        """Whether the client holds any leased message, of QoS 1."""
        return bool(self._leased)

    def lease(self, packet_id: int, leased: Leased) -> None:
        """Note that the client holds a message under *packet_id* until `settle`."""
        self._leased[packet_id] = leased

    def settle(self, ids: Iterable[int]) -> list[int]:
        """Settle the leased messages with *ids*; return the ids that belong to no shared subscription."""
        unshared: list[int] = []
        for packet_id in ids:
            leased = self._leased.pop(packet_id, None)
            if leased is None:
                unshared.append(packet_id)
            else:
                leased.member.ack(leased.queue_id, leased.offset)
        if self._leaving:
            self._leave_settled()
        return unshared

    def _leave_settled(self) -> None:
        holding_members = {leased.member for leased in self._leased.values()}
        for member in self._leaving - holding_members:
            self._leaving.discard(member)
            member.leave()

    def _join_again(self, grant: Grant) -> list[Member]:
        """Join the group again, because a topic was deleted with its messages. Raises `Refused`."""
        topic_filter = grant.subscription.topic_filter
        shared = split_shared(topic_filter)
        assert shared is not None
        self.add(grant, shared)
        return self._members[topic_filter][0]

    def woken(self, topic_filter: str) -> None:
        """Note that the group of *topic_filter* may have messages for the client."""
        self._due[topic_filter] = None
        members, _ = self._members.get(topic_filter, ((), None))
        for member in members:
            if member.denied is not None:
                self._denied = member

    def check(self) -> None:
        """Raise `Refused` if a change of the rules has ended a membership; `collect` may not reach that group soon."""
        if self._denied is not None:
            denied, self._denied = self._denied, None
            denied.check()

    def collect(self, budget_bytes: int, room: Callable[[], int]) -> Iterator[tuple[Member, Grant, Delivery]]:
        """Yield deliveries of the groups for this client, while *room* returns more than 0. Raises `Refused`.

        One call handles a limited number of groups and messages, and wakes the peer for the others.
        """
        steps_left, full_filters = STEPS_A_TURN, dict[str, None]()
        allowance = self._gate.allowance
        while self._due and steps_left > 0 and budget_bytes > 0 and not allowance.must_wait:
            topic_filter = next(iter(self._due))
            del self._due[topic_filter]
            members, grant = self._members.get(topic_filter, ([], None))
            if grant is None:
                continue
            if any(member.group.gone for member in members):
                members = self._join_again(grant)
            for member in members:
                steps_left -= STEPS_A_GROUP
                messages_max = room() if grant.subscription.qos else MESSAGES_A_TURN
                member.credit = min(messages_max, max(steps_left // STEPS_OF[grant.subscription.qos], 1))
                if messages_max <= 0:
                    member.pass_on()
                    full_filters[topic_filter] = None
                    continue
                for delivery in member.collect(budget_bytes):
                    steps_left -= STEPS_A_READ + delivery.count * STEPS_OF[grant.subscription.qos]
                    budget_bytes -= len(delivery.data)
                    yield member, grant, delivery
                if member.credit <= 0:
                    self._due[topic_filter] = None  # the group may have more messages
        if self._due:
            self._peer.wake()
        self._due.update(full_filters)  # an acknowledgement makes room, and wakes the peer


@contextmanager
def _skip_denied_topic() -> Iterator[None]:
    """Skip a topic that the client may not read, in which no name should match its filter."""
    try:
        yield
    except Refused as refused:
        if refused.reason is not Reason.NO_PERMISSION:
            raise
