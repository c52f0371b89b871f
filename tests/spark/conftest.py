"""A broker, and one Spark session for all tests that need a JVM."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow.fs as pafs
import pyspark
import pytest
from pyspark.sql import SparkSession
from tests.broker_process import broker_process
from tests.client.patient import PATIENCE_S, patient

from martlet_client.blocking import Admin, Producer
from martlet_client.messages import Message
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.headers import SendHeader
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark import configure
from martlet_spark.cluster import Cluster as SparkCluster
from martlet_spark.connection import CONNECTIONS, Security

from . import java_options
from .clusters import Cluster, Messages, cluster

if TYPE_CHECKING:
    from moto.server import ThreadedMotoServer

java_options.set_options()


class Topic:
    """A topic of a running broker, and what the test has sent to it."""

    def __init__(self, endpoints: str, queues: int = 4) -> None:
        self.endpoints = endpoints
        self.name = f"Spark-{uuid4().hex[:8]}"
        self.bodies: list[bytes] = []
        self.create(queues)

    def create(self, queues: int) -> None:
        with Admin(patient(self.endpoints)) as admin:
            admin.create_topic(self.name, queues=queues)

    def delete(self) -> None:
        with Admin(patient(self.endpoints)) as admin:
            admin.delete_topic(self.name)

    def send(self, count: int, *, queues: Sequence[int] = (0, 1, 2, 3), tags: str = "", keys: str = "") -> None:
        """Send *count* messages, to *queues* in turn."""
        first = len(self.bodies)
        with Producer(patient(self.endpoints), "spark-tests", send_timeout_s=PATIENCE_S) as producer:
            broker = producer.queues(self.name)[0].broker_name
            for number in range(first, first + count):
                body = f"{self.name} {number}".encode()
                message = Message(self.name, body, tags=tags, keys=keys.split(), properties={"number": str(number)})
                producer.send(message, queue=MessageQueue(self.name, broker, queues[number % len(queues)]))
                self.bodies.append(body)

    def send_raw(self, body: bytes, sys_flag: int = 0, born_ms: int = 1_700_000_000_000, queue: int = 0) -> None:
        """Send a message as no client of ours would."""
        header = SendHeader(
            producer_group="spark-tests",
            topic=self.name,
            default_topic="TBW102",
            queue_id=queue,
            sys_flag=sys_flag,
            born_ms=born_ms,
        )
        cluster = SparkCluster(self.endpoints.split(","), Security(), PATIENCE_S)
        route = cluster.route(self.name)
        broker = next(iter(route.brokers))
        answer = cluster.ask_broker(
            self.name, route, broker, lambda found: found.request(RequestCode.SEND_MESSAGE_V2, header.to_ext(), body)
        )
        assert answer.code == ResponseCode.SUCCESS, answer.remark

    @property
    def options(self) -> dict[str, str]:
        return {"endpoints": self.endpoints, "subscribe": self.name}


@pytest.fixture(scope="session")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name server of a running broker."""
    with broker_process(tmp_path_factory.mktemp("broker") / "data") as address:
        yield address
        CONNECTIONS.close()


@pytest.fixture
def topic(endpoints: str) -> Topic:
    return Topic(endpoints)


@pytest.fixture(scope="session", autouse=True)
def spark_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A SPARK_HOME that has everything of the installed Spark but its archive of PySpark.

    Each Python process that Spark starts would compile that archive, for 0.8 s of 1.2; so it imports the installed
    modules, which are compiled. Spark gives such a process 10 s to answer, and fails the query of a busy machine then.
    Executors work in the folder ``work`` of it.
    """
    home = tmp_path_factory.mktemp("spark-home")
    for each in Path(pyspark.__file__).parent.iterdir():
        if each.name not in ("work", "python"):
            (home / each.name).symlink_to(each)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SPARK_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A Spark session with two threads."""
    os.environ.pop("PYSPARK_PYTHON", None)
    # Spark's workers have the environment of now; these are for the S3 server of a test.
    os.environ.update({"AWS_ACCESS_KEY_ID": "martlet", "AWS_SECRET_ACCESS_KEY": "martlet"})
    builder = SparkSession.builder.master("local[2]").appName("martlet-tests")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        # To compile a small query takes longer than to run it. The Connect client of a test has it compiled.
        **java_options.INTERPRETED,
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }.items():
        builder = builder.config(name, value)
    session = configure(builder).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def s3_server() -> Iterator["ThreadedMotoServer"]:
    """An S3-compatible server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def bucket(s3_server: "ThreadedMotoServer") -> Iterator[str]:
    """A bucket of an S3-compatible server."""
    host, port = s3_server.get_host_and_port()
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    pafs.S3FileSystem(
        access_key="martlet",
        secret_key="martlet",
        endpoint_override=f"{host}:{port}",
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    ).create_dir("lake")
    yield "s3://lake"
    del os.environ["AWS_ENDPOINT_URL"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The brokers a and b; each test leaves them running."""
    with cluster(tmp_path_factory.mktemp("pair"), "a", "b") as found:
        yield found
        CONNECTIONS.close()


@pytest.fixture
def shared(pair: Cluster) -> Messages:
    """A topic of both brokers."""
    return Messages(pair.endpoints, ["a", "b"])
