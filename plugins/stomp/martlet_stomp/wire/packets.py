"""Frames of STOMP clients as records: the events of `StompConnection.events()`.

The connection has checked a frame as far as possible without other frames: its syntax, its required headers, and the
order of commands. Runs of frames are one event: `SendRun` is the event of every SEND, and `AckRun` of every ACK, even
of a single one. Heart-beats have no event.

A receipt is the value of a ``receipt`` header, still escaped in the client's version, so RECEIPT and ERROR frames can
contain it unchanged (`codec.encode_receipts`, `codec.encode_error`). None means that the frame asks for no receipt; an
empty receipt is a receipt.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from enum import IntEnum, unique
from typing import NamedTuple, TypeAlias, final

from msgspec import Struct

__all__ = [
    "Abort",
    "AckMode",
    "AckPlace",
    "AckRun",
    "Begin",
    "Commit",
    "Connect",
    "Disconnect",
    "Event",
    "MessageHeaders",
    "Nack",
    "SendRun",
    "Subscribe",
    "Unsubscribe",
    "Version",
]


@unique
class Version(IntEnum):
    """The versions of STOMP, oldest first."""

    V1_0 = 0
    V1_1 = 1
    V1_2 = 2

    @property
    def text(self) -> str:
        """The version in the form of frames, such as ``1.2``."""
        return f"1.{self.value}"


@unique
class AckMode(IntEnum):
    """The values of the ``ack`` header of SUBSCRIBE."""

    AUTO = 0
    CLIENT = 1  # an ACK settles all earlier messages of the subscription, too
    CLIENT_INDIVIDUAL = 2


@final
class AckPlace(NamedTuple):
    """The place of a message that a subscription of this connection has received; the decoded ack id.

    An ack id is ``SUBSCRIPTION-QUEUE-OFFSET``, three decimal numbers. ``subscription`` is the number that the handler
    gave to the subscription. Each new subscription gets a new number, so ack ids of an earlier one with the same id are
    unknown.
    """

    subscription: int
    queue_id: int
    offset: int


@final
class MessageHeaders:
    """The headers of SEND frames that belong to the message; frames with equal headers share one object.

    ``pairs`` has the decoded names and values in the order of the frame, only the first of a repeated name, without
    ``destination``, ``content-length``, ``receipt`` and ``transaction``. ``size`` is the bytes of the header lines.
    Objects are compared and hashed by identity, so values that depend only on the headers can be cached in a dictionary
    by this object. Bound the dictionary: a client may send other headers with every message.
    """

    __slots__ = ("destination", "pairs", "size")

    def __init__(self, destination: str, pairs: tuple[tuple[str, str], ...] = (), size: int = 0) -> None:
        self.destination = destination
        self.pairs = pairs
        self.size = size

    def get(self, name: str) -> str | None:
        """Return the value of header *name*; None if absent."""
        for key, value in self.pairs:
            if key == name:
                return value
        return None

    def __repr__(self) -> str:
        return f"MessageHeaders({self.destination!r}, {self.pairs!r})"


@final
class Connect(NamedTuple):
    """CONNECT or STOMP.

    Attributes:
      version: the highest version that the client and the broker have in common.
      can_beat_ms: interval at which the client can send heart-beats; 0 for none.
      wants_beat_ms: interval at which the client wants to receive heart-beats; 0 for none.
      client_id: the header ``client-id``, which names durable subscriptions as with ActiveMQ.
      headers: all headers, by name.
    """

    version: Version
    login: str | None = None
    passcode: str | None = None
    can_beat_ms: int = 0
    wants_beat_ms: int = 0
    client_id: str | None = None
    headers: Mapping[str, str] = {}


@final
class SendRun(NamedTuple):
    """Consecutive SEND frames, at least one, all in the same transaction or all in none.

    Attributes:
      headers: the headers of each message; consecutive messages with equal headers share one object.
      bodies: the body of each message.
      receipts: the receipts of the frames that ask for one, in order.
      asking: the index of the message of each of ``receipts``, ascending.
      transaction: the name of the transaction; None for none.
    """

    headers: Sequence[MessageHeaders]
    bodies: Sequence[bytes]
    receipts: Sequence[bytes] = ()
    asking: Sequence[int] = ()
    transaction: str | None = None

    def receipt_of(self, index: int) -> bytes | None:
        """Return the receipt that message *index* asks for."""
        return _receipt_of(self.receipts, self.asking, index)

    def receipts_before(self, index: int) -> Sequence[bytes]:
        """Return the receipts that the messages before *index* ask for."""
        return self.receipts[: bisect_left(self.asking, index)]


@final
class AckRun(NamedTuple):
    """Consecutive ACK frames, at least one, all in the same transaction or all in none.

    ACK *i* is for the message at ``AckPlace(subscriptions[i], queue_ids[i], offsets[i])``.

    ``receipts``, ``asking`` and ``transaction`` are as in `SendRun`. The ack id contains the subscription's number, so
    the header ``subscription``, which STOMP 1.1 requires, too, is ignored.
    """

    subscriptions: Sequence[int]
    queue_ids: Sequence[int]
    offsets: Sequence[int]
    receipts: Sequence[bytes] = ()
    asking: Sequence[int] = ()
    transaction: str | None = None

    def receipt_of(self, index: int) -> bytes | None:
        """Return the receipt that ACK *index* asks for."""
        return _receipt_of(self.receipts, self.asking, index)

    def receipts_before(self, index: int) -> Sequence[bytes]:
        """Return the receipts that the ACKs before *index* ask for."""
        return self.receipts[: bisect_left(self.asking, index)]


def _receipt_of(receipts: Sequence[bytes], asking: Sequence[int], index: int) -> bytes | None:
    place = bisect_left(asking, index)
    return receipts[place] if place < len(asking) and asking[place] == index else None


@final
class Nack(Struct, frozen=True):
    """NACK; ``requeue`` is its header ``requeue``: False if the message must not be delivered again."""

    place: AckPlace
    transaction: str | None = None
    requeue: bool = True
    receipt: bytes | None = None


@final
class Subscribe(Struct, frozen=True):
    """SUBSCRIBE.

    Attributes:
      id: the client's id; None only with STOMP 1.0.
      selector: an expression in SQL92; None for all messages.
      prefetch: the number of messages that may be sent before they are acknowledged (``activemq.prefetchSize`` or
        ``prefetch-count``); None if absent.
      durable_name: the name of a durable subscription (``activemq.subscriptionName``, or
        ``activemq.subcriptionName``, the spelling of some clients).
      is_durable: ``durable:true``: the subscription is durable, and ``id`` is its name.
      auto_delete: ``auto-delete``; None if absent.
      is_exclusive: ``activemq.exclusive:true``, ``exclusive:true`` or ``x-single-active-consumer:true``.
      is_browser: ``browser:true``: read the queue without consuming it.
      no_local: ``activemq.noLocal:true`` or ``no-local:true``: a topic without the messages of this connection.
      is_retroactive: ``activemq.retroactive:true``: a topic from its first message on.
    """

    destination: str
    id: str | None = None
    ack: AckMode = AckMode.AUTO
    selector: str | None = None
    prefetch: int | None = None
    durable_name: str | None = None
    is_durable: bool = False
    auto_delete: bool | None = None
    is_exclusive: bool = False
    is_browser: bool = False
    no_local: bool = False
    is_retroactive: bool = False
    receipt: bytes | None = None


@final
class Unsubscribe(Struct, frozen=True):
    """UNSUBSCRIBE; with STOMP 1.0 ``id`` may be None, and ``destination`` is then set.

    With ``durable_name`` or ``is_durable``, as in `Subscribe`, the durable subscription itself ends.
    """

    id: str | None = None
    destination: str | None = None
    durable_name: str | None = None
    is_durable: bool = False
    receipt: bytes | None = None


@final
class Begin(Struct, frozen=True):
    """BEGIN."""

    transaction: str
    receipt: bytes | None = None


@final
class Commit(Struct, frozen=True):
    """COMMIT."""

    transaction: str
    receipt: bytes | None = None


@final
class Abort(Struct, frozen=True):
    """ABORT."""

    transaction: str
    receipt: bytes | None = None


@final
class Disconnect(Struct, frozen=True):
    """DISCONNECT; no event follows it."""

    receipt: bytes | None = None


Event: TypeAlias = Connect | SendRun | AckRun | Nack | Subscribe | Unsubscribe | Begin | Commit | Abort | Disconnect
