"""What a row of a bulk read costs the broker, beside pulls, and what ordinary consumers notice of bulk reads.

    python benchmarks/bulk_reads.py [rows] [latency] [checks] [--runs 5] [--mib 256] [--readers 1,4] [--set KEY=VALUE]

rows: a broker starts on a store that an earlier process has filled, so that the CRCs of its records must be checked.
Clients on loopback read all of it, from one queue and from 4 and 16 interleaved ones, by pulls of 32 messages, by two
outstanding pulls of 1,024, and by bulk reads, eight at a time as Spark's reader does. Prints the broker's processor
time for a message, the median of all runs, which take turns, and its ratio to the pulls of 1,024.

latency: one client sends 500 messages a second and receives each by a long pull, alone, beside bulk readers that read
as fast as they can, and beside as many processes that are only busy. Prints the time from a send to its receipt. All
share the processors of the machine.

checks: the processor time that a reader spends on the checks of its answers (needs numpy).
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import trio
from brokers import Martlet

from martlet.message import Message, encode_properties
from martlet.store import StoreConfig
from martlet.testing.peers import serving
from martlet_remoting.wire.codec import encode_command
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command

HERE = Path(__file__).resolve().parent
QUEUES = (1, 4, 16)
BODIES = (1024, 100)
OVERHEAD_BYTES = 250  # of a record, about
BUSY = "busy processes"
OUTSTANDING = 8  # bulk reads of a connection, as in Spark's reader
CREDIT = 1 << 22
RATE = 500  # messages per second for the latency
READ_BYTES = 1 << 20
PREFIX = struct.Struct(">ii")
Ask = Callable[["Client", int, int, int], None]


class Client:
    """A connection that discards bodies, so that it takes little of the processors."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = memoryview(bytearray(READ_BYTES))

    def send(self, code: int, opaque: int, **ext: object) -> None:
        self.socket.sendall(encode_command(Command(code, ext, b"", opaque)))

    def frame(self, parts: list[bytes] | None = None) -> tuple[int, dict[str, str]]:
        """Return the number and the fields of the next frame; append its body to *parts*."""
        length, header_bytes = PREFIX.unpack(self.exactly(8))
        header = json.loads(self.exactly(header_bytes & 0xFFFFFF))
        left = length - 4 - header_bytes
        if parts is not None:
            parts.append(self.exactly(left))
            left = 0
        while left:
            left -= self.socket.recv_into(self.buffer[: min(left, READ_BYTES)])
        if header["code"]:
            raise SystemExit(f"the broker answered {header}")
        return header["opaque"], header.get("extFields", {})

    def exactly(self, size: int) -> bytes:
        found = bytearray(size)
        view = memoryview(found)
        while view:
            view = view[self.socket.recv_into(view) :]
        return bytes(found)


def pull(count: int, client: Client, queue: int, offset: int, end: int) -> None:
    ext = {"consumerGroup": "bench", "topic": "T", "queueId": queue, "queueOffset": offset, "maxMsgNums": count}
    ext |= {"maxMsgBytes": CREDIT if count > 32 else 1 << 18, "sysFlag": 4, "commitOffset": 0, "subVersion": 0}
    client.send(RequestCode.PULL_MESSAGE, queue, suspendTimeoutMillis=0, subscription="*", expressionType="TAG", **ext)


def bulk(client: Client, queue: int, offset: int, end: int) -> None:
    ext = {"topic": "T", "queueId": queue, "offset": offset, "endOffset": end, "creditBytes": CREDIT}
    client.send(RequestCode.BULK_READ, queue, **ext)


def read_all(port: int, ends: list[int], ask: Ask, outstanding: int) -> None:
    """Read all queues, up to *outstanding* of them at a time."""
    client = Client(port)
    waiting = deque((queue, 0) for queue in range(len(ends)))
    asked = 0
    while asked or waiting:
        while waiting and asked < outstanding:
            queue, offset = waiting.popleft()
            ask(client, queue, offset, ends[queue])
            asked += 1
        queue, ext = client.frame()
        if ext.get("more") == "true":
            continue
        asked -= 1
        offset = int(ext["nextBeginOffset"])
        if offset < ends[queue]:
            waiting.append((queue, offset))
    client.socket.close()


