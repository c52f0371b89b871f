"""Frames for one client, where it cannot use the frames that subscribers share (`frames.py`).

Such frames depend on the client's maximum packet size, topic aliases and selectors, on whether a message is its own,
and on the time, for messages that expire.
"""

from collections.abc import Callable, Sequence
from typing import Final, final

from martlet.contracts import Buffer, RecordView
from martlet.delivery.runs import Frames, Run
from martlet_mqtt.mapping.frames import Grant, Shape, arrived_in, encode_alone, has_selector
from martlet_mqtt.mapping.messages import Arrived
from martlet_mqtt.outbound.selectors import chooser
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.packets import Connect
from martlet_mqtt.wire.properties import U16, Property, decode_varint, encode_varint

__all__ = ["Aliases", "ClientFrames"]

# Most bytes that an alias adds to a packet: the property, and one byte in each of two lengths.
ALIAS_BYTES: Final = 5
# Shortest name that gets an alias: for a shorter one, an alias saves nothing.
NAME_BYTES_MIN: Final = 8
_ALIAS: Final = b"\x23"


@final
class Aliases:
    """Topic aliases: numbers that replace topic names on one connection (MQTT 5 section 3.3.2.3.4).

    The first names sent to a client get them.
    """

    __slots__ = ("_max", "_numbers")

    def __init__(self, alias_max: int) -> None:
        self._max = alias_max
        self._numbers: dict[bytes, int] = {}

    def shorten(self, frame: bytes, payload_bytes: int = 0) -> bytes:
        """Return *frame*, a PUBLISH of MQTT 5, with an alias; without its name if the client knows the alias.

        A payload of *payload_bytes* follows the frame.
        """
        _, at = decode_varint(frame, 1)
        end = at + 2 + (frame[at] << 8 | frame[at + 1])
        name = frame[at + 2 : end]
        if len(name) < NAME_BYTES_MIN:
            return frame
        number = self._numbers.get(name)
        is_known = number is not None
        if number is None:
            if len(self._numbers) >= self._max:
                return frame
            number = self._numbers[name] = len(self._numbers) + 1
        id_end = end + (2 if frame[0] & 6 else 0)
        size, begin = decode_varint(frame, id_end)
        properties = _ALIAS + U16.pack(number) + frame[begin : begin + size]
        name_sent = b"" if is_known else name
        content = U16.pack(len(name_sent)) + name_sent + frame[end:id_end] + encode_varint(len(properties)) + properties
        content += frame[begin + size :]
        return frame[:1] + encode_varint(len(content) + payload_bytes) + content


