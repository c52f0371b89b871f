"""Cursors: the position of one receiver in the log, and the records that it has not collected yet.

A receiver gets each record once, in log order: its cursor is *swept* while it is behind the tail of its feed
(`reader.py`), and then follows the tail (`tail_reader.py`).

A receiver's uncollected records are limited. A full cursor remembers its position in the log and stops taking records;
it is swept again once there is room. It holds positions, never a backlog.
"""

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from enum import Enum, unique
from typing import Final, Protocol, final

from martlet.contracts import DeliveryLimit
from martlet.delivery.runs import Run
from martlet.errors import Refused
from martlet.runtime.steps import Budget, Steps

__all__ = ["Cursor", "CursorPlace", "CursorSource", "Permit", "Sweeping"]

# Limits of uncollected records: for a cursor; for all cursors of a feed; for a cursor once the feed's total is reached.
PENDING_BYTES: Final = 1 << 22
PENDING_BYTES_ALL: Final = 1 << 26
PENDING_BYTES_LEAST: Final = 1 << 18
MESSAGES_ANY: Final = 1 << 62
# The begin of a new filter: after everything that was appended.
END: Final = 1 << 62
# Cost of a question about a filter, which an authorizer answers after a change of the rules. A cursor with more filters
# than `CHECKED_AT_ONCE` is checked in slices.
CHECK_US: Final = 20.0
CHECKED_AT_ONCE: Final = 16


@unique
class CursorPlace(Enum):
    """Where a cursor is: behind the tail, at it, or full."""

    BEHIND = "behind"  # no sweep has reached it yet
    SWEPT = "swept"
    TAIL = "tail"
    FULL = "full"  # until some records are collected
    CLOSED = "closed"


