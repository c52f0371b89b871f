"""Reads topics as Arrow record batches, without Spark: for pandas, Polars, DuckDB and whatever else takes Arrow."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import pyarrow as pa

from martlet_columns.schema import arrow_schema
from martlet_spark.cluster import Cluster
from martlet_spark.errors import OptionError
from martlet_spark.options import BATCH, parse
from martlet_spark.read.both import BothReader
from martlet_spark.read.filters import Filter
from martlet_spark.read.seam import plan_batch

__all__ = ["read_arrow"]

OF_PARTITIONS: Final = ("minPartitions", "maxRecordsPerPartition", "targetPartitionBytes")
KNOWN: Final = tuple(option for option in BATCH if option.name not in OF_PARTITIONS)


def read_arrow(endpoints: str | Sequence[str], topic: str | Sequence[str] = (), **options: object) -> Any:
    """Return a `pyarrow.RecordBatchReader` with the messages of *topic* that exist now.

    Batches have up to 4,096 messages, in order within each queue, and are read from the brokers as they are fetched:
    the reader takes memory for a few requests (``fetchBytes``) only. Messages that a broker has in its cold tier come
    as well, with ``tierUrl`` from there directly, and with ``tier="cold"`` without any broker.

    Args:
      endpoints: the name servers, as ``HOST:PORT``; none with ``tier="cold"``.
      topic: a topic or several; none with the option subscribePattern or assign.
      options: those of a batch of the Spark source, by name (docs/spark.md), such as ``columns=["key", "body"]``,
        ``tags="paid"``, ``sql="amount > 100"``, ``startingTimestamp="-2h"``. A number, a truth value, a list, a
        dictionary or a datetime is taken as it is meant.

    Raises:
      OptionError: an option is unknown or invalid, or options do not fit the topics.
      ReadError: a server does not answer, or a topic does not exist. Reading a batch may raise it as well; `DataLost`
        is one if messages were removed meanwhile.
    """
    servers, topics = _text(endpoints), _text(topic)
    given = ({"endpoints": servers} if servers else {}) | ({"subscribe": topics} if topics else {})
    parsed = parse(given | {name: _text(value) for name, value in options.items()}, KNOWN)
    wanted = Filter(parsed["tags"], parsed["key"], parsed["sql"])
    cluster = Cluster(parsed["endpoints"] or (), parsed.security, parsed["timeoutMs"] / 1000)
    ranges = plan_batch(cluster, parsed, with_sizes=False)
    batches = BothReader(cluster, parsed, parsed["columns"], wanted).read(ranges)
    return pa.RecordBatchReader.from_batches(arrow_schema(parsed["columns"]), batches)


def _text(value: object) -> str:
    """Return *value* as the text of an option.

    Raises:
      OptionError: no option has such a value.
    """
    match value:
        case str():
            return value
        case bool():
            return str(value).lower()
        case int():
            return str(value)
        case datetime():
            return str(int(value.timestamp() * 1000))
        case Mapping():
            return json.dumps(value)
        case Sequence() if all(isinstance(each, str) for each in value):
            return ",".join(value)
    raise OptionError(f"{value!r} is no value of an option; give a text, a number, a list of texts or a dictionary")
