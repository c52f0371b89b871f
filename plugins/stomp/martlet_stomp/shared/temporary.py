"""Temporary queues and topics: destinations of one connection, to which other clients can send while it lasts.

Their messages are in one platform topic; the name (tag) of a message contains its owner: ``USER/SESSION/KIND/NAME``.
Only the owner, the connection itself, can subscribe, with ``/temp-queue/NAME``. Other clients get
``/remote-temp-queue/SESSION/NAME`` in the ``reply-to`` of its messages. The session is a random number, which appears
only in these addresses.
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
    """Return whether *kind* is a temporary destination, in the form for its owner or for other clients."""
    return kind in _KINDS


def remote_text(session: str, destination: Destination) -> str:
    """Return the text for other clients of a temporary *destination* of *session*."""
    return f"{_REMOTE[destination.kind].value}{session}/{quote(destination.name, safe='')}"


@final
class Temporary:
    """The connections, as owners of temporary destinations, and the ``topic`` of these destinations."""

    def __init__(self, topics: Topics, topic: str) -> None:
        self._topics = topics
        self.topic = topic
        self._users: dict[str, str] = {}  # by session
        self.unanswered = 0  # messages to connections that are gone

    def ensure_topic(self) -> None:
        """Create the topic if it is missing. Raises `Refused`."""
        self._topics.ensure(self.topic, 1)

    def check(self, destination: Destination) -> None:
        """Raise `StompError` if *destination* is the topic itself, which has the messages of all connections."""
        if destination.topic == self.topic:
            text = f"is the topic of temporary destinations; use {Kind.TEMP_QUEUE.value}NAME"
            raise StompError(f"destination {shown(destination.text)} {text}")

    def begin(self, session: str, user: str) -> None:
        """Note that the connection with *session* began."""
        self._users[session] = user

    def end(self, session: str) -> None:
        """Note that the connection with *session* ended."""
        self._users.pop(session, None)

    def tag_of(self, destination: Destination, session: str = "") -> str | None:
        """Return the name (tag) of messages to a temporary destination; None if its connection is gone.

        Args:
          session: the session of the owner, for ``/temp-queue/NAME``; not used for the form for other clients.

        Raises:
          StompError: *destination* does not have the form for other clients.
        """
        name = quote(destination.name, safe="")
        if destination.kind not in _REMOTE:
            session, slash, name = destination.name.partition("/")
            if not session or not slash or not is_name(name) or "/" in name:
                text = f"destination {shown(destination.text)} is no temporary one; use what a reply-to says"
                raise StompError(text)
        user = self._users.get(session)
        return f"{quote(user, safe='')}/{session}/{_KINDS[destination.kind]}/{name}" if user is not None else None
