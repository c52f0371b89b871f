"""The remoting plugin: the port for remoting clients, the VIP port, and the registration with name servers."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final, cast

import trio
from msgspec.structs import replace

from martlet.broker import Broker
from martlet.config import Settings
from martlet.contracts import Handler, Peer, Producers, Protocol, Router, Service, Stage, Subcommand
from martlet.errors import Refused
from martlet.net.addresses import check_address, check_listen, pack_host, show_address, split_address, split_listen
from martlet.net.tls import Tls
from martlet.plugins.hooks import Hooks
from martlet.store.format.light import DISPATCH, light_topics
from martlet.tables.groups import Group, check_group_name
from martlet.tables.topics import READ, RETRY_PREFIX, WRITE
from martlet_remoting.cluster.broker_key import BrokerKey
from martlet_remoting.cluster.registrar import Registrar, create_standard_topics
from martlet_remoting.config import RemotingConfig
from martlet_remoting.dialing import NameServerDialer
from martlet_remoting.handler import RemotingHandler
from martlet_remoting.handlers import bulk, pops
from martlet_remoting.handlers.context import RemotingState
from martlet_remoting.handlers.producers import RemotingProducers
from martlet_remoting.handlers.pull import finish
from martlet_remoting.handlers.replies import take_reply
from martlet_remoting.handlers.unheld import refuse_unheld
from martlet_remoting.handover.revived_pops import RevivedPops
from martlet_remoting.nameserver.server import NameServer
from martlet_remoting.wire.connection import RemotingConnection
from martlet_remoting.wire.routes import TopicQueues

__all__ = ["RemotingPlugin"]

log = logging.getLogger("martlet.remoting")

VIP_DISTANCE: Final = 2  # RocketMQ fastListenPort
SCAN_S: Final = 10.0
LOOPBACK: Final = "127.0.0.1"
WILDCARDS: Final = ("0.0.0.0", "::", "")


class RemotingPlugin(Hooks):
    """Serves RocketMQ remoting clients; `state` is shared by all connections."""

    config_class: ClassVar[type[Settings] | None] = RemotingConfig

    def __init__(self, config: RemotingConfig) -> None:
        super().__init__(config)
        self._config = config
        check_listen("remoting.listen", config.listen)
        for address in config.nameservers:
            check_address("remoting.nameservers", address)
        self._tls = Tls(config, "remoting")
        self._networks = config.port_networks("remoting")
        self._dialer = NameServerDialer(config)
        self._key = BrokerKey(config)
        self._state: RemotingState | None = None
        self._registrar: Registrar | None = None
        self._stopping = False
        self.addresses: dict[str, str] = {}  # the bound addresses of "remoting" and "remoting-vip"

    @property
    def state(self) -> RemotingState:
        """The state shared by all connections; available once there is a broker."""
        assert self._state is not None
        return self._state

    def martlet_capabilities(self, broker: Broker) -> Mapping[type, object]:
        return {Producers: Producers(RemotingProducers(lambda: self._state).check_transaction)}

    def martlet_stages(self, broker: Broker) -> Sequence[Stage]:
        return [refuse_unheld(broker)]

    def martlet_routers(self, broker: Broker) -> Sequence[Router]:
        wants = Router(lambda message: light_topics(message.properties), (DISPATCH,))
        return [wants] if self._config.light_queues else []

    def martlet_protocols(self, broker: Broker) -> Sequence[Protocol]:
        config = self._config
        registrar = self._registrar = Registrar(
            broker,
            config.nameservers,
            config.register_s,
            config.register_timeout_s * 1000,
            self._dialer.connect,
            self._key,
        )
        state = self._state = RemotingState(broker, config, registrar)
        broker.tables.add(state.request_modes.table)
        self._revived = RevivedPops(broker)
        broker.stats.add("remoting", state.statistics)
        create_standard_topics(broker)
        broker.replies.add("", partial(take_reply, broker, state.members, state.templates))
        protocols = [self._protocol("remoting", config.listen, fast=False)]
        addresses = split_listen(config.listen) if config.vip else []
        fast = [show_address(host, port - VIP_DISTANCE) for host, port in addresses if port > VIP_DISTANCE]
        if fast:
            protocols.append(self._protocol("remoting-vip", ",".join(fast), fast=True))
        elif addresses and addresses[0][1] == 0:
            protocols.append(
                replace(self._protocol("remoting-vip", config.listen, fast=True), listen_at=self._find_vip)
            )
        return protocols

    def _find_vip(self) -> str:
        """Return the address of the VIP port; call it once the main port is bound."""
        return _vip_of(self.addresses["remoting"])

    def _protocol(self, name: str, listen: str, *, fast: bool) -> Protocol:
        config, state = self._config, self.state

        def connect(now: float) -> RemotingConnection:
            return RemotingConnection(config.frame_bytes_max, config.idle_s, now, "remoting.frame_bytes_max")

        def handle(peer: Peer, connection: Any) -> Handler:
            remoting = cast(RemotingConnection, connection)
            remoting.send = peer.send
            return RemotingHandler(state, peer, remoting, fast=fast)

        def bound(address: str) -> None:
            self.addresses[name] = address
            if not fast:
                self._announce(address)

        tls = self._tls
        return Protocol(
            name,
            listen,
            connect,
            handle,
            tls.context,
            tls.required,
            bound,
            optional=fast,
            make_tls=tls.make,
            certificate_end_ms=tls.certificate_end_ms,
            networks=self._networks,
        )

    def _announce(self, address: str) -> None:
        """Set *address* of the bound port as the store host of records, and register it with the name servers."""
        state = self.state
        host, port = split_address(address)
        state.set_store_host(_store_host(state.broker.config.advertise or host, host, port))
        assert self._registrar is not None
        self._registrar.bound(address)
        inside = state.broker.capability(NameServer)
        if inside is not None:
            inside.planned = self._planned_queues

    def _planned_queues(self, topic: str) -> TopicQueues | None:
        """Return the queues that the retry topic *topic* will have; None if the next heartbeat will not create it.

        Creates no topic: a name server does not know its requester, and tools request deleted and mistyped names too.
        """
        name, broker = topic.removeprefix(RETRY_PREFIX), self.state.broker
        if name == topic or self._stopping:
            return None
        policy = broker.groups.get(name)
        if policy is None and broker.groups.auto_create:
            try:
                check_group_name(name)
            except Refused:
                return None
            policy = Group(name)
        if policy is None or policy.retry_queue_nums <= 0:
            return None
        return TopicQueues(broker.config.name, policy.retry_queue_nums, policy.retry_queue_nums, READ | WRITE)

    def martlet_services(self, broker: Broker) -> Sequence[Service]:
        assert self._registrar is not None
        state = self.state
        runs = state.timeouts.run, state.parked.run, state.members.run, state.rates.run
        return [self._revived.run, self._introduce, self._scan, self._registrar.run, *runs]

    async def _introduce(self) -> None:
        """Log the setting that clients need, and the broker address that the name server will return to them."""
        registrar = self._registrar
        assert registrar is not None
        host, _ = split_address(registrar.address)
        if host in WILDCARDS:
            log.warning(
                "clients get the address %s, which works only on this machine; "
                "set broker.advertise to a host name or address that clients can reach",
                registrar.address,
            )
        servers = ";".join(_client_address(server, host) for server in registrar.nameservers())
        if servers:
            log.info(
                'clients need this setting: namesrvAddr=%s (Java: setNamesrvAddr("%s")); they then connect to %s',
                servers,
                servers,
                registrar.address,
            )
        else:
            log.warning("no name server is enabled or configured; without one, clients cannot find topics")

    async def _scan(self) -> None:
        """Regularly remove silent clients, expired locks and unused watches of queues, until cancelled."""
        state = self.state
        while True:
            await trio.sleep(SCAN_S)
            now = state.now()
            turns = state.broker.turns
            await turns.finish(state.members.expire(now - self._config.client_expiry_s))
            await turns.finish(state.locks.expire(now))
            state.parked.sweep()
            state.pops.sweep()
            state.bulk_reads.sweep()

    def martlet_commands(self) -> Sequence[Subcommand]:
        from martlet_remoting.commands import (
            COMMANDS,  # imported here, because a running broker does not need the client
        )

        return COMMANDS

    def martlet_stopping(self) -> None:
        trio.from_thread.run_sync(self.stop)

    def stop(self) -> None:
        """Unregister from the name servers, answer all waiting pulls and pops, and hold no more."""
        if self._state is None:
            return
        if self._registrar is not None:
            self._registrar.stop()
        self._stopping = True
        self._state.parked.answer_all()
        self._state.pops.answer_all()
        self._state.bulk_reads.stop()
        for context in list(self._state.contexts):
            finish(context)
            pops.finish(context)
            bulk.finish(context)
            context.peer.wake()

    def martlet_reload(self) -> None:
        """Reload the certificates and the secret for name servers, and try again where registration failed."""
        self._tls.reload()
        self._dialer.reload()
        self._key.reload()
        if self._registrar is not None:
            trio.from_thread.run_sync(self._registrar.retry)


def _client_address(address: str, advertised: str) -> str:
    """Return *address* for clients: a wildcard is replaced by the host in *advertised*."""
    host, port = split_address(address)
    seen = advertised if host in WILDCARDS else host
    return f"[{seen}]:{port}" if ":" in seen else f"{seen}:{port}"


def _vip_of(address: str) -> str:
    host, port = split_address(address)
    return show_address(host, port - VIP_DISTANCE)


def _store_host(advertised: str, bound: str, port: int) -> bytes:
    """Return address and port in the format of records; a host name cannot be stored, so the bound address is used."""
    for host in (advertised, bound):
        try:
            packed = pack_host(host, port)
        except OSError:
            continue
        if any(packed[:-4]):
            return packed
    return pack_host(LOOPBACK, port)
