"""Timed sends return a handle with which their topic's publishers, and nobody else, can recall the message."""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from pathlib import Path

import pytest
import trio

from martlet.contracts import Identity, Timers
from martlet.errors import Reason, Refused
from martlet.runtime.clock import SystemClock
from martlet.state.journal import NEXT_COMMIT
from martlet_client import Message, Producer
from martlet_remoting.wire.codes import RequestCode, ResponseCode
from martlet_remoting.wire.recall_handles import RecallHandle, decode_handle, encode_handle

from .conftest import Harness, send_ext
from .test_plugin import broker

SEND, RECALL = RequestCode.SEND_MESSAGE_V2, RequestCode.RECALL_MESSAGE
HANDLE = RecallHandle("T", "martlet", 1_700_000_099_999, "KEY")


def test_a_handle_is_rocketmqs() -> None:
    text = encode_handle(HANDLE)
    assert urlsafe_b64decode(text) == b"v1 T martlet 1700000100000 KEY"
    assert decode_handle(text) == HANDLE
    # RocketMQ ignores what follows.
    assert decode_handle(urlsafe_b64encode(b"v1 T martlet 1700000100000 KEY more").decode()) == HANDLE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "\u20ac",
        "A" * 3000,
        urlsafe_b64encode(b"v2 T martlet 1700000100000 KEY").decode(),
        urlsafe_b64encode(b"v1 T martlet 1700000100000").decode(),
        urlsafe_b64encode(b"v1 T martlet soon KEY").decode(),
        urlsafe_b64encode(b"v1 T martlet -5 KEY").decode(),
        urlsafe_b64encode(b"v1 T martlet 1234567890123456789 KEY").decode(),
        urlsafe_b64encode(b"v1 T martlet 1700000100000 \xff").decode(),
    ],
)
def test_anything_else_is_no_handle(text: str) -> None:
    with pytest.raises(ValueError, match="is invalid; use one from the answer to a send"):
        decode_handle(text)


async def test_a_timed_message_is_recalled_over_the_wire(tmp_path: Path) -> None:
    due_ms = (SystemClock().now_ms() + 3_600_000) // 1000 * 1000 + 500
    async with broker(tmp_path, "timer") as running:
        client = await running.connect()
        sent = await client.ask(SEND, send_ext("T", 3, f"UNIQ_KEY\x01K\x02TIMER_DELIVER_MS\x01{due_ms}\x02"), b"later")
        assert sent.code == 0
        assert sent.integer("queueId") == 3, "the queue that the message is for"
        handle = sent.text("recallHandle")
        assert decode_handle(handle) == RecallHandle("T", "martlet", due_ms - 1, "K")
        plain = await client.ask(SEND, send_ext("T", 3, "UNIQ_KEY\x01K2\x02"), b"now")
        assert plain.text("recallHandle", "none") == "none"
        answer = await client.ask(RECALL, {"topic": "T", "recallHandle": handle, "producerGroup": "P"})
        assert (answer.code, answer.text("msgId")) == (0, "K")
        answer = await client.ask(RECALL, {"topic": "T", "recallHandle": handle})
        assert answer.code == 0
        assert "it was recalled already, or the handle is wrong" in (answer.remark or "")


async def test_the_python_client_recalls(tmp_path: Path) -> None:
    async with (
        broker(tmp_path, "timer", "nameserver") as running,
        Producer(running.addresses["nameserver"], "P") as producer,
    ):
        result = await producer.send(Message("T", b"x", delay_ms=3_600_000))
        assert await producer.recall("T", result.recall_handle) == result.message_id
        assert await producer.recall("T", result.recall_handle) == result.message_id, "as with RocketMQ"
        with pytest.raises(ValueError, match="is invalid"):
            await producer.recall("T", "forged")
        assert (await producer.send(Message("T", b"x"))).recall_handle == ""


class Recalled:
    """A plugin that holds timed messages: remembers what it was asked to recall."""

    def __init__(self, harness: Harness) -> None:
        self.asked: list[tuple[str, int, str, str]] = []
        self.refused: Refused | None = None
        self.end = NEXT_COMMIT
        harness.broker.capabilities = {Timers: Timers(self.recall)}

    async def recall(self, topic: str, out_ms: int, unique: str, group: str) -> int:
        await trio.lowlevel.checkpoint()
        self.asked.append((topic, out_ms, unique, group))
        if self.refused is not None:
            raise self.refused
        return self.end


