"""Shared subscriptions: ``$share/GROUP/FILTER`` brings each message to one of the clients that use the same words.

The core's shared groups know who holds which message, until when, and how often it was delivered, also after a restart.
A message of QoS 1 that is not acknowledged within its lease, or whose client disconnects, goes to another client. Its
packet id belongs to the connection, and is not stored.
"""

import re
from typing import Final, NamedTuple, final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet.delivery.feed import Feed
from martlet.delivery.routing.selection import Selection, select_tags
from martlet.delivery.subscriptions import Delivery
from martlet.errors import Reason, Refused
from martlet.groups.member import Member
from martlet.groups.membership import Membership
from martlet.groups.queues.finder import MessageSelection
from martlet.groups.strategy.policy import GroupPolicy
from martlet.message import TAGS
from martlet.sessions.session import Session
from martlet.state.journal import Journal
from martlet_topics.codec import ENCODING, IDS_MAX, encode_run
from martlet_topics.config import TopicsConfig

__all__ = ["PacketIds", "SharedFilters", "is_shared", "select_names", "split_shared"]

PREFIX: Final = "$share/"
POLICY: Final = GroupPolicy("topics")
TAGS_NAME: Final = TAGS.encode()


class Leased(NamedTuple):
    """A message that the client holds: whose, and the handle."""

    member: Member
    queue_id: int
    offset: int
    generation: int


def is_shared(topic_filter: str) -> bool:
    """Whether *topic_filter* is for a shared subscription."""
    return topic_filter.startswith(PREFIX)


def split_shared(topic_filter: str) -> tuple[str, str]:
    """Return the group and the filter in it. Raises `Refused` (ILLEGAL)."""
    _, group, inner = topic_filter.split("/", 2) if topic_filter.count("/") > 1 else ("", "", "")
    if not group or not inner or "+" in group or "#" in group:
        raise Refused(Reason.ILLEGAL, f"filter {topic_filter!r} names no group; write $share/GROUP/FILTER")
    return group, inner


def select_names(topic_filter: str) -> Selection:
    """Return the selection of messages whose name *topic_filter* matches."""
    levels = topic_filter.split("/")
    if not {"+", "#"} & set(levels):
        return select_tags((topic_filter,))
    pattern = "(?!\\$)" if levels[0] in ("+", "#") else ""
    for index, level in enumerate(levels):
        if level == "#":
            pattern += "(?:/.*)?" if index else ".*"
        else:
            pattern += ("/" if index else "") + ("[^/]*" if level == "+" else re.escape(level))
    matches = re.compile(pattern, re.DOTALL).fullmatch
    return Selection(
        f"names {topic_filter}", None, lambda record: matches(record.property(TAGS_NAME) or "") is not None
    )


@final
class PacketIds:
    """The packet ids of one connection: those in flight of its session, and those of messages that it leases."""

    __slots__ = ("_next", "_session", "leased")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next = session.next_id
        self.leased: dict[int, Leased] = {}

    def take(self, count: int) -> tuple[int, int]:
        """Return the next free packet id, and how many from there on are free, up to *count*; they are used next."""
        first = self._next
        while not self._is_free(first):
            first = first % IDS_MAX + 1
        last = first + 1
        while last < first + count and self._is_free(last):
            last += 1
        self._next = last
        return first, last - first

    def _is_free(self, packet_id: int) -> bool:
        return packet_id <= IDS_MAX and packet_id not in self._session.flight and packet_id not in self.leased


