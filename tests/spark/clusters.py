"""Several brokers behind one name server, each in a process of its own, which tests end and start."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.client.patient import PATIENCE_S, patient
from tests.interop.martlet_process import Martlet
from tests.interop.process import Process, eventually, free_port

from martlet_client import ClientSettings
from martlet_client.blocking import Admin, Producer, PullConsumer
from martlet_client.messages import Message
from martlet_remoting.wire.codes import RequestCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.connection import BrokerConnection, Security
from martlet_spark.read.stream import StreamReader
from martlet_spark.source import MartletDataSource

__all__ = ["Cluster", "Messages", "Stream", "batch_of", "cluster", "stored_on", "wait_removed"]

QUEUES = 2
_numbers = count(1)


class NameServer:
    """Martlet's name server alone; after `kill` or `stop`, `start` brings it back on its port, without any route."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self._starts = 0
        self.start()

    def start(self) -> None:
        self._starts += 1
        words = [sys.executable, "-m", "martlet", "nameserver", "--data", str(self._folder / "data")]
        words += ["--set", f"nameserver.listen={self.address}"]
        self._process = Process(words, self._folder / f"names-{self._starts}.log")
        self._process.wait_until(lambda: "martlet ready" in self._process.output() or None, "the name server")

    def stop(self) -> None:
        self._process.stop()

    def kill(self) -> None:
        self._process.kill()


class Cluster:
    """A name server and brokers, each in a cluster of its own name, so that a topic can be on one only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names = NameServer(folder / "names")
        self.brokers: dict[str, Martlet] = {}

    @property
    def endpoints(self) -> str:
        return self.names.address

    def add(self, name: str, **settings: str) -> Martlet:
        """Start the broker *name*, and wait until the name server knows it."""
        said = {"broker.name": name, "broker.cluster": name, "remoting.register_s": "1"}
        said |= {"remoting.nameservers": f'["{self.endpoints}"]', "plugins.enabled": '["remoting","filter_sql92","tx"]'}
        said |= {key.replace("__", "."): value for key, value in settings.items()}
        self.brokers[name] = Martlet(self._folder / name, said)
        self.wait_registered(name)
        return self.brokers[name]

    def wait_registered(self, *names: str) -> None:
        """Wait until the name server knows the brokers *names*."""

        def known() -> bool | None:
            with Admin(patient(self.endpoints)) as admin:
                return True if {*names} <= {*admin.cluster().brokers} else None

        eventually(known)

    def close(self) -> None:
        for broker in self.brokers.values():
            broker.close()
        self.names.kill()


@contextmanager
def cluster(folder: Path, *brokers: str) -> Iterator[Cluster]:
    """Run a name server and *brokers*; end them at the end."""
    found = Cluster(folder)
    try:
        for name in brokers:
            found.add(name)
        yield found
    finally:
        found.close()


class Messages:
    """A topic of *brokers*, or of all, and the bodies that the test has sent to it."""

    def __init__(self, endpoints: str, brokers: Sequence[str] = (), settings: ClientSettings | None = None) -> None:
        self.endpoints = endpoints
        self.client = settings or patient(endpoints)
        self.name = f"Chaos-{next(_numbers)}"
        self.bodies: list[bytes] = []
        self.create(brokers)

    @property
    def options(self) -> dict[str, str]:
        return {"endpoints": self.endpoints, "subscribe": self.name}

    def create(self, brokers: Sequence[str] = (), queues: int = QUEUES) -> None:
        """Create the topic, or add queues, and wait until the name server knows them."""
        with Admin(self.client) as admin:
            for broker in brokers or (None,):
                admin.create_topic(self.name, queues=queues, cluster=broker)

            def known() -> bool | None:
                wanted = {*brokers} or {*admin.cluster().brokers}
                shapes = {each.broker_name: each.read_queues for each in admin.topic_route(self.name).queues}
                return True if all(shapes.get(broker) == queues for broker in wanted) else None

            eventually(known)

    def delete(self) -> None:
        with Admin(self.client) as admin:
            admin.delete_topic(self.name)

    def send(
        self, count: int, *, to: Sequence[str] = (), body_bytes: int = 0, tags: str = "", keys: str = ""
    ) -> list[bytes]:
        """Send *count* messages to each queue of the brokers *to*, or of all, in turn; return the bodies.

        They can be read then.
        """
        sent: list[bytes] = []
        ends: dict[MessageQueue, int] = {}
        with Producer(self.client, "chaos-tests", compress_over_bytes=1 << 22, send_timeout_s=PATIENCE_S) as producer:
            queues = [queue for queue in producer.queues(self.name) if not to or queue.broker_name in to]
            for number in range(count):
                for queue in queues:
                    body = f"{self.name} {queue.broker_name}/{queue.queue_id} {len(self.bodies) + len(sent)}".encode()
                    body = body.ljust(body_bytes)
                    properties = {"number": str(number)}
                    message = Message(self.name, body, tags=tags, keys=keys.split(), properties=properties)
                    ends[queue] = producer.send(message, queue=queue).queue_offset + 1
                    sent.append(body)
        self._wait_readable(ends)
        self.bodies += sent
        return sent

    def _wait_readable(self, ends: Mapping[MessageQueue, int]) -> None:
        """Wait until each queue ends at its offset in *ends* or later: RocketMQ's queues follow its log."""
        with PullConsumer(self.client, "chaos-tests") as offsets:
            eventually(lambda: True if all(offsets.max_offset(each) >= end for each, end in ends.items()) else None)


