"""Rounds of delivery: each is published as one atomic group with a note, and counts once it is stored.

The note has the begin of the round and the new offsets. Several rounds may wait for the disk at once: the next
fdatasync covers messages that become due during the current one. If a commit fails, its rounds are repeated; if a power
cut loses a round and keeps a later one, only the lost one is repeated.
"""

import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, final

from martlet.errors import Refused
from martlet.message import Message
from martlet_timer.lateness import Lateness
from martlet_timer.levels.delay_clock import DelayClock
from martlet_timer.levels.journal_codec import Ranges, encode_note
from martlet_timer.levels.state import LevelState

if TYPE_CHECKING:
    from martlet.broker import Broker

__all__ = ["ROUND_MESSAGES", "PublishedRounds", "Round"]

log = logging.getLogger("martlet.timer")

# The limits of a round, which blocks the event loop for about 2 ms.
ROUND_MESSAGES: Final = 128
ROUND_BYTES: Final = 1024 * 1024
# Rounds that may wait for the disk at the same time.
ROUNDS_MAX: Final = 16


@final
class Round:
    """The messages of one round, each with its level and the offset after it in the level's queue.

    Once the round is published, ``offsets`` are the offsets in its note, ``end`` is the log position after it, and
    ``noted`` the number of records in the journal.
    """

    __slots__ = (
        "bytes_left",
        "dropped",
        "due_ms",
        "end",
        "messages",
        "moved",
        "noted",
        "offsets",
        "places",
        "postponed",
    )

    def __init__(self, bytes_left: int) -> None:
        self.bytes_left = bytes_left
        self.messages: list[Message] = []
        self.places: list[tuple[int, int]] = []
        self.due_ms: dict[int, float] = {}  # by index of the message, for delivered ones
        self.moved = 0
        self.postponed = 0
        self.dropped = 0
        self.offsets: dict[int, int] = {}
        self.end = 0
        self.noted = 0

    @property
    def has_room(self) -> bool:
        return self.bytes_left > 0 and len(self.messages) < ROUND_MESSAGES


@final
class PublishedRounds:
    """Published rounds, and how far they are stored.

    Attributes:
      stored, noted: the offsets by level in the newest stored note, and in the newest note.
      settled_end: the log position after the newest stored round.
      published_end: the log position after the newest published round.
      lateness: of deliveries, when they are stored.
    """

    def __init__(self, broker: "Broker", plugin: str, state: LevelState, clock: DelayClock) -> None:
        self._broker = broker
        self._store = broker.store
        self._plugin = plugin
        self._state = state
        self._clock = clock
        # Published rounds that are not stored yet, in order.
        self._unsettled: deque[Round] = deque()
        self.stored: dict[int, int] = {}
        self.noted: dict[int, int] = {}
        self.published_end = self.settled_end = 0
        self.lateness = Lateness()
        self._delivered = self._moved_to_timers = self._postponed = self._undeliverable = 0

    @property
    def are_waiting(self) -> bool:
        """Whether rounds wait for the disk."""
        return bool(self._unsettled)

    @property
    def has_room(self) -> bool:
        """Whether another round may wait for the disk."""
        return len(self._unsettled) < ROUNDS_MAX

    def begin(self) -> Round:
        """Return an empty round."""
        config = self._store.config
        return Round(min(ROUND_BYTES, config.group_room // 2, config.segment_bytes // 4))

    def publish(self, new_round: Round, later: Mapping[int, Ranges]) -> None:
        """Publish the messages of *new_round* and its offsets; *later* is the argument of `encode_note`.

        Raises:
          Refused: the store accepts no writes at the moment.
        """
        note = self._state.journal, encode_note(new_round.offsets, self.noted, later)
        self._store.committer.renew_clock()  # an older time would look like an early delivery
        try:
            self._broker.publish_all(new_round.messages, atomic=True, notes=[note], passed=self._plugin)
        except Refused as refused:
            if self._store.admission.refusal or not new_round.messages:
                raise
            log.warning("delayed messages are delivered one by one, because one was refused; %s", refused)
            self._publish_each(new_round, later)
            self._broker.publish_all([], atomic=True, notes=[note])
        new_round.end, new_round.noted = self._store.appended, self._journal_end()
        self.published_end = new_round.end
        self.noted = new_round.offsets
        self._unsettled.append(new_round)

    def _publish_each(self, new_round: Round, later: Mapping[int, Ranges]) -> None:
        """Publish each message of *new_round* with a note of its own; drop refused messages."""
        offsets = dict(self.noted)
        for place, (message, (level, offset)) in enumerate(zip(new_round.messages, new_round.places, strict=True)):
            start_offsets = dict(offsets)
            offsets[level] = offset
            note = self._state.journal, encode_note(offsets, start_offsets, later)
            try:
                self._broker.publish_all([message], atomic=True, notes=[note], passed=self._plugin)
            except Refused as refused:
                if self._store.admission.refusal:
                    raise
                new_round.dropped += 1
                new_round.due_ms.pop(place, None)
                key = message.property("UNIQ_KEY") or "none"
                log.error("delayed message with key %s for topic %s is not delivered; %s", key, message.topic, refused)

    def _journal_end(self) -> int:
        return self._store.queue(self._state.journal.topic, 0).next_offset

    def settle(self) -> bool:
        """Count newly stored rounds; return False if rounds were undone because a commit failed."""
        store, unsettled = self._store, self._unsettled
        if not unsettled:
            return True
        journal_end = self._journal_end()
        while unsettled and unsettled[0].noted <= journal_end and unsettled[0].end <= store.readable:
            stored_round = unsettled.popleft()
            self.stored, self.settled_end = stored_round.offsets, stored_round.end
            self._count(stored_round)
        return not unsettled or unsettled[-1].noted <= journal_end

    def forget(self) -> None:
        """Forget rounds that are not stored: they were undone."""
        self._unsettled.clear()
        self.noted, self.published_end = self.stored, self.settled_end

    def _count(self, stored_round: Round) -> None:
        now = self._clock.now_ms()
        for due_ms in stored_round.due_ms.values():
            self.lateness.add(now - due_ms)
        self._delivered += len(stored_round.due_ms)
        self._moved_to_timers += stored_round.moved
        self._postponed += stored_round.postponed
        self._undeliverable += stored_round.dropped

    def statistics(self) -> dict[str, object]:
        return {
            "delivered": self._delivered,
            "moved_to_timers": self._moved_to_timers,
            "postponed": self._postponed,
            "undeliverable": self._undeliverable,
            **self.lateness.statistics(),
        }
