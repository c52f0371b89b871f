"""The plugin ``nameserver``: a port where clients ask for routes.

Of the broker it uses the data directory, and what decides about clients: authentication and access rules.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar, Final, cast, final

import trio

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import Connection, Handler, Peer, Protocol, Service
from martlet.errors import MartletError
from martlet.net.addresses import check_listen
from martlet.net.tls import Tls
from martlet.plugins.hooks import Hooks
from martlet_remoting.nameserver.config import NameServerConfig
from martlet_remoting.nameserver.handler import NameServerHandler
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.connection import RemotingConnection

__all__ = ["NameServerPlugin"]

log = logging.getLogger("martlet.nameserver")

KV_FILE: Final = "config/kvConfig.json"


@final
class NameServerPlugin(Hooks):
    """Offers a `NameServer` as a capability, so that the broker in this process registers without a socket."""

    config_class: ClassVar[type[Settings] | None] = NameServerConfig
    config: NameServerConfig

    def __init__(self, config: NameServerConfig) -> None:
        super().__init__(config)
        check_listen("nameserver.listen", config.listen)
        self.server: NameServer | None = None
        self._tls = Tls(config, "nameserver")
        self._networks = config.port_networks("nameserver")

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {NameServer: self._start(broker)}

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        config, server = self.config, self._start(broker)

        def connect(now: float) -> Connection:
            return RemotingConnection(config.frame_bytes_max, config.idle_s, now, "nameserver.frame_bytes_max")

        def handle(peer: Peer, connection: Connection) -> Handler:
            cast(RemotingConnection, connection).send = peer.send
            return NameServerHandler(server, broker, peer)

        def bound(address: str) -> None:
            server.address = address

        return [
            Protocol(
                "nameserver",
                config.listen,
                connect,
                handle,
                tls=self._tls.context,
                tls_required=self._tls.required,
                bound=bound,
                make_tls=self._tls.make,
                certificate_end_ms=self._tls.certificate_end_ms,
                networks=self._networks,
            )
        ]

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        return [self._start(broker).scan]

    def martlet_reload(self) -> None:
        self._tls.reload()

    def _start(self, broker: Broker) -> NameServer:
        """Return the name server of this plugin, with its stored key-value texts."""
        if self.server is None:
            self.server = NameServer(self.config, partial(_save, broker), broker.turns)
            self.server.has_rules = lambda: bool(broker.authorizers)
            broker.stats.add("nameserver", self.server.statistics)
            self._load(broker, self.server)
        return self.server

    def _load(self, broker: Broker, server: NameServer) -> None:
        for data in broker.store.data_directory.read_generations(KV_FILE):
            try:
                server.kv.load(data)
                return
            except MartletError as error:
                log.warning("%s cannot be used, trying its previous generation; %s", KV_FILE, error)


async def _save(broker: Broker, data: bytes) -> None:
    """Write the key-value texts in a worker thread: an fsync takes milliseconds."""
    store = broker.store
    with trio.CancelScope(shield=True):
        for _ in range(2):  # twice, so that the previous generation, read if the newest is damaged, has the same texts
            await store.disk.off_loop(partial(store.data_directory.write_file, KV_FILE, data))