async def test_a_handle_counts_for_its_topic_and_broker_only(harness: Harness) -> None:
    recalled, client = Recalled(harness), harness.client()
    harness.topic("T")
    harness.topic("other")
    name = harness.broker.config.name
    good = encode_handle(RecallHandle("T", name, 5, "KEY"))
    wrong = [
        ({"topic": "other", "recallHandle": good}, ResponseCode.ILLEGAL_OPERATION, "topic not match"),
        ({"topic": "gone", "recallHandle": good}, ResponseCode.TOPIC_NOT_EXIST, r"topic[gone] not exist"),
        ({"topic": "T", "recallHandle": "x"}, ResponseCode.ILLEGAL_OPERATION, "is invalid"),
        ({"topic": "T", "recallHandle": encode_handle(HANDLE)[:-8]}, ResponseCode.ILLEGAL_OPERATION, "is invalid"),
        (
            {"topic": "T", "recallHandle": encode_handle(RecallHandle("T", "elsewhere", 5, "KEY"))},
            ResponseCode.ILLEGAL_OPERATION,
            "broker not match",
        ),
    ]
    for ext, code, remark in wrong:
        answer = await client.ask(RECALL, ext)
        assert (answer.code, remark in (answer.remark or "")) == (code, True), answer.remark
    assert recalled.asked == []
    assert (await client.ask(RECALL, {"topic": "T", "recallHandle": good, "producerGroup": "P"})).code == 0
    assert recalled.asked == [("T", 5, "KEY", "P")]


async def test_who_may_not_publish_to_a_topic_recalls_nothing_of_it(harness: Harness) -> None:
    recalled, client = Recalled(harness), harness.client()
    harness.topic("T")
    good = encode_handle(RecallHandle("T", harness.broker.config.name, 5, "KEY"))

    def authorize(identity: Identity, action: str, name: str) -> bool | None:
        return action != "publish"

    harness.broker.authorizers = (authorize,)
    answer = await client.ask(RECALL, {"topic": "T", "recallHandle": good})
    assert answer.code == ResponseCode.NO_PERMISSION
    wheel = encode_handle(RecallHandle("rmq_sys_wheel_timer", harness.broker.config.name, 5, "KEY"))
    harness.broker.authorizers = ()
    answer = await client.ask(RECALL, {"topic": "rmq_sys_wheel_timer", "recallHandle": wheel})
    assert answer.code == ResponseCode.NO_PERMISSION
    assert recalled.asked == []


async def test_a_recall_of_an_absent_message_succeeds_and_says_that_nothing_was_recalled(harness: Harness) -> None:
    recalled, client = Recalled(harness), harness.client()
    harness.topic("T")
    recalled.end = 0
    ext = {"topic": "T", "recallHandle": encode_handle(RecallHandle("T", harness.broker.config.name, 5, "KEY"))}
    answer = await client.ask(RECALL, ext)
    assert (answer.code, answer.text("msgId")) == (0, "KEY")
    assert (answer.remark or "").startswith("nothing was recalled; no message 'KEY' is pending for that time")


async def test_reasons_why_nothing_was_recalled_are_told(harness: Harness) -> None:
    recalled, client = Recalled(harness), harness.client()
    harness.topic("T")
    ext = {"topic": "T", "recallHandle": encode_handle(RecallHandle("T", harness.broker.config.name, 5, "KEY"))}
    recalled.refused = Refused(Reason.NOT_FOUND, "it was due")
    answer = await client.ask(RECALL, ext)
    assert (answer.code, answer.remark) == (ResponseCode.ILLEGAL_OPERATION, "recall failed, it was due")
    recalled.refused = Refused(Reason.UNAVAILABLE, "the disk is full")
    answer = await client.ask(RECALL, ext)
    assert (answer.code, answer.remark) == (ResponseCode.SERVICE_NOT_AVAILABLE, "the disk is full")
    nothing: list[dict[type, object]] = [{}, {Timers: Timers()}]
    for capabilities in nothing:
        harness.broker.capabilities = capabilities
        answer = await client.ask(RECALL, ext)
        assert answer.code == ResponseCode.NO_PERMISSION
        assert "add the plugin timer to plugins.enabled" in (answer.remark or "")
