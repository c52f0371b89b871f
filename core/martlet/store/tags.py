"""The number that a consume-queue entry carries beside position and size.

Usually the hash code of the TAGS property; in RocketMQ's schedule topic the time at
which the message is due (CommitLog.checkMessageAndReturnSize).
"""

from typing import Final, final

from martlet.message import find_property
from martlet.store.codec import tags_code

__all__ = ["SCHEDULE_TOPIC", "TagCodes"]

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"

# messageDelayLevel: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h
DELAYS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)

# Distinct tags whose code is remembered; topics have few, a hostile producer could send any number.
REMEMBERED_MAX: Final = 4096


@final
class TagCodes:
    """Tells the code of a property string; remembers those of common tags."""

    __slots__ = ("_codes",)

    def __init__(self) -> None:
        self._codes: dict[bytes, int] = {}

    def of(self, properties: bytes) -> int:
        """The code of the TAGS in *properties*; 0 without."""
        at = properties.find(b"TAGS\x01")
        if at < 0:
            return 0
        if at and properties[at - 1] != 2:
            tags = find_property(properties, b"TAGS")
        else:
            end = properties.find(2, at)
            tags = properties[at + 5 : end] if end >= 0 else properties[at + 5 :]
        code = self._codes.get(tags)
        if code is None:
            if len(self._codes) >= REMEMBERED_MAX:
                self._codes.clear()
            code = self._codes[tags] = tags_code(tags)
        return code

    def due(self, properties: bytes, store_ms: int) -> int:
        """The code of a record in the schedule topic: when it is due, by its DELAY level."""
        text = find_property(properties, b"DELAY")
        level = int(text) if text.isdigit() and len(text) < 10 else 0
        if level <= 0:
            return self.of(properties)
        return store_ms + DELAYS_MS[min(level, len(DELAYS_MS)) - 1]