@final
class ClientFrames:
    """Encodes messages for one client."""

    __slots__ = ("_aliases", "_context", "_last", "_packet_bytes_max", "client_id", "version")

    def __init__(self, context: Context, connect: Connect) -> None:
        properties = connect.properties
        self._context = context
        self.version = connect.version
        self.client_id = connect.client_id
        self._packet_bytes_max = properties.number(Property.MAXIMUM_PACKET_SIZE, 1 << 30)
        alias_max = min(properties.number(Property.TOPIC_ALIAS_MAXIMUM, 0), context.config.alias_max)
        self._aliases = Aliases(alias_max) if alias_max else None
        self._last: tuple[tuple[Grant, ...], Shape] | None = None  # usually the next run has the same grants

    def shape(self, grants: tuple[Grant, ...]) -> Shape:
        """Return the shape of messages that match *grants*."""
        if self._last is None or self._last[0] is not grants:
            self._last = grants, self._context.shapes.of(self.version, grants)
        return self._last[1]

    def of_run(self, run: Run, grants: tuple[Grant, ...], shape: Shape) -> Frames:
        """Return the frames of *run*, which matches *grants* with their *shape*. Raises `Refused`."""
        if shape.selects:
            return self._select_frames(run, grants)
        frames = run.frames(shape.encoding)
        if not frames.is_whole or self._aliases is not None or frames.size > self._packet_bytes_max:
            return self._encode_singly(run, frames, grants, shape)
        return frames

    def fitting(self, frame: bytes, payload_bytes: int = 0) -> bytes:
        """Return *frame*; empty if it is larger than the client accepts, with the *payload_bytes* after it.

        [MQTT-3.1.2-24, MQTT-3.1.2-25]
        """
        if len(frame) + payload_bytes <= self._packet_bytes_max:
            return frame
        self._context.counters.oversize += 1
        return b""

    def chosen(self, grants: tuple[Grant, ...], record: RecordView) -> tuple[Grant, ...]:
        """Return the *grants* whose selectors accept *record*. Raises `Refused`."""
        return self._choose(grants)(record) if has_selector(grants) else grants

    def _choose(self, grants: tuple[Grant, ...]) -> Callable[[RecordView], tuple[Grant, ...]]:
        return chooser(self._context.broker, grants)

    def _shorten(self, frame: bytes, payload_bytes: int) -> bytes:
        """Return *frame* with an alias, if the client uses aliases and accepts the added bytes."""
        if not frame or self._aliases is None or len(frame) + payload_bytes + ALIAS_BYTES > self._packet_bytes_max:
            return frame
        return self._aliases.shorten(frame, payload_bytes)

    def _encode_singly(self, run: Run, frames: Frames, grants: tuple[Grant, ...], shape: Shape) -> Frames:
        """Return the frames of a run for this client, from the shared *frames* where these are not empty."""
        own, is_same = _FrameList(), self._aliases is None
        messages = run.decoded(self._arrived_in) if not frames.is_whole else []
        now_ms, start = self._context.broker.clock.now_ms(), 0
        for index, end in enumerate(frames.ends):
            frame = frames.data[start:end]
            payload = frames.payloads.get(index, b"") if frames.payloads is not None else b""
            if start == end:
                arrived = messages[index]
                frame = self._encode_for_client(arrived, grants, shape, now_ms)
                if arrived is not None:
                    payload, is_same = arrived.large, is_same and arrived.is_plain
            start = end
            self._add(own, frame, payload)
        own_frames = own.frames()
        if is_same and own_frames.is_whole:
            run.keep(shape.encoding.name, own_frames)
        return own_frames

    def _select_frames(self, run: Run, grants: tuple[Grant, ...]) -> Frames:
        """Return the frames of a run, empty for messages that the selectors of *grants* reject."""
        selected = _FrameList()
        choose, now_ms = self._choose(grants), self._context.broker.clock.now_ms()
        for record, arrived in zip(run.records(), run.decoded(self._arrived_in), strict=True):
            accepting, frame = choose(record), b""
            if accepting:
                frame = self._encode_for_client(arrived, accepting, self.shape(accepting), now_ms)
            self._add(selected, frame, arrived.large if arrived is not None else b"")
        return selected.frames()

    def _add(self, frames: "_FrameList", frame: bytes, payload: bytes) -> None:
        """Add *frame*, followed by *payload*, to *frames*; shortened if the client uses aliases, empty if too large."""
        if frame:
            frame = self._shorten(self.fitting(frame, len(payload)), len(payload))
        frames.add(frame, payload)

    def _arrived_in(self, records: Buffer) -> Sequence[Arrived | None]:
        return arrived_in(records, self._context.broker.delivered_bytes_max)

    def _encode_for_client(
        self, arrived: Arrived | None, grants: tuple[Grant, ...], shape: Shape, now_ms: int
    ) -> bytes:
        if arrived is None:
            self._context.counters.unreadable += 1
            return b""
        if arrived.client_id == self.client_id:
            grants = tuple(grant for grant in grants if not grant.subscription.no_local)
            if not grants:
                return b""
            shape = self.shape(grants)
        if 0 < arrived.expires_ms <= now_ms:
            self._context.counters.expired += 1
            return b""
        return encode_alone(arrived, shape, self.client_id, now_ms)


@final
class _FrameList:
    """Collects frames one by one."""

    __slots__ = ("_each", "_ends", "_payloads", "_size")

    def __init__(self) -> None:
        self._each: list[bytes] = []
        self._ends: list[int] = []
        self._payloads: dict[int, bytes] = {}
        self._size = 0

    def add(self, frame: bytes, payload: bytes) -> None:
        """Add *frame*, followed by *payload*, which may be empty."""
        if frame and payload:
            self._payloads[len(self._each)] = payload
        self._each.append(frame)
        self._size += len(frame)
        self._ends.append(self._size)

    def frames(self) -> Frames:
        return Frames(b"".join(self._each), self._ends, all(self._each), self._payloads or None)
