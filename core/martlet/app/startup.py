"""The order of startup and shutdown.

Startup: load plugins, open the store (lock, recovery), load tables, call hooks, replay projections, bind ports,
start services, print the ready line.
Shutdown: accept no new connections, let plugins say goodbye, send pending answers, write snapshots, tables and log
to disk, release the lock. A second signal exits immediately.
"""

import logging
import os
import random
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, final

import trio

from martlet.access import Authentication
from martlet.app import saving
from martlet.app.config import Config
from martlet.app.hooks import cold_tier_of, install, require_cold_tier, resolve
from martlet.app.services import run_services
from martlet.broker import OWN_STATE, Broker
from martlet.contracts import Dispatcher, Protocol
from martlet.errors import AddressUnavailable, ConfigError, MartletError, PluginError, StoreError
from martlet.net.addresses import is_loopback, show_address
from martlet.net.certificates.expiry import certificate_days, watch_certificates
from martlet.net.server import Server
from martlet.plugins.loader import (
    Plugins,
    load,
)
from martlet.runtime.clock import Clock, SystemClock
from martlet.runtime.ids import Ids
from martlet.runtime.native import use_kernel
from martlet.runtime.stats import Stats
from martlet.store import ColdTier, Disk, RealDisk, Store
from martlet.store.format.tags import guarded_dispatcher
from martlet.tables.groups import Groups
from martlet.tables.topics import Topics

__all__ = ["build", "dispatchers_of", "notify_systemd", "run", "warn_of_open_ports"]

log = logging.getLogger("martlet")

STOP_TIMEOUT_S: Final = 10.0
EXPIRY_TIMEOUT_S: Final = 5.0  # limit for expiring messages that became old while the broker was stopped
GOODBYE_TIMEOUT_S: Final = 4.0  # limit for each plugin, so that pending answers are still sent if one hangs


async def run(
    config: Config,
    *,
    ready: Callable[[dict[str, str]], None],
    report: Callable[[int, int, int], None] | None = None,
    clock: Clock | None = None,
    disk: Disk | None = None,
    stop: trio.Event | None = None,
) -> bool:
    """Run a broker until *stop* is set or a signal arrives, then shut it down cleanly.

    Once all ports accept connections, call *ready* with the bound addresses by protocol name.
    Return False, and log a warning, if the disk was too full for the last checkpoint.

    Raises:
      MartletError: the broker cannot start, its store failed, or the disk was too full for the last changes of tables.
    """
    clock = clock or SystemClock()
    use_kernel(config.broker.native)
    plugins = load(config.plugins.enabled, config.plugin_tables, config.plugins.required)
    stop = trio.Event() if stop is None else stop
    opening = trio.CancelScope()
    in_order = True
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(_heed_signals, stop, opening, plugins)
            with opening:
                store = await _open_store(config, await dispatchers_of(plugins), clock, disk or RealDisk(), report)
            if not opening.cancelled_caught:
                try:
                    await _run_with_store(config, plugins, store, clock, ready, stop)
                finally:
                    with trio.CancelScope(shield=True):
                        in_order = await store.close()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _innermost_error(group) from None
    return in_order


async def dispatchers_of(plugins: Plugins) -> dict[str, Dispatcher]:
    """Return the dispatchers of all plugins by topic; they compute the tag codes of queue entries.

    Raises:
      PluginError: two plugins have a dispatcher for the same topic.
    """
    by_topic: dict[str, tuple[str, Dispatcher]] = {}
    for name, dispatchers in await plugins.call("martlet_dispatchers"):
        for topic, dispatch in dispatchers.items():
            if topic in by_topic:
                text = f"plugin {by_topic[topic][0]!r} already does; enable only one of them"
                raise PluginError(f"plugin {name!r} cannot dispatch topic {topic!r}; {text}")
            by_topic[topic] = name, guarded_dispatcher(name, topic, dispatch)
    return {topic: dispatch for topic, (_, dispatch) in by_topic.items()}


