"""Messages in flight to one client: packet identifiers and acknowledgements (MQTT 5 sections 4.3 and 4.9).

The session stores each packet identifier in use as a number that includes its purpose:

| number | purpose of the identifier |
|---|---|
| id | a message of QoS 1, until PUBACK |
| `QOS2` + id | a message of QoS 2, until PUBREC; then only the identifier, until PUBCOMP |
| `INCOMING` + id | a message of QoS 2 that the client sent, until PUBREL (`incoming.py`) |

`RETAINED` is added for a retained message that a new subscription causes. A message leaves once the note of its
identifier is durable, so the identifier means the same message after any crash. A message of QoS 1 that a shared group
leases to the client (`shares.py`) has an identifier that is not in the session.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, final

from martlet.contracts import Peer
from martlet.runtime.native import native
from martlet.sessions.journal_codec import NO_MESSAGE
from martlet.sessions.session import Session
from martlet_mqtt.mapping.frames import number_frames, with_payloads
from martlet_mqtt.outbound.shares import SharedSubscriptions
from martlet_mqtt.shared.context import Counters
from martlet_mqtt.wire.codes import PacketType, ReasonCode
from martlet_mqtt.wire.scanner import PUBREL, acks_of

__all__ = ["IDS_MAX", "INCOMING", "QOS2", "RETAINED", "Flight", "ranges_of"]

IDS_MAX: Final = 65_535
INCOMING: Final = 1 << 16
QOS2: Final = 1 << 17
RETAINED: Final = 1 << 18


@final
class Flight:
    """The packet identifiers of one client; at most *window* are in use."""

    __slots__ = (
        "_counters",
        "_is_closed",
        "_next_id",
        "_peer",
        "_session",
        "_shares",
        "_unsent",
        "_used",
        "_window",
    )

    def __init__(
        self, peer: Peer, counters: Counters, session: Session, shares: SharedSubscriptions, window: int
    ) -> None:
        self._peer = peer
        self._counters = counters
        self._session = session
        self._shares = shares
        self._window = window
        self._is_closed = False
        # Packet identifiers in use for messages to the client, without their purpose.
        self._used = {number & IDS_MAX for number in session.flight if not number & INCOMING}
        # Identifiers of messages in flight from an earlier connection that are not yet sent again on this one.
        self._unsent: set[int] = set()
        self._next_id = session.next_id & IDS_MAX or 1

    def room(self) -> int:
        """Return how many more messages may be sent; messages in flight not yet sent again do not count."""
        return self._window - len(self._used) + len(self._unsent)

    def close(self) -> None:
        """Send no more PUBREL: the connection has lost the session."""
        self._is_closed = True

    # messages in flight from an earlier connection

    def resume(self) -> list[tuple[int, int]]:
        """Send PUBREL again for identifiers that wait for PUBCOMP; return the number and position of each message."""
        flight = self._session.flight.items()
        self._send_releases([number for number, position in flight if position == NO_MESSAGE and number & QOS2])
        messages = [(number, position) for number, position in flight if position != NO_MESSAGE]
        self._unsent.update([number & IDS_MAX for number, _ in messages])
        return messages

    def _send_releases(self, numbers: Sequence[int]) -> None:
        if numbers:
            self._counters.answers += len(numbers)
            first = numbers[0] & IDS_MAX
            is_range = isinstance(numbers, range)
            ids = range(first, first + len(numbers)) if is_range else [number & IDS_MAX for number in numbers]
            self._peer.send(acks_of(PUBREL, ids))

    def is_due(self, number: int, position: int) -> bool:
        """Return whether the message with *number* is still in flight, and count it as sent."""
        self._unsent.discard(number & IDS_MAX)
        return self._session.flight.get(number) == position

    def drop(self, number: int) -> None:
        """Free the identifier of a message that cannot be sent again. Raises `Refused`.

        With QoS 2 the client may have received the message, and would mistake another message with this identifier for
        it. PUBREL makes the client forget the identifier [MQTT-4.3.3-11], and PUBCOMP frees it.
        """
        if number & QOS2:
            self._session.hold(number)
            self._peer.hold_until(self._session.until)
            self._send_releases([number])
        else:
            self._session.acknowledge(number)
            self._used.discard(number & IDS_MAX)

    # new messages

    def number_and_send(
        self,
        data: bytearray,
        starts: Sequence[int],
        positions: Sequence[int],
        end: int,
        flags: int,
        payloads: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Give the frames in *data* packet identifiers, note them as in flight, and send them with *payloads*.

        Args:
          starts: the position of each frame in *data*.
          positions: the log position of each message.
          end: the log position before which the client has every message once these are sent.
          flags: added to the numbers, such as `RETAINED`.
          payloads: as for `with_payloads`.
        """
        qos, count, session = data[0] >> 1 & 3, len(starts), self._session
        self._counters.delivered += count
        if not qos:
            self._send(data, payloads)
            return
        base, at = flags | (QOS2 if qos == 2 else 0), 0
        while at < count:
            first_id, id_count = self.take_ids(count - at)
            next_at = at + id_count
            native(number_frames)(data, starts[at:next_at], range(first_id, first_id + id_count))
            session.hand_out(base + first_id, positions[at:next_at], end if next_at == count else positions[next_at])
            at = next_at
        self._peer.hold_until(session.until)
        self._send(data, payloads)

    def _send(self, data: bytearray, payloads: Sequence[tuple[int, bytes]]) -> None:
        if payloads:
            self._peer.send(*with_payloads(data, payloads))
        else:
            self._peer.send(data)

    def take_ids(self, count: int) -> tuple[int, int]:
        """Take up to *count* consecutive free identifiers; return the first, and their number."""
        used, first_id = self._used, self._next_id
        while first_id > IDS_MAX or first_id in used:
            first_id = first_id + 1 if first_id < IDS_MAX else 1
        end_id = min(first_id + count, IDS_MAX + 1)
        if not used.isdisjoint(range(first_id, end_id)):
            end_id = first_id + 1
        while end_id < first_id + count and end_id <= IDS_MAX and end_id not in used:
            end_id += 1
        used.update(range(first_id, end_id))
        self._next_id = end_id
        return first_id, end_id - first_id

    # acknowledgements

    def acknowledged(self, kind: PacketType, ids: Sequence[int]) -> list[int]:
        """Handle PUBACK or PUBCOMP for *ids*; return the ids that wait for no such packet. Raises `Refused`."""
        base = QOS2 if kind is PacketType.PUBCOMP else 0
        if self._shares.has_leased and not base:
            unshared = self._shares.settle(dict.fromkeys(ids))  # without duplicates
            self._used.difference_update(set(ids).difference(unshared))
            ids = unshared
        unknown = self._settle(base, ids)
        if unknown:
            unknown = self._settle(base + RETAINED, unknown)
        self._peer.wake()
        return unknown

    def _settle(self, base: int, ids: Sequence[int]) -> list[int]:
        session, flight = self._session, self._session.flight
        unknown: list[int] = []
        for first_id, count in ranges_of(ids):
            known: Sequence[int] = range(first_id, first_id + count)
            if not _has_all(flight, base, known):
                unknown += [each for each in known if base + each not in flight]
                known = [each for each in known if base + each in flight]
            for first_known, known_count in ranges_of(known):
                session.acknowledge(base + first_known, known_count)
                freed_ids = range(first_known, first_known + known_count)
                self._used.difference_update(freed_ids)
                if self._unsent:
                    self._unsent.difference_update(freed_ids)
        return unknown

    def received(self, ids: Sequence[int], reason: int) -> list[int]:
        """Handle PUBREC for *ids* with *reason*; return the unknown ids. Raises `Refused`.

        The answer PUBREL leaves once the note of the receipt is durable [MQTT-4.3.3-4].
        """
        session, flight = self._session, self._session.flight
        known_numbers, unknown = self._find_received(ids)
        if self._unsent:
            self._unsent.difference_update([number & IDS_MAX for number in known_numbers])
        if reason >= ReasonCode.UNSPECIFIED_ERROR:
            self._free(dict.fromkeys(known_numbers))
        elif known_numbers:
            with_message = known_numbers
            if not isinstance(known_numbers, range) or NO_MESSAGE in map(flight.get, known_numbers):
                with_message = [number for number in dict.fromkeys(known_numbers) if flight[number] != NO_MESSAGE]
            for first_number, count in ranges_of(with_message):
                session.hold(first_number, count)
            if not self._is_closed:  # otherwise a failed commit lost the session
                self._peer.hold_until(session.until)
                self._send_releases(known_numbers)
        self._peer.wake()
        return unknown

    def _find_received(self, ids: Sequence[int]) -> tuple[Sequence[int], list[int]]:
        """Return the numbers in flight of QoS 2 messages with *ids*, a range if *ids* is one, and the unknown ids."""
        flight = self._session.flight
        if isinstance(ids, range) and _has_all(flight, QOS2, ids):
            return range(QOS2 + ids.start, QOS2 + ids.stop), []
        known_numbers, unknown = list[int](), list[int]()
        for packet_id in ids:
            number = QOS2 + packet_id if QOS2 + packet_id in flight else QOS2 + RETAINED + packet_id
            if number in flight:
                known_numbers.append(number)
            else:
                unknown.append(packet_id)
        return known_numbers, unknown

    def _free(self, numbers: Iterable[int]) -> None:
        for first_number, count in ranges_of(numbers):
            self._session.acknowledge(first_number, count)
        self._used.difference_update([number & IDS_MAX for number in numbers])


def _has_all(flight: Mapping[int, int], base: int, ids: Sequence[int]) -> bool:
    """Return whether *flight* has *ids*, a range, with *base* added."""
    return all(map(flight.__contains__, range(base + ids[0], base + ids[-1] + 1)))


def ranges_of(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Return *ids* as ranges of consecutive numbers, each with its first number and its length."""
    if isinstance(ids, range):
        return [(ids.start, len(ids))] if ids else []
    ranges: list[tuple[int, int]] = []
    for each in ids:
        if ranges and each == ranges[-1][0] + ranges[-1][1]:
            ranges[-1] = ranges[-1][0], ranges[-1][1] + 1
        else:
            ranges.append((each, 1))
    return ranges
