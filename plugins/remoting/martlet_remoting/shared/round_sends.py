"""Stores the sends of all connections that were read in one round, by one call, and answers them.

With many clients that each wait for the answer to one send, a read brings one message. Checking, storing and answering
the messages of a round together costs a third of doing so one by one.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias, final

from martlet.access import Gate, PublishGrant, publish_together
from martlet.contracts import Peer
from martlet.errors import MartletError
from martlet.message import Message
from martlet.store.append.items import AppendItem, AppendResult
from martlet_remoting.shared.templates import Templates
from martlet_remoting.wire.sends import Send

__all__ = ["Part", "RoundSends"]

# Messages, and bytes of them, after which they are stored before the end of the round: storing one takes 1 to 5 us, and
# copying a MiB with its CRCs 0.3 ms.
COUNT_MAX: Final = 256
BYTES_MAX: Final = 1 << 20


# Returns the answer to a send whose message was stored at a log position and an offset.
Answering: TypeAlias = Callable[[int, int], bytes]


class Sender(Protocol):
    """The client of a connection; implemented by `RequestContext`."""

    peer: Peer

    def refused_send(self, send: Send, code: int, error: MartletError) -> bytes:
        """Return the refusal of *send*, a request *code*; empty if nobody waits for it."""


class Part(NamedTuple):
    """The sends of one read of *sender*, requests *code*, and their messages *run*.

    *staged* has what answers the sends whose messages are for the stages, by index.
    """

    sender: Sender
    gate: Gate
    sends: Sequence[Send]
    run: Sequence[AppendItem | Message]
    staged: Mapping[int, Answering]
    code: int


@final
class RoundSends:
    """The sends of this round that are not stored yet, as long as *unflushed_bytes_max* leaves room for their messages.

    Call `finish` before a request that may depend on them is handled.
    """

    __slots__ = ("_count", "_room", "_templates", "_unflushed_bytes_max", "_whole_room", "parts")

    def __init__(self, templates: Templates, unflushed_bytes_max: int) -> None:
        self.parts: list[Part] = []
        self._count = 0
        self._room = self._whole_room = 0  # after `parts`, and before
        self._templates = templates
        self._unflushed_bytes_max = unflushed_bytes_max

    def room(self, grant: PublishGrant) -> int:
        """Return how many bytes of messages may still be added."""
        if not self.parts:
            self._room = self._whole_room = self._unflushed_bytes_max - grant.unflushed_bytes
        return self._room

    def add(self, part: Part, room: int) -> None:
        """Store the messages of *part* at the end of this round; *room* is left after them."""
        self.parts.append(part)
        self._room = room
        self._count += len(part.run)
        if len(self.parts) == 1:
            part.sender.peer.before_commit(self.finish)
        if self._count >= COUNT_MAX or self._whole_room - room >= BYTES_MAX:
            self.finish()

    def finish(self) -> None:
        """Store all messages, and answer their sends."""
        parts, self.parts, self._count = self.parts, [], 0
        if not parts:
            return
        try:
            result = publish_together([(part.gate, part.run) for part in parts])
        except MartletError as error:
            for part in parts:
                _refuse(part, error)
            return
        except Exception as error:
            for part in parts:
                part.sender.peer.close(f"{type(error).__name__}: {error}")
            raise
        self._answer(parts, result)

    def _answer(self, parts: Sequence[Part], result: AppendResult) -> None:
        sends = parts[0].sends if len(parts) == 1 else [send for part in parts for send in part.sends]
        templates, ends = self._templates, result.ends
        answers = templates.sent_answers(templates.sent_usual, sends, result.positions, result.offsets)
        may_be_apart, begin = bool(result.refused) or result.rolled, 0
        for part in parts:
            end = begin + len(part.run)
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


def _refuse(part: Part, error: MartletError) -> None:
    """Refuse all sends of *part*; an error that is no answer ends the connection."""
    sender = part.sender
    try:
        sender.peer.send(*[sender.refused_send(send, part.code, error) for send in part.sends])
    except MartletError as unanswerable:
        sender.peer.close(str(unanswerable))
