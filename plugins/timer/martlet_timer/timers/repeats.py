"""Repeated messages, which are delivered several times, as by ActiveMQ's scheduler (JobSchedulerImpl).

| property | meaning |
|---|---|
| ``TIMER_PERIOD_MS`` | the time from one delivery to the next |
| ``TIMER_REPEAT`` | how often it is delivered again after the first time, -1 for ever |
| ``TIMER_CRON`` | a schedule (`cron.py`); it has no end |

Such a message is one pending timer at a time. When it is due, a copy is delivered, and the next timer is appended in
the same atomic group, with one repetition less. The next time counts from the delivery: if the broker was down for
several periods, one copy is delivered, and the others never are.

With a schedule and repetitions, no message is delivered at the times of the schedule. Each time begins a series, which
is a timer of its own; as in ActiveMQ, the delay counts once more in it.

All timers of a message have its unique key; a series adds a suffix. Only the newest timer in the log counts: a power
cut may keep a later group and lose an earlier one. RocketMQ does not know the properties: it delivers the pending timer
once.
"""

import re
from typing import Final, NamedTuple, final

from martlet.message import (
    PROPERTIES_BYTES_MAX,
    Message,
    Record,
    find_property,
    put_properties,
    put_property,
    remove_property,
)
from martlet.tables.topics import TIMER_TOPIC
from martlet_timer.properties import (
    CRON,
    DELAY_MS,
    DELAY_SEC,
    PERIOD_MS,
    REAL_TOPIC,
    REPEAT,
    SCHEDULE_KEYS,
    UNIQUE_KEY,
)
from martlet_timer.timers.cron import Cron, parse_cron
from martlet_timer.timers.records import DIGITS_MAX, OUT_MS, copy_of, delete_key, delivery_of, out_of

__all__ = [
    "ENDLESS",
    "NAME_BYTES",
    "SERIES",
    "DueOutcome",
    "Repeats",
    "describe_repetition",
    "is_repeated",
    "name_of",
    "outcome_of",
    "read_repeats",
    "with_expiry_moved",
    "without_schedule",
]

ENDLESS: Final = -1
REPEAT_MAX: Final = 2**31 - 1
# Suffix of the unique key of a series that a schedule began.
SERIES: Final = ".series"
# Each copy has the name of its schedule in this property, as with ActiveMQ: TOPIC:KEY.
NAME: Final = b"scheduledJobId"
# Bytes of a copy beside its timer's properties: the name, and a longer unique key.
NAME_BYTES: Final = 256
EXPIRES_MS: Final = b"EXPIRES_MS"
_REPEAT: Final = re.compile(rb"-1|[0-9]{1,10}")


@final
class Repeats(NamedTuple):
    """The delivery times of a message; ``repeat`` is the number of deliveries after the first."""

    cron: Cron | None
    delay_ms: int
    period_ms: int
    repeat: int

    def first_ms(self, now_ms: int) -> int:
        """Return the first due time of a message that is sent now. Raises `ValueError` if there is none."""
        begin_ms = self.cron.next_ms(now_ms) if self.cron is not None else now_ms
        return begin_ms + self.wait_ms

    @property
    def wait_ms(self) -> int:
        """The time from the begin of a series to its first delivery."""
        return self.delay_ms or self.period_ms

    @property
    def is_once(self) -> bool:
        return self.cron is None and not self.repeat


@final
class DueOutcome(NamedTuple):
    """The outcome of a due timer: the message to deliver, and the timers that follow.

    ``ended`` is the key of the message (`delete_key`) if no timer of it follows, empty otherwise.
    """

    delivery: Message | None
    timers: tuple[Message, ...] = ()
    ended: str = ""


def is_repeated(properties: bytes) -> bool:
    """Return whether a timer with *properties* belongs to a repeated message.

    A repeated message has a unique key: another broker may have stored one without, which is delivered once.
    """
    schedule = find_property(properties, REPEAT) or find_property(properties, CRON)
    return bool(schedule and find_property(properties, UNIQUE_KEY))


def without_schedule(properties: bytes) -> bytes:
    """Return *properties* for a message that is delivered once."""
    for key in SCHEDULE_KEYS:
        properties = remove_property(properties, key)
    return properties


def read_repeats(properties: bytes, delay_ms: int) -> Repeats:
    """Return the delivery times of a message with *properties*, after a delay of *delay_ms*. Raises `ValueError`."""
    cron_text = find_property(properties, CRON)
    repeat = find_property(properties, REPEAT) or b"0"
    if _REPEAT.fullmatch(repeat) is None or int(repeat) > REPEAT_MAX:
        text = f"number of repetitions {_shown(repeat)!r} is wrong"
        raise ValueError(f"{text}; use 0 to {REPEAT_MAX}, or {ENDLESS} for no end")
    period_ms = _milliseconds(find_property(properties, PERIOD_MS), "period")
    cron = parse_cron(cron_text.decode("utf-8", "replace")) if cron_text else None
    return Repeats(cron, delay_ms, period_ms, int(repeat))


