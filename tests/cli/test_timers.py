"""``martlet timer`` counts, lists and recalls messages that are pending."""

import json
import time
from collections.abc import Callable

import pytest
import trio
from tests.client.patient import PATIENCE_S, patient
from tests.interop.stomp_wire import Wire

from martlet_client import Message, Producer, SendResult

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def to(martlet: Run, broker: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("NAMESRV_ADDR", broker)
    return martlet


def test_pending_messages_are_counted_listed_and_recalled(to: Run, broker: str) -> None:
    now_ms = int(time.time() * 1000)

    async def work() -> list[SendResult]:
        async with Producer(patient(broker), "P", send_timeout_s=PATIENCE_S) as producer:
            delays_ms = (7_200_000, 1_800_000, 172_800_000)
            return [
                await producer.send(Message("Later", b"xyz", deliver_at_ms=now_ms // 1000 * 1000 + delay_ms))
                for delay_ms in delays_ms
            ]

    two_hours, half_an_hour, two_days = trio.run(work)
    (counted,) = json.loads(to("timer", "count", "--json")[1])
    assert counted == {"broker": "martlet", "pending": 3, "within 1 minute": 0, "1 hour": 1, "1 day": 2}
    listed = json.loads(to("timer", "list", "--json")[1])
    assert [each["msgId"] for each in listed] == [sent.message_id for sent in (half_an_hour, two_hours, two_days)]
    first = listed[0]
    assert (first["due"], first["topic"], first["bodyBytes"]) == (now_ms // 1000 * 1000 + 1_800_000, "Later", 3)
    assert (first["queueId"], first["broker"]) == (half_an_hour.queue.queue_id, "martlet")
    assert first["recallHandle"] == half_an_hour.recall_handle
    code, out, _ = to("timer", "list", "--count", "1")
    assert code == 0
    assert half_an_hour.message_id in out
    assert two_hours.message_id not in out
    code, out, _ = to("timer", "recall", half_an_hour.recall_handle)
    assert (code, out) == (0, f"message {half_an_hour.message_id} of topic Later is recalled\n")
    code, _, err = to("timer", "recall", half_an_hour.recall_handle)
    assert code == 1
    assert "it was recalled already" in err
    assert json.loads(to("timer", "recall", two_days.recall_handle, "--json")[1])["recalled"] == two_days.message_id
    assert [each["msgId"] for each in json.loads(to("timer", "list", "--json")[1])] == [two_hours.message_id]
    code, _, err = to("timer", "recall", "forged")
    assert code == 1
    assert "recall handle 'forged' is invalid" in err
    code, out, _ = to("stats", "timers.", "--json")
    assert json.loads(out)["martlet"]["timers.recalled"] == 2


def test_a_repeated_message_says_so_and_is_recalled_for_good(to: Run, addresses: dict[str, str]) -> None:
    wire = Wire(int(addresses["stomp"].rpartition(":")[2]))
    try:
        wire.connect()
        wire.publish("/queue/again", "x", AMQ_SCHEDULED_PERIOD="3600000", AMQ_SCHEDULED_REPEAT="-1")
        wire.publish("/queue/again", "y", AMQ_SCHEDULED_CRON="0 0 1 1 *")
        wire.leave()
    finally:
        wire.close()
    listed = [each for each in json.loads(to("timer", "list", "--json")[1]) if each["topic"] == "again"]
    assert {each["repeats"] for each in listed} == {"every 3600000 ms, for ever", "cron 0 0 1 1 *"}
    assert "every 3600000 ms, for ever" in to("timer", "list")[1]
    for each in listed:
        assert to("timer", "recall", each["recallHandle"])[0] == 0
    assert [each for each in json.loads(to("timer", "list", "--json")[1]) if each["topic"] == "again"] == []
    assert json.loads(to("stats", "timers.", "--json")[1])["martlet"]["timers.repeated"] == 0
