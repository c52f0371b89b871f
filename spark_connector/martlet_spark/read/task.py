"""Reads ranges of queues and yields Arrow batches; runs in the tasks of executors.

After a lost connection, for example when a broker restarts, a read continues after the last received message.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar, final

from martlet.errors import RemoteProtocolError
from martlet.records.compression import PackageMissing
from martlet_columns.decode import ERROR, NULL, Decoder
from martlet_columns.errors import RecordError, UndecodableBody
from martlet_columns.records import Records
from martlet_remoting.wire.routes import TopicRoute
from martlet_spark.cluster import Busy, Cluster, UnknownBroker, UnknownTopic
from martlet_spark.connection import CONNECTIONS, ConnectionBroken, attempts
from martlet_spark.errors import ReadError, SparkConnectorError
from martlet_spark.options import Options
from martlet_spark.read.exchange import BulkReadExchange, Exchange, NotSupported, Pulls, Unchecked, pull_only
from martlet_spark.read.filters import Filter
from martlet_spark.read.planner import Range
from martlet_spark.read.progress import RangeProgress

__all__ = [
    "RangeReader",
    "decoded",
    "new_decoder",
    "range_reader",
    "selected",
    "undecodable_of",
    "warn_undecoded",
]

T = TypeVar("T")

log = logging.getLogger("martlet.spark")

# Spark is slower with larger batches, and with much smaller ones.
BATCH_RECORDS_MAX: Final = 4096
UNDECODABLE: Final = "set the option undecodableBody to null or raw to continue, or leave the column body out"


@final
class RangeReader:
    """Reads ranges of queues into the columns *names*.

    Args:
      fetch_bytes: size of one request to a broker.
      fail_on_loss: raise `DataLost` if messages are gone; otherwise log a warning and continue after them.
      undecodable: treatment of bodies that cannot be decompressed (`decode`).
    """

    def __init__(
        self,
        cluster: Cluster,
        names: Sequence[str],
        wanted: Filter,
        fetch_bytes: int,
        *,
        fail_on_loss: bool,
        undecodable: str = ERROR,
    ) -> None:
        self._cluster = cluster
        self._names = tuple(names)
        self._decoder = new_decoder(names, wanted, undecodable)
        self._undecodable = undecodable
        self._wanted = wanted
        self._fetch_bytes = fetch_bytes
        self._fail_on_loss = fail_on_loss
        self._routes: dict[str, TopicRoute] = {}

    def read(self, ranges: Sequence[Range]) -> Iterator[Any]:
        """Yield RecordBatches with the messages of *ranges*, in order within each queue.

        Raises:
          ReadError: a broker refuses, does not answer in time, or sends damaged records.
          DataLost: messages are gone.
        """
        by_broker: dict[str, list[RangeProgress]] = {}
        for each in ranges:
            by_broker.setdefault(each.queue.broker_name, []).append(RangeProgress(each))
        for broker, ranges_left in by_broker.items():
            for records in self._read_broker(broker, ranges_left):
                yield from self._batches(records, broker)
        warn_undecoded(self._decoder, self._undecodable)

    def _batches(self, records: Records, broker: str) -> Iterator[Any]:
        yield from selected(decoded(lambda: self._decoder.decode(records, broker)), self._wanted, self._names)

    def _read_broker(self, broker: str, left: list[RangeProgress]) -> Iterator[Records]:
        """Yield the records of all ranges of *broker*; reconnect after a lost connection, and continue."""
        count, tries = 0, attempts(self._cluster.timeout_s)
        while left:
            try:
                yield from self._read_once(broker, left)
            except (ConnectionBroken, UnknownTopic) as error:
                self._routes.clear()
                before, count = count, sum(progress.end - progress.next for progress in left)
                if count != before:
                    tries = attempts(self._cluster.timeout_s)
                if next(tries, None) is None:
                    self._give_up(broker, left, error)

    def _give_up(self, broker: str, left: list[RangeProgress], error: SparkConnectorError) -> None:
        """Raise an error; if loss is allowed and the broker or topic is gone, remove its ranges from *left* instead."""
        topic, text = left[0].queue.topic, f"broker {broker!r} cannot be read: {error}; start it"
        if isinstance(error, Busy):
            raise ReadError(f"{error}; read with fewer tasks at once, or raise remoting.bulk_reads_max") from error
        if not isinstance(error, (UnknownBroker, UnknownTopic)):
            raise ReadError(f"{text}, then the query again") from error
        if self._fail_on_loss:
            raise ReadError(f"{text}, or set failOnDataLoss to false to continue without it") from error
        log.warning("continuing without messages of topic %r on broker %r: %s", topic, broker, error)
        left[:] = [progress for progress in left if progress.queue.topic != topic]

    def _read_once(self, broker: str, left: list[RangeProgress]) -> Iterator[Records]:
        """Like `_read_broker`, on one connection; removes from *left* each range that is read to its end."""
        address = self._address(broker, left[0].queue.topic)
        security, timeout_s = self._cluster.security, self._cluster.timeout_s
        kind: type[Exchange] = Pulls if address in pull_only else BulkReadExchange
        try:
            with CONNECTIONS.lent(address, security, timeout_s) as connection:
                exchange = kind(connection, self._wanted, self._fetch_bytes, timeout_s, fail_on_loss=self._fail_on_loss)
                yield from exchange.read(left)
        except NotSupported:
            pull_only.add(address)
        except Unchecked:
            pass  # the ranges in *left* are read with checks
        except RemoteProtocolError as error:
            raise ReadError(f"broker {broker!r} at {address} does not speak RocketMQ's protocol: {error}") from error

    def _address(self, broker: str, topic: str) -> str:
        route = self._routes.get(topic)
        if route is None:
            route = self._routes[topic] = self._cluster.route(topic)
        return self._cluster.address(route, broker)


def decoded(decode: Callable[[], T]) -> T:
    """Return what *decode* returns.

    Raises:
      ReadError: a record cannot be decoded.
    """
    try:
        return decode()
    except UndecodableBody as error:
        raise ReadError(f"{error}; {UNDECODABLE}") from error
    except (RecordError, PackageMissing) as error:
        raise ReadError(str(error)) from error


def selected(batch: Any, wanted: Filter, names: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of *batch* that are *wanted*, with the columns *names*, in batches of a size that Spark likes."""
    found = wanted.select(batch)
    if len(names) < found.num_columns:
        found = found.select(list(names))
    for start in range(0, len(found), BATCH_RECORDS_MAX):
        yield found.slice(start, BATCH_RECORDS_MAX)


def warn_undecoded(decoder: Decoder, treatment: str) -> None:
    """Log how many bodies *decoder* could not decompress, if any, and their *treatment*."""
    if decoder.undecoded:
        text = "null" if treatment == NULL else "as they are stored"
        log.warning(
            "bodies that cannot be decompressed are %s: %d; the first: %s",
            *(text, decoder.undecoded, decoder.first_undecoded),
        )


def new_decoder(names: Sequence[str], wanted: Filter, undecodable: str) -> Decoder:
    """Return a decoder into the columns *names* and those that *wanted* needs."""
    return Decoder((*names, *(name for name in wanted.columns if name not in names)), undecodable)


def undecodable_of(options: Options) -> str:
    """Return how a query with *options* treats bodies that cannot be decompressed."""
    return str(options["undecodableBody"]) or (ERROR if options["failOnDataLoss"] else NULL)


def range_reader(cluster: Cluster, options: Options, names: Sequence[str], wanted: Filter) -> RangeReader:
    """Return the reader of a query with *options* into the columns *names*."""
    return RangeReader(
        *(cluster, names, wanted, options["fetchBytes"]),
        fail_on_loss=options["failOnDataLoss"],
        undecodable=undecodable_of(options),
    )
