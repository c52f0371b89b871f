"""Rules for names of topics and groups (RocketMQ TopicValidator, GroupValidator)."""

import re
from typing import Final

from martlet.errors import Reason, Refused

__all__ = ["check"]

_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


def check(kind: str, name: str, chars_max: int) -> None:
    """Raise `Refused` (PARAMETER) unless *name* is valid for a *kind*, a topic or a group."""
    if not name or name.isspace():
        raise Refused(Reason.PARAMETER, f"The specified {kind} is blank.")
    if not _NAME.fullmatch(name):
        text = f"The specified {kind} {name!r} contains illegal characters, allowing only ^[%|a-zA-Z0-9_-]+$"
        raise Refused(Reason.PARAMETER, text)
    if len(name) > chars_max:
        text = f"The specified {kind} is {len(name)} characters long; the {kind} max length is {chars_max}."
        raise Refused(Reason.PARAMETER, text)
