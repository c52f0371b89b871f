"""How the messages of MQTT and STOMP clients look in Spark, as the table of docs/spark.md has it."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import trio
from tests.damage.world import Live, living
from trio.testing import MockClock

from martlet.testing.clock import START_MS
from martlet.testing.disk import FakeDisk
from martlet_columns.decode import Decoder
from martlet_columns.records import Records
from martlet_columns.schema import COLUMNS
from martlet_mqtt.wire.packets import Will
from martlet_mqtt.wire.properties import Properties, Property


def rows(live: Live, topic: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of *topic* as rows with all columns."""
    store, decoder = live.broker.store, Decoder(tuple(COLUMNS))
    for queue in store.queues.topics[topic].values():
        found = store.readers.read(queue, queue.first_offset, 100, 1 << 20)
        yield from decoder.decode(Records(bytearray(b"").join(found.pieces)), "broker-a").to_pylist()


def times(row: dict[str, Any]) -> tuple[float, float]:
    """Return how many seconds after the start of the clock *row* was born and stored."""
    start = datetime.fromtimestamp(START_MS / 1000, UTC)
    return (row["born_ts"] - start).total_seconds(), (row["store_ts"] - start).total_seconds()


def by_body(live: Live, *topics: str) -> dict[bytes, dict[str, Any]]:
    found = [{**row, "properties": dict(row["properties"])} for topic in topics for row in rows(live, topic)]
    return {
        row["body"]: row for row in sorted(found, key=lambda row: (row["store_ts"], row["body"] == b"", row["body"]))
    }


async def test_messages_of_mqtt_clients(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    async with living(FakeDisk(), START_MS) as live:
        will = Will("home/gone", b"the end", properties=Properties({Property.WILL_DELAY: 20}))
        talk = await live.mqtt.connect("c", expiry_s=100, will=will)
        await trio.sleep(5)
        sent = round(trio.current_time() - began, 3)
        for qos in (0, 1, 2):
            await talk.publish("home/door", b"%d" % qos, qos, packet_id=qos + 1)
        await talk.publish("home/door", b"", 1, packet_id=9, retain=True)
        talk.hang_up()
        await trio.sleep(60)
        await live.settle()
        found = by_body(live, "mqtt")
    assert {row["tag"] for row in found.values()} == {"home/door", "home/gone"}
    assert len({row["queue"] for row in found.values() if row["tag"] == "home/door"}) == 1
    assert {body: times(row) for body, row in found.items()} == {
        b"0": (sent, sent),
        b"1": (sent, sent),
        b"2": (sent, sent),
        b"": (sent, sent),
        b"the end": (sent + 20, sent + 20),  # a will is born when the broker publishes it
    }
    assert [row["properties"].get("MQTT_QOS") for row in found.values()] == ["0", None, "2", None, "0"]


async def test_messages_of_stomp_clients(autojump_clock: MockClock) -> None:
    began = trio.current_time()
    async with living(FakeDisk(), START_MS) as live:
        talk = await live.stomp.connect()
        await trio.sleep(5)
        sent = round(trio.current_time() - began, 3)
        await talk.publish("/queue/orders", b"plain", timestamp="12345", KEYS="a b", colour="red")
        await talk.send(talk.frame("BEGIN", transaction="t"))
        await talk.send(talk.frame("SEND", b"in a transaction", destination="/queue/orders", transaction="t"))
        await trio.sleep(10)
        await talk.send(talk.frame("COMMIT", transaction="t", receipt="c"))
        await talk.receipt("c")
        await talk.publish("/queue/orders", b"delayed", AMQ_SCHEDULED_DELAY="20000")
        await talk.publish("/topic/mqtt/home/door", b"named")
        await trio.sleep(60)
        await live.settle()
        found = by_body(live, "orders", "mqtt")
    assert {body: times(row) for body, row in found.items()} == {
        b"plain": (sent, sent),
        b"in a transaction": (sent, sent + 10),
        b"delayed": (sent + 10, sent + 30),
        b"named": (sent + 10, sent + 10),
    }
    plain = found[b"plain"]
    assert (plain["key"], plain["tag"], plain["properties"]["timestamp"]) == ("a b", None, "12345")
    assert plain["properties"]["colour"] == "red"
    assert (found[b"named"]["topic"], found[b"named"]["tag"]) == ("mqtt", "home/door")
