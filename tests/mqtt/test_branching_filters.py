"""Filters of which many branches fit each new name: publishing to such names keeps nobody waiting."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import trio
from tests.wire_clients.mqtt import V5, MqttClient, mqtt_broker

from martlet.delivery.cursor import Cursor
from martlet.delivery.routing.division import RECORDS_AT_ONCE, STEPS_A_SLICE
from martlet.delivery.routing.route_cache import NAME_STEPS, RouteCache
from martlet_mqtt.wire.codec import encode_packet
from martlet_mqtt.wire.packets import Ack, FilterSubscription, Publish, Suback, Subscribe

LEVELS = 9
# A name fits every branch, up to its last level, which none has.
BRANCHES = 2 ** (LEVELS + 1)
NAMES = 1000


FILTERS = ["/".join([*levels, "z"]) for levels in product("+a", repeat=LEVELS)]
PREFIX = "a/" * LEVELS


class Steps(trio.abc.Instrument):
    """The steps that routes take, all and the most between two switches of tasks."""

    def __init__(self, routes: RouteCache[Cursor]) -> None:
        self._routes = routes
        self._before = routes.steps
        self.all = self.most = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        steps = self._routes.steps - self._before
        self._before += steps
        self.all += steps
        self.most = max(self.most, steps)

    def check(self) -> None:
        assert self.all > NAMES * BRANCHES / 2
        assert self.most <= STEPS_A_SLICE + RECORDS_AT_ONCE * (2 * BRANCHES + NAME_STEPS)


@contextmanager
def counted(routes: RouteCache[Cursor]) -> Iterator[None]:
    """Check what routes take in the block."""
    steps = Steps(routes)
    trio.lowlevel.add_instrument(steps)
    yield
    trio.lowlevel.remove_instrument(steps)
    steps.check()


def publishes(qos: int) -> bytes:
    """PUBLISH packets to new names, and one that the watcher gets."""
    names = [*(f"{PREFIX}{number}" for number in range(NAMES)), "last"]
    return b"".join([encode_packet(Publish(name, b"x", qos, packet_id=qos and 7), V5) for name in names])


async def watch(talk: MqttClient, qos: int) -> None:
    await talk.send(Subscribe(1, tuple(FilterSubscription(each, qos) for each in [*FILTERS, "last"])))
    assert len((await talk.expect(Suback)).codes) == len(FILTERS) + 1


async def test_many_new_names_are_matched_in_several_turns(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, sender = await mqtt.connect("w", V5), await mqtt.connect("s", V5)
        await watch(watcher, 0)
        with counted(mqtt.context.feed._tail):
            await sender.wire.send(publishes(0))
            message = await watcher.receive()
            assert isinstance(message, Publish)
            assert message.topic == "last"


async def test_one_name_that_fits_filters_of_many_clients_is_matched_in_several_turns(tmp_path: Path) -> None:
    filters = ["/".join([*levels, "z"]) for levels in product("+a", repeat=15)]
    async with mqtt_broker(tmp_path) as mqtt:
        for start in range(0, len(filters), 1000):
            talk = await mqtt.connect(f"c{start}", V5)
            some = tuple(FilterSubscription(each) for each in filters[start : start + 1000])
            await talk.send(Subscribe(1, some))
            await talk.expect(Suback)
        watcher, sender = await mqtt.connect("w", V5), await mqtt.connect("s", V5)
        await watcher.send(Subscribe(1, (FilterSubscription("a/" * 15 + "z"), FilterSubscription("last"))))
        await watcher.expect(Suback)
        steps = Steps(mqtt.context.feed._tail)
        trio.lowlevel.add_instrument(steps)
        packets = [Publish("a/" * 15 + end, b"x", 0) for end in "yz"] + [Publish("last", b"x", 0)]
        await sender.wire.send(b"".join(encode_packet(each, V5) for each in packets))
        assert [message.topic for message in await watcher.messages(2)] == ["a/" * 15 + "z", "last"]
        trio.lowlevel.remove_instrument(steps)
        assert steps.all > 4 * len(filters)
        assert steps.most <= 4 * STEPS_A_SLICE


async def test_a_session_that_returns_finds_them_in_several_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        watcher, sender = await mqtt.connect("w", V5, expiry_s=3600), await mqtt.connect("s", V5)
        await watch(watcher, 1)
        watcher.wire.close()
        await sender.wire.send(publishes(1))
        for _ in range(NAMES + 1):
            await sender.expect(Ack)
        catch_up = mqtt.context.feed.catch_up
        routes = catch_up._make_routes()
        monkeypatch.setattr(catch_up, "_make_routes", lambda: routes)
        with counted(routes):
            watcher = await mqtt.connect("w", V5, clean=False, present=True, expiry_s=3600)
            message = await watcher.receive()
            assert isinstance(message, Publish)
            assert message.topic == "last"
