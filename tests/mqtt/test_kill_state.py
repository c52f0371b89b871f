"""Retained messages, shared subscriptions and delayed messages over kill -9; clients obey the specification."""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import trio
from tests.broker_process import BrokerProcess
from tests.kills import ROUNDS
from tests.mqtt.devices import EXPIRY, NAMES, Receiver, Sender
from tests.mqtt.test_mqtt_crash import connected, talking
from tests.wire_clients.mqtt import mqtt_process

from martlet_mqtt.wire.packets import Connack, Connect, Publish
from martlet_mqtt.wire.properties import Properties

FLUSHES = ("sync", "async")


@contextmanager
def broker(folder: Path, flush: str, hours: int = 0) -> Iterator[tuple[str, BrokerProcess]]:
    """Run a broker whose clock is *hours* ahead; its address, and its process."""
    with mqtt_process(folder, flush, hours) as process:
        yield process.addresses["mqtt"], process


def reached(count: Callable[[], int], goal: int) -> bool:
    return count() >= goal


async def until(done: Callable[[], bool]) -> None:
    while not done():  # noqa: ASYNC110 - what it waits for comes from a socket
        await trio.sleep(0.001)


async def run_until(
    done: Callable[[], bool], devices: Sequence[Sender | Receiver], address: str, victim: BrokerProcess
) -> None:
    """Let *devices* talk until *done*, then kill the broker. Receivers subscribe before others publish."""
    async with trio.open_nursery() as nursery:
        for device in devices:
            nursery.start_soon(connected, device, address, device.chance)
            if isinstance(device, Receiver):
                await device.subscribed.wait()
        await until(done)
        victim.kill()
        nursery.cancel_scope.cancel()


async def finish(sender: Sender, address: str) -> None:
    async with talking(address) as talk:
        await sender.connect(talk)
        await sender.finish(talk)


# retained messages


@dataclass
class Retainer(Sender):
    """Publishes retained messages, every fifth of which removes that of its name.

    A name has one QoS: a message of QoS 1 that is sent again is published again, after what was published meanwhile,
    but one of QoS 2 is not.
    """

    sent: dict[str, list[int]] = field(default_factory=dict)  # the numbers of each name
    removals: set[int] = field(default_factory=set)
    newest: dict[str, int] = field(default_factory=dict)  # of each name, the newest number that the broker has

    def message(self, topic: str, qos: int, packet_id: int) -> Publish:
        self.sent.setdefault(topic, []).append(self.number)
        if self.number % 5:
            payload = b"%d" % self.number
        else:
            payload = b""
            self.removals.add(self.number)
        properties = Properties({}, (("number", str(self.number)),))
        return Publish(topic, payload, 1 + NAMES.index(topic) % 2, True, packet_id=packet_id, properties=properties)

    def keep(self, packet: Publish) -> None:
        number = int(dict(packet.properties.user)["number"])
        self.newest[packet.topic] = max(number, self.newest.get(packet.topic, 0))
        self.stored[b"%d" % number] = packet.qos


async def retained(address: str) -> dict[str, int]:
    """Return the numbers of the retained messages by their names."""
    async with talking(address) as talk:
        await talk.send(Connect("looks"))
        assert (await talk.expect(Connack)).reason == 0
        await talk.publish("$CONTROL/martlet/v1/retained")
        (listed,) = await talk.messages(1)
        names = {row["name"] for row in json.loads(listed.payload)["rows"]}
        await talk.subscribe("a/+", "b/#")
        found = await talk.messages(len(names))
        assert await talk.rest() == []
    assert all(packet.retain for packet in found)
    assert {packet.topic for packet in found} == names
    return {packet.topic: int(packet.payload) for packet in found}


def check_retained(sender: Retainer, found: dict[str, int]) -> None:
    """Assert that each name has what its newest message made of it, or a later one whose answer is missing."""
    for name in NAMES:
        numbers = [0, *sender.sent.get(name, ())]
        possible = numbers[numbers.index(sender.newest.get(name, 0)) :]
        if name in found:
            assert found[name] in possible, name
        else:
            assert any(number in sender.removals or not number for number in possible), name


@pytest.mark.parametrize("flush", FLUSHES)
def test_retained_messages_survive_kill_9(tmp_path: Path, flush: str) -> None:
    sender = Retainer(random.Random(flush))
    for _ in range(ROUNDS):
        with broker(tmp_path, flush) as (address, victim):
            check_retained(sender, trio.run(retained, address))
            goal = len(sender.stored) + sender.chance.randrange(20, 150)
            trio.run(run_until, partial(reached, sender.stored.__len__, goal), [sender], address, victim)
    with broker(tmp_path, flush) as (address, _):
        check_retained(sender, trio.run(retained, address))
        trio.run(finish, sender, address)
        last = {name: numbers[-1] for name, numbers in sender.sent.items()}
        expected = {name: number for name, number in last.items() if number not in sender.removals}
        assert trio.run(retained, address) == expected


