"""What micro-batches of a few rows take, and what a streaming query costs while nothing arrives."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.brokers import Martlet
from benchmarks.spark.session import Spark
from pyspark.sql.streaming import StreamingQuery

from martlet_client.blocking import Admin, Producer
from martlet_client.messages import Message
from martlet_remoting.wire.packets import MessageQueue

__all__ = ["idle", "tiny_batches"]

BATCHES = 30
WARM_UP = 5
IDLE_S = 15.0
WAIT_S = 60.0


def start(spark: Spark, endpoints: str, topic: str, folder: Path, **options: str) -> StreamingQuery:
    """Start a query from *topic* to nowhere, and return when it has begun to wait for messages."""
    stream = spark.session.readStream.format("martlet").options(endpoints=endpoints, subscribe=topic, **options).load()
    checkpoint = folder / f"checkpoint-{time.time_ns()}"
    query = stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    until(query, lambda: query.status["message"] == "Waiting for data to arrive")
    return query


def until(query: StreamingQuery, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        failed = query.exception()
        assert failed is None, failed
        assert time.monotonic() < end, query.status
        time.sleep(0.002)


def tiny_batches(spark: Spark, martlet: Martlet, folder: Path) -> None:
    """Print medians of batches of four rows, from topics with 4 and 64 queues."""
    print("\n| batches of 4 rows | trigger ms | addBatch ms | latestOffset ms | send to end ms | CPU ms |")
    print("|---|---|---|---|---|---|")
    with Admin(martlet.name_server) as admin, Producer(martlet.name_server, "bench-tiny") as producer:
        for queues in (4, 64):
            admin.create_topic(f"Tiny-{queues}", queues=queues)
            query = start(spark, martlet.name_server, f"Tiny-{queues}", folder)
            places = producer.queues(f"Tiny-{queues}")
            for number in range(WARM_UP):
                _batch(query, producer, places, number)
            cpu_s = sum(spark.cpu_s())
            took = [_batch(query, producer, places, number) for number in range(WARM_UP, WARM_UP + BATCHES)]
            cpu_s = sum(spark.cpu_s()) - cpu_s
            rows = [each for each in query.recentProgress if each.numInputRows]
            query.stop()
            _print(f"{queues} queues", rows[WARM_UP:], took, cpu_s)


def _batch(query: StreamingQuery, producer: Producer, places: Sequence[MessageQueue], number: int) -> float:
    """Send four messages; return after how many milliseconds a batch had them."""
    began = time.perf_counter()
    for each in range(4):
        queue = places[(number * 4 + each) % len(places)]
        producer.send(Message(queue.topic, b"x" * 100), queue=queue)
    until(query, lambda: _rows(query) >= 4 * (number + 1))
    return (time.perf_counter() - began) * 1000


def _rows(query: StreamingQuery) -> int:
    return sum(each.numInputRows for each in query.recentProgress)


def _print(title: str, progress: list[object], took: list[float], cpu_s: float) -> None:
    def median(name: str) -> float:
        return statistics.median(each.durationMs[name] for each in progress)

    names = ("triggerExecution", "addBatch", "latestOffset")
    durations = " | ".join(f"{median(name):.0f}" for name in names)
    cpu_ms = cpu_s * 1000 / len(took)
    whole = statistics.median(took)
    print(f"| {title} ({len(progress)} batches) | {durations} | {whole:.0f} | {cpu_ms:.0f} |", flush=True)


def idle(spark: Spark, martlet: Martlet, endpoints: str, folder: Path) -> None:
    """Print what a query on 4 queues costs a second while nothing arrives; *endpoints* pass requests on."""
    with Admin(martlet.name_server) as admin:
        admin.create_topic("Idle", queues=4)
    query = start(spark, endpoints, "Idle", folder)
    time.sleep(2)
    before, broker_s = spark.cpu_s(), martlet.process.cpu_s()
    time.sleep(IDLE_S)
    jvm_s, python_s = (after_s - before_s for before_s, after_s in zip(before, spark.cpu_s(), strict=True))
    broker_s = martlet.process.cpu_s() - broker_s
    used = (("JVM", jvm_s), ("Python", python_s), ("broker", broker_s))
    shares = ", ".join(f"{name} {seconds / IDLE_S:.3f}" for name, seconds in used)
    print(f"\nidle query on 4 queues, cores: {shares}")
    query.stop()
