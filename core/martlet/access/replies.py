"""Reply addresses: a reply to a request is stored for the client that waits for it.

A request is a message with the properties ``CORRELATION_ID`` and ``REPLY_TO_CLIENT``, the address. An address begins
with the name of a protocol and a colon, as in ``mqtt:text:a/b``; an address without the name of a protocol that takes
replies is the client identifier of a RocketMQ client. So consumers of one protocol answer requests of another one.

Some clients of RocketMQ want ``CORRELATION_ID`` to have a value. A request without one has the value `NO_CORRELATION`,
and its address is ``PROTOCOL:none:...``.
"""

from collections.abc import Callable
from typing import Final, TypeAlias, final

from martlet.access.gate import Gate
from martlet.errors import Reason, Refused
from martlet.message import Message, Placed

__all__ = ["NO_CORRELATION", "Replies", "TakeReply", "is_uncorrelated"]

NO_CORRELATION: Final = "="

# Stores a reply for the client that sent the request. Called with the gate of the replying client, the address without
# the name of the protocol, and the reply, with its ``CORRELATION_ID``; its topic is not set. Raises `Refused`:
# NOT_FOUND if nobody waits.
TakeReply: TypeAlias = Callable[[Gate, str, Message], Placed]


def is_uncorrelated(address: str) -> bool:
    """Return whether a request with *address* has no correlation id."""
    return address.split(":", 2)[1:2] == ["none"]


@final
class Replies:
    """The protocols that take replies for their clients."""

    def __init__(self) -> None:
        self._takers: dict[str, TakeReply] = {}

    def add(self, protocol: str, take: TakeReply) -> None:
        """Pass replies to addresses of *protocol* to *take*; the empty name is for all other addresses."""
        self._takers[protocol] = take

    def protocol_of(self, address: str) -> str:
        """Return the protocol of *address*; empty if it names no protocol that takes replies."""
        protocol, colon, _ = address.partition(":")
        return protocol if colon and protocol in self._takers else ""

    def send(self, gate: Gate, address: str, reply: Message) -> Placed:
        """Store *reply* for *address*. Raises `Refused`."""
        protocol = self.protocol_of(address)
        take = self._takers.get(protocol)
        if take is None:
            raise Refused(Reason.NOT_FOUND, f"nobody takes replies for {address[:80]!r}; its protocol is not enabled")
        return take(gate, address[len(protocol) + 1 :] if protocol else address, reply)
