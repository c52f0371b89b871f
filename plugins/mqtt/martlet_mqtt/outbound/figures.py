"""Figures of the broker (`$SYS`) for one client: a newer value replaces one that has not been sent yet."""

from collections.abc import Sequence
from typing import final

from martlet.access import Gate
from martlet.contracts import Peer
from martlet_mqtt.mapping.frames import Grant, publish_frame
from martlet_mqtt.outbound.client_frames import ClientFrames
from martlet_mqtt.shared.context import Context
from martlet_mqtt.wire.codes import V5

__all__ = ["Figures"]


@final
class Figures:
    """Those that wait until there is room; they are in no log, and sent with QoS 0."""

    __slots__ = ("_context", "_frames", "_gate", "_peer", "_waiting")

    def __init__(self, peer: Peer, context: Context, gate: Gate, frames: ClientFrames) -> None:
        self._peer = peer
        self._context = context
        self._gate = gate
        self._frames = frames
        # By name and subscriptions: the value, and whether it is sent as retained.
        self._waiting: dict[tuple[str, tuple[Grant, ...]], tuple[bytes, bool]] = {}

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def add(self, name: str, value: bytes, grants: Sequence[Grant], *, retain: bool) -> None:
        """Send a figure for *grants* when there is room."""
        self._waiting[name, tuple(grants)] = value, retain
        self._peer.wake()

    def forget(self, topic_filter: str) -> None:
        """Do not send what waits for *topic_filter*."""
        for key in [key for key in self._waiting if any(e.subscription.topic_filter == topic_filter for e in key[1])]:
            del self._waiting[key]

    def send(self, budget_bytes: int) -> int:
        """Send what waits, about *budget_bytes*; return how many bytes."""
        size = 0
        for name, grants in list(self._waiting):
            if size >= budget_bytes:
                self._peer.wake()
                break
            value, retain = self._waiting.pop((name, grants))
            if not self._gate.allows("read", name):
                continue
            frames = self._frames
            properties = frames.shape(grants).identifiers if frames.version == V5 else None
            frame = frames.fitting(publish_frame(name.encode(), value, int(retain), properties))
            if frame:
                self._peer.send(frame)
                self._context.counters.delivered += 1
                size += len(frame)
        return size
