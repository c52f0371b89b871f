"""The context of one group on one topic, for all of its parts: its key, its rules, and its broker.

The parts form layers, and each refers only to those below it: `GroupContext`, `GroupMembers`, `GroupQueue` and
`GroupQueues`, then `GroupSource`, `Settlement` and `Distribution`, and `SharedGroup` with all of them. So the owner's
alarms name a context and not its group: no part keeps a group in memory that has ended.
"""

from collections.abc import Callable
from typing import Protocol, final

from martlet.delivery.tail_reader import Tails
from martlet.groups.journal.journal_codec import Key
from martlet.groups.journal.journal_writer import GroupJournalWriter
from martlet.groups.journal.state import GroupState
from martlet.groups.strategy.policy import GroupPolicy
from martlet.runtime.clock import Clock
from martlet.settings import DeliveryConfig
from martlet.store import Store
from martlet.tables.groups import Groups
from martlet.tables.topics import DLQ_PREFIX, Topic, Topics

__all__ = ["GroupContext", "Owner"]


class Owner(Protocol):
    """The parts that all groups of a broker share; implemented by `SharedGroups`."""

    store: Store
    topics: Topics
    groups: Groups
    tails: Tails
    clock: Clock
    config: DeliveryConfig
    now: Callable[[], float]
    state: GroupState
    notes: GroupJournalWriter
    unsettled: int
    withheld: int
    alarm: Callable[["GroupContext", float], None]

    @property
    def room(self) -> int: ...

    def left(self, context: "GroupContext") -> None: ...

    def settled(self, count: int) -> None: ...


@final
class GroupContext:
    """One group on one topic; without a *policy* it is a consumer group.

    A group that is not stored yet begins with *marks* (`OWNS_TOPIC`, `AUTO_DELETE`). It counts for *user*; None for the
    broker itself.
    """

    def __init__(
        self,
        owner: Owner,
        topic: Topic,
        group: str,
        policy: GroupPolicy | None,
        marks: int = 0,
        user: str | None = None,
    ) -> None:
        self.owner = owner
        self.topic = topic
        self.group = group
        self.policy = policy
        self.user = user
        known = owner.notes.stored(self.key(0))
        is_known = known is not None and known.next <= topic.queue(0).next_offset  # else of a deleted topic
        self.marks = known.marks if known is not None and is_known else marks

    @property
    def place(self) -> tuple[str, str, str]:
        """Its key among all groups."""
        return self.topic.name, self.group, self.policy.scope if self.policy is not None else ""

    def key(self, queue_id: int) -> Key:
        """Return the key of a queue's stored state."""
        return Key(self.policy.scope if self.policy is not None else "", self.group, self.topic.name, queue_id)

    def marks_of(self, queue_id: int) -> int:
        """Return the marks stored with a queue: the group's marks for its first queue."""
        return self.marks if not queue_id else 0

    def times(self) -> tuple[float, int]:
        """Return the time now, on the clock of deadlines in seconds and on the wall clock in ms."""
        return self.owner.now(), self.owner.clock.now_ms()

    @property
    def leaving_counts(self) -> bool:
        """Whether messages that a member held count as failed when it leaves, or its lease ends."""
        return self.policy is None or self.policy.leaving_counts

    @property
    def dead_letters(self) -> str:
        """The topic for dead messages; if empty, they are dropped."""
        return self.policy.dead_letters if self.policy is not None else DLQ_PREFIX + self.group

    @property
    def keeps_failed(self) -> bool:
        """Whether no message becomes dead: its dead letter would be in the same topic, and fail there again."""
        return self.dead_letters == self.topic.name

    def deliveries_max(self) -> int:
        """Return the maximum number of deliveries of a message, 0 for no limit; the first delivery is not a retry."""
        if self.keeps_failed:
            return 0
        if self.policy is not None:
            retries = self.policy.retries_max
        else:
            group = self.owner.groups.get(self.group)
            retries = group.retry_max_times if group is not None else 16
        return retries + 1 if retries >= 0 else 0

    def commit_offset(self, queue_id: int, offset: int) -> None:
        """Commit *offset* of a consumer group."""
        if self.policy is None:
            self.owner.groups.offsets.commit(self.group, self.topic.name, queue_id, offset)