def _milliseconds(value: bytes, what: str) -> int:
    if not value:
        return 0
    if not value.isdigit() or len(value) > DIGITS_MAX:
        raise ValueError(f"{what} {_shown(value)!r} is wrong; it is a number of milliseconds")
    return int(value)


def _shown(value: bytes) -> str:
    return value[:64].decode("utf-8", "replace")


def delay_of(properties: bytes) -> int:
    """Return the requested delay of a message, in ms."""
    seconds, ms = find_property(properties, DELAY_SEC), find_property(properties, DELAY_MS)
    value, factor = (seconds, 1000) if seconds else (ms, 1)
    digits = value.removeprefix(b"+")
    return int(digits) * factor if digits.isdigit() and len(digits) <= DIGITS_MAX else 0


def with_expiry_moved(properties: bytes, by_ms: int) -> bytes:
    """Return *properties* with a time to live that begins *by_ms* later."""
    value = find_property(properties, EXPIRES_MS)
    if not by_ms or not value.isdigit() or len(value) > DIGITS_MAX or not int(value):
        return properties
    return put_property(properties, EXPIRES_MS, b"%d" % (int(value) + by_ms))


def name_of(unique: str) -> str:
    """Return the unique key of the message whose timer, or series, has the key *unique*."""
    return unique.removesuffix(SERIES)


# ---- a timer that is due


def outcome_of(record: Record, due_ms: int, now_ms: int, period_min_ms: int) -> DueOutcome:
    """Return the outcome of the timer in *record*, which was due at *due_ms*; *period_min_ms* is the least period."""
    properties = record.properties
    if not is_repeated(properties):
        return DueOutcome(delivery_of(record, now_ms))
    topic, unique = _text(properties, REAL_TOPIC), _text(properties, UNIQUE_KEY)
    try:
        repeats = read_repeats(properties, delay_of(properties))
        timers = _timers_after(
            record, repeats._replace(period_ms=max(repeats.period_ms, period_min_ms)), due_ms, max(now_ms, due_ms)
        )
    except ValueError:  # another broker stored it, or the schedule has no time any more
        return DueOutcome(_copy(record, due_ms, now_ms), ended=delete_key(topic, unique))
    begins_series = repeats.cron is not None and repeats.repeat
    delivery = None if begins_series else _copy(record, due_ms, now_ms)
    return DueOutcome(delivery, timers, "" if timers else delete_key(topic, unique))


def _timers_after(record: Record, repeats: Repeats, due_ms: int, now_ms: int) -> tuple[Message, ...]:
    """Return the timers that follow the one in *record*. Raises `ValueError` if a schedule has no further time."""
    properties, repeat = record.properties, repeats.repeat
    if repeats.cron is None:
        if not repeat:
            return ()
        next_properties = put_property(properties, REPEAT, b"%d" % (repeat if repeat == ENDLESS else repeat - 1))
        return (_timer(record, next_properties, due_ms, now_ms + repeats.period_ms),)
    next_timer = _timer(record, properties, due_ms, repeats.cron.next_ms(now_ms))
    if not repeat:
        return (next_timer,)
    unique = name_of(_text(properties, UNIQUE_KEY)) + SERIES
    series = put_property(remove_property(properties, CRON), UNIQUE_KEY, unique.encode())
    return next_timer, _timer(record, series, due_ms, now_ms + repeats.wait_ms)


def _timer(record: Record, properties: bytes, due_ms: int, next_ms: int) -> Message:
    properties = with_expiry_moved(properties.replace(b"\x00", b""), next_ms - due_ms)
    return copy_of(record, TIMER_TOPIC, 0, put_property(properties, OUT_MS, b"%d" % out_of(next_ms)))


def _copy(record: Record, due_ms: int, now_ms: int) -> Message:
    """Return the message to deliver: a copy with a unique key of its own, and without the schedule."""
    message = delivery_of(record, now_ms)
    topic, unique = message.topic, name_of(_text(record.properties, UNIQUE_KEY))
    properties = with_expiry_moved(without_schedule(message.properties), now_ms - due_ms)
    new_properties = {NAME: f"{topic}:{unique}".encode(), UNIQUE_KEY: f"{unique}-{due_ms}".encode()}
    longer = put_properties(properties, new_properties)
    message.properties = longer if len(longer) <= PROPERTIES_BYTES_MAX else properties
    return message


def _text(properties: bytes, key: bytes) -> str:
    return find_property(properties, key).decode("utf-8", "replace")


def describe_repetition(properties: bytes) -> str:
    """Return a description of a timer's repetitions, from its *properties*; empty for a single delivery."""
    if not is_repeated(properties):
        return ""
    parts = [f"cron {_text(properties, CRON)}"] if find_property(properties, CRON) else []
    repeat = _text(properties, REPEAT) or "0"
    if repeat != "0":
        times = "for ever" if repeat == str(ENDLESS) else f"{repeat} more times"
        parts.append(f"every {_text(properties, PERIOD_MS)} ms, {times}")
    return ", ".join(parts) or "for the last time"
