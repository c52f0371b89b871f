"""A session with very many filters is resumed in slices, while which anything can happen to its client."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from errno import ENOSPC
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, MqttClient, mqtt_broker
from trio.testing import MockClock

from martlet.runtime.steps import per_slice
from martlet.testing.clock import TrioClock
from martlet.testing.disk import FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.inbound.subscriptions import FILTER_US, STEPS_A_SHARE
from martlet_mqtt.session.client import Client
from martlet_mqtt.wire.codes import V4, V5, ReasonCode
from martlet_mqtt.wire.packets import Connack, Connect, Disconnect, FilterSubscription, Pingreq, Pingresp, Publish, Will
from martlet_mqtt.wire.properties import NO_PROPERTIES, Properties, Property

COUNT = 1000
STORE = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)
EXPIRY = Properties({Property.SESSION_EXPIRY: 10_000})
WILL = Will("will", b"gone", 1)
NAMES = [f"a/{number}" for number in range(COUNT)]


def connect_of(version: int = V5, *, clean: bool = False, will: Will | None = WILL) -> Connect:
    return Connect("c", version, clean, 3600, will=will, properties=EXPIRY if version == V5 else NO_PROPERTIES)


@asynccontextmanager
async def away(
    filters: Sequence[FilterSubscription], disk: FakeDisk | None = None, version: int = V5
) -> AsyncIterator[MqttBroker]:
    """A broker with a client that has *filters* and is away; messages came for the first and the last."""
    disk = disk or FakeDisk()
    async with mqtt_broker(Path("/data"), store=STORE, disk=disk, clock=TrioClock()) as mqtt:
        talk, _ = await mqtt.answer(connect_of(version, will=None))
        for start in range(0, len(filters), 50):
            await talk.subscribe(*filters[start : start + 50])
        await talk.disconnect()
        other = await mqtt.connect("other")
        for number in (0, len(filters) - 1):
            assert await other.publish(NAMES[number], b"%d" % number, 1) == 0
        await mqtt.settle()
        yield mqtt


def own(qos: int = 1) -> list[FilterSubscription]:
    return [FilterSubscription(name, qos) for name in NAMES]


def missed() -> list[bytes]:
    return [b"0", b"%d" % (COUNT - 1)]


async def greeted(talk: MqttClient) -> Connack:
    """Return the first packet of the broker."""
    packet = await talk.receive()
    assert isinstance(packet, Connack)
    return packet


async def in_slices(mqtt: MqttBroker, talk: MqttClient, connect: Connect) -> Client:
    """Send *connect*, and return when a part of it is done."""
    before = mqtt.broker.turns.slices
    await talk.send(connect)
    while "c" not in mqtt.context.clients or mqtt.broker.turns.slices < before + 3:
        await trio.lowlevel.checkpoint()
    client = mqtt.client("c")
    assert client.greeting is not None
    return client


async def watching(mqtt: MqttBroker) -> MqttClient:
    watcher = await mqtt.connect("watcher", V4, keep_alive_s=0)
    await watcher.subscribe("will")
    return watcher


async def test_others_have_their_turn_while_a_session_is_resumed(autojump_clock: MockClock) -> None:
    async with away(own()) as mqtt:
        other, talk = await mqtt.connect("another"), mqtt.open()
        client = await in_slices(mqtt, talk, connect_of())
        await other.send(Pingreq())
        await other.expect(Pingresp)
        assert client.greeting is not None
        answer = await greeted(talk)
        assert (answer.reason, answer.session_present) == (0, True)
        assert mqtt.broker.turns.slices >= COUNT // per_slice(FILTER_US)
        assert await talk.payloads(2) == missed()
        assert await other.publish(NAMES[500], b"new", 1) == 0
        assert await talk.payloads(1) == [b"new"]


async def test_packets_that_follow_connect_wait_for_its_end(autojump_clock: MockClock) -> None:
    async with away(own()) as mqtt:
        talk = mqtt.open()
        await talk.send(connect_of(), Publish(NAMES[1], b"own", 1, packet_id=1), Pingreq(), Disconnect())
        await greeted(talk)
        while "c" in mqtt.context.clients:
            await trio.lowlevel.checkpoint()
        _, answer = await mqtt.answer(connect_of())
        assert answer.session_present
        talk = mqtt.open()
        await talk.send(connect_of())
        await greeted(talk)
        assert set(await talk.payloads(3)) == {*missed(), b"own"}


@pytest.mark.parametrize("qos", [0, 1])
async def test_subscriptions_of_qos_0_go_on_with_new_messages(autojump_clock: MockClock, qos: int) -> None:
    """Beside one of QoS 1 they wait until the client has what it missed for that."""
    async with away([*own(0)[:-1], FilterSubscription(NAMES[-1], qos)]) as mqtt:
        talk, _ = await mqtt.answer(connect_of())
        other = await mqtt.connect("another")
        if qos:
            assert await talk.payloads(1) == [b"%d" % (COUNT - 1)]
        assert await talk.rest() == []
        for name in (NAMES[0], NAMES[700]):
            assert await other.publish(name, b"new", 1) == 0
        assert await talk.payloads(2) == [b"new"] * 2


async def test_few_shared_subscriptions_are_resumed_in_slices_too(autojump_clock: MockClock) -> None:
    count = 2 * per_slice(FILTER_US) // STEPS_A_SHARE
    async with away(
        [FilterSubscription(f"$share/g{number}/{name}", 1) for number, name in enumerate(NAMES[:count])]
    ) as mqtt:
        talk, before = mqtt.open(), mqtt.broker.turns.slices
        await talk.send(connect_of())
        assert (await greeted(talk)).session_present
        assert mqtt.broker.turns.slices >= before + 2
        assert set(await talk.payloads(2)) == {b"0", b"%d" % (count - 1)}


@pytest.mark.parametrize("version", [V4, V5])
async def test_a_client_whose_session_is_taken_over_meanwhile_was_accepted(
    autojump_clock: MockClock, version: int
) -> None:
    async with away(own(), version=version) as mqtt:
        watcher = await watching(mqtt)
        first, second = mqtt.open(version), mqtt.open(version)
        await in_slices(mqtt, first, connect_of(version))
        await second.send(connect_of(version, will=None))
        answer = await greeted(first)
        assert (answer.reason, answer.session_present) == (0, True)
        last = await first.closed()
        if version == V5:
            assert isinstance(last, Disconnect)
            assert last.reason == ReasonCode.SESSION_TAKEN_OVER
        answer = await greeted(second)
        assert (answer.reason, answer.session_present) == (0, True)
        assert await second.payloads(2) == missed()
        assert await watcher.payloads(1) == [b"gone"]
        assert mqtt.broker.cursors.statistics()["cursors"] == 2
        await trio.sleep(100)
        assert await watcher.rest() == []


async def test_a_clean_start_meanwhile_ends_the_session(autojump_clock: MockClock) -> None:
    async with away(own()) as mqtt:
        watcher = await watching(mqtt)
        first, second = mqtt.open(), mqtt.open()
        delayed = Will("will", b"gone", 1, properties=Properties({Property.WILL_DELAY: 5000}))
        await in_slices(mqtt, first, connect_of(will=delayed))
        await second.send(connect_of(clean=True, will=None))
        assert (await greeted(first)).session_present
        last = await first.closed()
        assert isinstance(last, Disconnect)
        assert last.reason == ReasonCode.SESSION_TAKEN_OVER
        assert not (await greeted(second)).session_present
        assert await second.rest() == []
        assert await watcher.payloads(1) == [b"gone"]
        await trio.sleep(6000)
        assert await watcher.rest() == []


@pytest.mark.parametrize("how", ["hangs up", "is kicked", "hears goodbye"])
async def test_a_client_that_goes_meanwhile_misses_nothing(autojump_clock: MockClock, how: str) -> None:
    async with away(own()) as mqtt:
        watcher, talk = await watching(mqtt), mqtt.open()
        client = await in_slices(mqtt, talk, connect_of())
        if how == "hangs up":
            talk.hang_up()
        else:
            client.kick() if how == "is kicked" else client.say_goodbye()
            answer = await greeted(talk)
            assert (answer.reason, answer.session_present) == (0, True)
            last = await talk.closed()
            assert isinstance(last, Disconnect)
            reason = ReasonCode.ADMINISTRATIVE_ACTION if how == "is kicked" else ReasonCode.SERVER_SHUTTING_DOWN
            assert last.reason == reason
        await trio.sleep(100)
        assert mqtt.context.clients.keys() == {"other", "watcher"}
        assert mqtt.broker.cursors.statistics()["cursors"] == 1
        assert await watcher.payloads(1) == [b"gone"]
        talk, answer = await mqtt.answer(connect_of())
        assert answer.session_present
        assert await talk.payloads(2) == missed()


@pytest.mark.parametrize("version", [V4, V5])
@pytest.mark.parametrize("is_own", [True, False])
async def test_a_client_whose_commit_fails_meanwhile_is_refused(
    autojump_clock: MockClock, version: int, is_own: bool
) -> None:
    """The commit of CONNECT itself, and one of a later change of the session."""
    disk = FakeDisk()
    async with away(own(), disk, version) as mqtt:
        watcher, talk, store = await watching(mqtt), mqtt.open(version), mqtt.broker.store
        if is_own:
            store.committer.before_commit.append(lambda: disk.fail_next("write", ENOSPC))
        client = await in_slices(mqtt, talk, connect_of(version))
        if not is_own:
            assert client.session is not None
            client.session.expire_after(20_000)
            store.committer.before_commit.append(lambda: disk.fail_next("write", ENOSPC))
        answer = await greeted(talk)
        assert answer.reason == (ReasonCode.QUOTA_EXCEEDED if version == V5 else 3)
        assert await talk.closed() is None
        await trio.sleep(100)
        assert mqtt.context.clients.keys() == {"other", "watcher"}
        assert mqtt.broker.cursors.statistics()["cursors"] == 1
        assert await watcher.rest() == [] if is_own else await watcher.payloads(1) == [b"gone"]
        talk, answer = await mqtt.answer(connect_of(version))
        assert (answer.reason, answer.session_present) == (0, True)
        assert await talk.payloads(2) == missed()


async def test_a_filter_that_may_not_be_read_any_more_brings_nothing(autojump_clock: MockClock) -> None:
    async with away(own()) as mqtt:
        talk = mqtt.open()
        await in_slices(mqtt, talk, connect_of())
        mqtt.broker.authorizers = (lambda identity, action, name: name != f"mqtt/{NAMES[-1]}",)
        assert (await greeted(talk)).session_present
        assert await talk.payloads(1) == [b"0"]
        assert len(mqtt.context.clients["c"].filters) == COUNT


async def test_an_installation_of_home_assistant_fits_with_the_defaults(tmp_path: Path) -> None:
    count = MqttConfig().filters_max
    async with mqtt_broker(tmp_path) as mqtt:
        talk = await mqtt.connect("hub", clean=False, expiry_s=1000)
        names = [f"esphome/living-room-{number // 15}/sensor/entity_{number}/state" for number in range(count)]
        for at in range(0, count, 1000):
            assert set(await talk.subscribe(*names[at : at + 1000], qos=0)) == {0}
        (code,) = await talk.subscribe("one/more", qos=0)
        assert code == ReasonCode.QUOTA_EXCEEDED
        device = await mqtt.connect("device")
        await device.publish(names[-1], b"on", 1)
        assert [packet.topic for packet in await talk.messages(1)] == [names[-1]]
        talk.hang_up()
        again = await mqtt.connect("hub", clean=False, expiry_s=1000, present=True)
        await device.publish(names[0], b"off", 1)
        assert [packet.topic for packet in await again.messages(1)] == [names[0]]