# the store


async def fill(folder: Path, body: int, queues: int, rows: int) -> None:
    """Fill a store of its own for a broker that starts later."""
    properties = encode_properties(
        {"UNIQ_KEY": "7F00000100002A139B47000000000000", "TAGS": "TagA", "KEYS": "k1", "WAIT": "true"}
    )
    async with serving(folder, store=StoreConfig(flush="async")) as served:
        broker = served.broker
        broker.topics.update("T", read_queues=queues, write_queues=queues)
        broker.topics.update("L", read_queues=1, write_queues=1)
        for number in range(rows):
            broker.publish(Message("T", os.urandom(8) * (body // 8), properties, number % queues))
            if number % 256 == 255:
                broker.store.committer.commit()
                await trio.lowlevel.checkpoint()
        broker.store.committer.commit()


@contextlib.contextmanager
def broker_with(body: int, queues: int, rows: int, settings: list[str]) -> Iterator[Martlet]:
    with tempfile.TemporaryDirectory(prefix="martlet-bulk-") as folder:
        trio.run(fill, Path(folder) / "store", body, queues, rows)
        broker = Martlet(Path(folder), "async", sys.executable, settings=settings)
        try:
            yield broker
        finally:
            broker.close()


def processor_s(broker: Martlet) -> float:
    """Return the processor time of the broker so far, to the nanosecond: clock_getcpuclockid(3)."""
    return time.clock_gettime(((~broker.process.pid) << 3) | 2)


# rows


def rows_of(options: argparse.Namespace, body: int) -> int:
    return int(options.mib * (1 << 20) // (body + OVERHEAD_BYTES)) // 64 * 64


def cost_of_rows(options: argparse.Namespace) -> None:
    loads: dict[str, tuple[Ask, int]] = {
        "pulls of 32": (partial(pull, 32), 1),
        "pulls of 1024": (partial(pull, 1024), 2),
        "bulk reads": (bulk, OUTSTANDING),
    }
    print(f"{'broker, us a message':26}" + "".join(f"{name:>22}" for name in loads))
    kinds = [options.only] if options.only else [(body, queues) for body in BODIES for queues in QUEUES]
    for body, queues in kinds:
        rows = rows_of(options, body)
        with broker_with(body, queues, rows, options.set) as broker:
            ends = [rows // queues] * queues
            read_all(broker.port, ends, *loads["bulk reads"])  # from now on all is in the page cache
            found: dict[str, list[float]] = {name: [] for name in loads}
            for _ in range(options.runs):
                for name, load in loads.items():
                    began = processor_s(broker)
                    read_all(broker.port, ends, *load)
                    found[name].append((processor_s(broker) - began) * 1e6 / rows)
        medians = {name: statistics.median(costs) for name, costs in found.items()}
        base = medians["pulls of 1024"]
        texts = [f"{each:.2f} ({each / base:.2f})" for each in medians.values()]
        title = f"{body} B, {queues} queue{'s' if queues > 1 else ''}"
        print(f"{title:26}" + "".join(f"{text:>22}" for text in texts), flush=True)


# latency


def latency(options: argparse.Namespace) -> None:
    rows = rows_of(options, 1024)
    kinds = [("bulk readers", 0), *((what, count) for count in options.readers for what in ("bulk readers", BUSY))]
    found: dict[tuple[str, int], list[float]] = {kind: [] for kind in kinds}
    with broker_with(1024, 4, rows, options.set) as broker:
        read_all(broker.port, [rows // 4] * 4, bulk, OUTSTANDING)
        for _ in range(options.runs):
            for (what, count), times in found.items():
                times += beside(broker.port, rows, what, count)
    print(f"{'send to receive, ms':26}{'p50':>10}{'p99':>10}{'p99.9':>10}")
    for (what, count), times in found.items():
        times.sort()
        texts = "".join(f"{times[int(len(times) * share)] * 1000:10.2f}" for share in (0.5, 0.99, 0.999))
        print(f"{f'beside {count} {what}':26}{texts}", flush=True)


def beside(port: int, rows: int, what: str, count: int) -> list[float]:
    """Return the times of messages sent and received beside *count* processes of a kind."""
    command = [sys.executable, __file__, "--read-for-ever", "0" if what == BUSY else str(port), str(rows // 4)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()
        return talk(port, RATE * 4)
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


def read_for_ever(port: int, end: int) -> None:
    print("ready", flush=True)
    while not port:
        pass  # only busy
    while True:
        read_all(port, [end] * 4, bulk, OUTSTANDING)


def talk(port: int, count: int) -> list[float]:
    """Send *count* messages, one every 1/RATE s, each received by the pull that waits for it; return their times."""
    producer, consumer = Client(port), Client(port)
    body = bytes(256)
    producer.send(RequestCode.GET_MAX_OFFSET, 1, topic="L", queueId=0)
    offset, found = int(producer.frame()[1]["offset"]), []
    fields = {"consumerGroup": "late", "topic": "L", "queueId": 0, "maxMsgNums": 32, "sysFlag": 6, "commitOffset": 0}
    fields |= {"suspendTimeoutMillis": 20_000, "subscription": "*", "subVersion": 0, "expressionType": "TAG"}
    send = {"producerGroup": "p", "topic": "L", "defaultTopic": "TBW102", "defaultTopicQueueNums": 4, "queueId": 0}
    send |= {"sysFlag": 0, "bornTimestamp": 0, "flag": 0, "properties": "", "reconsumeTimes": 0, "unitMode": "false"}
    due = time.perf_counter()
    for number in range(count):
        consumer.send(RequestCode.PULL_MESSAGE, number, queueOffset=offset, **fields)
        due += 1 / RATE
        time.sleep(max(due - time.perf_counter(), 0.0))
        began = time.perf_counter()
        producer.socket.sendall(encode_command(Command(RequestCode.SEND_MESSAGE, send, body, number)))
        _, ext = consumer.frame()
        found.append(time.perf_counter() - began)
        offset = int(ext["nextBeginOffset"])
        producer.frame()
    return found


# the reader's checks


def cost_of_checks(options: argparse.Namespace) -> None:
    from martlet_columns.records import Records

    print(f"{'reader, us a message':26}{'starts':>10}{'queue':>10}{'CRCs':>10}")
    for body in BODIES:
        rows = min(rows_of(options, body), 50_000)
        with broker_with(body, 1, rows, options.set) as broker:
            client = Client(broker.port)
            parts: list[bytes] = []
            bulk(client, 0, 0, rows)
            while client.frame(parts)[1]["more"] == "true":
                pass
        data = [bytearray(part) for part in parts]
        costs: list[tuple[float, ...]] = []
        for _ in range(options.runs * 2):
            times = [time.process_time()]
            records = [Records(each) for each in data]
            times.append(time.process_time())
            for each in records:
                each.check(0, 0, rows)
            times.append(time.process_time())
            for each in records:
                each.check_bodies()
            times.append(time.process_time())
            count = sum(map(len, records))
            costs.append(tuple((b - a) * 1e6 / count for a, b in pairwise(times)))
        texts = "".join(f"{statistics.median(each):10.2f}" for each in zip(*costs, strict=True))
        print(f"{f'{body} B':26}{texts}", flush=True)


LOADS = {"rows": cost_of_rows, "latency": latency, "checks": cost_of_checks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", metavar="LOAD", help=f"of {', '.join(LOADS)}; all without")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mib", type=float, default=256, help="size of a topic")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the broker")
    parser.add_argument("--only", type=int, nargs=2, metavar=("BODY", "QUEUES"), help="measure one kind of topic")
    parser.add_argument("--readers", type=lambda text: [int(each) for each in text.split(",")], default=[1, 4])
    parser.add_argument("--read-for-ever", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read_for_ever:
        read_for_ever(*options.read_for_ever)
    if unknown := set(options.loads) - set(LOADS):
        parser.error(f"load {unknown.pop()!r} is unknown; known: {', '.join(LOADS)}")
    for load in options.loads or LOADS:
        LOADS[load](options)


if __name__ == "__main__":
    main()
