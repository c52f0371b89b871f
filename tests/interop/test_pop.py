"""Stock Java consumers in POP mode: they share queues, retry, and what a dead one held goes to the others."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import fetch, rocketmq, wire
from .conftest import Target
from .java import Java, Jvm, Pops, PushConsumer, message
from .process import eventually
from .store_exchange import OurBroker, RealBroker

Name = Callable[[str], str]
POP_MESSAGE = 200050
ACK_MESSAGE = 200051
MAX_OFFSET = 30
CHANGE_INVISIBLE = 200053
LONG_MS = 600_000
INVISIBLE_MS = 5000  # the least that the Java client asks for


def in_pop_mode(java: Java, target: Target, topic: str, group: str, queues: int = 4) -> None:
    """Create a topic, and have its group pop it."""
    java.queries().create_topic(topic, target.address, queues=queues)
    set_mode(java, target.address, topic, group, "POP")


def set_mode(java: Java, address: str, topic: str, group: str, mode: str) -> None:
    """Have a group pull or pop a topic of one broker."""
    words = ("setConsumeMode", "-b", address, "-t", topic, "-g", group, "-q", "0", "-m", mode)
    assert "success" in java.mqadmin(*words)


def popping(java: Java, group: str, topic: str, **more: object) -> PushConsumer:
    """Start a consumer that pops, and wait until it has begun."""
    consumer = java.push(group, topic, client_rebalance=False, **more)
    eventually(lambda: True if any(q.queue == -1 and q.topic == topic for q in consumer.queues()) else None)
    return consumer


def wait_offset_saved(data: Path, key: str, offset: int) -> None:
    """Return when a broker has written that *offset* is the committed one of queue 0."""

    def look() -> bool | None:
        try:
            text = (data / "config" / "consumerOffset.json").read_text()
        except FileNotFoundError:
            return None
        entry = re.search(rf'"{key}":\s*{{\s*"?0"?:\s*(\d+)', text)
        return True if entry is not None and int(entry[1]) == offset else None

    eventually(look)


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Jvm]:
    """A JVM that the test kills."""
    jvm = Jvm(fetch.CLIENT_VERSIONS[-1], tmp_path / "doomed", {"rocketmq.client.rebalance.waitInterval": "1000"})
    yield jvm
    if jvm.running:
        jvm.kill()


def test_a_consumer_pops_every_message_once(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("popped"), name("group")
    in_pop_mode(newest, target, topic, group)
    consumer = popping(newest, group, topic)
    bodies = [f"{i}".encode() for i in range(100)]
    newest.producer().send(*(message(topic, body) for body in bodies))
    seen = consumer.wait(lambda seen: {m.body for m in seen} == set(bodies))
    assert all("POP_CK" in m.properties for m in seen)
    wire.wait_committed(target.address, group, topic, 100, 4)
    assert Counter(m.body for m in consumer.seen) == Counter(bodies)


def test_a_consumer_selects_by_tag(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("tagged"), name("group")
    in_pop_mode(newest, target, topic, group, queues=1)
    consumer = popping(newest, group, topic, expression="A || C")
    newest.producer().send(*(message(topic, f"{i}", tags="ABC"[i % 3]) for i in range(30)))
    consumer.wait_bodies([f"{i}".encode() for i in range(30) if i % 3 != 1])
    wire.wait_committed(target.address, group, topic, 30, 1)
    assert {m.tags for m in consumer.seen} == {"A", "C"}


def test_a_failed_message_comes_again_with_its_number_of_failures(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("retried"), name("group")
    in_pop_mode(newest, target, topic, group, queues=1)
    consumer = popping(newest, group, topic, failures=1, pop_pause_s=1)
    newest.producer().send(message(topic, "once more"))
    first, again = consumer.wait(2)[:2]
    assert (first.reconsume_times, first.accepted) == (0, False)
    assert (again.reconsume_times, again.accepted) == (1, True)
    wire.wait_committed(target.address, group, topic, 1, 1)


def test_one_client_sends_every_request_of_pop(newest: Java, target: Target, name: Name) -> None:
    pops = popper(newest, target, name("topic"), name("group"), count=6)
    assert [m.body for m in pops.peek(2)] == [b"0", b"1"]
    assert pops.notify(poll_ms=20_000)
    popped = pops.pop(4, invisible_ms=LONG_MS)
    assert [m.body for m in popped] == [b"0", b"1", b"2", b"3"]
    assert pops.ack(popped[0]) == "OK"
    assert pops.ack(*popped[1:3]) == "OK"
    assert pops.change(popped[3], invisible_ms=1000) == "OK"
    rest = [*pops.pop(2, invisible_ms=LONG_MS), *pops.pop(1, invisible_ms=LONG_MS, poll_ms=20_000)]
    assert [(m.body, m.reconsume_times) for m in rest] == [(b"4", 0), (b"5", 0), (b"3", 1)]
    finish = pops.begin_pop(1, invisible_ms=LONG_MS, poll_ms=20_000)
    eventually(lambda: True if pops.waiting() == 1 else None)
    assert pops.ack(*rest) == "OK"
    newest.producer().send(message(pops.topic, "last"))
    [last] = finish()
    assert (last.body, pops.ack(last)) == (b"last", "OK")
    wire.wait_committed(target.address, pops.group, pops.topic, 7, 1)


def test_pops_in_order_wait_for_earlier_messages(newest: Java, target: Target, name: Name) -> None:
    pops = popper(newest, target, name("topic"), name("group"), count=5)
    first = pops.pop(2, invisible_ms=LONG_MS, order=True)
    assert [m.body for m in first] == [b"0", b"1"]
    assert pops.ack(first[0]) == "OK"
    assert pops.pop(2, invisible_ms=LONG_MS, order=True) == []
    assert pops.change(first[1], invisible_ms=1000) == "OK"
    again = pops.pop(1, invisible_ms=LONG_MS, poll_ms=20_000, order=True)
    assert [m.body for m in again] == [b"1"]
    assert pops.ack(*again) == "OK"
    rest = pops.pop(8, invisible_ms=LONG_MS, order=True)
    assert [m.body for m in rest] == [b"2", b"3", b"4"]
    assert {pops.ack(m) for m in rest} == {"OK"}
    wire.wait_committed(target.address, pops.group, pops.topic, 5, 1)


def popper(java: Java, target: Target, topic: str, group: str, count: int) -> Pops:
    """Send *count* messages to a topic with one queue; return a client that pops it."""
    java.queries().create_topic(topic, target.address, queues=1)
    producer = java.producer()
    producer.send(*(message(topic, f"{i}") for i in range(count)))
    [queue] = producer.queues(topic)
    return java.pops(target.address, queue.broker, group, topic)


def test_a_message_that_always_fails_becomes_a_dead_letter(
    newest: Java, target: Target, target_kind: str, name: Name
) -> None:
    topic, group = name("poisoned"), name("group")
    newest.mqadmin("updateSubGroup", "-b", target.address, "-g", group, "-r", "1")
    in_pop_mode(newest, target, topic, group, queues=1)
    consumer = popping(newest, group, topic, failures=-1, pop_pause_s=1)
    newest.producer().send(message(topic, "poison", tags="T", keys="k", properties={"p": "v"}))
    if target_kind == "rocketmq":  # it delivers the message again and again, and never makes it a dead letter
        consumer.wait(lambda seen: seen[-1].reconsume_times > 1 if seen else False)
        return
    dead = f"%DLQ%{group}"
    eventually(lambda: True if dead in newest.mqadmin("topicList") else None)
    [letter] = newest.lite(name("undertaker"), dead, assign=True).poll_until(1)
    assert (letter.topic, letter.body, letter.tags, letter.keys) == (dead, b"poison", "T", "k")
    assert letter.properties["p"] == "v"
    assert letter.properties["DLQ_ORIGIN_TOPIC"] == topic
    assert [m.reconsume_times for m in consumer.seen] == [0, 1]
    wire.wait_committed(target.address, group, topic, 1, 1)


def test_a_running_group_changes_between_pull_and_pop(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("changed"), name("group")
    newest.queries().create_topic(topic, target.address, queues=2)
    consumer = newest.push(group, topic, client_rebalance=False)
    producer = newest.producer()

    def changed(pop: bool) -> Callable[[], bool | None]:
        return lambda: True if any(q.queue == -1 for q in consumer.queues() if q.topic == topic) == pop else None

    for part, mode in enumerate(("PULL", "POP", "PULL")):
        set_mode(newest, target.address, topic, group, mode)
        eventually(changed(mode == "POP"))
        bodies = [f"{part} {i}".encode() for i in range(20)]
        producer.send(*(message(topic, body) for body in bodies))
        consumer.wait_bodies(bodies)
        wire.wait_committed(target.address, group, topic, 20 * (part + 1), 2)
    assert Counter(m.body for m in consumer.seen) == Counter(f"{n} {i}".encode() for n in range(3) for i in range(20))
    popped = {m.body.split()[0] for m in consumer.seen if "POP_CK" in m.properties}
    assert popped == {b"1"}


def test_members_that_pull_and_pop_miss_nothing_together(
    newest: Java, jvms: Callable[[str], Jvm], target: Target, name: Name
) -> None:
    """Pulls ignore invisible times, so a message may come to both; RocketMQ's older clients know no POP."""
    topic, group = name("both"), name("group")
    in_pop_mode(newest, target, topic, group, queues=2)
    older = Java(jvms(fetch.CLIENT_VERSIONS[0]), target.name_server)
    members = [popping(newest, group, topic), older.push(group, topic)]
    eventually(lambda: True if members[1].queues() else None)
    sent: list[bytes] = []
    producer = newest.producer()

    def both() -> bool | None:
        bodies = [f"{len(sent) + i}".encode() for i in range(10)]
        producer.send(*(message(topic, body) for body in bodies))
        sent.extend(bodies)
        return True if all(member.seen for member in members) else None

    eventually(both)
    eventually(lambda: True if {m.body for c in members for m in c.seen} == set(sent) else None)
    wire.wait_committed(target.address, group, topic, len(sent), 2)
    received = [{m.body for m in member.seen} for member in members]
    assert all(received)
    assert received[0] | received[1] == set(sent)
    older.leave()