async def _open_store(
    config: Config,
    dispatchers: Mapping[str, Dispatcher],
    clock: Clock,
    disk: Disk,
    report: Callable[[int, int, int], None] | None,
) -> Store:
    with _name_disk_errors(config.data):
        return await Store.open(config.data, config.store, clock, disk, report, dispatchers)


@contextmanager
def _name_disk_errors(data: Path) -> Iterator[None]:
    """Turn an OSError into a StoreError that names the data directory."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.filename is not None and str(error.filename) != str(data):
            reason = f"{reason}: {str(error.filename)!r}"
        raise StoreError(f"data directory {str(data)!r} cannot be used; {reason}") from error


def _innermost_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error inside nested groups of one error each; a group if there are several errors."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def _run_with_store(
    config: Config,
    plugins: Plugins,
    store: Store,
    clock: Clock,
    ready: Callable[[dict[str, str]], None],
    stop: trio.Event,
) -> None:
    """Run until *stop*.

    Raises:
      StoreError: the last changes of a table could not be written to a full disk.
    """
    stats = Stats()
    with _name_disk_errors(config.data):
        broker = build(config, store, clock, stats)
    stats.add("store", lambda: store.statistics().as_dict())
    stats.add("plugins", lambda: {"failed": dict(plugins.failed), "loaded": [p.name for p in plugins]})
    results = await resolve(plugins, broker)
    for name, projections in results["martlet_projections"]:
        for projection in projections:
            broker.projections.add(name, projection)
    tier = _take_cold_tier(store, results)
    plugins.reloaded += (broker.authentication.changed, broker.rules.changed)
    authenticate, now_ms = broker.authentication.authenticate, clock.now_ms
    server = Server(config.server, store, stats, authenticate, broker.turns, now_ms=now_ms)
    broker.revocation.logins.append(server.logins)
    live_plugins = _Live(plugins, broker, server, results)
    async with trio.open_nursery() as nursery:
        await nursery.start(store.upkeep.run)
        if await _replay(broker, stop, tier):
            live_plugins.check()
            with trio.move_on_after(EXPIRY_TIMEOUT_S):  # the rest expires while the broker runs
                await store.upkeep.topic_retention.sweep()
            bound = live_plugins.bind()
            # Topics that a hook created must survive a crash with the same queues.
            with _name_disk_errors(config.data):
                problem = saving.save(broker)
            if problem:
                log.error("%s; tried again", problem)
            await live_plugins.start_services(nursery, stop)
            await nursery.start(server.run, [*bound.items()])
            stats.add("certificates", partial(certificate_days, bound, clock))
            nursery.start_soon(watch_certificates, bound, clock)
            nursery.start_soon(broker.tails.run)
            nursery.start_soon(broker.cursors.run)
            nursery.start_soon(broker.revocation.run)
            nursery.start_soon(broker.shared_groups.run)
            nursery.start_soon(broker.sessions.expiry.run)
            nursery.start_soon(broker.draining.run)
            nursery.start_soon(saving.run, broker)
            nursery.start_soon(broker.projections.run)
            ready({protocol.name: ",".join(map(_address, listeners)) for protocol, listeners in bound.items()})
            if any(protocol.websocket is not None for protocol in bound):
                # Before the first client needs it, but not before the ports are ready, because it takes 40 ms.
                nursery.start_soon(trio.to_thread.run_sync, partial(import_module, "martlet.net.opening.websocket"))
            await live_plugins.wait_stop(stop)
            with trio.move_on_after(STOP_TIMEOUT_S):
                await _say_goodbye(plugins, server)
        nursery.cancel_scope.cancel()
    broker.projections.save()
    with _name_disk_errors(config.data):
        problem = saving.save(broker)
    live_plugins.check()
    if problem:
        text = f"data directory {str(config.data)!r} is on a full disk; the last changes are lost: {problem}"
        raise StoreError(f"{text}; free some space before the next start")


def _take_cold_tier(store: Store, results: dict[str, list[tuple[str, Any]]]) -> tuple[str, ColdTier] | None:
    """Return the cold tier of the plugins, which *store* uses from now on; None without one."""
    tier = cold_tier_of(results)
    if tier is None:
        require_cold_tier(store)
    else:
        store.use_cold_tier(tier[1])
    return tier


async def _replay(broker: Broker, stop: trio.Event, tier: tuple[str, ColdTier] | None) -> bool:
    """Begin the cold tier and replay the projections; return False if the broker was stopped before the end.

    Raises:
      PluginError: the tier cannot begin.
    """
    async with trio.open_nursery() as nursery:

        async def give_up() -> None:
            await stop.wait()
            nursery.cancel_scope.cancel()

        nursery.start_soon(give_up)
        if tier is not None:
            await _begin_tier(*tier)
        await broker.projections.replay()
        nursery.cancel_scope.cancel()
    return not stop.is_set()


async def _begin_tier(plugin: str, tier: ColdTier) -> None:
    try:
        await tier.begin()
    except Exception as error:
        text = str(error) if isinstance(error, MartletError) else f"{type(error).__name__}: {error}"
        raise PluginError(f"plugin {plugin!r} cannot begin its cold tier; {text}") from error


@final
class _Live:
    """The hook results of a running broker's plugins, so that one plugin can be stopped without the others."""

    def __init__(
        self, plugins: Plugins, broker: Broker, server: Server, results: dict[str, list[tuple[str, Any]]]
    ) -> None:
        self._plugins = plugins
        self._broker = broker
        self._server = server
        self._results = results
        self._bound: dict[Protocol, list[socket.socket]] = {}
        self._scopes: dict[str, trio.CancelScope] = {}
        self._failed: MartletError | None = None
        self._has_failed = trio.Event()
        broker.projections.on_failed = self.stop_plugin

    def bind(self) -> dict[Protocol, list[socket.socket]]:
        """Bind every protocol; return the sockets of those that were bound."""
        for _, protocols in self._results["martlet_protocols"]:
            for protocol in protocols:
                listeners = _bind(self._server, protocol)
                if listeners:
                    self._bound[protocol] = listeners
        warn_of_open_ports(self._broker.authentication, self._bound)
        return self._bound

    async def start_services(self, nursery: trio.Nursery, stop: trio.Event) -> None:
        """Start all services; return when those that report readiness are ready, or when *stop* is set.

        Raises:
          PluginError: a service failed before it was ready.
        """
        ready_events: list[trio.Event] = []
        for name, services_given in self._results["martlet_services"]:
            scope, services = trio.CancelScope(), [(service, trio.Event()) for service in services_given]
            self._scopes[name] = scope
            ready_events += [is_ready for _, is_ready in services]
            nursery.start_soon(run_services, name, services, scope)
        async with trio.open_nursery() as until_stop:
            until_stop.start_soon(_cancel_when, stop, until_stop.cancel_scope)
            for is_ready in ready_events:
                await is_ready.wait()
            until_stop.cancel_scope.cancel()

    def stop_plugin(self, name: str, error: Exception) -> None:
        """Stop plugin *name*: close its ports, cancel its services, remove its hooks' results.

        If the plugin is required, or stands for the broker's own state, the broker stops.
        """
        if name == OWN_STATE:
            self._stop(StoreError(f"the broker's own state cannot be computed from the log; {error}"))
            return
        guards = self._plugins.take_out(name)
        for protocol in self._results_of(name, "martlet_protocols"):
            listeners = self._bound.pop(protocol, None)
            if listeners is not None:
                for listener in listeners:
                    self._server.stop_accepting(listener)
                self._server.close_peers(f"plugin {name!r} has failed", protocol)
        if name in self._scopes:
            self._scopes[name].cancel()
        self._results = {hook: [pair for pair in pairs if pair[0] != name] for hook, pairs in self._results.items()}
        try:
            self._plugins.leave_out(name, "failed in a projection", error, guards=guards)
        except PluginError as required:
            self._stop(required)
            return  # the plugin's guards stay installed until the broker has stopped
        install(self._broker, self._results)

    def _stop(self, error: MartletError) -> None:
        """Stop the broker because of *error*."""
        self._failed = error
        self._has_failed.set()

    def _results_of(self, name: str, hook: str) -> list[Any]:
        return [each for plugin, results in self._results[hook] if plugin == name for each in results]

    async def wait_stop(self, stop: trio.Event) -> None:
        """Return when *stop* is set or a required plugin has failed."""
        async with trio.open_nursery() as nursery:

            async def give_up() -> None:
                await self._has_failed.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(give_up)
            await stop.wait()
            nursery.cancel_scope.cancel()

    def check(self) -> None:
        """Raise the error for which the broker stopped, if a projection caused it."""
        if self._failed is not None:
            raise self._failed


