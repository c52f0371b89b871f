"""The guarantee at-least-once: nothing is lost, and what may keep its order does."""

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest

from martlet_remoting.wire.codes import ResponseCode
from martlet_spark.cluster import Cluster, UnknownTopic
from martlet_spark.errors import WriteError
from martlet_spark.write import writable
from martlet_spark.write.sending import Outbox
from martlet_spark.write.targets import QueueTurns, Targets
from martlet_spark.write.writable import WritableQueues, write_queues

from .fake_brokers import CLOSE_AFTER, CLOSE_BEFORE, fake_cluster, route

BODIES = [b"body %d" % number for number in range(100)]


def send(cluster: Cluster, bodies: Sequence[bytes], queue: int | None = None, chunk_bytes: int = 500) -> None:
    columns = {"body": pa.array(bodies), "queue": pa.array([queue] * len(bodies), pa.int32())}
    queues_of = WritableQueues(cluster)
    outbox = Outbox(cluster, QueueTurns(queues_of))
    try:
        for chunk in Targets(queues_of, "Orders", chunk_bytes).chunks(pa.RecordBatch.from_pydict(columns)):
            outbox.write(chunk)
        outbox.finish()
    finally:
        outbox.close()


def test_rows_are_spread_over_all_brokers_and_queues() -> None:
    with fake_cluster("a", "b") as (cluster, brokers):
        send(cluster, BODIES)
        assert sorted(brokers[0].bodies + brokers[1].bodies) == sorted(BODIES)
        assert {queue for broker in brokers for _, queue, _ in broker.stored} == {0, 1}


@pytest.mark.parametrize("action", [CLOSE_BEFORE, CLOSE_AFTER, ResponseCode.SYSTEM_BUSY])
@pytest.mark.parametrize("good", [0, 3])
def test_what_a_broker_did_not_confirm_goes_to_another(action: int, good: int) -> None:
    with fake_cluster("a", "b") as (cluster, (first, second)):
        first.next = [0] * good + [action] * 3
        send(cluster, BODIES)
        assert set(first.bodies + second.bodies) == set(BODIES)
        assert second.bodies
        if action != CLOSE_AFTER:
            assert len(first.bodies + second.bodies) == len(BODIES)


@pytest.mark.parametrize("action", [CLOSE_BEFORE, ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE])
def test_rows_of_a_queue_wait_for_its_broker_in_order(action: int) -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        broker.next = [0, 0, action, action, 0, action]
        send(cluster, BODIES, queue=1)
        assert broker.bodies == BODIES
        assert {queue for _, queue, _ in broker.stored} == {1}


def test_a_batch_that_was_stored_but_not_confirmed_comes_again() -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        broker.next = [0, CLOSE_AFTER]
        send(cluster, BODIES, queue=0)
        again = broker.stored[1]
        assert broker.stored[2] == again
        assert [body for _, _, bodies in [*broker.stored[:2], *broker.stored[3:]] for body in bodies] == BODIES


def test_a_broker_that_is_gone_fails_the_task_in_time() -> None:
    with fake_cluster("a", timeout_s=0.1) as (cluster, (broker,)):
        broker.next = [CLOSE_BEFORE] * 50
        with pytest.raises(
            WriteError, match=r"queue \d of topic 'Orders' on broker 'a' confirmed no message for 0.1 s"
        ):
            send(cluster, BODIES)


def test_a_refusal_that_cannot_pass_fails_at_once() -> None:
    with fake_cluster("a", "b") as (cluster, brokers):
        for broker in brokers:
            broker.next = [ResponseCode.MESSAGE_ILLEGAL] * 50
        with pytest.raises(WriteError, match=r"answered to \d+ messages .*: MESSAGE_ILLEGAL: the test says so; if its"):
            send(cluster, BODIES)
        assert all(len(broker.next) >= 45 for broker in brokers)


def test_a_slow_flush_counts_as_stored(caplog: pytest.LogCaptureFixture) -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        broker.next = [ResponseCode.FLUSH_DISK_TIMEOUT]
        send(cluster, BODIES[:1])
        assert "FLUSH_DISK_TIMEOUT" in caplog.text


def test_an_unknown_topic_has_the_queues_of_the_template() -> None:
    text = "topic 'Parcels' does not exist, and no broker creates topics; create it"
    with fake_cluster("a") as (cluster, _), pytest.raises(UnknownTopic, match=text):
        write_queues(cluster, "Parcels")
    with fake_cluster("a") as (cluster, (broker,)):
        server = broker
        server.topics["TBW102"] = route([broker], 8)
        found = write_queues(Cluster([server.address], cluster.security, 1), "Parcels")
        assert [queue.queue_id for queue in found] == [0, 1, 2, 3]


def test_a_name_server_without_any_topic_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that restarts takes its topics along, also the one from which others are created."""
    with fake_cluster("a") as (cluster, (server,)):
        starting = Cluster([server.address], cluster.security, 60)

        def registered_after_two(timeout_s: float) -> Iterator[int]:
            assert timeout_s == 60
            yield from (0, 1)
            server.topics["Parcels"] = route([server], 2)
            yield 2

        monkeypatch.setattr(writable, "attempts", registered_after_two)
        assert [queue.queue_id for queue in write_queues(starting, "Parcels")] == [0, 1]


def test_a_name_server_that_stays_without_any_topic_fails_the_query_in_time() -> None:
    with fake_cluster("a") as (cluster, (server,)), pytest.raises(UnknownTopic, match="'Parcels' does not exist"):
        write_queues(Cluster([server.address], cluster.security, 0), "Parcels")