# shared subscriptions


def check_shared(sender: Sender, members: list[Receiver]) -> None:
    """Assert that nothing is lost, and that nothing of QoS 2 came twice, to the same or to different members."""
    came = Counter[bytes]()
    for member in members:
        came.update(member.received)
    assert sender.stored.keys() - came.keys() == set()
    assert [payload for payload, qos in sender.stored.items() if qos == 2 and came[payload] > 1] == []


@pytest.mark.parametrize("flush", FLUSHES)
def test_a_shared_subscription_survives_kill_9(tmp_path: Path, flush: str) -> None:
    chance = random.Random(flush)
    sender = Sender(chance)
    members = [Receiver(chance, name, ("$share/g/a/+", "$share/g/b/#")) for name in ("first", "second")]

    def received() -> int:
        return len(members[0].received.keys() | members[1].received.keys())

    for _ in range(ROUNDS):
        with broker(tmp_path, flush) as (address, victim):
            goal = received() + chance.randrange(30, 200)
            sender.limit = sender.number + 300  # so that what waits does not grow
            devices: list[Sender | Receiver] = [*members, sender]
            trio.run(run_until, partial(reached, received, goal), devices, address, victim)
    with broker(tmp_path, flush) as (address, victim):
        trio.run(finish, sender, address)

        def all_came() -> bool:
            return sender.stored.keys() <= members[0].received.keys() | members[1].received.keys()

        trio.run(run_until, all_came, members, address, victim)
    check_shared(sender, members)
    assert all(member.received for member in members)
    assert len(sender.stored) > 30 * ROUNDS


async def hold_one(address: str) -> None:
    """Subscribe, and get a message that is not acknowledged."""
    async with talking(address) as talk:
        await talk.send(Connect("member", clean_start=False, properties=EXPIRY))
        assert (await talk.expect(Connack)).reason == 0
        await talk.subscribe("$share/g/a/1", qos=1)
        await talk.publish("a/1", b"held", 1)
        (message,) = await talk.messages(1)
        assert (message.payload, message.is_duplicate) == (b"held", False)


async def get_again(address: str) -> set[tuple[bytes, bool]]:
    """Return what comes to the same session, and whether it has DUP, after a further message."""
    async with talking(address) as talk:
        await talk.send(Connect("member", clean_start=False, properties=EXPIRY))
        answer = await talk.expect(Connack)
        assert (answer.reason, answer.session_present) == (0, True)
        await talk.publish("a/1", b"new", 1)
        return {(each.payload, each.is_duplicate) for each in await talk.messages(2)}


@pytest.mark.parametrize("flush", FLUSHES)
def test_what_a_shared_subscription_brings_again_after_kill_9_has_dup(tmp_path: Path, flush: str) -> None:
    with broker(tmp_path, flush) as (address, victim):
        trio.run(hold_one, address)
        victim.kill()
    with broker(tmp_path, flush) as (address, _):
        assert trio.run(get_again, address) == {(b"held", True), (b"new", False)}


# delayed messages


class Delayer(Sender):
    """Publishes messages that are to be delivered in half an hour."""

    def message(self, topic: str, qos: int, packet_id: int) -> Publish:
        forms = {"TIMER_DELAY_SEC": 1800, "TIMER_DELAY_MS": 1_800_000}
        name = self.chance.choice(list(forms))
        properties = Properties({}, ((name, str(forms[name])), ("number", str(self.number))))
        return Publish(topic, b"%d" % self.number, qos, packet_id=packet_id, properties=properties)


@pytest.mark.parametrize("flush", FLUSHES)
def test_delayed_messages_survive_kill_9_and_come_when_they_are_due(tmp_path: Path, flush: str) -> None:
    chance = random.Random(flush)
    sender, receiver = Delayer(chance), Receiver(chance)
    for hours in range(ROUNDS):  # in each round the messages of the round before are due
        with broker(tmp_path, flush, hours) as (address, victim):
            before, due = sender.number, len(sender.stored)
            goal = due + chance.randrange(30, 150)
            sender.limit = before + 200  # so that what waits does not grow

            def done(goal: int = goal, due: int = due) -> bool:
                return len(sender.stored) >= goal and len(receiver.received) >= due

            devices: list[Sender | Receiver] = [receiver, sender]
            trio.run(run_until, done, devices, address, victim)
        assert all(int(payload) <= before for payload in receiver.received), "none comes before it is due"
    with broker(tmp_path, flush, ROUNDS) as (address, victim):
        trio.run(finish, sender, address)
        victim.kill()
    with broker(tmp_path, flush, ROUNDS + 1) as (address, victim):

        def all_came() -> bool:
            return sender.stored.keys() <= receiver.received.keys()

        trio.run(run_until, all_came, [receiver], address, victim)
    twice = [payload for payload, qos in sender.stored.items() if qos == 2 and receiver.received[payload] > 1]
    assert twice == []
