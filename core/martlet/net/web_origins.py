"""Which web pages may connect over WebSocket: a browser lets any page do so, and tells its origin."""

from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

__all__ = ["may_connect"]

# Hosts of web pages that this machine serves itself. A page from elsewhere could use a broker that only this machine
# should reach.
LOCAL: Final = frozenset(("localhost", "127.0.0.1", "::1"))


def may_connect(origins: Collection[str], origin: str) -> bool:
    """Return whether a web page of *origin*, empty for none, may connect, if *origins* are allowed (`WebSocket`)."""
    if not origin or "*" in origins or origin in origins:
        return True
    try:
        return urlsplit(origin).hostname in LOCAL
    except ValueError:
        return False
