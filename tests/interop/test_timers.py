"""Timed messages and recalls of stock clients, and pending ones in a store that both brokers use in turn."""

import base64
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import trio

from martlet_client import Admin, Message, Producer

from . import rocketmq
from .conftest import Target
from .java import Failed, Java, Jvm, message
from .martlet_process import Martlet
from .process import eventually
from .store_exchange import TOPIC, OurBroker, RealBroker

Name = Callable[[str], str]
HOUR_MS = 3_600_000
ILLEGAL = 13
# Retention removes all segments but the newest.
FORGETFUL = {
    "store.disk_used_ratio_max": "0.0001",
    "store.disk_clean_ratio": "0.0001",
    "store.retention_interval_ms": "100",
}
# What both brokers answer to a time that they cannot keep.
WRONG_TIMES: list[tuple[str, dict[str, Any]]] = [
    ("beyond the horizon", {"TIMER_DELAY_SEC": 259_201}),
    ("a time beyond the horizon", {"TIMER_DELIVER_MS": 1 << 45}),
    ("text", {"TIMER_DELIVER_MS": "soon"}),
    ("a fraction", {"TIMER_DELAY_MS": "1.5"}),
]


def now_ms() -> int:
    return int(time.time() * 1000)


def test_java_clients_time_and_recall_messages(newest: Java, name: Name, target_kind: str) -> None:
    topic, producer = name("timed"), newest.producer(queues=2)
    began_ms = now_ms()
    wanted = {"sec": ("setDelayTimeSec", 2, 2000), "ms": ("setDelayTimeMs", 1500, 1500)}
    for word, (setter, value, _) in wanted.items():
        producer.send(message(topic, word, **{setter: value}))
    producer.send(message(topic, "at", setDeliverTimeMs=began_ms + 3000))
    wanted["at"] = ("", 0, 3000)
    [recalled] = producer.send(message(topic, "recalled", setDelayTimeMs=4000))
    assert recalled.recall_handle
    assert producer.recall(topic, recalled.recall_handle) == recalled.msg_id
    producer.send(message(topic, "last", setDelayTimeMs=6000))
    wanted["last"] = ("", 0, 6000)
    got = newest.push(name("group"), topic).wait_bodies([word.encode() for word in wanted])
    assert sorted(each.body.decode() for each in got) == sorted(wanted)
    for each in got:
        assert each.stored_ms >= began_ms + wanted[each.body.decode()][2]
    if target_kind == "martlet":
        with pytest.raises(Failed, match="cannot be recalled any more") as late:
            producer.recall(topic, recalled.recall_handle)
        assert late.value.code == 604


def test_a_forged_or_foreign_handle_recalls_nothing(newest: Java, name: Name, target_kind: str) -> None:
    topic, other = name("timed"), name("other")
    producer = newest.producer(queues=1)
    producer.send(message(other, "x"))
    [sent] = producer.send(message(topic, "x", setDelayTimeMs=HOUR_MS))
    assert sent.recall_handle
    version, owner, broker, out_ms, unique = base64.urlsafe_b64decode(sent.recall_handle).decode().split()
    forged = {
        "another topic": (other, [version, other, broker, out_ms, unique]),
        "another time": (topic, [version, owner, broker, str(int(out_ms) + 1000), unique]),
        "another message": (topic, [version, owner, broker, out_ms, "0" * 32]),
        "another version": (topic, ["v2", owner, broker, out_ms, unique]),
        "another broker": (topic, [version, owner, "nowhere", out_ms, unique]),
    }
    answers: dict[str, int] = {}
    for what, (said, parts) in forged.items():
        handle = base64.urlsafe_b64encode(" ".join(parts).encode()).decode()
        try:
            producer.recall(said, handle)
        except Failed as failed:
            answers[what] = failed.code
    refused = {"another version", "another broker"}
    assert set(answers) == refused, "whatever has the form of a handle is accepted"
    if target_kind == "martlet":
        assert producer.recall(topic, sent.recall_handle) == sent.msg_id


@pytest.mark.parametrize(("what", "properties"), WRONG_TIMES, ids=[what for what, _ in WRONG_TIMES])
def test_a_time_that_cannot_be_kept_is_refused(newest: Java, name: Name, what: str, properties: dict[str, Any]) -> None:
    producer = newest.producer(queues=1)
    [refused] = producer.try_send(message(name("wrong"), "x", system=properties))
    assert refused.error is not None
    assert refused.error.code == ILLEGAL


@pytest.mark.parametrize(
    "properties", [{"TIMER_DELAY_MS": -5}, {"TIMER_DELIVER_MS": 1}, {"TIMER_DELAY_SEC": 0}], ids=str
)
def test_a_time_in_the_past_is_now(newest: Java, name: Name, properties: dict[str, Any]) -> None:
    topic = name("past")
    newest.producer(queues=1).send(message(topic, "x", system=properties))
    [got] = newest.push(name("group"), topic).wait(1)
    assert "TIMER_OUT_MS" not in got.properties


