"""Which web pages may connect over WebSocket: a browser lets any page do so, and tells its origin."""

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

__all__ = ["may_connect"]

# Hosts of web pages that this machine serves itself. A page from elsewhere could use a broker that only this machine
# should reach.
LOCAL: Final = frozenset(("localhost", "127.0.0.1", "::1"))


def may_connect(origins: Collection[str], origin: str, host: str = "") -> bool:
    """Return whether a web page of *origin* may connect if *origins* are allowed (`WebSocket`).

    Args:
      origin: empty for a client that is no browser.
      host: how the client calls the broker, from the header Host. A page of the same host is no foreign one, whatever
        the ports: a web server beside the broker, or in front of it.
    """
    if not origin or "*" in origins or origin in origins:
        return True
    page = _host_of(origin)
    return page in LOCAL or (page != "" and page == _host_of(f"//{host}"))


def _host_of(url: str) -> str:
    """Return the host in *url*, in lower case; empty if there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
