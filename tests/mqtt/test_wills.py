"""Wills when something is in the way: an ended session, a full disk, limits, many of them at once."""

from pathlib import Path
from random import Random

import pytest
import trio
from tests.wire_clients.mqtt import MqttBroker, MqttClient, leave, mqtt_broker
from trio.testing import MockClock

from martlet.runtime.steps import finish_now
from martlet.testing.clock import TrioClock
from martlet.testing.disk import Cut, FakeDisk
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.session import wills
from martlet_mqtt.wire.codes import V5, ReasonCode
from martlet_mqtt.wire.errors import MqttError
from martlet_mqtt.wire.packets import Connect, Disconnect, FilterSubscription, Will
from martlet_mqtt.wire.properties import Properties, Property

SMALL = small_config(flush="async", segment_bytes=1 << 20, page_bytes=1 << 16, cache_bytes=1 << 20)
DATA = Path("/data")
NO_SPACE = "the disk is full"


@pytest.mark.parametrize("publisher", [("", ()), ("10.1.2.3", ()), ("::1", ("staff", "\u00e9"))])
def test_a_stored_will_has_its_publisher(publisher: tuple[str, tuple[str, ...]]) -> None:
    found = wills.decode_will(wills.encode_will(later(5), *publisher))
    assert (found.delay_s, found.packet.topic, found.packet.payload) == (5, "will", b"gone")
    assert (found.address, found.groups) == publisher


@pytest.mark.parametrize("trailer", [b"\xc1", b"\x91\x05", b"\x92\xa1a", b"\x92\xa1\xff\x90", b"\x90\x90"])
def test_a_stored_will_with_a_damaged_publisher_is_refused(trailer: bytes) -> None:
    with pytest.raises(MqttError, match="publisher"):
        wills.decode_will(wills.encode_will(later(5)) + trailer)


def later(delay_s: int) -> Will:
    return Will("will", b"gone", 1, properties=Properties({Property.WILL_DELAY: delay_s}))


async def watching(mqtt: MqttBroker, *, clean: bool = True) -> MqttClient:
    watcher = await mqtt.connect("watcher", clean=clean, expiry_s=100_000, keep_alive_s=3600)
    await watcher.subscribe(FilterSubscription("will/#", 0))
    return watcher


async def payloads(watcher: MqttClient) -> list[bytes]:
    return [each.payload for each in await watcher.rest()]


async def test_a_will_is_published_if_its_client_is_the_first_to_see_that_its_session_has_ended(
    autojump_clock: MockClock,
) -> None:
    disk, clock = FakeDisk(), TrioClock()
    async with mqtt_broker(DATA, store=SMALL, disk=disk, clock=clock) as mqtt:
        talk = await mqtt.connect("c", expiry_s=100, will=later(500))
        await leave(mqtt, talk, "c")
        await trio.sleep(90)
        await mqtt.settle()
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    async with mqtt_broker(DATA, store=SMALL, disk=disk, clock=clock) as mqtt:
        watcher = await watching(mqtt)
        await trio.sleep(20)
        await mqtt.connect("c", clean=False, expiry_s=100, present=False, keep_alive_s=3000)
        assert await watcher.payloads(1) == [b"gone"]
        await trio.sleep(900)
        assert await payloads(watcher) == []


