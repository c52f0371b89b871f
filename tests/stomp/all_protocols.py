"""Brokers in memory that serve STOMP, MQTT and RocketMQ's remoting protocol, with or without timers."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.timer.timer_talk import install
from tests.wire_clients.mqtt import MqttBroker
from tests.wire_clients.remoting import RemotingClient, remoting_of
from tests.wire_clients.stomp import ASYNC, StompBroker

from martlet.broker import Broker
from martlet.contracts import Service
from martlet.message import Record, decode_properties
from martlet.state import Projection
from martlet.testing.peers import Serving, serving
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.plugin import MqttPlugin
from martlet_mqtt.wire.packets import Publish
from martlet_mqtt.wire.properties import Property
from martlet_stomp.config import StompConfig
from martlet_stomp.plugin import StompPlugin
from martlet_timer.config import TimerConfig
from martlet_timer.plugin import TimerPlugin

__all__ = ["Protocols", "all_protocols", "properties_of", "timer_plugin", "values_of"]


class Protocols:
    """A broker and its ports."""

    def __init__(self, running: Serving, stomp: StompPlugin, mqtt: MqttPlugin) -> None:
        self.broker = running.broker
        self.stomp = StompBroker(running, stomp.protocol(running.broker), stomp)
        self.mqtt = MqttBroker(running, mqtt.protocol(running.broker), mqtt)
        self._running = running
        self._remoting = remoting_of(running.broker)

    def remoting(self, **settings: Any) -> RemotingClient:
        """Connect to the remoting port; with *settings*, to one of its own."""
        port = remoting_of(self.broker, **settings) if settings else self._remoting
        return RemotingClient.of(self._running, port)


@asynccontextmanager
async def all_protocols(
    directory: Path, *, timer: TimerPlugin | None = None, **options: Any
) -> AsyncIterator[Protocols]:
    stomp, mqtt = StompPlugin(StompConfig(listen="127.0.0.1:0")), MqttPlugin(MqttConfig(listen="127.0.0.1:0"))

    def projections(broker: Broker) -> Sequence[Projection]:
        return [*(install(broker, timer, ()) if timer is not None else ()), *mqtt.martlet_projections(broker)]

    def services(broker: Broker) -> Sequence[Service]:
        return [service for plugin in (timer, mqtt, stomp) if plugin for service in plugin.martlet_services(broker)]

    if timer is not None:
        options["dispatchers"] = timer.martlet_dispatchers()
    options.setdefault("store", ASYNC)
    async with serving(directory, projections=projections, services=services, **options) as running:
        yield Protocols(running, stomp, mqtt)


def timer_plugin() -> TimerPlugin:
    return TimerPlugin(TimerConfig())


def properties_of(record: Record) -> Mapping[str, str]:
    return decode_properties(record.properties)


def values_of(message: Publish) -> dict[Property, object]:
    """Return the properties of *message*, without those of users."""
    found = {which: message.properties.get(which) for which in Property}
    return {which: value for which, value in found.items() if value is not None}
