"""A disk without space while a client publishes: what was acknowledged is kept, and QoS 2 brings nothing twice.

Each test sends reads of messages, in which the disk becomes full at one of four places. Then there is space again, or
the broker is killed and starts on a disk with space; the client obeys the specification and sends the rest again.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio
from tests.mqtt.devices import Receiver
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.store.disk.files import FILE_MODE
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.wire.codes import V4, V5, PacketType, ReasonCode
from martlet_mqtt.wire.packets import (
    Ack,
    Connack,
    Connect,
    Disconnect,
    FilterSubscription,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Subscribe,
)
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

DATA = Path("/data")
FULL = OSError(ENOSPC, "No space left on device")
# The QoS of the messages of one read, and of messages before it that wait for PUBREL, which the read begins with.
READS = {
    "0": ((), (0,) * 8),
    "1": ((), (1,) * 8),
    "2": ((), (2,) * 8),
    "mixed": ((), (2, 2, 1, 1, 0, 2, 1, 2, 0, 1)),
    "PUBREL first": ((2, 2), (2, 2, 1, 1, 0, 2, 1, 2, 0, 1)),
}
GONE = (EOFError, trio.BrokenResourceError)
SPACE = ("again", "after kill -9")


class FullDisk:
    """A disk that becomes full at one place, until `free`."""

    def __init__(self, where: str) -> None:
        self.disk = FakeDisk()
        self._where = where
        self._is_full = False
        self._write, self._open = self.disk.write, self.disk.open
        patched: Any = self.disk
        patched.write, patched.open = self._try_write, self._try_open

    def fill(self, mqtt: MqttBroker) -> None:
        store = mqtt.broker.store
        if self._where == "journal":  # there is space for the messages, but not for the notes of sessions after them
            store.committer.before_commit.insert(0, lambda: store.admission.refuse_full(FULL))
        self._is_full = True

    def free(self) -> None:
        self._is_full = False

    def _check(self, path: str, *places: str) -> None:
        if self._is_full and any(f"/{place}/" in path for place in places):
            raise FULL

    def _try_write(self, fd: int, data: Any, position: int) -> None:
        path = self.disk.open_files[fd][0]
        self._check(path, *{"log": ("commitlog",), "index": ("consumequeue", "index")}.get(self._where, ()))
        if "space.probe" in path and self._is_full:
            raise FULL
        self._write(fd, data, position)

    def _try_open(self, path: str, *, create: bool = False, read_only: bool = False, mode: int = FILE_MODE) -> int:
        if create and self._where == "segment":
            self._check(path, "commitlog")
        return self._open(path, create=create, read_only=read_only, mode=mode)


class Publisher:
    """A client that sends what was not completed again, and counts what the broker acknowledged."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.talk: MqttClient | None = None
        self.stored: dict[bytes, int] = {}
        self.open: dict[int, Publish] = {}  # without an answer
        self.released: dict[int, None] = {}  # with PUBREC, without PUBCOMP
        self.refused: list[Publish] = []
        self._numbers: Iterator[int] = iter(range(1, 1000))

    def made(self, *levels: int) -> list[Publish]:
        """Return messages with these QoS."""
        found: list[Publish] = []
        for qos in levels:
            number = next(self._numbers)
            name = f"a/{number % 3}" if qos else "zero"
            found.append(Publish(name, b"%d %d" % (qos, number) + bytes(300), qos, packet_id=number if qos else 0))
        return found

    async def connect(self, mqtt: MqttBroker) -> None:
        expiry = Properties({Property.SESSION_EXPIRY: 100_000}) if self.version == V5 else NO_PROPERTIES
        self.talk = mqtt.open(self.version)
        await self.talk.send(Connect("publisher", self.version, False, properties=expiry))
        answer = await self.talk.expect(Connack)
        assert not answer.reason
        assert answer.session_present or not (self.open or self.released)
        again = [Publish(e.topic, e.payload, e.qos, False, True, e.packet_id) for e in self.open.values()]
        await self.talk.send(*again, *(Ack(PacketType.PUBREL, each) for each in self.released))

    async def publish(self, messages: list[Publish], *before: Packet, release: bool = True) -> None:
        """Send one read, and take what comes until PINGREQ at its end is answered, or the connection ends."""
        assert self.talk is not None
        self.open |= {each.packet_id: each for each in messages if each.qos}
        try:
            await self.talk.send(*before, *messages, Pingreq())
            await self.take(release=release)
        except GONE:
            self.talk = None

    async def take(self, *, release: bool = True) -> None:
        talk = self.talk
        assert talk is not None
        while True:
            packet = await talk.receive()
            if isinstance(packet, Pingresp):
                return
            if isinstance(packet, Disconnect):
                assert packet.reason == ReasonCode.QUOTA_EXCEEDED
            elif isinstance(packet, Ack):
                await self._answered(talk, packet, release=release)

    async def _answered(self, talk: MqttClient, packet: Ack, *, release: bool) -> None:
        packet_id = packet.packet_id
        if packet.kind is PacketType.PUBCOMP:
            assert packet.reason in (ReasonCode.SUCCESS, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)
            self.released.pop(packet_id, None)
            return
        message = self.open.pop(packet_id, None)
        if message is None:
            assert packet_id in self.released  # PUBREC of a PUBLISH that was sent again
            return
        if packet.reason:
            assert (self.version, packet.reason) == (V5, ReasonCode.QUOTA_EXCEEDED)
            self.refused.append(message)
            return
        self.stored[message.payload] = message.qos
        if message.qos == 2:
            self.released[packet_id] = None
            if release:
                await talk.send(Ack(PacketType.PUBREL, packet_id))

    async def finish(self, mqtt: MqttBroker) -> None:
        """Complete everything; a message that was refused is a new one."""
        while self.open or self.released or self.refused:
            if self.talk is None:
                await self.connect(mqtt)
            again, self.refused = self.refused, []
            fresh = {next(self._numbers): each for each in again}
            messages = [Publish(e.topic, e.payload, e.qos, packet_id=packet_id) for packet_id, e in fresh.items()]
            await self.publish(messages, *(Ack(PacketType.PUBREL, each) for each in self.released))


