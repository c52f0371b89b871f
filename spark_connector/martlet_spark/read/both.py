"""Reads the ranges of a task from tables of the cold tier and from brokers.

Files of a table may be replaced or removed while a query reads them. Then the task looks for the rest of its messages
in the newest version of the table. What that lacks is read from the broker, or is lost if no broker is to be read.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

from martlet_spark.cluster import Cluster
from martlet_spark.errors import ReadError
from martlet_spark.options import Options
from martlet_spark.read.cold_rows import ColdBatches, RowGroup
from martlet_spark.read.filters import Filter
from martlet_spark.read.history import TopicSet, lose_doubtful, read_history
from martlet_spark.read.losses import lose
from martlet_spark.read.offsets import words
from martlet_spark.read.planner import Piece, Range, gaps
from martlet_spark.read.task import decoded, new_decoder, range_reader, selected, undecodable_of, warn_undecoded
from martlet_spark.read.tier_place import TierPlace, plain_errors
from martlet_tiered.errors import ObjectDamaged, ObjectMissing

__all__ = ["BothReader"]

log = logging.getLogger("martlet.spark")

# Times that a task looks for its messages in a newer table.
REPLANS_MAX: Final = 5


@final
class BothReader:
    """Reads ranges of tables and of brokers' queues into the columns *names*, as a query with *options* says."""

    def __init__(self, cluster: Cluster, options: Options, names: Sequence[str], wanted: Filter) -> None:
        self._cluster = cluster
        self._options = options
        self._names = tuple(names)
        self._wanted = wanted
        self._fails: bool = options["failOnDataLoss"]

    def read(self, ranges: Sequence[Range]) -> Iterator[Any]:
        """Yield RecordBatches with the messages of *ranges*, in order within each queue; those of tables come first.

        Raises:
          ReadError: a store, a table or a broker cannot be read.
          DataLost: messages are gone.
        """
        hot = [each for each in ranges if each.rows is None]
        cold = [each for each in ranges if each.rows is not None]
        if cold:
            yield from self._read_cold(cold, hot)
        if hot:
            yield from range_reader(self._cluster, self._options, self._names, self._wanted).read(hot)

    def _read_cold(self, left: list[Range], hot: list[Range]) -> Iterator[Any]:
        """Yield the messages of *left*; add to *hot* what the table does not have any more."""
        treatment = undecodable_of(self._options)
        decoder = new_decoder(self._names, self._wanted, treatment)
        rows = ColdBatches(decoder)
        tries = 0
        while left:
            try:
                for batches in self._row_groups(rows, left):
                    for batch in batches:
                        yield from selected(batch, self._wanted, self._names)
            except ObjectMissing as error:
                tries += 1
                if tries > REPLANS_MAX:
                    raise ReadError(f"{error}, and the table changes all the time; start the query again") from None
                log.info("a file of the cold tier was replaced, reading its table again: %s", error)
                left[:] = self._find_again(left, hot)
        warn_undecoded(decoder, treatment)

    def _row_groups(self, rows: ColdBatches, left: list[Range]) -> Iterator[list[Any]]:
        """Yield the batches of one row group after the other, whose ranges are removed from *left* before.

        Raises:
          ObjectMissing: a file is gone.
        """
        groups = rows.fetched(list(left))
        while left:
            with plain_errors(ObjectMissing):
                group = next(groups)
                found = self._batches(rows, group)
            del left[: len(group.ranges)]
            yield found

    def _batches(self, rows: ColdBatches, group: RowGroup) -> list[Any]:
        """Return the batches of *group*; none if it is damaged, and that may be."""
        try:
            return decoded(lambda: rows.batches(group))
        except ObjectDamaged:
            pass  # on the way, perhaps
        try:
            again = rows.fetch(group.ranges)
            return decoded(lambda: rows.batches(again))
        except ObjectDamaged as error:
            for each in group.ranges:
                text = f"messages {each.start} to {each.end - 1} of {words(each.queue)} are damaged in the cold tier"
                lose(f"{text} ({error})", fails=self._fails)
            return []

    def _find_again(self, left: Sequence[Range], hot: list[Range]) -> list[Range]:
        """Return where the messages of *left* are in the newest tables; add to *hot* what these lack.

        Raises:
          DataLost: they lack messages, and no broker is to be read.
        """
        by_place: dict[TierPlace, list[Range]] = {}
        for each in left:
            assert each.rows is not None
            by_place.setdefault(each.rows.place, []).append(each)
        found: list[Range] = []
        for place, ranges in by_place.items():
            found += self._find_in(place, _pieces(ranges), hot)
        return found

    def _find_in(self, place: TierPlace, last_positions: Mapping[Piece, int], hot: list[Range]) -> list[Range]:
        """Return where the pieces, each with the greatest log position of its messages, are in the table at *place*.

        Raises and adds to *hot* what `_find_again` does.
        """
        topics = TopicSet({queue.topic for queue, _ in last_positions})
        with plain_errors():
            history = read_history(place, topics, since=min(last_positions.values()))
        wanted: list[Piece] = []
        for piece, last_position in last_positions.items():
            queue, (start, end) = piece
            if history.is_created_again(piece, last_position):
                text = f"messages {start} to {end - 1} of {words(queue)} were deleted while the query was reading"
                lose(f"{text}: topic {queue.topic!r} was deleted, or created again", fails=self._fails)
            elif self._options["tier"] == "cold":
                wanted.append(piece)
            else:
                seam = history.seam(queue, start, end)
                wanted.append((queue, (start, seam)))
                hot += [Range(queue, seam, end)] if seam < end else []
        ranges = history.ranges(wanted)
        if self._options["tier"] == "cold":
            lose_doubtful(history, fails=self._fails)
        for each in gaps(wanted, ranges):
            text = f"messages {each.start} to {each.end - 1} of {words(each.queue)}"
            lose(f"{text} are not in the cold tier any more", fails=self._fails)
        return ranges


def _pieces(ranges: Sequence[Range]) -> dict[Piece, int]:
    """Return the contiguous pieces of *ranges*, and the greatest log position of the messages of each."""
    found: list[tuple[Range, int]] = []
    for each in sorted(ranges, key=lambda each: (each.queue, each.start)):
        assert each.rows is not None
        last = found[-1][0] if found else None
        if last is not None and last.queue == each.queue and last.end == each.start:
            found[-1] = Range(each.queue, last.start, each.end), max(found[-1][1], each.rows.last_position)
        else:
            found.append((Range(each.queue, each.start, each.end), each.rows.last_position))
    return {(each.queue, (each.start, each.end)): position for each, position in found}
