"""Ends connections because the login of their client ended: it has expired, or somebody ended it.

The client learns the reason in the words of its protocol (`Connection.farewell`). What the end of any connection means
for a protocol holds here as well: a session waits for its client, a will is published, messages go to other consumers.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, TypeAlias, final

import trio

from martlet.contracts import Identity
from martlet.errors import Reason, Refused
from martlet.net.peer import CLOSING, ServerPeer
from martlet.net.rounds import Rounds

__all__ = ["LoggedIn", "Logouts"]

# Time for a client to read its last answers; a client that reads nothing must not keep its messages for longer.
LAST_ANSWERS_S: Final = 0.5
# The wall clock may be set while a login lasts, so it is read again at least this often.
LOOK_S: Final = 60.0

# A client's identity, and what ends its connection.
LoggedIn: TypeAlias = tuple[Identity, Callable[[Refused], None]]


@final
class Logouts:
    """Ends logins; ``expired`` and ``ended`` count connections.

    Args:
      now_ms: the wall clock, by which logins expire.
      cancel_rest: cancels the unfinished request of a peer.
    """

    def __init__(self, rounds: Rounds, now_ms: Callable[[], int], cancel_rest: Callable[[ServerPeer], None]) -> None:
        self._rounds = rounds
        self._now_ms = now_ms
        self._cancel_rest = cancel_rest
        self.expired = 0
        self.ended = 0

    def note_identity(self, peer: ServerPeer) -> None:
        """Set the time of the next look at the expiry of *peer*, whose identity has changed."""
        expires_ms = peer.identity.expires_ms
        left_s = (expires_ms - self._now_ms()) / 1000 if expires_ms else math.inf
        peer.expires_at = trio.current_time() + min(left_s, LOOK_S) if expires_ms else math.inf

    def expire(self, peer: ServerPeer) -> None:
        """End the connection of *peer* if its login has expired by the wall clock; called at ``expires_at``."""
        if self._now_ms() < peer.identity.expires_ms:
            self.note_identity(peer)
            return
        self.expired += 1
        name = peer.identity.name
        self._log_out(peer, Refused(Reason.EXPIRED, f"the login of {name!r} has expired; log in again"))

    def of(self, peers: Iterator[ServerPeer]) -> Iterator[LoggedIn]:
        """Yield the logins of *peers*."""
        for peer in peers:
            if peer.state < CLOSING:
                yield peer.identity, partial(self.end, peer)

    def end(self, peer: ServerPeer, refused: Refused) -> None:
        """End the connection of *peer*, for the reason in *refused*."""
        if peer.state < CLOSING:
            self.ended += 1
            self._log_out(peer, refused)

    def _log_out(self, peer: ServerPeer, refused: Refused) -> None:
        try:
            farewell = peer.connection.farewell(refused)
        except Exception as error:
            peer.fail(error)
            return
        if farewell:
            peer.send(farewell)
        self._rounds.queue_output(peer)
        peer.close(str(refused), LAST_ANSWERS_S)
        self._cancel_rest(peer)
