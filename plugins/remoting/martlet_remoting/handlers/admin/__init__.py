"""Administrative requests of RocketMQ's tools and dashboards."""

from typing import Final

from martlet_remoting.handlers.admin import (
    acls,
    broker,
    clients,
    cold,
    groups,
    plain_access,
    progress,
    resets,
    timers,
    topics,
)
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
    **acls.TABLE,
    **plain_access.TABLE,
}
