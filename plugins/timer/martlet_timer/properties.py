"""Properties of delayed messages, as RocketMQ names them (MessageConst)."""

from typing import Final

__all__ = ["DELAY_MS", "DELAY_SEC", "DELIVER_MS", "LEVEL", "REAL_QUEUE", "REAL_TOPIC", "TIME_KEYS", "UNIQUE_KEY"]

# What clients ask for: a delay level, or a time. RocketMQ looks for times in the order of `TIME_KEYS`.
LEVEL: Final = b"DELAY"
DELIVER_MS: Final = b"TIMER_DELIVER_MS"
DELAY_MS: Final = b"TIMER_DELAY_MS"
DELAY_SEC: Final = b"TIMER_DELAY_SEC"
TIME_KEYS: Final = (DELAY_SEC, DELAY_MS, DELIVER_MS)
# Where a waiting message will be delivered.
REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
UNIQUE_KEY: Final = b"UNIQ_KEY"