@final
class SharedFilters:
    """The shared subscriptions of one client."""

    __slots__ = ("_config", "_feed", "_gate", "_ids", "_members", "_peer")

    def __init__(self, peer: Peer, gate: Gate, config: TopicsConfig, feed: Feed, ids: PacketIds) -> None:
        self._peer = peer
        self._feed = feed
        self._gate = gate
        self._config = config
        self._ids = ids
        self._members: dict[str, tuple[Member, int]] = {}

    def add(self, topic_filter: str, qos: int) -> None:
        """Take part in a group. Raises `Refused`."""
        before = self._members.get(topic_filter)
        if before is not None:
            self._members[topic_filter] = before[0], qos
            return
        group, inner = split_shared(topic_filter)
        limit = IDS_MAX // self._config.window - 1  # a window for the session, one for each group
        if len(self._members) >= limit:
            raise Refused(Reason.BUSY, f"the client has {limit} shared filters; there are no packet ids for more")
        config, names = self._config, MessageSelection(self._feed, inner)
        membership = Membership(
            lease_s=config.lease_s, credit=config.window, selection=select_names(inner), names=names
        )
        member = self._gate.join(self._peer, config.topic, f"{group}/{inner}", ENCODING, membership, POLICY)
        self._members[topic_filter] = member, qos

    def remove(self, topic_filter: str) -> None:
        """Leave a group; what the client holds of it goes to others."""
        found = self._members.pop(topic_filter, None)
        if found is not None:
            member = found[0]
            for packet_id in [each for each, leased in self._ids.leased.items() if leased.member is member]:
                del self._ids.leased[packet_id]
            member.leave()

    def leave(self) -> None:
        """The client is gone."""
        for topic_filter in list(self._members):
            self.remove(topic_filter)

    def touch(self) -> None:
        """Note that the client is alive: what it holds is not given to others yet."""
        for member, _ in self._members.values():
            member.touch()

    def collect(self, budget_bytes: int) -> int:
        """Send what the groups have for this client; return how many messages that were. Raises `Refused`."""
        count = 0
        for member, qos in list(self._members.values()):
            if member.group.gone:
                raise Refused(Reason.NO_TOPIC, f"topic[{self._config.topic}] is gone or may not be read any more")
            for delivery in member.collect(budget_bytes):
                count += delivery.count
                self._deliver(member, delivery, qos)
        return count

    def _deliver(self, member: Member, delivery: Delivery, qos: int) -> None:
        data, ends, offsets = bytes(delivery.data), delivery.ends, delivery.offsets
        again, at = delivery.delivery > 1, 0
        if not qos:
            self._peer.send(encode_run(0, delivery.count, len(data), again=again), data)
            for offset in offsets:
                member.ack(delivery.queue_id, offset)
            return
        while at < delivery.count:
            first, count = self._ids.take(delivery.count - at)
            for place in range(count):
                leased = Leased(member, delivery.queue_id, offsets[at + place], delivery.generation)
                self._ids.leased[first + place] = leased
            part = data[ends[at - 1] if at else 0 : ends[at + count - 1]]
            self._peer.send(encode_run(first, count, len(part), again=again), part)
            at += count

    def acknowledge(self, first_id: int, count: int) -> int:
        """Settle messages of these packet ids; return how many there are."""
        found = [self._ids.leased.pop(each) for each in self._among(first_id, count)]
        for member, queue_id, offset, _ in found:
            member.ack(queue_id, offset)
        return len(found)

    def acknowledgements(self, first_id: int, count: int) -> list[tuple[Journal, bytes]]:
        """Return the acknowledgements of these packet ids for an atomic group; none if they are not leased.

        Call `settle` if it was stored, else `withdraw`. Raises `Refused`.
        """
        packet_ids = self._among(first_id, count)
        if packet_ids and len(packet_ids) < count:
            raise Refused(Reason.NOT_FOUND, "only some of the packet ids are of shared subscriptions; send two TX")
        notes: list[tuple[Journal, bytes]] = []
        for packet_id in packet_ids:
            member, queue_id, offset, generation = self._ids.leased[packet_id]
            try:
                notes.append(member.group.acknowledgement(queue_id, offset, generation))
            except Refused:
                self.withdraw(first_id, len(notes))
                raise
        return notes

    def settle(self, first_id: int, count: int) -> None:
        for packet_id in self._among(first_id, count):
            del self._ids.leased[packet_id]

    def withdraw(self, first_id: int, count: int) -> None:
        """The atomic group was refused."""
        for packet_id in self._among(first_id, count):
            member, queue_id, offset, _ = self._ids.leased[packet_id]
            member.group.withdraw(queue_id, offset)

    def _among(self, first_id: int, count: int) -> list[int]:
        return [each for each in range(first_id, first_id + count) if each in self._ids.leased]
