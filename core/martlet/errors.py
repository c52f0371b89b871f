"""Every error that a plugin or a caller may need to name.

A peer that broke its protocol is `RemoteProtocolError`, ourselves breaking it is
`LocalProtocolError`, and what we will not do is `Refused`. Everything else that
Martlet raises on purpose is a `MartletError` as well, so one except clause
catches all of it.
"""

from enum import Enum, unique
from typing import final

__all__ = [
    "ConfigError",
    "CorruptRecord",
    "LocalProtocolError",
    "MartletError",
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
    """The base of everything that Martlet raises on purpose."""


@final
class ConfigError(MartletError):
    """A configuration cannot be used; the text names the key and what would be right."""


@final
class PluginError(MartletError):
    """A plugin is missing, raised, or hung in a cold hook; the text names it."""


class RemoteProtocolError(MartletError):
    """The peer broke its protocol; its connection is closed with this text."""


class LocalProtocolError(MartletError):
    """We were about to break the protocol; a defect of ours or of a plugin."""


@unique
class Reason(Enum):
    """Why something is refused; each protocol translates it to its own code."""

    BUSY = "busy"
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
    """We will not do it: *reason* for programs, the text for people (what, and what would be right)."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


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