def stored_on(broker: str, bodies: Sequence[bytes]) -> list[bytes]:
    """Those of *bodies* that were sent to *broker*."""
    return [body for body in bodies if body.split()[1].startswith(f"{broker}/".encode())]


class Stream:
    """A streaming query as Spark's driver runs it, without a JVM: a checkpoint, and batches."""

    def __init__(self, topic: Messages, **options: str) -> None:
        given = {"startingOffsets": "earliest", "pollMs": "0", "timeoutMs": "60s", **topic.options, **options}
        source = _source(given)
        reader = source.streamReader(source.schema())
        assert isinstance(reader, StreamReader)
        self.topic = topic
        self.reader = reader
        self.offset: dict[str, Any] = reader.initialOffset()

    def plan(self) -> dict[str, Any]:
        """Return where the next batch ends, as Spark's checkpoint would have it."""
        end: dict[str, Any] = json.loads(json.dumps(self.reader.latestOffset(self.offset, ReadAllAvailable())))
        return end

    def batch(self, end: dict[str, Any] | None = None) -> list[bytes]:
        """Plan a batch, unless it ends at *end*; read and commit it; return its bodies, sorted."""
        end = end or self.plan()
        found = sorted(self.rows(end))
        self.offset = end
        return found

    def rows(self, end: dict[str, Any]) -> Iterator[bytes]:
        """Yield the bodies of the batch that ends at *end*."""
        for partition in self.reader.partitions(self.offset, end):
            for batch in self.reader.read(partition):
                assert not isinstance(batch, tuple)
                yield from batch.column("body").to_pylist()


def batch_of(topic: Messages, **options: str) -> Iterator[bytes]:
    """Yield the bodies of a batch query that is planned now."""
    source = _source({"timeoutMs": "60s", **topic.options, **options})
    reader = source.reader(source.schema())
    for partition in reader.partitions():
        for batch in reader.read(partition):
            assert not isinstance(batch, tuple)
            yield from batch.column("body").to_pylist()


def wait_removed(topic: Messages, first: int, ask: str = "") -> None:
    """Wait until retention has removed the messages before *first* of each queue; *ask* the broker there to."""

    def removed() -> bool | None:
        if ask:
            connection = BrokerConnection(ask, Security(), 60.0)
            connection.request(RequestCode.DELETE_EXPIRED_COMMITLOG, {})
            connection.close()
        with Admin(topic.client) as admin:
            return True if all(each.min_offset >= first for each in admin.topic_stats(topic.name)) else None

    eventually(removed)


def _source(options: Mapping[str, str]) -> MartletDataSource:
    return MartletDataSource({name: text for name, text in options.items() if text})
