"""One projection of a broker, and its progress through the log."""

from collections.abc import Callable, Sequence
from typing import Final, final

from msgspec.structs import replace

from martlet.runtime.steps import Steps, begin
from martlet.state.log_order import LogOrder, Run
from martlet.state.projection import HoldsMessages, Projection
from martlet.state.snapshot import Mark, Snapshot, encode_snapshot
from martlet.store import Queue

__all__ = ["FOLDER", "SUFFIX", "Driven"]

FOLDER: Final = "config"
SUFFIX: Final = ".snapshot"


@final
class Driven:
    """One projection and its progress."""

    __slots__ = (
        "_on_failed",
        "failed",
        "followed_bytes",
        "order",
        "plugin",
        "projection",
        "retry_at",
        "saved_bytes",
        "saved_held",
        "topics",
    )

    def __init__(
        self,
        plugin: str,
        projection: Projection,
        order: LogOrder,
        on_failed: "Callable[[Driven, str, Exception], None]",
    ) -> None:
        self._on_failed = on_failed
        self.plugin = plugin
        self.projection = projection
        self.topics = sorted(projection.topics)
        self.order = order
        # Bytes of records applied since the newest snapshot, and the size of that snapshot; -1 if there is none.
        self.followed_bytes = 0
        self.saved_bytes = -1
        self.saved_held = 0
        self.retry_at = 0.0
        self.failed = False

    @property
    def name(self) -> str:
        return self.projection.name

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.name}{SUFFIX}"

    def fail(self, where: str, error: Exception) -> None:
        """Stop the plugin, because its projection raised *error*."""
        self._on_failed(self, where, error)

    def apply(self, run: Run) -> None:
        """Have the projection apply *run*, unless it has failed."""
        if not run or self.failed:
            return
        first, last = run[0].position, run[-1].position
        self.followed_bytes += sum(record.size for record in run)
        try:
            self.projection.apply(run)
        except Exception as error:
            self.fail(f"to apply the records from position {first} to {last}", error)

    def forget(self, topic: str) -> None:
        """Have the projection forget *topic*, which was deleted."""
        try:
            self.projection.forget(topic)
        except Exception as error:
            self.fail(f"to forget topic {topic!r}", error)

    def held(self) -> int:
        """Return the number of messages that wait for the plugin."""
        return self.projection.held() if isinstance(self.projection, HoldsMessages) else 0

    def snapshot(self) -> tuple[int, Steps[list[bytes]]]:
        """Freeze the projection; return the position up to which it is complete, and slices that render its file."""
        order = self.order
        rows = begin(self.projection.freeze())
        cursor_places = [(each.queue, each.offset, each.position) for each in order.cursors.values()]
        unfinished = Snapshot(self.topics, order.position, order.size, order.crc, [], b"", self.plugin, self.held())
        return order.position + order.size, self._render(rows, cursor_places, unfinished)

    def _render(
        self, rows: Steps[Sequence[bytes]], cursor_places: list[tuple[Queue, int, int]], unfinished: Snapshot
    ) -> Steps[list[bytes]]:
        pieces = yield from rows
        marks = [Mark(queue.topic, queue.queue_id, offset, position) for queue, offset, position in cursor_places]
        return (yield from encode_snapshot(self.name, replace(unfinished, marks=marks), pieces))
