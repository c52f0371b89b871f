"""What a task stages, and what the driver commits, whatever happens to connections and brokers."""

from collections.abc import Sequence
from contextlib import closing

import orjson
import pyarrow as pa
import pytest

from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.packets import MessageQueue
from martlet_spark.cluster import Cluster
from martlet_spark.errors import WriteError
from martlet_spark.write import staging
from martlet_spark.write.staging import Staging, TaskPart, Transaction
from martlet_spark.write.targets import QueueTurns, Targets
from martlet_spark.write.writable import WritableQueues

from .fake_brokers import CLOSE_AFTER, CLOSE_BEFORE, FakeBroker, fake_cluster

BODIES = [b"body %d" % number for number in range(100)]
QUERY = Transaction("query", 5)


def stage(cluster: Cluster, bodies: Sequence[bytes], transaction: Transaction = QUERY) -> list[TaskPart]:
    queues_of = WritableQueues(cluster)
    rows = pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary())})
    with closing(Staging(cluster, QueueTurns(queues_of), transaction)) as stage:
        for chunk in Targets(queues_of, "Orders", 500).chunks(rows):
            stage.write(chunk)
        return stage.finish()


def staged(broker: FakeBroker) -> list[bytes]:
    return [body for part in broker.parts.values() for chunk in part for body in chunk]


def test_a_task_stages_a_part_at_each_broker() -> None:
    with fake_cluster("a", "b") as (cluster, brokers):
        parts = stage(cluster, BODIES)
        assert sorted(part.queue.broker_name for part in parts) == ["a", "b"]
        assert sorted(staged(brokers[0]) + staged(brokers[1])) == sorted(BODIES)
        for part in parts:
            (chunks,) = brokers["ab".index(part.queue.broker_name)].parts.values()
            assert len(chunks) == part.chunks
        assert stage(cluster, BODIES)[0].name not in {part.name for part in parts}
        assert not stage(cluster, [])


@pytest.mark.parametrize("action", [CLOSE_BEFORE, CLOSE_AFTER, ResponseCode.SYSTEM_BUSY])
@pytest.mark.parametrize("good", [0, 1, 5])
def test_each_chunk_is_staged_once_and_in_order(action: int, good: int) -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        broker.next = [0] * good + [action] * 2 + [0, action]
        (part,) = stage(cluster, BODIES)
        assert staged(broker) == BODIES
        assert len(broker.parts[part.name]) == part.chunks


def test_what_was_committed_before_is_not_staged_again() -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        broker.committed = "true"
        assert stage(cluster, BODIES * 100) == []
        assert len(broker.asked) <= 8


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
            "it offers no external transactions; set the option guarantee to at-l",
        ),
        (ResponseCode.ILLEGAL_OPERATION, "ILLEGAL_OPERATION: .*; the query was started again, and only its newest run"),
        (ResponseCode.QUERY_NOT_FOUND, "QUERY_NOT_FOUND: .*; start the query again"),
    ],
)
def test_a_refusal_says_what_to_do(code: int, text: str) -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        for transaction in (QUERY, Transaction(f"query {code}", 5, "run")):
            broker.next = [code] * 9
            with pytest.raises(WriteError, match=text):
                stage(cluster, BODIES, transaction)
        # A chunk that `stage` sent before it failed may still arrive.
        broker.next = [code] * 9
        with pytest.raises(WriteError, match=text):
            staging.commit(cluster, [part_of("a")])


def part_of(broker: str, chunks: int = 1) -> TaskPart:
    return TaskPart(QUERY, MessageQueue("Orders", broker, 0), f"part-{broker}", 3, chunks)


def test_a_run_begins_once_at_each_broker() -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        for _ in range(2):
            (part,) = stage(cluster, BODIES, Transaction("begins", 5, "run"))
            assert part.epoch == 7
        begun = [each for each in broker.asked if each.code == RequestCode.BEGIN_EXTERNAL_TRANSACTIONS]
        assert [(each.text("producer"), each.text("run")) for each in begun] == [("begins", "run")]
        assert {each.text("epoch") for each in broker.asked if each.code == RequestCode.STAGE_EXTERNAL_MESSAGES} == {
            "7"
        }


@pytest.mark.parametrize("action", [CLOSE_BEFORE, CLOSE_AFTER, ResponseCode.SYSTEM_BUSY])
def test_a_commit_is_repeated_until_each_broker_answers(action: int) -> None:
    with fake_cluster("a", "b") as (cluster, (first, second)):
        second.next = [action, action]
        staging.commit(cluster, [part_of("b"), part_of("a"), part_of("b", 2)])
        (asked,) = first.asked
        assert asked.code == RequestCode.COMMIT_EXTERNAL_TRANSACTION
        assert orjson.loads(asked.body) == {"parts": [["part-a", 1]]}
        assert [asked.text(name) for name in ("producer", "epoch", "sequence")] == ["query", "3", "5"]
        assert {each.body for each in second.asked} == {orjson.dumps({"parts": [["part-b", 1], ["part-b", 2]]})}
        prepare, commit = RequestCode.PREPARE_EXTERNAL_TRANSACTION, RequestCode.COMMIT_EXTERNAL_TRANSACTION
        assert [each.code for each in second.asked] == [prepare] * 3 + [commit]
        assert not first.next
        staging.commit(cluster, [])


def test_nothing_is_committed_unless_all_brokers_but_the_first_are_prepared() -> None:
    with fake_cluster("a", "b", "c") as (cluster, (first, second, third)):
        third.next = [ResponseCode.QUERY_NOT_FOUND]
        with pytest.raises(WriteError, match="broker 'c' refused the commit: QUERY_NOT_FOUND"):
            staging.commit(cluster, [part_of(broker) for broker in "abc"])
        assert [each.code for each in second.asked] == [RequestCode.PREPARE_EXTERNAL_TRANSACTION]
        assert not first.asked


def test_commits_share_a_connection() -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        for _ in range(3):
            staging.commit(cluster, [part_of("a")])
        assert broker.connections == 1
        broker.next = [CLOSE_BEFORE]
        staging.commit(cluster, [part_of("a")])
        assert broker.connections == 2


def test_an_abort_names_the_parts() -> None:
    with fake_cluster("a") as (cluster, (broker,)):
        staging.abort(cluster, [part_of("a")])
        assert [(each.code, orjson.loads(each.body)) for each in broker.asked] == [
            (RequestCode.ABORT_EXTERNAL_TRANSACTION, {"parts": ["part-a"]})
        ]


def test_a_broker_that_is_gone_fails_in_time() -> None:
    with fake_cluster("a", timeout_s=0.1) as (cluster, (broker,)):
        broker.next = [CLOSE_BEFORE] * 50
        with pytest.raises(WriteError, match=r"broker 'a' confirmed no message for 0.1 s"):
            stage(cluster, BODIES)
        with pytest.raises(WriteError, match=r"broker 'a' did not answer for 0.1 s"):
            staging.commit(cluster, [part_of("a")])
