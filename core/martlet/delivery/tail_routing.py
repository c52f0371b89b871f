"""Gives the records that a tail reader has read to their receivers, in runs, with the frames that are there already."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Final, final

from martlet.delivery.beginnings import Beginnings
from martlet.delivery.handed import HandedFrames
from martlet.delivery.merge import POSITION_OF
from martlet.delivery.routing.division import Found, Grants, Interest, divide
from martlet.delivery.routing.route_cache import in_pieces
from martlet.delivery.runs import Frames, Run, make_runs, note_positions
from martlet.runtime.steps import Budget, Steps
from martlet.store import Store

__all__ = ["RECEIVERS_COUNTED", "RECEIVER_US", "TailRouting"]

log = logging.getLogger("martlet.delivery")

# A receiver of a run.
RECEIVER_US: Final = 0.5
RECEIVERS_COUNTED: Final = 1024


@final
class TailRouting:
    """Routes records of the topics *names*, and keeps frames of messages that were just published."""

    def __init__(self, store: Store, names: Sequence[str], handed_bytes_max: int) -> None:
        self._store = store
        self._names = names
        self._handed_bytes_max = handed_bytes_max
        self._handed = HandedFrames()
        self._undone = store.committer.undone
        self._rules = 0  # counts the changes of rules for routes

    def hand_on(
        self, encoding: str, positions: Sequence[int], data: bytes, ends: Sequence[int], start: int = 0
    ) -> None:
        """Use the given frames of messages just published, like `Feed.hand_on`."""
        self._clear_after_undo()
        if ends and self._handed.size + ends[-1] - start <= self._handed_bytes_max:
            self._handed.add(encoding, positions, data, ends, start)

    def rules_changed(self) -> None:
        """Find the routes of all further records again, also of records already read."""
        self._rules += 1

    def route_by(
        self, interest: Interest, beginnings: Beginnings | None, records: list[Found], budget: Budget
    ) -> Steps[None]:
        """Pass *records* to their receivers."""
        end = stop = 0
        while end < len(records):
            if end == stop:
                stop = len(records)
                if beginnings:
                    while not beginnings.begin(records[end][0]):
                        yield
                    stop = bisect_left(records, beginnings.first, end, key=POSITION_OF)
            rules = self._rules
            parts, end = divide(records, interest, end, stop)
            for grants, part_records in parts:
                if self._rules == rules:
                    yield from self._deliver(grants, part_records, budget)
                else:  # in a pause: only current receivers get the others
                    yield from self._deliver_again(interest, grants, part_records, budget)
            if end < stop:
                yield

    def routed(self, position: int) -> None:
        """Drop the frames of all messages before *position*, which are routed."""
        if self._handed:
            self._handed.drop_before(position)

    def clear(self) -> None:
        """Drop all frames."""
        self._handed.clear()

    def _deliver_again(
        self, interest: Interest, grants: Grants[Any], records: list[Found], budget: Budget
    ) -> Steps[None]:
        """Find the present receivers of *records*, and pass the records to those that *grants* has."""
        end = 0
        while end < len(records):
            parts, end = divide(records, interest, end)
            for receivers, part_records in parts:
                yield from self._deliver(
                    {each: receivers[each] for each in receivers if each in grants}, part_records, budget
                )
            if end < len(records):
                yield

    def _deliver(self, grants: Grants[Any], records: list[Found], budget: Budget) -> Steps[None]:
        runs = make_runs(records)
        if self._handed and len(runs) == 1:
            self._attach_frames(runs[0], records)
        for run in runs:
            for count, receivers in in_pieces(grants, RECEIVERS_COUNTED):
                for receiver, values in receivers:
                    try:
                        receiver.matched(run, values)
                    except Exception:  # a bug of one receiver must not cost the others their messages
                        self._log_failed(run)
                if budget.is_over(count):
                    yield

    def _log_failed(self, run: Run) -> None:
        log.exception("a receiver of topic[%s] failed and misses %d messages", ", ".join(self._names), run.count)

    def _attach_frames(self, run: Run, records: list[Found]) -> None:
        """Use frames that were passed on for *run*, which consists of *records*."""
        self._clear_after_undo()
        positions = [each[0] for each in records]
        note_positions(run, positions)
        for encoding, data, ends in self._handed.find(positions):
            run.keep(encoding, Frames(data, ends))

    def _clear_after_undo(self) -> None:
        """Drop all frames after a failed commit was undone: later messages get the positions of its messages."""
        undone = self._store.committer.undone
        if undone != self._undone:
            self._undone = undone
            self._handed.clear()
