"""Stages and routers of messages on their way to the log, and predicates that select messages for consumers."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from msgspec import Struct

from martlet.message import Message
from martlet.records.layout import Predicate

__all__ = ["Compile", "Router", "Stage"]

# Makes a predicate over records from an expression; raises `Refused` (Reason.ILLEGAL), whose text locates the mistake.
Compile: TypeAlias = Callable[[str], Predicate]


class Stage(Struct, frozen=True):
    """A step that messages pass before they are stored; declare which messages it wants, so that others stay fast.

    Args:
      change: called with a message that the stage wants; returns it, changed or not. May raise `Refused`.
      properties: the stage wants messages that have one of these properties, with a value.
      sys_flag: the stage also wants messages with one of these bits of sysFlag. A stage with neither wants every
        message; then the messages of a socket read are stored one by one.
    """

    change: Callable[[Message], Message]
    properties: tuple[str, ...] = ()
    sys_flag: int = 0


class Router(Struct, frozen=True):
    """Names the light queues that index a message as well; declare which messages it wants, so that others stay fast.

    Args:
      names: called with a message that the router wants, after the stages; returns light topics, such as ``%LMQ%name``.
        May raise `Refused`.
      properties: the router wants messages that have one of these properties, with a value.
      sys_flag: the router also wants messages with one of these bits of sysFlag. A router with neither wants every
        message; then the messages of a socket read are stored one by one.
    """

    names: Callable[[Message], Iterable[str]]
    properties: tuple[str, ...] = ()
    sys_flag: int = 0
