"""END_TRANSACTION, the checks and RESUME_CHECK_HALF_MESSAGE as clients speak them, in a running broker."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import orjson
import pytest
import trio
from tests.remoting.conftest import pull_ext, send_ext
from tests.remoting.test_plugin import PATIENCE_S, PULL, SEND, Caller, Running, broker
from tests.remoting.test_producers import heartbeat

from martlet.message import Record, decode_properties
from martlet.records.codec import decode_records
from martlet_remoting.wire.codec import encode_command
from martlet_remoting.wire.codes import FLAG_ONEWAY, RequestCode, ResponseCode
from martlet_remoting.wire.packets import Command

END, CHECK = RequestCode.END_TRANSACTION, RequestCode.CHECK_TRANSACTION_STATE
RESUME = RequestCode.RESUME_CHECK_HALF_MESSAGE
UNKNOWN, COMMIT, ROLLBACK = 0, 8, 12
PROPERTIES: Final = "TRAN_MSG\x01true\x02PGROUP\x01P\x02UNIQ_KEY\x01U1\x02"
NO_CHECKS: Final = {"check_interval_ms": 86_400_000}
QUICK_CHECKS: Final = {"check_interval_ms": 50, "immunity_ms": 0, "checks_max": 250}


@asynccontextmanager
async def serving(folder: Path, tx: Mapping[str, object] = NO_CHECKS) -> AsyncIterator[Running]:
    async with broker(folder, "tx", sections={"tx": tx}) as running:
        yield running


async def prepare(client: Caller, properties: str = PROPERTIES, queue_id: int = 1, **more: object) -> Command:
    """Send a half message and return its answer."""
    ext = {**send_ext("T", queue_id, properties, f="4"), **more}
    answer = await client.ask(SEND, ext, b"body")
    assert answer.code == 0, answer.remark
    return answer


def end_ext(sent: Command, how: int, **more: object) -> dict[str, object]:
    """The header of END_TRANSACTION as a Java client makes it from the answer to its send."""
    return {
        "producerGroup": "P",
        "tranStateTableOffset": sent.ext["queueOffset"],
        "commitLogOffset": int(str(sent.ext["msgId"])[-16:], 16),
        "commitOrRollback": how,
        "fromTransactionCheck": "false",
        "msgId": "U1",
        "transactionId": "U1",
        **more,
    }


async def pulled(client: Caller, queue_id: int = 1, topic: str = "T") -> list[Record]:
    answer = await client.ask(PULL, pull_ext(topic, 0, queue_id))
    return list(decode_records(answer.body))


async def test_a_committed_message_is_received_and_answers_name_the_queue_that_the_producer_chose(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as running:
        client = await running.connect()
        sent = await prepare(client)
        assert sent.ext["queueId"] == "1"
        assert sent.ext["transactionId"] == "U1"
        assert await pulled(client) == []
        assert (await client.ask(END, end_ext(sent, COMMIT))).code == 0
        (record,) = await pulled(client)
        assert (record.topic, record.queue_id, record.body, record.sys_flag & 0xC) == ("T", 1, b"body", 8)
        properties = decode_properties(record.properties)
        assert (properties["__transactionId__"], properties["TRAN_MSG"]) == ("U1", "true")
        again = await client.ask(END, end_ext(sent, COMMIT))
        assert (again.code, again.remark) == (
            ResponseCode.SYSTEM_ERROR,
            "transaction of half message 0 has ended, or was parked after too many checks; "
            "it can be committed or rolled back only once",
        )
        assert len(await pulled(client)) == 1


async def test_a_message_that_was_rolled_back_is_never_received(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        client = await running.connect()
        sent = await prepare(client)
        assert (await client.ask(END, end_ext(sent, ROLLBACK))).code == 0
        assert (await client.ask(END, end_ext(sent, COMMIT))).code == ResponseCode.SYSTEM_ERROR
        assert await pulled(client) == []


@pytest.mark.parametrize("how", [UNKNOWN, 4, 99])
async def test_an_end_that_knows_no_outcome_is_not_answered_and_leaves_the_transaction_pending(
    tmp_path: Path, how: int
) -> None:
    async with serving(tmp_path) as running:
        client = await running.connect()
        sent = await prepare(client)
        await client.send(END, end_ext(sent, how))
        assert (await client.ask(END, end_ext(sent, COMMIT))).code == 0  # the first answer is that of the second
        assert len(await pulled(client)) == 1


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        ({"producerGroup": "Q"}, 1, "The producer group wrong; the message is of group 'P'"),
        ({"tranStateTableOffset": "7"}, 1, "The transaction state table offset wrong; it is 0, the request has 7"),
        ({"tranStateTableOffset": "-1"}, 1, "The transaction state table offset wrong"),
        ({"commitLogOffset": "1"}, 1, "Find prepared transaction message failed; none is at commit log offset 1"),
        ({"commitLogOffset": str(1 << 62)}, 1, "Find prepared transaction message failed"),
        ({"commitLogOffset": "-5"}, 1, "Find prepared transaction message failed"),
        ({"commitLogOffset": "x"}, 1, "not a 64-bit integer"),
        ({"tranStateTableOffset": None}, 1, "lacks the header field tranStateTableOffset"),
        ({"producerGroup": None}, 1, "lacks the header field producerGroup"),
        ({"commitOrRollback": None}, 1, "lacks the header field commitOrRollback"),
    ],
)
async def test_a_wrong_end_gets_rocketmq_s_code_and_changes_nothing(
    tmp_path: Path, wrong: dict[str, object], code: int, text: str
) -> None:
    async with serving(tmp_path) as running:
        client = await running.connect()
        sent = await prepare(client)
        ext = {name: value for name, value in (end_ext(sent, COMMIT) | wrong).items() if value is not None}
        answer = await client.ask(END, ext)
        assert answer.code == code
        assert text in str(answer.remark)
        assert await pulled(client) == []
        assert (await client.ask(END, end_ext(sent, COMMIT))).code == 0


async def test_the_position_of_another_message_is_no_half_message(tmp_path: Path) -> None:
    async with serving(tmp_path) as running:
        client = await running.connect()
        plain = await client.ask(SEND, send_ext("T", 1, "UNIQ_KEY\x01U0\x02"), b"plain")
        sent = await prepare(client)
        position = int(str(plain.ext["msgId"])[-16:], 16)
        answer = await client.ask(END, end_ext(sent, COMMIT, commitLogOffset=position))
        assert (answer.code, str(answer.remark)[:41]) == (1, "Find prepared transaction message failed;")


async def test_a_late_end_must_wait_for_the_check(tmp_path: Path) -> None:
    async with serving(tmp_path, {**NO_CHECKS, "immunity_ms": 0}) as running:
        client = await running.connect()
        sent = await prepare(client, PROPERTIES + "CHECK_IMMUNITY_TIME_IN_SECONDS\x011\x02")  # born long ago
        answer = await client.ask(END, end_ext(sent, COMMIT))
        assert answer.code == ResponseCode.ILLEGAL_OPERATION
        assert "answer the broker's check instead" in str(answer.remark)
        assert (await client.ask(END, end_ext(sent, COMMIT, fromTransactionCheck="true"))).code == 0
        assert len(await pulled(client)) == 1


async def test_a_producer_is_asked_and_its_answer_ends_the_transaction(tmp_path: Path) -> None:
    async with serving(tmp_path, QUICK_CHECKS) as running:
        client = await running.connect()
        assert (await client.ask(RequestCode.HEART_BEAT, {}, heartbeat("c", "P"))).code == 0
        sent = await prepare(client)
        asked = await until_asked(client)
        assert (asked.code, asked.flag & FLAG_ONEWAY) == (CHECK, FLAG_ONEWAY)
        assert asked.ext["tranStateTableOffset"] == sent.ext["queueOffset"]
        assert asked.ext["commitLogOffset"] == str(int(str(sent.ext["msgId"])[-16:], 16))
        (record,) = decode_records(asked.body)
        assert (record.topic, record.queue_id, record.body) == ("T", 1, b"body")
        ext = end_ext(sent, COMMIT, fromTransactionCheck="true")
        assert (await client.ask(END, ext)).code == 0
        assert [record.body for record in await pulled(client)] == [b"body"]


async def test_another_producer_of_the_group_answers_for_one_that_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path, QUICK_CHECKS) as running:
        first, second = await running.connect(), await running.connect()
        sent = await prepare(first)
        await trio.aclose_forcefully(first.stream)
        assert (await second.ask(RequestCode.HEART_BEAT, {}, heartbeat("d", "P"))).code == 0
        asked = await until_asked(second)
        assert asked.ext["transactionId"] == "U1"
        assert (await second.ask(END, end_ext(sent, ROLLBACK, fromTransactionCheck="true"))).code == 0
        assert await pulled(second) == []


async def test_a_parked_transaction_is_resumed(tmp_path: Path) -> None:
    async with serving(tmp_path, QUICK_CHECKS | {"checks_max": 1}) as running:
        client = await running.connect()
        await prepare(client)
        with trio.fail_after(PATIENCE_S):
            while not (parked := await query(client, "TRANS_CHECK_MAX_TIME_TOPIC", "U1")):
                pass
        assert (await client.ask(RequestCode.HEART_BEAT, {}, heartbeat("c", "P"))).code == 0
        message_id = f"{parked[0].store_host.hex().upper()}{parked[0].position:016X}"
        assert (await client.ask(RESUME, {"topic": "T", "msgId": message_id})).code == 0
        assert (await client.ask(RESUME, {"topic": "T", "msgId": message_id})).code == 1


async def until_asked(client: Caller) -> Command:
    while (command := await client.receive()).code != CHECK:
        pass
    return command


async def query(client: Caller, topic: str, key: str) -> list[Record]:
    ext = {"topic": topic, "key": key, "maxNum": "9", "beginTimestamp": "0", "endTimestamp": str(1 << 62)}
    answer = await client.ask(RequestCode.QUERY_MESSAGE, ext)
    return list(decode_records(answer.body)) if answer.code == 0 else []


@pytest.mark.parametrize(
    ("message_id", "text"),
    [
        ("", "is not an offset message id"),
        ("U1", "is not an offset message id"),
        ("7F00000100002A9F" + "F" * 16, "Find prepared transaction message failed"),
        ("{sent}", "has ended"),
        ("G" * 32, "is not an offset message id"),
    ],
)
async def test_only_a_pending_or_parked_transaction_is_resumed(tmp_path: Path, message_id: str, text: str) -> None:
    async with serving(tmp_path) as running:
        client = await running.connect()
        sent = await prepare(client)
        assert (await client.ask(END, end_ext(sent, ROLLBACK))).code == 0
        sent_id = sent.ext["msgId"]
        answer = await client.ask(RESUME, {"topic": "T", "msgId": message_id.format(sent=sent_id)})
        assert answer.code == 1
        assert text in str(answer.remark)


async def test_without_the_plugin_transactions_are_refused_and_the_remark_names_it(tmp_path: Path) -> None:
    async with broker(tmp_path) as running:
        client = await running.connect()
        refused = await client.ask(SEND, send_ext("T", 1, PROPERTIES), b"body")
        ended = await client.ask(END, {"commitOrRollback": "8"})
        for answer in refused, ended:
            assert answer.code == ResponseCode.NO_PERMISSION
            assert "add the plugin tx to plugins.enabled" in str(answer.remark)


# On a disk that is always too full: all segments but the newest go as soon as they may.
CRAMPED: Final = {
    "flush": "sync",  # or the log would grow ahead of a slow disk, on which each of its segments is synced at the end
    "segment_bytes": 8192,
    "page_bytes": 1024,
    "disk_clean_ratio": 0.0,
    "disk_full_ratio": 1.0,
    "retention_interval_ms": 20,
    "checkpoint_interval_ms": 20,
}


async def first_position(client: Caller) -> int:
    """Return where the log begins."""
    answer = await client.ask(RequestCode.GET_BROKER_RUNTIME_INFO, {})
    return int(orjson.loads(answer.body)["table"]["commitLogMinOffset"])


async def test_a_producer_may_name_a_half_message_that_retention_has_removed(tmp_path: Path) -> None:
    sections = {"tx": NO_CHECKS, "store": CRAMPED}
    async with broker(tmp_path, "tx", sections=sections) as running:
        client = await running.connect()
        sent = {key: await prepare(client, PROPERTIES.replace("U1", key)) for key in ("U1", "U2", "U3")}
        ends = {key: {"msgId": key, "transactionId": key} for key in sent}
        assert (await client.ask(END, end_ext(sent["U3"], ROLLBACK, **ends["U3"]))).code == 0
        with trio.fail_after(PATIENCE_S):
            while await first_position(client) <= int(str(sent["U3"].ext["msgId"])[-16:], 16):
                await client.ask(SEND, send_ext("filler"), b"x" * 3000)
        for wrong in ({"producerGroup": "Q"}, {"msgId": "U1"}, {"msgId": ""}, {"commitLogOffset": "1"}):
            answer = await client.ask(END, {**end_ext(sent["U2"], COMMIT, **ends["U2"]), **wrong})
            assert answer.code == ResponseCode.SYSTEM_ERROR
        assert (await client.ask(END, end_ext(sent["U1"], ROLLBACK))).code == 0  # even of a copy that was just made
        oneway = Command(END, end_ext(sent["U2"], COMMIT, **ends["U2"]), b"", 0, FLAG_ONEWAY)
        await client.stream.send_all(encode_command(oneway))
        with trio.fail_after(PATIENCE_S):
            while not await pulled(client):
                await trio.lowlevel.checkpoint()
        for key in sent:
            assert (await client.ask(END, end_ext(sent[key], COMMIT, **ends[key]))).code == ResponseCode.SYSTEM_ERROR
        (record,) = await pulled(client)
        properties = decode_properties(record.properties)
        assert (properties["UNIQ_KEY"], "TRAN_MOVED_FROM" in properties) == ("U2", False)
