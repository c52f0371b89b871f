"""Runs: consecutive frequent requests of one read, which the handler can handle together.

All requests of a run have the same signer, or none. Their signatures are verified while the run is collected; a request
whose signature is not known to be right ends the run before it, and the handler gets it as a `Command`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias, final

from martlet_remoting.wire.headers import AckHead, EndHead
from martlet_remoting.wire.sends import KeyOwner, Send
from martlet_remoting.wire.signatures import SignedFields

if TYPE_CHECKING:
    from martlet.contracts import Identity  # Spark tasks need not import it

__all__ = ["Ack", "AckRun", "End", "RunSigner", "RunSigners", "SendRun"]

# An end of a transaction, an acknowledgement, and the end of its frame in the received bytes.
End: TypeAlias = tuple[EndHead, int]
Ack: TypeAlias = tuple[AckHead, int]


class RunSigner(KeyOwner, Protocol):
    """Who signed the requests of a run."""

    @property
    def identity(self) -> "Identity":
        """The identity that the signatures prove."""


class RunSigners(Protocol):
    """Finds the signers of requests for a run."""

    def begin_run(self) -> bool:
        """Return whether unsigned requests may be in a run; call this before the other methods."""

    def is_current(self, signer: RunSigner | None) -> bool:
        """Return whether requests of *signer* may still be handled as a run."""

    def signer_of(self, kind: SignedFields, header: bytes, body: bytes) -> RunSigner | None:
        """Return who signed a request with an access key and a JSON header; None if the handler must find out."""

    def signer_of_fields(self, ext: Mapping[str, object], version: int, body: bytes) -> RunSigner | None:
        """As `signer_of`, for the fields of a binary header."""


@final
class SendRun:
    """Consecutive requests of one read that store messages: SEND_MESSAGE_V2 and END_TRANSACTION.

    The handler sets `taken` to the number of sends that it has handled, from the first one on, and handles all
    `taken_ends`. The next send then arrives as a `Command`. ``count`` is the number of sends, ``end`` is the end of the
    last frame.
    """

    __slots__ = ("count", "end", "ends", "sends", "signer", "size", "taken")

    def __init__(self, sends: list[Send], ends: list[End], end: int, signer: RunSigner | None = None) -> None:
        self.signer = signer
        self.sends = sends
        self.count = len(sends)
        self.ends = ends
        self.size = len(sends) + len(ends)
        self.end = end
        self.taken = 0

    def __len__(self) -> int:
        return self.size

    def taken_ends(self) -> list[End]:
        """Return the ends of transactions before the first send that the handler has not taken."""
        if self.taken == len(self.sends):
            return self.ends
        limit = self.sends[self.taken][-1]
        return [end for end in self.ends if end[1] < limit]

    def taken_to(self) -> int:
        """Return the end of the last taken frame; 0 if none was taken."""
        if self.taken == len(self.sends):
            return self.end
        ends = self.taken_ends()
        last = self.sends[self.taken - 1][-1] if self.taken else 0
        return max(last, ends[-1][1]) if ends else last

    def rest(self) -> "SendRun":
        """Return the requests after the first send that the handler has not taken."""
        return SendRun(self.sends[self.taken + 1 :], self.ends[len(self.taken_ends()) :], self.end, self.signer)


@final
class AckRun:
    """Consecutive ACK_MESSAGE requests of one read.

    The handler sets `taken` to the number that it has handled, from the first one on. The next request then arrives as
    a `Command`. ``end`` is the end of the last frame.
    """

    __slots__ = ("acks", "count", "end", "signer", "taken")

    def __init__(self, acks: list[Ack], signer: RunSigner | None = None) -> None:
        self.signer = signer
        self.acks = acks
        self.count = len(acks)
        self.end = acks[-1][1] if acks else 0
        self.taken = 0

    def __len__(self) -> int:
        return len(self.acks)

    def taken_to(self) -> int:
        """Return the end of the last taken frame; 0 if none was taken."""
        return self.acks[self.taken - 1][1] if self.taken else 0

    def rest(self) -> "AckRun":
        """Return the requests after the first one that the handler has not taken."""
        return AckRun(self.acks[self.taken + 1 :], self.signer)
