"""The entry point: a port for the line protocol, and a filter language for all protocols."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import Compile, Handler, Peer, Protocol
from martlet.net.addresses import split_address
from martlet.net.tls import Tls
from martlet.plugins.hooks import Hooks
from martlet_line.codec import Limits
from martlet_line.config import LineConfig
from martlet_line.connection import LineConnection
from martlet_line.filters import compile_properties
from martlet_line.handler import BrokerParts, Counters, LineHandler

__all__ = ["LinePlugin", "protocol"]


class LinePlugin(Hooks):
    """Serves the line protocol on the configured port."""

    config_class: ClassVar[type[Settings] | None] = LineConfig

    def __init__(self, config: LineConfig) -> None:
        super().__init__(config)
        split_address(config.listen)
        config.port_networks("line")  # so that `martlet check` finds an error
        self._tls = Tls(config, "line")

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        return (protocol(self.config, broker, tls=self._tls),)

    def martlet_reload(self) -> None:
        """Read the certificates again."""
        self._tls.reload()

    def martlet_filters(self, broker: Broker) -> Mapping[str, Compile]:
        return {"PROPERTIES": compile_properties}


def protocol(
    config: LineConfig, broker: Broker, bound: Callable[[str], None] = lambda address: None, tls: Tls | None = None
) -> Protocol:
    """Return the line protocol over the topics of *broker*; without *tls* it uses the certificates in *config*."""
    tls = tls or Tls(config, "line")
    counters = Counters()
    broker.stats.add("line", lambda: asdict(counters))
    parts = BrokerParts(
        config,
        counters,
        broker.clock,
        broker.authentication.authenticate_password,
        broker.gate,
        broker.selection,
        broker.turns.finish,
        broker.ids.below,
    )
    limits = Limits(config.line_bytes_max, config.body_bytes_max, config.words_max)

    def handle(peer: Peer, connection: Any) -> Handler:
        return LineHandler(peer, parts)

    def connect(now: float) -> LineConnection:
        return LineConnection(limits, config.idle_s)

    return Protocol(
        "line",
        config.listen,
        connect,
        handle,
        tls.context,
        tls.required,
        bound,
        make_tls=tls.make,
        networks=config.port_networks("line"),
    )
