"""A retained message that was acknowledged is there for whoever subscribes after that."""

from pathlib import Path

import pytest
import trio
import trio.testing
from tests.wire_clients.mqtt import mqtt_broker

from martlet.store import StoreConfig
from martlet_mqtt.wire.packets import Ack, Publish

MANY = 4_000


@pytest.mark.parametrize("flush", ["async", "sync"])
@pytest.mark.parametrize("payload", [b"x", bytes(3000)])
async def test_who_subscribes_after_the_acknowledgements_gets_them_all(
    tmp_path: Path, flush: str, payload: bytes
) -> None:
    count = MANY // 8 if len(payload) > 1 else MANY
    store = StoreConfig(flush=flush)  # type: ignore[arg-type]
    async with mqtt_broker(tmp_path, store=store) as mqtt:
        publisher, subscriber = await mqtt.connect("p"), await mqtt.connect("s")
        await publisher.send(
            *(Publish(f"r/{index}", payload, 1, retain=True, packet_id=index + 1) for index in range(count))
        )
        for index in range(count):
            assert (await publisher.expect(Ack)).packet_id == index + 1
        await subscriber.subscribe("r/+", qos=0)
        found = await subscriber.messages(count)
        assert {each.topic for each in found} == {f"r/{index}" for index in range(count)}
        assert all(each.retain for each in found)


async def test_a_subscription_waits_for_a_projection_that_lags(tmp_path: Path) -> None:
    async with mqtt_broker(tmp_path) as mqtt:
        projections, retained = mqtt.broker.projections, mqtt.context.retained
        (driven,) = [each for each in projections._driven if each.projection is retained]
        publisher, subscriber = await mqtt.connect("p"), await mqtt.connect("s")
        driven.order.busy = True  # as while it reads from disk
        projections._work = trio.Event()  # and nothing else wakes it
        assert await publisher.publish("a", b"x", 1, retain=True) == 0
        assert not projections.has_applied(retained)
        assert len(retained) == 0
        async with trio.open_nursery() as nursery:
            subscribed: list[tuple[int, ...]] = []

            async def subscribe() -> None:
                subscribed.append(await subscriber.subscribe("a", qos=1))

            nursery.start_soon(subscribe)
            await publisher.rest()
            await trio.testing.wait_all_tasks_blocked()
            assert subscribed == []
            driven.order.busy = False
            projections._apply_readable()
        (found,) = await subscriber.messages(1)
        assert (found.payload, found.retain) == (b"x", True)
        assert projections.has_applied(retained)
