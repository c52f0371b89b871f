"""The plugin's entry point: its port, its services, and the state that its connections share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import trio

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import Handler, Peer, Protocol, Service, Subcommand, Traffic, WebSocket
from martlet.net.addresses import check_listen
from martlet.net.tls import Tls
from martlet.plugins.hooks import Hooks
from martlet.state import Projection
from martlet_mqtt.admin.sys_topics import SysTopics
from martlet_mqtt.config import MqttConfig
from martlet_mqtt.handler import MqttHandler
from martlet_mqtt.mapping.rules import TopicRules
from martlet_mqtt.outbound.unused_groups import UnusedGroupSearch
from martlet_mqtt.session.missed import topics_of_durable
from martlet_mqtt.session.wills import Wills
from martlet_mqtt.shared.context import PROTOCOL, Context, create_topics
from martlet_mqtt.shared.replies import take_replies
from martlet_mqtt.shared.retained import Retained
from martlet_mqtt.wire.connection import Limits, MqttConnection
from martlet_mqtt.wire.names import Names, check_prefix

__all__ = ["MqttPlugin"]


class MqttPlugin(Hooks):
    """Serves MQTT on the port of its configuration."""

    config_class: ClassVar[type[Settings] | None] = MqttConfig
    config: MqttConfig

    def __init__(self, config: MqttConfig) -> None:
        super().__init__(config)
        check_listen("mqtt.listen", config.listen)
        self._networks = config.port_networks("mqtt")
        TopicRules(config.rules, config.topic, config.queues)  # so that `martlet check` finds an error
        check_prefix(config.response_prefix)
        self._context: Context | None = None
        self._wills: Wills | None = None
        self._tls: Tls | None = None
        self._sys: SysTopics | None = None
        self._traffic = Traffic()

    def context(self, broker: Broker) -> Context:
        """Return the state that all connections share; the first call makes it."""
        if self._context is None:
            config = self.config
            rules = TopicRules(config.rules, config.topic, config.queues)
            create_topics(broker, rules)
            names = Names(config.name_bytes_max, rules.topic_of)
            feed = broker.cursors.open(rules.topics, topics_of=rules.topics_of, is_name=names.is_valid, early=True)
            retained = Retained(broker.store, broker.clock)
            self._context = Context(config, broker, feed, names, retained, rules)
            broker.sessions.missed.topics_of[PROTOCOL] = partial(topics_of_durable, rules)
            take_replies(self._context)
        return self._context

    def _wills_of(self, broker: Broker) -> Wills:
        if self._wills is None:
            self._wills = Wills(self.context(broker))
            broker.sessions.expiry.ending[PROTOCOL] = self._wills.ending
        return self._wills

    def _sys_of(self, broker: Broker) -> SysTopics:
        if self._sys is None:
            self._sys = SysTopics(self.context(broker), self._traffic)
            broker.revocation.waiting.append(self._sys.waiting)
        return self._sys

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        context = self.context(broker)
        turns = broker.turns
        return (
            self._wills_of(broker).run,
            self._sys_of(broker).run,
            self._sys_of(broker).run_bridges,
            UnusedGroupSearch(context).run,
            partial(context.retained.run, turns),
            partial(context.leaving.run, turns),
        )

    def martlet_commands(self) -> Sequence[Subcommand]:
        from martlet_mqtt.commands.command import COMMAND  # a broker does not need it

        return (COMMAND,)

    def martlet_reload(self) -> None:
        if self._tls is not None:
            self._tls.reload()

    def martlet_stopping(self) -> None:
        trio.from_thread.run_sync(self.say_goodbye)

    def say_goodbye(self) -> None:
        """Tell all clients that the broker stops; it publishes their wills when their connections close."""
        if self._context is not None:
            for client in list(self._context.clients.values()):
                client.say_goodbye()

    def martlet_projections(self, broker: Broker) -> Sequence[Projection]:
        return (self.context(broker).retained,)

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        return (self.protocol(broker),)

    def protocol(self, broker: Broker, bound: Callable[[str], None] = lambda address: None) -> Protocol:
        """Return the protocol for the server, on the configured port; *bound* gets the address once it listens."""
        config, context = self.config, self.context(broker)
        limits = Limits(config.connect_bytes_max, context.packet_bytes_max, config.connect_s)
        broker.stats.add("mqtt", context.statistics)
        tls, wills = Tls(config, "mqtt"), self._wills_of(broker)
        self._tls = tls

        def connect(now: float) -> MqttConnection:
            return MqttConnection(limits, context.names, now)

        def handle(peer: Peer, connection: Any) -> Handler:
            return MqttHandler(peer, connection, context, wills, self._sys_of(broker))

        return Protocol(
            "mqtt",
            config.listen,
            connect,
            handle,
            tls=tls.context,
            tls_required=tls.required,
            bound=bound,
            websocket=WebSocket(("mqtt", "mqttv3.1"), origins=frozenset(config.origins), origins_key="mqtt.origins"),
            traffic=self._traffic,
            make_tls=tls.make,
            certificate_end_ms=tls.certificate_end_ms,
            networks=self._networks,
        )
