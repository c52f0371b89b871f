"""Transactions: what is sent and acknowledged in one is stored together, or not at all."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from tests.wire_clients.stomp import StompBroker, StompClient, stomp_broker
from trio.testing import wait_all_tasks_blocked

from martlet.store import StoreConfig
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import MemoryPeer
from martlet.testing.stores import small_config
from martlet_stomp.config import StompConfig
from martlet_stomp.wire.packets import Version

QUEUE = "/queue/orders"
BODIES = [b"%d" % number for number in range(6)]
TX = {"transaction": "t"}

every_version = pytest.mark.parametrize("version", Version)


async def say(talk: StompClient, command: str, name: str = "t") -> None:
    """Send BEGIN, COMMIT or ABORT, and wait until it is done."""
    await talk.send(talk.frame(command, transaction=name, receipt=f"{command} {name}"))
    await talk.receipt(f"{command} {name}")


async def send(talk: StompClient, body: bytes, name: str = "t", destination: str = QUEUE) -> None:
    await talk.send(talk.frame("SEND", body, destination=destination, transaction=name))


def stored(stomp: StompBroker, topic: str = "orders") -> list[bytes]:
    return [record.body for record in stomp.records(topic)]


@every_version
async def test_what_is_sent_in_a_transaction_is_stored_by_commit(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE)
        await say(talk, "BEGIN")
        await send(talk, b"1")
        await send(talk, b"2", destination="/queue/others")
        await talk.publish(QUEUE, b"outside")
        assert [message.body for message in await talk.rest()] == [b"outside"]
        await send(talk, b"3")
        await say(talk, "COMMIT")
        assert await talk.bodies(2) == [b"1", b"3"]
        assert stored(stomp, "others") == [b"2"]


@every_version
async def test_what_is_sent_in_an_aborted_transaction_is_forgotten(tmp_path: Path, version: Version) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await say(talk, "BEGIN")
        await send(talk, b"1")
        await say(talk, "ABORT")
        await say(talk, "BEGIN")
        await send(talk, b"2")
        await say(talk, "COMMIT")
        assert stored(stomp) == [b"2"]


@pytest.mark.parametrize("end", ["hang up", "DISCONNECT"])
async def test_a_transaction_that_does_not_end_is_aborted(tmp_path: Path, end: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.publish(QUEUE, b"0")
        await talk.subscribe(QUEUE, "client-individual")
        (message,) = await talk.messages(1)
        await say(talk, "BEGIN")
        await send(talk, b"1")
        await talk.send(talk.settling("ACK", message, **TX))
        assert await talk.rest() == []
        assert stomp.context.transactions.size > 0
        if end == "hang up":
            talk.hang_up()
        else:
            await talk.disconnect()
        other = await stomp.connect()
        await other.subscribe(QUEUE)
        assert await other.bodies(1) == [b"0"]
        assert await other.rest() == []
        assert stomp.context.transactions.size == 0


async def test_receipts_in_a_transaction_come_when_the_frames_are_taken(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        for end in ("COMMIT", "ABORT"):
            for number, each in enumerate(
                (
                    partial(talk.frame, "BEGIN", transaction="t"),
                    partial(talk.frame, "SEND", b"x", destination=QUEUE, transaction="t"),
                    partial(talk.frame, "SEND", b"x", destination=QUEUE),
                    partial(talk.frame, "SEND", b"x", destination=QUEUE, transaction="t"),
                    partial(talk.frame, end, transaction="t"),
                )
            ):
                await talk.send(each(receipt=str(number)))
                await talk.receipt(str(number))
        assert len(stored(stomp)) == 4


@pytest.mark.parametrize("ack", ["client", "client-individual"])
@every_version
async def test_receipts_of_acknowledgements_in_a_transaction_come_when_they_are_taken(
    tmp_path: Path, version: Version, ack: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE, ack)
        await talk.publish(QUEUE, b"1", b"2")
        messages = await talk.messages(2)
        await say(talk, "BEGIN")
        await talk.send(talk.settling("ACK", messages[0], receipt="ack", **TX))
        await talk.receipt("ack")
        if version is not Version.V1_0:
            await talk.send(talk.settling("NACK", messages[1], receipt="nack", **TX))
            await talk.receipt("nack")
        await say(talk, "ABORT")
        assert (stomp.context.counters.acknowledged, stomp.context.counters.failed) == (0, 0)


async def test_a_receipt_in_a_transaction_comes_before_an_error_in_the_same_packet(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        good = talk.frame("SEND", b"x", destination=QUEUE, transaction="t", receipt="good")
        bad = talk.frame("SEND", b"x", destination="/queue/%RETRY%g", transaction="t", receipt="bad")
        await talk.send(talk.frame("BEGIN", **TX), good, bad)
        await talk.receipt("good")
        assert (await talk.error())["receipt-id"] == "bad"


@pytest.mark.parametrize(("sent", "settled"), [(2, 0), (0, 2), (1, 1)])
async def test_no_receipt_of_a_commit_comes_before_it_is_durable(
    monkeypatch: pytest.MonkeyPatch, sent: int, settled: int
) -> None:
    disk, may_sync = FakeDisk(), trio.Event()
    finish = disk.off_loop

    async def hold(work: Callable[[], Any]) -> Any:
        await may_sync.wait()
        return await finish(work)

    async with stomp_broker(Path("/data"), disk=disk, store=small_config(flush="sync")) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, *BODIES[:2])
        messages = await talk.messages(2)
        frames = [partial(talk.frame, "SEND", destination="/queue/results")] * sent
        frames += [partial(talk.settling, "ACK", message) for message in messages[:settled]]
        frames.append(partial(talk.frame, "COMMIT"))
        data = [frame(**TX, receipt=number) for number, frame in zip("012", frames, strict=True)]
        await stomp.idle()
        with monkeypatch.context() as patched:
            patched.setattr(disk, "off_loop", hold)
            await talk.send(talk.frame("BEGIN", **TX), *data[:2])
            for receipt in "01":
                await talk.receipt(receipt)
            await talk.send(data[2])
            await wait_all_tasks_blocked()
            wire = talk.wire
            assert isinstance(wire, MemoryPeer)
            waiting = wire.waiting()
            may_sync.set()
            assert waiting == 0, "a receipt came before fdatasync"
            await talk.receipt("2")
        assert len(stored(stomp, "results")) == sent


@pytest.mark.parametrize("ack", ["client", "client-individual"])
@every_version
async def test_acknowledgements_count_at_commit(tmp_path: Path, version: Version, ack: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect(version)
        await talk.subscribe(QUEUE, ack, prefetch_count="6")
        await talk.publish(QUEUE, *BODIES, b"more")
        messages = await talk.messages(6)
        await say(talk, "BEGIN")
        await talk.send(talk.settling("ACK", messages[1], **TX), talk.settling("ACK", messages[3], **TX))
        await send(talk, b"result", destination="/queue/results")
        assert await talk.rest() == []
        await say(talk, "COMMIT")
        assert await talk.bodies(1) == [b"more"]
        assert stored(stomp, "results") == [b"result"]
        await talk.disconnect()
        other = await stomp.connect(version)
        await other.subscribe(QUEUE)
        left = [b"4", b"5", b"more"] if ack == "client" else [b"0", b"2", b"4", b"5", b"more"]
        assert await other.bodies(len(left)) == left
        assert await other.rest() == []


@pytest.mark.parametrize("ack", ["client", "client-individual"])
async def test_after_an_abort_the_client_holds_its_messages_as_before(tmp_path: Path, ack: str) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, ack)
        await talk.publish(QUEUE, *BODIES)
        messages = await talk.messages(6)
        await say(talk, "BEGIN")
        await talk.send(talk.settling("ACK", messages[1], **TX), talk.settling("NACK", messages[3], **TX))
        await say(talk, "ABORT")
        assert await talk.rest() == []
        await talk.ack(messages[2])
        await talk.disconnect()
        other = await stomp.connect()
        await other.subscribe(QUEUE)
        left = [b"3", b"4", b"5"] if ack == "client" else [b"0", b"1", b"3", b"4", b"5"]
        assert await other.bodies(len(left)) == left


@pytest.mark.parametrize("aborted", ["ab", "ba"])
async def test_cumulative_acknowledgements_keep_their_order_whichever_transaction_is_aborted_first(
    tmp_path: Path, aborted: str
) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client")
        await talk.publish(QUEUE, *BODIES)
        messages = await talk.messages(6)
        for name, message in zip("ab", (messages[1], messages[3]), strict=True):
            await say(talk, "BEGIN", name)
            await talk.send(talk.settling("ACK", message, transaction=name))
        for name in aborted:
            await say(talk, "ABORT", name)
        await talk.ack(messages[1])
        await talk.disconnect()
        other = await stomp.connect()
        await other.subscribe(QUEUE)
        assert [message.body for message in await other.rest()] == BODIES[2:]


async def test_nack_in_a_transaction_counts_at_commit(tmp_path: Path, autojump_clock: object) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, *BODIES[:2])
        messages = await talk.messages(2)
        await say(talk, "BEGIN")
        await talk.send(talk.settling("NACK", messages[0], **TX))
        await talk.send(talk.settling("NACK", messages[1], requeue="false", **TX))
        assert await talk.rest() == []
        await say(talk, "COMMIT")
        (again,) = await talk.messages(1)
        assert (again.body, again["delivery-count"]) == (b"0", "2")
        await stomp.settle()
        assert stored(stomp, "stomp_dead_letters") == [b"1"]


async def test_acknowledgements_of_a_topic_give_credit_at_commit(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, StompConfig(prefetch=2)) as stomp:
        talk = await stomp.connect()
        await talk.subscribe("/topic/news", "client")
        await talk.publish("/topic/news", *BODIES[:4])
        messages = await talk.messages(2)
        await say(talk, "BEGIN")
        await talk.send(talk.settling("ACK", messages[1], **TX))
        assert await talk.rest() == []
        await say(talk, "COMMIT")
        assert await talk.bodies(2) == BODIES[2:4]


async def test_several_transactions_are_apart(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        for name in ("a", "b", "c"):
            await say(talk, "BEGIN", name)
        for name in ("a", "b", "c", "a"):
            await send(talk, name.encode(), name)
        await say(talk, "COMMIT", "b")
        await say(talk, "ABORT", "c")
        await say(talk, "COMMIT", "a")
        assert stored(stomp) == [b"b", b"a", b"a"]


async def test_an_unknown_or_repeated_transaction_is_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        frames = [
            [talk.frame("COMMIT", transaction="t", receipt="r")],
            [talk.frame("ABORT", transaction="t", receipt="r")],
            [talk.frame("SEND", destination=QUEUE, transaction="t", receipt="r")],
            [talk.frame("ACK", id="1-0-0", transaction="t", receipt="r")],
            [talk.frame("NACK", id="1-0-0", transaction="t", receipt="r")],
            [talk.frame("BEGIN", transaction="t"), talk.frame("BEGIN", transaction="t", receipt="r")],
            [
                talk.frame("BEGIN", transaction="t"),
                talk.frame("COMMIT", transaction="t"),
                talk.frame("COMMIT", transaction="t", receipt="r"),
            ],
            [talk.frame("BEGIN", transaction="t"), talk.frame("ACK", id="1-0-0", transaction="t", receipt="r")],
            [
                talk.frame("BEGIN", transaction="t"),
                talk.frame("SEND", destination="/queue/%RETRY%g", transaction="t", receipt="r"),
            ],
        ]
        for each in frames:
            talk = await stomp.connect()
            await talk.send(*each)
            assert (await talk.error())["receipt-id"] == "r", each


async def test_a_message_that_was_settled_meanwhile_makes_commit_an_error_and_nothing_is_stored(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        for how in ("ACK", "UNSUBSCRIBE", "twice"):
            talk = await stomp.connect()
            await talk.subscribe(QUEUE, "client-individual")
            await talk.publish(QUEUE, *BODIES[:2])
            messages = await talk.messages(2)
            await say(talk, "BEGIN")
            await send(talk, b"result", destination="/queue/results")
            await talk.send(*[talk.settling("ACK", message, **TX) for message in messages])
            if how == "ACK":
                await talk.ack(messages[1])
            elif how == "UNSUBSCRIBE":
                await talk.unsubscribe()
            else:
                await talk.send(talk.settling("ACK", messages[0], **TX))
            await talk.send(talk.frame("COMMIT", transaction="t", receipt="r"))
            assert (await talk.error())["receipt-id"] == "r"
            assert stored(stomp, "results") == []
            other = await stomp.connect()
            await other.subscribe(QUEUE)
            assert (await other.bodies(1))[0] == b"0"
            await other.rest()
            other.hang_up()


async def test_a_refused_message_whose_subscription_has_ended_makes_commit_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, b"0")
        (message,) = await talk.messages(1)
        await say(talk, "BEGIN")
        await send(talk, b"result", destination="/queue/results")
        await talk.send(talk.settling("NACK", message, requeue="false", **TX))
        await talk.unsubscribe()
        await talk.send(talk.frame("COMMIT", transaction="t", receipt="r"))
        assert (await talk.error())["receipt-id"] == "r"
        assert stored(stomp, "results") == []


async def test_transactions_are_limited_in_number_and_size(tmp_path: Path) -> None:
    config = StompConfig(transactions_max=2, transaction_frames_max=3, transaction_bytes_max=10_000)
    async with stomp_broker(tmp_path, config) as stomp:
        talk = await stomp.connect()
        begin = [talk.frame("BEGIN", transaction=name) for name in "abc"]
        small = talk.frame("SEND", b"x", destination=QUEUE, transaction="a", receipt="r")
        large = talk.frame("SEND", b"x" * 6000, destination=QUEUE, transaction="a")
        other = talk.frame("SEND", b"x" * 6000, destination=QUEUE, transaction="b")
        for frames, limit in (
            (begin, "stomp.transactions_max"),
            ([begin[0], *[small] * 4], "stomp.transaction_frames_max"),
            ([*begin[:2], large, other], "stomp.transaction_bytes_max"),
        ):
            talk = await stomp.connect()
            await talk.send(*frames)
            while (answer := await talk.receive()).command == "RECEIPT":
                pass
            assert limit in answer.body.decode()
            assert await talk.is_closed()
        assert stomp.context.transactions.size == 0
        assert stored(stomp) == []


async def test_all_transactions_together_are_limited(tmp_path: Path) -> None:
    config = StompConfig(transactions_bytes_max=100_000)
    async with stomp_broker(tmp_path, config) as stomp:
        talks = [await stomp.connect() for _ in range(3)]
        for talk in talks:
            await say(talk, "BEGIN")
        await send(talks[0], b"x" * 60_000)
        assert await talks[0].rest() == []
        await send(talks[1], b"x" * 60_000)
        assert "stomp.transactions_bytes_max" in (await talks[1].error()).body.decode()
        await say(talks[0], "COMMIT")
        await send(talks[2], b"x" * 60_000)
        await say(talks[2], "COMMIT")
        assert len(stored(stomp)) == 2


async def test_a_transaction_that_the_store_cannot_take_is_an_error(tmp_path: Path) -> None:
    async with stomp_broker(tmp_path, store=StoreConfig(flush="async", group_messages_max=3)) as stomp:
        talk = await stomp.connect()
        await talk.subscribe(QUEUE, "client-individual")
        await talk.publish(QUEUE, b"0")
        (message,) = await talk.messages(1)
        await say(talk, "BEGIN")
        for _ in range(3):
            await send(talk, b"x", destination="/queue/results")
        await talk.send(talk.settling("ACK", message, **TX), talk.frame("COMMIT", transaction="t", receipt="r"))
        error = await talk.error()
        assert error["receipt-id"] == "r"
        assert "store.group_messages_max" in error.body.decode()
        assert stored(stomp, "results") == []
        other = await stomp.connect()
        await other.subscribe(QUEUE)
        assert await other.bodies(1) == [b"0"]


async def test_the_transactions_of_a_user_are_limited_together(tmp_path: Path) -> None:
    config = StompConfig(transactions_user_bytes_max=100_000)
    async with stomp_broker(tmp_path, config) as stomp:
        talks = [await stomp.connect_as("ann"), await stomp.connect_as("ann"), await stomp.connect_as("bob")]
        for talk in talks:
            await say(talk, "BEGIN")
        large = b"x" * 60_000
        for talk in (talks[0], talks[2]):
            await talk.send(talk.frame("SEND", large, destination=QUEUE, receipt="r", **TX))
            await talk.receipt("r")
        await talks[1].send(talks[1].frame("SEND", large, destination=QUEUE, receipt="r", **TX))
        assert "stomp.transactions_user_bytes_max" in (await talks[1].error()).body.decode()
        await say(talks[0], "COMMIT")
        talk = await stomp.connect_as("ann")
        await say(talk, "BEGIN")
        await talk.send(talk.frame("SEND", large, destination=QUEUE, receipt="r", **TX))
        await talk.receipt("r")


async def test_a_transaction_that_takes_too_long_ends_with_its_connection(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with stomp_broker(tmp_path, StompConfig(transaction_s=60)) as stomp:
        talk = await stomp.connect()
        await talk.publish(QUEUE, b"0")
        await talk.subscribe(QUEUE, "client-individual")
        (message,) = await talk.messages(1)
        await say(talk, "BEGIN", "ended")
        await say(talk, "COMMIT", "ended")
        await trio.sleep(30)
        await say(talk, "BEGIN")
        await send(talk, b"1")
        await talk.send(talk.settling("ACK", message, **TX))
        other = await stomp.connect()
        await trio.sleep(59)
        assert await talk.rest() == []
        assert "stomp.transaction_s" in (await talk.error()).body.decode()
        await stomp.idle()
        assert stomp.context.transactions.size == len(stomp.context.transactions) == 0
        assert "transaction 't' has not ended within 60 s" in caplog.text
        await other.subscribe(QUEUE)
        assert await other.bodies(1) == [b"0"]
        assert await other.rest() == []