def warn_of_open_ports(authentication: Authentication, bound: Mapping[Protocol, Sequence[socket.socket]]) -> None:
    """Warn of ports that anybody in the network can use, because no plugin authenticates clients."""
    if authentication.authenticators or authentication.mechanisms:
        return
    for protocol, listeners in bound.items():
        context = protocol.tls() if protocol.tls_required else None
        if context is not None and context.verify_mode is ssl.CERT_REQUIRED:
            continue
        if addresses := [_address(each) for each in listeners if not is_loopback(each.getsockname()[0])]:
            text = "%s at %s is open to the network, and no plugin checks who connects: anybody who reaches it can "
            text += "read, publish and delete; enable a plugin with users, or listen on 127.0.0.1"
            log.warning(text, protocol.name, " and ".join(addresses))


def _bind(server: Server, protocol: Protocol) -> list[socket.socket]:
    """Bind *protocol*; return its sockets, none if it is optional and cannot be bound."""
    try:
        return server.bind(protocol)
    except (AddressUnavailable, ConfigError) as error:
        if not protocol.optional:
            raise
        # This port number only follows from another, free one; nobody has chosen it.
        level = logging.WARNING if protocol.listen_at is None else logging.INFO
        log.log(level, "%s; the broker continues without this port", error)
        return []