def test_what_a_killed_consumer_held_goes_to_the_other(newest: Java, doomed: Jvm, target: Target, name: Name) -> None:
    topic, group = name("shared"), name("group")
    in_pop_mode(newest, target, topic, group, queues=2)
    lost = Java(doomed, target.name_server)
    dying = popping(lost, group, topic, failures=-1, invisible_ms=2 * INVISIBLE_MS)
    bodies = [f"{i}".encode() for i in range(40)]
    newest.producer().send(*(message(topic, body) for body in bodies))
    dying.wait_bodies(bodies)
    doomed.kill()
    heir = popping(newest, group, topic, invisible_ms=INVISIBLE_MS)
    more = [f"more {i}".encode() for i in range(10)]
    newest.producer("later").send(*(message(topic, body) for body in more))
    seen = heir.wait_bodies(bodies + more)
    assert Counter(m.body for m in seen) == Counter(bodies + more)
    assert all((m.reconsume_times > 0) == (m.body in set(bodies)) for m in seen)
    wire.wait_committed(target.address, group, topic, 50, 2)


def test_two_consumers_share_one_queue(newest: Java, target: Target, name: Name) -> None:
    topic, group = name("one"), name("group")
    in_pop_mode(newest, target, topic, group, queues=1)
    members = [popping(newest, group, topic), popping(newest, group, topic)]
    sent: list[bytes] = []
    producer = newest.producer()

    def both() -> bool | None:
        body = f"{len(sent)}".encode()
        producer.send(message(topic, body))
        sent.append(body)
        return True if all(member.seen for member in members) else None

    eventually(both)
    eventually(lambda: True if {m.body for c in members for m in c.seen} == set(sent) else None)
    wire.wait_committed(target.address, group, topic, len(sent), 1)
    assert Counter(m.body for c in members for m in c.seen) == Counter(sent)


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_messages_that_were_popped_and_not_acknowledged_come_from_rocketmq_after_a_move(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, end: str
) -> None:
    ours = martlet()
    clients = Java(jvm, ours.name_server)
    clients.queries().create_topic("Moved", ours.address, queues=1)
    clients.producer().send(*(message("Moved", f"{i}") for i in range(5)))
    where = {"consumerGroup": "movers", "topic": "Moved", "queueId": "0"}
    pop = {"maxMsgNums": "4", "invisibleTime": "600000", "pollTime": "0", "bornTime": "0", "initMode": "0"}
    answer = wire.ask(ours.address, POP_MESSAGE, {**where, **pop})
    assert answer is not None
    assert answer.fields["msgOffsetInfo"] == "0 0 0,1,2,3"
    for offset in (0, 2):
        handle = f"0 {answer.fields['popTime']} 600000 0 0 broker-a 0 {offset}"
        acked = wire.ask(ours.address, ACK_MESSAGE, {**where, "extraInfo": handle, "offset": str(offset)})
        assert acked is not None
        assert (acked.code, acked.remark) == (0, "")
    clients.close()
    wait_offset_saved(data, "Moved@movers", 1)
    if end == "stopped":
        assert ours.stop() == 0
    else:
        ours.kill()
    real_broker()
    clients = Java(jvm, names.address)
    seen = clients.push("movers", "Moved").wait_bodies([b"1", b"2", b"3", b"4"])
    assert b"0" not in {m.body for m in seen}
    clients.close()


