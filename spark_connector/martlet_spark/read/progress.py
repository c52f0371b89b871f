"""The progress of a task in its ranges."""

from typing import Final, final

from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.read.offsets import words
from martlet_spark.read.planner import Range

__all__ = ["RangeProgress"]


@final
class RangeProgress:
    """The progress in a range: the next offset to read, and the time since which answers have not advanced it.

    ``suspect`` is an offset whose message the last answer lacked. ``passed`` is the first offset that filtered answers
    have skipped, until its message is known to exist. With ``checked`` the broker leaves damaged messages out.
    """

    __slots__ = ("checked", "end", "next", "passed", "queue", "stuck_since", "suspect")

    def __init__(self, each: Range) -> None:
        self.queue: Final[MessageQueue] = each.queue
        self.next = each.start
        self.end: Final = each.end
        self.stuck_since: float | None = None
        self.suspect: int | None = None
        self.passed: int | None = None
        self.checked = False

    @property
    def is_done(self) -> bool:
        return self.next >= self.end and self.passed is None

    def __str__(self) -> str:
        return words(self.queue)

    def move(self, offset: int) -> None:
        if offset > self.next:
            self.next = min(offset, self.end)
            self.stuck_since = self.suspect = None
