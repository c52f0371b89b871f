"""Brokers that do as the test says: they refuse requests, or close connections before or after they have stored."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final
from unittest.mock import patch

import orjson

from martlet_remoting.wire.batches import decode_batch
from martlet_remoting.wire.codec import FrameBuffer, encode_response
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command
from martlet_spark.cluster import Cluster
from martlet_spark.connection import CONNECTIONS, Security

# What the test may let a broker do with the next send.
CLOSE_BEFORE: Final = -1
CLOSE_AFTER: Final = -2
ENDS: Final = (
    RequestCode.PREPARE_EXTERNAL_TRANSACTION,
    RequestCode.COMMIT_EXTERNAL_TRANSACTION,
    RequestCode.ABORT_EXTERNAL_TRANSACTION,
)


class FakeBroker:
    """A broker that keeps what it is sent: ``stored`` has the queue and the bodies of each request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stored: list[tuple[str, int, list[bytes]]] = []
        self.next: list[int] = []  # what to do with the next sends: a response code, or `CLOSE_...`
        self.asked: list[Command] = []
        self.parts: dict[str, list[list[bytes]]] = {}  # the chunks that were staged
        self.committed = "false"  # what it says to staged chunks
        self.brokers: set[str] = set()  # those that runs have named
        self.topics: dict[str, dict[str, Any]] = {}  # routes, if it is a name server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._connections: list[socket.socket] = []
        self._threads[0].start()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    @property
    def connections(self) -> int:
        """How many connections were opened."""
        return len(self._connections)

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, bodies in self.stored for body in bodies]

    def close(self) -> None:
        """Close everything: connections break, new ones are refused."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # it may be accepting the last connection
        self._listener.close()
        for connection in self._connections:
            with suppress(OSError):  # its thread has closed it
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            self._threads.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = FrameBuffer()
        with connection, suppress(OSError):  # the other side closes whenever it likes
            while data := connection.recv(65536):
                buffer.receive_data(data)
                for command in buffer.commands():
                    answer = self._answer(command)
                    if answer is None:
                        return
                    connection.sendall(answer)

    def _answer(self, command: Command) -> bytes | None:
        """Return the answer; None closes the connection."""
        if command.code == RequestCode.GET_ROUTEINFO_BY_TOPIC:
            route = self.topics.get(command.text("topic"))
            if route is None:
                return encode_response(command.opaque, ResponseCode.TOPIC_NOT_EXIST, remark="no such topic")
            return encode_response(command.opaque, 0, body=orjson.dumps(route))
        if command.code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return encode_response(command.opaque, 0, body=orjson.dumps({"topicList": list(self.topics)}))
        if command.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            table = {each["brokerName"]: each for route in self.topics.values() for each in route["brokerDatas"]}
            return encode_response(command.opaque, 0, body=orjson.dumps({"brokerAddrTable": table}))
        action = self.next.pop(0) if self.next else ResponseCode.SUCCESS
        self.asked.append(command)
        if command.code == RequestCode.STAGE_EXTERNAL_MESSAGES and action in (0, CLOSE_AFTER):
            return self._stage(command) if action == 0 else self._stage(command) and None
        if command.code == RequestCode.BEGIN_EXTERNAL_TRANSACTIONS and not action:
            self.brokers |= set(command.text("brokers").split(","))
            begun = {"epoch": "7", "committed": "-1", "prepared": "-1", "brokers": ",".join(sorted(self.brokers))}
            return encode_response(command.opaque, 0, begun)
        if command.code in ENDS and action >= 0:
            return encode_response(command.opaque, action)
        if command.code not in ENDS and action in (0, CLOSE_AFTER):
            batch = command.code == RequestCode.SEND_BATCH_MESSAGE
            bodies = [message.body for message in decode_batch(command.body)] if batch else [command.body]
            self.stored.append((command.text("b"), command.integer("e"), bodies))
        return None if action < 0 else encode_response(command.opaque, action, remark="the test says so")

    def _stage(self, command: Command) -> bytes:
        """Store a chunk of a part unless it is there; the one before must be."""
        part = self.parts.setdefault(command.text("part"), [])
        chunk = command.integer("chunk")
        if chunk > len(part):
            return encode_response(command.opaque, ResponseCode.QUERY_NOT_FOUND, remark="a chunk is missing")
        if chunk == len(part):
            part.append([message.body for message in decode_batch(command.body)])
        return encode_response(command.opaque, 0, {"chunks": str(len(part)), "committed": self.committed})


def route(brokers: Sequence[FakeBroker], queues: int) -> dict[str, Any]:
    return {
        "brokerDatas": [
            {"cluster": "c", "brokerName": broker.name, "brokerAddrs": {"0": broker.address}} for broker in brokers
        ],
        "queueDatas": [
            {"brokerName": broker.name, "readQueueNums": queues, "writeQueueNums": queues, "perm": 6}
            for broker in brokers
        ],
    }


@contextmanager
def fake_cluster(*names: str, timeout_s: float = 30, queues: int = 2) -> Iterator[tuple[Cluster, list[FakeBroker]]]:
    """Yield a cluster with brokers of these names, which all have the topic ``Orders``."""
    server = FakeBroker("nameserver")
    brokers = [FakeBroker(name) for name in names]
    server.topics["Orders"] = route(brokers, queues)
    try:
        # A busy machine may need more than the second that an answer may always take.
        with patch("martlet_spark.connection.ANSWER_S", 120.0):
            yield Cluster([server.address], Security(), timeout_s), brokers
    finally:
        CONNECTIONS.close()
        for broker in (*brokers, server):
            broker.close()
