"""Administration: what RocketMQ's tools and dashboards ask a broker."""

from typing import Final

from martlet_remoting.context import Handle
from martlet_remoting.permission import check_read

from . import broker, clients, groups, resets, statistics, topics

__all__ = ["TABLE"]

_HANDLES: Final[dict[int, Handle]] = {
    **topics.TABLE,
    **groups.TABLE,
    **statistics.TABLE,
    **clients.TABLE,
    **resets.TABLE,
    **broker.TABLE,
}
TABLE: Final[dict[int, Handle]] = {code: check_read(code, handle) for code, handle in _HANDLES.items()}