@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({Property.PAYLOAD_FORMAT: 1}, ReasonCode.PAYLOAD_FORMAT_INVALID),
        ({Property.RESPONSE_TOPIC: "a/+"}, ReasonCode.PROTOCOL_ERROR),
    ],
)
async def test_a_will_that_could_not_be_published_is_refused_at_once(
    tmp_path: Path, properties: dict[Property, object], reason: ReasonCode
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        will = Will("will", b"\xff", 1, properties=Properties(properties))
        _, answer = await mqtt.answer(Connect("c", V5, will=will))
        assert answer.reason == reason
        await mqtt.connect("c", will=Will("will", b"\xff", properties=Properties({Property.PAYLOAD_FORMAT: 0})))


async def test_a_will_for_which_there_is_no_room_among_retained_messages_is_published_all_the_same(
    tmp_path: Path,
) -> None:
    async with mqtt_broker(tmp_path, MqttConfig(retained_max=0)) as mqtt:
        watcher = await watching(mqtt)
        talk = await mqtt.connect("c", will=Will("will", b"gone", 1, retain=True))
        talk.hang_up()
        assert await watcher.payloads(1) == [b"gone"]
        assert len(mqtt.context.retained) == 0


async def test_a_will_that_may_not_be_published_is_dropped(tmp_path: Path, autojump_clock: MockClock) -> None:
    class Rules:
        allows = True

        def __call__(self, identity: object, action: str, name: str) -> bool:
            return self.allows or name != "mqtt/will"

    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        rules = Rules()
        mqtt.broker.authorizers = (rules,)
        talk = await mqtt.connect("c", expiry_s=1000, will=Will("will", b"gone", 1))
        rules.allows = False
        mqtt.broker.rules.changed()
        await leave(mqtt, talk, "c")
        await trio.sleep(1)
        state, _ = mqtt.broker.sessions.find("mqtt", "c")
        assert state is not None
        assert state.data == b""
        assert mqtt.context.counters.wills == 0


@pytest.mark.parametrize("expiry_s", [0, 50])
async def test_disconnect_drops_the_will_even_if_the_disk_is_full(
    tmp_path: Path, autojump_clock: MockClock, expiry_s: int
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        talk = await mqtt.connect("c", expiry_s=100, will=Will("will", b"gone", 1))
        mqtt.broker.store.admission.close(NO_SPACE)
        await talk.send(Disconnect(0, Properties({Property.SESSION_EXPIRY: expiry_s})))
        assert await talk.closed() is None
        await trio.sleep(25)
        mqtt.broker.store.admission.refusal = ""
        await trio.sleep(500)
        assert await payloads(watcher) == []
        talk = await mqtt.connect("c", will=Will("will", b"again", 1))
        talk.hang_up()
        assert await watcher.payloads(1) == [b"again"]


async def test_disconnect_drops_the_will_even_if_its_commit_fails(
    tmp_path: Path, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        store = mqtt.broker.store
        talk = await mqtt.connect("c", expiry_s=100, will=Will("will", b"gone", 1))
        store.committer.before_commit.insert(0, lambda: store.admission.close(NO_SPACE))
        await talk.send(Disconnect())
        assert await talk.closed() is None
        await trio.sleep(500)
        assert "were not stored; the disk is full" in caplog.text
        assert await payloads(watcher) == []
        assert mqtt.context.counters.wills == 0


async def test_a_will_waits_while_the_disk_is_full(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        talk = await mqtt.connect("c", will=Will("will", b"gone", 1))
        mqtt.broker.store.admission.close(NO_SPACE)
        await leave(mqtt, talk, "c")
        await trio.sleep(25)
        mqtt.broker.store.admission.refusal = ""
        assert await watcher.payloads(1) == [b"gone"]
        await trio.sleep(100)
        assert await payloads(watcher) == []


async def test_many_wills_after_a_kill_are_published_in_slices(autojump_clock: MockClock) -> None:
    disk, count = FakeDisk(), 100
    async with mqtt_broker(DATA, store=SMALL, disk=disk, clock=TrioClock()) as mqtt:
        for number in range(count):
            await mqtt.connect(f"c{number}", expiry_s=1000, will=Will(f"will/{number}", b"gone", 1))
        await mqtt.settle()
        disk = disk.after_power_cut(Cut.KILLED, Random(1))
    async with mqtt_broker(DATA, store=SMALL, disk=disk, clock=TrioClock()) as mqtt:
        watcher, before = await watching(mqtt), mqtt.broker.turns.slices
        await trio.sleep(10)
        assert mqtt.context.counters.wills == count
        assert mqtt.broker.turns.slices - before >= count * wills.STEPS_A_WILL // 256
        assert len(await watcher.rest()) <= count


async def test_a_client_that_comes_and_goes_leaves_no_times_behind(tmp_path: Path, autojump_clock: MockClock) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        found = mqtt.wills
        stays = await mqtt.connect("stays away", expiry_s=100_000, will=later(90_000))
        await leave(mqtt, stays, "stays away")
        for _ in range(30):
            talk = await mqtt.connect("c", clean=False, expiry_s=100_000, will=later(50_000))
            await leave(mqtt, talk, "c")
        assert len(found._latest) == 2
        many = wills.SPARE
        for number in range(many):
            found.publish_later("c", 50_000 + number)
        await trio.sleep(1)
        assert len(found._due) == 2
        assert len(found._latest) == 2
        watcher = await watching(mqtt)
        await trio.sleep(3000)
        await watcher.rest()
        assert {each for _, each in found._due} == {"c", "stays away"}


async def test_only_a_client_without_an_identifier_is_told_which_one_it_got(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        _, answer = await mqtt.answer(Connect("", V5))
        name = answer.properties.text(Property.ASSIGNED_CLIENT_IDENTIFIER)
        assert name
        _, answer = await mqtt.answer(Connect(name, V5))
        assert answer.properties.text(Property.ASSIGNED_CLIENT_IDENTIFIER) is None


@pytest.mark.parametrize("is_sweep_first", [True, False])
async def test_a_will_is_published_once_when_its_session_ends_at_the_same_moment(
    tmp_path: Path, mock_clock: MockClock, is_sweep_first: bool
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        talk = await mqtt.connect("c", expiry_s=20, will=later(1000))
        await leave(mqtt, talk, "c")
        await mqtt.settle()
        sessions = mqtt.context.broker.sessions
        owner: wills.Wills = sessions.expiry.ending["mqtt"].__self__  # type: ignore[attr-defined]
        mock_clock.jump(21)
        steps = [sessions.expiry.sweep, owner._publish_all_due]
        for each in steps if is_sweep_first else reversed(steps):
            finish_now(each())
        await mqtt.settle()
        assert await watcher.payloads(1) == [b"gone"]
        assert await payloads(watcher) == []


@pytest.mark.parametrize(("properties", "slices"), [(0, 1), (1000, 7)])
async def test_a_will_with_many_properties_has_a_slice_of_its_own(
    tmp_path: Path, mock_clock: MockClock, properties: int, slices: int
) -> None:
    async with mqtt_broker(tmp_path, clock=TrioClock()) as mqtt:
        watcher = await watching(mqtt)
        user = tuple((f"k{number}", "v") for number in range(properties))
        heavy = Will("will", b"gone", 1, properties=Properties({Property.WILL_DELAY: 5}, user))
        for number in range(6):
            await leave(mqtt, await mqtt.connect(f"c{number}", expiry_s=1000, will=heavy), f"c{number}")
        await mqtt.settle()
        owner: wills.Wills = mqtt.context.broker.sessions.expiry.ending["mqtt"].__self__  # type: ignore[attr-defined]
        mock_clock.jump(6)
        steps = owner._publish_all_due()
        assert 1 + sum(1 for _ in steps) == slices
        await mqtt.settle()
        assert await watcher.payloads(6) == [b"gone"] * 6
