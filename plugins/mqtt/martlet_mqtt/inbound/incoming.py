"""Messages from one client: from PUBLISH packets to the log, and their acknowledgements (MQTT 5 section 4.3).

PUBACK and PUBREC leave once the message is durable. A message of QoS 0 needs no flush, unless it is retained. The
identifier of a QoS 2 message is stored in one atomic group with the message, so a crash keeps both or none, and a
PUBLISH that is sent again is stored once.
"""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Final, final

from msgspec.structs import replace

from martlet.access import Gate
from martlet.contracts import Buffer, Peer
from martlet.errors import MartletError, Reason, Refused
from martlet.net.complaints import Refusals
from martlet.runtime.native import native
from martlet.sessions.session import JointChanges, Session
from martlet.state.journal import NEXT_COMMIT
from martlet.store import Queue
from martlet.store.append.items import AppendItem, AppendResult
from martlet_mqtt.admin.control import PREFIX as REQUESTS
from martlet_mqtt.mapping.bridges import is_state, state_name
from martlet_mqtt.mapping.frames import LARGE_BYTES, encoding_of
from martlet_mqtt.mapping.items import run_items
from martlet_mqtt.mapping.requests import REPLIES
from martlet_mqtt.outbound.flight import INCOMING, ranges_of
from martlet_mqtt.shared.context import Context
from martlet_mqtt.shared.replies import name_of_reply, send_reply
from martlet_mqtt.shared.round_runs import Part
from martlet_mqtt.shared.storing import queue_count, store
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.codes import V5, PacketType, ReasonCode
from martlet_mqtt.wire.connection import PACKET_KEYS, MqttConnection, State
from martlet_mqtt.wire.errors import MqttError, NotAccepted, reason_of
from martlet_mqtt.wire.names import Name
from martlet_mqtt.wire.packets import Ack, Connect, Publish
from martlet_mqtt.wire.properties import Property
from martlet_mqtt.wire.scanner import PUBCOMP, PublishRun, acks_of, ids_of

__all__ = ["Incoming", "replaced"]

_ANSWERS: Final = {1: b"\x40\x02", 2: b"\x50\x02"}
_KINDS: Final = {1: PacketType.PUBACK, 2: PacketType.PUBREC}
_SHOWN: Final = 80
# Names of the encodings in which subscribers get a PUBLISH unchanged; by whether it has properties, and by its QoS.
_SAME: Final = {
    (has_properties, qos): tuple(encoding_of(has_properties, each).name for each in range(qos, 3))
    for has_properties in (False, True)
    for qos in range(3)
}


