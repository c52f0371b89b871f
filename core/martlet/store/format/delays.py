"""RocketMQ's delay levels: the due times of messages of the schedule topic.

RocketMQ's schedule service reads the due time from the queue entry, so the entries must be right whichever plugins are
enabled. The timer plugin replaces the table here by the configured one.
"""

from collections.abc import Sequence
from typing import Final

from martlet.message import find_property
from martlet.records.layout import Dispatcher
from martlet.store.format.tags import TagCodes

__all__ = ["DELAYS_MS", "SCHEDULE_TOPIC", "due_dispatcher"]

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"

# messageDelayLevel: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h
DELAYS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)

_CODES: Final = TagCodes()


def due_dispatcher(delays_ms: Sequence[int]) -> Dispatcher:
    """Return the dispatcher of the schedule topic, for levels with these delays (CommitLog.checkMessageAndReturnSize).

    For a message without a level it returns the tag code.
    """

    def due_ms(properties: bytes, store_ms: int) -> int:
        text = find_property(properties, b"DELAY")
        level = int(text) if text.isdigit() and len(text) < 10 else 0
        if level <= 0:
            return _CODES.of(properties)
        return store_ms + delays_ms[min(level, len(delays_ms)) - 1]

    return due_ms
