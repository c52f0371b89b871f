"""What clients do at random, with commits that fail and brokers that are killed: each will comes as often as it must.

The model knows which connections were accepted, how and when each ended, and when its client came back.
"""

from dataclasses import dataclass, field
from errno import ENOSPC
from pathlib import Path
from random import Random

import pytest
import trio
from tests.stored import records_of
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.store import StoreConfig
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect, Packet, Will
from martlet_mqtt.wire.properties import Properties, Property

EXPIRIES_S = (0, 200, 5000)
DELAYS_S = (0, 100, 1000)
PAUSES_S = (0.0, 0.5, 30.0, 150.0, 400.0)
# Retries and the sweep may take as long.
LATE_S = 130.0
DATA = Path("/data")
QUIET = MqttConfig(sys_interval_s=86_400)
NEVER = float("inf")


@dataclass
class Life:
    """One connection that was accepted."""

    client_id: str
    payload: bytes
    delay_s: int
    expiry_s: int
    talk: MqttClient
    ended_at: float = NEVER
    # When its will is due: at the earliest and, after failures, at the latest.
    due_first: float = NEVER
    due_last: float = NEVER
    # How often its will must come, at least and at most.
    least: int = 0
    most: int = 1
    is_vague: bool = False  # it is not known whether the last change of its expiry was stored

    def allows(self, count: int) -> bool:
        """Return whether its will may have come *count* times."""
        return self.least <= count <= self.most or (self.is_vague and count <= 1)

    def begin_delay(self) -> None:
        self.due_first = self.due_last = trio.current_time() + min(self.delay_s, self.expiry_s)

    def delay_again(self) -> None:
        self.due_last = trio.current_time() + min(self.delay_s, self.expiry_s)


@dataclass
class World:
    """The broker, its clients, and what the wills of these must be."""

    random: Random
    flush: str
    disk: FakeDisk = field(default_factory=FakeDisk)
    clock: TrioClock = field(default_factory=TrioClock)
    connected: dict[str, Life] = field(default_factory=dict)
    waiting: dict[str, Life] = field(default_factory=dict)  # of wills that are delayed
    lives: list[Life] = field(default_factory=list)
    failed_at: float = -NEVER

    def store_config(self) -> StoreConfig:
        return small_config(flush=self.flush, segment_bytes=1 << 18, page_bytes=1 << 14, cache_bytes=1 << 18)

    # what the model knows

    def ends(self, life: Life, *, is_wanted: bool = True) -> None:
        """Note that *life* ended just now."""
        self.connected.pop(life.client_id, None)
        life.ended_at = trio.current_time()
        if not is_wanted:
            life.most = 0
        elif not min(life.delay_s, life.expiry_s):
            life.least = 1
        else:
            life.begin_delay()
            self.waiting[life.client_id] = life

    def returns(self, client_id: str, *, clean: bool) -> None:
        """Note that a client was accepted again."""
        life, now = self.waiting.pop(client_id, None), trio.current_time()
        if life is None:
            return
        if clean or life.due_last + LATE_S <= now:
            life.least = 1
        elif life.due_first > now:
            life.most = 0

    def is_lost(self, client_id: str) -> None:
        """Note that the commit of a client's CONNECT failed; a delay begins again."""
        if client_id in self.waiting:
            self.waiting[client_id].delay_again()

    def is_killed(self) -> None:
        """Note that the broker was killed; a will that DISCONNECT removed comes if that could not be stored."""
        for life in list(self.connected.values()):
            self.ends(life)
        for life in self.waiting.values():
            life.delay_again()
        for life in self.lives:
            if self.failed_at <= life.ended_at + 1 and trio.current_time() <= life.ended_at + LATE_S:
                life.most = max(life.most, 1 - life.least)

    def is_over(self) -> None:
        for life in self.waiting.values():
            life.least = 1


async def closed(talk: MqttClient) -> Packet | None:
    try:
        return await talk.closed()
    except trio.BrokenResourceError:
        return None


