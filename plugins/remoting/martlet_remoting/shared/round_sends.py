"""Answers the sends of all connections that were read in one round, whose messages are stored by one call.

Writing the answers of many connections together costs a fraction of writing them one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias, final

from martlet.access import Gate, PublishGrant, RoundPublishes
from martlet.contracts import Peer
from martlet.errors import MartletError
from martlet.message import Message
from martlet.store.append.items import AppendItem, AppendResult
from martlet_remoting.shared.templates import Templates
from martlet_remoting.wire.sends import Send

__all__ = ["Part", "RoundSends"]

# Returns the answer to a send whose message was stored at a log position and an offset.
Answering: TypeAlias = Callable[[int, int], bytes]


class Sender(Protocol):
    """The client of a connection; implemented by `RequestContext`."""

    peer: Peer

    def refused_send(self, send: Send, code: int, error: MartletError) -> bytes:
        """Return the refusal of *send*, a request *code*; empty if nobody waits for it."""


class Part(NamedTuple):
    """The sends of one read of *sender*, requests *code*, and their messages *items*.

    *staged* has what answers the sends whose messages are for the stages, by index.
    """

    sender: Sender
    gate: Gate
    sends: Sequence[Send]
    items: Sequence[AppendItem | Message]
    staged: Mapping[int, Answering]
    code: int

    @property
    def peer(self) -> Peer:
        return self.sender.peer


@final
class RoundSends:
    """Answers the sends of a round (`RoundPublishes`).

    There is room for messages as long as no more than *unflushed_bytes_max* wait to be flushed.
    """

    __slots__ = ("_publishes", "_room", "_templates", "_unflushed_bytes_max")

    def __init__(self, publishes: RoundPublishes, templates: Templates, unflushed_bytes_max: int) -> None:
        self._publishes = publishes
        self._room = 0  # after the messages that wait
        self._templates = templates
        self._unflushed_bytes_max = unflushed_bytes_max

    def room(self, grant: PublishGrant) -> int:
        """Return how many bytes of messages may still be added."""
        if self not in self._publishes.parts:
            self._room = self._unflushed_bytes_max - grant.unflushed_bytes
        return self._room

    def add(self, part: Part, room: int) -> None:
        """Store the messages of *part* at the end of this round; *room* is left after them."""
        size, self._room = self._room - room, room
        self._publishes.add(self, part, size)

    def refuse(self, parts: Sequence[Part], error: MartletError) -> None:
        """Refuse the sends of *parts*; an error that is no answer ends the connection."""
        for part in parts:
            sender = part.sender
            try:
                sender.peer.send(*[sender.refused_send(send, part.code, error) for send in part.sends])
            except MartletError as unanswerable:
                sender.peer.close(str(unanswerable))

    def answer(self, parts: Sequence[Part], result: AppendResult) -> None:
        """Answer the sends of *parts*."""
        sends = parts[0].sends if len(parts) == 1 else [send for part in parts for send in part.sends]
        templates, ends = self._templates, result.ends
        answers = templates.sent_answers(templates.sent_usual, sends, result.positions, result.offsets)
        may_be_apart, begin = bool(result.refused) or result.rolled, 0
        for part in parts:
            end = begin + len(part.items)
            for place, answer in part.staged.items():
                at = begin + place
                if answers[at] and result.offsets[at] >= 0:
                    answers[at] = answer(result.positions[at], result.offsets[at])
            peer = part.sender.peer
            if may_be_apart:
                self._answer_each(part, begin, answers, result)
            else:
                peer.hold_until(ends[end - 1])
                peer.send(answers[begin] if end == begin + 1 else b"".join(answers[begin:end]))
            begin = end

    @staticmethod
    def _answer_each(part: Part, begin: int, answers: list[bytes], result: AppendResult) -> None:
        """Answer the sends of *part* one by one, whose first message is at *begin* of *result*.

        Records in an earlier segment are committed already: if the next commit fails, only later ones are refused.
        """
        peer = part.sender.peer
        for at, send in enumerate(part.sends, begin):
            refused = result.refused.get(at)
            if refused is None:
                peer.hold_until(result.ends[at])
            peer.send(answers[at] if refused is None else part.sender.refused_send(send, part.code, refused))
