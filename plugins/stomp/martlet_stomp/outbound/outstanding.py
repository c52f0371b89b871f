"""What a client was sent of a subscription and has not acknowledged yet."""

from collections.abc import Sequence
from typing import Protocol, final

from martlet.delivery.subscriptions import Subscription as Reader
from martlet_stomp.shared.following import Follower

__all__ = ["Ledger", "Outstanding"]


class Ledger(Protocol):
    """What a client was sent and has not acknowledged; a `Member` of a group is one."""

    def holds(self, queue_id: int, offset: int) -> bool: ...

    def ack_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]: ...

    def nack_all(self, queue_id: int, offsets: Sequence[int], delay_s: float = 0) -> Sequence[int]: ...

    def give_up_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]: ...


@final
class Outstanding:
    """The ledger of a topic's subscription: a message that is settled gives its credit back, and nothing else."""

    __slots__ = ("_held", "_reader")

    def __init__(self, reader: Reader | Follower) -> None:
        self._reader = reader
        self._held: dict[int, dict[int, None]] = {}

    def add(self, queue_id: int, offsets: Sequence[int]) -> None:
        """Note that the client was sent messages."""
        self._held.setdefault(queue_id, {}).update(dict.fromkeys(offsets))

    def holds(self, queue_id: int, offset: int) -> bool:
        return offset in self._held.get(queue_id, ())

    def ack_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        held = self._held.get(queue_id, {})
        settled = [offset for offset in dict.fromkeys(offsets) if offset in held]
        for offset in settled:
            del held[offset]
        self._reader.add_credit(len(settled))
        return settled

    def nack_all(self, queue_id: int, offsets: Sequence[int], delay_s: float = 0) -> Sequence[int]:
        return self.ack_all(queue_id, offsets)

    def give_up_all(self, queue_id: int, offsets: Sequence[int]) -> Sequence[int]:
        return self.ack_all(queue_id, offsets)