def build(config: Config, store: Store, clock: Clock, stats: Stats, source: random.Random | None = None) -> Broker:
    """Return a broker on *store* with its tables loaded and no plugins installed.

    *source* makes its identifiers repeatable, for simulations; without it they cannot be predicted.
    """
    settings = config.broker
    topics = Topics(
        store, clock, auto_create=settings.auto_create_topics, auto_create_queues=settings.auto_create_queues
    )
    groups = Groups(clock, auto_create=settings.auto_create_groups, offsets_max=settings.offsets_max)
    broker = Broker(settings, store, topics, groups, clock, Ids(source), stats, config.delivery)
    saving.load(broker)
    return broker


async def _cancel_when(event: trio.Event, scope: trio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def _heed_signals(
    stop: trio.Event,
    opening: trio.CancelScope,
    plugins: Plugins,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Shut down cleanly at the first SIGTERM or SIGINT, exit immediately at the second; reload at SIGHUP."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                log.info("SIGHUP; reloading certificates and plugins")
                await plugins.tell("martlet_reload")
                for tell in plugins.reloaded:
                    tell()
                continue
            if stop.is_set():
                log.warning("second signal; exiting immediately")
                os._exit(128 + number)
            log.info("%s; stopping", signal.Signals(number).name)
            stop.set()
            opening.cancel()


async def _say_goodbye(plugins: Plugins, server: Server) -> None:
    server.stop_accepting()
    await plugins.tell("martlet_stopping", GOODBYE_TIMEOUT_S)
    server.close_peers("broker is shutting down")
    await server.wait_idle()


def _address(listener: socket.socket) -> str:
    return show_address(*listener.getsockname()[:2])


def notify_systemd(state: str, environment: Mapping[str, str]) -> None:
    """Send *state* to systemd (sd_notify(3)) if it supervises this process."""
    path = environment.get("NOTIFY_SOCKET")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
