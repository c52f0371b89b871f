"""Every error that a plugin or a caller may need to name.

A peer that broke its protocol is `RemoteProtocolError`, ourselves breaking it is
`LocalProtocolError`, and what we will not do is `Refused`. Everything else that
Martlet raises on purpose is a `MartletError` as well, so one except clause
catches all of it.
"""

from collections.abc import Awaitable, Callable
from enum import Enum, unique
from typing import final

__all__ = [
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
    """The configuration cannot be used; the text names the key and says what to write instead."""


@final
class PluginError(MartletError):
    """A plugin is missing, raised, or hung in a cold hook; the text names it."""


class RemoteProtocolError(MartletError):
    """A peer broke its protocol; the server closes its connection and logs this text."""


class LocalProtocolError(MartletError):
    """Martlet, or a plugin, was about to break the protocol: a defect."""


@unique
class Reason(Enum):
    """Why something is refused; each protocol translates it into its own error code."""

    BUSY = "busy"
    CREDENTIALS = "credentials"
    ILLEGAL = "illegal"
    MALFORMED = "malformed"
    NO_PERMISSION = "no permission"
    NO_TOPIC = "no topic"
    NO_GROUP = "no group"
    NOT_FOUND = "not found"
    NOT_SUPPORTED = "not supported"
    PARAMETER = "parameter"
    UNAVAILABLE = "unavailable"


@final
class Refused(MartletError):
    """The broker, or a plugin, refuses a request: ``reason`` is for programs, the text for people.

    ``Refused(Reason.ILLEGAL, "what is wrong; what to do")``.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@final
class NotReady(MartletError):
    """What the answer needs is damaged and is being rebuilt: await ``wait`` and ask again; nothing was changed.

    Nobody gets an answer with less than the log holds instead.
    """

    def __init__(self, text: str, wait: Callable[[], Awaitable[None]]) -> None:
        super().__init__(text)
        self.wait = wait


class StoreError(MartletError):
    """The store cannot do what was asked."""


@final
class StoreLocked(StoreError):
    """Another process has this data directory open."""


@final
class StoreFailed(StoreError):
    """A write or an fsync failed: the store is read-only from now on and the broker stops."""


@final
class CorruptRecord(StoreError):
    """The bytes at a position of the log are not an intact record; *position* says where."""

    def __init__(self, position: int, text: str) -> None:
        super().__init__(f"record at position {position} {text}")
        self.position = position


@final
class OffsetGone(StoreError):
    """The offset was removed by retention; *first* is the oldest left."""

    def __init__(self, offset: int, first: int) -> None:
        super().__init__(f"offset {offset} was removed by retention; the oldest left is {first}")
        self.offset = offset
        self.first = first
