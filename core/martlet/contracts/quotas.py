"""The types of quotas: limits of what a user, or a group of users, may send, receive and open."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from martlet.contracts.access import Identity

__all__ = ["DeliveryLimit", "Pace", "Quota", "QuotaSource"]


class Quota(Struct, frozen=True):
    """Limits of one user on all connections, or of all members of a group of users together; 0 for no limit.

    Rates are per second. What is not used adds up for a second, so a second's worth may come at once. Bytes are those
    of bodies and properties; to clients, those of records or of frames, as they are delivered.

    Args:
      group: the group of users that shares the quota; empty if it is the user's own.
      messages_in: messages that clients send.
      bytes_in: the bytes of these.
      messages_out: messages that clients receive.
      bytes_out: the bytes of these.
      connections: connections at the same time.
      subscriptions: subscriptions of connected clients: topic filters of MQTT, SUBSCRIBE of STOMP, topics in the
        heartbeats of RocketMQ consumers.
      shared_groups: groups in which connected clients take part: shared subscriptions of MQTT and queues of STOMP, once
        per topic, and consumer groups of RocketMQ. Several members of one group count as one.
      refuses: refuse what is above a rate, in the words of the protocol, instead of slowing the client down. Messages
        that the broker delivers by itself wait in any case.

    Raises:
      ValueError: a limit is negative.
    """

    group: str = ""
    messages_in: int = 0
    bytes_in: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    connections: int = 0
    subscriptions: int = 0
    shared_groups: int = 0
    refuses: bool = False

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"quota {name} is {value}; use 0 for no limit")


# Returns the quotas of an identity, at most one of its own and one for each group. It is asked when the identity's
# first connection comes, and again after `Rules.changed`.
QuotaSource: TypeAlias = Callable[[Identity], Sequence[Quota]]


class Pace(Protocol):
    """How fast the server reads from one peer and delivers to it; slower if the quota of its client is used up.

    Times are those of trio's clock.
    """

    receive_bytes: int  # the most that is read from the peer at once

    def slow_reading(self, until: float) -> None:
        """Handle no more events of the peer before *until*, and read nothing.

        Meanwhile it may be silent without missing a deadline.
        """
        ...

    def slow_delivery(self, until: float) -> None:
        """Call `Handler.collect` no more before *until*."""
        ...

    def shorten(self, reading_until: float, delivery_until: float) -> None:
        """End the pauses at these times, if they end later: a quota was raised, or removed."""
        ...

    def on_end(self, tell: Callable[[], None]) -> None:
        """Call *tell* when the connection ends or begins to close."""
        ...


class DeliveryLimit(Protocol):
    """What one connection may receive now; implemented by `martlet.access.Allowance`."""

    @property
    def applies(self) -> bool:
        """Whether there is a limit now."""
        ...

    def room(self, messages: int, size: int) -> tuple[int, int]:
        """Return how many messages and bytes may be delivered now, at most *messages* and *size*.

        Both are 0 if the connection must wait; its peer gets no more deliveries until then.
        """
        ...

    def charge_out(self, messages: int, size: int) -> None:
        """Count *messages* delivered now, of *size* bytes together."""
        ...
