"""Administrative requests of RocketMQ's tools and dashboards."""

from typing import Final

from martlet_remoting.handlers.admin import broker, clients, cold, groups, progress, resets, timers, topics
from martlet_remoting.handlers.context import Handle

__all__ = ["TABLE"]

TABLE: Final[dict[int, Handle]] = {
    **topics.TABLE,
    **groups.TABLE,
    **progress.TABLE,
    **clients.TABLE,
    **resets.TABLE,
    **broker.TABLE,
    **cold.TABLE,
    **timers.TABLE,
}