@asynccontextmanager
async def broker(disk: FakeDisk) -> AsyncIterator[MqttBroker]:
    store = small_config(flush="sync", segment_bytes=1 << 14, page_bytes=1 << 12, cache_bytes=1 << 14)
    async with mqtt_broker(DATA, store=store, disk=disk, clock=TrioClock()) as mqtt:
        yield mqtt


async def receive_until(receiver: Receiver, mqtt: MqttBroker, is_enough: Callable[[], bool]) -> None:
    """Take messages over as many connections as it takes."""
    while not is_enough():
        talk = mqtt.open()
        await receiver.connect(talk)
        while not is_enough():
            try:
                await receiver.take(talk)
            except GONE:
                break
        talk.hang_up()


async def refuse(mqtt: MqttBroker) -> None:
    while not mqtt.broker.store.admission.refusal:  # noqa: ASYNC110
        await trio.sleep(1)


async def serve_again(mqtt: MqttBroker) -> None:
    while mqtt.broker.store.admission.refusal:  # noqa: ASYNC110
        await trio.sleep(1)


@pytest.mark.parametrize("space", SPACE)
@pytest.mark.parametrize("where", ["log", "segment", "journal", "index"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("version", [V4, V5])
async def test_what_is_acknowledged_while_the_disk_becomes_full_is_kept(
    autojump_clock: MockClock, version: int, read: str, where: str, space: str
) -> None:
    full, publisher, receiver = FullDisk(where), Publisher(version), Receiver(Random(1))
    first, levels = READS[read]
    async with broker(full.disk) as mqtt:
        await receive_until(receiver, mqtt, lambda: receiver.subscribed.is_set())
        witness = await mqtt.connect("witness")
        await witness.subscribe("#", qos=0)
        await publisher.connect(mqtt)
        await publisher.publish(publisher.made(*first), release=False)
        full.fill(mqtt)
        releases = [Ack(PacketType.PUBREL, each) for each in publisher.released]
        for _ in range(5):  # more than a segment holds
            if publisher.talk is not None:
                await publisher.publish(publisher.made(*levels), *releases, release=False)
                releases = []
        assert where == "index" or mqtt.broker.store.admission.refusal
        seen = {each.payload for each in await witness.rest()}
        if space == "again":
            full.free()
            await serve_again(mqtt)
            await finish(mqtt, publisher, receiver)
            assert [each.payload for each in await witness.rest()][-1] == b"last"
        after = full.disk.after_power_cut(Cut.KILLED, Random(1))
    if space != "again":
        async with broker(after) as mqtt:
            publisher.talk = None
            await finish(mqtt, publisher, receiver)
    assert {payload for payload in seen if not payload.startswith(b"0")} <= receiver.received.keys()


async def finish(mqtt: MqttBroker, publisher: Publisher, receiver: Receiver) -> None:
    """Complete all, and see that the receiver has it."""
    await publisher.finish(mqtt)
    other = await mqtt.connect("other")
    assert await other.publish("a/last", b"last", 1) == ReasonCode.SUCCESS
    await receive_until(receiver, mqtt, lambda: b"last" in receiver.received)
    assert publisher.stored.keys() <= receiver.received.keys()
    assert receiver.received.keys() <= {*publisher.stored, b"last"}
    twice = [payload for payload, qos in publisher.stored.items() if qos == 2 and receiver.received[payload] > 1]
    assert twice == []


async def test_a_release_after_a_failed_commit_is_not_answered(autojump_clock: MockClock) -> None:
    """Else the client would use the identifier again, and the broker take the new message for the old one."""
    full = FullDisk("log")
    async with broker(full.disk) as mqtt:
        watcher = await mqtt.connect("w")
        await watcher.subscribe("b", qos=0)
        talk = await mqtt.connect("c", V4, clean=False)
        await talk.subscribe("a", qos=1)
        assert await (await mqtt.connect("p")).publish("a", b"1", 1) == ReasonCode.SUCCESS
        (packet,) = await talk.messages(1)
        await talk.send(Publish("b", b"old", 2, packet_id=1))
        await talk.expect(Ack)
        full.fill(mqtt)
        await talk.send(Ack(PacketType.PUBACK, packet.packet_id))
        await refuse(mqtt)
        with suppress(*GONE):
            await talk.send(Ack(PacketType.PUBREL, 1))
        assert await talk.closed() is None
        full.free()
        await serve_again(mqtt)
        talk = await mqtt.connect("c", V4, clean=False)
        await talk.send(Ack(PacketType.PUBREL, 1))
        done = await talk.expect(Ack)
        assert (done.kind, done.packet_id) == (PacketType.PUBCOMP, 1)
        await talk.publish("b", b"new", 2, packet_id=1)
        assert await watcher.payloads(2) == [b"old", b"new"]


async def test_a_subscribe_that_loses_its_session_leaves_no_member_behind(autojump_clock: MockClock) -> None:
    full = FullDisk("log")
    async with broker(full.disk) as mqtt:
        talk = await mqtt.connect("c", expiry_s=1000)
        await talk.subscribe("a", qos=1)
        assert await (await mqtt.connect("p")).publish("a", b"1", 1) == ReasonCode.SUCCESS
        (packet,) = await talk.messages(1)
        full.fill(mqtt)
        await talk.send(Ack(PacketType.PUBACK, packet.packet_id))
        await refuse(mqtt)
        full.free()
        await serve_again(mqtt)
        with suppress(*GONE):
            filters = tuple(FilterSubscription(f"$share/g{number}/x", 1) for number in range(3))
            await talk.send(Subscribe(9, filters))
        last = await talk.closed()
        assert isinstance(last, Disconnect), last
        assert last.reason == ReasonCode.QUOTA_EXCEEDED
        await trio.sleep(10)
        assert mqtt.broker.shared_groups.statistics()["members"] == 0


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("space", SPACE)
async def test_a_message_of_a_group_that_could_not_be_handed_over_comes_again(
    autojump_clock: MockClock, qos: int, space: str
) -> None:
    """The commit with the message works, and the one that says who has it does not."""
    full = FullDisk("log")
    async with broker(full.disk) as mqtt:
        member, publisher = await mqtt.connect("m", expiry_s=1000), await mqtt.connect("p")
        await member.subscribe("$share/g/a", qos=qos)
        await member.rest()
        commit, commits = mqtt.broker.store.committer.commit, list[int]()

        def filled() -> None:
            commits.append(len(mqtt.broker.store.committer.pending))
            if len(commits) == 2:
                full.fill(mqtt)
            commit()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(mqtt.broker.store.committer), "commit", lambda committer: filled())
            await publisher.send(Publish("a", b"one", 2, packet_id=1))
            with suppress(*GONE):
                await trio.sleep(1)
        assert mqtt.broker.store.admission.refusal
        full.free()
        if space == "again":
            await serve_again(mqtt)
            with suppress(*GONE):
                member.hang_up()
            await trio.sleep(70)
            await check_handed_over(mqtt, qos)
        after = full.disk.after_power_cut(Cut.KILLED, Random(1))
    if space != "again":
        async with broker(after) as mqtt:
            await check_handed_over(mqtt, qos)


async def check_handed_over(mqtt: MqttBroker, qos: int) -> None:
    """See that the member gets the message once."""
    member = await mqtt.connect("m", clean=False, expiry_s=1000, present=True)
    await trio.sleep(1)
    (one,) = await member.messages(1)
    assert (one.payload, one.qos) == (b"one", qos)
    await member.acknowledge(one)
    await trio.sleep(100)
    assert await member.rest() == []
