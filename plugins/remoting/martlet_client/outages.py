"""Logs an outage of a server once, and its end once, however many requests fail in between."""

import logging
from typing import Final, final

import trio

from martlet_remoting.wire.answers.errors import ClientError, ConnectionLost, NameServerUnreachable, RequestTimeout

__all__ = ["Outages", "level_of"]

log = logging.getLogger(__name__)

# Errors that are reported as outages of a server.
OUTAGES: Final = (ConnectionLost, RequestTimeout, NameServerUnreachable)


def level_of(error: ClientError) -> int:
    """Return the level at which to log what failed by *error*: an outage was reported already."""
    return logging.DEBUG if isinstance(error, OUTAGES) else logging.WARNING


@final
class Outages:
    """The servers that do not answer, by address, and since when."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def failed(self, server: str, address: str, error: ClientError) -> None:
        """Note that a request to *address* failed; *server* are the words for it."""
        if address not in self._since:
            self._since[address] = trio.current_time()
            log.warning("%s %s does not answer, trying again: %s", server, address, error)

    def answered(self, server: str, address: str) -> None:
        """Note that *address* has answered."""
        since = self._since.pop(address, None)
        if since is not None:
            log.warning("%s %s answers again after %.1f s", server, address, trio.current_time() - since)
