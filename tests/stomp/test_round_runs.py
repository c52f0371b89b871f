"""SEND frames of all clients that were read in one round are stored by one call, and get their own receipts."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.wire_clients.reads import Read, Reads
from tests.wire_clients.stomp import StompBroker, frame, stomp_broker, stomp_port

from martlet.errors import Reason, Refused, StoreFailed
from martlet.store.append.items import AppendItem, AppendResult
from martlet.store.append.writer import Writer
from martlet.testing.disk import FakeDisk
from martlet_stomp.wire.errors import StompError

Q = "/queue/q"


@asynccontextmanager
async def broker() -> AsyncIterator[tuple[StompBroker, Reads]]:
    async with stomp_broker(Path("/data"), disk=FakeDisk()) as stomp:
        yield stomp, Reads(stomp.broker)


async def clients(stomp: StompBroker, reads: Reads, count: int) -> list[Read]:
    found = [reads.connect(stomp.protocol) for _ in range(count)]
    for client in found:
        await client.receive(frame("CONNECT", accept_version="1.2", host="h"))
        assert client.sent().startswith(b"CONNECTED")
    return found


def send(number: int, destination: str = Q, **more: str) -> bytes:
    return frame("SEND", b"%d" % number, destination=destination, receipt=f"r{number}", **more)


def receipts(data: bytes) -> list[str]:
    """Return the receipts in *data*, which has nothing else."""
    found = data.decode().split("\0")[:-1]
    assert all(each.strip().startswith("RECEIPT\n") for each in found), data
    return [each.split("receipt-id:")[1].split("\n")[0] for each in found]


async def test_many_clients_are_stored_by_one_call_and_get_their_own_receipts(appended: list[int]) -> None:
    async with broker() as (stomp, reads):
        senders = await clients(stomp, reads, 5)
        with reads.round():  # the first message creates the queue
            await senders[0].receive(send(0))
        assert receipts(senders[0].sent()) == ["r0"]
        appended.clear()
        with reads.round():
            for at, sender in enumerate(senders, 1):
                await sender.receive(send(10 * at) + send(10 * at + 1, f"/queue/{at % 2}") + send(10 * at + 2))
            assert not appended
        assert appended[0] == 15  # then a note on the new queues
        for at, sender in enumerate(senders, 1):
            assert receipts(sender.sent()) == [f"r{10 * at + i}" for i in range(3)]
        held = [sender.peer.held for sender in senders]
        assert held == sorted(set(held))
        assert held[-1] <= stomp.broker.store.written


@pytest.mark.parametrize(
    "other",
    [
        frame("SUBSCRIBE", id="0", destination="/queue/other", receipt="x"),
        frame("BEGIN", transaction="t", receipt="x"),
        frame("DISCONNECT", receipt="x"),
    ],
    ids=lambda each: each.split(b"\n")[0].decode(),
)
async def test_another_frame_comes_after_all_messages_before_it(other: bytes, appended: list[int]) -> None:
    async with broker() as (stomp, reads):
        one, two = await clients(stomp, reads, 2)
        with reads.round():
            await one.receive(send(1))
            await two.receive(send(2))
            await two.receive(other)
            assert appended[0] == 2
        assert receipts(one.sent()) == ["r1"]
        assert receipts(two.sent()) == ["r2", "x"]


async def test_acks_of_others_do_not_store_what_waits_but_come_after_messages_of_their_client(
    appended: list[int],
) -> None:
    async with broker() as (stomp, reads):
        one, two = await clients(stomp, reads, 2)
        with reads.round():
            await two.receive(frame("SUBSCRIBE", id="0", destination=Q, ack="client-individual") + send(1))
        two.sent()
        await stomp.broker.store.flusher.wait_flushed(stomp.broker.store.written)
        two.handler.collect(1 << 20)
        delivered = two.sent().decode()
        ack_id = delivered.split("\nack:")[1].split("\n")[0]
        appended.clear()
        with reads.round():
            await one.receive(send(2))
            await two.receive(frame("ACK", id=ack_id, receipt="a"))
            assert not appended
        assert receipts(two.sent()) == ["a"]
        one.sent()
        with reads.round():
            with pytest.raises(StompError, match="does not hold"):
                await one.receive(send(3) + frame("ACK", id=ack_id))
            assert receipts(one.sent()) == ["r3"]


async def test_a_refused_message_ends_its_connection_after_the_receipts_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Writer.append_all

    def refuse_third(self: Writer, items: Sequence[AppendItem], *, atomic: bool = False) -> AppendResult:
        if len(items) < 3:
            return real(self, items, atomic=atomic)
        result = real(self, [*items[:2], *items[3:]], atomic=atomic)
        result.add_refused({2: Refused(Reason.BUSY, "not now")})
        return result

    async with broker() as (stomp, reads):
        one, two, three = await clients(stomp, reads, 3)
        with reads.round(), monkeypatch.context() as patched:
            patched.setattr(Writer, "append_all", refuse_third)
            await one.receive(send(1))
            await two.receive(send(2) + send(3))
            await three.receive(send(4))
            await two.receive(send(5))
            assert two.peer.reason == "not now"
            reads.finish()
        assert receipts(one.sent()) == ["r1"]
        assert receipts(three.sent()) == ["r4"]
        receipt, _, error = two.sent().partition(b"ERROR")
        assert receipts(receipt) == ["r2"]
        assert b"receipt-id:r3" in error
        assert b"not now" in error
        assert b"RECEIPT" not in error
        assert (stomp.context.counters.stored, stomp.context.counters.errors) == (3, 1)


async def test_a_failing_disk_ends_the_connections_whose_messages_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **more: object) -> AppendResult:
        raise StoreFailed("the disk is gone")

    async with broker() as (stomp, reads):
        one, two, other = await clients(stomp, reads, 3)
        with monkeypatch.context() as patched:
            patched.setattr(Writer, "append_all", fail)
            await one.receive(send(1))
            await two.receive(send(2))
            reads.finish()
        assert [each.peer.reason for each in (one, two, other)] == ["the disk is gone"] * 2 + [None]
        assert one.sent() == two.sent() == b""


async def test_error_comes_after_the_receipts_of_earlier_frames_of_its_read(tmp_path: Path) -> None:
    async with stomp_port(tmp_path) as port:
        wire = await port.wire()
        await wire.send(frame("CONNECT", accept_version="1.2", host="h"))
        received = b""
        while b"\0" not in received:
            received += await wire.receive_some()
        await wire.send(send(1) + b"NONSENSE\n\n\0")
        received = b""
        while data := await wire.receive_some():
            received += data
        receipt, _, error = received.partition(b"ERROR")
        assert receipts(receipt) == ["r1"]
        assert b"NONSENSE" in error
