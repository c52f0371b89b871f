"""``$SYS``: metrics of the broker under Mosquitto's names, published at an interval; never stored in the log."""

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from resource import RUSAGE_SELF, getrusage
from typing import TYPE_CHECKING, Final, NamedTuple, cast, final

import trio

from martlet.contracts import Traffic
from martlet.delivery.routing.route_cache import RouteCache
from martlet.runtime.installed import installed_version
from martlet.runtime.malloc_trim import resident_bytes
from martlet.runtime.steps import Budget, Steps
from martlet_mqtt.mapping.bridges import News
from martlet_mqtt.mapping.frames import Grant
from martlet_mqtt.shared.context import PROTOCOL, Context
from martlet_mqtt.wire.names import is_shared

if TYPE_CHECKING:
    from martlet_mqtt.outbound.outgoing import Metrics, Outgoing

__all__ = ["SYS", "SysTopics", "is_sys"]

SYS: Final = "$SYS/"
PREFIX: Final = "$SYS/broker/"
# Periods of the published averages, in minutes.
MINUTES: Final = (1, 5, 15)


def is_sys(topic_filter: str) -> bool:
    """Return whether *topic_filter* matches only metrics of the broker."""
    return topic_filter.startswith(SYS)


@final
class Load:
    """Exponential moving averages of a counter's growth per minute, one for each of `MINUTES`."""

    def __init__(self) -> None:
        self._count = 0
        self._averages = [0.0] * len(MINUTES)

    def add(self, count: int, interval_s: float) -> list[float]:
        """Update and return the averages; the counter is now at *count*, *interval_s* after the last call."""
        rate = (count - self._count) * 60 / interval_s
        self._count = count
        for index, minutes in enumerate(MINUTES):
            weight = math.exp(-interval_s / (60 * minutes))
            self._averages[index] = rate + weight * (self._averages[index] - rate)
        return self._averages


class Totals(NamedTuple):
    """Sums over all connected clients."""

    dropped: int = 0
    filters: int = 0
    shared: int = 0
    sessions_not_stored: int = 0


