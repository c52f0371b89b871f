"""A broker with timers in a process of its own, which a test kills.

Arguments: its directory, its flush mode, and how many hours its clock is ahead.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import trio
from msgspec.structs import replace

from martlet.broker import Broker
from martlet.contracts import Protocol, Service
from martlet.runtime.clock import SystemClock
from martlet.state import Projection
from martlet.testing.peers import serving
from martlet.testing.stores import small_config
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin


class Ahead:
    """The system's clock, some hours ahead."""

    def __init__(self, hours: int) -> None:
        self._ahead_ms = hours * 3_600_000
        self._clock = SystemClock()

    def now_ms(self) -> int:
        return self._clock.now_ms() + self._ahead_ms


async def main(directory: Path, flush: str, hours: int) -> None:
    plugin = MqttPlugin(MqttConfig(listen="127.0.0.1:0", in_flight_max=20))
    timer = TimerPlugin(TimerConfig())
    store = small_config(flush=flush, flush_interval_ms=20, segment_bytes=1 << 20, page_bytes=1 << 16)

    def ports(broker: Broker) -> tuple[Protocol, ...]:
        return (plugin.protocol(broker, lambda address: print(address, flush=True)),)

    def projections(broker: Broker) -> Sequence[Projection]:
        broker.capabilities = dict(timer.martlet_capabilities(broker))
        broker.set_stages([("timer", stage) for stage in timer.martlet_stages(broker)])
        return [*timer.martlet_projections(broker), *plugin.martlet_projections(broker)]

    def services(broker: Broker) -> Sequence[Service]:
        return [*timer.martlet_services(broker), *plugin.martlet_services(broker)]

    async with serving(
        directory,
        store=replace(store, cache_bytes=1 << 20),
        clock=Ahead(hours),
        ports=ports,
        projections=projections,
        services=services,
        dispatchers=timer.martlet_dispatchers(),
    ):
        await trio.sleep_forever()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
