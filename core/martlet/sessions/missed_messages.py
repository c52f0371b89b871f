"""Counts the messages that a session misses because retention removes them while its client is away.

A session stores only a position in the log. The entries of a queue show how many of its messages are before that
position, but only while the record at the position exists. Before retention removes that record, the number is
therefore noted once with the session (``SessionState.passed``). When the client returns, the first offsets of the
queues show how many messages have been removed since.

All messages of these topics count, whatever their names, so the number is an upper bound for the session.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias, final

from martlet.errors import Refused
from martlet.records.layout import ENTRY_BYTES, POSITION_SIZE
from martlet.runtime.steps import Budget, Steps, off_loop, wait_for
from martlet.sessions.journal_codec import SessionState
from martlet.sessions.session import LiveSessions
from martlet.sessions.state import Passed, SessionTable
from martlet.store import Queue, Store
from martlet.store.queues.queues import BlockDamaged, Queues

__all__ = ["MissedMessages", "TopicsOf"]

# Cost of checking a session's position; finding the topics of a session costs as much as LOOKS_A_SESSION checks.
LOOK_US: Final = 1.0
LOOKS_A_SESSION: Final = 20
# Entries read at once, because positions that are close together are found in the same entries.
ENTRIES_AT_ONCE: Final = 256

# Returns the topics whose messages a session with these filters gets, if published while its client was away.
TopicsOf: TypeAlias = Callable[[Mapping[str, bytes]], Collection[str]]


@final
class MissedMessages:
    """Counts missed messages of all sessions; ``topics_of`` has the protocols whose sessions are counted."""

    def __init__(self, store: Store, table: SessionTable, live: LiveSessions) -> None:
        self.topics_of: dict[str, TopicsOf] = {}
        self._store = store
        self._table = table
        self._live = live

    # before records are removed

    def find_passed(self, start: int, end: int) -> Steps[Mapping[str, Passed]]:
        """Return the messages before the position of each session without a client, by key: a count per topic.

        Only sessions with a position from *start* to *end* are counted (`SessionState.passed`). Sessions that have the
        counts already are omitted, and topics with a damaged queue.
        """
        by_session: dict[str, tuple[int, Collection[str]]] = {}
        positions_by_topic: dict[str, set[int]] = {}
        budget = Budget(LOOK_US)
        for key in self._table:
            position, is_known = self._table.position(key)
            topics_of = self.topics_of.get(key.partition(" ")[0])
            if start <= position < end and not is_known and topics_of is not None:
                state = self._state_of(key, end)
                if state is not None and (topics := topics_of(state.filters)):
                    by_session[key] = position, topics
                    for topic in topics:
                        positions_by_topic.setdefault(topic, set()).add(position)
                budget.spend(LOOKS_A_SESSION)
            if budget.is_over():
                yield
        counts: dict[str, dict[int, int]] = {}
        for topic, positions in positions_by_topic.items():
            with suppress(BlockDamaged, OSError):
                counts[topic] = yield from self._count_before(topic, sorted(positions))
        return {
            key: (position, {topic: counts[topic][position] for topic in topics if topic in counts})
            for key, (position, topics) in by_session.items()
        }

    def _state_of(self, key: str, end: int) -> SessionState | None:
        """Return the stored state of session *key*; None if it has a client, whose position is then noted instead."""
        session = self._live.by_key.get(key)
        if session is None or session.lost is None:
            return self._table.get(key)
        position = session.reached()
        if session.position < end and session.position < position:
            with suppress(Refused):
                session.move(position)
        return None

    # when a client returns

    def count(self, protocol: str, state: SessionState) -> Steps[int]:
        """Return the number of messages that retention has removed, at or after its position, from the topics of
        *state*.

        Returns -1 if that is unknown: the session is from an older version, or a queue is damaged. *state* may change
        after the first slice.
        """
        position, passed = state.position, state.passed
        first, oldest = self._store.first_position, self._store.oldest_position
        topics_of, removed_to = self.topics_of.get(protocol), self._store.upkeep.topic_retention.removed_to
        topics = topics_of(state.filters) if topics_of is not None else ()
        count = 0
        for topic in topics:
            if position >= max(oldest, removed_to(topic)):
                continue
            removed_now = sum(queue.first_offset for queue in self._queues(topic))
            if position < first:
                if topic not in passed:
                    return -1
                removed_before = passed[topic]
            else:
                try:
                    removed_before = (yield from self._count_before(topic, [position], is_expired=True))[position]
                except (BlockDamaged, OSError):
                    return -1
            count += max(removed_now - removed_before, 0)
        return count

    # entries

    def _queues(self, topic: str) -> list[Queue]:
        return list(self._store.queues.topics.get(topic, {}).values())

    def _count_before(self, topic: str, positions: Sequence[int], *, is_expired: bool = False) -> Steps[dict[int, int]]:
        """Return the number of messages that the queues of *topic* had before each of *positions*, which ascend.

        With *is_expired*, counts only expired messages. Raises `BlockDamaged` and `OSError`.
        """
        counts = dict.fromkeys(positions, 0)
        for queue in self._queues(topic):
            end = queue.first_offset if is_expired else queue.next_offset
            for position, offset in zip(positions, (yield from self.offsets(queue, end, positions)), strict=True):
                counts[position] += offset
        return counts

    def offsets(self, queue: Queue, end: int, positions: Sequence[int]) -> Steps[list[int]]:
        """Return the first offset of *queue* up to *end* at or after each of *positions*, which ascend.

        Asks the cold tier for positions before the log (`WaitingSteps`). Raises `BlockDamaged`, `OSError` and
        `Refused`.
        """
        cold, at = self._store.cold, bisect_left(positions, self._store.local_position)
        if not at or not cold.has_range(queue):
            return (yield from self._local_offsets(queue, end, positions))
        offsets: list[int] = []
        for position in positions[:at]:
            offset = yield from wait_for(partial(cold.offset_by_position, queue, position))
            offsets.append(min(offset, end))
        return offsets + (yield from self._local_offsets(queue, end, positions[at:]))

    def _local_offsets(self, queue: Queue, end: int, positions: Sequence[int]) -> Steps[list[int]]:
        queues, start, files_end = self._store.queues, queue.stored_from, min(queue.tail_offset, end)
        offsets: list[int] = []
        if start < files_end:  # these entries are in files
            offsets = yield from off_loop(partial(_find_offsets, queues, queue, start, files_end, positions))
            offsets = offsets[: bisect_left(offsets, files_end)]
        return offsets + _find_offsets(queues, queue, max(start, files_end), end, positions[len(offsets) :])


def _find_offsets(queues: Queues, queue: Queue, start: int, end: int, positions: Sequence[int]) -> list[int]:
    """Return the first offset from *start* to *end* at or after each of *positions*, which ascend.

    Raises:
      BlockDamaged: a needed entry is damaged.
    """
    offsets: list[int] = []
    loaded: list[int] = []  # the positions of entries from `start` on
    for position in positions:
        if not loaded or loaded[-1] < position:
            start = queues.first_behind(queue, start + len(loaded), end, position)
            entries = queues.load_entries(queue, start, min(ENTRIES_AT_ONCE, end - start)) if start < end else b""
            loaded = list(_positions(entries))
        offsets.append(start + bisect_left(loaded, position))
    return offsets


def _positions(entries: bytes) -> Iterator[int]:
    for at in range(0, len(entries), ENTRY_BYTES):
        yield POSITION_SIZE.unpack_from(entries, at)[0]
