"""Which files of the table expire, and which ones become one file."""

import datetime
from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import Final

from martlet_tiered.files import DataFile

__all__ = ["expired_files", "overdue_days", "small_files"]

DAY_MS: Final = 86_400_000
INTERNAL: Final = "internal"
# Bytes and records of files that become one: they are in memory, and 40 bytes for each record.
MERGED_BYTES: Final = 24 << 20
MERGED_RECORDS: Final = 500_000


def _day_of(date: str) -> int:
    return datetime.date.fromisoformat(date).toordinal()


def _today(now_ms: int) -> int:
    return datetime.date(1970, 1, 1).toordinal() + now_ms // DAY_MS


def overdue_days(files: Iterable[DataFile], now_ms: int, days: int) -> int:
    """Return for how many days the oldest files should be gone that keep messages for *days*; 0 if none should."""
    oldest = min((_day_of(file.date) for file in files if file.kind != INTERNAL), default=_today(now_ms))
    return max(_today(now_ms) - oldest - days, 0) if days else 0


def expired_files(files: Sequence[DataFile], now_ms: int, days: int, bytes_max: int, log_begin: int) -> list[DataFile]:
    """Return the files of the oldest day, if all its messages are older than *days*, or all files have too many bytes.

    A limit of 0 is none. Files of today never expire. Internal files go once everything before their end is gone from
    the table, and they are not in the log either, which begins at *log_begin*: they note deletions of topics.
    """
    readable = [file for file in files if file.kind != INTERNAL]
    if not readable:
        return []
    oldest = min(file.date for file in readable)
    is_too_large = 0 < bytes_max < sum(file.bytes for file in files) and _day_of(oldest) < _today(now_ms)
    if not is_too_large and overdue_days(files, now_ms, days) < 1:
        return []
    gone = [file for file in readable if file.date == oldest]
    left = [file.name.begin if file.name else 0 for file in readable if file.date != oldest]
    floor = min([log_begin, *left])
    internal = [file for file in files if file.kind == INTERNAL and file.date <= oldest]
    return gone + [file for file in internal if file.name is not None and file.name.end <= floor]


def small_files(files: Iterable[DataFile], now_ms: int, bytes_max: int, excluded: Container[str]) -> list[DataFile]:
    """Return neighbouring files of one past day and kind, each smaller than *bytes_max*, to become one; none: [].

    They are sorted by their log positions, none is *excluded*, and they fit into memory together.
    """
    today = _today(now_ms)
    named = [(file.date, file.kind, file.name.begin, file) for file in files if file.name is not None]
    named = [each for each in named if _day_of(each[0]) < today]
    named.sort(key=lambda each: each[:3])
    for _, same in groupby(named, key=lambda each: each[:2]):
        run: list[DataFile] = []
        for *_, file in same:
            total, rows = file.bytes + sum(each.bytes for each in run), sum(each.rows or 0 for each in [*run, file])
            is_small = file.bytes < bytes_max and file.path not in excluded
            if is_small and total <= MERGED_BYTES and rows <= MERGED_RECORDS:
                run.append(file)
                continue
            if len(run) > 1:
                return run
            run = [file] if is_small else []
        if len(run) > 1:
            return run
    return []
