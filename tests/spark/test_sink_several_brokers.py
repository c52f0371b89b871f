"""The sink with several brokers: rows reach them all, one that leaves is replaced, and each commits on its own."""

from collections.abc import Iterator

from martlet_spark import staging
from martlet_spark.sink import Written

from .clusters import Cluster, Messages
from .test_sink import Columns, Query, frame, stored, values, writer


def brokers_of(topic: Messages) -> set[str]:
    return {message.queue.broker_name for message in stored(topic.endpoints, topic.name)}


def test_a_driver_that_dies_between_two_commits_completes_the_batch(shared: Messages) -> None:
    query = Query(shared, shared.name)
    messages = query.batch(0, *range(100))
    parts = [part for message in messages if message is not None for part in message.parts]
    staging.commit(query.writer.cluster(), [part for part in parts if part.queue.broker_name == "a"])
    assert 0 < len(values(shared)) < 100
    again = Query(shared, shared.name, "run-2")
    messages = again.batch(0, *reversed(range(100)))
    assert {part.queue.broker_name for message in messages if message for part in message.parts} == {"b"}
    for _ in range(2):
        again.writer.commit_parts(messages)
        assert values(shared) == list(range(100))
    assert again.batch(0, *range(100)) == [Written(), Written()]


def test_rows_of_a_key_are_on_one_broker(shared: Messages) -> None:
    columns: Columns = {
        "body": [b"%d" % number for number in range(200)],
        "key": [f"k{number % 20}" for number in range(200)],
    }
    made = writer(shared, *columns)
    made.write(iter([frame(columns)]))
    by_key: dict[str, list[int]] = {}
    for message in stored(shared.endpoints, shared.name):
        by_key.setdefault(message.keys[0], []).append(int(message.body))
    assert [by_key[f"k{key}"] for key in range(20)] == [list(range(key, 200, 20)) for key in range(20)]
    assert brokers_of(shared) == {"a", "b"}


def test_a_broker_that_dies_is_replaced(pair: Cluster, shared: Messages) -> None:
    made = writer(shared, "body")
    bodies = [b"%d" % number for number in range(4000)]

    def batches() -> Iterator[object]:
        yield frame({"body": bodies[:2000]})
        pair.brokers["b"].kill()
        yield frame({"body": bodies[2000:]})

    made.write(batches())
    pair.brokers["b"].start()
    pair.wait_registered("a", "b")
    assert set(values(shared)) == set(range(4000))