def wait_stored(address: str, topic: str, count: int) -> None:
    """Wait until queue 0 of *topic* has *count* messages that can be read."""

    def look() -> bool | None:
        answer = wire.ask(address, MAX_OFFSET, {"topic": topic, "queueId": "0", "committed": "true"})
        return True if answer is not None and int(answer.fields.get("offset", "0")) >= count else None

    eventually(look)


def pop_by_hand(address: str, group: str, topic: str, count: int, invisible_ms: int = LONG_MS) -> wire.Answer:
    """Pop *count* messages of queue 0."""
    where = {"consumerGroup": group, "topic": topic, "queueId": "0"}
    pop = {"maxMsgNums": str(count), "invisibleTime": str(invisible_ms), "pollTime": "0", "bornTime": "0"}

    def look() -> wire.Answer | None:
        answer = wire.ask(address, POP_MESSAGE, {**where, **pop, "initMode": "0"})
        return answer if answer is not None and answer.code == 0 else None

    return eventually(look)


def settle_by_hand(
    address: str, code: int, group: str, topic: str, popped: wire.Answer, offset: int, **more: str
) -> wire.Answer:
    """Acknowledge a message that was popped by hand, or change its invisible time."""
    first = popped.fields["startOffsetInfo"].split(" ")[2]
    times = f"{popped.fields['popTime']} {LONG_MS} {popped.fields['reviveQid']}"
    handle = f"{first} {times} 0 broker-a 0 {offset}"
    where = {"consumerGroup": group, "topic": topic, "queueId": "0", "extraInfo": handle, "offset": str(offset)}
    answer = wire.ask(address, code, {**where, **more})
    assert answer is not None
    return answer


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_what_was_popped_from_rocketmq_and_not_acknowledged_comes_from_martlet(
    real_broker: RealBroker, martlet: OurBroker, names: rocketmq.NameServer, data: Path, jvm: Jvm, end: str
) -> None:
    real = real_broker()
    clients = Java(jvm, names.address)
    clients.queries().create_topic("Moved", real.address, queues=1)
    clients.producer().send(*(message("Moved", f"{i}") for i in range(6)))
    wait_stored(real.address, "Moved", 6)
    popped = pop_by_hand(real.address, "movers", "Moved", 5)
    assert popped.fields["msgOffsetInfo"] == "0 0 0,1,2,3,4"
    for offset in (1, 3):
        assert settle_by_hand(real.address, ACK_MESSAGE, "movers", "Moved", popped, offset).code == 0
    # RocketMQ puts what this group popped into its retry topic.
    assert pop_by_hand(real.address, "retriers", "Moved", 2, 1000).fields["msgOffsetInfo"] == "0 0 0,1"
    wait_stored(real.address, "%RETRY%retriers_Moved", 2)
    clients.close()
    wait_offset_saved(data, "Moved@movers", 5)
    wait_offset_saved(data, "Moved@retriers", 2)
    if end == "stopped":
        real.stop()
    else:
        real.kill()
    ours = martlet()
    assert settle_by_hand(ours.address, ACK_MESSAGE, "movers", "Moved", popped, 2).remark == ""
    assert settle_by_hand(ours.address, CHANGE_INVISIBLE, "movers", "Moved", popped, 4, invisibleTime="1").code == 0
    offsets: set[int] = set()

    def look() -> bool | None:
        rest = pop_by_hand(ours.address, "movers", "Moved", 32)
        offsets.update(int(text) for text in rest.fields["msgOffsetInfo"].split(" ")[2].split(","))
        return True if len(offsets) == 2 else None

    eventually(look)
    assert offsets == {4, 5}
    clients = Java(jvm, names.address)
    pops = clients.pops(ours.address, "broker-a", "retriers", "Moved")
    retried = pops.pop(32, invisible_ms=LONG_MS)
    assert sorted((m.topic, m.body, m.reconsume_times) for m in retried) == [("Moved", b"0", 1), ("Moved", b"1", 1)]
    assert pops.ack(*retried) == "OK"
    wire.wait_committed(ours.address, "retriers", "%RETRY%retriers_Moved", 2, 1)
    assert {m.body for m in pops.pop(32, invisible_ms=LONG_MS)} == {b"2", b"3", b"4", b"5"}
    clients.close()
    assert ours.stop() == 0
