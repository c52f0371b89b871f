"""Dead letters are listed, shown, and sent to their group again, each once."""

import json
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import trio
from tests.client.patient import PATIENCE_S, patient
from tests.giving_up import give_up

from martlet_client import (
    Admin,
    ConsumeFrom,
    Message,
    PopConsumer,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
    TransactionState,
    blocking,
)

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def to(martlet: Run, broker: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NAMESRV_ADDR", broker)
    return martlet


def read(broker: str, topic: str) -> list[ReceivedMessage]:
    async def work() -> list[ReceivedMessage]:
        async with PullConsumer(patient(broker), "TOOLS_CONSUMER") as consumer:
            queues = await consumer.queues(topic)
            return [message for queue in queues async for message in consumer.read(queue)]

    return trio.run(work)


def wait_for(broker: str, topic: str, count: int) -> list[ReceivedMessage]:
    """Return the messages of the only queue of *topic* once there are *count*."""

    async def work() -> list[ReceivedMessage]:
        async with PullConsumer(patient(broker), "TOOLS_CONSUMER") as consumer:
            (queue,) = await consumer.queues(topic)
            found: list[ReceivedMessage] = []
            offset = 0
            while len(found) < count:
                pulled = await consumer.pull(queue, offset, wait_s=20.0)
                found += pulled.messages
                offset = pulled.next_offset
            return found

    return trio.run(work)


def dead_letter(broker: str, group: str, topic: str) -> None:
    """Let *group* give up every message of *topic*."""

    async def work() -> None:
        async with Admin(patient(broker)) as admin:
            for message in messages:
                await give_up(admin, group, topic, message)

    messages = read(broker, topic)
    trio.run(work)


def listed(to: Run, group: str) -> dict[str, Any]:
    rows = json.loads(to("dlq", "list", "--json")[1])
    return next(row for row in rows if row["group"] == group)


def shown(to: Run, *words: str) -> list[dict[str, Any]]:
    code, out, err = to("dlq", "show", *words, "--json")
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_dead_letters_are_listed_shown_and_resent(to: Run, broker: str) -> None:
    to("topic", "create", "Orders", "--queues", "1")
    for number in range(3):
        to("send", "Orders", f"order {number}", "--tag", "books", "--key", f"k{number}", "--property", "colour=red")
    dead_letter(broker, "billing", "Orders")
    sent = read(broker, "Orders")

    row = listed(to, "billing")
    assert (row["messages"], row["not resent"]) == (3, 3)
    letters = shown(to, "billing")
    assert [letter["body"] for letter in letters] == ["order 0", "order 1", "order 2"]
    assert {letter["origin_topic"] for letter in letters} == {"Orders"}
    assert [letter["id"] for letter in letters] == [message.message_id for message in sent]
    assert [letter["offset"] for letter in shown(to, "billing", "--from", "1", "--count", "1")] == [1]
    assert f"0 {sent[0].message_id} Orders [books] order 0\n" in to("dlq", "show", "billing")[1]

    assert to("dlq", "resend", "billing", "--count", "1") == (0, "1 message resent to group billing\n", "")
    assert listed(to, "billing")["not resent"] == 2
    assert to("dlq", "resend", "billing") == (0, "2 messages resent to group billing\n", "")
    assert to("dlq", "resend", "billing") == (0, "0 messages resent to group billing\n", "")
    row = listed(to, "billing")
    assert (row["messages"], row["not resent"]) == (3, 0)

    again = wait_for(broker, "%RETRY%billing", len(sent))
    assert [message.message_id for message in again] == [message.message_id for message in sent]
    for message in again:
        assert (message.topic, message.tags, message.reconsume_times) == ("Orders", "books", 0)
        assert message.properties["colour"] == "red"
        assert "DELAY" not in message.properties
    assert len(read(broker, "Orders")) == 3, "no other group gets them again"


def test_one_dead_letter_is_resent_to_another_topic(to: Run, broker: str) -> None:
    to("topic", "create", "Bills", "--queues", "1")
    for number in range(2):
        to("send", "Bills", f"bill {number}")
    dead_letter(broker, "payers", "Bills")
    words = ("dlq", "resend", "payers", "--from", "1", "--count", "1", "--topic", "Elsewhere", "--json")
    code, out, err = to(*words)
    assert (code, json.loads(out), err) == (0, {"group": "payers", "resent": 1}, "")
    (message,) = read(broker, "Elsewhere")
    assert (message.topic, message.body) == ("Elsewhere", b"bill 1")
    assert "RETRY_TOPIC" not in message.properties
    assert listed(to, "payers")["not resent"] == 2, "where resend goes on did not move"


def test_a_resent_message_is_neither_delayed_nor_half_again(to: Run, broker: str) -> None:
    to("topic", "create", "Payments", "--queues", "1")

    async def send() -> None:
        async with TransactionProducer(
            patient(broker), "payers", lambda message: TransactionState.UNKNOWN, send_timeout_s=PATIENCE_S
        ) as producer:
            await producer.send(Message("Payments", b"paid", delay_ms=1))
            paid = Message("Payments", b"paid")
            await producer.send_in_transaction(paid, lambda message, transaction_id: TransactionState.COMMIT)

    trio.run(send)
    wait_for(broker, "Payments", 2)
    dead_letter(broker, "bookkeeping", "Payments")
    assert to("dlq", "resend", "bookkeeping", "--topic", "Again")[0] == 0
    resent = read(broker, "Again")
    assert [(message.body, message.sys_flag) for message in resent] == [(b"paid", 0)] * 2
    names = {name for message in resent for name in message.properties}
    assert not [name for name in names if name.startswith(("TIMER_", "TRAN_", "REAL_", "__", "PGROUP"))]


def test_a_consumer_of_the_group_gets_what_was_resent(to: Run, broker: str) -> None:
    to("topic", "create", "Jobs", "--queues", "1")
    to("send", "Jobs", "the job")
    dead_letter(broker, "workers", "Jobs")
    assert to("dlq", "resend", "workers")[0] == 0
    to("group", "reset", "workers", "--topic", "Jobs", "--to", "end")
    received: list[ReceivedMessage] = []
    came = Event()

    def listen(message: ReceivedMessage) -> None:
        received.append(message)
        came.set()

    with blocking.PushConsumer(patient(broker), "workers", listen, {"Jobs": "*"}, consume_from=ConsumeFrom.FIRST):
        assert came.wait(PATIENCE_S)
    assert [(message.topic, message.body) for message in received] == [("Jobs", b"the job")]


def test_dead_letters_of_a_group_that_pops_go_to_their_topic(to: Run, broker: str) -> None:
    to("topic", "create", "Popped", "--queues", "1")
    to("group", "create", "poppers", "--retries", "0")
    to("send", "Popped", "poison")

    async def fail() -> None:
        async with PopConsumer(patient(broker), "poppers") as consumer:
            [popped] = await consumer.receive("Popped")
            await consumer.change_invisible(popped, 0)

    trio.run(fail)
    while not any(row["group"] == "poppers" for row in json.loads(to("dlq", "list", "--json")[1])):
        pass  # until the broker has moved it
    assert to("dlq", "resend", "poppers") == (0, "1 message resent to topic Popped, for all its groups\n", "")
    assert [message.body for message in read(broker, "Popped")] == [b"poison", b"poison"]


def test_a_group_that_never_failed_has_none(to: Run) -> None:
    to("group", "create", "spotless")
    assert to("dlq", "show", "spotless") == (0, "", "")
    assert to("dlq", "resend", "spotless") == (0, "0 messages resent to group spotless\n", "")


def test_resending_leaves_no_group_and_no_lag_behind(to: Run, broker: str) -> None:
    to("topic", "create", "Parcels", "--queues", "1")
    to("send", "Parcels", "a parcel")
    dead_letter(broker, "postmen", "Parcels")
    before = to("group", "list", "--json")
    assert to("dlq", "resend", "postmen")[0] == 0
    assert to("group", "list", "--json") == before
