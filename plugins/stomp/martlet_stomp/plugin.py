"""The plugin's entry point: its port, its services, and the state that its connections share."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import trio

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import Handler, Peer, Protocol, Service, Subcommand, Traffic, WebSocket
from martlet.net.addresses import check_listen
from martlet.net.tls import Tls
from martlet.plugins.hooks import Hooks
from martlet_stomp.config import StompConfig
from martlet_stomp.handler import StompHandler
from martlet_stomp.shared.context import PROTOCOL, Context, make_context
from martlet_stomp.shared.replies import take_replies
from martlet_stomp.wire.connection import StompConnection
from martlet_stomp.wire.scanner import known_heads

__all__ = ["StompPlugin"]

SUBPROTOCOLS: Final = ("v12.stomp", "v11.stomp", "v10.stomp")


class StompPlugin(Hooks):
    """Serves STOMP on the port of its configuration."""

    config_class: ClassVar[type[Settings] | None] = StompConfig
    config: StompConfig

    def __init__(self, config: StompConfig) -> None:
        super().__init__(config)
        check_listen("stomp.listen", config.listen)
        self._networks = config.port_networks(PROTOCOL)
        self._context: Context | None = None
        self._tls: Tls | None = None
        self._traffic = Traffic()

    def context(self, broker: Broker) -> Context:
        """Return the state that all connections share; the first call makes it."""
        if self._context is None:
            self._context = make_context(self.config, broker)
            take_replies(self._context)
        return self._context

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        context = self.context(broker)
        leaving = partial(context.leaving.run, broker.turns)
        return (context.heartbeats.run, context.transactions.run, leaving)

    def martlet_commands(self) -> Sequence[Subcommand]:
        from martlet_stomp.commands.command import COMMAND  # a broker does not need it

        return (COMMAND,)

    def martlet_reload(self) -> None:
        if self._tls is not None:
            self._tls.reload()

    def martlet_stopping(self) -> None:
        trio.from_thread.run_sync(self.say_goodbye)

    def say_goodbye(self) -> None:
        """Tell all clients that the broker stops."""
        if self._context is not None:
            for handler in list(self._context.clients):
                handler.say_goodbye()

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        return (self.protocol(broker),)

    def protocol(self, broker: Broker, bound: Callable[[str], None] = lambda address: None) -> Protocol:
        """Return the protocol for the server, on the configured port; *bound* gets the address once it listens."""
        config, context = self.config, self.context(broker)
        broker.stats.add(PROTOCOL, context.statistics)
        heads = known_heads(config.limits(broker.config.message_bytes_max))
        tls = self._tls = Tls(config, PROTOCOL)

        def connect(now: float) -> StompConnection:
            return StompConnection(heads, now)

        def handle(peer: Peer, connection: Any) -> Handler:
            return StompHandler(peer, connection, context)

        return Protocol(
            PROTOCOL,
            config.listen,
            connect,
            handle,
            tls=tls.context,
            tls_required=tls.required,
            bound=bound,
            websocket=WebSocket(
                SUBPROTOCOLS, text=True, origins=frozenset(config.origins), origins_key="stomp.origins"
            ),
            traffic=self._traffic,
            make_tls=tls.make,
            certificate_end_ms=tls.certificate_end_ms,
            networks=self._networks,
        )
