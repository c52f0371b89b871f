"""Where in the log the newest subscriptions of a client begin.

The cursor of a client that is behind reads messages that were published before a new subscription. These are not for
it: if they are retained, it has them as retained messages.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, final

from martlet.contracts import RecordView
from martlet.delivery.runs import Run

from .frames import Grant

__all__ = ["Beginnings"]

CLIENT: Final = b"MQTT_CLIENT"


class Beginning(NamedTuple):
    """The log position at which a subscription begins, and the one before which it brings nothing that is unmarked.

    Marked messages say which client published them (`messages.py`).
    """

    position: int
    unmarked: int


@final
class Beginnings:
    """Those of one client, by filter, until its cursor has passed them."""

    __slots__ = ("_all", "_last")

    def __init__(self) -> None:
        self._all: dict[str, Beginning] = {}
        self._last = 0

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, topic_filter: str, position: int, unmarked: int) -> None:
        """Let a subscription begin at log position *position*; before *unmarked*, it brings marked messages only."""
        self._all[topic_filter] = Beginning(position, unmarked)
        self._last = max(self._last, position, unmarked)

    def remove(self, topic_filter: str) -> None:
        """Forget a subscription that ends."""
        self._all.pop(topic_filter, None)

    def divide(self, run: Run, grants: tuple[Grant, ...]) -> Iterator[tuple[Run, tuple[Grant, ...]]]:
        """Yield parts of *run*, which *grants* match, each with those of them that bring it."""
        if run.position >= self._last:
            self._all.clear()
            yield run, grants
            return
        current: tuple[Grant, ...] = ()
        count, rest = 0, run
        for record in list(run.records()):
            wanted = self._bringing(record, grants)
            if wanted != current and count:
                part, rest = rest.split(count)
                if current:
                    yield part, current
                count = 0
            current = wanted
            count += 1
        if current:
            yield rest, current

    def _bringing(self, record: RecordView, grants: tuple[Grant, ...]) -> tuple[Grant, ...]:
        """Return which of *grants* bring *record*."""
        position, found = record.position, self._all
        late = [each for each in grants if each.subscription.topic_filter in found]
        if not late:
            return grants
        is_marked = record.properties.find(CLIENT) >= 0 and bool(record.property(CLIENT))
        dropped = set[str]()
        for each in late:
            topic_filter = each.subscription.topic_filter
            beginning = found[topic_filter]
            if position < beginning.position or (position < beginning.unmarked and not is_marked):
                dropped.add(topic_filter)
        return tuple(each for each in grants if each.subscription.topic_filter not in dropped) if dropped else grants