def test_a_level_wins_over_a_time(newest: Java, name: Name) -> None:
    topic = name("both")
    newest.producer(queues=1).send(message(topic, "x", delay_level=1, system={"TIMER_DELAY_SEC": 3600}))
    [got] = newest.push(name("group"), topic).wait(1)
    assert got.properties["DELAY"] == "1"
    assert "TIMER_DELAY_SEC" not in got.properties


def test_the_admin_tool_shows_what_is_pending_and_how_far_it_lags(newest: Java, target: Target, name: Name) -> None:
    topic, producer = name("pending"), newest.producer(queues=1)
    [sent] = producer.send(message(topic, "x", setDelayTimeMs=HOUR_MS))
    producer.send(message(topic, "x", delay_level=len(rocketmq.DELAY_LEVELS.split())))

    def shown() -> dict[str, str] | None:
        lines = newest.mqadmin("brokerStatus", "-b", target.address).splitlines()
        found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        return found if found["timerCongestNum"] != "0" and found["timerOffsetBehind"] == "0" else None

    said = eventually(shown)
    assert int(said["timerReadBehind"]) <= 2
    assert {float(said[f"timer{way}queueTps"]) >= 0 for way in ("En", "De")} == {True}
    delivered, stored = map(int, said["scheduleMessageOffset_18"].split(","))
    assert 0 <= delivered <= stored > 0
    producer.recall(topic, str(sent.recall_handle))


def send(name_server: str, topic: str, prefix: str, delays_ms: dict[str, int]) -> None:
    """Send a message for each delay, counted from now, with our client; recall the one called ``recalled``."""

    async def work() -> None:
        async with Producer(name_server, "timing") as producer:
            now_ms = int(time.time() * 1000)
            for word, delay_ms in delays_ms.items():
                body = f"{prefix} {word}".encode()
                sent = await producer.send(Message(topic, body, deliver_at_ms=now_ms + delay_ms))
                if word == "recalled":
                    await producer.recall(topic, sent.recall_handle)

    trio.run(work)


def send_levels(clients: Java) -> None:
    """Send a message that waits as long as the pending timers, and one that waits as long as the later ones."""
    producer = clients.producer(queues=4)
    for level, word in ((2, "pending"), (3, "later")):
        producer.send(message(TOPIC, f"level {word}", delay_level=level))


def remove_first_segment(broker: Martlet, pending: int) -> None:
    """Let retention remove everything from before, so that *pending* messages become timers, or are appended again."""

    async def work() -> None:
        async with Producer(broker.name_server, "fill", compress_over_bytes=1 << 20) as producer:
            for _ in range(12):
                await producer.send(Message("Filler", bytes(100_000)))
        async with Admin(broker.name_server) as admin:
            with trio.fail_after(60):
                while True:
                    said = await admin.broker_runtime(broker.address)
                    if int(said["commitLogMinOffset"]) and said["timerCongestNum"] == str(pending):
                        return
                    await trio.sleep(0.1)

    trio.run(work)


def due_ms(properties: Mapping[str, str]) -> int:
    """Return when a delivered message was due; those of levels have no time but that of their records."""
    return int(properties.get("TIMER_DELIVER_MS") or properties["TIMER_OUT_MS"])


def read(clients: Java, count: int, *, more_s: float = 4.0) -> Counter[bytes]:
    """Return the bodies of the first *count* messages and of all that come soon after."""
    consumer = clients.lite("another_reader", TOPIC, assign=True)
    got = consumer.poll_until(count)
    for each in got:
        assert each.stored_ms >= due_ms(each.properties)
    time.sleep(more_s)
    return Counter(each.body for each in clients.lite("third_reader", TOPIC, assign=True).poll_until(count))


def test_pending_timers_and_moved_levels_go_to_rocketmq_and_back(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, jvm: Jvm
) -> None:
    """Retention has moved all of them before: those of levels have become timers."""
    levels, small = "1s 25s 60s", str(1 << 20)
    ours = martlet(settings={"timer.levels": levels, "store.segment_bytes": small, **FORGETFUL})
    clients = Java(jvm, ours.name_server)
    send_levels(clients)
    send(ours.name_server, TOPIC, "ours", {"recalled": 25_000, "pending": 25_000, "later": 60_000})
    remove_first_segment(ours, pending=4)
    send(ours.name_server, TOPIC, "ours", {"soon": 500})
    assert read(clients, 1, more_s=0) == Counter([b"ours soon"])
    clients.close()
    assert ours.stop() == 0
    theirs = real_broker(settings={"messageDelayLevel": levels, "mappedFileSizeCommitLog": small})
    clients = Java(jvm, names.address)
    send(names.address, TOPIC, "theirs", {"soon": 500, "recalled": 60_000, "later": 60_000})
    expected = Counter([b"ours soon", b"theirs soon", b"ours pending", b"level pending"])
    assert read(clients, 4) == expected
    clients.close()
    theirs.stop()
    for key in FORGETFUL:
        del ours.settings[key]
    ours.start()
    clients = Java(jvm, ours.name_server)
    expected += Counter([b"ours later", b"theirs later", b"level later"])
    assert read(clients, 7) == expected
    clients.close()