@final
class SysTopics:
    """The metrics and their subscribers."""

    def __init__(self, context: Context, traffic: Traffic) -> None:
        self._context = context
        self._traffic = traffic
        self._trie: RouteCache[Outgoing] = RouteCache()
        # For each filter of each client, the number of bridge states published before the subscription.
        self._filters: dict[Outgoing, dict[str, int]] = {}
        self._values: dict[str, bytes] = {}
        self._loads: dict[str, Load] = {}
        self._clients_max = 0
        self._heap_max = 0
        self._began = self._last = 0.0
        self._totals = Totals()

    # subscribers

    def subscribe(self, outgoing: "Outgoing", grant: Grant, *, with_values: bool) -> None:
        """Send future metrics that match *grant*; with *with_values* also the last values, at once."""
        topic_filter = grant.subscription.topic_filter
        self._trie.add(topic_filter, outgoing, grant)
        self._filters.setdefault(outgoing, {}).setdefault(topic_filter, self._context.bridges.published)
        outgoing.metrics.follow(topic_filter)
        if not with_values:
            return
        if not self._values:  # in the first interval after the start
            for _ in self._sum_up():
                pass
            self._values = self._values_now()
        matcher: RouteCache[None] = RouteCache()
        matcher.add(topic_filter, None)
        for name, value in chain(self._values.items(), self._context.bridges):
            if matcher.match(name):
                outgoing.metrics.add(name, value, (grant,), retain=True)

    def unsubscribe(self, outgoing: "Outgoing", topic_filter: str) -> None:
        """Stop sending metrics for *topic_filter*."""
        if self._filters.get(outgoing, {}).pop(topic_filter, None) is not None:
            self._trie.remove(topic_filter, outgoing)

    def forget(self, outgoing: "Outgoing") -> None:
        """Remove all subscriptions of *outgoing*, whose client is gone."""
        for topic_filter in self._filters.pop(outgoing, ()):
            self._trie.remove(topic_filter, outgoing)

    def waiting(self) -> Iterator["Metrics"]:
        """Yield the subscribers, whose permission a change of the rules may end; more may come and go meanwhile."""
        for outgoing in list(self._filters):
            yield outgoing.metrics

    # the metrics

    async def run(self) -> None:
        """Publish changed metrics every ``mqtt.sys_interval_s``, until cancelled."""
        interval_s = self._context.config.sys_interval_s
        self._began = self._last = trio.current_time()
        while True:
            await trio.sleep(interval_s)
            await self._context.broker.turns.finish(self._sum_up())
            before, self._values = self._values, self._values_now()
            changed = {name: value for name, value in self._values.items() if before.get(name) != value}
            await self._context.broker.turns.finish(self._publish(changed))

    async def run_bridges(self) -> None:
        """Publish new states of bridges, until cancelled."""
        while True:
            await self._context.broker.turns.finish(self._publish_news(await self._context.bridges.wait_news()))

    def _publish(self, values: Mapping[str, bytes]) -> Steps[None]:
        """Send *values*, by name, to their subscribers as messages published with RETAIN; in slices."""
        if not len(self._trie):
            return
        budget = Budget()
        for name, value in values.items():
            for outgoing, found in list(self._trie.match(name).items()):
                _send(outgoing, name, value, cast("tuple[Grant, ...]", found))
                if budget.is_over():
                    yield

    def _publish_news(self, news: Mapping[str, News]) -> Steps[None]:
        """Send *news* of bridges, by name, to clients that subscribed before the publication; in slices."""
        budget = Budget()
        for name, each in news.items():
            for outgoing, found in list(self._trie.match(name).items()):
                began, is_own = self._filters.get(outgoing, {}), each.publisher == outgoing.client_id
                grants = tuple(
                    grant
                    for grant in cast("tuple[Grant, ...]", found)
                    if began.get(grant.subscription.topic_filter, each.number) < each.number
                    and not (is_own and grant.subscription.no_local)
                )
                if grants:
                    _send(outgoing, name, each.payload, grants)
                if budget.is_over():
                    yield

    def _sum_up(self) -> Steps[None]:
        """Compute the totals over all clients, in slices."""
        dropped = filters = shared = not_stored = 0
        budget = Budget()
        for client in list(self._context.clients.values()):
            dropped += client.dropped
            not_stored += not client.is_stored
            for topic_filter in client.filters:
                filters += 1
                shared += is_shared(topic_filter)
            if budget.is_over(1 + len(client.filters)):
                yield
        self._totals = Totals(dropped, filters, shared, not_stored)

    def _values_now(self) -> dict[str, bytes]:
        now = trio.current_time()
        interval_s = max(now - self._last, 0.001)
        self._last = now
        return {PREFIX + name: str(value).encode() for name, value in self._metrics(now, interval_s)}

    def _metrics(self, now: float, interval_s: float) -> Iterator[tuple[str, object]]:
        context, counters, traffic = self._context, self._context.counters, self._traffic
        totals, connected = self._totals, len(context.clients)
        total = context.broker.sessions.table.count_of(PROTOCOL) + totals.sessions_not_stored
        packets_sent = counters.delivered + counters.answers
        self._clients_max = max(self._clients_max, connected)
        yield "version", f"martlet version {installed_version()}"
        yield "uptime", f"{now - self._began:.0f} seconds"
        yield "clients/total", total
        yield "clients/maximum", self._clients_max
        for name in "clients/connected", "clients/active":
            yield name, connected
        for name in "clients/disconnected", "clients/inactive":
            yield name, total - connected
        yield "clients/expired", counters.expired_sessions
        yield "messages/received", counters.packets_received
        yield "messages/sent", packets_sent
        yield "publish/messages/received", counters.received
        yield "publish/messages/sent", counters.delivered
        yield "publish/messages/dropped", counters.dropped + totals.dropped
        yield "bytes/received", traffic.bytes_in
        yield "bytes/sent", traffic.bytes_out
        yield "subscriptions/count", totals.filters
        yield "shared_subscriptions/count", totals.shared
        yield "retained messages/count", len(context.retained)
        for name in "messages/stored", "store/messages/count":
            yield name, len(context.retained)
        yield "store/messages/bytes", context.retained.bytes
        heap = resident_bytes()
        # The kernel updates the maximum (ru_maxrss) later than the current value.
        self._heap_max = max(self._heap_max, heap, getrusage(RUSAGE_SELF).ru_maxrss * 1024)
        yield "heap/current", heap
        yield "heap/maximum", self._heap_max
        for name, count in (
            ("messages/received", counters.packets_received),
            ("messages/sent", packets_sent),
            ("publish/received", counters.received),
            ("publish/sent", counters.delivered),
            ("publish/dropped", counters.dropped),
            ("bytes/received", traffic.bytes_in),
            ("bytes/sent", traffic.bytes_out),
            ("connections", counters.connections),
        ):
            averages = self._loads.setdefault(name, Load()).add(count, interval_s)
            for minutes, average in zip(MINUTES, averages, strict=True):
                yield f"load/{name}/{minutes}min", f"{average:.2f}"


def _send(outgoing: "Outgoing", name: str, value: bytes, grants: tuple[Grant, ...]) -> None:
    keeps_retain = any(grant.subscription.retain_as_published for grant in grants)
    outgoing.metrics.add(name, value, grants, retain=keeps_retain)
