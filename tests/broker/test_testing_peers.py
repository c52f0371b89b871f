"""The helpers for plugin authors: that a wire in memory is like a socket, and that a check can fail."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import trio
from tests.broker.toys import World
from trio.testing import wait_all_tasks_blocked

from martlet.contracts import Connection
from martlet.errors import Reason, Refused
from martlet.message import Message
from martlet.testing.disk import FakeDisk
from martlet.testing.peers import MemoryPeer, MemoryWire, RecordingPeer, check_connection, memory_transport, serving
from martlet.testing.stores import small_config


class Words:
    """Yields words, each ended by a space."""

    def __init__(self) -> None:
        self._rest = b""

    @property
    def buffered_bytes(self) -> int:
        return len(self._rest)

    def receive_data(self, data: bytes, now: float) -> None:
        self._rest += data

    def events(self) -> Iterable[bytes]:
        *words, self._rest = self._rest.split(b" ")
        return words

    def farewell(self, error: Exception) -> bytes:
        return b""

    def deadline(self) -> float:
        return 0

    def handle_timeout(self, now: float) -> None:
        pass


class Forgetful(Words):
    """Forgets an incomplete word."""

    def events(self) -> Iterable[bytes]:
        words = list(super().events())
        self._rest = b""
        return words


class Hasty(Words):
    """Takes the end of a read for the end of a word."""

    def events(self) -> Iterable[bytes]:
        words = [word for word in self._rest.split(b" ") if word]
        self._rest = b""
        return words


def test_a_connection_that_is_right_passes() -> None:
    check_connection(Words, b"one two three four ", [b"one", b"two", b"three", b"four"])


@pytest.mark.parametrize("kind", [Forgetful, Hasty])
def test_a_connection_that_depends_on_the_cutting_does_not(kind: type[Connection]) -> None:
    with pytest.raises(AssertionError, match="cut at"):
        check_connection(kind, b"one two ", [b"one", b"two"])


def test_a_connection_that_says_something_else_does_not_pass() -> None:
    with pytest.raises(AssertionError, match="cut at"):
        check_connection(Words, b"one two ", [b"one"])


def test_events_may_be_taken_apart_before_they_are_compared() -> None:
    check_connection(Words, b"a-b c ", [b"a", b"b", b"c"], flatten=lambda word: word.split(b"-"))


async def pair(capacity: int = 10) -> tuple[MemoryPeer, MemoryWire]:
    await trio.lowlevel.checkpoint()
    return memory_transport(capacity)


async def test_a_wire_in_memory_takes_no_more_than_fits() -> None:
    peer, wire = await pair()
    assert wire.send([b"12345", b"67890", b"more"]) == 10
    assert wire.send([b"more"]) == 0
    assert peer.waiting() == 10
    assert await peer.receive_exactly(4) == b"1234"
    assert wire.send([b"more"]) == 4
    assert await peer.receive_exactly(10) == b"567890more"


async def test_a_sender_waits_for_room_and_a_reader_for_data() -> None:
    peer, wire = await pair()
    got = bytearray()

    async def read() -> None:
        while len(got) < 35:
            await wire.wait_readable()
            got.extend(wire.receive(7) or b"")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert wire.receive(7) is None
        await peer.send(bytes(range(35)))
    assert got == bytes(range(35))


async def test_a_closed_end_is_noticed_at_the_other() -> None:
    peer, wire = await pair()
    await peer.send(b"last")
    peer.close()
    assert wire.receive(100) == b"last"
    assert wire.receive(100) == b""
    with pytest.raises(BrokenPipeError):
        wire.send([b"x"])
    peer, wire = await pair()
    wire.close()
    with pytest.raises(trio.ClosedResourceError):
        await wire.wait_readable()
    with pytest.raises(trio.BrokenResourceError):
        await peer.send(b"x")
    with pytest.raises(EOFError, match="the server closed in b''"):
        await peer.receive_line()
    with pytest.raises(EOFError, match="after 0 of 5 bytes"):
        await peer.receive_exactly(5)


async def test_lines_and_bytes_can_be_mixed() -> None:
    peer, wire = await pair(100)
    wire.send([b"one\ntwo", b"three\nrest"])
    assert await peer.receive_line() == b"one"
    assert await peer.receive_exactly(0) == b""
    assert await peer.receive_exactly(3) == b"two"
    assert await peer.receive_line() == b"three"
    assert await peer.receive_some() == b"rest"


async def test_a_broker_without_ports_serves_and_comes_back_after_a_restart() -> None:
    disk, world = FakeDisk(), World()
    async with serving(Path("/data"), disk=disk, store=small_config()) as running:
        peer = running.connect(world.protocol())
        await peer.send(b"echo hello\n")
        assert await peer.receive_line() == b"hello"
        running.broker.topics.ensure("t", 1)
        running.broker.publish(Message("t", b"kept"))
        running.broker.groups.offsets.commit("G", "t", 0, 1)
    async with serving(Path("/data"), disk=disk, store=small_config()) as running:
        assert running.broker.topics.get("t") is not None
        assert running.broker.groups.offsets.get("G", "t", 0) == 1
        assert running.broker.store.queue("t", 0).next_offset == 1


async def test_a_recording_peer_keeps_what_was_sent_to_it() -> None:
    peer, ran = RecordingPeer(), []

    async def work(what: str) -> None:
        await trio.lowlevel.checkpoint()
        ran.append(what)

    peer.send(b"a", memoryview(b"b"))
    peer.hold_until(7)
    peer.hold_until(3)
    peer.wake()
    peer.start(work, "done")
    await peer.run_started()
    peer.close(str(Refused(Reason.BUSY, "enough")))
    assert (peer.take_sent(), peer.take_sent(), peer.held, peer.wakes, ran, peer.reason) == (
        b"ab",
        b"",
        7,
        1,
        ["done"],
        "enough",
    )
