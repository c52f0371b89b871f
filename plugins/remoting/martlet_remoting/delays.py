"""RocketMQ's delay levels: when a message of the schedule topic is due."""

from typing import Final

from martlet.message import find_property
from martlet.store.tags import TagCodes

__all__ = ["DELAYS_MS", "SCHEDULE_TOPIC", "due_ms"]

SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"

# messageDelayLevel: 1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h
DELAYS_MS: Final = tuple(
    1000 * seconds
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)

_CODES: Final = TagCodes()


def due_ms(properties: bytes, store_ms: int) -> int:
    """Return when a message stored at *store_ms* with a DELAY level is due; without a level, its tag code.

    RocketMQ's schedule service reads it from the queue entry (CommitLog.checkMessageAndReturnSize).
    """
    text = find_property(properties, b"DELAY")
    level = int(text) if text.isdigit() and len(text) < 10 else 0
    if level <= 0:
        return _CODES.of(properties)
    return store_ms + DELAYS_MS[min(level, len(DELAYS_MS)) - 1]
