"""Errors of the client, each with the fields that a caller needs to react."""

from collections.abc import Iterator, Sequence
from typing import final

from martlet.errors import MartletError
from martlet_remoting.wire.codes import REQUEST_NAMES, RESPONSE_NAMES
from martlet_remoting.wire.packets import MessageQueue

__all__ = [
    "Attempt",
    "BadAddress",
    "BadAnswer",
    "BrokerError",
    "ClientClosed",
    "ClientError",
    "ConnectionLost",
    "MessageNotFound",
    "MessageRefused",
    "NameServerUnreachable",
    "NoReply",
    "RequestTimeout",
    "RouteNotFound",
    "SendFailed",
]


class ClientError(MartletError):
    """The base of all errors of the client, except TypeError and ValueError for wrong arguments."""


@final
class BrokerError(ClientError):
    """A broker or name server answered with an error: ``code``, ``remark`` and ``address``."""

    def __init__(self, code: int, remark: str, address: str) -> None:
        name = RESPONSE_NAMES.get(code, "unknown code")
        super().__init__(f"{address} answered {code} ({name}): {remark or 'no remark'}")
        self.code = code
        self.remark = remark
        self.address = address


@final
class BadAddress(ClientError, ValueError):
    """The address of a name server or broker is not ``host:port``; the text shows it. Also a `ValueError`."""


@final
class BadAnswer(ClientError):
    """A broker or name server sent a malformed answer; the text names the malformed part."""


@final
class ConnectionLost(ClientError):
    """A connection could not be opened, or ended before the answer arrived."""

    def __init__(self, address: str, text: str) -> None:
        super().__init__(f"connection to {address} {text}")
        self.address = address
        self.why = text

    @property
    def was_not_opened(self) -> bool:
        """Whether the connection could not be opened, so that nothing was sent."""
        return self.why.startswith(("cannot be opened", "was not opened"))


@final
class RequestTimeout(ClientError):
    """No answer arrived in time; you cannot know whether the request was executed."""

    def __init__(self, address: str, code: int, seconds: float) -> None:
        name = REQUEST_NAMES.get(code, "unknown")
        super().__init__(f"{address} did not answer request {code} ({name}) within {seconds:.3g} s")
        self.address = address


@final
class NameServerUnreachable(ClientError):
    """No name server answered; the text has the reason for each."""


@final
class RouteNotFound(ClientError):
    """No name server knows the topic, or none of its brokers can be used."""

    def __init__(self, topic: str, text: str) -> None:
        super().__init__(f"topic {topic!r} {text}")
        self.topic = topic


@final
class MessageRefused(ClientError):
    """A message, or the name of a topic or group, is not valid; nothing was sent."""


@final
class MessageNotFound(ClientError):
    """No broker has the message."""


@final
class NoReply(ClientError):
    """A request was stored, but no reply arrived in time; a consumer may still receive and answer it."""

    def __init__(self, topic: str, message_id: str, seconds: float) -> None:
        super().__init__(f"request {message_id} for topic {topic!r} got no reply within {seconds:.3g} s")
        self.topic = topic
        self.message_id = message_id


@final
class ClientClosed(ClientError):
    """The client is not open: the call came before or after its ``with`` block."""


@final
class Attempt:
    """One attempt to send: its target ``queue``, and the ``error`` that ended it."""

    __slots__ = ("error", "queue")

    def __init__(self, queue: MessageQueue, error: ClientError) -> None:
        self.queue = queue
        self.error = error

    def __repr__(self) -> str:
        return f"{self.queue.broker_name}/{self.queue.queue_id}: {self.error}"


@final
class SendFailed(ClientError):
    """No attempt to send a message succeeded; ``attempts`` has all of them, and the cause is the last one's error."""

    def __init__(self, topic: str, attempts: tuple[Attempt, ...]) -> None:
        tried = "; ".join(_summaries(attempts)) or "the time was up before the first"
        number = "1 attempt" if len(attempts) == 1 else f"{len(attempts)} attempts"
        super().__init__(f"message for topic {topic!r} was not sent after {number}: {tried}")
        self.topic = topic
        self.attempts = attempts


def _summaries(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield each reason for failure once, with the brokers that gave it."""
    brokers: dict[str, list[str]] = {}
    for attempt in attempts:
        brokers.setdefault(str(attempt.error), []).append(attempt.queue.broker_name)
    for text, names in brokers.items():
        yield f"{', '.join(dict.fromkeys(names))}: {text}"
