"""The remoting plugin: the broker's port for RocketMQ clients, the VIP port beside it, and registration."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, cast

import trio

from martlet.access import ANONYMOUS
from martlet.broker import Broker
from martlet.contracts import Command, Dispatcher, Handler, Peer, Producers, Protocol, Router, Service
from martlet.errors import Refused
from martlet.net.addresses import check_address, pack_host, split_address
from martlet.net.tls import Tls
from martlet.plugins.hooks import Hooks
from martlet.store.light import light_topics
from martlet.tables.topics import RETRY_PREFIX

from .config import RemotingConfig
from .connection import RemotingConnection
from .context import Parts
from .delays import SCHEDULE_TOPIC, due_ms
from .dialing import NameServerDialer
from .handler import RemotingHandler
from .handlers.groups import make_retry_topic
from .handlers.pull import finish
from .nameserver.server import NameServer
from .other_brokers import OtherBrokers
from .producers import RemotingProducers
from .registrar import Registrar, create_standard_topics

__all__ = ["RemotingPlugin"]

log = logging.getLogger("martlet.remoting")

VIP_DISTANCE: Final = 2  # RocketMQ fastListenPort
SCAN_S: Final = 10.0
LOOPBACK: Final = "127.0.0.1"
WILDCARDS: Final = ("0.0.0.0", "::", "")


class RemotingPlugin(Hooks):
    """Serves RocketMQ remoting clients; ``parts`` is what all its connections share, once there is a broker."""

    config_class: ClassVar[type | None] = RemotingConfig

    def __init__(self, config: RemotingConfig) -> None:
        super().__init__(config)
        self._config = config
        check_address("remoting.listen", config.listen)
        for address in config.nameservers:
            check_address("remoting.nameservers", address)
        self._tls = Tls(config, "remoting")
        self._dialer = NameServerDialer(config)
        self._parts: Parts | None = None
        self._registrar: Registrar | None = None

    @property
    def parts(self) -> Parts:
        """What all connections share."""
        assert self._parts is not None
        return self._parts

    def martlet_dispatchers(self) -> Mapping[str, Dispatcher]:
        return {SCHEDULE_TOPIC: due_ms}

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {Producers: RemotingProducers(lambda: self._parts)}

    def martlet_routers(self, broker: Broker) -> Sequence[Router]:
        return [lambda message: light_topics(message.properties)] if self._config.light_queues else []

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        config = self._config
        parts = self._parts = Parts(broker, config)
        registrar = self._registrar = Registrar(
            broker, config.nameservers, config.register_s, config.register_timeout_s * 1000, self._dialer.connect
        )
        parts.registrar = registrar
        parts.others = OtherBrokers(registrar)
        broker.stats.add("remoting", parts.statistics)
        create_standard_topics(broker)
        protocols = [self._protocol("remoting", config.listen, fast=False)]
        host, port = split_address(config.listen)
        if config.vip and port > VIP_DISTANCE:
            listen = f"[{host}]:{port - VIP_DISTANCE}" if ":" in host else f"{host}:{port - VIP_DISTANCE}"
            protocols.append(self._protocol("remoting-vip", listen, fast=True))
        return protocols

    def _protocol(self, name: str, listen: str, *, fast: bool) -> Protocol:
        config, parts = self._config, self.parts

        def connect(now: float) -> RemotingConnection:
            return RemotingConnection(config.frame_bytes_max, config.idle_s, now)

        def handle(peer: Peer, connection: Any) -> Handler:
            return RemotingHandler(parts, peer, cast(RemotingConnection, connection), fast=fast)

        def bound(address: str) -> None:
            parts.addresses[name] = address
            if not fast:
                self._announce(address)

        return Protocol(name, listen, connect, handle, self._tls.context, self._tls.required, bound, fast)

    def _announce(self, address: str) -> None:
        """The port is known: records carry it as their store host, and the name servers learn of it."""
        parts = self.parts
        host, port = split_address(address)
        parts.set_store_host(_store_host(parts.broker.config.advertise or host, host, port))
        assert self._registrar is not None
        self._registrar.bound(address)
        inside = parts.broker.capability(NameServer)
        if inside is not None:
            inside.wanted = self._make_wanted

    def _make_wanted(self, topic: str) -> bool:
        """A consumer asks for the route of its retry topic before its first heartbeat, and then not for 30 s.

        Knowing it by then spares a new group's first retry that time. A name server does not know who asks, so
        with access rules it must be a topic that everybody may read.
        """
        name = topic.removeprefix(RETRY_PREFIX)
        if name == topic or self.parts.stopping:
            return False
        try:
            group = self.parts.broker.gate(ANONYMOUS).query_group(name)
            policy = group.ensure()
        except Refused:
            return False
        if policy is not None:
            make_retry_topic(group, policy)
        return policy is not None

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        assert self._registrar is not None
        parts = self.parts
        runs = parts.deadlines.run, parts.parked.run, parts.members.run, parts.rates.run
        return [self._introduce, self._scan, self._registrar.run, *runs]

    async def _introduce(self) -> None:
        """Say on the log the line that a client needs, and where it is sent from there."""
        registrar = self._registrar
        assert registrar is not None
        host, _ = split_address(registrar.address)
        if host in WILDCARDS:
            log.warning(
                "clients are told to connect to %s, which only works on this machine; "
                "set broker.advertise to the name or address they reach it by",
                registrar.address,
            )
        servers = ";".join(_seen(server, host) for server in registrar.nameservers())
        if servers:
            log.info(
                'clients need this: namesrvAddr=%s (Java: setNamesrvAddr("%s")); they are then told to connect to %s',
                servers,
                servers,
                registrar.address,
            )
        else:
            log.warning("no name server runs here and none is set; clients find topics only through one")

    async def _scan(self) -> None:
        """Notice clients that fell silent, locks that ended and queues nobody waits for; until cancelled."""
        parts = self.parts
        while True:
            await trio.sleep(SCAN_S)
            now = parts.now()
            turns = parts.broker.turns
            await turns.finish(parts.members.expire(now - self._config.client_expiry_s))
            await turns.finish(parts.locks.expire(now))
            parts.parked.sweep()

    def martlet_commands(self) -> Sequence[Command]:
        from .commands import COMMANDS  # here, because a broker that runs needs no client

        return COMMANDS

    def martlet_stopping(self) -> None:
        try:
            trio.from_thread.run_sync(self.stop)
        except RuntimeError:
            # Not called from a thread of trio's, so this is the event loop's own.
            self.stop()

    def stop(self) -> None:
        """Leave the name servers, answer every pull that waits now, and let none wait any more."""
        if self._parts is None:
            return
        if self._registrar is not None:
            self._registrar.stop()
        self._parts.stopping = True
        self._parts.parked.answer_all()
        for context in list(self._parts.contexts):
            finish(context)
            context.peer.wake()

    def martlet_reload(self) -> None:
        """Read the certificates again."""
        self._tls.reload()
        self._dialer.reload()


def _seen(address: str, advertised: str) -> str:
    """*address* as clients reach it: one that listens everywhere is where the broker is."""
    host, port = split_address(address)
    seen = advertised if host in WILDCARDS else host
    return f"[{seen}]:{port}" if ":" in seen else f"{seen}:{port}"


def _store_host(advertised: str, bound: str, port: int) -> bytes:
    """Address and port as records hold them; a name cannot stand there, so the bound address does."""
    for host in (advertised, bound):
        try:
            packed = pack_host(host, port)
        except ValueError:
            continue
        if any(packed[:-4]):
            return packed
    return pack_host(LOOPBACK, port)
