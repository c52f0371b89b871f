"""Processor time of decoding stored records for Spark: all at once, one by one, and into tuples; and of importing.

    python benchmarks/spark_decode.py [RECORDS]

"tuples" is a reader that decodes one by one and yields a tuple a row; what Spark pays for tuples comes on top.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from time import process_time
from typing import Any

from martlet.message import Message, encode_properties
from martlet.records.codec import encode_record
from martlet_columns.decode import Decoder
from martlet_columns.records import Records
from martlet_columns.schema import COLUMNS
from martlet_spark.columns import DEFAULT

HOST = bytes((127, 0, 0, 1, 0, 0, 0x2A, 0x9F))
ROUNDS = 7
IMPORTS = {
    "PySpark, PyArrow and NumPy": (
        "import pyspark.sql.datasource, pyspark.sql.streaming.datasource, numpy, pyarrow.compute; "
        "pyarrow.compute.pa.array([])"  # imports pandas, if that is installed
    ),
    "and then martlet_spark.source": "import martlet_spark.source",
}


def stored(count: int, body: bytes) -> bytearray:
    data = bytearray()
    for number in range(count):
        properties = {"KEYS": f"key-{number}", "TAGS": "T", "UNIQ_KEY": f"7F{number:030X}", "WAIT": "true"}
        message = Message("Orders", body, encode_properties(properties), 3, 0, 0, 1_700_000_000_000, HOST)
        data += encode_record(message, 3, number, len(data), 1_700_000_001_000, HOST)
    return data


def least_us(run: Callable[[], object], count: int) -> float:
    """The least processor time of *run*, in microseconds for each of *count* rows."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = process_time()
        run()
        best = min(best, process_time() - began)
    return best / count * 1e6


def decoding(count: int) -> None:
    print("microseconds a row:")
    print(f"{'body':>7} {'columns':>8} {'at once':>9} {'one by one':>11} {'ratio':>6} {'tuples':>8} {'ratio':>6}")
    for size in (100, 1024):
        data = stored(count, bytes(size))
        for names in (DEFAULT, tuple(COLUMNS)):
            decoder = Decoder(names)
            fast, slow, rows = (
                least_us(partial(way, decoder, data), count) for way in (_at_once, _one_by_one, _tuples)
            )
            print(f"{size:7} {len(names):8} {fast:9.2f} {slow:11.2f} {slow / fast:6.1f} {rows:8.2f} {rows / fast:6.1f}")


def _at_once(decoder: Decoder, data: bytearray) -> object:
    return decoder.decode(Records(data), "b")


def _one_by_one(decoder: Decoder, data: bytearray) -> Any:
    return decoder.decode_one_by_one(Records(data), "b")


def _tuples(decoder: Decoder, data: bytearray) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in _one_by_one(decoder, data).to_pylist()]


def importing() -> None:
    code = "import resource, sys; "
    code += "cpu = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2]); "
    for words in IMPORTS.values():
        code += f"began = cpu(); {words}; print(round((cpu() - began) * 1000)); "
    found = [
        list(map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()))
        for _ in range(ROUNDS)
    ]
    for name, values in zip(IMPORTS, zip(*found, strict=True), strict=True):
        print(f"import {name}: {min(values)} ms")


if __name__ == "__main__":
    decoding(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
    importing()