async def connect(world: World, mqtt: MqttBroker) -> None:
    """Connect a client, perhaps in place of itself."""
    random, client_id = world.random, world.random.choice(("c", "d"))
    clean, expiry_s, delay_s = random.random() < 0.3, random.choice(EXPIRIES_S), random.choice(DELAYS_S)
    payload = b"%d" % len(world.lives)
    will = Will("will", payload, 1, properties=Properties({Property.WILL_DELAY: delay_s}))
    properties = Properties({Property.SESSION_EXPIRY: expiry_s})
    before, talk = world.connected.get(client_id), mqtt.open(V5)
    await talk.send(Connect(client_id, V5, clean, 0, will=will, properties=properties))
    answer = await talk.receive()
    assert isinstance(answer, Connack)
    if before is not None:
        last = await closed(before.talk)
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.SESSION_TAKEN_OVER
        world.ends(before)
    if answer.reason:
        assert answer.reason == ReasonCode.QUOTA_EXCEEDED
        assert await closed(talk) is None
        world.is_lost(client_id)
        return
    world.returns(client_id, clean=clean)
    life = world.connected[client_id] = Life(client_id, payload, delay_s, expiry_s, talk)
    world.lives.append(life)


async def leave(world: World, mqtt: MqttBroker) -> None:
    """Let a connected client go, in one of several ways."""
    if not world.connected:
        return
    life = world.random.choice(list(world.connected.values()))
    way = world.random.choice(("hang up", "bye", "with will", "kick", "change"))
    if way == "hang up":
        life.talk.hang_up()
    elif way == "kick":
        mqtt.context.clients[life.client_id].kick()
    elif way == "bye":
        await life.talk.send(Disconnect())
    elif way == "with will" or not life.expiry_s:
        await life.talk.send(Disconnect(ReasonCode.DISCONNECT_WITH_WILL))
    else:
        if world.failed_at == trio.current_time():
            life.is_vague = True
        life.expiry_s = world.random.choice(EXPIRIES_S)
        found = Properties({Property.SESSION_EXPIRY: life.expiry_s})
        await life.talk.send(Disconnect(ReasonCode.DISCONNECT_WITH_WILL, found))
    if way != "hang up":
        await closed(life.talk)
    while life.client_id in mqtt.context.clients:
        await trio.lowlevel.checkpoint()
    world.ends(life, is_wanted=way != "bye")


def published(mqtt: MqttBroker) -> list[bytes]:
    """All wills in the log."""
    return [record.body for record in records_of(mqtt.broker.store, "mqtt")]


async def play(world: World, steps: int, *, kills: bool) -> list[Life]:
    """Take random steps; return the lives whose wills came too often or not often enough."""
    while True:
        async with mqtt_broker(DATA, QUIET, store=world.store_config(), disk=world.disk, clock=world.clock) as mqtt:
            while steps > 0:
                steps -= 1
                await step(world, mqtt)
                if kills and world.random.random() < 0.1:
                    world.disk = world.disk.after_power_cut(Cut.KILLED, world.random)
                    break
                await wait_for_space(mqtt)
            else:
                return await find_wrong(world, mqtt)
        world.is_killed()


async def step(world: World, mqtt: MqttBroker) -> None:
    random = world.random
    if random.random() < 0.3:
        world.failed_at = trio.current_time()
        mqtt.broker.store.committer.before_commit.append(lambda: world.disk.fail_next("write", ENOSPC))
    await (connect if random.random() < 0.5 else leave)(world, mqtt)
    await trio.sleep(random.choice(PAUSES_S))


async def wait_for_space(mqtt: MqttBroker) -> None:
    while mqtt.broker.store.admission.refusal:  # noqa: ASYNC110
        await trio.sleep(1)


async def find_wrong(world: World, mqtt: MqttBroker) -> list[Life]:
    """Let all sessions end, of which nothing is left; return the lives whose wills in the log contradict the model."""
    for life in list(world.connected.values()):
        life.talk.hang_up()
        world.ends(life)
    await trio.sleep(EXPIRIES_S[-1] + 1000)
    world.is_over()
    assert len(mqtt.broker.sessions) == 0
    assert mqtt.broker.sessions.live.by_key == {}
    wills = mqtt.wills
    assert (wills._latest, wills._overdue, wills._unwanted) == ({}, {}, set())
    found = published(mqtt)
    return [life for life in world.lives if not life.allows(found.count(life.payload))]


@pytest.mark.parametrize("flush", ["sync", "async"])
@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("seed", range(8))
async def test_wills_come_as_often_as_they_must(autojump_clock: MockClock, seed: int, kills: bool, flush: str) -> None:
    assert await play(World(Random(seed), flush), 60, kills=kills) == []