class Permit(Protocol):
    """Decides what one receiver may follow and read; created by a gate."""

    @property
    def generation(self) -> int:
        """Incremented when the answers may have changed."""
        ...

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` unless the receiver may follow *topic_filter*."""
        ...

    def allows(self, name: str) -> bool:
        """Return whether the receiver may read messages of *name*."""
        ...


class Sweeping(Protocol):
    """A reader of the log for a cursor behind the tail: a sweep, which has routed everything before ``swept_to``."""

    swept_to: int

    def leave(self, cursor: "Cursor") -> None: ...

    def add_filter(self, cursor: "Cursor", topic_filter: str) -> None: ...

    def remove_filter(self, cursor: "Cursor", topic_filter: str) -> None: ...


class CursorSource(Protocol):
    """The owner of a cursor, from which the cursor gets its messages: a `Feed`.

    ``pending_bytes`` is the size of the records that its cursors have not yet collected.
    """

    pending_bytes: int

    def tail_position(self) -> int: ...

    def check(self, topic_filter: str) -> None: ...

    def add_filter(self, cursor: "Cursor", topic_filter: str, value: Hashable, begin: int) -> None: ...

    def remove_filter(self, cursor: "Cursor", topic_filter: str) -> None: ...

    def resume(self, cursor: "Cursor") -> None: ...

    def go_back(self, cursor: "Cursor", position: int) -> None: ...

    def pause(self, cursor: "Cursor") -> None: ...

    def skip_to_tail(self, cursor: "Cursor") -> None: ...

    def close_cursor(self, cursor: "Cursor") -> None: ...


@final
class Cursor:
    """One receiver of a `Feed`; created by `Feed.open`.

    At the place `CursorPlace.TAIL` the cursor has joined the tail. ``wake`` is called when there is something to
    collect, and when the tail is joined. ``dropped`` counts messages that a full cursor did not take (`Feed.open`).
    ``sweep`` reads for a cursor at `CursorPlace.SWEPT`. ``begins`` has the log positions at which filters begin that
    deliver nothing yet; it may be None. ``limit`` is what the receiver's quotas allow; None if it has none.
    """

    __slots__ = (
        "_droppable",
        "_feed",
        "_generation",
        "_pending",
        "_pending_bytes",
        "_pending_bytes_max",
        "_permit",
        "_position",
        "_refused",
        "begins",
        "dropped",
        "filters",
        "is_paused",
        "limit",
        "place",
        "sweep",
        "wake",
    )

    def __init__(
        self,
        feed: CursorSource,
        wake: Callable[[], None],
        filters: Mapping[str, Hashable],
        position: int,
        pending_bytes_max: int,
        permit: Permit | None,
        droppable: Callable[[tuple[Hashable, ...]], bool] | None,
    ) -> None:
        self.wake = wake
        self.dropped = 0
        self._droppable = droppable
        self._permit = permit
        self._generation = permit.generation if permit is not None else 0  # of the rules that were checked
        self._refused: Refused | None = None  # why the receiver may not follow one of its filters by these rules
        self.filters = dict(filters)
        self.begins: dict[str, int] | None = None
        self.is_paused = False
        self.limit: DeliveryLimit | None = None
        self.place = CursorPlace.BEHIND
        self.sweep: Sweeping | None = None
        self._feed = feed
        self._position = position
        self._pending: deque[tuple[Run, tuple[Hashable, ...]]] = deque()
        self._pending_bytes = 0
        self._pending_bytes_max = pending_bytes_max

    @property
    def position(self) -> int:
        """The log position before which everything was collected; to continue later, open a cursor there."""
        if self._pending:
            return self._pending[0][0].position
        if self.place is CursorPlace.TAIL:
            return max(self._position, self._feed.tail_position())
        if self.sweep is not None:
            return max(self._position, self.sweep.swept_to)
        return self._position

    @property
    def has_pending(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._pending)

    @property
    def start(self) -> int:
        """The log position of the first record that the cursor may take."""
        return self._position

    def collect(self, budget_bytes: int, messages_max: int = MESSAGES_ANY) -> list[tuple[Run, tuple[Hashable, ...]]]:
        """Return about *budget_bytes* of records, as runs with the values of the filters that match them.

        Stops after the run that crosses the budget, after one that is compressed or heavy, and after *messages_max*
        messages, where a run is split. Wakes the receiver again if more is pending. Returns nothing while the receiver
        must wait by its ``limit``.

        Raises:
          Refused: the receiver may no longer follow one of its filters.
        """
        if not self.check_rules():
            return []
        limit = self.limit if self.limit is not None and self.limit.applies else None
        if limit is not None:
            messages_max, budget_bytes = limit.room(messages_max, budget_bytes)
        collected: list[tuple[Run, tuple[Hashable, ...]]] = []
        while self._pending and budget_bytes > 0 and messages_max > 0:
            run, grants = self._pending.popleft()
            count, size = min(run.count, messages_max), len(run.data)
            if limit is not None and size > budget_bytes:
                count = min(count, max(run.count * budget_bytes // size, 1))
            if run.count > count:
                run, remaining_run = run.split(count)
                self._pending.appendleft((remaining_run, grants))
                size = len(run.data)
            budget_bytes -= size
            messages_max -= run.count
            self._count_pending(-size)
            collected.append((run, grants))
            if run.is_compressed or run.is_heavy:
                break
        if limit is not None and collected:
            limit.charge_out(sum([run.count for run, _ in collected]), sum([len(run.data) for run, _ in collected]))
        if self._pending:
            self.wake()
        elif self.place is CursorPlace.FULL:
            self._feed.resume(self)
        return collected

    def check_rules(self) -> bool:
        """Raise `Refused` if the receiver may no longer follow one of its filters.

        Returns False if there are many filters and the rules have changed: `recheck` then checks them in slices, and
        wakes the receiver. `collect` calls it; a protocol that does not always collect when it is woken calls it, too.
        """
        permit = self._permit
        if permit is not None and permit.generation != self._generation:
            if len(self.filters) > CHECKED_AT_ONCE:
                return False
            refused = None
            for each in self.filters:
                refused = refused or self._refusal(permit, each)
            self._apply_rules(permit.generation, refused)
        if self._refused is not None:
            raise self._refused
        return True

    def recheck(self) -> Steps[None] | None:
        """Check the filters again, and wake the receiver if one is denied: `collect` refuses it.

        `martlet.access.revocation` calls it after a change of the rules.
        """
        permit = self._permit
        if permit is not None and permit.generation != self._generation and len(self.filters) > CHECKED_AT_ONCE:
            return self._recheck_in_steps(permit)
        try:
            self.check_rules()
        except Refused:
            self.wake()
        return None

    def _recheck_in_steps(self, permit: Permit) -> Steps[None]:
        generation, refused, budget = permit.generation, None, Budget(CHECK_US)
        for each in list(self.filters):
            refused = refused or self._refusal(permit, each)
            if budget.is_over():
                yield
                if self.place is CursorPlace.CLOSED or permit.generation != generation:
                    return  # another visit follows the next change
        self._apply_rules(generation, refused)
        self.wake()

    @staticmethod
    def _refusal(permit: Permit, topic_filter: str) -> Refused | None:
        try:
            permit.check(topic_filter)
        except Refused as refused:
            return refused
        return None

    def _apply_rules(self, generation: int, refused: Refused | None) -> None:
        """Note that the filters were checked by the rules of *generation*, and route pending runs again by them."""
        self._generation, self._refused = generation, refused
        if self._pending and refused is None:
            position = self._pending[0][0].position
            self._drop_pending()
            self._feed.go_back(self, position)

    def may_read(self, name: str) -> bool:
        """Return whether messages of *name* may be delivered to the receiver; False if the decision fails."""
        try:
            return self._permit is None or self._permit.allows(name)
        except Refused:
            return False

    def check(self, topic_filter: str) -> None:
        """Raise `Refused` unless *topic_filter* is valid and the receiver may follow it."""
        self._feed.check(topic_filter)
        if self._permit is not None:
            self._permit.check(topic_filter)

    def matched(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        """Take *run* at the tail (see `Receiver`); if the cursor is full afterwards, it leaves the tail."""
        # A run may reach its receivers in several turns; some may have left the tail since the first turn, or skipped
        # the run.
        if self.place is not CursorPlace.TAIL or run.position < self._position:
            return
        if self._droppable is not None and self._is_full_with(run) and self._droppable(grants):
            self.dropped += run.count
            self._position = run.end
        else:
            self._take(run, grants)

    def swept(self, run: Run, grants: tuple[Hashable, ...], sweep: Sweeping) -> None:
        """Take *run* in *sweep*; if the cursor is full afterwards, it leaves the sweep."""
        if self.sweep is sweep:
            self._take(run, grants)

    def _is_full_with(self, run: Run) -> bool:
        if not self._pending:
            return False
        size = self._pending_bytes + len(run.data)
        if size <= PENDING_BYTES_LEAST:
            return size > self._pending_bytes_max
        return size > self._pending_bytes_max or self._feed.pending_bytes > PENDING_BYTES_ALL

    def _count_pending(self, added_bytes: int) -> None:
        self._pending_bytes += added_bytes
        self._feed.pending_bytes += added_bytes

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._count_pending(-self._pending_bytes)

    def _take(self, run: Run, grants: tuple[Hashable, ...]) -> None:
        size = len(run.data)
        if self._is_full_with(run):
            self._position = run.position
            self._feed.pause(self)
            return
        if not self._pending:
            self.wake()
        self._pending.append((run, grants))
        self._count_pending(size)
        self._position = run.end

    def move_to(self, place: CursorPlace, position: int) -> None:
        """Move the cursor to *position*: all records before it were taken or are pending."""
        self._position = max(self._position, position)
        self.place = place

    def begin_later(self, topic_filter: str, position: int) -> None:
        """Note that a filter delivers nothing from before log position *position*."""
        if self.begins is None:
            self.begins = {}
        self.begins[topic_filter] = position

    def note_begun(self, topic_filter: str) -> None:
        """Note that a filter delivers messages now; they are after the pending ones."""
        pending = self._pending
        if self.begins is not None and not (pending and pending[0][0].position < self.begins.get(topic_filter, 0)):
            self.forget_begin(topic_filter)  # otherwise the begin is needed if the feed returns to the pending records

    def forget_begin(self, topic_filter: str) -> None:
        """Drop the begin of a filter, which is not needed any more."""
        if self.begins is not None:
            self.begins.pop(topic_filter, None)
            if not self.begins:
                self.begins = None

    def note_log_cut(self, position: int) -> None:
        """Note that the log was cut at *position*: records appended there are new to the cursor."""
        self._position = min(self._position, position)
        if self.begins is not None:
            self.begins = {topic_filter: min(begin, position) for topic_filter, begin in self.begins.items()}

    def restart(self, position: int) -> None:
        """Continue from *position*, after the feed has removed the cursor from a sweep or the tail."""
        self._position = position

    def resume(self) -> None:
        """Begin to receive, if the cursor was opened paused."""
        self.is_paused = False
        if self.place is CursorPlace.FULL:
            self._feed.resume(self)

    def add_filter(self, topic_filter: str, value: Hashable = None, *, is_live: bool = False, begin: int = 0) -> None:
        """Deliver messages that match *topic_filter* and are published from now on, wherever the cursor is.

        If the cursor has the filter already, only its value is replaced. If the cursor is paused, the filter begins at
        the cursor's position, or at log position *begin* if that is later, unless it *is_live*. Raises `Refused` like
        `check`.
        """
        self.check(topic_filter)
        self._feed.add_filter(self, topic_filter, value, END if is_live or not self.is_paused else begin)

    def remove_filter(self, topic_filter: str) -> None:
        """Stop delivering messages that match only *topic_filter*."""
        self._feed.remove_filter(self, topic_filter)

    def skip_to_tail(self) -> None:
        """Drop all pending and missed records; continue with messages published from now on."""
        self._drop_pending()
        self._feed.skip_to_tail(self)

    def close(self) -> None:
        """Stop receiving; call it when the receiver is gone."""
        position = self.position
        self._feed.close_cursor(self)
        self._drop_pending()
        self._position = position
