"""Times at the edges of the calendar."""

import time

import pyarrow as pa
import pytest
from pyspark.sql.types import TimestampType
from tests.columns.stored import records, usual

from martlet_columns.decode import VECTOR_MIN, Decoder
from martlet_columns.schema import MS_MAX, MS_MIN

MANY = VECTOR_MIN * 2
EDGES = [MS_MIN - 1, MS_MIN, MS_MAX, MS_MAX + 1, -(1 << 63), (1 << 63) - 1]


@pytest.mark.parametrize("zone", ["UTC", "Etc/GMT+12", "Pacific/Kiritimati", "America/New_York", "Asia/Kolkata"])
def test_times_at_the_edges_of_the_calendar_can_be_collected(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark makes them times of the driver's zone, where the first hours of year 1 may be before it."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    messages = [usual(number) for number in range(MANY)]
    for message, born_ms in zip(messages, EDGES, strict=False):
        message.born_ms = born_ms
    found = Decoder(("born_ts",)).decode(records(messages), "b").column("born_ts")
    assert [each.is_valid for each in found[: len(EDGES)]] == [False, True, True, False, False, False]
    for each in found.cast(pa.int64()).to_pylist()[1:3]:
        assert TimestampType().fromInternal(each).year in (1, 9999)
    monkeypatch.undo()
    time.tzset()
