"""Temporary queues and topics: destinations of one connection, where others can send while it lasts.

Their messages are in one platform topic, and the name (tag) of each says whose it is: ``USER/SESSION/KIND/NAME``. Only
the connection itself can subscribe, with ``/temp-queue/NAME``. Others get ``/remote-temp-queue/SESSION/NAME`` as the
``reply-to`` of its messages. The session is a random number, which only appears in these addresses.
"""

from typing import Final, final
from urllib.parse import quote

from martlet.tables.topics import Topics
from martlet_stomp.mapping.destinations import Destination, Kind, is_name
from martlet_stomp.wire.errors import StompError, shown

__all__ = ["Temporary", "is_temporary", "remote_text"]

_REMOTE: Final = {Kind.TEMP_QUEUE: Kind.REMOTE_TEMP_QUEUE, Kind.TEMP_TOPIC: Kind.REMOTE_TEMP_TOPIC}
_KINDS: Final = {
    Kind.TEMP_QUEUE: "queue",
    Kind.TEMP_TOPIC: "topic",
    Kind.REMOTE_TEMP_QUEUE: "queue",
    Kind.REMOTE_TEMP_TOPIC: "topic",
}


def is_temporary(kind: Kind) -> bool:
    """Return whether *kind* is that of a temporary destination, as its owner or as others call it."""
    return kind in _KINDS


def remote_text(session: str, destination: Destination) -> str:
    """Return what others call a temporary *destination* of *session*."""
    return f"{_REMOTE[destination.kind].value}{session}/{quote(destination.name, safe='')}"


@final
class Temporary:
    """The connections that may have temporary destinations, and the ``topic`` for these."""

    def __init__(self, topics: Topics, topic: str) -> None:
        self._topics = topics
        self.topic = topic
        self._users: dict[str, str] = {}  # by session
        self.unanswered = 0  # messages to connections that are gone

    def ensure_topic(self) -> None:
        """Create the topic if there is none. Raises `Refused`."""
        self._topics.ensure(self.topic, 1)

    def check(self, destination: Destination) -> None:
        """Raise `StompError` if *destination* is the topic itself, which has the messages of all connections."""
        if destination.topic == self.topic:
            text = f"is the topic of temporary destinations; use {Kind.TEMP_QUEUE.value}NAME"
            raise StompError(f"destination {shown(destination.text)} {text}")

    def begin(self, session: str, user: str) -> None:
        """Note that a connection is there."""
        self._users[session] = user

    def end(self, session: str) -> None:
        """Note that it is gone."""
        self._users.pop(session, None)

    def tag_of(self, destination: Destination, session: str = "") -> str | None:
        """Return the name of messages to a temporary destination; None if its connection is gone.

        Args:
          session: of the connection that says ``/temp-queue/NAME``; empty if nobody may say so.

        Raises:
          StompError: it is not written as others get it.
        """
        name = quote(destination.name, safe="")
        if destination.kind not in _REMOTE:
            session, slash, name = destination.name.partition("/")
            if not session or not slash or not is_name(name) or "/" in name:
                text = f"destination {shown(destination.text)} is no temporary one; use what a reply-to says"
                raise StompError(text)
        user = self._users.get(session)
        return f"{quote(user, safe='')}/{session}/{_KINDS[destination.kind]}/{name}" if user is not None else None
