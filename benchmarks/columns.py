"""Processor time of exact tables: records to a table and to Parquet, and back; and their size against the log.

    python benchmarks/columns.py [RECORDS]

One batch of records, by default of 8 MiB with the larger bodies: JSON of about 1,170 and of 128 bytes, in the
messages of 8 topics with 4 queues in the order of the log. "columns" are those of an archive; "table" makes all
columns, rebuilds each record of them and compares it. Parquet is zstd 1. The last lines have the ways to join the
parts of records.
"""

import random
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from bodies import body

from martlet.message import Message, encode_properties
from martlet.records.codec import encode_record
from martlet.runtime.native import use_kernel
from martlet_columns.decode import RAW, Decoder
from martlet_columns.exact import ExactDecoder
from martlet_columns.rebuild import rebuild
from martlet_columns.records import Records
from martlet_columns.schema import COLUMNS

HOST = bytes((127, 0, 0, 1, 0, 0, 0x2A, 0x9F))
ROUNDS = 9
DICTIONARY = ["topic", "broker", "tag", "_born_host", "_store_host"]
PACKED = ("offset", "_position", "born_ts", "store_ts", "queue", "_body_crc")


def log(count: int, size: int) -> bytearray:
    """The records of *count* messages with bodies of about *size* bytes."""
    data, offsets = bytearray(), dict.fromkeys(range(32), 0)
    for number in range(count):
        place = random.randrange(32)
        key = f"7F{random.getrandbits(24):06X}{number:024X}"
        properties = {
            "KEYS": f"key-{number}",
            "TAGS": f"T{number % 7}",
            "UNIQ_KEY": key,
            "WAIT": "true",
            "CLUSTER": "m",
        }
        ms = 1_700_000_000_000 + number // 20
        message = Message(f"Orders-{place % 8}", body(size), encode_properties(properties), -1, 0, 0, ms, HOST)
        data += encode_record(message, place // 8, offsets[place], len(data), ms + 1, HOST)
        offsets[place] += 1
    return data


def least_us(run: Callable[[], Any], count: int) -> tuple[float, Any]:
    """The least processor time of *run*, in microseconds for each of *count* records, and its result."""
    best, result = float("inf"), None
    for _ in range(ROUNDS):
        began = process_time()
        result = run()
        best = min(best, process_time() - began)
    return best / count * 1e6, result


def to_parquet(table: pa.Table) -> Any:
    stream = pa.BufferOutputStream()
    encodings = dict.fromkeys(PACKED, "DELTA_BINARY_PACKED")
    options = {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": DICTIONARY,
        "column_encoding": encodings,
    }
    with pq.ParquetWriter(stream, table.schema, **options) as writer:
        for batch in table.to_batches():
            writer.write_batch(batch)
    return stream.getvalue()


def from_parquet(file: Any) -> pa.Table:
    return pq.ParquetFile(pa.BufferReader(file)).read(use_threads=False)


def tables(count: int) -> None:
    print("microseconds a record; records a second of one core, in: table and write, out: read and rebuild; file / log")
    print(f"{'body':>6} {'kernel':>7} {'columns':>8} {'table':>6} {'write':>6} {'read':>6} {'rebuild':>8}", end="")
    print(f" {'in':>8} {'out':>8} {'size':>5}")
    for size in (128, 1170):
        random.seed(size)
        data = log(count, size)
        for mode, name in (("off", "python"), ("auto", "native")):
            use_kernel(mode)  # type: ignore[arg-type]
            found = _measured(data, count)
            times, ratio = found
            rates = 1e6 / (times[1] + times[2]), 1e6 / (times[3] + times[4])
            print(f"{size:6} {name:>7} {times[0]:8.2f} {times[1]:6.2f} {times[2]:6.2f} {times[3]:6.2f}", end="")
            print(f" {times[4]:8.2f} {rates[0]:8,.0f} {rates[1]:8,.0f} {ratio:5.2f}")


def _measured(data: bytearray, count: int) -> tuple[list[float], float]:
    """The times of columns, table, write, read and rebuild, and the size of the file against *data*."""
    records, shown, decoder = Records(data), Decoder(tuple(COLUMNS), RAW), ExactDecoder()
    shown_us, _ = least_us(lambda: shown.decode(records, "b"), count)
    table_us, batches = least_us(lambda: list(decoder.batches(records, "b")), count)
    write_us, file = least_us(lambda: to_parquet(pa.Table.from_batches(batches)), count)
    read_us, table = least_us(lambda: from_parquet(file), count)
    rebuild_us, found = least_us(lambda: rebuild(table), count)
    if bytes(found.data) != data:
        raise SystemExit("records did not come back byte for byte")
    return [shown_us, table_us, write_us, read_us, rebuild_us], len(file) / len(data)


def joins(count: int) -> None:
    """Measure the ways to join parts of records, row by row."""
    parts = [pa.array([bytes(size)] * count, pa.binary()) for size in (88, 1170, 1, 6, 2, 100)]
    ways: dict[str, Callable[[], Any]] = {
        "binary_join_element_wise": lambda: pc.binary_join_element_wise(*parts, b""),
        "take of all parts": lambda: _taken(parts),
        "scatter of NumPy": lambda: _scattered(parts),
    }
    for name, way in ways.items():
        print(f"{name}: {least_us(way, count)[0]:.2f} us a record")


def _taken(parts: list[Any]) -> Any:
    count, whole = len(parts[0]), pa.concat_arrays(parts)
    return whole.take(pa.array((np.arange(count)[:, None] + np.arange(len(parts)) * count).reshape(-1)))


def _scattered(parts: list[Any]) -> Any:
    count = len(parts[0])
    sizes = [np.diff(np.frombuffer(part.buffers()[1], np.int32)[: count + 1]).astype(np.int64) for part in parts]
    ends = np.cumsum(sum(sizes))
    found, at = np.empty(ends[-1], np.uint8), ends - sum(sizes)
    for part, size in zip(parts, sizes, strict=True):
        raw = np.frombuffer(part.buffers()[2], np.uint8)[: size.sum()]
        found[np.arange(len(raw)) + np.repeat(at - (np.cumsum(size) - size), size)] = raw
        at = at + size
    return found


if __name__ == "__main__":
    records_count = int(sys.argv[1]) if len(sys.argv) > 1 else 6_000
    tables(records_count)
    joins(records_count)
