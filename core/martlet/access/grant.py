"""What a request may use once it was allowed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from martlet.message import Message, Placed
from martlet.store import Store
from martlet.tables.groups import Groups
from martlet.tables.topics import Topics

__all__ = ["Grant", "PublishGrant"]


@final
@dataclass(frozen=True, slots=True)
class Grant:
    """The log and the tables, for a request that was allowed; keep it no longer than that request."""

    store: Store
    topics: Topics
    groups: Groups


@final
@dataclass(frozen=True, slots=True)
class PublishGrant:
    """The log and the tables, for messages to one topic; ``publish`` stores one, without another look-up."""

    store: Store
    topics: Topics
    groups: Groups
    publish: Callable[[Message], Placed]
