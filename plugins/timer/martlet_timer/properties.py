"""Properties of delayed messages, as RocketMQ names them (MessageConst)."""

from typing import Final

__all__ = [
    "CRON",
    "DELAY_MS",
    "DELAY_SEC",
    "DELIVER_MS",
    "LEVEL",
    "PERIOD_MS",
    "REAL_QUEUE",
    "REAL_TOPIC",
    "REPEAT",
    "SCHEDULE_KEYS",
    "TIME_KEYS",
    "UNIQUE_KEY",
]

# Properties with a client's request: a delay level, or a time. RocketMQ looks for times in the order of `TIME_KEYS`.
LEVEL: Final = b"DELAY"
DELIVER_MS: Final = b"TIMER_DELIVER_MS"
DELAY_MS: Final = b"TIMER_DELAY_MS"
DELAY_SEC: Final = b"TIMER_DELAY_SEC"
TIME_KEYS: Final = (DELAY_SEC, DELAY_MS, DELIVER_MS)
# Martlet's own: a message that is delivered several times (`timers.repeats`).
CRON: Final = b"TIMER_CRON"
PERIOD_MS: Final = b"TIMER_PERIOD_MS"
REPEAT: Final = b"TIMER_REPEAT"
SCHEDULE_KEYS: Final = (CRON, PERIOD_MS, REPEAT)
# Properties with the target of a waiting message.
REAL_TOPIC: Final = b"REAL_TOPIC"
REAL_QUEUE: Final = b"REAL_QID"
UNIQUE_KEY: Final = b"UNIQ_KEY"
