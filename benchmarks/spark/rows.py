"""The rows that all sides read: made once from a seed, kept as Parquet, and sent to each broker.

A row is a key of about 12 bytes and a body that does not compress. Producers of RocketMQ add a unique key and a flag to
each message and send messages to queues in turn; so does `send_rows`.
"""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from martlet.message import encode_properties
from martlet.net.addresses import split_address
from martlet_client.blocking import Admin
from martlet_remoting.wire.codec import encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

__all__ = ["make_rows", "send_rows"]

GROUP_ROWS = 20_000
WINDOW = 64


def make_rows(path: Path, count: int, body_bytes: int, queues: int) -> None:
    """Write *count* rows of key, queue and body to the Parquet file *path*."""
    random = np.random.default_rng(body_bytes)
    schema = pa.schema([("key", pa.string()), ("queue", pa.int32()), ("body", pa.binary())])
    with pq.ParquetWriter(path, schema, compression="snappy") as writer:
        for first in range(0, count, GROUP_ROWS):
            numbers = np.arange(first, min(first + GROUP_ROWS, count))
            data = random.bytes(len(numbers) * body_bytes)
            bounds = np.arange(len(numbers) + 1, dtype=np.int32) * body_bytes
            bodies = pa.Array.from_buffers(pa.binary(), len(numbers), [None, pa.py_buffer(bounds), pa.py_buffer(data)])
            keys = pa.array([f"order-{number}" for number in numbers])
            writer.write_table(pa.table([keys, pa.array(numbers % queues, pa.int32()), bodies], schema=schema))


def send_rows(path: Path, name_server: str, broker: str, topic: str, queues: int) -> None:
    """Create *topic* with *queues* at the broker with the address *broker*, and send it the rows in *path*."""
    with Admin(name_server) as admin:
        admin.create_topic(topic, queues=queues)
    with socket.create_connection(split_address(broker)) as stream, stream.makefile("rb") as answers:
        waiting = 0
        for frames in _frames(path, topic):
            stream.sendall(b"".join(frames))
            _receive(answers, waiting)
            waiting = len(frames)
        _receive(answers, waiting)


def _frames(path: Path, topic: str) -> Iterator[list[bytes]]:
    """Yield the requests that send the rows in *path*, a few at a time."""
    for batch in pq.ParquetFile(path).iter_batches(WINDOW):
        rows = zip(*(batch.column(name).to_pylist() for name in ("key", "queue", "body")), strict=True)
        yield [_frame(topic, *row) for row in rows]


def _frame(topic: str, key: str, queue: int, body: bytes) -> bytes:
    """Return a send in its version 2, whose fields have short names."""
    unique = f"7F00000100002A9F{int(key[6:]):016X}"
    properties = encode_properties({"KEYS": key, "UNIQ_KEY": unique, "WAIT": "true", "TAGS": "TagA"}).decode()
    now_ms = int(time.time() * 1000)
    ext = {"a": "bench", "b": topic, "c": "TBW102", "d": 4, "e": queue, "f": 0, "g": now_ms, "h": 0, "i": properties}
    return encode_command(Command(RequestCode.SEND_MESSAGE_V2, ext, body, int(key[6:])))


def _receive(answers: BinaryIO, count: int) -> None:
    """Receive *count* answers, which must say success."""
    for _ in range(count):
        answer = answers.read(int.from_bytes(answers.read(4), "big"))
        assert b'"code":0,' in answer, answer
