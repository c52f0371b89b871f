"""Rules for names of topics and groups (RocketMQ TopicValidator, GroupValidator)."""

import re
from typing import Final

from martlet.errors import Reason, Refused

__all__ = ["GROUPS_MAX", "check", "check_group_name"]

# Each group may have a retry topic, which counts towards the limit of topics.
GROUPS_MAX: Final = 40_000
GROUP_CHARS_MAX: Final = 120  # RocketMQ 5.x TopicValidator/GroupValidator

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


def check_group_name(name: str) -> None:
    """Raise `Refused` (PARAMETER) unless *name* is a valid group name."""
    check("group", name, GROUP_CHARS_MAX)
