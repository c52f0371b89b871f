"""Schedules of five fields, as ActiveMQ understands them (CronParser): minute, hour, day of month, month, day of week.

A field is ``*`` or ``?`` for all values, or a list of numbers and ranges, such as ``1,5,10-20``. After that, ``/N``
keeps the values that N divides: ``*/2`` of days are the even ones. 0 is Sunday. If both day fields are restricted, a
day in either of them counts. Times are local, and begin at the full minute.

A local time that a clock change skips does not occur, and one that it repeats occurs twice.
"""

import re
from calendar import monthrange
from datetime import datetime, tzinfo
from functools import lru_cache
from itertools import pairwise
from typing import Final, final

__all__ = ["Cron", "parse_cron"]

TEXT_CHARS_MAX: Final = 256
SHOWN_CHARS: Final = 64
MINUTE_S: Final = 60
HOUR_S: Final = 3600
# Name, first and last value of each field.
_FIELDS: Final = (("minute", 0, 59), ("hour", 0, 23), ("day of month", 1, 31), ("month", 1, 12), ("day of week", 0, 6))
_ALL: Final = ("*", "?")
_RANGE: Final = re.compile(r"([0-9]{1,2})(?:-([0-9]{1,2}))?")
_STEP: Final = re.compile(r"0*[1-9][0-9]{0,3}")
# Limit of months, days and hours to check: February 29 is up to 8 years ahead, with 12 months and a day in each.
STEPS_MAX: Final = 500
# Schedules to keep parsed, instead of parsing them for each copy.
CACHED: Final = 1024


@final
class Cron:
    """The times of a schedule."""

    __slots__ = ("_days", "_hours", "_minutes", "_months", "_weekdays")

    def __init__(self, text: str) -> None:
        """Read *text*. Raises `ValueError` if it is no schedule."""
        words = text.split() if len(text) <= TEXT_CHARS_MAX else []
        if len(words) != len(_FIELDS):
            fields = ", ".join(name for name, _, _ in _FIELDS)
            raise ValueError(f"schedule {text[:SHOWN_CHARS]!r} has not the 5 fields {fields}")
        values = [_values(word, *field) for word, field in zip(words, _FIELDS, strict=True)]
        self._minutes, self._hours, self._days, self._months, self._weekdays = values

    def next_ms(self, after_ms: int, zone: tzinfo | None = None) -> int:
        """Return the first time after *after_ms*, both in ms since 1970; *zone* None is the machine's time zone.

        Raises:
          ValueError: the schedule has no further time, such as February 30.
        """
        moment_s = (after_ms // 1000 // MINUTE_S + 1) * MINUTE_S
        for _ in range(STEPS_MAX):
            local = datetime.fromtimestamp(moment_s, zone)
            if local.month not in self._months:
                later_s = _start_of_next_month(local, zone)
            elif not self._has_day(local):
                later_s = self._start_of_next_day(local, zone)
            elif local.hour not in self._hours:
                later_s = moment_s + HOUR_S - local.minute * MINUTE_S - local.second
            elif local.minute not in self._minutes:
                minute = next((each for each in self._minutes if each > local.minute), 60)
                later_s = moment_s + (minute - local.minute) * MINUTE_S
            else:
                return moment_s * 1000
            moment_s = max(later_s, moment_s + MINUTE_S)
        raise ValueError("schedule never comes; its days are in none of its months")

    def _has_day(self, local: datetime) -> bool:
        is_day = local.day in self._days
        is_weekday = (local.weekday() + 1) % 7 in self._weekdays
        if len(self._days) == 31 or len(self._weekdays) == 7:
            return is_day and is_weekday
        return is_day or is_weekday

    def _start_of_next_day(self, local: datetime, zone: tzinfo | None) -> int:
        """Return the start of the next day that may be in the schedule."""
        if len(self._weekdays) < 7:
            return _timestamp(datetime.fromordinal(local.toordinal() + 1), zone)
        day = next((each for each in self._days if each > local.day), 32)
        if day > monthrange(local.year, local.month)[1]:
            return _start_of_next_month(local, zone)
        return _timestamp(datetime(local.year, local.month, day), zone)

    def shortest_ms(self) -> int:
        """Return the shortest interval from one time to the next, as if all days counted."""
        first_minute, last_minute = self._minutes[0], self._minutes[-1]
        gaps = [later - earlier for earlier, later in pairwise(self._minutes)]
        gaps += [60 * (later - earlier) + first_minute - last_minute for earlier, later in pairwise(self._hours)]
        gaps.append(60 * (self._hours[0] + 24 - self._hours[-1]) + first_minute - last_minute)
        return min(gaps) * MINUTE_S * 1000


@lru_cache(CACHED)
def parse_cron(text: str) -> Cron:
    """Return the schedule *text*. Raises `ValueError`."""
    return Cron(text)


def _start_of_next_month(local: datetime, zone: tzinfo | None) -> int:
    return _timestamp(datetime(local.year + local.month // 12, local.month % 12 + 1, 1), zone)


def _timestamp(local: datetime, zone: tzinfo | None) -> int:
    return int(local.replace(tzinfo=zone).timestamp())


def _values(text: str, name: str, low: int, high: int) -> tuple[int, ...]:
    """Return the values of the field *text*. Raises `ValueError`."""
    items, slash, step = text.partition("/")
    found = {value for item in items.split(",") for value in _range(item, name, low, high)}
    if slash:
        if _STEP.fullmatch(step) is None:
            raise ValueError(f"schedule has the {name} {text[:SHOWN_CHARS]!r}; write a number after the slash")
        found = {value for value in found if value % int(step) == 0}
    if not found:
        raise ValueError(f"schedule has the {name} {text[:SHOWN_CHARS]!r}, which never comes; {step} divides none")
    return tuple(sorted(found))


def _range(item: str, name: str, low: int, high: int) -> range:
    if item in _ALL:
        return range(low, high + 1)
    match = _RANGE.fullmatch(item)
    if match is None:
        text = "use numbers, ranges such as 1-5, lists with commas, steps such as */10, or *"
        raise ValueError(f"schedule has the {name} {item[:SHOWN_CHARS]!r}; {text}")
    first = int(match[1])
    last = int(match[2] or first)
    if not low <= first <= last <= high:
        hint = "; 0 is Sunday" if name == "day of week" else ""
        raise ValueError(f"schedule has the {name} {item!r}; use {low} to {high}{hint}")
    return range(first, last + 1)
