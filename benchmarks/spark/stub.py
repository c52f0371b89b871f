"""Servers between Spark and a broker: one that answers bulk reads from memory, and one that counts requests.

    python -m benchmarks.spark.stub memory NAME_SERVER TOPIC
    python -m benchmarks.spark.stub count NAME_SERVER

Each prints its address, which is that of a name server and of a broker, and serves until stdin ends; the second one
then prints how many requests of each code it passed on. Routes, offsets and all else come from the real servers.
"""

import json
import socket
import struct
import sys
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter

from martlet.net.addresses import split_address
from martlet_remoting.wire.codec import encode_command, encode_prefix
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import Command
from martlet_spark.cluster import Cluster
from martlet_spark.connection import BrokerConnection, Security
from martlet_spark.read.exchange import BulkReadExchange
from martlet_spark.read.filters import Filter
from martlet_spark.read.planner import Range
from martlet_spark.read.progress import RangeProgress

FRAME_BYTES = 1 << 20
PREFIX = struct.Struct(">iI")
NAME_SERVER_CODES = (RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)


def receive_exactly(stream: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = stream.recv(size - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return bytes(data)


def receive_frame(stream: socket.socket) -> tuple[bytes, int]:
    """Return the next frame whole, and the length of its header."""
    prefix = receive_exactly(stream, PREFIX.size)
    length, header_bytes = PREFIX.unpack(prefix)
    return prefix + receive_exactly(stream, length - 4), header_bytes


class Server(ABC):
    """Serves each connection in a thread; *name_server* and its broker answer what it does not."""

    def __init__(self, name_server: str) -> None:
        self.name_server = name_server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.broker = ""

    def find_broker(self, topic: str) -> None:
        route = Cluster([self.name_server], Security(), 30.0).route(topic)
        self.broker = str(route.address(route.read_queues(topic)[0].broker_name))

    def serve(self) -> None:
        print(self.address, flush=True)
        threading.Thread(target=self._accept, daemon=True).start()
        sys.stdin.read()

    def _accept(self) -> None:
        while True:
            stream, _ = self._listener.accept()
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve_quietly, args=(stream,), daemon=True).start()

    def _serve_quietly(self, stream: socket.socket) -> None:
        try:
            self.serve_one(stream)
        except OSError:
            stream.close()

    @abstractmethod
    def serve_one(self, stream: socket.socket) -> None:
        """Serve the connection *stream* until it is lost, which raises OSError."""


class Memory(Server):
    """Answers bulk reads of *topic* from memory."""

    def __init__(self, name_server: str, topic: str) -> None:
        super().__init__(name_server)
        self.find_broker(topic)
        cluster = Cluster([name_server], Security(), 30.0)
        self._data: dict[int, bytearray] = {}
        self._starts: dict[int, list[int]] = {}  # of each record, and the end
        for queue, (first, end) in cluster.bounds({topic: cluster.route(topic)})[topic].items():
            assert first == 0
            data, starts = bytearray(), [0]
            exchange = BulkReadExchange(
                BrokerConnection(self.broker, Security(), 30.0), Filter(), 1 << 26, 30.0, fail_on_loss=True
            )
            for records in exchange.read([RangeProgress(Range(queue, 0, end))]):
                starts += (records.starts[1:] + len(data)).tolist()
                data += records.data
                starts.append(len(data))
            assert len(starts) == end + 1
            self._data[queue.queue_id], self._starts[queue.queue_id] = data, starts

    def serve_one(self, stream: socket.socket) -> None:
        servers = {address: BrokerConnection(address, Security(), 30.0) for address in (self.name_server, self.broker)}
        while True:
            frame, header_bytes = receive_frame(stream)
            header = json.loads(frame[PREFIX.size :][:header_bytes])
            code, ext = header["code"], header.get("extFields") or {}
            if code == RequestCode.BULK_READ:
                self._send(stream, header["opaque"], ext)
                continue
            server = servers[self.name_server if code in NAME_SERVER_CODES else self.broker]
            answer = server.request(code, ext, frame[PREFIX.size + header_bytes :])
            body = bytes(answer.body).replace(self.broker.encode(), self.address.encode())
            stream.sendall(encode_command(Command(answer.code, answer.ext, body, header["opaque"], 1)))

    def _send(self, stream: socket.socket, opaque: int, ext: dict[str, str]) -> None:
        queue, offset, credit = int(ext["queueId"]), int(ext["offset"]), int(ext["creditBytes"])
        starts, data = self._starts[queue], memoryview(self._data[queue])
        end = min(int(ext.get("endOffset", len(starts) - 1)), len(starts) - 1)
        more = True
        while more:
            upto = max(bisect_left(starts, starts[offset] + min(FRAME_BYTES, credit), hi=end), min(offset + 1, end))
            body = data[starts[offset] : starts[upto]]
            credit, offset = credit - len(body), upto
            more = credit > 0 and offset < end
            fields = {"nextBeginOffset": offset, "minOffset": 0, "maxOffset": len(starts) - 1, "more": more}
            prefix = encode_prefix(opaque, 0, fields, len(body), "")
            sent = stream.sendmsg([prefix, body])
            if sent < len(prefix):
                stream.sendall(prefix[sent:])
                sent = len(prefix)
            stream.sendall(body[sent - len(prefix) :])


class Count(Server):
    """Passes everything on, and counts requests by their code."""

    def __init__(self, name_server: str) -> None:
        super().__init__(name_server)
        self.counts: Counter[int] = Counter()

    def serve_one(self, stream: socket.socket) -> None:
        """Send requests to the server that knows them, and their answers back, in any order."""
        servers: dict[str, socket.socket] = {}
        while True:
            frame, header_bytes = receive_frame(stream)
            header = json.loads(frame[PREFIX.size :][:header_bytes])
            code = header["code"]
            self.counts[code] += 1
            if not self.broker and code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
                self.find_broker(header["extFields"]["topic"])
            address = self.name_server if code in NAME_SERVER_CODES else self.broker
            if address not in servers:
                servers[address] = socket.create_connection(split_address(address))
                threading.Thread(target=self._pass_back, args=(servers[address], stream), daemon=True).start()
            servers[address].sendall(frame)

    def _pass_back(self, server: socket.socket, stream: socket.socket) -> None:
        try:
            while True:
                frame, header_bytes = receive_frame(server)
                body = frame[PREFIX.size + header_bytes :].replace(self.broker.encode(), self.address.encode())
                prefix = PREFIX.pack(4 + header_bytes + len(body), header_bytes)
                stream.sendall(prefix + frame[PREFIX.size :][:header_bytes] + body)
        except OSError:
            server.close()


def main() -> None:
    kind, *words = sys.argv[1:]
    if kind == "memory":
        Memory(*words).serve()
        return
    server = Count(*words)
    server.serve()
    print(json.dumps(server.counts), flush=True)


if __name__ == "__main__":
    main()
