"""Stores what the connections that were read in one round have published, by one call.

With many clients that each wait for the answer to one message, a read brings one message. Checking and storing the
messages of a round together costs a fraction of doing so one by one.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, Protocol, TypeVar, final

from martlet.access.gate import Gate, publish_together
from martlet.contracts import Peer
from martlet.errors import MartletError
from martlet.message import Message
from martlet.store.append.items import AppendItem, AppendResult

__all__ = ["BYTES_MAX", "COUNT_MAX", "PublishAnswers", "PublishedPart", "RoundPublishes"]

# Messages, and bytes of them, after which they are stored before the end of the round: storing one takes 1 to 5 us, and
# copying a MiB with its CRCs 0.3 ms.
COUNT_MAX: Final = 256
BYTES_MAX: Final = 1 << 20


class PublishedPart(Protocol):
    """What one read of a connection has published, at least one message: arguments of `Gate.publish_all`."""

    @property
    def peer(self) -> Peer: ...

    @property
    def gate(self) -> Gate: ...

    @property
    def items(self) -> Sequence[AppendItem | Message]: ...


P_contra = TypeVar("P_contra", bound=PublishedPart, contravariant=True)
P = TypeVar("P", bound=PublishedPart)


class PublishAnswers(Protocol[P_contra]):
    """Answers the clients of one protocol."""

    def answer(self, parts: Sequence[P_contra], result: AppendResult) -> None:
        """Answer the clients of *parts*, whose messages, in order, are those of *result*."""
        ...

    def refuse(self, parts: Sequence[P_contra], error: MartletError) -> None:
        """Answer the clients of *parts*, none of whose messages was stored."""
        ...


@final
class RoundPublishes:
    """The messages of this round that are not stored yet: ``parts`` by what answers their clients.

    A protocol calls `finish` before it handles a request that may depend on them, of whatever client, and before it
    publishes anything else for a client with a part in it.
    """

    __slots__ = ("_count", "_size", "parts")

    def __init__(self) -> None:
        self.parts: dict[PublishAnswers[Any], list[Any]] = {}
        self._count = self._size = 0

    def add(self, answers: PublishAnswers[P], part: P, size: int) -> None:
        """Store the messages of *part*, of about *size* bytes, at the end of this round; then call *answers*.

        They are stored at once if the client has quotas: the server may have to pause it before its next request.
        """
        is_first = not self.parts
        self.parts.setdefault(answers, []).append(part)
        self._count += len(part.items)
        self._size += size
        if self._count >= COUNT_MAX or self._size >= BYTES_MAX or part.gate.allowance.applies:
            self.finish()
        elif is_first:
            part.peer.before_commit(self.finish)

    def finish(self) -> None:
        """Store all messages, and answer their clients; an unexpected error ends the connections of all of them."""
        by_protocol = self.parts
        if not by_protocol:
            return
        self.parts, self._count, self._size = {}, 0, 0
        try:
            _store(by_protocol)
        except Exception as error:
            for part in chain.from_iterable(by_protocol.values()):
                part.peer.close(f"{type(error).__name__}: {error}")
            raise


def _store(by_protocol: dict[PublishAnswers[Any], list[Any]]) -> None:
    """Store all messages, and answer their clients."""
    try:
        result = publish_together([(part.gate, part.items) for parts in by_protocol.values() for part in parts])
    except MartletError as error:
        for answers, of_protocol in by_protocol.items():
            answers.refuse(of_protocol, error)
        return
    if len(by_protocol) == 1:
        [(answers, of_protocol)] = by_protocol.items()
        answers.answer(of_protocol, result)
        return
    begin = 0
    for answers, of_protocol in by_protocol.items():
        end = begin + sum([len(part.items) for part in of_protocol])
        answers.answer(of_protocol, result.part(begin, end))
        begin = end
