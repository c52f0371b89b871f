"""What a client says, as records; what the broker answers is text made in the codec."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, final

__all__ = [
    "Ack",
    "Command",
    "Credit",
    "Extend",
    "Help",
    "Idle",
    "Login",
    "Malformed",
    "Nack",
    "Ping",
    "Pong",
    "Publish",
    "Quit",
    "Subscribe",
    "Unsubscribe",
]


@final
@dataclass(slots=True)
class Publish:
    """A run of PUB or PUT commands to one topic, as they came behind each other.

    ``properties`` are encoded as records hold them, one entry for each of ``bodies``.
    """

    topic: str
    bodies: list[bytes]
    properties: list[bytes]


@final
@dataclass(frozen=True, slots=True)
class Subscribe:
    """SUB: plain, durable (``name``), or as a member of a shared ``group``.

    ``start`` is "tail", "earliest" or an offset; ``credit`` and ``lease_s`` -1 mean the configured ones.
    ``tags`` empty means every message; ``expression`` in filter language ``language`` wants fewer still.
    """

    topic: str
    name: str = ""
    group: str = ""
    start: Literal["tail", "earliest"] | int = "tail"
    credit: int = -1
    lease_s: int = -1
    tags: tuple[str, ...] = ()
    language: str = ""
    expression: str = ""


@final
@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """UNSUB; with ``forget`` a durable subscription's cursors go as well."""

    id: int
    forget: bool = False


@final
@dataclass(frozen=True, slots=True)
class Credit:
    """CREDIT: *count* more messages may come."""

    id: int
    count: int


@final
@dataclass(frozen=True, slots=True)
class Ack:
    """ACK: in a shared group the messages from ``offset`` to ``last``; durable: everything up to ``last``."""

    id: int
    queue_id: int
    offset: int
    last: int


@final
@dataclass(frozen=True, slots=True)
class Nack:
    """NACK: somebody else shall have the message, in ``delay_ms``."""

    id: int
    queue_id: int
    offset: int
    delay_ms: int = 0


@final
@dataclass(frozen=True, slots=True)
class Extend:
    """EXTEND: the message is still being worked on."""

    id: int
    queue_id: int
    offset: int


@final
@dataclass(frozen=True, slots=True)
class Login:
    """LOGIN: who the client is from now on."""

    user: str
    password: bytes = field(repr=False)


@final
@dataclass(frozen=True, slots=True)
class Ping:
    text: str = ""


@final
@dataclass(frozen=True, slots=True)
class Pong:
    pass


@final
@dataclass(frozen=True, slots=True)
class Help:
    pass


@final
@dataclass(frozen=True, slots=True)
class Quit:
    pass


@final
@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is not a command; ``text`` says what is expected."""

    text: str


@final
@dataclass(frozen=True, slots=True)
class Idle:
    """Not said by the client: it has been silent for long."""


Command: TypeAlias = (
    Publish | Subscribe | Unsubscribe | Credit | Ack | Nack | Extend | Login | Ping | Pong | Help | Quit | Malformed
)