@final
class Incoming:
    """Stores the messages that one client publishes."""

    __slots__ = (
        "_aliases",
        "_client_id",
        "_connection",
        "_context",
        "_gate",
        "_is_closing",
        "_open",
        "_peer",
        "_receive_max",
        "_refusals",
        "_session",
        "_version",
        "_waits",
        "marks",
    )

    def __init__(
        self,
        peer: Peer,
        connection: MqttConnection,
        context: Context,
        gate: Gate,
        session: Session,
        connect: Connect,
    ) -> None:
        self._peer = peer
        self._connection = connection
        self._context = context
        self._gate = gate
        self._session = session
        self._version = connect.version
        self._client_id = connect.client_id
        # The last name of each topic alias; an error text if that name was refused.
        self._aliases: dict[int, Name | str] = {}
        # True after the refusal of a message that the client must send again on its next connection. Until then, no
        # later message is stored.
        self._is_closing = False
        self._refusals: Refusals | None = None  # made at its first use
        # Number of QoS 2 messages not released yet.
        self._open = sum(1 for number in session.flight if number & INCOMING)
        self._receive_max = context.config.receive_max if connect.version == V5 else 65_535
        # Whether to mark messages with the client identifier, because a subscription of the client has no local.
        self.marks = False
        self._waits = False  # whether a run waits in `RoundPublishes`

    # single PUBLISH packets

    def publish(self, packet: Publish) -> None:
        """Store the message of *packet*, and acknowledge it.

        Raises:
          MqttError: the packet breaks the protocol.
        """
        context = self._context
        context.counters.received += 1
        if packet.properties.identifiers:
            raise MqttError("PUBLISH has a subscription identifier, which only brokers send")
        try:
            name = self._name_of(packet)
            if self._is_repeated(packet):
                return
            if is_state(name.text):
                bridges, client_id = context.bridges, self._client_id
                bridges.publish(self._gate, client_id, name.text, packet.payload, retain=packet.retain)
                self._acknowledge_new(packet)
                return
            is_reply = name.text.startswith(REPLIES)
            end = self._reply(packet, name) if is_reply else self._store(packet, name)
        except (NotAccepted, Refused) as error:
            self._refuse(packet, error)
        else:
            context.counters.stored += 1
            if packet.qos:
                self._peer.hold_until(end)
                self._answer(packet, ReasonCode.SUCCESS if end else ReasonCode.NO_MATCHING_SUBSCRIBERS, "")

    def _is_repeated(self, packet: Publish) -> bool:
        """Acknowledge *packet* and return True if it repeats a QoS 2 message, stored before or in this round."""
        if packet.qos != 2 or INCOMING + packet.packet_id not in self._session.flight:
            return False
        self._peer.hold_until(NEXT_COMMIT)
        self._answer(packet, ReasonCode.SUCCESS, "")
        return True

    def _reply(self, packet: Publish, name: Name) -> int:
        """Send a reply to the waiting client; return as `_store`, but 0 if no client waits. Raises as `_store`."""
        self._check_open_count(packet.qos == 2)
        end = send_reply(self._context, self._gate, packet, name, self._peer.host)
        if packet.qos == 2:
            self._session.hold(INCOMING + packet.packet_id)
            self._open += 1
            return max(end, self._session.until) if end else 0
        return end

    def request_in(self, packet: Publish) -> Publish | None:
        """Return *packet*, its topic alias resolved, if it is an administrator's request; None if it is not.

        Raises:
          MqttError: the topic alias is too large.
        """
        is_request = packet.topic.startswith(REQUESTS)
        if packet.topic:
            if not is_request or len(packet.topic.encode()) > self._context.config.name_bytes_max:
                return None
            if alias := self._alias_of(packet):
                self._aliases[alias] = Name.of(packet.topic, "")
            return packet
        name = self._aliases.get(self._alias_of(packet))
        if not isinstance(name, Name) or not name.text.startswith(REQUESTS):
            return None
        return replace(packet, topic=name.text)

    def _alias_of(self, packet: Publish) -> int:
        """Return the topic alias of *packet*, 0 for none. Raises `MqttError` if it is too large."""
        alias = packet.properties.number(Property.TOPIC_ALIAS, 0)
        if alias > self._context.config.alias_max:
            text = f"topic alias {alias} is too large; mqtt.alias_max is {self._context.config.alias_max}"
            raise MqttError(text, ReasonCode.TOPIC_ALIAS_INVALID)
        return alias

    def _name_of(self, packet: Publish) -> Name:
        """Return the topic name of *packet*, or of its topic alias (MQTT 5 section 3.3.2.3.4).

        A refused packet sets its alias, too, because the client continues to use the alias.
        """
        alias = self._alias_of(packet)
        if packet.topic:
            if not alias:
                return self._find(packet.topic)
            try:
                name = self._find(packet.topic)
            except NotAccepted as error:
                self._aliases[alias] = str(error)
                raise
            self._aliases[alias] = name
            return name
        name_or_error = self._aliases.get(alias)
        if name_or_error is None:
            problem = f"topic alias {alias} is not known" if alias else "the topic name is empty"
            raise MqttError(f"{problem}; send the topic name", ReasonCode.PROTOCOL_ERROR)
        if isinstance(name_or_error, str):
            raise NotAccepted(name_or_error, ReasonCode.TOPIC_NAME_INVALID)
        return name_or_error

    def _find(self, topic: str) -> Name:
        """Return the `Name` of *topic*. Raises `MqttError`; after a `NotAccepted` the connection stays open."""
        if topic.startswith(REPLIES):
            return name_of_reply(topic, self._context.config.name_bytes_max)
        if is_state(topic):
            return Name.of(state_name(topic, self._context.config.name_bytes_max), "")
        return self._context.names.find(topic)

    def _store(self, packet: Publish, name: Name) -> int:
        """Store *packet*; return the log position for `Peer.hold_until`. Raises `Refused` and `MqttError`."""
        changes = None
        if packet.qos == 2:
            self._check_open_count(1)
            changes = self._session.changes()
            changes.hold(INCOMING + packet.packet_id)
        context, gate, host = self._context, self._gate, self._peer.host
        client_id = self._client_id if self.marks or packet.retain else ""
        try:
            end = store(context, gate, packet, name, host, client_id, changes)
        except Refused as refused:
            if not packet.retain or refused.reason is not Reason.BUSY or (packet.qos and self._version == V5):
                raise
            # MQTT 3 and QoS 0 have no answer for this error. There may never be room for another retained message, but
            # current subscribers can get it.
            self.complain("did not retain a message", str(refused))
            context.counters.unretained += 1
            end = store(context, gate, replace(packet, retain=False), name, host, client_id, changes)
        self._open += packet.qos == 2
        if not packet.qos and not packet.retain:
            gate.note_unawaited(name.topic, 1, end)
        return end

    def _check_open_count(self, count: int) -> None:
        if self._open + count > self._receive_max:
            key = "mqtt.receive_max" if self._version == V5 else "the limit of MQTT 3"
            text = f"more than {self._receive_max} messages of QoS 2 are not released; {key} is that"
            raise MqttError(text, ReasonCode.RECEIVE_MAXIMUM_EXCEEDED)

    def refuse_large(self, packet: Publish, size: int) -> None:
        """Acknowledge *packet* of an MQTT 3 client, whose payload was skipped because the packet has *size* bytes.

        Without an acknowledgement the client would send it again and again.

        Raises:
          MqttError: the packet breaks the protocol.
        """
        context = self._context
        context.counters.received += 1
        try:
            self._name_of(packet)
        except NotAccepted as error:
            self._refuse(packet, error)
            return
        if not self._is_repeated(packet):
            text = f"a packet has {size} bytes; at most {context.packet_bytes_max} are accepted ({PACKET_KEYS})"
            self._refuse(packet, NotAccepted(text, ReasonCode.PACKET_TOO_LARGE))

    def _refuse(self, packet: Publish, error: NotAccepted | Refused) -> None:
        """Answer *packet* with *error*, which clients of MQTT 3 cannot be told.

        A client of MQTT 3 is disconnected if the message can succeed later: it connects again and sends it again.
        Otherwise the message is acknowledged, because it would come again for ever, and nothing after it.
        """
        text = str(error)
        self._context.counters.refused += 1
        if self._connection.state is State.ENDED:
            return  # the session was lost, and the client got its last packet
        may_succeed_later = isinstance(error, Refused) and error.reason in (Reason.UNAVAILABLE, Reason.QUOTA)
        if packet.qos and self._version != V5 and may_succeed_later:
            self._is_closing = True
            values = self._session.owner, self._peer.address, text
            self._context.complaints.warn("disconnected a client of user %r at %s; %s", *values)
            self._peer.close(text)
            return
        self.complain("dropped a message" if not packet.qos or self._version != V5 else "refused a message", text)
        if packet.qos:
            self._answer(packet, reason_of(error), text)

    def complain(self, what: str, why: str) -> None:
        """Log *what* the broker did with a packet of the client, and *why*."""
        if self._refusals is None:
            self._refusals = Refusals(self._context.complaints)
        user = self._session.owner[:_SHOWN]
        self._refusals.warn(what, f"client {self._client_id[:_SHOWN]!r} of user {user!r} at {self._peer.address}", why)

    def acknowledge(self, packet: Publish) -> bool:
        """Acknowledge *packet* without storing it; return False if it repeats an earlier packet.

        Raises:
          Refused: the store accepts nothing at the moment.
          MqttError: the client has too many unreleased QoS 2 messages.
        """
        if self._is_repeated(packet):
            return False
        self._acknowledge_new(packet)
        return True

    def _acknowledge_new(self, packet: Publish) -> None:
        """Acknowledge *packet*, which repeats no other, without storing it. Raises as `acknowledge`."""
        if packet.qos == 2:
            self._check_open_count(1)
            self._session.hold(INCOMING + packet.packet_id)
            self._open += 1
            self._peer.hold_until(self._session.until)
        if packet.qos:
            self._answer(packet, ReasonCode.SUCCESS, "")

    def _answer(self, packet: Publish, reason: ReasonCode, text: str) -> None:
        """Acknowledge *packet* with *reason* and *text*; MQTT 3 can only acknowledge success [MQTT-3.3.5-2]."""
        self._context.counters.answers += 1
        if self._version != V5 or not reason:
            self._peer.send(_ANSWERS[packet.qos] + packet.packet_id.to_bytes(2))
            return
        connection = self._connection
        answer = Ack(_KINDS[packet.qos], packet.packet_id, reason)
        self._peer.send(connection.explained(answer, text if connection.explains else ""))

    # runs

    def publish_run(self, run: PublishRun) -> None:
        """Store the messages of *run*, and acknowledge them; those of QoS 0 and 1 at the end of the round.

        Raises `MqttError`.
        """
        context, qos = self._context, run.qos
        context.counters.received += len(run.ends)
        publishes = context.broker.round_publishes
        if self._waits or qos == 2:
            publishes.finish()
            if self._is_closing:
                return
        queues = self._queues_of(run.names)
        if queues is None or self.marks or context.broker.stages.every_message:
            publishes.finish()
            self._publish_singly(run)
        elif qos == 2:
            self._publish_qos2(run, queues)
        else:
            items = self._items(run.names, run.bodies, queues, qos)
            self._waits = True
            part = Part(self, self._peer, self._gate, items, run, queues.keys())
            publishes.add(context.runs, part, run.ends[-1] - run.start)

    def _queues_of(self, names: Sequence[Name]) -> dict[Name, Queue] | None:
        """Return the queue of each of *names*; None if the messages must be published one by one."""
        queues_by_name: dict[Name, Queue] = {}
        gate, first = self._gate, names[0]
        different = (first,) if names.count(first) == len(names) else set(names)
        if self._context.broker.stages.may_want_properties(b"".join([name.properties[0] for name in different])):
            return None
        by_topic: dict[str, list[Queue | None]] = {}
        for name in different:
            queues = by_topic.get(name.topic)
            if queues is None:
                try:
                    queues = by_topic[name.topic] = [None] * queue_count(self._context, gate, name)
                except Refused:
                    return None
            place = name.place % len(queues)
            queue = queues[place] or gate.find_queue(name.topic, place)
            if queue is None:
                return None
            queues_by_name[name] = queues[place] = queue
        return queues_by_name

    def _items(
        self, names: Sequence[Name], bodies: Sequence[bytes], queues: dict[Name, Queue], qos: int
    ) -> list[AppendItem]:
        return native(run_items)(names, bodies, queues, qos, self._context.broker.clock.now_ms(), self._peer.host)

    def answer_run(self, run: PublishRun, names: Collection[Name], result: AppendResult, begin: int) -> None:
        self._waits = False
        if result.refused or result.rolled:
            self._answer_each(run, result, begin)
            return
        self._context.counters.stored += len(run.ends)
        end = begin + len(run.ends)
        self._share_frames(run, names, result.positions[begin:end])
        if run.qos:
            self._peer.hold_until(result.ends[end - 1])
            self._answer_all(run)

    def lose_run(self, error: MartletError) -> None:
        self._waits = False
        self._peer.close(str(error))

    def _answer_each(self, run: PublishRun, result: AppendResult, begin: int) -> None:
        """Answer each message of a run, whose first message is at *begin* of *result*.

        The store has refused some messages of the round, or committed some already.
        """
        for index in range(len(run.ends)):
            refusal = result.refused.get(begin + index)
            packet = self._packet(run, index)
            if refusal is not None:
                self._refuse(packet, refusal)
            else:
                self._context.counters.stored += 1
                if run.qos:
                    self._peer.hold_until(result.ends[begin + index])
                    self._answer(packet, ReasonCode.SUCCESS, "")
            if self._is_closing:
                return

    def _packet(self, run: PublishRun, index: int) -> Publish:
        packet_id = int.from_bytes(run.ids[index]) if run.qos else 0
        return Publish(run.names[index].text, run.bodies[index], run.qos, packet_id=packet_id)

    def _publish_singly(self, run: PublishRun) -> None:
        self._context.counters.received -= len(run.ends)
        for index in range(len(run.ends)):
            self.publish(self._packet(run, index))
            if self._is_closing:
                return

    def _publish_qos2(self, run: PublishRun, queues: dict[Name, Queue]) -> None:
        """Store the new messages of a run of QoS 2, in one atomic group with their identifiers."""
        session, ids = self._session, ids_of(b"".join(run.ids))
        new_indexes = self._find_new(ids)
        if not new_indexes:
            self._answer_qos2(run, NEXT_COMMIT)  # as in `publish`
            return
        self._check_open_count(len(new_indexes))
        if not self._gate.allowance.accepts(len(new_indexes), sum(map(len, run.bodies))):
            self._publish_singly(run)
            return
        changes = session.changes()
        _hold_all(changes, ids if len(new_indexes) == len(ids) else [ids[index] for index in new_indexes])
        try:
            names, bodies = run.names, run.bodies
            if len(new_indexes) < len(ids):
                names, bodies = [names[index] for index in new_indexes], [bodies[index] for index in new_indexes]
            items = self._items(names, bodies, queues, 2)
            result = self._gate.publish_all(items, atomic=True, notes=changes.notes)
        except Refused:
            self._publish_singly(run)
            return
        changes.apply()
        self._open += len(new_indexes)
        self._context.counters.stored += len(new_indexes)
        if len(new_indexes) == len(ids):
            self._share_frames(run, queues, result.positions)
        self._answer_qos2(run, result.end)

    def _find_new(self, ids: Sequence[int]) -> Sequence[int]:
        """Return the indexes of *ids* whose messages of QoS 2 are new."""
        held_ids = {number - INCOMING for number in map(INCOMING.__add__, ids) if number in self._session.flight}
        if isinstance(ids, range) and not held_ids:
            return range(len(ids))
        first_indexes = {packet_id: index for index, packet_id in reversed(list(enumerate(ids)))}
        return sorted([index for packet_id, index in first_indexes.items() if packet_id not in held_ids])

    def _share_frames(self, run: PublishRun, names: Collection[Name], positions: Sequence[int]) -> None:
        """Pass the packets of *run* to the feed, unchanged, as frames for subscribers; *names* are their names."""
        context, topics = self._context, {name.topic for name in names}
        if not context.shapes.encodings:
            return  # nobody subscribes
        if len(topics) > 1 or (run.ends[-1] - run.start >= LARGE_BYTES and max(map(len, run.bodies)) >= LARGE_BYTES):
            return  # the feed encodes them again
        (topic,) = topics
        for encoding in _SAME[self._version == V5, run.qos]:
            if encoding in context.shapes.encodings:
                context.feed.hand_on(topic, encoding, positions, run.data, run.ends, run.start)

    def _answer_qos2(self, run: PublishRun, end: int) -> None:
        self._peer.hold_until(max(end, self._session.until))
        self._answer_all(run)

    def _answer_all(self, run: PublishRun) -> None:
        head = _ANSWERS[run.qos]
        self._context.counters.answers += len(run.ids)
        self._peer.send(head + head.join(run.ids))

    # PUBREL

    def released(self, ids: Sequence[int]) -> None:
        """Release the messages with *ids*, and answer PUBCOMP. Raises `Refused`."""
        session, flight = self._session, self._session.flight
        known_ids: Collection[int] = dict.fromkeys([packet_id for packet_id in ids if INCOMING + packet_id in flight])
        if isinstance(ids, range) and len(known_ids) == len(ids):
            known_ids = ids
        for first_id, count in ranges_of(known_ids):
            session.acknowledge(INCOMING + first_id, count)
        if self._connection.state is State.ENDED:
            return  # an earlier commit failed, so the stored session still has these identifiers
        self._open -= len(known_ids)
        self._peer.hold_until(session.until)
        self._context.counters.answers += len(ids)
        if len(known_ids) == len(ids) or self._version != V5:
            self._peer.send(acks_of(PUBCOMP, ids))
            return
        for is_known, alike in groupby(ids, known_ids.__contains__):
            reason = ReasonCode.SUCCESS if is_known else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND
            self._peer.send(acks_of(PUBCOMP, list(alike), reason))


def _hold_all(changes: JointChanges, ids: Sequence[int]) -> None:
    for first_id, count in ranges_of(ids):
        changes.hold(INCOMING + first_id, count)


def replaced(answer: Buffer, refused: Refused, version: int) -> bytes | None:
    """Return the packets to send instead of *answer*, acknowledgements whose commit failed; None if there are none.

    The session knows the identifier of a QoS 2 message already, so the client must reconnect and send it again.
    """
    data = bytes(answer)
    if version != V5 or data[:2] != _ANSWERS[1]:
        return None
    ids = [int.from_bytes(data[at + 2 : at + 4]) for at in range(0, len(data), 4)]
    return b"".join([encode_packet(Ack(PacketType.PUBACK, each, reason_of(refused)), V5) for each in ids])
