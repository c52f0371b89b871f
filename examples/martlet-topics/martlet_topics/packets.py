"""What a client says, as records; what the broker answers is text made in the codec."""

from dataclasses import dataclass
from typing import TypeAlias, final

__all__ = ["Acknowledge", "Command", "Forget", "Hello", "Ping", "Publish", "Quit", "Subscribe", "Unsubscribe"]


@final
@dataclass(frozen=True, slots=True)
class Hello:
    """HELLO: a durable session has a name."""

    name: str = ""


@final
@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUB: messages whose name matches the filter; at QoS 1 they are acknowledged."""

    topic_filter: str
    qos: int


@final
@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """UNSUB: no more messages for this filter."""

    topic_filter: str


@final
@dataclass(frozen=True, slots=True)
class Publish:
    """RUN: messages with the packet ids from ``first_id`` on, or 0 for no acknowledgement.

    ``frames`` has them as they came, and message *i* ends before ``ends[i]``. TX stores all or none, together with the
    acknowledgement in ``acknowledged``.
    """

    first_id: int
    names: tuple[bytes, ...]
    bodies: tuple[bytes, ...]
    frames: bytes
    ends: tuple[int, ...]
    is_atomic: bool = False
    acknowledged: "Acknowledge | None" = None


@final
@dataclass(frozen=True, slots=True)
class Acknowledge:
    """ACK: *count* messages from ``first_id`` on are done with."""

    first_id: int
    count: int


@final
@dataclass(frozen=True, slots=True)
class Forget:
    """FORGET: the session goes."""


@final
@dataclass(frozen=True, slots=True)
class Ping:
    """PING: nothing but an answer."""


@final
@dataclass(frozen=True, slots=True)
class Quit:
    """QUIT: the connection ends; a durable session stays."""


Command: TypeAlias = Hello | Subscribe | Unsubscribe | Publish | Acknowledge | Forget | Ping | Quit
