"""All errors that plugins and callers may need to catch.

A client that breaks the protocol causes a `RemoteProtocolError`; code of Martlet that would break it, a
`LocalProtocolError`; a request that the broker refuses, `Refused`. Every error that Martlet raises on purpose is a
`MartletError`, so one except clause catches all.
"""

from collections.abc import Awaitable, Callable
from enum import Enum, unique
from typing import final

__all__ = [
    "AddressUnavailable",
    "ConfigError",
    "CorruptRecord",
    "LocalProtocolError",
    "MartletError",
    "NotReady",
    "OffsetGone",
    "PluginError",
    "Reason",
    "Refused",
    "RemoteProtocolError",
    "StoreError",
    "StoreFailed",
    "StoreLocked",
]


class MartletError(Exception):
    """The base of all errors that Martlet raises on purpose."""


@final
class ConfigError(MartletError):
    """The configuration is invalid; the text names the key and says what to write instead."""


@final
class AddressUnavailable(MartletError):
    """A port cannot be opened now: another process has it, or the machine does not have the address yet."""


@final
class PluginError(MartletError):
    """A plugin is missing, raised an error, or exceeded the time limit of a hook; the text names it."""


class RemoteProtocolError(MartletError):
    """A client broke the protocol; the server closes the connection and logs this text."""


class LocalProtocolError(MartletError):
    """Martlet or a plugin was about to break the protocol: a bug."""


@unique
class Reason(Enum):
    """Why a request is refused; each protocol translates it into its own error code."""

    BUSY = "busy"
    CREDENTIALS = "credentials"
    ENDED = "ended"
    EXPIRED = "expired"
    FENCED = "fenced"
    ILLEGAL = "illegal"
    MALFORMED = "malformed"
    NO_PERMISSION = "no permission"
    NO_TOPIC = "no topic"
    NO_GROUP = "no group"
    NOT_FOUND = "not found"
    NOT_SUPPORTED = "not supported"
    PARAMETER = "parameter"
    QUOTA = "quota"
    UNAVAILABLE = "unavailable"


@final
class Refused(MartletError):
    """The broker or a plugin refuses a request; ``reason`` is for programs, the text for people.

    ``Refused(Reason.ILLEGAL, "what is wrong; what to do")``.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@final
class NotReady(MartletError):
    """Data needed for the answer is damaged and being rebuilt; await ``wait()`` and repeat the request.

    Nothing was changed. Without this error the answer would be incomplete.
    """

    def __init__(self, text: str, wait: Callable[[], Awaitable[None]]) -> None:
        super().__init__(text)
        self.wait = wait


class StoreError(MartletError):
    """The store cannot perform an operation."""


@final
class StoreLocked(StoreError):
    """Another process has this data directory open."""


@final
class StoreFailed(StoreError):
    """A write or an fsync failed: the store accepts no more writes and the broker stops."""


@final
class CorruptRecord(StoreError):
    """The bytes at *position* of the log are not an intact record."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(f"record at position {position} {text}")
        self.position = position


@final
class OffsetGone(StoreError):
    """Retention removed the message at *offset*; *first* is the oldest offset left."""

    def __init__(self, offset: int, first: int) -> None:
        super().__init__(f"offset {offset} was removed by retention; the oldest left is {first}")
        self.offset = offset
        self.first = first
