"""Cold tiers for tests: the same tables and files in a local directory and in an S3 server."""

import datetime
import itertools
import time
from collections.abc import Mapping
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from msgspec import Struct

from martlet_tiered.config import TieredConfig
from martlet_tiered.delta import TableLog
from martlet_tiered.files import DataFile
from martlet_tiered.format.writing import TABLE_SCHEMA
from martlet_tiered.location import TierLocation
from martlet_tiered.names import DataName
from martlet_tiered.objects import Objects
from martlet_tiered.opening import open_objects
from martlet_tiered.table import ColdTable

__all__ = ["DAY_MS", "PATIENT", "SCHEMA", "Tier", "append", "new_prefix", "now_ms", "rows", "upload"]

DAY_MS: Final = 86_400_000
SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("position", pa.int64()),
        ("store_ts", pa.timestamp("us", tz="UTC")),
        ("date", pa.string()),
        ("kind", pa.string()),
    ]
)
# Long enough for a busy machine; tests of hangs have their own.
PATIENT: Final = {
    "connect_timeout_ms": 60_000,
    "request_timeout_ms": 300_000,
    "upload_timeout_ms": 300_000,
    "retries_max": 8,
}


def now_ms() -> int:
    """The time of day."""
    return time.time_ns() // 1_000_000


class Tier(Struct):
    """A place for a cold tier, and what brokers do there."""

    url: str
    settings: Mapping[str, object] = {}
    environ: Mapping[str, str] = {}

    def config(self, **changes: object) -> TieredConfig:
        return TieredConfig(url=self.url, **{**PATIENT, **self.settings, **changes})  # type: ignore[arg-type]

    def location(self, **changes: object) -> TierLocation:
        return TierLocation.of(self.config(**changes), self.environ)

    def objects(self, **changes: object) -> Objects:
        return open_objects(self.location(**changes), self.config(**changes), uuid4().hex, now_ms())

    def table(self, broker: str = "a", **changes: object) -> ColdTable:
        """Return the table, which is open and has no owner yet."""
        objects = self.objects(**changes)
        table = ColdTable(objects, TableLog(objects, self.location(**changes), self.config(**changes)), broker)
        table.open(SCHEMA)
        return table

    def exact_table(self, broker: str = "a") -> ColdTable:
        """Return a table with the columns of records, which is open and has no owner yet."""
        table = ColdTable(self.objects(), TableLog(self.objects(), self.location(), self.config()), broker)
        table.open(TABLE_SCHEMA)
        return table

    def owned(self, broker: str = "a", **changes: object) -> ColdTable:
        """Return the table after taking it over."""
        table = self.table(broker, **changes)
        table.take_over(uuid4().hex)
        return table


def rows(begin: int, end: int) -> pa.Table:
    """Return messages at the positions from *begin* to *end*, without the columns of the partition."""
    day = datetime.datetime(2026, 11, 28, tzinfo=datetime.UTC)
    positions = list(range(begin, end))
    columns = [["Orders"] * len(positions), positions, [day] * len(positions)]
    return pa.table(columns, schema=pa.schema([SCHEMA.field(name) for name in ("topic", "position", "store_ts")]))


def upload(objects: Objects, name: DataName, table: pa.Table | None = None) -> DataFile:
    """Store a real Parquet file with *name*, and return how a commit names it."""
    table = rows(name.begin, name.end) if table is None else table
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    objects.create(f"table/{name.path}", data)
    positions = table.column("position").to_pylist()
    time_of_all = table.column("store_ts")[0].as_py()
    minimum = {"topic": "Orders", "position": min(positions), "store_ts": time_of_all}
    maximum = {"topic": "Orders", "position": max(positions), "store_ts": time_of_all}
    return DataFile(name.path, name.date, name.kind, len(data), now_ms(), table.num_rows, minimum, maximum)


_COUNTER: Final = itertools.count()


def new_prefix() -> str:
    """Return a prefix that no other test has."""
    return f"prefix{next(_COUNTER)}"


def append(table: ColdTable, objects: Objects, begin: int, end: int) -> DataFile:
    """Upload a file for a range and commit it."""
    file = upload(objects, DataName("2026-11-28", "topic", table.epoch, begin, end))
    table.append(begin, end, [file])
    return file
